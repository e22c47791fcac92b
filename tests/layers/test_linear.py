"""Packed weights: equal to F.linear, and never stale."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polyhead.layers import FeedForward, FusedLinear, MultiHeadAttention, packing
from polyhead.layers.linear import _can_pack, linear

pytestmark = pytest.mark.skipif(
    not _can_pack(torch.float32), reason="oneDNN does not pack weights on this machine"
)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def projections(dtype: torch.dtype = torch.float32, bias: bool = True) -> list[nn.Linear]:
    return [nn.Linear(40, out, bias=bias).to(dtype) for out in (24, 8, 13)]


def side_by_side(x: torch.Tensor, linears: list[nn.Linear]) -> torch.Tensor:
    return torch.cat([F.linear(x, m.weight, m.bias) for m in linears], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 40), (2, 7, 40), (1, 0, 40), (300, 40), (40,)])
def test_equals_the_separate_products(dtype, bias, shape):
    if not _can_pack(dtype):
        pytest.skip(f"oneDNN does not pack {dtype} here")
    linears, x = projections(dtype, bias), torch.randn(*shape).to(dtype)
    torch.testing.assert_close(FusedLinear()(x, *linears), side_by_side(x, linears))


def test_some_may_have_a_bias_and_others_none():
    linears = [nn.Linear(40, 8), nn.Linear(40, 8, bias=False)]
    x = torch.randn(3, 40)
    torch.testing.assert_close(FusedLinear()(x, *linears), side_by_side(x, linears))


def test_strided_inputs_and_weights_are_read_rightly():
    linears = projections(bias=False)
    linears[0].weight = nn.Parameter(torch.randn(40, 24).T)
    for x in (torch.randn(6, 2, 40).transpose(0, 1), torch.randn(1, 1, 40).expand(2, 3, 40)):
        torch.testing.assert_close(FusedLinear()(x, *linears), side_by_side(x, linears))


def by_data_whole(m):
    m[0].weight.data.mul_(2)


def by_data_columns(m):
    m[1].weight.data[:, 8:16] = 0


def by_data_rows(m):
    m[0].weight.data[6:12] = 0


def by_data_bias(m):
    m[2].bias.data.fill_(3)


def in_place(m):
    m[2].weight[5, 7] += 1


def by_assignment_to_data(m):
    m[0].weight.data = torch.randn(24, 40)


def by_new_parameter(m):
    m[1].weight = nn.Parameter(torch.randn(8, 40))


def by_new_bias(m):
    m[1].bias = None


def by_state_dict(m):
    m[0].load_state_dict({"weight": torch.randn(24, 40), "bias": torch.randn(24)})


def by_assigned_state_dict(m):
    m[0].load_state_dict({"weight": torch.randn(24, 40), "bias": torch.randn(24)}, assign=True)


def by_optimiser(m):
    with torch.enable_grad():
        m[0](torch.randn(1, 40)).sum().backward()
    torch.optim.SGD(m[0].parameters(), lr=1.0).step()


def by_there_and_back(m):
    for p in m[0].parameters():
        p.data = p.data.to(torch.bfloat16).to(torch.float32)


def by_new_module(m):
    m[0] = nn.Linear(40, 24)


CHANGES = [
    by_data_whole,
    by_data_columns,
    by_data_rows,
    by_data_bias,
    in_place,
    by_assignment_to_data,
    by_new_parameter,
    by_new_bias,
    by_state_dict,
    by_assigned_state_dict,
    by_optimiser,
    by_there_and_back,
    by_new_module,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_parameter_is_packed_again(change):
    linears, pack, x = projections(), FusedLinear(), torch.randn(2, 40)
    before = pack(x, *linears)
    change(linears)
    after = pack(x, *linears)
    torch.testing.assert_close(after, side_by_side(x, linears))
    assert not torch.equal(before, after)


def test_what_has_not_changed_is_packed_once(monkeypatch):
    packed = []
    original = FusedLinear._pack
    monkeypatch.setattr(FusedLinear, "_pack", lambda *a: packed.append(1) or original(*a))
    linears, pack = projections(), FusedLinear()
    for _ in range(5):
        pack(torch.randn(2, 40), *linears)
    assert len(packed) == 1


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


def half_precision(m):
    for module in m:
        module.half()


def double_precision(m):
    for module in m:
        module.double()


def mixed_precision(m):
    m[1].bfloat16()


@pytest.mark.parametrize(
    "change",
    [forward_hook, forward_pre_hook, own_forward, subclass, parametrized, half_precision,
     double_precision, mixed_precision],
)  # fmt: skip
def test_modules_that_are_more_than_a_product_are_left_to_themselves(change):
    linears, pack, x = projections(), FusedLinear(), torch.randn(2, 40)
    assert pack(x, *linears) is not None
    change(linears)
    assert pack(x.to(linears[0].weight.dtype), *linears) is None


def test_gradients_are_left_to_autograd():
    linears, pack = projections(), FusedLinear()
    with torch.enable_grad():
        assert pack(torch.randn(2, 40), *linears) is None


def test_what_watches_or_transforms_is_left_alone():
    from torch.utils.flop_counter import FlopCounterMode

    linears, pack, x = projections(), FusedLinear(), torch.randn(2, 40)
    with FlopCounterMode(display=False) as flops:
        linear(pack, x, linears[0])
    assert flops.get_total_flops() == 2 * 2 * 40 * 24
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(pack, x, linears[0]).dtype == torch.bfloat16
    batched = torch.func.vmap(lambda row: linear(pack, row, linears[0]))(x)
    torch.testing.assert_close(batched, linears[0](x))
    seen = []
    torch.compile(lambda x: seen.append(pack(x, *linears)) or x, backend="eager", fullgraph=True)(x)
    assert seen == [None]
    assert pack(x.to("meta"), *linears) is None


def test_packing_can_be_switched_off():
    linears, pack, x = projections(), FusedLinear(), torch.randn(2, 40)
    with packing(False):
        assert pack(x, *linears) is None
    assert pack(x, *linears) is not None


def test_inference_tensors_that_count_no_versions_are_not_packed():
    with torch.inference_mode():
        linears = projections()
        assert FusedLinear()(torch.randn(2, 40), *linears) is None


def test_a_pack_made_in_inference_mode_serves_outside():
    linears, pack, x = projections(), FusedLinear(), torch.randn(2, 40)
    with torch.inference_mode():
        pack(x, *linears)
    torch.testing.assert_close(pack(x, *linears), side_by_side(x, linears))


@pytest.mark.parametrize("make", [lambda: MultiHeadAttention(16, 4), lambda: FeedForward(16, 32)])
def test_owners_save_unfused_and_copy_well(make):
    owner, x = make().eval(), torch.randn(1, 3, 16)
    names = set(owner.state_dict())
    want = owner(x)
    assert set(owner.state_dict()) == names
    assert not [name for name in names if name[0] == "_"]
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


def test_owners_free_the_copy_when_they_move_or_train():
    owner = FeedForward(16, 32).eval()
    for leave in (
        lambda: owner.train(),
        lambda: owner.to(torch.bfloat16).float(),
        owner.drop_packed,
    ):
        owner.eval()(torch.randn(1, 2, 16))
        assert owner._into_hidden._weight is not None
        leave()
        assert owner._into_hidden._weight is None


def test_owners_follow_a_projection_that_was_replaced():
    owner, x = MultiHeadAttention(16, 4).eval(), torch.randn(1, 3, 16)
    owner(x)
    owner.q_proj = nn.Sequential(nn.Linear(16, 16))
    with packing(False):
        want = owner(x)
    torch.testing.assert_close(owner(x), want)
