"""How tokens of a transcript become words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from polyhead.checkpoints import Tokenizer
from polyhead.interpret.word_times import _pieces

BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def _made(text: str, *, marks: tuple[int, ...] = ()) -> list[tuple[int, str]]:
    """The words of a text whose tokens are its bytes, with marks put between some."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({b: i for i, b in enumerate(BYTES)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|mark|>"])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode(text)
    for place in marks:
        ids.insert(place, tokenizer.added_tokens["<|mark|>"])
    segment: Any = SimpleNamespace(text=text.strip(), generation=SimpleNamespace(ids=ids))
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    return _pieces(model, segment)


@pytest.mark.parametrize(
    ("text", "marks", "words"),
    [
        (" ab, cé d", (), [(0, " ab,"), (4, " cé"), (8, " d")]),
        (" a b", (0, 3), [(1, " a"), (4, " b")]),  # a mark is no part of a word
        ("日本", (), [(0, "日"), (3, "本")]),  # three bytes each, and no spaces
        ("", (), []),
    ],
)
def test_words_begin_with_a_space_or_are_whole_characters(
    text: str, marks: tuple[int, ...], words: list[tuple[int, str]]
) -> None:
    assert _made(text, marks=marks) == words
