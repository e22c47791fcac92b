"""Blocks to numbers: by native code where it reads the type, else by the ``gguf`` package or torch.

All give the same bits in float32.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from polyhead import native
from polyhead.errors import UnsupportedError
from polyhead.native import tensor_check
from polyhead.native.arguments import DTYPES, Scales, Weight
from polyhead.native.code import Code
from polyhead.quantization import scaled
from polyhead.quantization.blocks import BlockType, block_types

_Q8_1 = "Q8_1"
# Types whose codes are places in a grid, in the order in which native code takes the grids; IQ1_M
# has that of IQ1_S.
_WITH_GRIDS = "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"


def unpack(
    blocks: Tensor,
    kind: BlockType,
    dtype: torch.dtype = torch.float32,
    scales: Scales | None = None,
) -> Tensor:
    """The numbers of rows of blocks.

    Args:
        blocks: ``[..., bytes of a row]`` uint8; ``[rows, bytes of a row]`` with scales.
        kind: Type of the blocks.
        dtype: Dtype of the result, rounded from float32.
        scales: Scales and zero points of blocks that hold none.

    Returns:
        ``[..., numbers of a row]``, dense, on the device of ``blocks``.

    Raises:
        ValueError: Rows that are not whole blocks.
        NotImplementedError: A type whose meaning the ``gguf`` package does not know.
        UnsupportedError: Called in ``torch.onnx.export``.
    """
    if torch.compiler.is_exporting() and tensor_check.is_exported_to_onnx():
        raise UnsupportedError(
            f"ONNX cannot hold quantized blocks: got {kind.name}; load the model with dtype=, "
            "which unpacks them"
        )
    if torch.compiler.is_compiling() or torch._C._is_tracing() or tensor_check.is_fake([blocks]):
        by = (None, None, 0, 0) if scales is None else scales
        made: Tensor = _operator(blocks, kind.name, dtype, *by)
        return made
    return _unpacked(blocks, kind, dtype, scales)


def _unpacked(blocks: Tensor, kind: BlockType, dtype: torch.dtype, scales: Scales | None) -> Tensor:
    shape = *blocks.shape[:-1], kind.row_numbers(blocks.shape[-1])
    code = native.code()
    if code is not None and dtype in DTYPES and _is_plain(blocks, scales) and readable(code, kind):
        rows = blocks.reshape(-1, blocks.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        return code.unpack(Weight(rows, None, kind.number, scales), shape[-1], dtype).view(shape)
    return _meant(blocks, kind, scales).view(shape).to(blocks.device, dtype)


def _is_plain(blocks: Tensor, scales: Scales | None) -> bool:
    beside = () if scales is None else [x for x in scales[:2] if x is not None]
    return tensor_check.is_plain(blocks) and all(
        tensor_check.is_plain(x) and x.is_contiguous() for x in beside
    )


def _meant(blocks: Tensor, kind: BlockType, scales: Scales | None) -> Tensor:
    """float32, without native code."""
    if kind.name in scaled.TYPES:
        return scaled.numbers_of(blocks.reshape(-1, blocks.shape[-1]), kind, scales)
    return _by_package(blocks, kind)


def _by_package(blocks: Tensor, kind: BlockType) -> Tensor:
    """float32 on the CPU."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    octets = blocks.detach().cpu().contiguous().view(-1, blocks.shape[-1]).numpy()
    if kind.name == _Q8_1:
        return _from_q8_1(octets)
    values = dequantize(octets, GGMLQuantizationType(kind.number))
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _from_q8_1(octets: np.ndarray) -> Tensor:
    """A type of which the package knows only the size: scale f32, sum f32, 32 codes."""
    rows = octets.reshape(-1, 40)
    scales = rows[:, :4].copy().view(np.float32)
    return torch.from_numpy(scales * rows[:, 8:].copy().view(np.int8))


@torch.library.custom_op("polyhead::unpack_blocks", mutates_args=())
def _operator(
    blocks: Tensor,
    kind: str,
    dtype: torch.dtype,
    scales: Tensor | None,
    zeros: Tensor | None,
    numbers: int,
    rows: int,
) -> Tensor:
    by = None if scales is None else Scales(scales, zeros, numbers, rows)
    return _unpacked(blocks, _type(kind), dtype, by)


@_operator.register_fake
def _(
    blocks: Tensor,
    kind: str,
    dtype: torch.dtype,
    scales: Tensor | None,
    zeros: Tensor | None,
    numbers: int,
    rows: int,
) -> Tensor:
    count = _type(kind).row_numbers(blocks.shape[-1])
    return blocks.new_empty((*blocks.shape[:-1], count), dtype=dtype)


def _type(name: str) -> BlockType:
    return scaled.TYPES.get(name) or block_types()[name]


@cache
def readable(code: Code, kind: BlockType) -> bool:
    """Whether native code reads blocks of a type, and has agreed on some with what they mean.

    One that disagrees is not used, with a warning.
    """
    if code.block_sizes.get(kind.number) != (kind.numbers, kind.octets):
        return False
    if kind.name in (*_WITH_GRIDS, "IQ1_M"):
        code.take_grids(grids())
    # In a thread of its own: no transform, mode or autocast of the caller applies there.
    with ThreadPoolExecutor(1) as elsewhere:
        wrong = elsewhere.submit(disagreement, code, kind).result()
    if wrong is not None:
        warnings.warn(
            f"the native code for {code.name} does not read {kind}: {wrong}", stacklevel=3
        )
    return wrong is None


@cache
def grids() -> Tensor:
    """The package's of the IQ types, one after the other, as bytes."""
    from gguf import quants

    found = []
    for name in _WITH_GRIDS:
        kind = getattr(quants, name)
        kind.init_grid()
        found.append(kind.grid.astype(np.int8).view(np.uint8).ravel())
    return torch.from_numpy(np.concatenate(found))


@torch.no_grad()
def disagreement(code: Code, kind: BlockType) -> str | None:
    """What a code reads wrongly in some random blocks, or None: the test at first use."""
    generator = torch.Generator().manual_seed(0)
    numbers = 3 * kind.numbers
    blocks, scales = _samples(kind, numbers, generator)
    with np.errstate(all="ignore"):
        wanted = _meant(blocks, kind, scales)
    weight = Weight(blocks, None, kind.number, scales)
    found = code.unpack(weight, numbers, torch.float32)
    whole = wanted.isfinite()  # a random scale may be no number
    if not torch.equal(found[whole], wanted[whole]) or bool(found[~whole].isfinite().any()):
        return "numbers differ from those of the package or torch"
    rows = whole.all(dim=1)
    for count in (1, 3):
        x = torch.randn(count, numbers, generator=generator, dtype=torch.float32, device="cpu")
        y = code.product(x, [weight])[:, rows].double()
        exact = x.double() @ wanted[rows].double().mT
        # In units of what is added up: scales of random bits differ by many orders.
        most = x.abs().double() @ wanted[rows].abs().double().mT
        if not bool(((y - exact).abs() <= 1e-5 * most).all()):
            return "a product differs from float64"
    return None


def _samples(
    kind: BlockType, numbers: int, generator: torch.Generator
) -> tuple[Tensor, Scales | None]:
    """Seven rows of random blocks, and scales of two rows and of all numbers but some."""
    if kind in (scaled.F16, scaled.BF16):
        dtype = torch.float16 if kind == scaled.F16 else torch.bfloat16
        return torch.randn(7, numbers, generator=generator, dtype=torch.float32, device="cpu").to(
            dtype
        ).view(torch.uint8), None
    shape = 7, kind.row_octets(numbers)
    blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8, device="cpu")
    if not scaled.is_scaled(kind):
        return blocks, None
    scales = torch.randn(4, 2, generator=generator, dtype=torch.float32, device="cpu")
    zeros = torch.randint(256, (4, 2), generator=generator, dtype=torch.uint8, device="cpu")
    return blocks, Scales(scales, None if kind == scaled.F8_E4M3 else zeros, 2 * kind.numbers, 2)
