"""Attention to compressed blocks: transformers' module, every cache, models, plans, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4RotaryEmbedding,
)
from whole_models import check_decoding, check_fork, check_padded_rows

import polyhead as ph
from polyhead.caches import LayerCache, Quantized
from polyhead.caches.sizes import Dense, Layout, Paged
from polyhead.config import (
    CompressedAttentionConfig,
    FeedForwardConfig,
    IndexerConfig,
    LayerConfig,
    NormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers import CompressedAttention
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes
from polyhead.planning.flops import attention_flops

E, H, D, R, P = 32, 4, 16, 12, 4
CAUSAL, NORM = ph.Causal(), NormConfig(eps=1e-6)
INDEXER = IndexerConfig(16, 8, 3, NORM, "last")
SIZES: dict[str, dict[str, Any]] = {
    "window alone": {},
    "chosen, overlapping": {"block_size": 3, "overlap": True, "indexer": INDEXER},
    "all": {"block_size": 6},
}
TYPES = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
sizes = pytest.mark.parametrize("name", SIZES)
blocks = pytest.mark.parametrize("name", [name for name in SIZES if SIZES[name]])


def heads(name: str, **options: Any) -> CompressedAttentionConfig:
    given = {"rope": RopeConfig(theta=500.0), "norm": NORM, **SIZES[name], **options}
    return CompressedAttentionConfig(H, D, R, P, 5, 2, 8, **given)


def layer(name: str, dtype: torch.dtype = torch.float64) -> CompressedAttention:
    torch.manual_seed(0)
    made = CompressedAttention.from_config(E, heads(name))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made.to(dtype).eval()


def tokens(B: int, T: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, T, E, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def theirs_of(name: str) -> tuple[DeepseekV4Attention, DeepseekV4RotaryEmbedding]:
    index = [*SIZES].index(name)
    config = DeepseekV4Config(
        hidden_size=E, num_hidden_layers=1, num_attention_heads=H, head_dim=D, q_lora_rank=R,
        layer_types=[TYPES[index]], compress_rates={TYPES[1]: 3, TYPES[2]: 6}, o_groups=2,
        o_lora_rank=8, index_n_heads=16, index_head_dim=8, index_topk=3, sliding_window=5,
        partial_rotary_factor=P / D, rope_theta=500.0, compress_rope_theta=500.0,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return DeepseekV4Attention(config, 0).double(), DeepseekV4RotaryEmbedding(config)


def in_pairs(x: Tensor, size: int, dim: int = 0) -> Tensor:
    """Features of heads, whose last are rotated, from halves to the pairs of transformers."""
    order = torch.arange(size)
    order[size - P :] = torch.arange(size - P, size).view(2, -1).T.flatten()
    x = x.transpose(0, dim)
    return x.reshape(-1, size, *x.shape[1:])[:, order].reshape(x.shape).transpose(0, dim)


def in_their_names(mine: CompressedAttention) -> dict[str, Tensor]:
    state = mine.state_dict()
    found = {
        "q_a_proj.weight": state["q_a_proj.weight"],
        "q_a_norm.weight": state["q_a_norm.weight"],
        "q_b_proj.weight": in_pairs(state["q_b_proj.weight"], D),
        "kv_proj.weight": in_pairs(state["kv_proj.weight"], D),
        "kv_norm.weight": in_pairs(state["kv_norm.weight"], D),
        "o_a_proj.weight": in_pairs(state["o_a_proj.weight"], D, dim=1),
        "o_b_proj.weight": state["o_proj.weight"],
        "sinks": state["sinks"],
    }
    if mine.indexer is not None:
        found["compressor.indexer.q_b_proj.weight"] = in_pairs(state["indexer.q_proj.weight"], 8)
        weights = state["indexer.weights_proj.weight"]
        found["compressor.indexer.scorer.weights_proj.weight"] = weights
    made = (("compressor.", "pooling.", D), ("compressor.indexer.", "indexer.pooling.", 8))
    for theirs, ours, size in made:
        if ours + "positions" in state:
            found |= {
                theirs + "kv_proj.weight": in_pairs(state[ours + "kv_proj.weight"], size),
                theirs + "gate_proj.weight": in_pairs(state[ours + "gate_proj.weight"], size),
                theirs + "kv_norm.weight": in_pairs(state[ours + "norm.weight"], size),
                theirs + "position_bias": in_pairs(state[ours + "positions"], size, dim=1),
            }
    return found


@sizes
def test_it_is_transformers_module_with_its_gradients(name):
    mine, (theirs, rotary), T = layer(name), theirs_of(name), 31
    theirs.load_state_dict(in_their_names(mine))
    x, far = tokens(2, T).requires_grad_(), torch.arange(T)[:, None] - torch.arange(T)
    hidden = torch.zeros(2, 1, T, T, dtype=x.dtype)
    hidden.masked_fill_((far < 0) | (far >= 5), -torch.inf)
    places = torch.arange(T)[None]
    rotations = {kind: rotary(x, places, kind) for kind in ("main", "compress")}
    wanted, found = theirs(x, rotations, places, hidden)[0], mine(x, mask=CAUSAL)
    close = {"atol": 3e-6, "rtol": 1e-5}  # their cos and sin are float32
    torch.testing.assert_close(found, wanted, **close)
    (one,) = torch.autograd.grad(found.square().sum(), x, retain_graph=True)
    (other,) = torch.autograd.grad(wanted.square().sum(), x, retain_graph=True)
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    pairs = [(mine.sinks, theirs.sinks), (mine.q_a_proj.weight, theirs.q_a_proj.weight)]
    if mine.pooling is not None:
        pairs.append((mine.pooling.positions, theirs.compressor.position_bias))
    gradients = zip(
        torch.autograd.grad(found.square().sum(), [pair[0] for pair in pairs]),
        torch.autograd.grad(wanted.square().sum(), [pair[1] for pair in pairs]),
        strict=True,
    )
    for i, (one, other) in enumerate(gradients):
        turned = in_pairs(one, D, dim=1) if i == 2 else one
        torch.testing.assert_close(turned, other, atol=1e-4, rtol=1e-4)
        assert one.abs().sum() > 0
    with torch.no_grad():
        for kernel in ("tiled", "reference"):
            torch.testing.assert_close(mine(x, mask=CAUSAL, kernel=kernel), found)


def test_few_blocks_are_all_read_and_far_ones_chosen():
    mine, x = layer("chosen, overlapping"), tokens(1, 27)
    more = dataclasses.replace(mine.config, indexer=dataclasses.replace(INDEXER, top_k=99))
    every = CompressedAttention.from_config(E, more).double()
    every.load_state_dict(mine.state_dict())
    torch.testing.assert_close(every(x)[:, :11], mine(x)[:, :11])
    assert not torch.allclose(every(x)[:, 20:], mine(x)[:, 20:])


CACHES: dict[str, tuple[Layout, Quantized | None]] = {
    "dense": (Dense(), None),
    "paged": (Paged(4), None),
    "coded": (Dense(), Quantized(8, 8, group=4, recent=8, sink_tokens=2)),
}


@torch.no_grad()
@blocks
@pytest.mark.parametrize("cache", CACHES)
def test_every_cache_equals_one_pass_forked_rolled_back_and_reordered(name, cache):
    layout, quantized = CACHES[cache]
    mine, x = layer(name, torch.float32), tokens(3, 31, dtype=torch.float32)
    held = LayerCache(mine.config.memories, layout, quantized=quantized, spare=7)
    close = {"atol": 3e-5, "rtol": 1e-4}
    if quantized is not None:
        close = {"atol": 0.3, "rtol": 0.1}
    parts = [mine(part, mask=CAUSAL, cache=held) for part in x.split([9, 1, 5, 1, 15], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), mine(x, mask=CAUSAL), **close)
    if quantized is not None:
        return
    assert held.max_rollback >= 7
    check_fork(mine, x, held, **close)


@torch.no_grad()
@blocks
@pytest.mark.parametrize("cached", [True, False])
def test_padded_rows_equal_rows_alone(name, cached):
    check_padded_rows(layer(name), cached)


@torch.no_grad()
@sizes
def test_bits_do_not_depend_on_neighbours_in_batch_invariant_mode(name):
    mine, x = layer(name, torch.float32), tokens(2, 23, dtype=torch.float32)
    with ph.batch_invariant():
        whole = mine(x, mask=CAUSAL)
        assert torch.equal(mine(x[1:], mask=CAUSAL), whole[1:])
        cache = ph.LatentCache(D, 0) if mine.pooling is None else LayerCache(mine.config.memories)
        parts = [mine(part, mask=CAUSAL, cache=cache) for part in x.split([8, 1, 1, 13], dim=1)]
        assert torch.equal(torch.cat(parts, dim=1), whole)


def model(name: str) -> Transformer:
    network = FeedForwardConfig(40, "silu", gated=True, bias=False)
    one = LayerConfig(heads(name), network)
    config = TransformerConfig("decoder", 50, E, 256, (one, one))
    assert TransformerConfig.from_json(config.to_json()) == config
    torch.manual_seed(0)
    return Transformer(config).eval()


@torch.no_grad()
@sizes
def test_a_model_decodes_as_in_one_pass_and_holds_what_is_planned(name, tmp_path):
    check_decoding(model(name), "auto", tmp_path)
    if SIZES[name]:
        check_decoding(model(name), "paged", tmp_path)


def test_a_plan_counts_keys_of_the_window_and_blocks():
    each, few = 2 * H * D, 16 * 8
    near = each * 5 * 2  # queries at positions 100 and 101 see 5 keys each
    assert attention_flops(heads("window alone"), 2, 100, 7) == 2 * 7 * near
    every = each * (16 + 17)  # whole blocks of 6 tokens
    assert attention_flops(heads("all"), 2, 100, 7) == 2 * 7 * (near + every)
    some = each * 2 * 3 + few * (33 + 34)
    assert attention_flops(heads("chosen, overlapping"), 2, 100, 7) == 2 * 7 * (near + some)
    # The first tokens have fewer blocks than they may read.
    assert heads("all").call_cost(1, 8, 0).per_token * 8 == each * 3
    wanted = (each + few) * (0 + 0 + 1 + 1 + 1 + 2 + 2 + 2)
    assert heads("chosen, overlapping").call_cost(1, 8, 0).per_token * 8 == wanted


def test_what_does_not_go_is_refused_by_name():
    mine, x = layer("all", torch.float32), tokens(1, 3, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"must be a LayerCache.*got DenseCache"):
        mine(x, mask=CAUSAL, cache=ph.DenseCache())
    with pytest.raises(UnsupportedError, match="takes no bias"):
        mine(x, mask=CAUSAL, bias=torch.zeros(1, H, 3, 3))
    with pytest.raises(UnsupportedError, match="cannot hide single tokens"):
        mine(x, mask=CAUSAL & ph.Documents([1, 2]))
    with pytest.raises(UnsupportedError, match="weights of keys and of blocks"), ph.probe(mine):
        mine(x, mask=CAUSAL)
    with pytest.raises(ValueError, match=r"x must be \[B, T, 32\]: got \[3\]"):
        mine(x[0, :, 0])
    for wrong, words in (
        ({"rotated": 5}, "rotated must be an even number up to head_dim=16: got 5"),
        ({"rotated": 18}, "rotated must be an even number up to head_dim=16: got 18"),
        ({"out_groups": 3}, "out_groups must divide num_heads=4: got 3"),
        ({"block_size": 1}, "block_size must be a whole number"),
        ({"block_size": None, "overlap": True}, "overlap and indexer need a block_size: got None"),
        ({"rope": RopeConfig(dim=8)}, "rope dim must be rotated=4 or None: got 8"),
        ({"indexer": IndexerConfig(2, 8, 3)}, "rotates='first', head_dim=8"),
        ({"indexer": IndexerConfig(2, 2, 3, NORM, "last")}, "rotates='last', head_dim=2"),
    ):
        with pytest.raises(ConfigError, match=words):
            dataclasses.replace(heads("all"), **wrong)
    whole = model("all")
    with pytest.raises(UnsupportedError, match="CompressedAttention"):
        check_classes(whole, "context")
    with pytest.raises(UnsupportedError, match=r"layer 0 is MQA 4 query .* blocks of 6"):
        ph.convert(whole, num_kv_heads=1)
