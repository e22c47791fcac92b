"""What people read, in their language: one file of texts for each, ``en.json`` and ``zh.json``.

A file has parts (``trace``, ``page``, ``lesson``, …), a part has keys, and a text may hold places
such as ``{head}``. All files have the same keys and the same places; a test says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from importlib import resources

from polyhead.errors import InputError, shortened

LANGUAGES: Mapping[str, str] = {"en": "English", "zh": "中文"}
"""Languages by code, each as its readers write it."""

_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")


class Texts:
    """One part of the texts in one language."""

    def __init__(self, language: str, part: str) -> None:
        self.language = language
        self.entries = _read(language)[part]

    def __call__(self, key: str, /, **values: object) -> str:
        """The text of a key with its places filled.

        Raises:
            KeyError: No such key, or a place without a value.
        """
        return self.entries[key].format(**values)


def language_of(asked: str | None) -> str:
    """The language that is asked for, else the locale's, else English.

    Raises:
        InputError: There are no texts in that language.
    """
    if asked is not None:
        if asked not in LANGUAGES:
            raise InputError(f"--lang must be {' or '.join(LANGUAGES)}: got {shortened(asked)}")
        return asked
    said = next((value for name in _VARIABLES if (value := os.environ.get(name))), "")
    return said[:2] if said[:2] in LANGUAGES else "en"


def every(*parts: str) -> dict[str, dict[str, str]]:
    """Some parts in all languages as one table each, for pages that change their language."""
    return {code: {k: v for part in parts for k, v in _read(code)[part].items()}
            for code in LANGUAGES}  # fmt: skip


@cache
def _read(language: str) -> Mapping[str, Mapping[str, str]]:
    text = (resources.files(__package__) / f"{language}.json").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[str, str]] = json.loads(text)
    return found
