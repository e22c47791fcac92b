"""Many callers on one model.

Read in this order: ``requests``, ``engine``, ``grammars``, then ``http``.
"""
