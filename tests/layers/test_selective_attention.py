"""Heads that choose blocks of keys: each selector's formula, every cache, models, plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from whole_models import check_decoding, check_fork

import polyhead as ph
from polyhead.caches import LayerCache, Quantized
from polyhead.caches.sizes import Dense, Layout, Paged
from polyhead.config import (
    AttentionConfig,
    BlockBoundsConfig,
    BlockIndexerConfig,
    BlockMeansConfig,
    FeedForwardConfig,
    GatedAttentionConfig,
    GatedSelectiveAttentionConfig,
    LayerConfig,
    MeanIndexerConfig,
    QKNormConfig,
    RopeConfig,
    SelectiveAttentionConfig,
    SelectorConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, InputError, UnsupportedError
from polyhead.layers import MultiHeadAttention, SelectiveAttention
from polyhead.layers.registry import build_attention
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes
from polyhead.planning.flops import attention_flops

E, H, G, D = 32, 4, 2, 8
CAUSAL = ph.Causal()
Blocks = list[int]


def best(scores: Tensor, count: int) -> Blocks:
    """The highest scores, of equal ones the first."""
    return scores.sort(descending=True, stable=True).indices[:count].tolist()


def by_means(
    mine: SelectiveAttention, x: Tensor, q: Tensor, k: Tensor, b: int, h: int, t: int
) -> Blocks:
    size, top, own = mine.config.selector.size, mine.config.selector.top_k, t // 4
    keys = k[b, h // (H // G)]
    scores = torch.stack([keys[i * size : (i + 1) * size].mean(0) @ q[b, h, t] for i in range(own)]
                         or [torch.zeros((), dtype=x.dtype)])  # fmt: skip
    return [own, *(best(scores, top - 1) if own else [])]


def by_bounds(
    mine: SelectiveAttention, x: Tensor, q: Tensor, k: Tensor, b: int, h: int, t: int
) -> Blocks:
    config, own, R = mine.config.selector, t // 4, H // G
    assert isinstance(config, BlockBoundsConfig)
    heads = range(h // R * R, h // R * R + R) if config.shared else [h]
    scores = torch.zeros(own, dtype=x.dtype)
    for i in range(own):
        keys = k[b, h // R, i * 4 : i * 4 + 4]
        for head in heads:
            products = torch.stack((q[b, head, t] * keys.amax(0), q[b, head, t] * keys.amin(0)))
            scores[i] += products.amax(0).sum()
    return [own, *best(scores, config.top_k - 1)]


def by_index(
    mine: SelectiveAttention, x: Tensor, q: Tensor, k: Tensor, b: int, h: int, t: int
) -> Blocks:
    chooses, own, head = mine.selector, t // 4, h // (H // 2)
    queries = chooses.q_norm(chooses.q_proj(x[b]).view(-1, 2, 10))[t, head]
    keys = chooses.k_norm(chooses.k_proj(x[b, : own * 4]))
    turned = torch.cat([keys, queries[None]])[None, None, :, :8]
    at = torch.cat([torch.arange(own * 4), torch.tensor([t])])
    turned = mine.rope.apply(turned, at)[0, 0]
    products = turned[:-1] @ turned[-1] + keys[:, 8:] @ queries[8:]
    return [own, *best(products.view(own, 4).amax(1), 2)] if own else [0]


def by_mean_index(
    mine: SelectiveAttention, x: Tensor, q: Tensor, k: Tensor, b: int, h: int, t: int
) -> Blocks:
    """Whole blocks alone, and the one that has begun, of which there may be no token yet."""
    chooses, whole = mine.selector, (t + 1) // 4
    queries = chooses.q_norm(chooses.q_proj(x[b]).view(-1, 16, 10))[t]
    keys = chooses.k_norm(chooses.k_proj(x[b, : whole * 4]).view(whole, 4, 10).mean(dim=1))
    turned = mine.rope.apply(keys[None, None, :, :8], torch.arange(whole) * 4)[0, 0]
    asking = mine.rope.apply(queries[None, :, None, :8], torch.tensor([t]))[0, :, 0]
    products = turned @ asking.T + keys[:, 8:] @ queries[:, 8:].T
    return [whole, *best(products.relu().sum(dim=1), 3)] if whole else [0]


Formula = Callable[[SelectiveAttention, Tensor, Tensor, Tensor, int, int, int], Blocks]
KINDS: dict[str, tuple[SelectorConfig, Formula]] = {
    "MoBA": (BlockMeansConfig(4, 3), by_means),
    "MSA": (BlockIndexerConfig(4, 3, num_heads=2, head_dim=10), by_index),
    "QSA": (MeanIndexerConfig(4, 3, num_heads=16, head_dim=10), by_mean_index),
    "Quest": (BlockBoundsConfig(4, 3, max_queries=99), by_bounds),
    "Quest by head": (BlockBoundsConfig(4, 3, shared=False, max_queries=99), by_bounds),
}
kinds = pytest.mark.parametrize("name", KINDS)


def heads(selector: SelectorConfig, **options: object) -> SelectiveAttentionConfig:
    given = {"rope": RopeConfig(), "selector": selector} | options
    return SelectiveAttentionConfig(H, G, D, **given)


def layer(name: str, dtype: torch.dtype = torch.float64, **options: object) -> SelectiveAttention:
    torch.manual_seed(0)
    made = SelectiveAttention.from_config(E, heads(KINDS[name][0], **options))
    return made.to(dtype).eval()


def tokens(B: int, T: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, T, E, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense_of(mine: SelectiveAttention) -> MultiHeadAttention:
    config = ph.MultiHeadAttention(E, H, G, head_dim=D, bias=False, rope=RopeConfig())
    config.load_state_dict(mine.state_dict(), strict=False)
    return config.to(next(mine.parameters()).dtype).eval()


def formula(name: str, mine: SelectiveAttention, x: Tensor) -> Tensor:
    """Loops over queries and blocks, then the reference with the mask drawn."""
    B, T, _ = x.shape
    q, k, _ = mine._project(x, 0)
    keep = torch.zeros(B, H, T, T, dtype=torch.bool)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                for block in KINDS[name][1](mine, x, q, k, b, h, t):
                    keep[b, h, t, block * 4 : block * 4 + 4] = True
    return dense_of(mine)(x, mask=ph.Keep(keep) & CAUSAL, kernel="reference")


@kinds
def test_it_is_attention_to_the_chosen_blocks(name):
    mine, x = layer(name), tokens(2, 23)
    wanted = formula(name, mine, x)
    assert not torch.allclose(wanted, dense_of(mine)(x, mask=CAUSAL))
    torch.testing.assert_close(mine(x, mask=CAUSAL), wanted)
    torch.testing.assert_close(mine(x), wanted)  # causal whatever the mask
    with torch.no_grad():
        for kernel in ("auto", "tiled", "reference"):
            torch.testing.assert_close(mine(x, mask=CAUSAL, kernel=kernel), wanted)
    short = x[:, :12]
    assert torch.equal(mine(short, mask=CAUSAL), dense_of(mine)(short, mask=CAUSAL))


@kinds
def test_gradients_are_those_of_attention_to_the_chosen_blocks(name):
    mine, x = layer(name), tokens(1, 23).requires_grad_()
    found = torch.autograd.grad(mine(x, mask=CAUSAL).square().sum(), [x, *mine.parameters()],
                                allow_unused=True)  # fmt: skip
    wanted = torch.autograd.grad(formula(name, mine, x).square().sum(), [x], materialize_grads=True)
    torch.testing.assert_close(found[0], wanted[0])
    assert all(grad is not None and grad.abs().sum() > 0 for grad in found[1:5])


CACHES: dict[str, tuple[Layout, Quantized | None]] = {
    "dense": (Dense(), None),
    "paged": (Paged(4), None),
    "coded": (Dense(), Quantized(8, 8, group=8, recent=8, sink_tokens=2)),
    "coded pages": (Paged(8), Quantized(8, 8, group=8, recent=8, sink_tokens=2)),
}


@torch.no_grad()
@kinds
@pytest.mark.parametrize("cache", CACHES)
def test_every_cache_equals_one_pass_forked_rolled_back_and_reordered(name, cache):
    layout, quantized = CACHES[cache]
    mine, x = layer(name, torch.float32), tokens(3, 31, dtype=torch.float32)
    held = LayerCache(mine.config.memories, layout, quantized=quantized, spare=7)
    loose = {} if quantized is None else {"atol": 0.05, "rtol": 0.1}
    close = {"atol": 1e-5, "rtol": 1e-4} | loose
    parts = [mine(part, mask=CAUSAL, cache=held) for part in x.split([9, 1, 5, 1, 15], dim=1)]
    if quantized is not None:  # codes may change which blocks are chosen
        assert held.lengths == [31] * 3
        torch.testing.assert_close(torch.cat(parts[:2], 1), mine(x[:, :10], mask=CAUSAL), **close)
        return
    torch.testing.assert_close(torch.cat(parts, dim=1), mine(x, mask=CAUSAL), **close)
    check_fork(mine, x, held, **close)


@torch.no_grad()
@kinds
@pytest.mark.parametrize("cached", [True, False])
def test_padded_rows_equal_rows_alone(name, cached):
    mine, x = layer(name), tokens(2, 20)
    positions = torch.arange(20).expand(2, 20).clone()
    positions[0] = torch.where(positions[0] < 5, -1, positions[0] - 5)
    cache = LayerCache(mine.config.memories) if cached else None
    mask = CAUSAL if cached else CAUSAL & ph.Keep((positions >= 0)[:, None, None])
    found = mine(x, mask=mask, positions=positions, cache=cache)
    torch.testing.assert_close(found[:1, 5:], mine(x[:1, 5:], mask=CAUSAL))
    torch.testing.assert_close(found[1:], mine(x[1:], mask=CAUSAL))
    if cache is None:
        return
    assert cache.lengths == [15, 20]
    for seed in range(6):  # past the ends of blocks, which differ by row
        more = tokens(2, 1, 9 + seed)
        x = torch.cat((x, more), dim=1)
        last = mine(more, mask=CAUSAL, cache=cache)
        torch.testing.assert_close(last[:1], mine(x[:1, 5:], mask=CAUSAL)[:, -1:])
        torch.testing.assert_close(last[1:], mine(x[1:], mask=CAUSAL)[:, -1:])


@torch.no_grad()
@kinds
def test_bits_do_not_depend_on_neighbours_in_batch_invariant_mode(name):
    mine, x = layer(name, torch.float32), tokens(2, 19, dtype=torch.float32)
    with ph.batch_invariant():
        whole = mine(x, mask=CAUSAL)
        assert torch.equal(mine(x[1:], mask=CAUSAL), whole[1:])
        cache = LayerCache(mine.config.memories)
        parts = [mine(part, mask=CAUSAL, cache=cache) for part in x.split([8, 1, 1, 9], dim=1)]
        assert torch.equal(torch.cat(parts, dim=1), whole)


def model(name: str, **options: object) -> Transformer:
    network = FeedForwardConfig(40, "silu", gated=True, bias=False)
    one = LayerConfig(heads(KINDS[name][0], **options), network)
    config = TransformerConfig("decoder", 50, E, 256, (one, one))
    assert TransformerConfig.from_json(config.to_json()) == config
    torch.manual_seed(0)
    return Transformer(config).eval()


@torch.no_grad()
@kinds
@pytest.mark.parametrize("kind", ["auto", "paged"])
def test_a_model_decodes_as_in_one_pass_and_holds_what_is_planned(name, kind, tmp_path):
    check_decoding(model(name), kind, tmp_path)


@torch.no_grad()
@kinds
def test_a_probe_sees_zero_where_a_block_was_not_chosen(name):
    mine, x = layer(name), tokens(1, 30)
    with ph.probe(mine) as seen:
        mine(x, mask=CAUSAL)
    read = (seen[0].weights() > 0).sum(dim=-1)
    own = torch.arange(30) % 4 + 1 if name != "QSA" else torch.arange(1, 31) % 4 + 4
    assert torch.equal(read, (own + 8).minimum(torch.arange(1, 31)).expand_as(read))


@torch.no_grad()
def test_blocks_are_rotated_at_the_positions_of_their_first_tokens():
    mine, x, positions = layer("QSA"), tokens(2, 30), torch.arange(30) + 1000
    wanted = mine(x, mask=CAUSAL)  # rotations are relative
    close = {"atol": 1e-5, "rtol": 1e-4}  # of angles of other positions
    torch.testing.assert_close(mine(x, mask=CAUSAL, positions=positions), wanted, **close)
    cache = LayerCache(mine.config.memories)
    parts = [
        mine(part, mask=CAUSAL, positions=at, cache=cache)
        for part, at in zip(x.split([11, 1, 18], dim=1), positions.split([11, 1, 18]), strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), wanted, **close)


def test_chosen_heads_may_be_gated():
    config = GatedSelectiveAttentionConfig(H, G, D, rope=RopeConfig(), selector=KINDS["QSA"][0])
    assert config.layout == "QSA gated GQA-2"
    torch.manual_seed(0)
    mine, x = build_attention(E, config).double(), tokens(2, 15)
    dense = build_attention(E, GatedAttentionConfig(H, G, D, rope=RopeConfig())).double()
    dense.load_state_dict(mine.state_dict(), strict=False)
    torch.testing.assert_close(mine(x, mask=CAUSAL), dense(x, mask=CAUSAL))
    x = tokens(2, 16)
    assert not torch.allclose(mine(x, mask=CAUSAL)[:, -1], dense(x, mask=CAUSAL)[:, -1])
    groups = sum(group.count for group in config.parameter_groups(E))
    assert groups == sum(each.numel() for each in mine.parameters())


def test_a_plan_counts_the_chosen_keys_and_a_score_for_each_block():
    moba, quest = heads(BlockMeansConfig(4, 3)), heads(BlockBoundsConfig(4, 3))
    per_pair = 2 * H * 2 * D
    # Queries at positions 100 to 102 choose 12 keys each, of 101, 102 and 103.
    for config, per_choice in ((moba, 2 * H * D // 4), (quest, 2 * 2 * G * D // 4)):
        assert attention_flops(config, 3, 100, 5) == 5 * (per_pair * 36 + per_choice * 306)
    config = dataclasses.replace(model("MoBA").config, layers=(LayerConfig(moba, None),))
    few, many = (
        ph.plan(config, tokens=n, batch_size=1, dtype="float32", bandwidth=1e9).bound
        for n in (100, 104)
    )
    # One more entry of a block, and no more keys.
    read = many.memory_seconds - few.memory_seconds
    assert read == pytest.approx(4 * G * D / 1e9)


def test_normed_heads_and_windows_choose_too():
    mine, x = layer("MoBA", qk_norm=QKNormConfig(), window=6), tokens(1, 40)
    with ph.probe(mine) as seen, torch.no_grad():
        mine(x, mask=CAUSAL)
    assert int((seen[0].weights() > 0).sum(dim=-1).max()) <= 6


def test_quest_reads_all_keys_in_calls_of_many_tokens():
    mine = SelectiveAttention.from_config(E, heads(BlockBoundsConfig(4, 3, max_queries=2)))
    x = tokens(1, 23, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(mine(x, mask=CAUSAL), dense_of(mine)(x, mask=CAUSAL))
        cache = LayerCache(mine.config.memories)
        found = [mine(part, mask=CAUSAL, cache=cache) for part in x.split([20, 2, 1], dim=1)]
    assert not torch.allclose(torch.cat(found, 1)[:, 20:], dense_of(mine)(x, mask=CAUSAL)[:, 20:])


def test_what_does_not_go_is_refused_by_name():
    mine, x = layer("MoBA", torch.float32), tokens(1, 3, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"must be a LayerCache.*got DenseCache"):
        mine(x, mask=CAUSAL, cache=ph.DenseCache())
    with pytest.raises(ConfigError, match="top_k must be a whole number"):
        BlockMeansConfig(4, 0)
    with pytest.raises(ConfigError, match="at least last_blocks=2, which are always chosen: got 1"):
        BlockIndexerConfig(4, 1, last_blocks=2)
    for wrong, words in (
        ({"num_heads": 3}, "num_heads must divide num_heads=4: got 3"),
        ({"num_heads": 2, "head_dim": 6}, "head_dim must be at least 8, the features that are"),
    ):
        with pytest.raises(ConfigError, match=words):
            heads(BlockIndexerConfig(4, 3, **wrong))
    with pytest.raises(ConfigError, match="head_dim must be at least 8, the features that are"):
        heads(MeanIndexerConfig(4, 3, head_dim=6))
    with pytest.raises(ConfigError, match="size must be a whole number"):
        MeanIndexerConfig(1, 3)
    with pytest.raises(ConfigError, match="max_queries must be a whole number"):
        BlockBoundsConfig(max_queries=0)
    with pytest.raises(ConfigError, match=r"causal and see nothing ahead.*window_ahead=2"):
        dataclasses.replace(mine.config, window=4, window_ahead=2)
    with pytest.raises(ValueError, match="chooses keys of its own input: got a context"):
        mine(x, x)
    with pytest.raises(UnsupportedError, match="SelectiveAttention"):
        check_classes(model("MoBA"), "context")


@torch.no_grad()
def test_a_trained_model_chooses_blocks_with_the_same_weights():
    network = FeedForwardConfig(40, "silu", gated=True, bias=False)
    kinds = [AttentionConfig(H, G, D, rope=RopeConfig(), window=w) for w in (None, None, None, 9)]
    config = TransformerConfig(
        "decoder", 50, E, 256, tuple(LayerConfig(each, network) for each in (*kinds, kinds[0]))
    )
    torch.manual_seed(0)
    dense = Transformer(config).eval()
    ids = torch.randint(50, (1, 40), generator=torch.Generator().manual_seed(0))
    wanted = dense(ids)
    quest = ph.choose_blocks(dense, BlockBoundsConfig(4, 3))
    choosing = [layer.attention.layout.startswith("Quest") for layer in quest.config.layers]
    assert choosing == [False, False, True, False, True]
    assert all(a is b for a, b in zip(dense.parameters(), quest.parameters(), strict=True))
    torch.testing.assert_close(quest(ids), wanted)  # a prompt reads all keys
    caches = [each.new_cache() for each in (dense, quest)]
    full, few = (
        torch.cat([each(part, cache=cache) for part in ids.split([30, 1, 9], dim=1)], dim=1)
        for each, cache in zip((dense, quest), caches, strict=True)
    )
    torch.testing.assert_close(full, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(few[:, :30], wanted[:, :30], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(few[:, 30], wanted[:, 30], atol=1e-4)
    assert torch.equal(dense(ids), wanted)  # it stays as it is
    every = ph.choose_blocks(dense, BlockBoundsConfig(4, 99), layers=[0, 1])
    parts = [every(part, cache=cache) for cache in [every.new_cache()] for part in ids.split(7, 1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match="layers must be 0 to 4: got 5"):
        ph.choose_blocks(dense, layers=[5])
    with pytest.raises(UnsupportedError, match=r"layer 2 has SelectiveAttention"):
        ph.choose_blocks(quest, layers=[2])
