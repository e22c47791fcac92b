"""Seeing attention: ``probe`` (weights and statistics of a running model), ``heads`` (which head
looks from one word to another), ``trace`` (one layer step by step), ``page`` (all heads in a browser).
"""
