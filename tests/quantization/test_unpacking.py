"""Blocks are read as the gguf package unpacks them, by every instruction set."""

from __future__ import annotations

import copy
import warnings

import gguf
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polyhead import native
from polyhead.native.arguments import ACTIVATIONS, Network, Weight
from polyhead.native.code import Code
from polyhead.quantization import block_type, block_types, readable, scaled, unpack, unpacking
from random_blocks import by_package, random_blocks

needs_native = pytest.mark.skipif(native.code() is None, reason="no native code here")
NATIVE = [
    name
    for name, kind in block_types().items()
    if native.code() is not None and kind.number in native.code().block_sizes
]
CODES = pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)


@CODES
@pytest.mark.parametrize("name", NATIVE)
def test_native_code_reads_what_the_package_unpacks(code: Code, name: str) -> None:
    """Bit for bit, and a product adds the numbers as if they had lain there in float32."""
    kind = block_type(name)
    assert readable(code, kind)
    for count in (1, 2, 3, 5):  # of blocks: also what is no whole run of vectors
        numbers = count * kind.numbers
        blocks = random_blocks(kind, 9, numbers, seed=count)
        wanted = by_package(blocks, kind)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(
                code.unpack(Weight(blocks, None, kind.number), numbers, dtype), wanted.to(dtype)
            ), (count, dtype)
        bias = torch.randn(9)
        for rows in (1, 2, 5, 8):
            x = torch.randn(rows, numbers)
            y = code.product(x, [Weight(blocks, bias, kind.number), Weight(wanted, None)])
            plain = code.product(x, [Weight(wanted, bias), Weight(wanted, None)])
            assert torch.equal(y, plain), (count, rows)
        x = torch.randn(11, numbers)  # unpacked once for all
        weights = [Weight(blocks, bias, kind.number), Weight(wanted, None)]
        for many in (x, x.bfloat16()):
            fitting = [Weight(blocks, bias.to(many.dtype), kind.number)]
            y = code.product(many, fitting)
            assert torch.equal(y[:8], code.product(many[:8], fitting)), (count, many.dtype)
            y = code.product(many, fitting, batch_invariant=False).double()
            exact = many.double() @ wanted.to(many.dtype).double().mT
            exact += bias.to(many.dtype).double()  # of which y is a rounding
            close = 1e-5 if many.dtype is torch.float32 else 0.02
            assert torch.allclose(y, exact, rtol=close, atol=close * exact.abs().max().item())
        x = x[:, : numbers // 2].repeat(1, 2)  # a sum of nearly nothing shows its order
        rest = torch.randn(9, numbers // 2)
        for many in (x, x.bfloat16()):  # blocks beside numbers
            other = Weight(torch.cat((rest, -rest), dim=-1).to(many.dtype), None)
            beside = [weights[0]._replace(bias=bias.to(many.dtype)), other]
            few = torch.cat([code.product(rows, beside) for rows in many.split(4)])
            assert torch.equal(code.product(many, beside), few), (count, many.dtype)


@needs_native
def test_all_types_that_weights_are_quantised_to_are_read() -> None:
    """The package's sizes are those that native code was compiled with."""
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"} <= {
        *NATIVE
    }
    code = native.code()
    assert code is not None
    kinds = *block_types().values(), *scaled.TYPES.values()
    sizes = {kind.number: (kind.numbers, kind.octets) for kind in kinds}
    assert code.block_sizes.items() <= sizes.items()


@CODES
def test_a_feed_forward_network_of_blocks_has_the_bits_of_float32(code: Code) -> None:
    up, gate, down = (block_type(name) for name in ("Q4_K", "Q6_K", "Q8_0"))
    blocks = random_blocks(up, 64, 256), random_blocks(gate, 64, 256), random_blocks(down, 40, 64)
    kinds = up, gate, down
    packed = [Weight(b, None, kind.number) for b, kind in zip(blocks, kinds, strict=True)]
    plain = [Weight(by_package(b, kind), None) for b, kind in zip(blocks, kinds, strict=True)]
    for rows in (1, 3, 17):
        x = torch.randn(rows, 256)
        y, wanted = (
            code.feed_forward(x, Network(gate, up, down, ACTIVATIONS["silu"]))
            for up, gate, down in (packed, plain)
        )
        assert torch.equal(y, wanted)


@needs_native
def test_blocks_that_do_not_fit_are_refused() -> None:
    code, kind = native.code(), block_type("Q4_K")
    assert code is not None
    blocks, x = random_blocks(kind, 4, 256), torch.randn(1, 256)
    for wrong in (
        Weight(blocks[:, :-1], None, kind.number),  # a part of a block
        Weight(blocks, None, 3),  # a type of other sizes
        Weight(blocks, None, 99),
        Weight(blocks.to(torch.int64), None, kind.number),
        Weight(blocks, None),  # bytes as numbers
        Weight(blocks, torch.zeros(3), kind.number),
    ):
        with pytest.raises(ValueError, match="a weight must be"):
            code.product(x, [wrong])
    for numbers, number in ((512, kind.number), (250, kind.number), (256, 99)):
        with pytest.raises(ValueError, match="blocks must be bytes"):
            code.unpack(Weight(blocks, None, number), numbers, torch.float32)


def test_without_native_code_the_package_unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every type whose meaning it knows; rows may lie in more dimensions, and anywhere."""
    with monkeypatch.context() as patch:
        patch.setattr(native, "code", lambda: None)
        for name in ("Q4_0", "Q6_K", "IQ3_S", "TQ1_0"):
            kind = block_type(name)
            blocks = random_blocks(kind, 6, 512)
            wanted = by_package(blocks, kind)
            found = unpack(blocks.view(2, 3, -1)[:, ::2], kind, torch.float64)
            assert torch.equal(found, wanted.view(2, 3, 512)[:, ::2].double()), name
    with pytest.raises(NotImplementedError):
        unpack(torch.zeros(1, block_type("Q8_K").octets, dtype=torch.uint8), block_type("Q8_K"))


def test_what_traces_sees_an_operator() -> None:
    kind = block_type("Q4_0")
    blocks = random_blocks(kind, 3, 64)
    stacked = blocks.view(1, 3, -1)
    with FakeTensorMode() as mode:
        assert unpack(mode.from_tensor(blocks), kind, torch.bfloat16).shape == (3, 64)
        assert unpack(mode.from_tensor(stacked), kind).shape == (1, 3, 64)


@needs_native
def test_code_that_disagrees_is_not_used() -> None:
    code, kind = native.code(), block_type("Q4_1")
    assert code is not None
    broken = copy.copy(code)
    broken.unpack = lambda *call: code.unpack(*call) + 1e-3  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="does not read Q4_1: numbers differ"):
        assert not readable(broken, kind)
    broken = copy.copy(code)
    broken.product = lambda *call: code.product(*call) * 1.001  # type: ignore[method-assign]
    assert unpacking.disagreement(broken, kind) == "a product differs from float64"
    broken.block_sizes = {kind.number: (32, 21)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not readable(broken, kind)


def test_types_and_rows_that_are_none_are_named() -> None:
    with pytest.raises(ValueError, match=r"type must be one of .*Q4_K.*: got 'Q4'"):
        block_type("Q4")
    kind = block_type("Q4_K")
    assert (kind.row_octets(512), kind.row_numbers(288)) == (288, 512)
    with pytest.raises(ValueError, match="Q4_K has blocks of 256 numbers: got rows of 96"):
        kind.row_octets(96)
    with pytest.raises(ValueError, match="Q4_K has blocks of 144 bytes: got rows of 100"):
        unpack(torch.zeros(2, 100, dtype=torch.uint8), kind)
    assert set(block_types()) < {each.name for each in gguf.GGMLQuantizationType}


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "IQ4_XS"])
def test_blocks_may_lie_in_columns_or_apart(name: str) -> None:
    kind = block_type(name)
    blocks = random_blocks(kind, 6, 2 * kind.numbers, seed=3)
    wanted = unpack(blocks, kind)
    assert torch.equal(unpack(blocks.mT.contiguous().mT, kind), wanted)
    assert torch.equal(unpack(blocks.repeat_interleave(2, dim=0)[::2], kind), wanted)
    assert torch.equal(unpack(blocks.view(2, 3, -1).transpose(0, 1), kind)[2, 1], wanted[5])


def test_q8_1_is_a_scale_a_sum_and_codes() -> None:
    """The gguf package knows only its size."""
    scales, codes = torch.randn(3, 2, 1), torch.randint(-128, 128, (3, 2, 32), dtype=torch.int8)
    scales_and_sums = torch.cat((scales, torch.randn(3, 2, 1)), dim=-1)
    blocks = torch.cat((scales_and_sums.view(torch.uint8), codes.view(torch.uint8)), dim=-1)
    assert torch.equal(unpack(blocks.view(3, 80), block_type("Q8_1")), (scales * codes).view(3, 64))


@needs_native
@pytest.mark.parametrize(("name", "number"), [("IQ3_S", 1), ("IQ1_M", 1), ("Q4_0", 0)])
def test_grids_are_there_before_a_type_that_has_them_is_read(name: str, number: int) -> None:
    whole, taken = native.code(), []
    assert whole is not None
    code = copy.copy(whole)
    code.take_grids = lambda grids: taken.append(whole.take_grids(grids))  # type: ignore[method-assign]
    assert readable(code, block_type(name))
    assert len(taken) == number
