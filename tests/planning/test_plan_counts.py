"""Operations and bytes of a plan, against brute-force counts and caches that were really made."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_facts import TINY, TINY_LATENT
from torch.utils.flop_counter import FlopCounterMode

import polyhead as ph
from polyhead.caches import LatentCache, StoredCache
from polyhead.config import (
    HeadLayout,
    HeadTransformConfig,
    LatentAttentionConfig,
    TransformerConfig,
)
from polyhead.layers import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MultiHeadLatentAttention,
    TransformerLayer,
)
from polyhead.models import Transformer
from polyhead.planning import plan, tiled_pairs, visible_pairs
from polyhead.planning.flops import flops
from polyhead.planning.memory import caches
from polyhead.semantics.tokens import Tokens

# Pairs


def drawn(queries: int, cached: int, window: int | None) -> torch.Tensor:
    """The mask itself, ``[T, S]``."""
    mask: Any = ph.Causal() if window is None else ph.Causal() & ph.Window(window)
    rows = Tokens.of(queries, shift=cached)
    visible: torch.Tensor = mask.visible(rows, Tokens.of(cached + queries), torch.device("cpu"))
    return visible.reshape(queries, cached + queries)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(0, 70),
    st.one_of(st.none(), st.integers(1, 150)),
    st.integers(1, 40),
)
def test_pairs_equal_a_count_of_the_mask(
    queries: int, cached: int, window: int | None, tile: int
) -> None:
    mask = drawn(queries, cached, window)
    assert visible_pairs(queries, cached, window) == int(mask.sum())
    whole = 0
    for i in range(0, queries, tile):
        for j in range(0, cached + queries, tile):
            part = mask[i : i + tile, j : j + tile]
            whole += part.numel() if part.any() else 0
    assert tiled_pairs(queries, cached, window, tile) == whole


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 40),
    st.one_of(st.none(), st.integers(1, 90)),
    st.one_of(st.none(), st.integers(0, 50)),
    st.one_of(st.none(), st.integers(1, 20)),
    st.integers(1, 20),
)
def test_pairs_ahead_and_of_chunks_equal_a_count(
    queries: int, cached: int, window: int | None, ahead: int | None, chunk: int | None, tile: int
) -> None:
    if chunk is not None:
        window, ahead = None, 0
    q, k = torch.arange(cached, cached + queries)[:, None], torch.arange(cached + queries)[None]
    mask = (k > q - (window or 999)) & (k <= q + (999 if ahead is None else ahead))
    if chunk is not None:
        mask &= q // chunk == k // chunk
    given: Any = {"ahead": ahead, "chunk": chunk}
    assert visible_pairs(queries, cached, window, **given) == int(mask.sum())
    parts = [(i, j) for i in range(0, queries, tile) for j in range(0, cached + queries, tile)]
    tiles = [mask[i : i + tile, j : j + tile] for i, j in parts]
    whole = sum(part.numel() for part in tiles if part.any())
    assert tiled_pairs(queries, cached, window, tile, **given) == whole


def test_pairs_of_long_prompts_are_exact_whole_numbers() -> None:
    assert visible_pairs(131_072) == 131_072 * 131_073 // 2
    assert visible_pairs(131_072, window=1024) == 1024 * 1025 // 2 + (131_072 - 1024) * 1024
    assert visible_pairs(1, 131_071, 1024) == 1024
    assert tiled_pairs(131_072) == 128 * 128 * (1024 * 1025 // 2)


# Operations, against what runs


def counted(run: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return int(counter.get_total_flops())


LAYER = LayerConfig(AttentionConfig(8, 2, 16, qkv_bias=True), FeedForwardConfig(96))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("layer", ["heads", "plain network"])
def test_linear_operations_equal_those_that_run(window: int | None, layer: str) -> None:
    """With everything visible: then no kernel multiplies a pair that nobody sees."""
    shape = LAYER
    if layer == "plain network":
        shape = LayerConfig(
            AttentionConfig(4, 4, 16, window=window), FeedForwardConfig(80, gated=False)
        )
    module = TransformerLayer.from_config(64, shape)
    config = TransformerConfig("encoder", 50, 64, 32, (shape,), head=None)
    x = torch.randn(3, 12, 64)
    if shape.attention.window is None:
        planned = flops(config, queries=12, cached=0, batch_size=3)
        ran = counted(lambda: module(x, kernel="reference"))
        assert planned.model == ran
    decoder = TransformerConfig("decoder", 50, 64, 32, (shape,), head=None)
    step = flops(decoder, queries=1, cached=0, batch_size=3)
    assert step.model == counted(lambda: module(x[:, :1], kernel="reference"))


@pytest.mark.parametrize("dim", [None, 24])
@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_operations_of_whole_models_equal_those_that_run(kind: str, dim: int | None) -> None:
    """One token, so that it sees everything; with a context, and a transform of the head."""
    heads = AttentionConfig(4, 2, 8, v_head_dim=6)
    layer = LayerConfig(heads, FeedForwardConfig(96))
    crossing = LayerConfig(heads, FeedForwardConfig(80, gated=False), cross_attention=heads)
    layers = (layer, layer) if kind == "encoder" else (crossing, crossing, crossing)
    config = TransformerConfig(
        kind, 50, 32, 64, layers,
        encoder_layers=() if kind == "encoder" else (layer, layer),
        head="untied",
        head_transforms=(HeadTransformConfig(dim), HeadTransformConfig(20)),
    )  # fmt: skip
    token, source = torch.ones(3, 1, dtype=torch.int64), torch.ones(3, 7, dtype=torch.int64)
    more = {} if kind == "encoder" else {"encoder_ids": source}
    planned = flops(config, queries=1, cached=0, batch_size=3, context=7 if more else 0)
    model = Transformer(config).eval()
    assert planned.model == counted(lambda: model(token, **more, kernel="reference"))
    if more:
        cache = model.new_cache()
        with torch.no_grad():
            model(token, **more, cache=cache)
        step = flops(config, queries=1, cached=1, batch_size=3, context=7)
        assert step.model == counted(lambda: model(token, cache=cache, kernel="reference"))


@pytest.mark.parametrize(
    ("computation", "queries", "cached"),
    [("absorbed", 1, 40), ("expanded", 9, 0), ("expanded", 30, 4)],
)
def test_operations_of_latent_attention_equal_those_that_run(
    computation: str, queries: int, cached: int
) -> None:
    layer = MultiHeadLatentAttention(
        64, 4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        q_lora_rank=24,
    )  # fmt: skip
    shape = LayerConfig(layer.config, FeedForwardConfig(1))
    model = TransformerConfig("decoder", 50, 64, 64, (shape,), head=None)
    planned = flops(model, queries=queries, cached=cached, batch_size=2)
    cache = LatentCache(32, 8)
    with torch.no_grad():
        if cached:
            layer(torch.randn(2, cached, 64), cache=cache)
    x = torch.randn(2, queries, 64)
    ran = counted(lambda: layer(x, cache=cache, kernel="reference"))
    per_pair = 2 * 32 + 8 if computation == "absorbed" else 16 + 8 + 16
    assert planned.scores == 2 * 2 * 4 * per_pair * visible_pairs(queries, cached)
    everything = planned.scores * queries * (cached + queries) // visible_pairs(queries, cached)
    assert planned.projections + everything == ran
    assert layer.explain(queries, cached + queries, batch_size=2).computation == computation


def test_a_window_bounds_the_cost_of_a_step() -> None:
    config = TINY | {"model_type": "mistral", "sliding_window": 16, "max_position_embeddings": 9999}
    near, far = (plan(config, tokens=tokens).decode for tokens in (16, 2048))
    assert near is not None
    assert far is not None
    assert near.scores == far.scores == 3 * 2 * 16 * 4 * (8 + 8)
    # A prompt: 16 keys for all but the first 15 tokens.
    assert plan(config, tokens=2048).prefill.scores == 3 * 2 * 64 * visible_pairs(2048, 0, 16)


def test_hardware_operations_are_whole_tiles() -> None:
    made = plan(TINY, tokens=256).prefill
    pairs = 3 * 128 * 128  # of four tiles, the one above the diagonal is empty
    assert made.hardware_scores == 3 * 2 * 64 * pairs
    assert made.hardware - made.model == 3 * 2 * 64 * (pairs - 256 * 257 // 2)


def test_prompt_and_step_of_a_llama_by_hand() -> None:
    made = plan(TINY, tokens=100, batch_size=2)
    assert made.decode is not None
    per_layer = 32 * (4 * 8 + 2 * 2 * 8) + 4 * 8 * 32
    assert made.prefill.projections == 2 * 2 * 100 * 3 * per_layer
    assert made.decode.projections == 2 * 2 * 3 * per_layer
    assert made.prefill.feed_forward == 2 * 2 * 100 * 3 * 3 * 32 * 48
    assert made.decode.feed_forward * 100 == made.prefill.feed_forward
    assert made.prefill.scores == 2 * 2 * 3 * 4 * 16 * (100 * 101 // 2)
    assert made.decode.scores == 2 * 2 * 3 * 4 * 16 * 100
    assert made.prefill.head == made.decode.head == 2 * 2 * 32 * 100


def test_a_mixture_counts_the_experts_that_a_token_visits() -> None:
    made = plan(TINY_LATENT, tokens=10)
    assert made.decode is not None
    dense, sparse = 3 * 32 * 48, 3 * 32 * 16 * (2 + 1) + 32 * 8
    assert made.decode.feed_forward == 2 * (dense + 2 * sparse)


def test_steps_of_an_encoder_decoder_do_not_run_the_encoder() -> None:
    heads = AttentionConfig(4, 4, 8)
    wide, narrow = (FeedForwardConfig(hidden, gated=False) for hidden in (48, 40))
    config = TransformerConfig(
        "encoder-decoder",
        100,
        32,
        64,
        layers=(LayerConfig(heads, narrow, cross_attention=heads),) * 3,
        encoder_layers=(LayerConfig(heads, wide),) * 2,
    )
    made = plan(config, tokens=20)
    assert made.decode is not None
    assert made.prefill.feed_forward == 2 * 20 * 2 * 32 * (2 * 48 + 3 * 40)
    assert made.decode.feed_forward == 2 * 2 * 32 * 3 * 40
    square = 20 * 20
    assert made.prefill.scores == 2 * 4 * 16 * (2 * square + 3 * (210 + square))
    assert made.decode.scores == 2 * 4 * 16 * 3 * (20 + 20)
    # Self- and cross-attention: queries and outputs of both, keys and values of the first alone.
    assert made.decode.projections == 2 * 3 * (4 + 2) * 32 * 32
    assert len(made.cache_layers) == 2
    assert [row.cross for row in made.cache_layers] == [False, True]


# Bytes, against caches that were made


def random_configs() -> list[Any]:
    """30 configurations: windows, latents, heads per layer, pages, precisions, ranks."""
    draw, made = random.Random(7), []
    for number in range(30):
        attentions: list[HeadLayout] = []
        heads = draw.choice([4, 8])
        for _ in range(draw.randint(1, 4)):
            if number % 5 == 4:
                rank, rotated = draw.choice([8, 16, 32]), draw.choice([2, 4, 8])
                attentions.append(LatentAttentionConfig(4, rank, 8, rotated, 8))
            else:
                groups, size = draw.choice([1, 2, 4]), draw.choice([4, 8, 40])
                window = draw.choice([None, 1, 33, 100])
                attentions.append(AttentionConfig(heads, groups, size, window=window))
        layers = tuple(LayerConfig(each, FeedForwardConfig(48)) for each in attentions)
        kv_dtype = draw.choice(["float32", "bfloat16", "float16", "int8", "int4"])
        page = draw.choice([None, 32, 64]) if kv_dtype.startswith("int") else None
        if not kv_dtype.startswith("int"):
            page = draw.choice([None, 1, 7, 16])
        arguments = {
            "tokens": draw.choice([1, 5, 63, 64, 65, 130, 200]),
            "batch_size": draw.randint(1, 3),
            "kv_dtype": kv_dtype,
            "page_size": page,
            "tensor_parallel": draw.choice([1, 2, 4]),
        }
        config = TransformerConfig("decoder", 100, 32, 256, layers)
        made.append(pytest.param(config, arguments, id=f"{number}"))
    return made


@pytest.mark.parametrize(("config", "arguments"), random_configs())
def test_planned_bytes_are_allocated_bytes(
    config: TransformerConfig, arguments: dict[str, Any]
) -> None:
    made = plan(config, **arguments)
    ranks, batch, tokens = (arguments[name] for name in ("tensor_parallel", "batch_size", "tokens"))
    model = made.config
    allocated = 0
    for shape, cache in zip(
        model.layers,
        caches(model, arguments["kv_dtype"], arguments["page_size"], ranks),
        strict=True,
    ):
        real = StoredCache(cache.layout, cache.storage)
        held = shape.attention.kv
        heads = max(1, held.num_kv_heads // ranks)
        k = torch.zeros(batch, heads, tokens, held.key_dim, dtype=cache.dtype)
        v = k[..., : held.value_dim]
        real.append(k, v)
        allocated += real.bytes
        parts = {store.name: store for store in cache._stores()}
        read = cache.read_units(tokens)
        seen = sum(count * parts[name].tokens for name, count in read.items())
        held_tokens, window = real.source().tokens.length, shape.attention.visible_window
        if window is not None and arguments["page_size"] is not None:
            held_tokens = min(held_tokens, window)  # the others are kept, not read
        assert seen == held_tokens
        if arguments["kv_dtype"].startswith("int") or arguments["page_size"] is not None:
            # Used is the whole of a page, and the room of the exact tail.
            assert cache.read_bytes(tokens, batch) <= real.used_bytes
        else:
            assert cache.read_bytes(tokens, batch) == real.used_bytes
    assert made.cache_bytes == allocated
    assert sum(row.bytes * len(row.layers) for row in made.cache_layers) == allocated


def test_planned_bytes_are_those_of_a_latent_layer_that_ran() -> None:
    made = plan(TINY_LATENT, tokens=70, batch_size=2, kv_dtype="float32")
    layer = MultiHeadLatentAttention.from_config(32, made.config.layers[0].attention)
    cache = LatentCache(16, 4)
    with torch.no_grad():
        layer(torch.randn(2, 70, 32), mask=ph.Causal(), cache=cache)
    assert made.cache_layers[0].bytes == cache.bytes
    assert made.decode_cache_bytes == 3 * cache.used_bytes == 3 * 2 * 70 * 20 * 4


# Ranks


def test_ranks_share_heads_hidden_features_and_vocabulary() -> None:
    E, H, G, D, F, W = 32, 4, 2, 8, 48, 100
    norms = 3 * 2 * E + E
    whole = plan(TINY, tokens=8, dtype="float32").rank_weight_bytes
    assert whole == 4 * (2 * W * E + 3 * (E * D * (2 * H + 2 * G) + 3 * E * F) + norms)
    two = plan(TINY, tokens=8, dtype="float32", tensor_parallel=2).rank_weight_bytes
    assert two == 4 * (W * E + 3 * (E * D * (H + G) + 3 * E * F // 2) + norms)
    four = plan(TINY, tokens=8, dtype="float32", tensor_parallel=4).rank_weight_bytes
    # Four ranks, two kv heads: every rank has one of them.
    assert four == 4 * (W * E // 2 + 3 * (E * D * (H // 2 + 2) + 3 * E * F // 4) + norms)


def test_latent_projections_are_on_every_rank() -> None:
    one, two = (
        plan(TINY_LATENT, tokens=8, dtype="float32", tensor_parallel=n).rank_weight_bytes // 4
        for n in (1, 2)
    )
    copied = 3 * (12 * 32 + 20 * 32 + 12 + 16 + 2 * 32) + 32 + 2 * (8 * 32 + 8)
    assert one - two == (one - copied) // 2


# Reads and the bound


def test_a_step_reads_every_weight_but_the_embedding_and_the_visible_cache() -> None:
    made = plan(TINY, tokens=100, batch_size=2, dtype="float32", kv_dtype="bfloat16")
    total = made.parameters.total
    assert made.decode_weight_bytes == 4 * (total - 100 * 32 + 2 * 32)
    assert made.decode_cache_bytes == 2 * 100 * 3 * 2 * 2 * 8 * 2
    tied = plan(TINY | {"tie_word_embeddings": True}, tokens=100, dtype="float32")
    assert tied.decode_weight_bytes == 4 * tied.parameters.total


def test_a_batch_reads_more_experts_than_a_token() -> None:
    one, many, all_ = (
        plan(TINY_LATENT, tokens=8, batch_size=batch).decode_weight_bytes
        for batch in (1, 4, 10_000)
    )
    experts = 2 * 2 * 8 * 3 * 32 * 16  # bytes of two layers of eight experts
    assert many - one == round(experts * ((1 - 0.75**4) - 0.25)) + 2 * 3 * 32
    assert all_ - one == experts * 3 // 4 + 2 * 9_999 * 32


def test_bound_is_the_slower_of_reading_and_computing() -> None:
    made = plan("llama-3-8b", tokens=8192, bandwidth="2TB/s", flops="100TFLOP/s")
    assert made.decode is not None
    bound = made.bound
    assert bound is not None
    assert bound.memory_seconds == (made.decode_weight_bytes + made.decode_cache_bytes) / 2e12
    assert bound.compute_seconds == made.decode.model / 1e14
    assert bound.bound == "memory"
    assert bound.seconds == bound.memory_seconds
    assert bound.tokens_per_second == 1 / bound.seconds
    slow = plan("llama-3-8b", tokens=8192, bandwidth="2TB/s", flops="1GFLOP/s").bound
    assert slow is not None
    assert slow.bound == "compute"
    assert plan("llama-3-8b", tokens=8192).bound is None
    shared = plan("llama-3-8b", tokens=64, flops=1e12, tensor_parallel=8).bound
    alone = plan("llama-3-8b", tokens=64, flops=1e12).bound
    assert shared is not None
    assert alone is not None
    assert shared.seconds == alone.seconds / 8


# What fits


@pytest.mark.parametrize(("kv_dtype", "page"), [("bfloat16", None), ("bfloat16", 16), ("int8", 32)])
def test_longest_context_and_largest_batch_are_the_last_that_fit(
    kv_dtype: str, page: int | None
) -> None:
    keywords: dict[str, Any] = {"kv_dtype": kv_dtype, "page_size": page}
    config = TINY | {"max_position_embeddings": 1 << 20}
    memory = plan(config, tokens=1, **keywords).weight_bytes + 300_000
    made = plan(config, tokens=100, batch_size=2, memory=memory, **keywords)
    fit = made.fit
    assert fit is not None
    assert fit.fits
    assert fit.free == 300_000
    longest, largest = fit.longest_context, fit.largest_batch
    assert longest is not None
    assert largest is not None
    for tokens, batch in ((longest, 2), (100, largest)):
        assert plan(config, tokens=tokens, batch_size=batch, **keywords).rank_bytes <= memory
    for tokens, batch in ((longest + 1, 2), (100, largest + 1)):
        again = plan(config, tokens=tokens, batch_size=batch, memory=memory, **keywords)
        assert again.rank_bytes > memory
        assert again.fit is not None
        assert not again.fit.fits


def test_a_model_of_windows_alone_has_no_longest_context() -> None:
    config = TINY | {"model_type": "mistral", "sliding_window": 16}
    fit = plan(config, tokens=64, memory="1GiB").fit
    assert fit is not None
    assert fit.longest_context is None
    assert fit.largest_batch is not None


def test_a_loaded_model_counts_the_bytes_that_it_holds() -> None:
    """Of a GGUF file: blocks and scales; of numbers: theirs."""
    model = ph.load("smollm2")
    held = sum(x.nbytes for x in (*model.transformer.parameters(), *model.transformer.buffers()))
    made = plan(model, tokens=1024, dtype="file")
    assert abs(made.weight_bytes - held) <= 8
    assert made.weight_bytes < 0.3 * plan(model, tokens=1024, dtype="float32").weight_bytes
    assert made.parameters == plan(model.config, tokens=1024).parameters
    numbers = Transformer(plan(TINY).config)
    assert abs(plan(numbers, dtype="file").weight_bytes - 4 * numbers.parameter_counts().total) <= 8
