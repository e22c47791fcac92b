"""Multi-head attention as a layer: its hooks, its constructor, its copies, what it refuses."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from attention_configs import CONFIGS, built

from polyhead import Causal, DenseCache
from polyhead.config import AttentionConfig, RopeConfig
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers import FeedForward, MultiHeadAttention, MultiHeadLatentAttention, RoPE

HOOKED = [*CONFIGS, "cache", "dropout"]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_sees_the_exact_weights_and_changes_no_bit(name, grad):
    layer, x = built(**CONFIGS.get(name, {"dropout": 0.4})), torch.randn(2, 9, 24)
    layer.train(name == "dropout")
    caches = (DenseCache(), DenseCache()) if name == "cache" else (None, None)
    with torch.set_grad_enabled(grad):
        for cache in caches:
            if cache is not None:
                layer(x[:, :5], mask=Causal(), cache=cache)
        torch.manual_seed(1)
        want = layer(x, mask=Causal(), cache=caches[0])
        records = []
        with layer.register_attention_hook(records.append):
            torch.manual_seed(1)
            have = layer(x, mask=Causal(), cache=caches[1])
        layer(x, mask=Causal())
    assert torch.equal(have, want)
    (record,) = records
    assert record.layer is layer
    assert record.k.shape[2] == (14 if name == "cache" else 9)
    assert record.lse.shape == (2, 4, 9)
    k, v = (t.repeat_interleave(2, dim=1) for t in (record.k, record.v))
    scores = record.q @ k.mT * record.scale
    if record.softcap is not None:
        scores = record.softcap * torch.tanh(scores / record.softcap)
    T, S = scores.shape[-2:]
    back = torch.arange(S - T, S)[:, None] - torch.arange(S)
    scores = scores.masked_fill((back < 0) | (back >= (layer.config.window or S)), -torch.inf)
    weights = torch.exp(scores - record.lse[..., None])
    if name != "dropout":
        torch.testing.assert_close(weights @ v, record.out)
    if not layer.config.sinks:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, T))


def test_a_hook_ends_when_it_is_removed():
    layer, x, seen = built(), torch.randn(1, 3, 24), []
    handle = layer.register_attention_hook(seen.append)
    layer(x)
    handle.remove()
    handle.remove()
    layer(x)
    assert len(seen) == 1


def test_the_constructor_says_the_same_as_the_configuration():
    layer = MultiHeadAttention(
        24, 4, 2, head_dim=8, bias=False, rope=RoPE(100.0), window=5, dropout=0.1
    )
    config = AttentionConfig(4, 2, 8, rope=RopeConfig(theta=100.0), window=5, dropout=0.1)
    assert layer.config == config
    assert layer.extra_repr() == f"24, heads=4/2×8, {layer.rope!r}, window=5, dropout=0.1"
    assert MultiHeadAttention(24, 4).extra_repr() == "24, heads=4/4×6"
    capped = MultiHeadAttention.from_config(24, AttentionConfig(4, 2, 8, softcap=30.0))
    assert capped.extra_repr() == "24, heads=4/2×8, softcap=30.0"


def test_the_constructor_takes_at_most_twelve_parameters():
    assert len(inspect.signature(MultiHeadAttention).parameters) <= 12


@pytest.mark.parametrize(
    ("layer", "count"),
    [
        (lambda **bias: MultiHeadAttention(64, 8, **bias), 4),
        (lambda **bias: FeedForward(64, 128, "relu", gated=False, **bias), 2),
        (
            lambda **bias: MultiHeadLatentAttention(
                64,
                4,
                kv_lora_rank=32,
                qk_nope_head_dim=16,
                qk_rope_head_dim=8,
                v_head_dim=16,
                **bias,
            ),
            2,
        ),
    ],
)
def test_layers_have_biases_by_default_as_torch_s_have(layer, count):
    plain = layer(bias=False)
    assert {name for name, _ in plain.named_parameters() if name.endswith("proj.bias")} == set()
    with_biases = dict(layer().named_parameters()).keys() - dict(plain.named_parameters()).keys()
    assert len(with_biases) == count
    assert all(name.endswith(".bias") for name in with_biases)


def test_plain_attention_has_four_square_matrices():
    attention = MultiHeadAttention(64, 8, bias=False)
    assert sum(p.numel() for p in attention.parameters()) == 4 * 64**2


def test_copies_share_nothing_and_agree():
    layer, x = built(rope=RopeConfig(), window=3), torch.randn(1, 5, 24)
    other = copy.deepcopy(layer)
    assert torch.equal(other(x, mask=Causal()), layer(x, mask=Causal()))
    assert other.rope is not layer.rope


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((512, 7), r"num_heads must divide embed_dim: got embed_dim=512, num_heads=7; use 8 or"),
        ((512, 8, 3), r"num_kv_heads must divide num_heads.*num_kv_heads=3; use one of \[1, 2"),
        ((0, 8), "embed_dim must be a whole number of at least 1: got 0"),
        ((64, 0), "num_heads must be a whole number of at least 1: got 0"),
        ((64, 8, 8.0), "num_kv_heads must be a whole number"),
    ],
)
def test_impossible_heads_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        MultiHeadAttention(*arguments)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"softcap": 0.0}, "softcap must be positive or None"),
        ({"dropout": 1.0}, "dropout must be a finite number, at least 0 and below 1"),
        ({"kdim": 0}, "kdim must be a whole number"),
    ],
)
def test_impossible_numbers_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        MultiHeadAttention(64, 8, **fields)


def test_a_rope_of_another_configuration_is_refused():
    config = AttentionConfig(4, 4, 8, rope=RopeConfig())
    with pytest.raises(ConfigError, match=r"must be built from config\.rope"):
        MultiHeadAttention.from_config(24, config, rope=RoPE(5.0))


def test_inputs_that_do_not_fit_are_refused_by_name():
    layer, x = built(), torch.randn(2, 5, 24)
    with pytest.raises(ValueError, match=r"x must be \[B, T, 24\]: got \[2, 5, 23\]"):
        layer(x[..., 1:])
    with pytest.raises(ValueError, match=r"context must be \[B=2, S, kdim=24\]: got \[1, 5, 24\]"):
        layer(x, x[:1])
    with pytest.raises(ValueError, match="need a context"):
        layer(x, context_positions=torch.arange(5))
    with pytest.raises(ValueError, match="self-attention needs kdim and vdim"):
        MultiHeadAttention(24, 4, kdim=20)(x)
    with pytest.raises(TypeError, match=r"Keep\(tensor\).*Drop\(tensor\)"):
        layer(x, mask=torch.ones(5, 5).bool())
    with pytest.raises(TypeError, match=r"Keep\(tensor\).*Drop\(tensor\)"):
        built(window=2)(x, mask=torch.ones(5, 5).bool())
    with pytest.raises(UnsupportedError, match="softcap"):
        built(softcap=1.0)(x, kernel="sdpa")
