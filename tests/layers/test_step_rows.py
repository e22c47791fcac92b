"""A row of a decoding step has the bits that it has alone, however many rows stand beside it."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import polyhead as ph
from polyhead import native
from polyhead.caches import KeyValueCache, StoredCache
from polyhead.caches.sizes import Latent, Paged
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    RopeConfig,
)
from polyhead.layers import decode_plan
from polyhead.layers.decode_plan import LayerArgs
from polyhead.layers.native_layer import NETWORK
from polyhead.layers.quantized import QuantizedLinear
from polyhead.layers.transformer_layer import TransformerLayer
from polyhead.native.arguments import MAX_STEP_ROWS
from polyhead.quantization import block_type
from random_blocks import random_blocks

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
ROWS = (2, 5, 7, 13, 64)
"""Alone in a tile, in tiles of several sizes, and as many as a step takes."""

HEADS = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=24, rope=RopeConfig())
LAYERS = {
    # rows that fill no vectors
    "tails": (44, LayerConfig(HEADS, FeedForwardConfig(83))),
    # longer than what is unpacked at a time, and biases
    "parts": (
        832,
        LayerConfig(replace(HEADS, qkv_bias=True), FeedForwardConfig(810, gated=False, bias=True)),
    ),
    "latent": (
        96,
        LayerConfig(
            LatentAttentionConfig(4, 64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24),
            FeedForwardConfig(80),
        ),
    ),
    "experts": (
        64,
        LayerConfig(HEADS, MixtureConfig(FeedForwardConfig(48), 6, 2, FeedForwardConfig(32))),
    ),
}


def _layer(
    embed_dim: int, config: LayerConfig, dtype: torch.dtype = torch.float32
) -> TransformerLayer:
    torch.manual_seed(0)
    layer = TransformerLayer.from_config(embed_dim, config).to(dtype).eval()
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    return layer


COUNTED: dict[str, tuple[LayerConfig, list[KeyValueCache]]] = {
    "heads": (
        LayerConfig(replace(HEADS, head_dim=32), FeedForwardConfig(83)),
        [
            ph.DenseCache(capacity=99),
            ph.PagedCache(5),
            ph.RingCache(40, spare=9),
            ph.QuantizedCache(group=8, recent=40),
        ],
    ),
    "twelve heads of a kv head": (
        LayerConfig(AttentionConfig(12, 1, 32, rope=RopeConfig()), FeedForwardConfig(83)),
        [
            ph.DenseCache(capacity=99),
            ph.RingCache(40, spare=9),
            ph.QuantizedCache(group=8, recent=40),
            ph.QuantizedCache(group=8, recent=8),
        ],
    ),
    "sinks": (
        LayerConfig(replace(HEADS, sinks=True, window=5), LAYERS["experts"][1].feed_forward),
        [ph.DenseCache(capacity=99), ph.PagedCache(5), ph.RingCache(5, spare=9)],
    ),
    "biases": (
        LayerConfig(AttentionConfig(6, 6, 16, alibi=ALiBiConfig()), FeedForwardConfig(83)),
        [ph.DenseCache(capacity=99), ph.PagedCache(5)],
    ),
    "latent": (
        LAYERS["latent"][1],
        [ph.LatentCache(64, 16, capacity=99), StoredCache(Paged(5), Latent(64, 16))],
    ),
}
"""Layers and caches of rows that have numbers of tokens of their own."""


def _check_rows(layer: TransformerLayer, embed_dim: int, dtype: torch.dtype) -> None:
    own = layer.config.attention
    prompted: KeyValueCache = ph.DenseCache(capacity=16)
    if isinstance(own, LatentAttentionConfig):
        prompted = ph.LatentCache(own.kv_lora_rank, own.qk_rope_head_dim, capacity=16)
    layer(torch.randn(MAX_STEP_ROWS, 2, embed_dim).to(dtype), mask=ph.Causal(), cache=prompted)
    x = torch.randn(MAX_STEP_ROWS, 1, embed_dim).to(dtype)

    def step(rows: list[int]) -> Tensor:
        cache = prompted.fork()
        cache.reorder(rows)
        made = decode_plan.step(layer, x[rows], LayerArgs(ph.Causal(), None, cache))
        assert made is not None
        assert made[1] == NETWORK
        return made[0]

    alone = torch.cat([step([row]) for row in range(MAX_STEP_ROWS)])
    assert alone.isfinite().all()
    for count in ROWS:
        rows = torch.randperm(MAX_STEP_ROWS)[:count].tolist()
        assert torch.equal(step(rows), alone[rows]), count


@pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_a_row_among_others_has_the_bits_it_has_alone(code, dtype, name) -> None:
    embed_dim, config = LAYERS[name]
    with native.using(code), torch.no_grad():
        _check_rows(_layer(embed_dim, config, dtype), embed_dim, dtype)


@pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # random scales overflow float16
@pytest.mark.parametrize("int8", [False, True], ids=["numbers", "8 bits"])
@pytest.mark.parametrize("kinds", [("Q4_1", "Q8_0"), ("Q4_K", "Q6_K")], ids="/".join)
def test_so_has_a_row_that_meets_weights_in_blocks(code, dtype, int8, kinds) -> None:
    layer = _layer(1024, LayerConfig(HEADS, FeedForwardConfig(256)), dtype)
    attention, network = layer.attention, layer.feed_forward
    places = [(network, name) for name in ("gate_proj", "up_proj", "down_proj")]
    places += [(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
    for i, (module, name) in enumerate(places):
        linear, kind = getattr(module, name), block_type(kinds[i % 2])
        blocks = random_blocks(kind, linear.out_features, linear.in_features, i)
        quantized = QuantizedLinear(blocks, kind)
        quantized.int8_activations = int8
        setattr(module, name, quantized)
    with native.using(code), torch.no_grad():
        _check_rows(layer, 1024, dtype)


@pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COUNTED)
def test_so_has_a_row_that_has_a_number_of_tokens_of_its_own(code, dtype, name) -> None:
    config, caches = COUNTED[name]
    given = [1] * 4, [6] * 4
    layer = _layer(96, config, dtype)
    for seed, empty in enumerate(caches):
        draw = random.Random(seed)
        cache = empty.fork()
        exact = type(cache) is not ph.QuantizedCache
        with native.using(code), torch.no_grad(), ph.batch_invariant() if exact else nullcontext():
            layer(torch.randn(4, 21, 96).to(dtype), mask=ph.Causal(), cache=cache)
            if exact:
                cache.rollback([draw.randrange(10) for _ in range(4)])
            most = 9 if type(cache) is ph.RingCache else 31
            for counts in (*given, [1, 5, most, 2]) if exact else given[:1]:
                tokens = torch.randn(1, sum(counts), 96).to(dtype)
                _check_counts(layer, cache, counts, tokens)


def _check_counts(
    layer: TransformerLayer, cache: KeyValueCache, counts: list[int], x: Tensor
) -> None:
    """One call has the bits of a call for every token of every row; the cache goes on."""
    alone = []
    for row, tokens in enumerate(x.split(counts, dim=1)):
        own = cache.fork()
        own.reorder([row])
        for t in range(counts[row]):
            made = decode_plan.step(layer, tokens[:, t : t + 1], LayerArgs(ph.Causal(), None, own))
            assert made is not None
            alone.append(made[0])
    before, plan = cache.lengths, decode_plan.plan_for(cache, [layer])
    parts = [(layer, None, cache, None)]
    found, whole, _ = decode_plan.steps(parts, x, ph.Causal(), plan=plan, counts=counts)
    assert whole == 1
    assert torch.equal(found, torch.cat(alone, dim=1)), counts
    assert cache.lengths == [n + more for n, more in zip(before, counts, strict=True)]
