"""Numbers in German and English words; German says the ones before the tens.

siebenundachtzig    eighty-seven
"""

from __future__ import annotations

import random

from polyhead._utils.checks import needed
from polyhead.training.corpora.corpus import Corpus, Pair

MOST = 1_000_000
HELD_OUT = 300
_TRAINING = 30_000
_SMALL, _OFTEN = 100, 20
"""Repetitions of small numbers: there are few of them, and their words are in all others."""


def numbers(seed: int = 0) -> Corpus:
    """Numbers below a million, drawn alike by their count of digits; 300 are held out.

    Raises:
        InputError: The package num2words is not installed.
    """
    words = needed("num2words", "polyhead[train]").num2words
    drawn = random.Random(seed)
    found: dict[int, None] = {}
    while len(found) < HELD_OUT + _TRAINING:
        digits = drawn.choice((2, 3, 4, 5, 5, 6, 6, 6))
        found[drawn.randrange(10, min(10**digits, MOST))] = None
    pairs = [
        (n, Pair(words(n, lang="de"), words(n, lang="en"), f"number {n}"))
        for n in (*found, *range(10))
    ]
    training = [pair for n, pair in pairs[HELD_OUT:] for _ in range(_OFTEN if n < _SMALL else 1)]
    return Corpus(training, [pair for _, pair in pairs[:HELD_OUT]])
