"""Tensor names of file formats, as tables that read both ways.

A table maps a file's *modules* to polyhead's; the leaf (``weight``, ``bias``) stays. ``{i}`` stands
for a layer's number, ``{j}`` for an expert's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class NameTable:
    """The names of one family of files.

    Attributes:
        modules: a file's module name to polyhead's.
        tensors: whole names, where leaves differ too.
        prefix: stands before the file's names, or does not: a bare body is saved without it.
        unprefixed: modules that never carry the prefix.
        leaves: other spellings of the last part of a name.
        ignored: patterns (full match, without the prefix) of tensors that no output depends on.
    """

    modules: dict[str, str]
    tensors: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    unprefixed: frozenset[str] = frozenset()
    leaves: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def to_ours(self, names: Iterable[str]) -> dict[str, str]:
        """polyhead's name of every tensor to the file's name of it, in the file's order.

        An ignored tensor is left out. A tensor that the table does not know keeps its own name, and
        so is found to be one too many when the state is checked.
        """
        renamed = {}
        for name in names:
            bare = name.removeprefix(self.prefix)
            if not self.is_ignored(name):
                renamed[self._ours(bare) or name] = name
        return renamed

    def is_ignored(self, name: str) -> bool:
        bare = name.removeprefix(self.prefix)
        return any(re.fullmatch(pattern, bare) for pattern in self.ignored)

    def to_theirs(self, name: str) -> str | None:
        """The file's name of one of polyhead's tensors; None where the format has none."""
        pattern, numbers = _without_numbers(name)
        for theirs, ours in self.tensors.items():
            if ours == pattern:
                return self.prefix + theirs.format(**numbers)
        module, _, leaf = pattern.rpartition(".")
        for theirs, ours in self.modules.items():
            if ours == module:
                prefix = "" if theirs in self.unprefixed else self.prefix
                return f"{prefix}{theirs.format(**numbers)}.{leaf}"
        return None

    def _ours(self, name: str) -> str | None:
        pattern, numbers = _without_numbers(name)
        if pattern in self.tensors:
            return self.tensors[pattern].format(**numbers)
        module, _, leaf = pattern.rpartition(".")
        if module not in self.modules:
            return None
        return f"{self.modules[module].format(**numbers)}.{self.leaves.get(leaf, leaf)}"


def _without_numbers(name: str) -> tuple[str, dict[str, str]]:
    """``"layers.7.experts.2.up"`` as ``("layers.{i}.experts.{j}.up", {"i": "7", "j": "2"})``."""
    numbers = {"i": "", "j": ""}
    for letter, number in zip(numbers, _NUMBER.findall(name), strict=False):
        name = name.replace(f".{number}.", f".{{{letter}}}.", 1)
        numbers[letter] = number
    return name, numbers
