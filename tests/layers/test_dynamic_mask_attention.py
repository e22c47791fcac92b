"""Attention whose values choose keys, as transformers' Doge has it; learned residual weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DogeConfig
from transformers.models.doge.modeling_doge import DogeAttention, DogeRotaryEmbedding

import polyhead as ph
from polyhead import native
from polyhead.config import (
    FeedForwardConfig,
    HyperConnectionsConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families import read_config
from polyhead.kernels.choosing import choose_by_key
from polyhead.layers import DynamicMaskAttention, DynamicMaskConfig, TransformerLayer
from polyhead.models import Transformer
from polyhead.semantics import DenseSource

E, H, G, D, T = 48, 4, 2, 16, 21
SIZES = DynamicMaskConfig(
    H, G, D, rope=RopeConfig(), qk_norm=QKNormConfig(NormConfig(eps=1e-6)), top_k=5
)


def pair(top_k: int = 5, bias: bool = False) -> tuple[DynamicMaskAttention, nn.Module]:
    """A layer of ours, and transformers' with the same weights."""
    torch.manual_seed(top_k)
    config = DogeConfig(
        hidden_size=E, num_attention_heads=H, num_key_value_heads=G, head_dim=D,
        attention_bias=bias, keep_window_size=top_k, attn_implementation="eager",
    )  # fmt: skip
    theirs = DogeAttention(config, 0)
    nn.init.uniform_(theirs.A, 0.5, 1.5)
    for name in ("q_norm", "k_norm"):  # their own computes in float32, whatever it is given
        setattr(theirs, name, nn.RMSNorm(D, config.rms_norm_eps))
    ours = DynamicMaskAttention.from_config(
        E, replace(SIZES, top_k=top_k, qkv_bias=bias, out_bias=bias)
    )
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def run(theirs: Any, x: Tensor, lengths: tuple[int, ...] = ()) -> Tensor:
    count = x.shape[1]
    hidden = torch.ones(len(x), 1, count, count, dtype=torch.bool).triu(1)
    for row, length in enumerate(lengths):
        hidden[row, ..., length:] = True
    tables = DogeRotaryEmbedding(theirs.config)(x, torch.arange(count)[None])
    out: Tensor = theirs(x, tables, ~hidden)[0]
    return out


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, T, E, dtype=dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("top_k", [1, 5, T])
def test_outputs_and_gradients_are_those_of_transformers(top_k: int, bias: bool) -> None:
    ours, theirs = (each.double() for each in pair(top_k, bias))
    x = tokens(torch.float64).requires_grad_()
    expected = run(theirs, x)
    found = ours(x, mask=ph.Causal())
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.sin().sum(), [x, *theirs.parameters()])
    named = dict(ours.named_parameters())
    ordered = [named[name] for name, _ in theirs.named_parameters()]
    made = torch.autograd.grad(found.sin().sum(), [x, *ordered])
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_padding_is_never_chosen() -> None:
    ours, theirs = pair()
    x, lengths = tokens(), (T, 13)
    mask = ph.Causal() & ph.KeyLengths(torch.tensor(lengths))
    found, wanted = ours(x, mask=mask), run(theirs, x, lengths)
    torch.testing.assert_close(found[0], wanted[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[1, :13], wanted[1, :13], atol=1e-5, rtol=1e-4)


CACHES: dict[str, Callable[[], Any]] = {
    "dense": ph.DenseCache,
    "paged": lambda: ph.PagedCache(page_size=4),
    "ring": lambda: ph.RingCache(64),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
def test_caches_hold_the_numbers_of_keys(kind: str) -> None:
    ours, theirs = pair()
    x, cache = tokens(), CACHES[kind]()
    parts = [ours(part, mask=ph.Causal(), cache=cache) for part in x.split([9, 10, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), run(theirs, x), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_window_hides_keys_before_others_are_chosen() -> None:
    ours, _ = pair(4)
    windowed = DynamicMaskAttention.from_config(E, replace(ours.config, window=6))
    windowed.load_state_dict(ours.state_dict())
    x, cache = tokens(), ph.RingCache(6)
    wanted = ours(x, mask=ph.Causal() & ph.Window(6))
    torch.testing.assert_close(windowed(x, mask=ph.Causal()), wanted)
    parts = [windowed(part, mask=ph.Causal(), cache=cache) for part in x.split([9, 11, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), wanted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(wanted[:, -1], ours(x, mask=ph.Causal())[:, -1], atol=1e-3)


@torch.no_grad()
@pytest.mark.skipif(native.code() is None, reason="no native code")
def test_native_code_computes_it() -> None:
    ours, theirs = pair()
    x = tokens()
    torch.testing.assert_close(
        ours(x, mask=ph.Causal(), kernel="native"), run(theirs, x), atol=1e-5, rtol=1e-4
    )


def test_of_equal_numbers_the_first_keys_are_chosen() -> None:
    numbers = torch.tensor([[3.0, 1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])[None, :, None]
    source = DenseSource(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4))
    chosen = choose_by_key(
        lambda tile: numbers[..., tile.start : tile.start + tile.length],
        torch.randn(1, 4, 2, 4), source, 2, mask=ph.Causal(),
    )  # fmt: skip
    assert chosen.group == 2
    # Of each kv head for the fourth key's query, which does not see the fifth, and for the fifth's.
    assert chosen.blocks.tolist() == [[[[0, 2], [0, 2]], [[0, 1], [0, 1]]]]


def model() -> Transformer:
    torch.manual_seed(0)
    attention = replace(SIZES, qkv_bias=True)
    layer = LayerConfig(attention, FeedForwardConfig(64), residual_weights=True)
    made = Transformer(TransformerConfig("decoder", 50, E, 64, (layer,) * 2)).eval()
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made


@torch.no_grad()
def test_rows_of_one_cache_that_differ_in_length_are_those_of_single_texts() -> None:
    made = model()
    ids = torch.randint(0, 50, (2, 14))
    positions = torch.stack((torch.arange(11), torch.arange(11) - 4))  # below 0: padding
    cache = made.new_cache()
    made(ids[:, :11], positions=positions, cache=cache)
    found = made(ids[:, 11:], cache=cache)
    torch.testing.assert_close(found[0], made(ids[:1])[0, 11:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], made(ids[1:, 4:])[0, 7:], atol=1e-4, rtol=1e-4)


def test_planned_parameters_and_cache_are_those_of_the_model() -> None:
    made = model()
    assert TransformerConfig.from_json(made.config.to_json()) == made.config
    planned = ph.plan(made.config, tokens=30, kv_dtype="float32")
    assert planned.parameters == made.parameter_counts()
    cache = made.new_cache()
    with torch.no_grad():
        made(torch.randint(0, 50, (1, 30)), cache=cache)
    assert planned.cache_bytes == cache.bytes


def test_residual_weights_multiply_what_each_part_joins() -> None:
    config = LayerConfig(SIZES, FeedForwardConfig(8), residual_weights=True)
    layer = TransformerLayer.from_config(E, config)
    x = tokens()
    h = layer.attention(layer.attention_norm(x), mask=ph.Causal())
    nn.init.normal_(layer.attention_residual)
    nn.init.normal_(layer.feed_forward_residual)
    x_1 = layer.attention_residual * x + h
    wanted = layer.feed_forward_residual * x_1 + layer.feed_forward(layer.feed_forward_norm(x_1))
    torch.testing.assert_close(layer(x, mask=ph.Causal()), wanted)
    assert not layer.config.only_adds
    for around in ({"parallel": "one norm"}, {"streams": HyperConnectionsConfig()}):
        with pytest.raises(ConfigError, match="residual_weights need parts one after the other"):
            replace(layer.config, **around)


def test_what_has_no_meaning_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"goes without softcap.*softcap=2\.0"):
        replace(SIZES, softcap=2.0)
    with pytest.raises(ConfigError, match="top_k must be a whole number"):
        replace(SIZES, top_k=0)
    with pytest.raises(ConfigError, match="scale must be"):
        replace(SIZES, scale=-1.0)
    with pytest.raises(ValueError, match="the layer's own values: got a context"):
        DynamicMaskAttention.from_config(E, SIZES)(tokens(), tokens())
    values = DogeConfig(is_moe=True).to_dict()
    with pytest.raises(ConfigError, match=r"is_moe.*its router reshapes the logits"):
        read_config(values, "config.json")
