"""Numbers in German words and in English ones, which turn tens and ones around.

siebenundachtzig    eighty-seven
"""

from __future__ import annotations

import random

from polyhead.training.corpora.corpus import Corpus, Pair, needed

MOST = 1_000_000
HELD_OUT = 300
_TRAINING = 30_000


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
        found[drawn.randrange(min(10**digits, MOST))] = None
        if len(found) == HELD_OUT:
            found.update(dict.fromkeys(n for n in range(10)))
    pairs = [Pair(words(n, lang="de"), words(n, lang="en"), f"number {n}") for n in found]
    return Corpus(pairs[HELD_OUT:], pairs[:HELD_OUT])
