"""The tokens that tell Whisper what to do: which language it hears, and what to write.

    <|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>      (Radford et al. 2022, §2.3)

A model of English alone has no use for the second and the third.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from polyhead.errors import InputError

if TYPE_CHECKING:
    from polyhead.checkpoints import Tokenizer

TASKS = ("transcribe", "translate")
_MULTILINGUAL = 51_865
"""Tokens of the smallest model that knows several languages. That of English alone has fewer, and
lists the tokens of the others all the same."""
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


@dataclass(frozen=True)
class SpeechTokens:
    """The ids of these tokens in a tokenizer.

    Attributes:
        languages: Codes to tokens; none where the model knows one language.
        tasks: ``"transcribe"`` and ``"translate"`` (into English) to tokens.
        no_timestamps: Writes no times between the words; None: there is no such token.
    """

    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    no_timestamps: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Self:
        """Finds them.

        Args:
            tokenizer: Tokenizer of the model.
            vocab_size: Vocabulary size of the model.
        """
        added = tokenizer.backend.get_added_tokens_decoder()
        ids = {str(token.content): number for number, token in added.items()}
        several = vocab_size >= _MULTILINGUAL
        found = {match[1]: ids[match[0]] for match in map(_LANGUAGE.fullmatch, ids) if match}
        return cls(
            found if several else {},
            {task: ids[f"<|{task}|>"] for task in TASKS if several and f"<|{task}|>" in ids},
            ids.get("<|notimestamps|>"),
        )

    def language(self, code: str) -> int | None:
        """The token of a language; None where the model needs none.

        Raises:
            InputError: The model does not know the language.
        """
        if code not in (self.languages or {"en": 0}):
            known = ", ".join(self.languages) or "en alone"
            raise InputError(f"language must be one that the model knows ({known}): got {code!r}")
        return self.languages.get(code)

    def task(self, name: str) -> int | None:
        """The token of a task; None where the model needs none.

        Raises:
            InputError: No such task, or a model of one language cannot do it.
        """
        if name not in (self.tasks or TASKS[:1]):
            known = ", ".join(self.tasks or TASKS[:1])
            raise InputError(f"task must be one that the model does ({known}): got {name!r}")
        return self.tasks.get(name)
