"""What layers compute in one pass in training equals torch's operations; watchers are obeyed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polyhead import native
from polyhead.layers import FeedForward, MultiHeadAttention, RMSNorm, fused
from polyhead.layers.norms import LayerNorm
from polyhead.layers.positions import RoPE
from polyhead.native.dropout import Dropout, kept

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ACTIVATIONS = {
    "relu": torch.relu,
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
every_code = pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)


def agree(code, dtype, compute, exact, *tensors):
    """Results and gradients of ``compute``, both ways, against ``exact`` in float64."""
    torch.manual_seed(1)
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    with native.using(code):
        y, wanted = compute(*leaves), exact(*doubles)
        assert y is not None
        assert y.dtype == dtype
        grad = torch.randn_like(wanted).to(dtype)
        found = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        again = torch.autograd.grad(y, leaves, grad, create_graph=True)
    of_exact = torch.autograd.grad(wanted, doubles, grad.double())
    for mine, other, theirs in zip((y, *found), (y, *again), (wanted, *of_exact), strict=True):
        size = theirs.abs().max().item()
        for each in (mine, other):
            torch.testing.assert_close(
                each.double(), theirs, atol=CLOSE[dtype] * max(1.0, size), rtol=CLOSE[dtype]
            )


@every_code
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("size", [(3, 5, 7), (2, 40, 512)])
def test_an_rms_norm_and_its_gradients(code, dtype, size):
    torch.manual_seed(0)
    for offset in (0.0, 1.0):

        def exact(x, weight, offset=offset):
            return F.rms_norm(x, x.shape[-1:], None, 1e-5) * (weight + offset)

        agree(
            code, dtype, lambda x, weight, offset=offset: fused.rms_norm(x, weight, 1e-5, offset),
            exact, torch.randn(size), torch.rand(size[-1]),
        )  # fmt: skip


@every_code
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("size", [5, 33, 64])
def test_a_layer_norm_of_features_far_from_zero(code, dtype, size):
    torch.manual_seed(0)
    norm, x = LayerNorm(size, bias=True).to(dtype), (torch.randn(3, size) + 2.0).to(dtype)
    with torch.no_grad(), native.using(code):
        for parameter in norm.parameters():
            parameter.copy_(torch.rand(size))
        found, exact = norm(x), copy.deepcopy(norm).double()
        wanted = F.layer_norm(x.double(), (size,), exact.weight, exact.bias, norm.eps)
        torch.testing.assert_close(found.double(), wanted, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@every_code
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gate_and_its_gradients(code, dtype, name):
    torch.manual_seed(0)
    for size in ((5,), (3, 17, 33)):
        gate, up = torch.randn(size) * 4, torch.randn(size)
        agree(
            code, dtype, lambda g, u: fused.gated(g, u, name, ACTIVATIONS[name]),
            lambda g, u: ACTIVATIONS[name](g) * u, gate, up,
        )  # fmt: skip
    far = torch.tensor([-1e30, -200.0, 0.0, 200.0, 1e30, torch.nan], requires_grad=True)
    with native.using(code):
        y = fused.gated(far, torch.ones(6), name, ACTIVATIONS[name])
    torch.testing.assert_close(y, ACTIVATIONS[name](far), atol=1e-5, rtol=1e-5, equal_nan=True)
    (found,) = torch.autograd.grad(y, far, torch.ones(6))
    slopes = [0.0, 0.0, 0.0 if name == "relu" else 0.5, 1.0, 1.0]
    assert found[:5].tolist() == pytest.approx(slopes, abs=1e-5)


@every_code
@pytest.mark.parametrize("dtype", CLOSE)
def test_rotation_and_its_gradients(code, dtype):
    torch.manual_seed(0)
    rope = RoPE(100.0)
    for D in (10, 64):
        agree(
            code, dtype, lambda x: rope.apply(x, 3, head_axis=2),
            lambda x: rope.apply(x, 3, head_axis=2), torch.randn(2, 9, 3, D),
        )  # fmt: skip


@every_code
@pytest.mark.parametrize("dtype", CLOSE)
def test_dropout_is_the_hash_and_its_gradient_has_the_same_holes(code, dtype):
    seed, n = torch.tensor([11]), 20_011
    x, plus = torch.rand(n).to(dtype) + 1, torch.rand(n)
    holes = ~kept(0.25, seed, (1, 1), torch.zeros(1, dtype=torch.long), torch.arange(n)).view(n)
    assert abs(holes.double().mean() - 0.25) < 0.02
    exact = (x.double() / 0.75).masked_fill(holes, 0)
    for others in (None, plus, plus.to(dtype)):
        y = code.dropped(x, Dropout(0.25, seed, 0, 0), others)
        assert y.dtype == (dtype if others is None else others.dtype)
        wanted = exact if others is None else exact + others.double()
        torch.testing.assert_close(y.double(), wanted, atol=CLOSE[dtype], rtol=CLOSE[dtype])
    x.requires_grad_()
    plus.requires_grad_()
    with native.using(code):
        y = fused.dropped(x, 0.25, plus)
    of_x, of_plus = torch.autograd.grad(y.sum(), (x, plus))
    assert torch.equal(of_x != 0, (y - plus).abs() > 0.5)
    assert (of_plus == 1).all()


def test_dropout_repeats_with_the_generator_whether_gradients_are_recorded_or_not():
    x = torch.randn(4, 30, requires_grad=True)
    found = []
    for recorded in (True, False):
        torch.manual_seed(5)
        with torch.set_grad_enabled(recorded):
            found.append(fused.dropped(x, 0.5))
    assert torch.equal(*found)
    assert not torch.equal(found[0], fused.dropped(x, 0.5))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_projections_and_their_gradients(autocast, bias):
    torch.manual_seed(0)
    modules = [nn.Linear(24, n, bias=bias) for n in (24, 8, 8)]
    x = torch.randn(2, 30, 24, requires_grad=True)
    leaves = [x, *(p for m in modules for p in m.parameters())]

    def gradients(outs, **how):
        return torch.autograd.grad(sum(out.float().sin().sum() for out in outs), leaves, **how)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mine, theirs = fused.linears(x, *modules), [m(x) for m in modules]
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
    close = {"atol": 0.05, "rtol": 0.02} if autocast else {"atol": 1e-5, "rtol": 1e-5}
    wanted = gradients(theirs)
    for how in ({"retain_graph": True}, {"create_graph": True}):
        for a, b in zip(gradients(mine, **how), wanted, strict=True):
            torch.testing.assert_close(a, b, **close)
    one = torch.autograd.grad(mine[1].sum(), leaves, allow_unused=True)
    assert [grad is None for grad in one] == [
        False,
        *[i // (1 + bias) != 1 for i in range(len(leaves) - 1)],
    ]


def test_a_second_derivative_of_a_layer_is_torchs(monkeypatch):
    torch.manual_seed(0)
    layer = nn.Sequential(RMSNorm(16), FeedForward(16, 24, "silu")).double()
    assert torch.autograd.gradgradcheck(layer, torch.randn(2, 9, 16).double().requires_grad_())
    layer = layer.float()
    x = torch.randn(2, 9, 16, requires_grad=True)

    def second():
        (first,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    found = second()
    monkeypatch.setattr(fused, "_is_recorded", lambda *_: False)
    torch.testing.assert_close(found, second(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("frozen", ["nothing", "gate_proj", "up_proj"])
def test_a_second_derivative_by_weights_needs_none_of_data(frozen, monkeypatch):
    torch.manual_seed(0)
    layer, x = nn.Sequential(RMSNorm(16), FeedForward(16, 24, "silu")), torch.randn(2, 9, 16)
    for name, weight in layer.named_parameters():
        weight.requires_grad_(frozen not in name and not (frozen != "nothing" and name[0] == "0"))
    weights = [weight for weight in layer.parameters() if weight.requires_grad]

    def second():
        first = torch.autograd.grad(layer(x).sin().sum(), weights, create_graph=True)
        return torch.autograd.grad(sum(part.square().sum() for part in first), weights)

    found = second()
    monkeypatch.setattr(fused, "_is_recorded", lambda *_: False)
    torch.testing.assert_close(found, second(), atol=1e-4, rtol=1e-4)


def test_whoever_watches_a_projection_sees_it():
    layer, x = MultiHeadAttention(16, 2), torch.randn(1, 9, 16, requires_grad=True)
    seen = []
    for register in ("register_forward_hook", "register_full_backward_hook"):
        handle = getattr(layer.v_proj, register)(lambda *_, name=register: seen.append(name))
        layer(x).sum().backward()
        handle.remove()
    assert seen == ["register_forward_hook", "register_full_backward_hook"]
    layer(x).sum().backward()
    assert len(seen) == 2
    tangent = torch.func.jvp(FeedForward(16, 24), (x.detach(),), (torch.ones_like(x),))[1]
    assert tangent.isfinite().all()
