"""What runs on the GPU, in Triton's language; imported when a kernel is first launched.

Read in this order: ``scores``, ``forward``, ``merge``, ``backward``.
"""
