"""The GGUF container: typed metadata, a table of tensors, then their (often quantized) data.

    "GGUF" | version u32 | tensors u64 | keys u64 | key-value pairs | tensor table | padding | data

Source: docs/gguf.md of ggml-org/ggml. The header is walked here and not by ``gguf.GGUFReader``
because that makes an array object for every token of the vocabulary (2.2 s for 49,152 tokens,
against 0.1 s), and because every length that a header claims is checked against the file's size
first, so that a truncated file is a sentence and not a crash. ``polyhead.quantization`` knows what
quantized blocks mean.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyhead.checkpoints.mapped import mapped
from polyhead.errors import CheckpointError, shortened
from polyhead.quantization import BlockType, block_types, unpack

_VERSIONS = (2, 3)  # version 1 used 32-bit counts and is no longer written
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}

# Types that torch holds as they are; every other type is dequantized to float32.
_PLAIN = {
    0: torch.float32,
    1: torch.float16,
    24: torch.int8,
    25: torch.int16,
    26: torch.int32,
    27: torch.int64,
    28: torch.float64,
    30: torch.bfloat16,
}


@dataclass(frozen=True)
class TensorEntry:
    """One row of the tensor table: ``shape`` in torch's order, ``start`` from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    start: int
    num_bytes: int


class GGUFFile:
    """A GGUF file, its header parsed and its tensors read when asked for.

    Attributes:
        metadata: every key of the header with its Python value (arrays are lists).
        tensors: the tensor table by name.

    Raises:
        CheckpointError: the file is empty, not GGUF, truncated, or holds an unknown type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, Any]
        self.tensors: Mapping[str, TensorEntry]
        self._data = mapped(path, "a GGUF file", least=24, private=True)
        try:
            self._read_header()
        except (struct.error, IndexError, OverflowError) as error:
            raise CheckpointError(
                f"{path} is truncated or corrupt: its header ends early"
            ) from error
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{path} is corrupt: a string of its header is not UTF-8"
            ) from error

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in torch's shape; float16, bfloat16, float64 as stored, the rest float32."""
        entry = self.tensors[name]
        if entry.type_id in _PLAIN:
            flat = torch.frombuffer(
                bytearray(self._data[entry.start : entry.start + entry.num_bytes]),
                dtype=_PLAIN[entry.type_id],
            )
            return flat.reshape(entry.shape)
        blocks, kind = self.blocks(name)
        try:
            return unpack(blocks, kind)
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {shortened(name)} has type {entry.type_name}, which cannot "
                f"be dequantized"
            ) from error

    def is_quantized(self, name: str) -> bool:
        """Whether a tensor is in blocks."""
        return self.tensors[name].type_id not in _PLAIN

    def blocks(self, name: str) -> tuple[torch.Tensor, BlockType]:
        """A quantized tensor's blocks in the mapped file, uint8 ``[..., bytes of a row]``."""
        entry = self.tensors[name]
        kind = block_types()[entry.type_name]
        return self.octets(name).view(*entry.shape[:-1], kind.row_octets(entry.shape[-1])), kind

    def octets(self, name: str) -> torch.Tensor:
        """A tensor's bytes in the mapped file, uint8."""
        entry = self.tensors[name]
        return torch.frombuffer(
            self._data, dtype=torch.uint8, count=entry.num_bytes, offset=entry.start
        )

    def _read_header(self) -> None:
        data, path = self._data, self.path
        if data[:4] != b"GGUF":
            raise CheckpointError(
                f"{path} is not a GGUF file: it begins with {bytes(data[:4])!r} instead of b'GGUF'"
            )
        (version,) = struct.unpack_from("<I", data, 4)
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            raise CheckpointError(
                f"{path} is a big-endian GGUF file; only little-endian files can be read"
                if swapped
                else f"{path} has GGUF version {version}; versions 2 and 3 can be read"
            )
        num_tensors, num_keys = struct.unpack_from("<QQ", data, 8)
        at = 24
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key, at = self._string(at)
            (kind,) = struct.unpack_from("<I", data, at)
            metadata[key], at = self._value(kind, at + 4)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{path} is corrupt: general.alignment is {shortened(alignment)}")
        rows = []
        for _ in range(num_tensors):
            row, at = self._tensor_row(at)
            rows.append(row)
        base = -(-at // alignment) * alignment
        self.metadata = metadata
        self.tensors = {row[0]: self._entry(*row, base=base) for row in rows}

    def _string(self, at: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._data, at)
        end = at + 8 + length
        if end > len(self._data):
            raise IndexError(end)
        return self._data[at + 8 : end].decode("utf-8"), end

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        if kind in _SCALARS:
            code = "<" + _SCALARS[kind]
            value = struct.unpack_from(code, self._data, at)[0]
            if kind == _FLOAT32:  # 1e-05 and not 9.999999747378752e-06
                value = float(str(np.float32(value)))
            return value, at + struct.calcsize(code)
        if kind == _STRING:
            return self._string(at)
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path} is corrupt: metadata of unknown type {kind}")
        item, count = struct.unpack_from("<IQ", self._data, at)
        at += 12
        if item in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[item])
            if at + count * size > len(self._data):
                raise IndexError(count)
            values = struct.unpack_from(f"<{count}{_SCALARS[item]}", self._data, at)
            return list(values), at + count * size
        if item == _STRING:
            return self._strings(count, at)
        raise CheckpointError(f"{self.path} is corrupt: metadata array of unknown type {item}")

    def _strings(self, count: int, at: int) -> tuple[list[str], int]:
        """A vocabulary or its merges: the one long loop of a load, so it is written flat."""
        data, length_at, strings = self._data, struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            end = at + 8 + length_at(data, at)[0]
            strings.append(data[at + 8 : end].decode("utf-8"))
            at = end
        if at > len(data):
            raise IndexError(at)
        return strings, at

    def _tensor_row(self, at: int) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
        name, at = self._string(at)
        (num_dims,) = struct.unpack_from("<I", self._data, at)
        if num_dims > 4:
            raise CheckpointError(
                f"{self.path} is corrupt: tensor {shortened(name)} has {num_dims} dimensions"
            )
        dims = struct.unpack_from(f"<{num_dims}Q", self._data, at + 4)
        type_id, offset = struct.unpack_from("<IQ", self._data, at + 4 + 8 * num_dims)
        return (name, tuple(reversed(dims)), type_id, offset), at + 16 + 8 * num_dims

    def _entry(
        self, name: str, shape: tuple[int, ...], type_id: int, offset: int, *, base: int
    ) -> TensorEntry:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: tensor {shortened(name)} has type number {type_id}, which is not "
                f"known"
            ) from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or not prod(shape) or shape[-1] % block:
            raise CheckpointError(
                f"{self.path} is corrupt: rows of tensor {shortened(name)}, of shape "
                f"{list(shape)}, are no whole number of {kind.name} blocks"
            )
        num_bytes = prod(shape) // block * block_bytes
        if base + offset + num_bytes > len(self._data):
            raise CheckpointError(
                f"{self.path} is truncated: tensor {shortened(name)} ends at byte "
                f"{base + offset + num_bytes:,}, the file at {len(self._data):,}"
            )
        return TensorEntry(name, shape, type_id, kind.name, base + offset, num_bytes)
