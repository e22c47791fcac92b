"""Products of more rows than a step has, in any order: within rounding, whatever their shapes."""

from __future__ import annotations

import math

import pytest
import torch

from polyhead import native
from polyhead.native.arguments import ACTIVATIONS, MAX_STEP_ROWS, Network, Weight
from polyhead.quantization import block_type
from random_blocks import by_package, random_blocks

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(params=native.all_codes(), ids=lambda code: code.name)
def code(request):
    return request.param


def in_any_order(code, x, weights):
    """On one thread and on three: sums do not depend on how many there are."""
    y = code.product(x, weights, batch_invariant=False)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(y, code.product(x, weights, batch_invariant=False)), threads
    return y


def within_rounding(found, x, numbers, bias=0.0, rounded=0.0):
    """To float64, for sums in float32, of weights that were rounded by so much."""
    exact = x.double() @ numbers.double().mT + bias
    size = x.double().abs() @ numbers.double().abs().mT
    bound = (x.shape[1] * 2.0**-24 + rounded) * (size + 4) + 2.0**-22
    if found.dtype is not torch.float32:
        bound += torch.finfo(found.dtype).eps * exact.abs()
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [
        (65, 1, 5),
        (65, 37, 97),
        (71, 131, 113),
        (800, 48, 101),
        (97, 964, 50),
        (66, 4000, 25),
        (65, 0, 5),
    ],
)
def test_products_are_within_rounding(code, dtype, rows, inputs, outputs):
    """Tails of rows, columns and inputs; more rows than a block; inputs of several panels."""
    weight, other = torch.randn(outputs, inputs).to(dtype), torch.randn(7, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    x = torch.randn(rows, inputs + 5).to(dtype)[:, 2:-3]
    y = in_any_order(code, x, [Weight(weight, bias), Weight(other, None)])
    within_rounding(y[:, :outputs], x, weight, bias.double())
    within_rounding(y[:, outputs:], x, other)


def test_sums_of_long_rows_round_no_more_than_torchs(code):
    """In one run over 4,000 inputs they would lose four times as much."""
    x, weight = torch.randn(70, 4000), torch.randn(33, 4000)
    exact = x.double() @ weight.double().mT
    y = code.product(x, [Weight(weight, None)], batch_invariant=False).double()
    assert (y - exact).norm() <= 5e-7 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "inputs"), [("Q4_1", 96), ("Q8_0", 1056), ("Q6_K", 4352)])
def test_blocks_are_unpacked_part_by_part(code, dtype, name, inputs):
    kind = block_type(name)
    blocks, x = random_blocks(kind, 113, inputs), 0.1 * torch.randn(90, inputs).to(dtype)
    y = in_any_order(code, x, [Weight(blocks, None, kind.number)])
    rounded = 2.0**-8 if dtype is torch.bfloat16 else 0.0
    within_rounding(y, x, by_package(blocks, kind), rounded=rounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("inputs", "hidden"), [(50, 211), (1001, 33), (17, 2003)])
def test_networks_equal_those_in_one_order(code, dtype, gated, inputs, hidden):
    def weight(outputs, width):
        numbers = torch.randn(outputs, width) * width**-0.5
        return Weight(numbers.to(dtype), torch.randn(outputs).to(dtype))

    gate, up, down = weight(hidden, inputs), weight(hidden, inputs), weight(21, hidden)
    x = torch.randn(781, inputs + 3).to(dtype)[:, 1:-2]
    alphas = torch.tensor([0.3]).to(dtype), torch.tensor([-0.7]).to(dtype)
    for name, clamp, offset in (("silu", math.inf, 0.0), ("xielu", 0.4, 1.0)):
        own = (alphas,) if name == "xielu" else ()
        network = Network(gate if gated else None, up, down, ACTIVATIONS[name], clamp, offset, *own)
        wanted = code.feed_forward(x, network).double()
        found = code.feed_forward(x, network, batch_invariant=False).double()
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found, wanted, atol=4 * eps + 2e-5, rtol=2 * eps + 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite_stay_alone(code, dtype):
    x, weight = torch.randn(200, 70).to(dtype), Weight(torch.randn(60, 70).to(dtype), None)
    network = Network(weight, weight, Weight(torch.randn(9, 60).to(dtype), None), 1)
    bad = x.clone()
    bad[3], bad[77, 69], bad[199, 0] = math.nan, math.inf, -math.inf
    others = bad.isfinite().all(dim=-1)
    for run in (
        lambda rows: code.product(rows, [weight], batch_invariant=False),
        lambda rows: code.feed_forward(rows, network, batch_invariant=False),
    ):
        found = run(bad)
        assert torch.equal(found[others], run(x)[others])
        assert not found[~others].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [None, block_type("Q4_1")])
def test_as_many_rows_as_a_step_has_get_their_own_bits(code, dtype, kind):
    x = torch.randn(MAX_STEP_ROWS + 1, 320).to(dtype)
    numbers = random_blocks(kind, 50, 320) if kind else torch.randn(50, 320).to(dtype)
    weight = Weight(numbers, None, kind.number if kind else 0)
    few = code.product(x, [weight])
    assert torch.equal(code.product(x[:-1], [weight], batch_invariant=False), few[:-1])
    assert not torch.equal(code.product(x, [weight], batch_invariant=False), few)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(65, 1, 5), (71, 131, 113), (801, 48, 101), (97, 964, 50), (66, 0, 3)],
)
def test_matrices_that_lie_by_rows_or_by_columns(code, dtype, rows, inner, columns):
    """Each factor in either order, with gaps between rows of the first; added to numbers or not."""
    a, plus = torch.randn(rows, inner + 3).to(dtype)[:, 1:-2], torch.randn(rows, columns).to(dtype)
    b = torch.randn(inner, columns).to(dtype)
    by_columns = torch.full((inner + 1, rows + 5), math.nan).to(dtype)[:inner, 2:-3]
    by_columns.copy_(a.mT)  # what lies behind is not read
    made = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for left in (a, by_columns.mT):
            for right in (b, b.mT.contiguous().mT):
                made.append(code.matmul(left, right))
                added = plus.clone()
                assert code.matmul(left, right, added) is added
                within_rounding(added, a, b.mT, plus.double())
    assert all(torch.equal(made[0], each) for each in made)
    within_rounding(made[0], a, b.mT)


def test_dimensions_of_one_may_have_any_stride(code):
    a, row, number = torch.randn(70, 1), torch.randn(1, 9), torch.randn(1, 1)
    for left in (a, a.as_strided((70, 1), (1, 7)), torch.randn(70, 5)[:, 2:3]):
        for right in (row, row.as_strided((1, 9), (99, 1)), number.as_strided((1, 1), (5, 7))):
            within_rounding(code.matmul(left, right), left, right.mT)


def test_fewer_rows_of_many_inputs_are_packed_at_a_time(code):
    a, b = torch.randn(190, 50_000), torch.randn(50_000, 3)
    within_rounding(code.matmul(a, b), a, b.mT)
    y = code.product(a, [Weight(b.mT.contiguous(), None)], batch_invariant=False)
    within_rounding(y, a, b.mT)


def test_matrices_that_do_not_fit_are_refused(code):
    a, b = torch.randn(70, 8), torch.randn(8, 6)
    for left, right, plus in (
        (a[:64], b, None),
        (a[:, ::2], b[:4], None),
        (a, b[:7], None),
        (a, b[:, ::2], None),
        (a, torch.randn(8, 9)[:, :6], None),
        (a, b.double(), None),
        (a, b.bfloat16(), None),
        (a.to(torch.int32), b.to(torch.int32), None),
        (a[None], b, None),
        (a, b, torch.zeros(70, 5)),
        (a, b, torch.zeros(70, 12)[:, ::2]),
    ):
        with pytest.raises(ValueError, match=r"^(a|b|y) must be "):
            code.matmul(left, right, plus)
