"""Which heads look from one word to another: *it* → *animal*.

A word may be several tokens and stand in a text more than once. Asked for a word, the query is the
last token of its last occurrence (there the model has read all of it), and the keys are all tokens
of all occurrences of the other word that this query may see; their weights add up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from torch import Tensor

from polyhead.errors import InputError

if TYPE_CHECKING:
    from polyhead.checkpoints import Tokenizer
    from polyhead.interpret.probe import Probe
    from polyhead.interpret.view import AttentionView


@dataclass(frozen=True)
class TokenizedText:
    """A text and its tokens.

    Attributes:
        ids: the tokens that the model reads, special ones included.
        pieces: what each token says, for people.
        spans: each token's characters as (start, stop) of the text; empty for special tokens.
    """

    text: str
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str) -> Self:
        ids = tokenizer.encode(text)
        spans = tokenizer.spans(text)
        return cls(text, tuple(ids), tuple(tokenizer.pieces(ids)), tuple(spans))

    def find(self, word: str, *, whole: bool = False) -> list[tuple[int, ...]]:
        """The tokens of every occurrence of ``word``, in order.

        Whole words first; where there is none, any run of the letters (languages without spaces);
        where there is none of these either, the same without regard to case.

        Args:
            word: what to find; spaces around it do not matter.
            whole: only whole words, as they are written.
        """
        word = word.strip()
        if not word:
            return []
        literal = re.escape(word)
        patterns = [rf"(?<!\w){literal}(?!\w)", literal, rf"(?i:{literal})"]
        for pattern in patterns[:1] if whole else patterns:
            found = [match.span() for match in re.finditer(pattern, self.text)]
            if found:
                return [self._inside(*span) for span in found]
        return []

    def _inside(self, start: int, stop: int) -> tuple[int, ...]:
        return tuple(i for i, (a, b) in enumerate(self.spans) if a < stop and b > start)

    def word(self, token: int) -> str:
        """What a token says, without the spaces around it if that leaves anything."""
        return self.pieces[token].strip() or self.pieces[token]


@dataclass(frozen=True)
class WordPair:
    """A query token and the key tokens whose weights are added, as indexes into the text."""

    query: int
    keys: tuple[int, ...]
    query_word: str
    key_word: str


@dataclass(frozen=True)
class HeadLook:
    """How strongly one head looks along a pair, and what it does on the whole text.

    Attributes:
        weight: the query's weight on the keys, their sum.
        entropy: mean entropy of the head's rows, in nats.
        first_token: mean weight on the first token.
        previous_token: mean weight on the token before the query.
    """

    layer: int
    head: int
    weight: float
    entropy: float
    first_token: float
    previous_token: float


def find_pair(tokens: TokenizedText, query: str, key: str, *, causal: bool = True) -> WordPair:
    """The pair from word ``query`` to word ``key``.

    Args:
        key: The key word.
        causal: whether a token sees only itself and what is before it.

    Raises:
        InputError: a word is not in the text, or the key is nowhere that the query may see.
    """
    from_tokens, to_tokens = tokens.find(query), tokens.find(key)
    for word, found in ((query, from_tokens), (key, to_tokens)):
        if not found:
            raise InputError(f"{word!r} does not occur in the text")
    looking = from_tokens[-1][-1]
    keys = dict.fromkeys(t for run in to_tokens for t in run if t not in from_tokens[-1])
    if causal:
        keys = {token: None for token in keys if token < looking}
    if not keys:
        raise InputError(
            f"{key!r} does not occur before {query!r}, and a decoder only looks back"
            if causal
            else f"{key!r} does not occur apart from {query!r}"
        )
    return WordPair(looking, tuple(keys), query.strip(), key.strip())


def rank_heads(seen: Probe, pair: WordPair) -> list[HeadLook]:
    """Every head that was seen, the one that looks most strongly along ``pair`` first."""
    looks = []
    for layer, view in zip(seen.layers, seen, strict=True):
        weights = _row(view, pair.query)[:, list(pair.keys)].sum(-1)
        about = view.summary()
        numbers = (weights, about.entropy, about.first_token, about.previous_token)
        columns: Sequence[list[float]] = [column.tolist() for column in numbers]
        rows = zip(*columns, strict=True)
        looks += [HeadLook(layer, head, *row) for head, row in enumerate(rows)]
    return sorted(looks, key=lambda look: (-look.weight, look.layer, look.head))


def _row(view: AttentionView, query: int) -> Tensor:
    """The weights of one query of the first text, ``[H, S]``."""
    return view.rows(queries=slice(query, query + 1))[0, :, 0]
