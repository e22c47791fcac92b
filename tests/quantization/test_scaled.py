"""Blocks whose scales lie in another tensor: as torch unpacks them, by every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyhead import native
from polyhead.native.arguments import Scales, Weight
from polyhead.native.code import Code
from polyhead.quantization import of_rows, readable, scaled, unpack
from polyhead.quantization.blocks import BlockType

CODES = pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
# Numbers and rows that share a scale, and whether codes have zeros of their own.
SHARES = [(32, 1, True), (64, 3, False), (128, 128, True), (1 << 20, 1, False)]


def drawn(
    kind: BlockType, rows: int, numbers: int, shares: tuple[int, int, bool], dtype: torch.dtype
) -> tuple[Tensor, Scales | None, Tensor]:
    """Blocks, scales, and the numbers that both mean, one by one."""
    random = torch.Generator().manual_seed(rows * numbers)
    if kind in (scaled.F16, scaled.BF16):
        half = torch.randn(rows, numbers, generator=random)
        held = half.to(torch.float16 if kind == scaled.F16 else torch.bfloat16)
        return held.view(torch.uint8), None, held.float()
    size = rows, kind.row_octets(numbers)
    blocks = torch.randint(256, size, generator=random, dtype=torch.uint8)
    of_numbers, of_rows, with_zeros = shares
    shape = -(-rows // of_rows), -(-numbers // of_numbers)
    scales = (torch.randn(shape, generator=random) * 0.02).to(dtype)
    zeros = torch.randint(256, shape, generator=random, dtype=torch.uint8)
    if kind == scaled.F8_E4M3 or not with_zeros:
        zeros = None
    meant = torch.empty(rows, numbers)
    middle = {"U8": 128, "U4": 8}.get(kind.name, 0)
    for n in range(rows):
        for k in range(numbers):
            place = n // of_rows, k // of_numbers
            if kind.name == "U4":
                code = float(blocks[n, k // 2] >> 4 * (k % 2) & 15)
            else:
                types = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8}
                code = float(blocks[n, k : k + 1].view(types[kind.name]))
            zero = float(middle)
            if zeros is not None:
                zero = float(zeros[place].view(torch.int8) if kind.name == "I8" else zeros[place])
            meant[n, k] = torch.tensor(code - zero) * scales[place].float()
    return blocks, Scales(scales, zeros, of_numbers, of_rows), meant


@CODES
@pytest.mark.parametrize("name", [*scaled.TYPES])
def test_native_code_reads_what_codes_and_scales_mean(code: Code, name: str) -> None:
    """Bit for bit, and a product adds the numbers as if they had lain there in float32."""
    kind = scaled.TYPES[name]
    assert readable(code, kind)
    dtypes = torch.float32, torch.bfloat16, torch.float16, torch.float32
    for shares, dtype in zip(SHARES, dtypes, strict=True):
        blocks, scales, wanted = drawn(kind, 9, 160, shares, dtype)
        weight = Weight(blocks, None, kind.number, scales)
        for made in (torch.float32, torch.bfloat16, torch.float16):
            found = code.unpack(weight, 160, made)
            torch.testing.assert_close(found, wanted.to(made), rtol=0, atol=0, equal_nan=True)
        if name == "F8_E4M3":  # codes that are no number, seen above, would hide all others
            blocks = torch.where(blocks & 127 == 127, 0x30, blocks)
            wanted = unpack(blocks, kind, scales=scales)
            weight = weight._replace(weight=blocks)
        bias = torch.randn(9)
        for rows in (1, 2, 5, 8, 11):
            x = torch.randn(rows, 160)
            y = code.product(x, [weight._replace(bias=bias), weight])
            plain = code.product(x, [Weight(wanted, bias), Weight(wanted, None)])
            assert torch.equal(y, plain), (shares, rows)
        for many in (x.bfloat16(), x.half()):
            y = code.product(many, [weight]).float()
            few = torch.cat([code.product(row, [weight]) for row in many.split(4)])
            assert torch.equal(y, few.float()), (shares, many.dtype)


@pytest.mark.parametrize("name", [*scaled.TYPES])
def test_without_native_code_torch_unpacks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = scaled.TYPES[name]
    blocks, scales, wanted = drawn(kind, 7, 96, (32, 3, True), torch.float16)
    monkeypatch.setattr(native, "code", lambda: None)
    found = unpack(blocks, kind, scales=scales)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    some = torch.tensor([5, 0, 5, 4])
    by = None if scales is None else of_rows(scales, some)
    found = unpack(blocks[some], kind, torch.float64, by)
    torch.testing.assert_close(found, wanted[some].double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(native.code() is None, reason="no native code here")
def test_scales_that_leave_a_number_without_one_are_refused() -> None:
    code, kind = native.code(), scaled.U4
    assert code is not None
    blocks, x = torch.zeros(5, 64, dtype=torch.uint8), torch.randn(1, 128)
    scales, zeros = torch.ones(3, 4), torch.zeros(3, 4, dtype=torch.uint8)
    whole = Scales(scales, zeros, 32, 2)
    good = Weight(blocks, None, kind.number, whole)
    assert code.product(x, [good]).shape == (1, 5)
    for wrong, words in (
        (None, "scales must be given"),
        (whole._replace(scales=scales[:2]), "scales must be floating-point"),
        (whole._replace(scales=scales[:, :3]), "scales must be floating-point"),
        (whole._replace(scales=scales.mT.contiguous().mT), "scales must be floating-point"),
        (whole._replace(scales=scales.to(torch.int64)), "scales must be floating-point"),
        (whole._replace(zeros=zeros[:2]), "zeros must be bytes"),
        (whole._replace(zeros=zeros.float()), "zeros must be bytes"),
        (whole._replace(numbers=48), "scales must be of whole runs"),
        (whole._replace(numbers=-32), "scales must be of whole runs"),
        (whole._replace(rows=0), "scales must be of whole runs"),
        (whole._replace(rows=1), "scales must be floating-point"),
    ):
        with pytest.raises(ValueError, match=words):
            code.product(x, [good._replace(scales=wrong)])
        with pytest.raises(ValueError, match=words):
            code.unpack(good._replace(scales=wrong), 128, torch.float32)
    with pytest.raises(ValueError, match="scales must be given"):
        code.product(x, [Weight(torch.zeros(5, 4 * 18, dtype=torch.uint8), None, 2, whole)])
    with pytest.raises(ValueError, match="zeros must be bytes"):
        code.product(x, [Weight(blocks.repeat(1, 2), None, scaled.F8_E4M3.number, whole)])
