"""Text of a given form: JSON of a schema, or a grammar, through llguidance.

A grammar says after each token which tokens may follow, as a mask over the vocabulary; it is a rule
of generation like others, and a function of the tokens so far. A stop token may follow where the
text is complete.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead._utils.checks import needed
from polyhead.errors import InputError
from polyhead.generation.decoding.rules import NEVER, Rows
from polyhead.serving.grammar_trial import tried

if TYPE_CHECKING:
    from polyhead.checkpoints import Tokenizer

_MOST_CHARACTERS = 128 << 10
"""Longest schema as JSON, and longest grammar."""

_MOST_OF_PATTERNS = 8 << 10
"""Characters of all regular expressions of a schema: a step may take the square of them."""

JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written. Without free white space a small model cannot write blanks for ever."""


def installed() -> bool:
    """Whether llguidance is there."""
    return importlib.util.find_spec("llguidance") is not None


class Grammars:
    """Compiles grammars over a model's vocabulary.

    Args:
        tokenizer: The model's.
        vocab_size: Scores of a token that the model gives.
        stop_ids: Tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._stop_ids = sorted(i for i in stop_ids if i < vocab_size)
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def of_schema(self, schema: Mapping[str, Any]) -> GrammarRule:
        """A rule that leaves only JSON of a schema, with ", " and ": " and no other white space.

        Raises:
            InputError: The schema is impossible, not supported, too long, too complex or nested too
                deep, or llguidance is not installed.
        """
        text = json.dumps(schema)
        _check_length("the JSON schema", len(text), _MOST_CHARACTERS)
        check_patterns(schema)
        library = needed("llguidance", "polyhead[serve]")
        try:
            grammar = library.LLMatcher.grammar_from_json_schema(text, overrides=JSON_FORM)
        except ValueError as error:
            raise InputError(f"the JSON schema cannot be used: {_words(error)}") from error
        return self._compiled(grammar, "the JSON schema")

    def of_lark(self, grammar: str) -> GrammarRule:
        """A rule that leaves only texts of a grammar in llguidance's form of Lark.

        Raises:
            InputError: As ``of_schema``.
        """
        _check_length("the grammar", len(grammar), _MOST_CHARACTERS)
        library = needed("llguidance", "polyhead[serve]")
        return self._compiled(library.LLMatcher.grammar_from_lark(grammar), "the grammar")

    def _compiled(self, grammar: str, what: str) -> GrammarRule:
        library = needed("llguidance", "polyhead[serve]")
        tokenizer = self._library_tokenizer()
        if (wrong := tried(grammar)) is not None:
            raise InputError(f"{what} cannot be used: {_words(wrong)}")
        matcher = library.LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InputError(f"{what} cannot be used: {_words(matcher.get_error())}")
        return GrammarRule(matcher)

    def _library_tokenizer(self) -> Any:
        with self._lock:
            if self._vocabulary is None:
                library = needed("llguidance", "polyhead[serve]")
                if not self._stop_ids:
                    raise InputError("a model without a stop token writes no text of a given form")
                vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._stop_ids[0])
                self._vocabulary = library.LLTokenizer(
                    library.TokenizerWrapper(vocabulary), self._vocab_size, self._stop_ids
                )
        return self._vocabulary


class GrammarRule:
    """Scores of tokens that a grammar does not allow next are −∞; for one row.

    Args:
        matcher: llguidance's state, before the first token.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._read: list[int] = []

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        """The scores ``[1, V]`` with those of other tokens at −∞.

        Raises:
            InputError: The grammar became too complex.
        """
        self._follow(rows.ids[0][rows.prompts[0] :])
        allowed = self._matcher.compute_logit_bias()
        if self._matcher.is_error():
            raise InputError(f"the grammar cannot go on: {_words(self._matcher.get_error())}")
        mask = torch.frombuffer(bytearray(allowed), dtype=torch.uint8)[: scores.shape[-1]]
        return scores.masked_fill(mask.to(scores.device) == 0, NEVER)

    def copy(self) -> GrammarRule:
        """The same grammar, before the first token of another text."""
        fresh = self._matcher.deep_copy()
        fresh.reset()
        return GrammarRule(fresh)

    def _follow(self, ids: Sequence[int]) -> None:
        """Goes from the tokens that were read to these."""
        same = next(
            (
                n
                for n, (one, other) in enumerate(zip(self._read, ids, strict=False))
                if one != other
            ),
            min(len(self._read), len(ids)),
        )
        if same < len(self._read):
            self._matcher.rollback(len(self._read) - same)
        if same < len(ids):
            self._matcher.consume_tokens(list(ids[same:]))
        self._read = list(ids)


class _Vocabulary:
    """A tokenizer as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop: int) -> None:
        self.eos_token_id, self.bos_token_id = stop, tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab_size)
        self._tokenizer = tokenizer
        special = set(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are those of a text: the tokenizer's, or the longest that fit."""
        if not isinstance(text, str):
            raise TypeError("text must be a str")  # asks whether bytes will do
        ids = self._tokenizer.encode(text, add_special=False)
        wanted = text.encode()
        if b"".join(self.tokens[i] for i in ids if i < len(self.tokens)) == wanted:
            return ids
        found, at = [], 0  # a tokenizer that writes a space before every text
        while at < len(wanted):
            size = next(
                (n for n in range(self._longest, 0, -1) if wanted[at : at + n] in self._ids), 0
            )
            if not size:
                break  # no token begins so: what is before it
            part = wanted[at : at + size]
            found.append(self._ids[part])
            at += len(part)
        return found


def check_patterns(schema: object) -> None:
    """Raises InputError for a schema with regular expressions that are long."""
    length, left = 0, [schema]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            pattern, names = each.get("pattern"), each.get("patternProperties")
            length += len(pattern) if isinstance(pattern, str) else 0
            length += sum(map(len, names)) if isinstance(names, dict) else 0
            left += each.values()
        elif isinstance(each, list):
            left += each
    _check_length("patterns of the JSON schema", length, _MOST_OF_PATTERNS)


def _check_length(what: str, length: int, most: int) -> None:
    if length > most:
        raise InputError(f"{what}: {length:,} characters, at most {most:,}")


def _words(error: object) -> str:
    return " ".join(str(error).partition("<state>")[0].split())[:300]
