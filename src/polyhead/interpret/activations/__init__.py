"""The activations of a running model by name: saved, changed, put in the place of others.

``trace`` opens a block in which they are named; ``points`` lists the names; ``lens`` has the forms
of TransformerLens. The model runs as it is: what is not named costs nothing.
"""
