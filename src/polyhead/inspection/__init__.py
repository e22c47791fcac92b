"""Seeing attention.

``probe``: weights and statistics of a running model. ``heads``: which heads look from one word to
another. ``trace``: one layer step by step. ``page``: all heads in a browser.
"""
