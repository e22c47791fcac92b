"""Latent attention to chosen keys: the formula, every cache, models, plans, refusals."""

from __future__ import annotations

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from whole_models import check_decoding

import polyhead as ph
from polyhead.caches import LayerCache, Quantized
from polyhead.caches.sizes import Dense, Layout, Paged
from polyhead.config import (
    FeedForwardConfig,
    IndexerConfig,
    LayerConfig,
    RopeConfig,
    SparseLatentAttentionConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.kernels.choosing import choose_keys
from polyhead.layers import MultiHeadLatentAttention, SparseLatentAttention
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes
from polyhead.planning.flops import attention_flops
from polyhead.semantics import DenseSource, index_scores

E, TOP = 32, 6
SIZES = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
INDEXER = IndexerConfig(num_heads=16, head_dim=8, top_k=TOP)


def layer(dtype: torch.dtype = torch.float64, **options: object) -> SparseLatentAttention:
    torch.manual_seed(0)
    made = SparseLatentAttention(
        E, 4, q_lora_rank=24, indexer=INDEXER, bias=False, **SIZES, **options
    )
    torch.nn.init.normal_(made.indexer.k_norm.bias)
    return made.to(dtype).eval()


def tokens(B: int, T: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, T, E, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def formula(mine: SparseLatentAttention, x: Tensor) -> Tensor:
    """Eq. 1 with loops, then dense latent attention to the chosen pairs."""
    J, D, P = INDEXER.num_heads, INDEXER.head_dim, SIZES["qk_rope_head_dim"]
    B, T, _ = x.shape
    latent = mine.q_a_norm(mine.q_a_proj(x))
    q = mine.indexer.q_proj(latent).view(B, T, J, D)
    k = mine.indexer.k_norm(mine.indexer.k_proj(x))[:, :, None]
    q, k = (
        torch.cat((mine.rope.apply(each[..., :P].transpose(1, 2), 0).transpose(1, 2),
                   each[..., P:]), dim=-1)
        for each in (q, k)
    )  # fmt: skip
    w = mine.indexer.weights_proj(x) / (J * D) ** 0.5
    keep = torch.zeros(B, 1, T, T, dtype=torch.bool)
    for b in range(B):
        for t in range(T):
            scores = (w[b, t, :, None] * (q[b, t] @ k[b, : t + 1, 0].T).relu()).sum(0)
            keep[b, 0, t, scores.topk(min(TOP, t + 1)).indices] = True
    dense = MultiHeadLatentAttention(E, 4, q_lora_rank=24, bias=False, **SIZES).to(x.dtype)
    dense.load_state_dict(mine.state_dict(), strict=False)
    return dense(x, mask=ph.Keep(keep), kernel="reference")


@pytest.mark.parametrize("computation", ["absorbed", "expanded"])
def test_it_is_latent_attention_to_the_chosen_keys(computation):
    mine, x = layer(), tokens(2, 23)
    wanted = formula(mine, x)
    torch.testing.assert_close(mine(x, mask=ph.Causal(), computation=computation), wanted)
    with torch.no_grad():
        for kernel in ("auto", "tiled", "reference"):
            found = mine(x, mask=ph.Causal(), computation=computation, kernel=kernel)
            torch.testing.assert_close(found, wanted)
    short, dense = x[:, :TOP], MultiHeadLatentAttention(E, 4, q_lora_rank=24, bias=False, **SIZES)
    dense.double().load_state_dict(mine.state_dict(), strict=False)
    assert torch.equal(mine(short, mask=ph.Causal()), dense(short, mask=ph.Causal()))


CACHES: dict[str, tuple[Layout, Quantized | None]] = {
    "dense": (Dense(), None),
    "paged": (Paged(4), None),
    "coded": (Dense(), Quantized(8, 8, group=8, recent=8, sink_tokens=2)),
    "coded pages": (Paged(8), Quantized(8, 8, group=8, recent=8, sink_tokens=2)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CACHES)
def test_every_cache_equals_one_pass(name):
    layout, quantized = CACHES[name]
    mine, x, causal = layer(torch.float32), tokens(3, 31, dtype=torch.float32), ph.Causal()
    whole, cache = (
        mine(x, mask=causal),
        LayerCache(mine.config.memories, layout, quantized=quantized),
    )
    parts = [mine(part, mask=causal, cache=cache) for part in x.split([9, 1, 5, 1, 15], dim=1)]
    if quantized is not None:  # codes may change which keys are chosen
        assert cache.lengths == [31] * 3
        wanted = formula(mine, x[:, :10])
        torch.testing.assert_close(torch.cat(parts[:2], dim=1), wanted, atol=1e-5, rtol=1e-4)
        return
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-4)
    fork = cache.fork()
    fork.rollback([2, 7, 0])  # rows now differ in what they hold
    fork.reorder([1, 0, 0, 2])
    more = tokens(4, 3, 5, torch.float32)
    rows = [x[1, :24], x[0, :29], x[0, :29], x[2]]
    found = mine(more, mask=causal, cache=fork)
    for i, row in enumerate(rows):
        alone = mine(torch.cat((row, more[i]))[None], mask=causal)[:, -3:]
        torch.testing.assert_close(found[i : i + 1], alone, atol=1e-5, rtol=1e-4)
    again = mine(x[:, :1], mask=causal, cache=cache)  # the fork left it alone
    alone = mine(torch.cat((x, x[:, :1]), dim=1), mask=causal)[:, -1:]
    torch.testing.assert_close(again, alone, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_padded_rows_equal_rows_alone():
    mine, x, causal = layer(), tokens(2, 20), ph.Causal()
    positions = torch.arange(20).expand(2, 20).clone()
    positions[0] = torch.where(positions[0] < 5, -1, positions[0] - 5)
    cache = LayerCache(mine.config.memories)
    found = mine(x, mask=causal, positions=positions, cache=cache)
    torch.testing.assert_close(found[:1, 5:], mine(x[:1, 5:], mask=causal))
    torch.testing.assert_close(found[1:], mine(x[1:], mask=causal))
    assert cache.lengths == [15, 20]


@torch.no_grad()
def test_bits_do_not_depend_on_chunks_or_neighbours_in_batch_invariant_mode():
    mine, x, causal = layer(torch.float32), tokens(2, 19, dtype=torch.float32), ph.Causal()
    with ph.batch_invariant():
        whole = mine(x, mask=causal)
        assert torch.equal(mine(x[1:], mask=causal), whole[1:])
        cache = LayerCache(mine.config.memories)
        parts = [mine(part, mask=causal, cache=cache) for part in x.split([8, 1, 1, 9], dim=1)]
        assert torch.equal(torch.cat(parts, dim=1), whole)


def configuration(*sources: int | None) -> TransformerConfig:
    """Layers with a selection of their own (None), or of an earlier layer."""
    own = SparseLatentAttentionConfig(4, **SIZES, q_lora_rank=24, indexer=INDEXER)
    network = FeedForwardConfig(40, "silu", gated=True, bias=False)
    layers = (dataclasses.replace(own, selection_of=source) for source in sources)
    return TransformerConfig(
        "decoder", 50, E, 256, tuple(LayerConfig(each, network) for each in layers)
    )


def model(*sources: int | None) -> Transformer:
    config = configuration(*(sources or (None, None)))
    assert TransformerConfig.from_json(config.to_json()) == config
    torch.manual_seed(0)
    return Transformer(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["auto", "paged"])
@pytest.mark.parametrize("sources", [(None, None), (None, 0, None, 2)], ids=["own", "shared"])
def test_a_model_decodes_as_in_one_pass_and_holds_what_is_planned(kind, sources, tmp_path):
    mine = model(*sources)
    cache = check_decoding(mine, kind, tmp_path)
    assert "modules" in mine.decode_plan(cache).explain()


def test_plans_count_the_chosen_pairs_and_the_scores_of_all():
    sparse = SparseLatentAttentionConfig(4, **SIZES, q_lora_rank=24, indexer=INDEXER)
    per_choice = 2 * INDEXER.num_heads * INDEXER.head_dim
    per_pair = 2 * 4 * (2 * 16 + 4)  # absorbed
    # Queries at positions 100 to 102 choose 6 keys each, of 101, 102 and 103.
    assert attention_flops(sparse, 3, 100, 5) == 5 * (per_pair * 3 * 6 + per_choice * 306)
    assert attention_flops(sparse, 2, 0, 1) - 2 * 4 * 18 * 3 == per_choice * 3
    config = TransformerConfig(
        "decoder", 50, E, 256, (LayerConfig(sparse, FeedForwardConfig(40)),)
    )  # fmt: skip
    few, many = (
        ph.plan(config, tokens=n, batch_size=1, dtype="float32", bandwidth=1e9).bound
        for n in (100, 101)
    )
    assert many.memory_seconds - few.memory_seconds == pytest.approx(4 * 8 / 1e9)  # its index key


@torch.no_grad()
def test_a_probe_sees_zero_where_a_key_was_not_chosen():
    mine, x = layer(), tokens(1, 12)
    with ph.probe(mine) as seen:
        mine(x, mask=ph.Causal())
    weights = seen[0].weights()
    assert ((weights > 0).sum(dim=-1) == torch.arange(1, 13).clamp(max=TOP)).all()


@torch.no_grad()
def test_of_equal_scores_the_first_keys_are_chosen_among_those_that_any_head_sees():
    q, k = torch.zeros(2, 3, 5, 4), torch.randn(2, 1, 9, 4)
    weights, source = torch.ones(2, 3, 5), DenseSource(k, k)
    chosen = choose_keys(q, weights, source, 4)
    assert torch.equal(chosen.blocks, torch.arange(4).expand(2, 1, 5, 4))
    keep = torch.zeros(1, 2, 5, 9, dtype=torch.bool)
    keep[:, 0, :, 7], keep[:, 1, :, 2] = True, True
    keep[:, :, 1] = False
    chosen = choose_keys(q, weights, source, 4, mask=ph.Keep(keep))
    assert chosen.blocks[0, 0].tolist() == [
        [2, 7, -1, -1], [-1] * 4, [2, 7, -1, -1], [2, 7, -1, -1], [2, 7, -1, -1],
    ]  # fmt: skip
    many = choose_keys(torch.randn(1, 7, 300, 8), torch.randn(1, 7, 300), DenseSource(
        x := torch.randn(1, 1, 4000, 8), x), 5, mask=ph.Causal())  # fmt: skip
    assert many.blocks.shape == (1, 1, 300, 5)


def test_index_scores_have_gradients_and_parts_equal_the_whole():
    q, w, k = torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40), torch.randn(2, 9000, 8)
    parts = [index_scores(q[:, :, i : i + 1], w[:, :, i : i + 1], k) for i in (0, 39)]
    whole = index_scores(q, w, k)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole[:, [0, 39]])
    chosen = choose_keys(q, w, DenseSource(k[:, None], k[:, None]), 50)
    best = whole.topk(50, dim=-1).indices.sort(dim=-1).values
    assert torch.equal(chosen.blocks[:, 0], best)
    small = [x.double().requires_grad_() for x in (q[:1, :, :2], w[:1, :, :2], k[:1, :5])]
    assert torch.autograd.gradcheck(index_scores, small)


def test_what_does_not_go_is_refused_by_name():
    mine, x, causal = layer(torch.float32), tokens(1, 3, dtype=torch.float32), ph.Causal()
    with pytest.raises(TypeError, match=r"must be a LayerCache.*got DenseCache"):
        mine(x, mask=causal, cache=ph.DenseCache())
    config = mine.config
    with pytest.raises(ConfigError, match=r"q_lora_rank must be a whole number.*got None"):
        dataclasses.replace(config, q_lora_rank=None)
    with pytest.raises(ConfigError, match=r"head_dim must be at least qk_rope_head_dim=4.*got 2"):
        dataclasses.replace(config, indexer=IndexerConfig(16, 2))
    assert dataclasses.replace(config, indexer=IndexerConfig(16, 2), rope=None)
    with pytest.raises(ConfigError, match="top_k must be a whole number"):
        IndexerConfig(16, 8, 0)
    with pytest.raises(TypeError, match=r"no argument 'heads'.*num_heads"):
        SparseLatentAttention(E, heads=4, q_lora_rank=24, **SIZES)
    assert SparseLatentAttention(E, 4, q_lora_rank=24, rope=RopeConfig(theta=5.0), **SIZES)
    with pytest.raises(UnsupportedError, match="SparseLatentAttention"):
        check_classes(model(), "context")


@torch.no_grad()
def test_queries_and_gates_may_read_their_latent_as_it_is_projected_too():
    plain, x, causal = layer(), tokens(2, 17), ph.Causal()
    config = dataclasses.replace(plain.config, query_gate=True)
    mine = SparseLatentAttention.from_config(E, config).double().eval()
    own = {"q_b_proj.weight": mine.q_b_proj.weight, "gate_proj.weight": mine.gate_proj.weight}
    mine.load_state_dict(plain.state_dict() | own)
    half = plain.q_b_proj.weight
    mine.q_b_proj.weight.copy_(torch.cat((half, torch.zeros_like(half)), dim=1))
    projected = mine.q_a_proj(x)
    read = torch.cat((mine.q_a_norm(projected), projected), dim=-1)
    gates = torch.sigmoid(read @ mine.gate_proj.weight.T).view(2, 17, 4, 6).transpose(1, 2)
    with plain.register_head_edit(lambda heads: heads * gates):
        torch.testing.assert_close(
            mine(x, mask=causal), plain(x, mask=causal), atol=1e-6, rtol=1e-5
        )
    before = mine(x, mask=causal)
    mine.q_b_proj.weight[:, 24:].normal_()
    assert not torch.allclose(mine(x, mask=causal), before)


def selections(mine: Transformer, ids: Tensor) -> list[Tensor]:
    """The blocks of the mask of every layer's call."""
    found: list[Tensor] = []
    handles = [
        layer.attention.register_attention_hook(
            lambda record: found.extend(
                part.blocks for part in record.mask.walk() if isinstance(part, ph.Chosen)
            )
        )
        for layer in mine.layers
    ]
    with torch.no_grad():
        mine(ids)
    for handle in handles:
        handle.remove()
    return found


def test_a_layer_reads_the_selection_of_another_within_its_call():
    mine = model(None, 0, 0, None, 3)
    ids = torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(0))
    first, second, third, own, last = selections(mine, ids)
    assert first is second is third
    assert own is last
    assert not torch.equal(first, own)
    short = ids[:, :TOP]
    assert not selections(mine, short)  # all keys are read
    assert mine(short).shape == (2, TOP, 50)
    with pytest.raises(ValueError, match="reads the selection of layer 0: call it within its mod"):
        mine.layers[1](tokens(1, 9, dtype=torch.float32))


def test_threads_copies_and_recomputation_read_their_own_call():
    mine = model(None, 0, None, 2)
    texts = [torch.randint(50, (1, 12 + i), generator=torch.Generator().manual_seed(i))
             for i in range(16)]  # fmt: skip
    other = copy.deepcopy(mine)
    with torch.no_grad():
        wanted = [mine(ids) for ids in texts]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda ids: torch.no_grad()(mine)(ids), texts * 4))
        for got, want in zip(found, wanted * 4, strict=True):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
        assert torch.equal(other(texts[3]), wanted[3])
    gradients = []
    for recompute in (False, True):
        mine.recompute = recompute
        mine.zero_grad()
        mine(texts[5]).square().sum().backward()
        gradients.append([p.grad for p in mine.parameters() if p.grad is not None])
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("sources", [(0,), (None, 1), (None, 2, None), (None, 0, 1)])
def test_a_layer_reads_earlier_layers_that_choose(sources):
    with pytest.raises(ConfigError, match=r"layer \d reads the selection of layer \d, which must"):
        configuration(*sources)


@torch.no_grad()
def test_gates_sinks_and_features_that_rotate_last():
    """Sinks that weigh nothing leave the layer, gates multiply the heads' outputs."""
    plain, x, causal = layer(), tokens(2, 17), ph.Causal()
    config = dataclasses.replace(plain.config, gated=True, sinks=True)
    mine = SparseLatentAttention.from_config(E, config).double().eval()
    mine.load_state_dict(plain.state_dict(), strict=False)
    mine.sinks.fill_(-1e4)
    mine.gate_proj.weight.zero_()
    torch.testing.assert_close(mine(x, mask=causal), 0.5 * plain(x, mask=causal))
    mine.sinks.fill_(0.0)
    halved = mine(x, mask=causal)
    assert not torch.allclose(halved, 0.5 * plain(x, mask=causal))
    mine.gate_proj.weight.normal_()
    gates = torch.sigmoid(x @ mine.gate_proj.weight.T).view(2, 17, 4, 6).transpose(1, 2)
    with mine.register_head_edit(lambda heads: heads / gates):
        torch.testing.assert_close(mine(x, mask=causal), 2 * halved)
    with pytest.raises(ConfigError, match="one gate: got gated=True and query_gate=True"):
        dataclasses.replace(config, query_gate=True)
    last = dataclasses.replace(INDEXER, rotates="last")
    config = dataclasses.replace(plain.config, indexer=last)
    turned = SparseLatentAttention.from_config(E, config).double().eval()
    turned.load_state_dict(plain.state_dict())
    order = [*range(4, 8), *range(4)]  # with rows in another order the same ones rotate
    index = turned.indexer
    index.q_proj.weight.copy_(index.q_proj.weight.view(16, 8, -1)[:, order].flatten(0, 1))
    for parameter in (index.k_proj.weight, index.k_norm.weight, index.k_norm.bias):
        parameter.copy_(parameter[order])
    torch.testing.assert_close(turned(x, mask=causal), plain(x, mask=causal))
