"""Convolved queries and keys: transformers' module, every cache, models, plans, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import ZayaConfig
from transformers.models.zaya.modeling_zaya import ZayaAttention, ZayaRotaryEmbedding
from whole_models import check_decoding, check_fork, check_padded_rows

import polyhead as ph
from polyhead.caches import LayerCache, Quantized
from polyhead.caches.sizes import Dense, Layout, Paged, Ring
from polyhead.config import (
    ConvolutionalAttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers import ConvolutionalAttention
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes

E, H, G, D = 32, 4, 2, 8
CAUSAL = ph.Causal()
SIZES: dict[str, dict[str, Any]] = {
    "two and two": {},
    "three and one, biases": {
        "depthwise_kernel": 3, "head_kernel": 1, "qkv_bias": True, "out_bias": True,
    },
    "one and four, one value": {"depthwise_kernel": 1, "head_kernel": 4, "num_kv_heads": 1},
    "window": {"window": 5, "num_kv_heads": 4, "qkv_bias": True},
}  # fmt: skip
sizes = pytest.mark.parametrize("name", SIZES)


def heads(name: str, **options: Any) -> ConvolutionalAttentionConfig:
    given: dict[str, Any] = {
        "num_kv_heads": G,
        "rope": RopeConfig(100.0, dim=D // 2),
        "qk_norm": QKNormConfig(NormConfig(eps=1e-14, weight=False)),
        **SIZES[name],
        **options,
    }
    return ConvolutionalAttentionConfig(H, given.pop("num_kv_heads"), D, **given)


def layer(name: str, dtype: torch.dtype = torch.float64) -> ConvolutionalAttention:
    torch.manual_seed(0)
    made = ConvolutionalAttention.from_config(E, heads(name))
    nn.init.uniform_(made.key_scale, 0.5, 2.0)
    return made.to(dtype).eval()


def tokens(B: int, T: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, T, E, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def theirs_of(mine: ConvolutionalAttention) -> tuple[ZayaAttention, ZayaRotaryEmbedding]:
    """transformers' module with the same weights, and what rotates its heads."""
    ours = mine.config
    config = ZayaConfig(
        hidden_size=E, num_hidden_layers=1, num_attention_heads=H,
        num_key_value_heads=ours.num_kv_heads, head_dim=D, attention_bias=ours.qkv_bias,
        cca_time0=ours.depthwise_kernel, cca_time1=ours.head_kernel,
        rope_parameters={
            "hybrid": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
        },
    )  # fmt: skip
    config._attn_implementation = "eager"
    made = ZayaAttention(config, 0).double().eval()
    into = made.qkv_proj
    now, late = mine.v_proj.weight.chunk(2)
    pairs = [
        (into.q_proj.weight, mine.q_proj.weight),
        (into.k_proj.weight, mine.k_proj.weight),
        (into.v_proj_current.weight, now),
        (into.v_proj_delayed.weight, late),
        (into.conv_qk_depthwise.weight, mine.depthwise.weight),
        (into.conv_qk_depthwise.bias, mine.depthwise.bias),
        (into.conv_qk_grouped.weight, mine.per_head.weight),
        (into.conv_qk_grouped.bias, mine.per_head.bias),
        (made.qk_norm.temp, mine.key_scale),
        (made.o_proj.weight, mine.o_proj.weight),
    ]
    if ours.qkv_bias:
        now, late = mine.v_proj.bias.chunk(2)
        pairs += [
            (into.q_proj.bias, mine.q_proj.bias),
            (into.k_proj.bias, mine.k_proj.bias),
            (into.v_proj_current.bias, now),
            (into.v_proj_delayed.bias, late),
        ]
        if ours.out_bias:
            pairs.append((made.o_proj.bias, mine.o_proj.bias))
        else:
            nn.init.zeros_(made.o_proj.bias)
    for other, own in pairs:
        other.data.copy_(own.data)
    return made, ZayaRotaryEmbedding(config)


@sizes
def test_it_is_transformers_module_with_its_gradients(name):
    mine = layer(name)
    theirs, rotation = theirs_of(mine)
    x, T = tokens(2, 13).requires_grad_(), 13
    places = torch.arange(T)
    far = places[:, None] - places >= (mine.config.window or T)
    hidden = (places > places[:, None]) | far
    mask = torch.zeros(T, T, dtype=torch.float64).masked_fill(hidden, -torch.inf)[None, None]
    turned = rotation(x, places[None], "hybrid")
    wanted = theirs(x, {"causal": mask, "conv": None}, None, turned)[0]
    found = mine(x, mask=CAUSAL)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)  # they rotate in float32
    torch.testing.assert_close(mine(x), found)  # causal whatever the mask
    (one,) = torch.autograd.grad(found.square().sum(), x, retain_graph=True)
    (other,) = torch.autograd.grad(wanted.square().sum(), x, retain_graph=True)
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    for ours, their in (
        (mine.per_head.weight, theirs.qkv_proj.conv_qk_grouped.weight),
        (mine.depthwise.weight, theirs.qkv_proj.conv_qk_depthwise.weight),
        (mine.key_scale, theirs.qk_norm.temp),
    ):
        (one,) = torch.autograd.grad(found.square().sum(), ours, retain_graph=True)
        (other,) = torch.autograd.grad(wanted.square().sum(), their, retain_graph=True)
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        assert one.abs().sum() > 0
    with torch.no_grad():
        for kernel in ("tiled", "reference"):
            torch.testing.assert_close(mine(x, mask=CAUSAL, kernel=kernel), found)


CACHES: dict[str, tuple[Layout, Quantized | None]] = {
    "dense": (Dense(), None),
    "paged": (Paged(4), None),
    "coded": (Dense(), Quantized(8, 8, group=4, recent=8, sink_tokens=2)),
}


@torch.no_grad()
@sizes
@pytest.mark.parametrize("cache", CACHES)
def test_every_cache_equals_one_pass_forked_rolled_back_and_reordered(name, cache):
    layout, quantized = CACHES[cache]
    mine, x = layer(name, torch.float32), tokens(3, 31, dtype=torch.float32)
    if mine.config.window is not None and cache == "dense":
        layout = Ring(mine.config.window, 7)
    held = LayerCache(mine.config.memories, layout, quantized=quantized, spare=7)
    loose = {} if quantized is None else {"atol": 0.05, "rtol": 0.1}
    close = {"atol": 1e-5, "rtol": 1e-4} | loose
    parts = [mine(part, mask=CAUSAL, cache=held) for part in x.split([9, 1, 5, 1, 15], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), mine(x, mask=CAUSAL), **close)
    check_fork(mine, x, held, **close)


@torch.no_grad()
@sizes
@pytest.mark.parametrize("cached", [True, False])
def test_padded_rows_equal_rows_alone(name, cached):
    check_padded_rows(layer(name), cached)


def test_keys_are_not_scaled_at_first():
    mine = layer("two and two")  # whose factors are drawn
    assert not (mine.key_scale == 1.0).any()
    mine.reset_parameters()
    assert (mine.key_scale == 1.0).all()


@torch.no_grad()
def test_bits_do_not_depend_on_neighbours_in_batch_invariant_mode():
    mine, x = layer("two and two", torch.float32), tokens(2, 23, dtype=torch.float32)
    with ph.batch_invariant():
        whole = mine(x, mask=CAUSAL)
        assert torch.equal(mine(x[1:], mask=CAUSAL), whole[1:])
        cache = LayerCache(mine.config.memories)
        parts = [mine(part, mask=CAUSAL, cache=cache) for part in x.split([8, 1, 1, 13], dim=1)]
        assert torch.equal(torch.cat(parts, dim=1), whole)


def model(name: str) -> Transformer:
    one = LayerConfig(heads(name), FeedForwardConfig(40))
    config = TransformerConfig("decoder", 50, E, 256, (one, one))
    assert TransformerConfig.from_json(config.to_json()) == config
    torch.manual_seed(0)
    return Transformer(config).eval()


@torch.no_grad()
@sizes
@pytest.mark.parametrize("kind", ["auto", "paged"])
def test_a_model_decodes_as_in_one_pass_and_holds_what_is_planned(name, kind, tmp_path):
    mine = model(name)
    cache = check_decoding(mine, kind, tmp_path)
    assert "CCA" in mine.config.layers[0].attention.described
    counts = mine.parameter_counts()
    assert ph.plan(mine.config, tokens=8).parameters == counts
    assert (
        mine.layers[0].attention.key_scale.tolist() == [1.0] * mine.layers[0].attention.num_kv_heads
    )
    with ph.probe(mine) as seen:
        whole = mine(torch.arange(20)[None])
    assert torch.equal(whole, mine(torch.arange(20)[None]))
    torch.testing.assert_close(seen[1].rows().sum(-1), torch.ones(1, H, 20))
    assert cache.lengths == [40, 40]


@torch.no_grad()
def test_packed_rows_take_different_numbers_of_tokens():
    mine = model("three and one, biases")
    ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
    whole, cache = mine(ids), mine.new_cache(spare=4)
    mine(ids, cache=cache)
    cache.rollback([2, 4])
    packed = torch.cat((ids[0, 10:], ids[1, 8:]))[None]
    found = mine(packed, cache=cache, counts=[2, 4])
    wanted = torch.cat((whole[0, 10:], whole[1, 8:]))[None]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_what_does_not_go_is_refused_by_name():
    mine, x = layer("two and two", torch.float32), tokens(1, 3, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"must be a LayerCache.*got DenseCache"):
        mine(x, mask=CAUSAL, cache=ph.DenseCache())
    with pytest.raises(ValueError, match="over its own input: got a context"):
        mine(x, x)
    with pytest.raises(ValueError, match=r"x must be \[B, T, 32\]"):
        mine(x[0])
    with pytest.raises(UnsupportedError, match="cannot hide single tokens"):
        mine(x, mask=CAUSAL & ph.Documents([1, 2]))
    positions = torch.tensor([[-1, 0, 1]])
    with pytest.raises(UnsupportedError, match="no bias beside padding without a cache"):
        mine(x, mask=CAUSAL, positions=positions, bias=torch.zeros(1, H, 3, 3))
    for wrong, words in (
        ({"depthwise_kernel": 1, "head_kernel": 1}, "to see an earlier token: got 1 and 1"),
        ({"head_kernel": 0}, "head_kernel must be a whole number"),
        ({"values_from_keys": True}, "need a projection of their own"),
        (
            {"num_kv_heads": 1, "v_head_dim": 3},
            r"even number of features: got .*num_kv_heads=1 × 3",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            heads("two and two", **wrong)
    whole = model("two and two")
    with pytest.raises(UnsupportedError, match="ConvolutionalAttention"):
        check_classes(whole, "context")
    with pytest.raises(UnsupportedError, match="layer 0 is CCA GQA-2 4 query"):
        ph.convert(whole, num_kv_heads=1)
    again = dataclasses.replace(mine.config, depthwise_kernel=3)
    assert [memory.row_elements() for memory in again.memories] == [
        0,
        4 * (H + G) * D,
        2 * G * D // 2,
    ]
