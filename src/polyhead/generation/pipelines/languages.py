"""Which languages an encoder-decoder reads and writes, and where their tokens belong.

A multilingual model has a token for each language. Families put it in different places:

    mBART, PLBart           source: text </s> en_XX       the text begins with the target's token
    mBART-50, NLLB, M2M-100 source: en_XX text </s>       the text's first token is forced to it
    Marian, MADLAD          source: >>fra<< text          the target's token stands in the source
    T5                      source: translate English to German: text     (a task of config.json)
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from polyhead.errors import InputError

if TYPE_CHECKING:
    from polyhead.checkpoints import Tokenizer

Place = Literal["around", "in front"]

# How tokens of languages are spelled: mBART and NLLB, M2M-100, Marian, MADLAD.
_AROUND = re.compile(r"([a-z]{2,3}_[A-Z][A-Za-z]{1,3})|__([A-Za-z_]{2,8})__")
_IN_FRONT = re.compile(r">>([^<>]+)<<|<2([A-Za-z_]{2,12})>")

# Classes of transformers' tokenizers: whether the source's language stands behind the text, and
# which it is where no language is given.
_CLASSES = {
    "MBart": (True, "en_XX"),
    "PLBart": (True, None),
    "MBart50": (False, "en_XX"),
    "Nllb": (False, "eng_Latn"),
    "M2M100": (False, "en"),
}


@dataclass(frozen=True)
class Languages:
    """The languages of a model.

    Attributes:
        tokens: Codes to token ids.
        place: ``"around"``: the source's language beside the source, the target's at the beginning
            of the text; ``"in front"``: the target's in front of the source, which needs none.
        behind: Whether the source's token stands behind its text, and then the target's is the
            start token instead of the first token.
        source: The language of sources where a call does not say.
        target: That of the texts.
    """

    tokens: Mapping[str, int]
    place: Place = "around"
    behind: bool = False
    source: str | None = None
    target: str | None = None

    def __bool__(self) -> bool:
        return bool(self.tokens)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Languages:
        """The languages that a tokenizer has tokens of."""
        declared = tokenizer.declared
        name = str(declared.get("tokenizer_class", "")).removesuffix("Fast")
        behind, default = _CLASSES.get(name.removesuffix("Tokenizer"), (None, None))
        if behind is not None:
            source = declared.get("src_lang") or default
            return cls(
                _codes(tokenizer.added_tokens, _AROUND),
                behind=bool(behind or declared.get("legacy_behaviour")),
                source=source,
                target=declared.get("tgt_lang"),
            )
        return cls(_codes(tokenizer.vocabulary, _IN_FRONT), "in front")

    def token(self, name: str, code: str) -> int:
        """The token of a language.

        Args:
            name: Name of the argument.
            code: As the model spells it.

        Raises:
            InputError: The model has no such language; names near ones.
        """
        if not isinstance(code, str):
            raise TypeError(f"{name} must be a language's code, as text: got {code!r}")
        if code in self.tokens:
            return self.tokens[code]
        if not self.tokens:
            raise InputError(f"{name}: this model has no tokens of languages: got {code!r}")
        raise InputError(f"{name}: no language {code!r}; {near(code, [*self.tokens])}")


def near(code: str, known: Sequence[str]) -> str:
    """A sentence with those of ``known`` that are similar to ``code``."""
    begin = [each for each in known if each.lower().startswith(code.lower()[:2]) and code]
    like = difflib.get_close_matches(code, known, 5, 0.4)
    best = sorted(dict.fromkeys([*begin, *like]), key=lambda each: -_likeness(code, each))[:5]
    shown = ", ".join(best or sorted(known)[:5])
    return f"{'near ones' if best else 'some'} of its {len(known)}: {shown}"


def _likeness(code: str, other: str) -> float:
    return difflib.SequenceMatcher(None, code.lower(), other.lower()).ratio()


def _codes(tokens: Mapping[str, int], spelling: re.Pattern[str]) -> dict[str, int]:
    """Codes to token ids, for language tokens of this spelling."""
    found = {}
    for token, index in tokens.items():
        match = spelling.fullmatch(token)
        if match is not None:
            found[next(group for group in match.groups() if group is not None)] = index
    return found
