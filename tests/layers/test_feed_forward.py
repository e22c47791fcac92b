"""The feed-forward network, judged by its formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from polyhead.layers import FeedForward, FeedForwardConfig

ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_is_the_formula(activation, gated, bias, grad):
    network = FeedForward(8, 24, activation, gated, bias).eval()
    x, act = torch.randn(2, 5, 8), ACTIVATIONS[activation]
    hidden = act(network.gate_proj(x)) * network.up_proj(x) if gated else act(network.up_proj(x))
    want = network.down_proj(hidden)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(network(x), want)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_the_last_projection_may_differ_in_its_bias(bias, tokens):
    config = FeedForwardConfig(24, bias=bias, down_bias=not bias)
    network = FeedForward.from_config(8, config).eval()
    assert (network.down_proj.bias is None) == bias == (network.up_proj.bias is not None)
    counted = sum(group.count for group in config.parameter_groups(8))
    assert counted == sum(each.numel() for each in network.parameters())
    x = torch.randn(1, tokens, 8)
    want = network.down_proj(F.silu(network.gate_proj(x)) * network.up_proj(x))
    with torch.no_grad():
        torch.testing.assert_close(network(x), want)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_reach_every_parameter(activation):
    network = FeedForward(4, 8, activation, gated=True, bias=True)
    network(torch.randn(2, 3, 4)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def test_dropout_acts_in_training_only():
    network, x = FeedForward(8, 32, dropout=0.5), torch.randn(1, 3, 8)
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))


def test_bad_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match=r"activation must be one of 'relu'.*'swish'"):
        FeedForward(4, 8, "swish")
    with pytest.raises(ValueError, match="dropout must be"):
        FeedForward(4, 8, dropout=1.0)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_what_enters_the_activation_and_the_output_are_scaled(gated, grad):
    config = FeedForwardConfig(24, gated=gated, bias=True, gate_scale=0.7, out_scale=3.0)
    network = FeedForward.from_config(8, config).eval()
    for x in (torch.randn(2, 5, 8), torch.randn(1, 1, 8)):
        source = network.gate_proj if gated else network.up_proj
        hidden = F.silu(0.7 * source(x)) * (network.up_proj(x) if gated else 1.0)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(network(x), 3.0 * network.down_proj(hidden))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_the_activation_gives_is_bounded_in_place_of_what_enters(activation, grad):
    network = FeedForward.from_config(
        8, FeedForwardConfig(24, activation, clamp=0.1, clamp_of="activated")
    ).eval()
    for x in (torch.randn(2, 5, 8), torch.randn(1, 1, 8)):
        gates = ACTIVATIONS[activation](network.gate_proj(x)).clamp(max=0.1)
        want = network.down_proj(gates * network.up_proj(x).clamp(-0.1, 0.1))
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(network(x), want)
    with pytest.raises(ValueError, match="clamp_of 'activated' needs a gated network"):
        FeedForwardConfig(24, gated=False, clamp_of="activated")
