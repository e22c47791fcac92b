"""Activations in 8 bits: products against exact ones, with every instruction set."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_quantized_layers import layers
from torch import Tensor

import polyhead as ph
from polyhead import native
from polyhead.caches import DenseCache
from polyhead.layers import transformer_layer
from polyhead.layers.decode_plan import plan_for
from polyhead.layers.linear import feed_forward, fused_linear
from polyhead.layers.quantized import QuantizedLinear, int8_activations
from polyhead.models.int8_activations import round_activations, rounding_types
from polyhead.native.arguments import INT8_ACTIVATIONS, Network, Scales, Weight
from polyhead.native.code import Code
from polyhead.quantization import BlockType, block_type, readable
from polyhead.quantization.scaled import F8_E4M3, I8, U4, U8, is_scaled, numbers_of
from random_blocks import blocks_of, by_package, random_blocks

pytestmark = pytest.mark.skipif(native.code() is None, reason="no native code here")
CODES = native.all_codes()
TYPES = [kind.name for kind in rounding_types(CODES[-1]) if not is_scaled(kind)] if CODES else []


def exact(x: Tensor, numbers: Tensor) -> Tensor:
    """Sums in float64 of codes of 8 bits, times scales and weights that are exact."""
    runs = x.double().unflatten(-1, (-1, 32))
    most = runs.abs().amax(-1, keepdim=True)
    codes = (runs * torch.where(most > 0, 127 / most, 0.0)).round()
    return ((codes * most / 127).flatten(-2)) @ numbers.double().T


def rows_of_codes(rows: int, numbers: int) -> Tensor:
    """Whole numbers times powers of two, one of each 32 the largest: nothing is rounded."""
    x = torch.randint(-127, 128, (rows, numbers // 32, 32)).float()
    x[..., 5] = torch.where(torch.rand(x.shape[:-1]) < 0.5, -127.0, 127.0)
    return (x * 2.0 ** torch.randint(-6, 3, (rows, numbers // 32, 1))).flatten(1)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("name", TYPES)
def test_products_are_those_of_whole_numbers(name: str, code: Code) -> None:
    """Extreme codes too, of which an instruction for 16 bits must not lose a part."""
    kind = block_type(name)
    assert readable(code, kind)

    def product(x: Tensor, number: int) -> Tensor:
        return code.product(x, [Weight(blocks, None, number)])

    def error(x: Tensor, y: Tensor, expected: Tensor) -> float:
        size = (x.abs().double() @ numbers.double().abs().T).clamp(min=1e-30)
        return ((y - expected).abs() / size).max().item()

    extreme = [blocks_of(byte, kind, 23, 768) for byte in (0, 127, 128, 255)]
    for blocks in (random_blocks(kind, 23, 768), *extreme):
        numbers = by_package(blocks, kind)
        for rows in (1, 2, 3, 7, 8, 19):
            x = rows_of_codes(rows, 768)
            y = product(x, kind.number + INT8_ACTIVATIONS)
            assert error(x, y, exact(x, numbers)) < 1e-6
            alone = [product(r, kind.number + INT8_ACTIVATIONS) for r in x[:, None]]
            assert torch.equal(torch.cat(alone), y)
        # Nowhere near the middle of two codes, which the last bit of a quotient would choose.
        x = torch.randint(-126, 127, (3, 24, 32)) + 0.8 * torch.rand(3, 24, 32) - 0.4
        x[..., 5] = 127.0
        x = 0.01 * x.flatten(1)
        y = product(x, kind.number + INT8_ACTIVATIONS)
        assert error(x, y, int8_activations(x).double() @ numbers.double().T) < 1e-5
        assert torch.equal(y, product(x, kind.number)) == (not numbers.any())


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [I8, U8, U4], ids=str)
def test_products_with_scales_in_another_tensor(
    kind: BlockType, dtype: torch.dtype, code: Code
) -> None:
    """Scales of two rows and 64 numbers, then of one row and all; zeros of any byte, or none."""
    assert readable(code, kind)
    for rows_of, run, zeros in ((2, 64, True), (2, 64, False), (1, 352, True)):
        blocks = torch.randint(256, (23, kind.row_octets(352)), dtype=torch.uint8)
        groups = -(-23 // rows_of), -(-352 // run)
        bytes_ = torch.randint(256, groups, dtype=torch.uint8) if zeros else None
        scales = Scales(torch.randn(groups).to(dtype), bytes_, run, rows_of)
        numbers = numbers_of(blocks, kind, scales)
        # In units of what is added up: a zero is 8 or 128 times a scale, and codes are as large.
        most = scales.scales.abs().max().double() * 256
        weight = Weight(blocks, None, kind.number + INT8_ACTIVATIONS, scales)
        for rows in (1, 2, 3, 8, 19, 70):
            x = rows_of_codes(rows, 352)
            y = code.product(x, [weight])
            size = x.abs().double().sum(dim=1, keepdim=True) * most
            assert ((y - exact(x, numbers)).abs() / size).max() < 1e-7
            alone = [code.product(r, [weight]) for r in x[:, None]]
            assert torch.equal(torch.cat(alone), y)


def test_numbers_are_rounded_once() -> None:
    """98.5000019 steps, which float32 holds as 98.5, and 70.4999993, of a quotient rounded once."""
    x = torch.zeros(2, 32)
    x[0, 0], x[0, 1] = float.fromhex("0x1.08a8c2p+1"), float.fromhex("0x1.9a88cep+0")
    x[1, 0], x[1, 1] = 2.5742435455322266, 1.429009199142456
    assert (int8_activations(x) / x[:, :1] * 127).round()[:, :2].tolist() == [[127, 99], [127, 70]]


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_prompt_have_the_bits_that_they_have_alone(
    dtype: torch.dtype, code: Code
) -> None:
    """More rows than a GEMM's block, a few, one; columns that fill no panel; types; networks."""

    def weight(name: str, rows: int, numbers: int, bias: bool) -> Weight:
        kind = block_type(name)
        assert readable(code, kind)
        added = torch.randn(rows).to(dtype) if bias else None
        return Weight(random_blocks(kind, rows, numbers), added, kind.number + INT8_ACTIVATIONS)

    x = torch.randn(809, 256).to(dtype)
    x[11, 70] = torch.inf
    some = [0, 7, 11, 12, 403, 404, 405, 808]
    each = [weight(name, 19, 256, bool(i % 2)) for i, name in enumerate(TYPES)]
    gate, up = weight("Q8_0", 96, 256, False), weight("Q4_1", 96, 256, True)
    down = weight("Q5_0", 37, 96, True)
    networks = [
        Network(gate if gated else None, up, down, 1, 0.7, offset)
        for gated, offset in ((True, 0.0), (True, 0.5), (False, 0.0))
    ]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            calls = [partial(code.product, weights=each[i : i + 4]) for i in range(0, len(each), 4)]
            for call in [*calls, *(partial(code.feed_forward, network=n) for n in networks)]:
                whole, few = call(x), call(x[some])
                alone = torch.cat([call(x[i : i + 1]) for i in some[:3]] + [call(x[some[3:6]])])
                assert whole[11].isnan().all()
                assert whole[:11].isfinite().all()
                assert torch.equal(whole[some].nan_to_num(), few.nan_to_num())
                assert torch.equal(few[:6].nan_to_num(), alone.nan_to_num())
    finally:
        torch.set_num_threads(before)


def test_each_32_numbers_are_rounded_by_their_own_scale() -> None:
    x = torch.randn(5, 4, 32) * torch.logspace(-3, 3, 4)[:, None]
    error = (int8_activations(x.flatten(1)).view_as(x) - x).abs()
    assert (error <= x.abs().amax(-1, keepdim=True) / 254 * 1.001).all()
    assert (error > 0).any()


def test_what_is_not_finite_or_nothing() -> None:
    kind = block_type("Q4_1")
    module = QuantizedLinear(random_blocks(kind, 16, 128), kind)
    module.int8_activations = True
    x = torch.randn(4, 128)
    x[0, 3], x[1, 70], x[2] = torch.nan, torch.inf, 0
    for y in (module(x), torch.nn.functional.linear(int8_activations(x), module.weight)):
        assert y[:2].isnan().all()
        assert (y[2] == 0).all()
        assert y[3].isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_and_prompts_have_the_bits_of_modules_row_by_row(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _ = layers()
    before = layer.to(dtype)
    x, mask = torch.randn(2, 9, 128, dtype=dtype), ph.Causal()

    def decoded() -> Tensor:
        cache = DenseCache()
        before(x[:, :3], mask=mask, cache=cache)
        rows = [x[:, i : i + 1].contiguous() for i in range(3, 9)]
        found = torch.cat([before(row, mask=mask, cache=cache) for row in rows], dim=1)
        explained.append(plan_for(cache, [before]).explain())
        return found

    explained: list[str] = []
    plain = decoded()
    for part in before.modules():
        if isinstance(part, QuantizedLinear) and part.kind.name in TYPES:
            part.int8_activations = True  # the step sees it at once
    stepped = decoded()
    assert not torch.equal(stepped, plain)
    assert torch.allclose(stepped.float(), plain.float(), atol=0.1 * plain.abs().max().item())
    assert explained == ["layer 0: native"] * 2
    with monkeypatch.context() as patch:
        patch.setattr(transformer_layer, "step", lambda *call: None)
        assert torch.equal(decoded(), stepped)
    q, k = before.attention.q_proj, before.attention.k_proj
    ff = before.feed_forward
    many = torch.randn(21, 128, dtype=dtype)
    for made in (
        lambda rows: q(rows),
        lambda rows: fused_linear(rows, q, k),
        lambda rows: feed_forward(rows, None, ff.up_proj, ff.down_proj, (1, torch.inf, 0.0)),
    ):
        each = [made(many[i : i + 1]) for i in range(21)]
        whole = made(many)
        if whole is not None:
            assert torch.equal(whole, torch.cat(each))
        assert torch.equal(made(many[:8]), torch.cat(each[:8]))


def test_what_cannot_round_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = block_type("Q4_0")
    module = QuantizedLinear(random_blocks(kind, 16, 128), kind)
    round_activations(module)
    with pytest.raises(ph.UnsupportedError, match="gradients need x as it is"):
        module(torch.randn(2, 128, requires_grad=True))
    with pytest.raises(ph.UnsupportedError, match="weights in blocks, and this model has none"):
        round_activations(torch.nn.Linear(3, 4))
    bytes_ = torch.zeros(4, 64, dtype=torch.uint8)
    floats = QuantizedLinear(bytes_, F8_E4M3, scales=Scales(torch.ones(1, 1), None, 64, 4))
    with pytest.raises(ph.UnsupportedError, match=r"Q4_0, Q4_1.* 0 is F8_E4M3 and reads 64"):
        round_activations(torch.nn.Sequential(floats))
    with pytest.raises(ValueError, match="activations must be 'int8' or None: got 'int4'"):
        ph.load("smollm2", activations="int4")
    code = native.code()
    assert code is not None
    with pytest.raises(ValueError, match="does not take x in 8 bits"):
        code.product(torch.randn(1, 64), [Weight(bytes_, None, 64 + INT8_ACTIVATIONS)])
    monkeypatch.setattr(native, "code", lambda: None)
    with pytest.raises(ph.UnsupportedError, match="needs native code"):
        round_activations(module)
