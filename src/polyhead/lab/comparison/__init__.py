"""Head layouts compared by training: the same decoder with each, at equal parameters and tokens.

Read in this order: ``variants``, ``runs``, ``experiment``, ``statistics``, ``measure``, ``report``;
``heads`` asks how many heads there should be.
"""
