"""HQQ (Badri and Shaji 2023): codes of 8, 4, 2 or 1 bits, unpacked at loading.

    number = (code - zero) · scale

The codes of a weight are a matrix with a group in each row (axis 1) or column (axis 0). ``W_q``
holds rows of several parts of it in a byte, the first part in the highest bits. Zeros are numbers
with fractions, which blocks of native code have not. Computed in the dtype of the scales, as HQQ's
own code computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from polyhead.checkpoints.formats.coded import Codes

_DTYPES = torch.float32, torch.bfloat16, torch.float16
_SAID = (
    "axis", "group_size", "packing", "unpack_view_dtype", "view_as_float", "compute_dtype",
    "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize",
    "round_zero",
)  # fmt: skip
"""What shapes show, or no number depends on."""


@dataclass(frozen=True)
class Numbers:
    """A weight that was unpacked when it was read.

    Attributes:
        weight: ``[out, in]``, in the dtype of its scales.
    """

    weight: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return tuple(self.weight.shape)

    @property
    def dtype(self) -> torch.dtype:
        """That of the scales."""
        return self.weight.dtype

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """All of them, rounded from the dtype of the scales."""
        return self.weight.to(dtype)


def read_hqq(codes: Codes, stem: str, packed: Tensor) -> Numbers:
    """``W_q`` with ``scale``, ``zero``, ``shape`` and ``nbits``."""
    bits = codes.bits
    stated = codes.take(f"{stem}.nbits", bits)
    if stated.numel() != 1 or int(stated) != bits:
        raise codes.wrong(f"{stem}.nbits", f"must be {bits}, as config.json says")
    for key in ("quant_scale", "quant_zero"):
        flag = codes.take(f"{stem}.{key}", bits) if codes.has(f"{stem}.{key}") else None
        if flag is not None and bool(flag.any()):
            raise codes.wrong(f"{stem}.{key}", "must be 0: scales that are codes are not read")
    for key in _SAID:
        codes.pop(f"{stem}.{key}")
    sizes = codes.take(f"{stem}.shape", bits)
    codes.fit(f"{stem}.shape", sizes, (2,), "a matrix's", torch.int32, torch.int64)
    shape = [int(size) for size in sizes]
    parts = [packed >> shift & (1 << bits) - 1 for shift in range(8 - bits, -1, -bits)]
    whole = torch.cat(parts)
    if min(shape) < 1 or math.prod(shape) != whole.numel():
        got = f"got {shape} for {whole.numel()} codes"
        raise codes.wrong(f"{stem}.shape", f"must be the shape of the weight: {got}")
    scales, zeros = (codes.take(f"{stem}.{key}", bits) for key in ("scale", "zero"))
    rows, columns = whole.shape
    size = (1, columns) if scales.shape[:1] == (1,) and rows != 1 else (rows, 1)
    codes.fit(f"{stem}.scale", scales, size, "a number for each group", *_DTYPES)
    codes.fit(f"{stem}.zero", zeros, size, "a number for each group", scales.dtype)
    codes.finite(f"{stem}.scale", scales)
    codes.finite(f"{stem}.zero", zeros)
    return Numbers(((whole.to(scales.dtype) - zeros) * scales).view(shape))
