"""Corpora that recipes name."""

from collections.abc import Callable

from polyhead.training.corpora.bible import bible
from polyhead.training.corpora.corpus import Corpus, Pair
from polyhead.training.corpora.numbers import numbers

__all__ = ["CORPORA", "Corpus", "Pair"]

CORPORA: dict[str, Callable[[], Corpus]] = {"numbers": numbers, "bible": bible}
"""The corpora by their names in recipes."""
