"""Finding words among tokens, and the heads that look from one to the other."""

from __future__ import annotations

import pytest
import torch

from polyhead.errors import InputError
from polyhead.interpret.heads import (
    TokenizedText,
    WordPair,
    find_pair,
    rank_heads,
)
from polyhead.interpret.probe import Probe, probe
from polyhead.layers.attention import MultiHeadAttention
from polyhead.semantics import Causal

TEXT = "The animal was tired, so the animal sat; it waited"
HEADS = 3


def _split(text: str, *pieces: str) -> TokenizedText:
    """A text cut into the given pieces; a piece in angle brackets stands for no characters."""
    spans, place = [], 0
    for piece in pieces:
        length = 0 if piece.startswith("<") else len(piece)
        spans.append((place, place + length))
        place += length
    assert place == len(text)
    return TokenizedText(text, tuple(range(len(pieces))), pieces, tuple(spans))


TOKENS = _split(
    TEXT, "<s>", "The", " ani", "mal", " was", " tired", ",", " so", " the", " animal", " sat", ";",
    " it", " wait", "ed",
)  # fmt: skip


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("animal", [(2, 3), (9,)]),
        (" animal ", [(2, 3), (9,)]),
        ("it", [(12,)]),  # and not inside "waited"
        ("aite", [(13, 14)]),  # no such word: letters inside one
        ("THE", [(1,), (8,)]),  # no such letters: without regard to case
        ("so the", [(7, 8)]),
        ("dog", []),
        ("  ", []),
        (".*", []),
    ],
)
def test_words_are_found_with_all_their_tokens(word: str, found: list[tuple[int, ...]]) -> None:
    assert TOKENS.find(word) == found
    whole = {"aite": [], "THE": []}
    assert TOKENS.find(word, whole=True) == whole.get(word, found)


def test_words_of_languages_without_spaces_are_found() -> None:
    tokens = _split("这只动物没有过马路", "这", "只动", "物没", "有", "过马路")
    assert tokens.find("动物") == [(1, 2)]


def test_pair_goes_from_the_last_query_to_every_key_before_it() -> None:
    assert find_pair(TOKENS, "it", "animal") == WordPair(12, (2, 3, 9), "it", "animal")
    assert find_pair(TOKENS, "animal", "animal").keys == (2, 3)


def test_an_encoders_pair_may_look_ahead() -> None:
    assert find_pair(TOKENS, "tired", "it", causal=False) == WordPair(5, (12,), "tired", "it")
    with pytest.raises(InputError, match="'it' does not occur before 'tired'"):
        find_pair(TOKENS, "tired", "it")


def test_word_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="'dog' does not occur in the text"):
        find_pair(TOKENS, "it", "dog")
    with pytest.raises(InputError, match="'tired' does not occur apart from 'tired'"):
        find_pair(TOKENS, "tired", "tired", causal=False)


def _seen(tokens: int) -> Probe:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(MultiHeadAttention(12, HEADS) for _ in range(2))
    x = torch.randn(1, tokens, 12) * 3
    with probe(layers) as seen, torch.no_grad():
        for layer in layers:
            layer(x, mask=Causal())
    return seen


def test_heads_are_ranked_by_their_weight_on_all_keys_together() -> None:
    seen = _seen(len(TOKENS.ids))
    pair = find_pair(TOKENS, "it", "animal")
    looks = rank_heads(seen, pair)
    assert sorted((look.layer, look.head) for look in looks) == [
        (layer, head) for layer in (0, 1) for head in range(HEADS)
    ]
    assert [look.weight for look in looks] == sorted((x.weight for x in looks), reverse=True)
    for look in looks:
        row = seen[look.layer].rows(heads=[look.head])[0, 0, 12]
        assert look.weight == pytest.approx(float(row[[2, 3, 9]].sum()))
        about = seen[look.layer].summary()
        assert look.entropy == pytest.approx(float(about.entropy[look.head]))
        assert look.first_token == pytest.approx(float(about.first_token[look.head]))
        assert look.previous_token == pytest.approx(float(about.previous_token[look.head]))
