"""Caches that evict keep the keys that the papers' algorithms keep, and say what they cannot do."""

import math

import pytest
import torch
from torch import Tensor

import polyhead as ph
from polyhead.caches import (
    H2O,
    DenseCache,
    EvictingCache,
    Plain,
    Quantized,
    SnapKV,
    StoredCache,
    StreamingLLM,
    cache_bytes,
)
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    DifferentialAttentionConfig,
    FeedForwardConfig,
    GroupedTiedAttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    MambaConfig,
    QKNormConfig,
    RelativeBiasConfig,
    RopeConfig,
    TensorProductAttentionConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers import MultiHeadAttention
from polyhead.layers.registry import build_attention
from polyhead.parallel import calls, slices

H, G, D, T = 4, 2, 8, 48
X = torch.randn(2, T, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
HEADS = AttentionConfig(H, G, D, rope=RopeConfig(), sinks=True, softcap=20.0)
CHUNKS = [[1] * T, [30, 1, 1, 5, 11], [7, 20, 1, 20], [T]]


def layer(dtype: torch.dtype = torch.float64) -> MultiHeadAttention:
    torch.manual_seed(1)
    made = MultiHeadAttention.from_config(32, HEADS)
    torch.nn.init.normal_(made.sinks)
    return made.to(dtype).eval()


def softmax_row(attn: MultiHeadAttention, q: Tensor, keys: Tensor, head: int) -> Tensor:
    """The weights of one query on some keys, by the formula, with softcap and a sink."""
    scores = torch.tanh(keys @ q / math.sqrt(D) / 20.0) * 20.0
    sink = attn.sinks[head].detach()
    whole = torch.exp(scores - scores.max()).sum() + torch.exp(sink - scores.max())
    return torch.exp(scores - scores.max()) / whole


def simulated(attn: MultiHeadAttention, x: Tensor, chunks: list[int], choose):
    """Outputs ``[B, T, E]``, and what each kv head holds after each call: sorted positions.

    ``choose(weights, held, length)`` gets the weights of each new query of the heads of a group,
    as a dict from key to number, in order, and returns what stays.
    """
    q, k, v = attn._project(x, 0)
    outs, kept = torch.zeros(len(x), H, x.shape[1], D, dtype=x.dtype), []
    states = {(b, g): ([], {}) for b in range(len(x)) for g in range(G)}
    first = 0
    for count in chunks:
        for (b, g), (held, total) in states.items():
            queries = []
            for t in range(first, first + count):
                seen = [*held, *range(first, t + 1)]
                row = dict.fromkeys(seen, 0.0)
                for h in range(g * H // G, (g + 1) * H // G):
                    p = softmax_row(attn, q[b, h, t], k[b, g, seen], h)
                    outs[b, h, t] = p @ v[b, g, seen]
                    row = {j: row[j] + float(each) for j, each in zip(seen, p, strict=True)}
                queries.append(row)
            every = [*held, *range(first, first + count)]
            held[:] = choose(queries, every, first + count, total)
        first += count
        kept.append([[sorted(states[b, g][0]) for g in range(G)] for b in range(len(x))])
    joined = outs.transpose(1, 2).flatten(2)
    return torch.nn.functional.linear(joined, attn.o_proj.weight, attn.o_proj.bias), kept


def heavy_hitters(budget: int, recent: int):
    """Algorithm 1 of H2O: weights are added up, the greatest and the last tokens stay."""

    def choose(queries, every, length, total):
        for row in queries:
            for j, weight in row.items():
                total[j] = total.get(j, 0.0) + weight
        if len(every) <= budget:
            return every
        older = [j for j in every if j < length - recent]
        best = sorted(older, key=lambda j: -total[j])[: budget - recent]
        return [*best, *(j for j in every if j >= length - recent)]

    return choose


def snapped(budget: int, window: int, kernel: int, pooling: str):
    """SnapKV: the last ``window`` queries vote for older keys, votes are pooled over neighbours."""

    def choose(queries, every, length, total):
        if len(queries) < window or len(every) <= budget:
            return every
        older = sorted(j for j in every if j < length - window)
        votes = [sum(row.get(j, 0.0) for row in queries[-window:]) for j in older]
        side, pooled = kernel // 2, {}
        for i, j in enumerate(older):
            around = votes[max(0, i - side) : i + side + 1]
            pooled[j] = max(around) if pooling == "max" else sum(around) / kernel
        best = sorted(older, key=lambda j: -pooled[j])[: budget - window]
        return [*best, *(j for j in every if j >= length - window)]

    return choose


LAYOUTS = [
    (H2O(12), heavy_hitters(12, 6)),
    (H2O(9, recent=1), heavy_hitters(9, 1)),
    (H2O(8, recent=8), heavy_hitters(8, 8)),
    (SnapKV(13, window=5, kernel=3), snapped(13, 5, 3, "max")),
    (SnapKV(10, window=4, kernel=5, pooling="average"), snapped(10, 4, 5, "average")),
    (SnapKV(6, window=1, kernel=1), snapped(6, 1, 1, "max")),
]


def held_by(cache: EvictingCache) -> list[list[list[int]]]:
    return [[sorted(j for j in head.tolist() if j >= 0) for head in row] for row in cache.positions]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize(("layout", "choose"), LAYOUTS, ids=[str(each[0]) for each in LAYOUTS])
@torch.no_grad()
def test_each_head_keeps_what_the_algorithm_keeps_after_every_call(layout, choose, chunks):
    attn, cache = layer(), EvictingCache(layout)
    wanted, kept = simulated(attn, X, chunks, choose)
    found = []
    for x, held in zip(X.split(chunks, dim=1), kept, strict=True):
        found.append(attn(x, mask=ph.Causal(), cache=cache))
        assert held_by(cache) == held
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, atol=1e-10, rtol=1e-10)
    assert cache.lengths == [T, T]
    heads = [head for row in kept[-1] for head in row]
    chosen = len(heads[0]) < T and layout.budget > layout.last_tokens
    assert any(head != heads[0] for head in heads) is chosen


@pytest.mark.parametrize("kernel", ["tiled", "reference", "native"])
@pytest.mark.parametrize(("layout", "choose"), [LAYOUTS[0], LAYOUTS[3]], ids=["H2O", "SnapKV"])
@torch.no_grad()
def test_every_kernel_and_narrow_dtypes_read_what_is_held(layout, choose, kernel):
    wanted, _ = simulated(layer(), X, [30, 1, 1, 16], choose)
    attn, cache = layer(torch.float32), EvictingCache(layout)
    pieces = X.float().split([30, 1, 1, 16], dim=1)
    found = [attn(x, mask=ph.Causal(), cache=cache, kernel=kernel) for x in pieces]
    torch.testing.assert_close(torch.cat(found, dim=1).double(), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", [H2O(12), SnapKV(12, window=4), StreamingLLM(12)], ids=str)
@torch.no_grad()
def test_padded_rows_keep_what_they_keep_alone(layout):
    attn, cache = layer(), EvictingCache(layout)
    alone = [EvictingCache(layout), EvictingCache(layout)]
    generator = torch.Generator().manual_seed(3)
    for columns in (6, 1, 20, 3, 1, 9, 1, 1):
        x = torch.randn(2, columns, 32, generator=generator, dtype=torch.float64)
        real = torch.rand(2, columns, generator=generator) < 0.8
        if columns == 6:  # rows that hold 4 and 6 tokens
            real = torch.arange(6) >= torch.tensor([[3], [0]])
        real[0, 0] = real[1, -1] = True
        positions = cache.next_positions(real)
        y = attn(x, mask=ph.Causal(), cache=cache, positions=positions)
        for row, single in enumerate(alone):
            if real[row].any():
                each = attn(x[row : row + 1, real[row]], mask=ph.Causal(), cache=single)
                torch.testing.assert_close(y[row, real[row]], each[0], atol=1e-10, rtol=1e-10)
                assert held_by(cache)[row] == held_by(single)[0]
    assert cache.lengths[0] != cache.lengths[1]


def model(attention=None, **options) -> ph.Transformer:
    torch.manual_seed(2)
    heads = AttentionConfig(H, G, D, rope=RopeConfig())
    layers = [LayerConfig(each or heads, FeedForwardConfig(64)) for each in (None, attention)]
    return ph.Transformer(
        TransformerConfig("decoder", 50, 32, 512, tuple(layers), **options)
    ).eval()


IDS = torch.randint(50, (2, 60), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("layout", [H2O(64), SnapKV(64), StreamingLLM(64)], ids=str)
@torch.no_grad()
def test_with_a_budget_of_all_tokens_a_model_is_as_with_all_keys(layout):
    made = model()
    evicting, dense = made.new_cache(evicting=layout), made.new_cache()
    for ids in IDS.split([40, 1, 1, 3, 15], dim=1):
        found, wanted = made(ids, cache=evicting), made(ids, cache=dense)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        if isinstance(layout, SnapKV):
            assert torch.equal(found, wanted)


@torch.no_grad()
def test_the_decode_plan_says_that_modules_compute_and_why():
    made = model()
    cache = made.new_cache(evicting=H2O(20))
    made(IDS, cache=cache)
    made(IDS[:, :1], cache=cache)
    plan = made.decode_plan(cache)
    assert plan.explain() == "layers 0 to 1: modules; its cache is of the class EvictingCache"
    assert not plan.is_native
    assert "20 of 61 tokens kept" in repr(cache.layers[0])
    assert "H2O(budget=20, recent=10)" in repr(cache.layers[0])


@pytest.mark.parametrize("tokens", [5, 60])
@pytest.mark.parametrize(
    "layout", [H2O(20), H2O(100), SnapKV(40), SnapKV(100), StreamingLLM(20)], ids=str
)
@torch.no_grad()
def test_planned_bytes_are_held_bytes_and_have_a_bound(layout, tokens):
    made = model(AttentionConfig(H, G, D, rope=RopeConfig(), window=7))
    cache = made.new_cache(evicting=layout)
    made(IDS[:, :tokens], cache=cache)
    plan = ph.plan(made.config, tokens=tokens, batch_size=2, dtype="float32", evicting=layout)
    assert plan.cache_bytes == cache.bytes
    assert str(layout).split("(")[0] in str(plan)
    assert f"evicting keeps {min(tokens, layout.budget)} of {tokens} tokens" in plan.notes[-1]
    full = ph.plan(made.config, tokens=500, batch_size=2, dtype="float32")
    least = ph.plan(made.config, tokens=500, batch_size=2, dtype="float32", evicting=layout)
    assert least.cache_bytes < full.cache_bytes
    assert least.decode_cache_bytes < full.decode_cache_bytes
    assert least.decode.model < full.decode.model
    roomy, k = EvictingCache(layout, capacity=500), torch.zeros(2, G, 1, D)
    roomy.append(k, k)
    sizes = {"num_kv_heads": G, "key_dim": D, "value_dim": D, "dtype": torch.float32}
    assert roomy.bytes == cache_bytes(layout, Plain(), tokens=500, batch_size=2, **sizes)
    if layout.most_tokens is not None:
        made(IDS, cache=cache)
        sizes = set()
        for _ in range(100):
            made(IDS[:, :1], cache=cache)
            sizes.add(cache.layers[0].bytes)
        weights = 4 if layout.accumulates else 0
        assert sizes == {2 * layout.budget * G * (2 * D * 4 + weights + 8)}


@torch.no_grad()
def test_rollback_goes_back_to_what_no_choice_depends_on():
    attn, x = layer(), X[:, :1]
    for layout, before, after in ((SnapKV(12, window=4), 10, 3), (H2O(12), 0, 0)):
        cache = EvictingCache(layout)
        attn(X[:, :10], mask=ph.Causal(), cache=cache)
        assert cache.max_rollback == before
        attn(X[:, 10:20], mask=ph.Causal(), cache=cache)
        assert cache.max_rollback == 0
        held = held_by(cache)
        for _ in range(3):
            attn(x, mask=ph.Causal(), cache=cache)
        assert cache.max_rollback == after
        with pytest.raises(
            ValueError, match=r"at most \d tokens now, or all 23: got 4; .* evicted"
        ):
            cache.rollback(4)
        if after:
            cache.rollback(3)
            assert held_by(cache) == held
        cache.rollback(cache.length)
        assert cache.lengths == [0, 0]
        attn(X[:, :5], mask=ph.Causal(), cache=cache)
        assert cache.max_rollback == (5 if after else 0)
        cache.reset()
        fresh = attn(X, mask=ph.Causal(), cache=cache)
        assert torch.equal(fresh, attn(X, mask=ph.Causal(), cache=EvictingCache(layout)))


@pytest.mark.parametrize("layout", [H2O(12), SnapKV(12, window=4), StreamingLLM(12)], ids=str)
@torch.no_grad()
def test_forks_reordered_rows_and_saved_files_go_on_as_the_cache_does(layout, tmp_path):
    attn, cache = layer(), EvictingCache(layout)
    attn(X[:, :30], mask=ph.Causal(), cache=cache)
    attn(X[:, 30:31], mask=ph.Causal(), cache=cache)
    fork, loaded, turned = cache.fork(), EvictingCache(layout), cache.fork()
    cache.save(tmp_path / "cache.safetensors")
    loaded.load(tmp_path / "cache.safetensors")
    turned.reorder([1, 0, 1])
    for x in X[:, 31:].split([1, 9, 7], dim=1):
        wanted = attn(x, mask=ph.Causal(), cache=cache)
        assert torch.equal(attn(x, mask=ph.Causal(), cache=fork), wanted)
        assert torch.equal(attn(x, mask=ph.Causal(), cache=loaded), wanted)
        rows = attn(x[[1, 0, 1]], mask=ph.Causal(), cache=turned)
        torch.testing.assert_close(rows, wanted[[1, 0, 1]], atol=1e-12, rtol=1e-12)
        assert held_by(loaded) == held_by(fork) == held_by(cache)
        assert held_by(turned) == [held_by(cache)[row] for row in (1, 0, 1)]
    assert loaded.max_rollback == cache.max_rollback
    tensors, facts = cache.state()
    with pytest.raises(ValueError, match="settled contradicts"):
        EvictingCache(layout).restore(tensors, facts | {"settled": [0, 0]}, torch.device("cpu"))
    short = EvictingCache(layout)
    attn(X[:, :9], mask=ph.Causal(), cache=short)
    before, fork = short.max_rollback, short.fork()
    attn(X, mask=ph.Causal(), cache=fork)
    assert short.max_rollback == before


@pytest.mark.parametrize("layout", [H2O(12), SnapKV(12, window=4), StreamingLLM(12)], ids=str)
@torch.no_grad()
def test_refused_calls_leave_the_cache_as_it_was(layout):
    attn, cache = layer(), EvictingCache(layout)
    attn(X[:, :20], mask=ph.Causal(), cache=cache)
    held, lengths = held_by(cache), cache.lengths
    for count in (1, 9):
        x = X[:, 20 : 20 + count]
        refused = [
            {"mask": ph.Causal() & ph.Window(4)},
            {"mask": ph.Causal(), "bias": torch.zeros(2, H, count, 12 + count)},
        ]
        if layout.by_weight:
            refused.append({"mask": ph.Causal(), "bias": ph.ALiBi(torch.ones(H))})
        for options in refused:
            with pytest.raises(UnsupportedError, match=r"mask=Causal\(\) or None and no bias"):
                attn(x, cache=cache, **options)
            assert (held_by(cache), cache.lengths) == (held, lengths)
    with pytest.raises(ValueError, match="positions must follow on in each row"):
        attn(X[:, :1], mask=ph.Causal(), cache=cache, positions=torch.tensor([90]))
    with torch.enable_grad(), pytest.raises(ValueError, match="EvictingCache cannot carry"):
        attn(X[:, :1], mask=ph.Causal(), cache=cache)
    assert (held_by(cache), cache.lengths) == (held, lengths)


@torch.no_grad()
def test_tokens_whose_queries_nobody_showed_are_not_lost_in_silence():
    cache, k = EvictingCache(H2O(4)), torch.randn(1, G, 3, D)
    source = cache.append(k, k)
    assert cache.lengths == [0]
    with pytest.raises(ValueError, match="have not been observed"):
        cache.append(k, k)
    assert cache.fork().append(k, k).tokens.length == 3
    q = torch.randn(1, H, 3, D)
    _, lse = ph.attention(q, source, mask=ph.Causal(), return_lse=True)
    spec = ph.semantics.Specification(D**-0.5, ph.Causal())
    source.observer(q, lse, spec, source.tokens)
    assert cache.lengths == [3]
    with pytest.raises(UnsupportedError, match="one attention of each call"):
        source.observer(q, lse, spec, source.tokens)
    cache.append(k, k)
    cache.rollback(0)
    assert cache.append(k, k).tokens.length == 6


@torch.no_grad()
def test_a_model_that_fails_between_layers_is_empty_or_as_before():
    made = model()
    for layout in (H2O(20), SnapKV(40), StreamingLLM(20)):
        cache = made.new_cache(evicting=layout)
        made(IDS[:, :30], cache=cache)
        handle = made.layers[1].attention.register_attention_hook(lambda record: 1 / 0)
        with handle, pytest.raises(ZeroDivisionError):
            made(IDS[:, 30:], cache=cache)
        assert {tuple(each.lengths) for each in cache.layers} <= {(30, 30), (0, 0)}
        cache.reset()
        again = made.new_cache(evicting=layout)
        assert torch.equal(made(IDS, cache=cache), made(IDS, cache=again))


def config_of(attention=None, **options) -> TransformerConfig:
    return model(attention, **options).config


@pytest.mark.parametrize(
    ("attention", "options", "words"),
    [
        (LatentAttentionConfig(4, 16, 8, 8, 8), {}, "layer 1, MLA"),
        (MambaConfig(10, 4, 3), {}, "layer 1, Mamba, cannot evict keys"),
        (AttentionConfig(H, G, D, alibi=ALiBiConfig()), {}, "its bias needs positions of keys"),
        (
            AttentionConfig(H, G, D, rope=RopeConfig(), hands_on_keys=True),
            {},
            "later layers read its keys",
        ),
        (None, {"relative_bias": RelativeBiasConfig(8, 32)}, "bias needs positions of keys"),
    ],
    ids=["latent", "states", "alibi", "handed on", "relative bias"],
)
def test_layers_whose_keys_cannot_be_chosen_are_refused_by_name(attention, options, words):
    made = model(attention, **options)
    with pytest.raises(ConfigError, match=words):
        made.new_cache(evicting=H2O(8))
    with pytest.raises(ConfigError, match=words):
        ph.plan(made.config, tokens=8, evicting=H2O(8))


def test_layers_with_a_window_keep_their_ring_whatever_they_are():
    alibi = AttentionConfig(H, G, D, alibi=ALiBiConfig(), window=5)
    found = model(alibi).new_cache(evicting=H2O(8))
    assert [type(each.layout).__name__ for each in found.layers] == ["H2O", "Ring"]


def test_options_that_contradict_evicting_are_refused_by_name():
    made = model()
    for options in ({"kind": "paged"}, {"kind": "dense"}, {"quantized": Quantized()}):
        with pytest.raises(ConfigError, match="goes with kind='auto' and quantized=None"):
            made.new_cache(evicting=H2O(8), **options)
    for options in ({"page_size": 16}, {"kv_dtype": "int8"}):
        with pytest.raises(ConfigError, match="goes with kind='auto' and quantized=None"):
            ph.plan(made.config, evicting=H2O(8), **options)
    with pytest.raises(ConfigError, match="is for one process"):
        ph.plan(made.config, evicting=H2O(8), tensor_parallel=2)
    with pytest.raises(
        ConfigError,
        match=r"evicting must be H2O\(budget\), SnapKV.* or StreamingLLM\(budget\): got 8",
    ):
        made.new_cache(evicting=8)
    with pytest.raises(ConfigError, match="layout of a StoredCache must be Dense, Ring or Paged"):
        StoredCache(H2O(8))
    with pytest.raises(
        ConfigError, match="layout of a EvictingCache must be H2O, SnapKV or StreamingLLM"
    ):
        EvictingCache(DenseCache().layout)
    with ph.batch_invariant(), pytest.raises(UnsupportedError, match="which keys stay depends"):
        made.new_cache(evicting=H2O(8))
    for kind in (calls._NewCache, slices._NewCache):
        with pytest.raises(UnsupportedError, match="cannot do a cache that evicts keys"):
            kind(made, None)(evicting=H2O(8))
    for made_of, words in (
        (lambda: H2O(0), "budget must be"),
        (lambda: H2O(4, recent=5), "recent must be"),
        (lambda: SnapKV(32), "budget must be"),
        (lambda: SnapKV(40, kernel=4), "kernel must be odd"),
        (lambda: SnapKV(40, pooling="sum"), "pooling must be"),
        (lambda: StreamingLLM(4), "budget must be"),
        (lambda: StreamingLLM(4, sinks=-1), "sinks must be"),
    ):
        with pytest.raises(ConfigError, match=words):
            made_of()


@torch.no_grad()
def test_packed_rows_and_hooks_see_the_same_numbers():
    made = model()
    first, second = (made.new_cache(evicting=H2O(20)) for _ in range(2))
    made(IDS[:, :30], cache=first)
    made(IDS[:, :30], cache=second)
    packed = torch.cat((IDS[0, 30:33], IDS[1, 30:31]))[None]
    made(packed, cache=first, counts=[3, 1])
    positions = second.next_positions(torch.tensor([[True] * 3, [True, False, False]]))
    with ph.probe(made) as seen:
        made(IDS[:, 30:33], cache=second, positions=positions)
    assert held_by(first.layers[1]) == held_by(second.layers[1])
    weights = seen[0].rows(heads=[1], queries=slice(0, 1))
    assert torch.allclose(weights.sum(dim=-1), torch.ones(()))


@pytest.mark.parametrize("layout", [H2O(6), StreamingLLM(6)], ids=str)
@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (LatentAttentionConfig(4, 16, 8, 8, 8), "keeps more of a token than keys and values"),
        (TensorProductAttentionConfig(4, 2, 2, 8), "keeps more of a token than keys and values"),
        (DifferentialAttentionConfig(4, 2, 8), "weigh keys of single tokens by one softmax alone"),
        (GroupedTiedAttentionConfig(4, 2, 8), "weigh keys of single tokens by one softmax alone"),
    ],
    ids=["latent", "products", "differential", "tied"],
)
@torch.no_grad()
def test_layers_that_keys_cannot_be_evicted_of_refuse_a_cache_that_is_given(
    layout, attention, words
):
    cache = EvictingCache(layout)
    with pytest.raises(UnsupportedError, match=words):
        build_attention(32, attention).double()(X, mask=ph.Causal(), cache=cache)
    assert cache.lengths == []
    with pytest.raises(UnsupportedError, match="for self-attention: got a context"):
        layer()(X, X, cache=cache)
    after = AttentionConfig(H, G, D, rope=RopeConfig(), qk_norm=QKNormConfig(place="after_rope"))
    made = build_attention(32, after).double()
    if layout.by_weight:
        assert made(X, mask=ph.Causal(), cache=cache).shape == X.shape
    else:
        with pytest.raises(UnsupportedError, match="they are normalized after that"):
            made(X, mask=ph.Causal(), cache=cache)
