"""Native products: equal to the modules they stand in for, wherever they may."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import polyhead as ph
from polyhead import native
from polyhead.layers import FeedForward, MultiHeadAttention, RMSNorm
from polyhead.layers import linear as few_rows
from polyhead.layers.linear import fused_linear, linear, linear_per_head
from polyhead.native.arguments import ACTIVATIONS, Network, Weight
from polyhead.native.code import Code
from polyhead.quantization import block_type
from random_blocks import by_package, random_blocks

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOW = pytest.mark.slow
TILES = "avx512_amx"


@pytest.fixture(autouse=True)
def _no_grad():
    threads = torch.get_num_threads()
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(params=native.all_codes(), ids=lambda code: code.name)
def code(request):
    with native.using(request.param):
        yield request.param


def projections(dtype: torch.dtype = torch.float32, bias: bool = True) -> list[nn.Linear]:
    return [nn.Linear(40, out, bias=bias).to(dtype) for out in (24, 8, 13)]


def separately(x: torch.Tensor, linears: list[nn.Linear]) -> torch.Tensor:
    return torch.cat([F.linear(x, m.weight, m.bias) for m in linears], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 40), (2, 4, 40), (3, 40), (40,)])
def test_equals_the_separate_products(code, dtype, bias, shape):
    linears, x = projections(dtype, bias), torch.randn(*shape).to(dtype)
    torch.testing.assert_close(fused_linear(x, *linears), separately(x, linears))


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("inputs", [1, 7, 16, 131, 576])
def test_every_number_of_rows_and_any_width(code, rows, inputs):
    module, x = nn.Linear(inputs, 5), torch.randn(rows, inputs)
    exact = x.double() @ module.weight.double().mT + module.bias.double()
    torch.testing.assert_close(linear(x, module).double(), exact, atol=1e-5, rtol=1e-5)


def few_at_a_time(code, x, weights):
    return torch.cat([code.product(rows, weights) for rows in x.split(5)])


ROWS = [pytest.param((9, 13, 40), id="some"), pytest.param(range(9, 41), id="all", marks=SLOW)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_many_rows_have_the_bits_of_few(code, dtype, rows):
    torch.manual_seed(0)
    for inputs, outputs in ((1, 5), (37, 3), (131, 113), (2640, 25)):
        weight, other = torch.randn(outputs, inputs).to(dtype), torch.randn(7, inputs).to(dtype)
        weights = [Weight(weight, torch.randn(outputs).to(dtype)), Weight(other, None)]
        for count in rows:
            x = torch.randn(count, inputs + 5).to(dtype)[:, 2:-3]
            y = code.product(x, weights)
            assert torch.equal(y, few_at_a_time(code, x, weights)), (inputs, count)
        exact = torch.cat((x.double() @ weight.double().mT, x.double() @ other.double().mT), dim=-1)
        exact[:, :outputs] += weights[0].bias.double()
        size = torch.cat((weight, other)).double().abs()
        bound = inputs * 2.0**-24 * (x.double().abs() @ size.mT + 4)
        bound += torch.finfo(dtype).eps * exact.abs() if dtype is not torch.float32 else 2.0**-23
        for found in (y, code.product(x, weights, batch_invariant=False)):
            assert ((found.double() - exact).abs() <= bound).all(), (inputs, count)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_many_rows_of_bfloat16_meet_blocks(code, name):
    """Tiles of rows and columns that are full, and the last ones; two threads; networks too."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    kind = block_type(name)
    blocks, others = (random_blocks(kind, rows, 768) for rows in (113, 48))
    numbers = torch.cat([by_package(each, kind) for each in (blocks, others)]).double()
    weights = [Weight(each, None, kind.number) for each in (blocks, others)]
    up, down = (
        Weight(random_blocks(kind, 256, 768), None, kind.number),
        random_blocks(kind, 40, 256),
    )
    network = Network(up, up, Weight(down, None, kind.number), ACTIVATIONS["relu2"])
    for count in (16, 17, 41, 100):
        x = (0.1 * torch.randn(count, 768)).bfloat16()
        y, exact = code.product(x, weights, batch_invariant=False), x.double() @ numbers.mT
        bound = 2.0**-8 * (x.double().abs() @ numbers.abs().mT)  # blocks are rounded, and y
        assert ((y.double() - exact).abs() <= bound).all(), count
        made = code.feed_forward(x, network, batch_invariant=False)
        torch.testing.assert_close(
            made, code.feed_forward(x, network), atol=0.02 * made.abs().max(), rtol=0.0
        )


@pytest.mark.parametrize("inputs", [1, 64, 131])
def test_bfloat16_has_one_order_and_is_within_rounding(code, inputs):
    """Asked for by rows or not: in pairs, where the processor has an instruction for them.

    Matrix tiles, which may multiply where rows are not asked for, have another order.
    """
    torch.manual_seed(0)
    x = torch.randn(19, inputs + 5).bfloat16()[:, 2:-3].repeat(1, 2)
    weight = torch.randn(113, inputs).bfloat16()  # of which sums of nearly nothing show their order
    cancelled = Weight(torch.cat((weight, -weight), dim=-1), None)
    weights = [cancelled, Weight(torch.randn(7, 2 * inputs).bfloat16(), None)]
    y, other = (code.product(x, weights, batch_invariant=asked) for asked in (True, False))
    assert torch.equal(y, few_at_a_time(code, x, weights))
    assert torch.equal(y, other) or code.name == TILES
    exact = x.double() @ torch.cat([each.weight for each in weights]).double().mT
    for found in (y, other):
        torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=2.0**-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
def test_networks_of_many_rows_have_the_bits_of_few(code, dtype, gated):
    torch.manual_seed(0)
    for hidden, clamp, offset in ((210, math.inf, 0.0), (33, 0.4, 1.0)):
        gate, up = (
            Weight(torch.randn(hidden, 50).to(dtype), torch.randn(hidden).to(dtype))
            for _ in range(2)
        )
        down = Weight(torch.randn(21, hidden).to(dtype), torch.randn(21).to(dtype))
        alphas = torch.tensor([0.3]).to(dtype), torch.tensor([-0.7]).to(dtype)
        x = torch.randn(23, 60).to(dtype)[:, :50]
        for activation in ACTIVATIONS.values():
            own = (alphas,) if activation == ACTIVATIONS["xielu"] else ()
            network = Network(gate if gated else None, up, down, activation, clamp, offset, *own)
            y = code.feed_forward(x, network)
            few = torch.cat([code.feed_forward(rows, network) for rows in x.split(8)])
            assert torch.equal(y, few), (activation, hidden)
            other = code.feed_forward(x, network, batch_invariant=False)
            if code.name == TILES and dtype is torch.bfloat16:  # another order
                torch.testing.assert_close(other, y, atol=2.0**-7 * y.abs().max(), rtol=2.0**-6)
            else:
                assert torch.equal(other, y)
    torch.set_num_threads(3)
    long = torch.randn(780, 50).to(dtype)
    y = code.feed_forward(long, network)
    assert torch.equal(y[-8:], code.feed_forward(long[-8:], network))
    with pytest.raises(ValueError, match="takes rows"):
        code.feed_forward(x[:0], network)


def test_threads_and_blocks_of_many_rows_change_no_bits(code):
    """Threads share rows and columns; more than 768 rows are packed block by block."""
    weights = [Weight(torch.randn(101, 35), torch.randn(101)), Weight(torch.randn(4, 35), None)]
    for count in (29, 800):
        x, wanted = torch.randn(count, 35), None
        for threads in range(1, 6):
            torch.set_num_threads(threads)
            y = code.product(x, weights)
            wanted = few_at_a_time(code, x, weights) if wanted is None else wanted
            assert torch.equal(y, wanted), (count, threads)
    assert code.product(torch.randn(9, 0), [Weight(torch.randn(3, 0), None)]).eq(0).all()
    assert code.product(torch.randn(9, 4), [Weight(torch.randn(0, 4), None)]).shape == (9, 0)
    with pytest.raises(ValueError, match="and rows"):
        code.product(torch.randn(0, 4), [Weight(torch.randn(2, 4), None)])


def test_some_may_have_a_bias_and_others_none():
    linears = [nn.Linear(40, 8), nn.Linear(40, 8, bias=False)]
    x = torch.randn(3, 40)
    torch.testing.assert_close(fused_linear(x, *linears), separately(x, linears))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(1, 1), (3, 1), (1, 7), (5, 4)])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (7, 133), (96, 64)])
def test_products_by_heads_equal_float64(code, dtype, rows, inputs, outputs):
    torch.manual_seed(0)
    x = torch.randn(*rows, 5, inputs + 3).to(dtype)[..., 1:-2]
    both = torch.randn(5, inputs + 9, outputs).to(dtype)
    other = torch.randn(5, outputs + 2, inputs).to(dtype)
    close = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 2e-2}[dtype]
    for weight, transposed in ((both[:, 9:], True), (other[:, :-2], False)):
        found = linear_per_head(x, weight, transposed=transposed)
        equation = "bthi,hio->btho" if transposed else "bthi,hoi->btho"
        exact = torch.einsum(equation, x.double(), weight.double())
        torch.testing.assert_close(found.double(), exact, atol=close, rtol=close / 10)
    assert (
        linear_per_head(torch.randn(5, 13, 5, 24), both.float()[:, :24], transposed=True) is None
    )  # 65 rows


def test_strided_inputs_are_read_rightly():
    linears = projections(bias=False)
    for x in (
        torch.randn(3, 2, 40).transpose(0, 1),
        torch.randn(1, 1, 40).expand(2, 3, 40),
        torch.randn(2, 80)[:, ::2],
    ):
        torch.testing.assert_close(fused_linear(x, *linears), separately(x, linears))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_feed_forward_equals_float64(code, dtype, activation, gated, bias):
    network = FeedForward(48, 100, activation, gated, bias).to(dtype)
    x = torch.randn(2, 3, 48).to(dtype)
    form = network.form(x)
    assert form is not None
    found = few_rows.feed_forward(x, network.gate_proj, network.up_proj, network.down_proj, form)
    exact = copy.deepcopy(network).double()(x.double())
    close = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found.double(), exact, atol=close, rtol=close)
    assert torch.equal(network(x), found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 1, 83), (3, 2, 64), (700, 128)])
def test_norm_equals_torchs_and_rounds_as_often(code, dtype, offset, shape):
    torch.manual_seed(0)
    norm = RMSNorm(shape[-1], weight_offset=offset)
    norm.weight.copy_(torch.randn(shape[-1]))
    norm = norm.to(dtype)
    draws = [torch.randn(*shape).to(dtype) for _ in range(2 + 80_000 // math.prod(shape))]
    with torch.enable_grad():
        wanted = torch.stack([norm(x).detach() for x in draws])
    found = torch.stack([norm(x) for x in draws])
    if dtype is torch.float32:
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=2e-6)
    else:
        # Sums in another order may fall on the other side of a tie: one step, and rarely.
        torch.testing.assert_close(found, wanted, atol=0, rtol=2 * torch.finfo(dtype).eps)
        assert (found != wanted).float().mean() < 1e-3


def forward_hook(m):
    m[0].register_forward_hook(lambda module, args, out: out * 2)


def forward_pre_hook(m):
    m[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def own_forward(m):
    m[0].forward = lambda x: torch.zeros(*x.shape[:-1], 24)


def subclass(m):
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    m[0] = Scaled(40, 24)


def parametrized(m):
    class Double(nn.Module):
        def forward(self, w):
            return w * 2

    torch.nn.utils.parametrize.register_parametrization(m[0], "weight", Double())


def double_precision(m):
    for module in m:
        module.double()


def mixed_precision(m):
    m[1].bfloat16()


def strided_weight(m):
    m[1].weight = nn.Parameter(torch.randn(40, 8).T)


def another_width(m):
    m[2] = nn.Linear(41, 13)


@pytest.mark.parametrize(
    "change",
    [forward_hook, forward_pre_hook, own_forward, subclass, parametrized, double_precision,
     mixed_precision, strided_weight, another_width],
)  # fmt: skip
def test_modules_that_are_more_than_a_product_are_left_to_themselves(change):
    linears, x = projections(), torch.randn(2, 40)
    assert fused_linear(x, *linears) is not None
    change(linears)
    assert fused_linear(x.to(linears[0].weight.dtype), *linears) is None


def test_long_inputs_are_left_to_torch_where_that_is_faster():
    linears, x = projections(), torch.randn(65, 40)
    network = FeedForward(40, 30)
    for code in native.all_codes():
        with native.using(code):
            for dtype in DTYPES:
                found = fused_linear(x.to(dtype), copy.deepcopy(linears[0]).to(dtype))
                assert (found is not None) == (dtype in code.dtypes), (code.name, dtype)
            few = torch.cat([fused_linear(rows, linears[0]) for rows in x.split(4)])
            if (found := fused_linear(x, linears[0])) is not None:
                torch.testing.assert_close(found, few)
            assert fused_linear(x, *linears) is None  # each is let go of by itself
            parts = torch.cat([network(rows) for rows in x.split(4)])
            torch.testing.assert_close(network(x), parts)
            with ph.batch_invariant():
                assert torch.equal(fused_linear(x, linears[0]), few)
                assert torch.equal(network(x), parts)
    assert fused_linear(x[:0], *linears) is None


def test_gradients_are_left_to_autograd():
    with torch.enable_grad():
        assert fused_linear(torch.randn(2, 40), *projections()) is None


def test_what_watches_or_transforms_is_left_alone():
    from torch.utils.flop_counter import FlopCounterMode

    linears, x = projections(), torch.randn(2, 40)
    with FlopCounterMode(display=False) as flops:
        linear(x, linears[0])
    assert flops.get_total_flops() == 2 * 2 * 40 * 24
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, linears[0]).dtype == torch.bfloat16
    batched = torch.func.vmap(lambda row: linear(row, linears[0]))(x)
    torch.testing.assert_close(batched, linears[0](x))
    seen = []
    torch.compile(
        lambda x: seen.append(fused_linear(x, *linears)) or x, backend="eager", fullgraph=True
    )(x)
    assert seen == [None]
    assert fused_linear(x.to("meta"), *linears) is None


def test_a_changed_parameter_counts_at_once():
    linears, x = projections(), torch.randn(2, 40)
    linears[0].weight.data[:, 8:16] = 0
    torch.testing.assert_close(fused_linear(x, *linears), separately(x, linears))


@pytest.mark.parametrize("make", [lambda: MultiHeadAttention(16, 4), lambda: FeedForward(16, 32)])
def test_owners_save_and_copy_well(make):
    owner, x = make().eval(), torch.randn(1, 3, 16)
    want = owner(x)
    copied = copy.deepcopy(owner)
    for p in copied.parameters():
        p.mul_(2)
    assert torch.equal(owner(x), want)
    assert not torch.allclose(copied(x), want)
    file = io.BytesIO()
    torch.save(owner, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(owner)), torch.load(file, weights_only=False)):
        torch.testing.assert_close(other(x), want)


def test_owners_follow_a_projection_that_was_replaced():
    owner, x = MultiHeadAttention(16, 4).eval(), torch.randn(1, 3, 16)
    before = owner(x)
    plain = owner.q_proj
    owner.q_proj = nn.Sequential(plain)
    torch.testing.assert_close(owner(x), before)
    owner.q_proj = nn.Sequential(nn.Linear(16, 16))
    assert not torch.allclose(owner(x), before)


@pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
def test_silu_far_below_zero_is_zero(code: Code) -> None:
    """Its exponential is beyond what float32 holds."""
    one = torch.ones(1, 1)
    for gate in (-88.0, -90.0, -130.0, -1e4, -1e30):
        far = Weight(one * gate, None)
        network = Network(far, Weight(one, None), Weight(one, None), ACTIVATIONS["silu"])
        assert abs(code.feed_forward(one, network)) < 1e-6


@pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
def test_gelu_keeps_its_precision_far_below_zero(code: Code) -> None:
    """Where 1 + erf would lose all of it; an infinite and an undefined number as torch has them."""
    x = torch.linspace(-12, 12, 4001)[:, None]
    one = Weight(torch.ones(1, 1), None)
    network = Network(None, one, one, ACTIVATIONS["gelu"])
    y = code.feed_forward(x, network)
    exact = 0.5 * x.double() * torch.erfc(-x.double() / 2**0.5)
    assert ((y - exact).abs() / exact.abs().clamp(min=1e-37)).max() < 1e-5
    assert (y - exact).abs().max() < 1e-6
    edges = code.feed_forward(torch.tensor([[math.inf], [math.nan]]), network)
    assert edges[0] == math.inf
    assert edges[1].isnan()


@pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
def test_xielu_keeps_its_precision_near_zero(code: Code) -> None:
    """Where eˣ − 1 − x would lose all of it; infinite and undefined numbers as torch has them."""
    x = torch.cat([torch.linspace(-20, 5, 4001), -torch.logspace(-8, 0, 500)])[:, None]
    one = Weight(torch.ones(1, 1), None)
    for numbers in ((0.3, -0.7), (25.0, -30.0)):
        alphas = torch.tensor([numbers[0]]), torch.tensor([numbers[1]])
        network = Network(None, one, one, ACTIVATIONS["xielu"], alphas=alphas)
        above, below = (nn.functional.softplus(each.double()) for each in alphas)
        low = x.double().clamp(max=-1e-6)
        bent = (torch.expm1(low) - low + (low - x)) * (0.5 + below)
        bent = torch.where(x > 0, above * x.double() ** 2, bent)
        y = code.feed_forward(x, network)
        assert ((y - bent - 0.5 * x).abs() / (bent.abs() + 0.5 * x.abs() + 1e-12)).max() < 1e-6
        edges = code.feed_forward(torch.tensor([[math.inf], [math.nan]]), network)
        assert edges[0] == math.inf
        assert edges[1].isnan()
    for wrong in (None, (torch.ones(1), torch.ones(2)), (torch.ones(1), torch.ones(1).double())):
        with pytest.raises(ValueError, match="alphas"):
            code.feed_forward(x, network._replace(alphas=wrong))
    with pytest.raises(ValueError, match="alphas"):
        code.feed_forward(x, network._replace(activation=ACTIVATIONS["relu"]))
