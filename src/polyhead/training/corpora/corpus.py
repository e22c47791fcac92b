"""What a corpus is: pairs of texts to learn from, and others to be tested by."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from polyhead.errors import InputError


@dataclass(frozen=True)
class Pair:
    """A text, what is to be written for it, and where both come from, for messages."""

    source: str
    target: str
    where: str


@dataclass(frozen=True)
class Corpus:
    """Pairs.

    Attributes:
        training: What a model sees.
        held_out: What it never sees.
        baselines: Names to functions that need no training, to compare with.
    """

    training: Sequence[Pair]
    held_out: Sequence[Pair]
    baselines: Mapping[str, Callable[[str], str]] = field(default_factory=dict)


def needed(module: str, extra: str) -> ModuleType:
    """A module of a package that not everybody has.

    Args:
        module: Its name.
        extra: What pip installs it with.

    Raises:
        InputError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise InputError(f"this needs the package {package}: pip install '{extra}'") from error
