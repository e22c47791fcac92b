"""Heads taken out of a running model, replaced by another text's, or cut from its weights."""
