"""The container of CTranslate2's ``model.bin``: variables with their types and shapes, and aliases.

    version u32 | specification | revision u32 | count u32 | variables | count u32 | aliases
    variable: name | rank u8 | dimensions u32 ... | type u8 | bytes u32 | data
    alias: name | name of a variable           name: length u16 | UTF-8 | NUL

Nothing in the file is aligned, so a tensor is copied when it is read. Every length is checked
against the file's size before anything of that length is made. Source:
``python/ctranslate2/specs/model_spec.py`` and ``src/models/model.cc`` of OpenNMT/CTranslate2.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from polyhead.checkpoints.mapped import mapped
from polyhead.errors import CheckpointError, shortened

_VERSIONS = (4, 5, 6)  # older revisions do not store a variable's type
_TYPES = (
    torch.float32,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.float16,
    torch.bfloat16,
)
_INTEGERS = (torch.int8, torch.int16, torch.int32)
_MOST_RANK = 4
_MOST_NAMES = 20_000
"""Most variables, and most aliases: as many as a model of several hundred layers has."""


@dataclass(frozen=True)
class Variable:
    """Where a variable lies: ``start`` counts bytes from the file's start."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    num_bytes: int


class CTranslate2File:
    """A ``model.bin``, its table read and its tensors read when asked for.

    Args:
        path: path of model.bin.

    Attributes:
        specification: what the variables describe, ``"TransformerSpec"`` for example.
        revision: revision of the specification.
        variables: by name, aliases included.

    Raises:
        CheckpointError: the file is empty, truncated, corrupt, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specification = ""
        self.revision = 0
        self.variables: Mapping[str, Variable] = {}
        self._data = mapped(path, "a CTranslate2 model", least=16)
        try:
            self._read()
        except (struct.error, IndexError) as error:
            raise CheckpointError(
                f"{path} is truncated or corrupt: its table of variables ends early"
            ) from error
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is corrupt: a name in it is not UTF-8") from error

    def scalars(self) -> dict[str, int | float]:
        """Every variable that is a single number without dimensions, and no scale of another."""
        return {
            name: self._plain(variable).item()
            for name, variable in self.variables.items()
            if not variable.shape and not self.is_scale(name)
        }

    def is_scale(self, name: str) -> bool:
        """Whether a variable belongs to the quantization of another."""
        return name.endswith("_scale") and name.removesuffix("_scale") in self.variables

    def tensor(self, name: str) -> Tensor:
        """A variable in its shape: floats as stored, quantized ones (with ``name_scale``) float32.

        Raises:
            CheckpointError: whole numbers without a scale, or with one of another shape.
        """
        variable = self.variables[name]
        values = self._plain(variable)
        if variable.dtype not in _INTEGERS:
            return values
        scale = self.variables.get(f"{name}_scale")
        if scale is None or scale.dtype in _INTEGERS or variable.dtype == torch.int32:
            raise CheckpointError(
                f"{self.path}: variable {shortened(name)} holds {_short(variable.dtype)} numbers "
                f"{'without a scale' if scale is None else 'of an unknown quantization'}"
            )
        rows = variable.shape[:1]
        if scale.shape not in ((), (1,), rows):
            raise CheckpointError(
                f"{self.path}: variable {shortened(f'{name}_scale')} must have a number for each "
                f"of {rows[0]} rows: got shape {list(scale.shape)}"
            )
        scales = self._plain(scale).float()
        if scale.shape == rows:
            scales = scales.reshape(-1, *[1] * (len(variable.shape) - 1))
        return values.float() / scales

    def same(self, first: str, second: str) -> bool:
        """Whether two variables are aliases, or hold the same numbers."""
        one, other = self.variables[first], self.variables[second]
        if one.start == other.start:
            return True
        if (one.shape, one.dtype) != (other.shape, other.dtype) or one.dtype in _INTEGERS:
            return False
        return torch.equal(self._plain(one), self._plain(other))

    def _plain(self, variable: Variable) -> Tensor:
        end = variable.start + variable.num_bytes
        data = bytearray(self._data[variable.start : end])
        return torch.frombuffer(data, dtype=variable.dtype).reshape(variable.shape)

    def _read(self) -> None:
        (version,) = struct.unpack_from("<I", self._data, 0)
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self.path} is not a CTranslate2 model, or one of binary version {version}; "
                f"versions {', '.join(map(str, _VERSIONS))} can be read"
            )
        self.specification, at = self._name(4)
        self.revision, count = struct.unpack_from("<II", self._data, at)
        at += 8
        found: dict[str, Variable] = {}
        for _ in range(self._few(count, "variables")):
            name, at = self._name(at)
            self._check_new(name, found)
            found[name] = variable = self._variable(name, at)
            at = variable.start + variable.num_bytes
        (count,) = struct.unpack_from("<I", self._data, at)
        at += 4
        aliases: dict[str, Variable] = {}
        scales: dict[str, Variable] = {}
        for _ in range(self._few(count, "aliases")):
            alias, at = self._name(at)
            name, at = self._name(at)
            self._check_new(alias, found, aliases)
            if name not in found:
                raise CheckpointError(
                    f"{self.path} is corrupt: {shortened(alias)} is an alias of "
                    f"{shortened(name)}, which is not there"
                )
            aliases[alias] = found[name]
            if f"{name}_scale" in found:  # the default, omitted in files
                scales[f"{alias}_scale"] = found[f"{name}_scale"]
        if at != len(self._data):
            raise CheckpointError(
                f"{self.path} is corrupt: it has {len(self._data) - at:,} bytes after its end"
            )
        self.variables = scales | aliases | found

    def _name(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<H", self._data, at)
        end = at + 2 + length
        if end > len(self._data) or not length:
            raise IndexError(end)
        if self._data[end - 1]:
            raise CheckpointError(f"{self.path} is corrupt: the name at byte {at} has no end")
        return self._data[at + 2 : end - 1].decode("utf-8"), end

    def _variable(self, name: str, at: int) -> Variable:
        rank = self._data[at]
        if rank > _MOST_RANK:
            raise CheckpointError(
                f"{self.path} is corrupt: variable {shortened(name)} has {rank} dimensions"
            )
        shape = struct.unpack_from(f"<{rank}I", self._data, at + 1)
        kind, num_bytes = struct.unpack_from("<BI", self._data, at + 1 + 4 * rank)
        start = at + 6 + 4 * rank
        if kind >= len(_TYPES):
            raise CheckpointError(
                f"{self.path}: variable {shortened(name)} has type number {kind}, which is not "
                f"known"
            )
        dtype = _TYPES[kind]
        if not prod(shape) or prod(shape) * dtype.itemsize != num_bytes:
            raise CheckpointError(
                f"{self.path} is corrupt: variable {shortened(name)} of shape {list(shape)} and "
                f"type {_short(dtype)} has {num_bytes:,} bytes"
            )
        if start + num_bytes > len(self._data):
            raise CheckpointError(
                f"{self.path} is truncated: variable {shortened(name)} ends at byte "
                f"{start + num_bytes:,}, the file at {len(self._data):,}"
            )
        return Variable(shape, dtype, start, num_bytes)

    def _few(self, count: int, what: str) -> int:
        if count > _MOST_NAMES:
            raise CheckpointError(f"{self.path} is corrupt: it claims {count:,} {what}")
        return count

    def _check_new(self, name: str, *known: Mapping[str, Variable]) -> None:
        if any(name in names for names in known):
            raise CheckpointError(f"{self.path} is corrupt: {shortened(name)} stands twice")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
