"""Weights whose codes of 4 bits are places in a table of 16 numbers, as directories hold them.

    number[i] = table[code[i]] · scale[i // size]

MXFP4 (OCP 2023): numbers of 4 bits (e2m1), a power of 2 for 32 of them. NVFP4: the same numbers, an
8-bit float for 16 and one float32 for all. bitsandbytes (Dettmers et al. 2023): ``nf4`` or ``fp4``,
a table in the file, a float32 for 64, which may be codes of 8 bits themselves; int8 with a float32
for a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead.checkpoints.formats.coded import Coded
from polyhead.checkpoints.json_file import parse_json
from polyhead.errors import shortened
from polyhead.native.arguments import Scales
from polyhead.quantization import scaled
from polyhead.quantization.blocks import BlockType, block_types

if TYPE_CHECKING:
    from polyhead.checkpoints.formats.coded import Codes

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PART = 1 << 20  # numbers that are computed at a time
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TableCoded:
    """A weight, or a stack of them, whose codes name numbers of a table.

    Attributes:
        codes: uint8, two in a byte, row after row.
        table: float32 ``[16]``.
        scales: float32, one for ``size`` codes that follow each other.
        size: Codes that share a scale.
        shape: Of the numbers.
        dtype: That the file was made from.
        high_first: Whether the first of two codes is in the high half.
        stacked: Whether the file's own tensor is the transpose, one for each expert (gpt-oss).
    """

    codes: Tensor
    table: Tensor
    scales: Tensor
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    high_first: bool = False
    stacked: bool = False

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """All of them, rounded from float32."""
        flat, scales = self.codes.reshape(-1), self.scales.reshape(-1)
        made = torch.empty(math.prod(self.shape), dtype=dtype, device="cpu")
        each = max(1, _PART // self.size) * self.size
        for first in range(0, len(made), each):
            part = made[first : first + each]
            octets = flat[first // 2 : -(-(first + len(part)) // 2)]
            halves = (octets >> 4, octets & 15) if self.high_first else (octets & 15, octets >> 4)
            found = self.table[torch.stack(halves, dim=-1).flatten()[: len(part)].int()]
            groups = torch.arange(first, first + len(part), device="cpu") // self.size
            part.copy_(found * scales[groups])
        whole = made.view(self.shape)
        return whole.mT if self.stacked else whole

    @property
    def gguf_type(self) -> BlockType | None:
        """The type of GGUF's blocks that mean the same numbers, if there is one."""
        return block_types()["MXFP4"] if self.stacked else None

    def gguf_blocks(self) -> tuple[Tensor, BlockType]:
        """The same numbers in blocks ``[rows, bytes of a row]`` of ``gguf_type``."""
        codes = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).view(-1, 32)
        halves = codes[:, :16] | codes[:, 16:] << 4
        exponents = (torch.frexp(self.scales.reshape(-1)).exponent + 126).to(torch.uint8)
        rows = math.prod(self.shape[:-1])
        made = torch.cat((exponents[:, None], halves), dim=1).view(rows, -1)
        return made, block_types()["MXFP4"]


def _signed() -> Tensor:
    half = torch.tensor(_E2M1, dtype=torch.float32, device="cpu")
    return torch.cat((half, -half))


def read_mxfp4(codes: Codes, stem: str, blocks: Tensor) -> TableCoded:
    """``NAME_blocks [X, rows, groups, 16]`` and ``NAME_scales [X, rows, groups]``, exponents."""
    name = f"{stem}_scales"
    if blocks.ndim != 4 or blocks.shape[-1] != 16:
        raise codes.wrong(f"{stem}_blocks", f"must be [X, rows, groups, 16]: got {[*blocks.shape]}")
    exponents = codes.take(name, 4)
    size = tuple(blocks.shape[:-1])
    codes.fit(name, exponents, size, "an exponent for 32 codes", torch.uint8)
    if bool((exponents == 255).any()):
        raise codes.wrong(name, "must hold exponents up to 254: 255 is no number")
    ones = torch.ones_like(exponents, dtype=torch.float32)
    scales = torch.ldexp(ones, exponents.int() - 127)
    shape = *size[:-1], size[-1] * 32
    return TableCoded(blocks, _signed(), scales, 32, shape, stacked=True)


def read_nvfp4(codes: Codes, stem: str, packed: Tensor) -> TableCoded:
    """compressed-tensors: ``weight_packed``, ``weight_scale``, divided by a global scale."""
    whole = codes.take(f"{stem}.weight_global_scale", 4)
    codes.fit(f"{stem}.weight_global_scale", whole, (1,), "one number", torch.float32)
    return _nvfp4(codes, stem, packed, lambda scales: scales / whole)


def read_modelopt(codes: Codes, stem: str, packed: Tensor) -> TableCoded:
    """ModelOpt: ``weight``, ``weight_scale`` times ``weight_scale_2``."""
    name = f"{stem}.weight_scale_2"
    whole = codes.take(name, 4).reshape(-1)
    codes.fit(name, whole, (1,), "one number", torch.float32)
    return _nvfp4(codes, stem, packed, lambda scales: scales * whole)


def _nvfp4(codes: Codes, stem: str, packed: Tensor, by: Callable[[Tensor], Tensor]) -> TableCoded:
    rows, features = packed.shape[0], packed.shape[1] * 2
    name = f"{stem}.weight_scale"
    found = codes.take(name, 4)
    size = rows, -(-features // 16)
    codes.fit(name, found, size, "a number for 16 codes", torch.float8_e4m3fn)
    scales = by(found.float())
    codes.finite(name, scales)
    if features % 16:
        raise codes.wrong(name, f"must be of rows of a multiple of 16 numbers: got {features}")
    return TableCoded(packed, _signed(), scales, 16, (rows, features))


def read_bitsandbytes(codes: Codes, stem: str, packed: Tensor) -> TableCoded | Coded:
    """``weight`` with ``absmax``, ``quant_map`` and ``quant_state``; or of int8 with ``SCB``."""
    name = f"{stem}.weight"
    if packed.dtype == torch.int8:
        scales = codes.take(f"{stem}.SCB", 8).reshape(-1, 1)
        codes.pop(f"{stem}.weight_format")
        codes.fit(f"{stem}.SCB", scales, (packed.shape[0], 1), "a number for a row", torch.float32)
        codes.finite(f"{stem}.SCB", scales)
        by = Scales((scales / 127).contiguous(), None, packed.shape[1], 1)
        return Coded(packed.contiguous().view(torch.uint8), scaled.I8, by)
    kinds = [kind for kind in ("nf4", "fp4") if codes.has(f"{name}.{_STATE}{kind}")]
    if len(kinds) != 1:
        raise codes.wrong(f"{name}.{_STATE}nf4", "is missing: the weight has 4 bits")
    said = _state(codes, f"{name}.{_STATE}{kinds[0]}")
    shape, size = tuple(said["shape"]), said["blocksize"]
    count = math.prod(shape)
    codes.fit(name, packed.reshape(-1), (-(-count // 2),), f"codes of {shape}", torch.uint8)
    table = codes.take(f"{name}.quant_map", 4)
    codes.fit(f"{name}.quant_map", table, (16,), "a number for each code", torch.float32)
    scales = codes.take(f"{name}.absmax", 4)
    groups = (-(-count // size),)
    words = f"a number for {size} codes"
    if "nested_blocksize" in said:
        codes.fit(f"{name}.absmax", scales, groups, words, torch.uint8)
        outer, map_of = (codes.take(f"{name}.nested_{end}", 4) for end in ("absmax", "quant_map"))
        codes.fit(f"{name}.nested_quant_map", map_of, (256,), "a number a code", torch.float32)
        nested = said["nested_blocksize"]
        size_of = (-(-groups[0] // nested),)
        codes.fit(f"{name}.nested_absmax", outer, size_of, "a number for codes", torch.float32)
        place = torch.arange(groups[0], device="cpu") // nested
        scales = map_of[scales.int()] * outer[place] + said["nested_offset"]
    codes.fit(f"{name}.absmax", scales, groups, words, torch.float32)
    codes.finite(f"{name}.absmax", scales)
    dtype = _DTYPES[said["dtype"]]
    return TableCoded(packed, table, scales, size, shape, dtype, high_first=True)


_STATE = "quant_state.bitsandbytes__"


def _state(codes: Codes, name: str) -> dict[str, Any]:
    """A JSON text in a tensor of bytes, checked."""
    try:
        said: Any = parse_json(bytes(codes.take(name, 4).tolist()).decode())
    except (ValueError, TypeError) as error:
        raise codes.wrong(name, f"must hold JSON: {error}") from error
    shape = said.get("shape") if isinstance(said, dict) else None
    counts = [said.get("blocksize"), said.get("nested_blocksize", 1)] if shape else []
    counts += shape if isinstance(shape, list) else [None]
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts)
    offset = said.get("nested_offset", 0.0) if whole else None
    if not whole or len(counts) != 4 or said.get("dtype") not in _DTYPES or offset is None:
        raise codes.wrong(name, f"must hold shape, blocksize and dtype: got {shortened(said)}")
    if not isinstance(offset, float | int) or not math.isfinite(offset):
        raise codes.wrong(name, f"must hold a finite nested_offset: got {shortened(offset)}")
    return dict(said)
