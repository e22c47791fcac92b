"""Numbers to blocks, so that what is unpacked is near to them.

The ``gguf`` package packs the types of 32 numbers. The K types are packed here: a block of 256 is
cut into runs of 16 or 32, each run gets the scale (and minimum) that fits it best, and these become
whole numbers of 4 to 8 bits times one scale of the block. Codes are chosen last, for the scales as
they are stored. Errors of a run are weighted by the size of its numbers, because large ones matter
most (as in llama.cpp without an importance matrix).

Shape letters: N blocks, R runs of a block, K numbers of a run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polyhead.quantization.blocks import BlockType

_ROWS = 1 << 22  # numbers that are packed at a time
_TRIED = 20  # scales of a run


def packable() -> list[str]:
    """Names of the types that numbers can be packed as."""
    return [*_BY_PACKAGE, *_PACKERS]


def pack(numbers: Tensor, kind: BlockType) -> Tensor:
    """Blocks whose numbers are near to those given.

    Args:
        numbers: ``[rows, features]``, finite.
        kind: Type of the blocks, one of ``packable()``.

    Returns:
        ``[rows, bytes of a row]`` uint8.

    Raises:
        ValueError: A type that is only read, rows that are no whole blocks, or numbers that are not
            finite.
    """
    if kind.name not in packable():
        raise ValueError(f"type must be one of {', '.join(packable())}: got {kind.name}")
    octets = kind.row_octets(numbers.shape[1])
    if not bool(numbers.isfinite().all()):
        raise ValueError("numbers must be finite: got NaN or infinity")
    each = max(1, _ROWS // numbers.shape[1])
    made = [_packed(part.float(), kind) for part in torch.split(numbers, each)]
    return torch.cat(made).view(len(numbers), octets)


def _packed(rows: Tensor, kind: BlockType) -> Tensor:
    if kind.name in _BY_PACKAGE:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import quantize

        return torch.from_numpy(quantize(rows.numpy(), GGMLQuantizationType(kind.number)))
    return _PACKERS[kind.name](rows.reshape(-1, kind.numbers)).view(len(rows), -1)


def _affine(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """scale ≥ 0 and minimum ≥ 0 ``[..., 1]`` of ``x ≈ scale · code − minimum``, 0 ≤ code ≤ most.

    For each of some scales around the obvious one the codes are rounded, and then the best scale
    and minimum for these codes are solved for.
    """
    weight = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    low = x.amin(-1, keepdim=True).clamp(max=0)
    width = x.amax(-1, keepdim=True) - low
    total, of_x = weight.sum(-1, keepdim=True), (weight * x).sum(-1, keepdim=True)
    scale, minimum = width / most, -low
    code = _whole(x - low, scale, 0, most)
    # Codes that are all equal leave 0 / 0 to solve for: what comes out must be better than this.
    best = (weight * (scale * code + low - x).square()).sum(-1, keepdim=True)
    for i in range(_TRIED + 1):
        tried = (most - 1.0 + 2.0 * i / _TRIED) / width.clamp(min=1e-30)
        code = ((x - low) * tried).round_().clamp_(0, most)
        weighted = weight * code
        of_code = weighted.sum(-1, keepdim=True)
        of_squares = (weighted * code).sum(-1, keepdim=True)
        of_both = (weighted * x).sum(-1, keepdim=True)
        divisor = total * of_squares - of_code.square()
        s = (total * of_both - of_x * of_code) / divisor
        m = (of_squares * of_x - of_code * of_both) / divisor
        s = torch.where(m > 0, of_both / of_squares, s)  # minima are subtracted
        m = m.clamp(max=0)
        error = (weight * (s * code + m - x).square()).sum(-1, keepdim=True)
        better = (divisor > 0) & (s > 0) & (error < best)
        best = torch.where(better, error, best)
        scale, minimum = torch.where(better, s, scale), torch.where(better, -m, minimum)
    return scale, minimum


def _symmetric(x: Tensor, half: int) -> Tensor:
    """The scale ``[..., 1]``, of either sign, of ``x ≈ scale · code``, −half ≤ code < half."""
    weight = x.square()
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    divisor = torch.where(largest.abs() < 1e-30, 1.0, largest)
    scale, best = torch.zeros_like(largest), torch.zeros_like(largest)
    for i in range(-9, 10):
        code = (x * (-(half + 0.1 * i) / divisor)).round_().clamp_(-half, half - 1)
        of_both = (weight * x * code).sum(-1, keepdim=True)
        of_squares = (weight * code * code).sum(-1, keepdim=True)
        gain = torch.where(of_squares > 0, of_both.square() / of_squares, 0.0)
        better = gain > best
        best = torch.where(better, gain, best)
        scale = torch.where(better, of_both / of_squares, scale)
    return scale


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, 1]`` rounded to 16 bits: as float32 and as bytes ``[N, 2]``."""
    half = x.to(torch.float16)
    return half.float(), half.contiguous().view(torch.uint8)


def _whole(x: Tensor, by: Tensor, low: int, high: int) -> Tensor:
    """``x / by`` as whole numbers in bounds; 0 where ``by`` is 0."""
    found: Tensor = torch.where(by == 0, 0.0, x / by).round().clamp(low, high)
    return found


def _with_minima(
    x: Tensor, run: int, most: int, steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes ``[N, 256]``, scales and minima ``[N, R]`` as whole numbers, and two halves as bytes.

    Args:
        x: ``[N, 256]``.
        steps: The largest whole number of a scale or minimum.
    """
    runs = x.view(len(x), -1, run)
    scale, minimum = (each[..., 0] for each in _affine(runs, most))
    d, d_octets = _halves(scale.amax(-1, keepdim=True) / steps)
    m, m_octets = _halves(minimum.amax(-1, keepdim=True) / steps)
    scales, minima = _whole(scale, d, 0, steps), _whole(minimum, m, 0, steps)
    code = _whole(runs + (m * minima)[..., None], (d * scales)[..., None], 0, most)
    return _octets(code.view_as(x)), _octets(scales), _octets(minima), d_octets, m_octets


def _around_zero(x: Tensor, half: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[N, 256]`` from 0, scales ``[N, 16]`` from −steps to steps − 1, a half as bytes."""
    runs = x.view(len(x), 16, 16)
    scale = _symmetric(runs, half)[..., 0]
    largest = scale.gather(-1, scale.abs().argmax(-1, keepdim=True))
    d, octets = _halves(largest / -steps)
    scales = _whole(scale, d, -steps, steps - 1)
    code = _whole(runs, (d * scales)[..., None], -half, half - 1) + half
    return _octets(code.view_as(x)), scales.to(torch.int8), octets


def _octets(x: Tensor) -> Tensor:
    return x.to(torch.uint8)


def _beside(x: Tensor, parts: int, width: int, bits: int) -> Tensor:
    """``[N, n]`` codes, of which ``parts`` runs of ``width`` share bytes, low bits first."""
    runs = x.view(len(x), -1, parts, width)
    found = torch.zeros_like(runs[:, :, 0])
    for part in range(parts):
        found |= runs[:, :, part] << bits * part
    return found.flatten(1)


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight scales and minima of 6 bits each in 12 bytes."""
    first, last = slice(0, 4), slice(4, 8)
    return torch.cat(
        (
            scales[:, first] | scales[:, last] >> 4 << 6,
            minima[:, first] | minima[:, last] >> 4 << 6,
            (scales[:, last] & 15) | (minima[:, last] & 15) << 4,
        ),
        dim=1,
    )


def _q2_k(x: Tensor) -> Tensor:
    code, scales, minima, d, m = _with_minima(x, 16, 3, 15)
    return torch.cat((scales | minima << 4, _beside(code, 4, 32, 2), d, m), dim=1)


def _q3_k(x: Tensor) -> Tensor:
    code, signed, d = _around_zero(x, 4, 32)
    scales = (signed + 32).to(torch.uint8)
    low = (scales[:, :8] & 15) | (scales[:, 8:] & 15) << 4
    high = _beside(scales >> 4, 4, 4, 2)
    return torch.cat((_beside(code >> 2, 8, 32, 1), _beside(code & 3, 4, 32, 2), low, high, d), 1)


def _q4_k(x: Tensor) -> Tensor:
    code, scales, minima, d, m = _with_minima(x, 32, 15, 63)
    return torch.cat((d, m, _six_bits(scales, minima), _beside(code, 2, 32, 4)), dim=1)


def _q5_k(x: Tensor) -> Tensor:
    code, scales, minima, d, m = _with_minima(x, 32, 31, 63)
    high, low = _beside(code >> 4, 8, 32, 1), _beside(code & 15, 2, 32, 4)
    return torch.cat((d, m, _six_bits(scales, minima), high, low), dim=1)


def _q6_k(x: Tensor) -> Tensor:
    code, scales, d = _around_zero(x, 32, 128)
    low, high = _beside(code & 15, 2, 64, 4), _beside(code >> 4, 4, 32, 2)
    return torch.cat((low, high, scales.contiguous().view(torch.uint8), d), dim=1)


_BY_PACKAGE = "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0"
_PACKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
