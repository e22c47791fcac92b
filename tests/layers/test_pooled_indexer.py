"""Latent attention to pools that an indexer chooses: formula, caches, models, plans, refusals."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from whole_models import check_decoding, check_fork, check_padded_rows

import polyhead as ph
from polyhead.caches import LayerCache
from polyhead.caches.sizes import Dense, Layout, Paged
from polyhead.config import (
    CompressedAttentionConfig,
    FeedForwardConfig,
    IndexerConfig,
    LatentAttentionConfig,
    LayerConfig,
    RopeConfig,
    SparseLatentAttentionConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, InputError, UnsupportedError
from polyhead.layers import MultiHeadLatentAttention, SparseLatentAttention
from polyhead.models import Transformer
from polyhead.planning.flops import attention_flops
from polyhead.training import indexer_loss

E, R, TOP, POOL, CAUSAL = 32, 24, 8, 4, ph.Causal()
INDEXER = IndexerConfig(num_heads=16, head_dim=8, top_k=TOP, pool=POOL)
CONFIG = SparseLatentAttentionConfig(4, 16, 8, 0, 6, R, rope=None, indexer=INDEXER)


def layer(dtype: torch.dtype = torch.float64) -> SparseLatentAttention:
    torch.manual_seed(0)
    made = SparseLatentAttention.from_config(E, CONFIG)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made.to(dtype).eval()


def tokens(B: int, T: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, T, E, generator=torch.Generator().manual_seed(1), dtype=dtype)


def formula(mine: SparseLatentAttention, x: Tensor) -> Tensor:
    """Pools token by token, then dense latent attention to the chosen pairs."""
    (B, T, _), (J, D), index = x.shape, (16, 8), mine.indexer
    q = index.q_proj(mine.q_a_norm(mine.q_a_proj(x))).view(B, T, J, D)
    k, gates = index.k_norm(index.k_proj(x)), index.gate_proj(x)
    keep = torch.zeros(B, 1, T, T, dtype=torch.bool)
    for b in range(B):
        keys = []
        for start in range(0, T - POOL + 1, POOL):
            weights = (gates[b, start : start + POOL] + index.positions).softmax(dim=0)
            keys.append((weights * k[b, start : start + POOL]).sum(dim=0))
        for t in range(T):
            whole = (t + 1) // POOL
            keep[b, 0, t, whole * POOL : t + 1] = True
            if whole:
                w = index.weights_proj(x[b, t]) / (J * D) ** 0.5
                scores = (w[:, None] * (q[b, t] @ torch.stack(keys[:whole]).T).relu()).sum(0)
                for i in scores.topk(min(TOP // POOL, whole)).indices.tolist():
                    keep[b, 0, t, i * POOL : (i + 1) * POOL] = True
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 0, "v_head_dim": 6}
    dense = MultiHeadLatentAttention(E, 4, q_lora_rank=R, bias=False, rope=None, **sizes)
    dense.to(x.dtype).load_state_dict(mine.state_dict(), strict=False)
    return dense(x, mask=ph.Keep(keep), kernel="reference")


@pytest.mark.parametrize("computation", ["absorbed", "expanded"])
def test_it_is_latent_attention_to_the_chosen_pools_and_the_tokens_behind(computation):
    mine, x = layer(), tokens(2, 23)
    wanted = formula(mine, x)
    torch.testing.assert_close(mine(x, mask=CAUSAL, computation=computation), wanted)
    with torch.no_grad():
        for kernel in ("auto", "tiled", "reference"):
            found = mine(x, mask=CAUSAL, computation=computation, kernel=kernel)
            torch.testing.assert_close(found, wanted)
    # At most TOP / POOL whole pools are all read.
    torch.testing.assert_close(mine(x[:, :11], mask=CAUSAL), wanted[:, :11])
    with ph.probe(mine) as seen, torch.no_grad():
        mine(x, mask=CAUSAL)
    read = torch.tensor([min(t + 1, TOP + (t + 1) % POOL) for t in range(23)])
    assert ((seen[0].weights() > 0).sum(dim=-1) == read).all()


@torch.no_grad()
@pytest.mark.parametrize("layout", [Dense(), Paged(4)], ids=["dense", "paged"])
def test_every_cache_equals_one_pass_forked_rolled_back_and_reordered(layout: Layout):
    mine, x = layer(torch.float32), tokens(3, 31, torch.float32)
    held = LayerCache(mine.config.memories, layout, spare=7)
    close = {"atol": 3e-5, "rtol": 1e-4}
    parts = [mine(part, mask=CAUSAL, cache=held) for part in x.split([9, 1, 5, 1, 15], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), mine(x, mask=CAUSAL), **close)
    check_fork(mine, x, held, **close)


@torch.no_grad()
@pytest.mark.parametrize("cached", [True, False])
def test_padded_rows_equal_rows_alone(cached):
    check_padded_rows(layer(), cached)


@torch.no_grad()
def test_bits_do_not_depend_on_chunks_or_neighbours_in_batch_invariant_mode():
    mine, x = layer(torch.float32), tokens(2, 23, torch.float32)
    with ph.batch_invariant():
        whole = mine(x, mask=CAUSAL)
        assert torch.equal(mine(x[1:], mask=CAUSAL), whole[1:])
        cache = LayerCache(mine.config.memories)
        parts = [mine(part, mask=CAUSAL, cache=cache) for part in x.split([8, 1, 1, 13], dim=1)]
        assert torch.equal(torch.cat(parts, dim=1), whole)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["auto", "paged"])
def test_a_model_decodes_as_in_one_pass_and_holds_what_is_planned(kind, tmp_path):
    network = FeedForwardConfig(40, "silu", gated=True, bias=False)
    layers = tuple(
        LayerConfig(dataclasses.replace(CONFIG, selection_of=source), network)
        for source in (None, 0)
    )
    config = TransformerConfig("decoder", 50, E, 256, layers)
    assert TransformerConfig.from_json(config.to_json()) == config
    torch.manual_seed(0)
    check_decoding(Transformer(config).eval(), kind, tmp_path)


def test_plans_count_the_chosen_pairs_and_a_score_for_each_pool():
    per_pair, per_choice = 2 * 4 * (2 * 16), 2 * 16 * 8 // POOL
    # Queries at positions 100 to 102 read at most 11 keys each, and score 303 / 4 pools.
    assert attention_flops(CONFIG, 3, 100, 1) == per_pair * 3 * 11 + per_choice * 306


def test_what_does_not_go_is_refused_by_name():
    mine, x = layer(), tokens(1, 6)
    with pytest.raises(ValueError, match="attention to pools is causal: got mask=None"):
        mine(x)
    with pytest.raises(UnsupportedError, match=r"attention to pools cannot hide single tokens"):
        mine(x, mask=CAUSAL & ph.Window(3))
    with pytest.raises(TypeError, match=r"must be a LayerCache.*got DenseCache"):
        mine(x, mask=CAUSAL, cache=ph.DenseCache())
    with (
        pytest.raises(InputError, match=r"trains indexers that choose single keys.*PooledIndexer"),
        indexer_loss(mine),
    ):
        pass
    with pytest.raises(ConfigError, match="top_k must be a multiple of pool=3: got 8"):
        dataclasses.replace(INDEXER, pool=3)
    with pytest.raises(ConfigError, match="pool must be a whole number"):
        dataclasses.replace(INDEXER, pool=1)
    with pytest.raises(ConfigError, match="an indexer with pools has no positions: got rope"):
        dataclasses.replace(CONFIG, qk_rope_head_dim=2, rope=RopeConfig())
    for sizes in ((8, 0, RopeConfig()), (0, 0, None)):
        with pytest.raises(ConfigError, match="a key has features, and rope is over some"):
            LatentAttentionConfig(4, 16, *sizes[:2], 6, rope=sizes[2])
    index = dataclasses.replace(INDEXER, rotates="last")
    with pytest.raises(ConfigError, match="blocks are the indexer's pools already: got pool=4"):
        CompressedAttentionConfig(4, 16, 12, 4, 5, 2, 8, block_size=4, indexer=index)
