"""A layer's step in every kind of cache, for several tokens and rows of different lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from step_layers import drawn_layer, drawn_tokens
from torch import Tensor

import polyhead as ph
from polyhead import native
from polyhead.caches import Latent, Paged, Ring, StoredCache, reserved
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    QueryTemperatureConfig,
    RopeConfig,
)
from polyhead.layers import decode_plan, transformer_layer
from polyhead.layers.decode_plan import LayerArgs
from polyhead.layers.native_layer import NETWORK
from polyhead.layers.transformer_layer import TransformerLayer

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
LLAMA = LayerConfig(
    AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=32, rope=RopeConfig()),
    FeedForwardConfig(hidden_dim=40),
)
DEEPSEEK = replace(
    LLAMA,
    attention=LatentAttentionConfig(
        num_heads=5, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=16, v_head_dim=12
    ),
)
ALIBI = replace(LLAMA, attention=replace(LLAMA.attention, rope=None, alibi=ALiBiConfig()))
WINDOW = replace(LLAMA, attention=replace(LLAMA.attention, window=9, rope=RopeConfig(dim=16)))
SINKS = replace(LLAMA, attention=replace(LLAMA.attention, sinks=True))
CHUNKS = replace(LLAMA, attention=replace(LLAMA.attention, chunk=9))
TEMPERED = replace(
    LLAMA, attention=replace(LLAMA.attention, query_temperature=QueryTemperatureConfig(0.3, 7))
)
ROUNDED = replace(ALIBI, attention=replace(ALIBI.attention, alibi=ALiBiConfig(rounded=True)))
T5 = replace(LLAMA, attention=replace(LLAMA.attention, rope=None, scale=1.0))
LATENT = Latent(32, 16)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _bias(layer: TransformerLayer) -> ph.Bias | None:
    """What its model adds to the scores."""
    if layer.config is not T5:
        return None
    table = torch.randn(32, 6, generator=torch.Generator().manual_seed(5))
    return ph.RelativeBias(table, bidirectional=False, max_distance=20).prepared()


def _step(layer: TransformerLayer, x: Tensor, cache: StoredCache) -> Tensor | None:
    found = decode_plan.step(layer, x, LayerArgs(ph.Causal(), _bias(layer), cache))
    assert found is None or found[1] == NETWORK
    return None if found is None else found[0]


def _by_modules(layer: TransformerLayer, x: Tensor, cache: StoredCache) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_layer, "step", lambda *arguments: None)
        return layer(x, mask=ph.Causal(), bias=_bias(layer), cache=cache)


def _alike(layer: TransformerLayer, cache: StoredCache, counts: list[int]) -> int:
    """Compares steps of so many tokens with the modules; how many of them were native."""
    other, taken = cache.fork(), 0
    dtype = layer.attention_norm.weight.dtype
    for seed, count in enumerate(counts):
        x = drawn_tokens(len(cache.lengths), count, seed, dtype)
        found = _step(layer, x, cache)
        taken += found is not None
        if found is None:
            found = layer(x, mask=ph.Causal(), cache=cache)
        assert torch.equal(found, _by_modules(layer, x, other)), seed
        assert cache.lengths == other.lengths
        assert cache.max_rollback == other.max_rollback
        held, wanted = cache.source(), other.source()
        for mine, theirs in zip(held.gather(), wanted.gather(), strict=True):
            if not getattr(held, "gaps", False):
                assert torch.equal(mine, theirs)
    return taken


CACHES: dict[str, tuple[LayerConfig, Callable[[], StoredCache]]] = {
    "pages": (LLAMA, lambda: ph.PagedCache(4)),
    "pages of latents": (DEEPSEEK, lambda: ph.LatentCache(32, 16, layout=Paged(4))),
    "pages, sinks": (SINKS, lambda: ph.PagedCache(4)),
    "codes": (LLAMA, lambda: ph.QuantizedCache(8, 4, group=8, recent=6, sink_tokens=3)),
    "codes in pages": (
        LLAMA, lambda: ph.QuantizedCache(4, 8, group=8, recent=6, layout=Paged(16))),
    "codes in a ring": (
        WINDOW, lambda: ph.QuantizedCache(8, 8, group=8, recent=6, layout=Ring(24, 3))),
    "codes of latents": (
        DEEPSEEK, lambda: ph.QuantizedCache(latent=LATENT, group=8, recent=6)),
    "a window in rows": (WINDOW, lambda: ph.DenseCache(capacity=64)),
    "a window in pages": (WINDOW, lambda: ph.PagedCache(4)),
    "chunks in rows": (CHUNKS, lambda: ph.DenseCache(capacity=64)),
    "chunks in pages": (CHUNKS, lambda: ph.PagedCache(4)),
    "temperatures in rows": (TEMPERED, lambda: ph.DenseCache(capacity=64)),
    "rounded ALiBi in pages": (ROUNDED, lambda: ph.PagedCache(4)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CACHES)
def test_every_kind_of_cache_is_read_and_written_in_place(name: str, dtype: torch.dtype) -> None:
    config, make = CACHES[name]
    layer = drawn_layer(config, dtype)
    for batch in (1, 2):
        cache = make()
        layer(drawn_tokens(batch, 21, 9, dtype), mask=ph.Causal(), cache=cache)
        # Every eighth token completes a group of codes, which a step leaves to the cache.
        assert _alike(layer, cache, [1] * 12) >= (10 if "codes" in name else 12)
        cache.rollback(1)
        assert _alike(layer, cache, [1, 1]) >= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    [
        "dense",
        "dense, ALiBi",
        "latents",
        "a ring",
        "a ring of chunks",
        *(n for n in CACHES if "latent" not in n),
    ],
)
def test_several_tokens_see_themselves_and_those_before(name: str, dtype: torch.dtype) -> None:
    made = {
        "dense": (LLAMA, lambda: ph.DenseCache(capacity=64)),
        "dense, ALiBi": (ALIBI, lambda: ph.DenseCache(capacity=64)),
        "latents": (DEEPSEEK, lambda: ph.LatentCache(32, 16, capacity=64)),
        "a ring": (WINDOW, lambda: ph.RingCache(9, spare=3)),
        "a ring of chunks": (CHUNKS, lambda: ph.RingCache(9, spare=3)),
    } | CACHES
    config, make = made[name]
    layer = drawn_layer(config, dtype)
    for batch, counts in ((1, [3, 8, 1, 2, 4]), (2, [4, 2, 1, 3])):
        cache = make()
        layer(drawn_tokens(batch, 21, 9, dtype), mask=ph.Causal(), cache=cache)
        taken = _alike(layer, cache, counts)
        assert taken >= 2 if "a ring" in name or "codes" in name else taken == len(counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name",
    ["dense", "dense, ALiBi", "dense, T5", "dense latents", "pages", "pages, sinks",
     "pages of latents", "a window in rows", "chunks in rows", "temperatures in rows",
     "rounded ALiBi in pages"],
)  # fmt: skip
def test_rows_of_different_lengths_step_together(name: str, dtype: torch.dtype) -> None:
    made = {
        "dense": (LLAMA, lambda: ph.DenseCache(capacity=64)),
        "dense, ALiBi": (ALIBI, lambda: ph.DenseCache(capacity=64)),
        "dense, T5": (T5, lambda: ph.DenseCache(capacity=64)),
        "dense latents": (DEEPSEEK, lambda: ph.LatentCache(32, 16, capacity=64)),
    } | CACHES
    config, make = made[name]
    layer = drawn_layer(config, dtype)
    cache = make()
    layer(drawn_tokens(3, 21, 9, dtype), mask=ph.Causal(), cache=cache)
    cache.rollback([0, 14, 5])
    for held in cache._contents.main.tensors:  # type: ignore[union-attr]  # what nobody sees
        held.flatten()[-32 * 2 :] = torch.nan
    assert _alike(layer, cache, [1, 2, 1]) == 3
    # What a row gets does not depend on those beside it.
    alone = cache.fork()
    alone.reorder([1])
    x = drawn_tokens(3, 1, 4, dtype)
    found = _step(layer, x, cache)
    assert found is not None
    assert torch.equal(found[1:2], _by_modules(layer, x[1:2], alone))


DIFFERING: dict[str, tuple[LayerConfig, Callable[[], StoredCache]]] = {
    "codes": (LLAMA, lambda: ph.QuantizedCache(8, 4, group=8, recent=6, sink_tokens=1)),
    "codes, a window in rows": (
        WINDOW, lambda: ph.QuantizedCache(4, 4, group=4, recent=5, sink_tokens=0)),
    "codes, sinks": (SINKS, lambda: ph.QuantizedCache(4, 8, group=8, recent=8, sink_tokens=0)),
    "codes, T5": (T5, lambda: ph.QuantizedCache(8, 8, group=8, recent=8, sink_tokens=1)),
    "codes in a ring": (
        WINDOW, lambda: ph.QuantizedCache(8, 4, group=4, recent=4, layout=Ring(12, 3))),
    "codes of latents": (
        DEEPSEEK, lambda: ph.QuantizedCache(latent=LATENT, group=8, recent=6, sink_tokens=1)),
    "codes in pages": (
        LLAMA, lambda: ph.QuantizedCache(4, 8, group=8, recent=6, sink_tokens=0, layout=Paged(16))),
    "a ring": (WINDOW, lambda: ph.RingCache(9, spare=3)),
    "a ring, sinks": (
        replace(SINKS, attention=replace(SINKS.attention, window=9)),
        lambda: ph.RingCache(9, spare=3)),
    "a ring, ALiBi": (
        replace(ALIBI, attention=replace(ALIBI.attention, window=9)),
        lambda: ph.RingCache(9, spare=3)),
    "a ring of chunks": (CHUNKS, lambda: ph.RingCache(9, spare=3)),
    "a ring of latents": (DEEPSEEK, lambda: ph.LatentCache(32, 16, layout=Ring(64, 3))),
}  # fmt: skip


def _of_lengths(layer: TransformerLayer, cache: StoredCache, lengths: list[int]) -> None:
    """Reads rows of so many tokens, behind padding; what memory held before must not matter."""
    longest, dtype = max(lengths), layer.attention_norm.weight.dtype
    places = torch.arange(longest) - (longest - torch.tensor(lengths)[:, None])
    x = drawn_tokens(len(lengths), longest, 9, dtype)
    layer(x, mask=ph.Causal(), cache=cache, positions=places)
    contents = cache._contents
    assert contents is not None
    exact = contents.memories.get("tail", contents.main)
    for row, length in enumerate(lengths):
        for held in exact.tensors:
            held[row, :, length:] = torch.nan


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DIFFERING)
def test_rows_that_differ_in_what_they_hold_step_together(name: str, dtype: torch.dtype) -> None:
    config, make = DIFFERING[name]
    layer, cache = drawn_layer(config, dtype), make()
    long = 78 if name == "a ring of latents" else 45
    _of_lengths(layer, cache, [1, long, 22])
    counts = [1] * 20
    taken = _alike(layer, cache, counts)
    cache.rollback([1, 0, 2])
    taken += _alike(layer, cache, [1, 2, 3, 1])
    cache.reorder([2, 0, 0, 1])
    other = cache.fork()
    taken += _alike(layer, cache, [1] * 9) + _alike(layer, other, [2, 1])
    # In pages, a step leaves it to the cache to encode a row's group.
    assert taken == 35 or ("pages" in name and taken >= 15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["codes", "a ring"])
def test_rows_of_one_length_may_differ_in_what_they_hold(name: str, dtype: torch.dtype) -> None:
    config, make = DIFFERING[name]
    layer, cache = drawn_layer(config, dtype), make()
    _of_lengths(layer, cache, [22, 18])
    assert _alike(layer, cache, [3]) == 1
    cache.rollback([4, 0])
    assert cache.lengths == [21, 21]
    assert not cache.even
    assert _alike(layer, cache, [1]) == 1
    assert not cache.even
    assert _alike(layer, cache, [3, 1]) == 2  # which makes them even
    assert cache.even


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [n for n in DIFFERING if n.startswith("a ring")])
def test_rows_of_a_ring_have_the_bits_that_each_has_alone(name: str, dtype: torch.dtype) -> None:
    config, make = DIFFERING[name]
    layer, cache = drawn_layer(config, dtype), make()
    lengths = [1, 78, 22, 13]
    with ph.batch_invariant():
        _of_lengths(layer, cache, lengths)
        alone = [cache.fork() for _ in lengths]
        for row, own in enumerate(alone):
            own.reorder([row])
        for seed, count in enumerate([1, 1, 4, 1, 2, 1]):
            x = drawn_tokens(4, count, seed, dtype)
            found = _step(layer, x, cache)
            assert found is not None
            for row, own in enumerate(alone):
                wanted = _by_modules(layer, x[row : row + 1], own)
                assert torch.equal(found[row : row + 1], wanted), (seed, row)
            if seed == 3:
                for each, back in zip((cache, *alone), ([2, 0, 3, 1], 2, 0, 3, 1), strict=True):
                    each.rollback(back)


def test_codes_of_rows_that_differ_are_no_step_where_each_must_have_its_own_bits() -> None:
    config, make = DIFFERING["codes"]
    layer, cache = drawn_layer(config), make()
    _of_lengths(layer, cache, [3, 21])
    x, plan = drawn_tokens(2, 1, 0), decode_plan.plan_for(cache, [layer])
    with ph.batch_invariant():
        assert _step(layer, x, cache) is None
    assert plan[0].why_cache == (
        "rows of its quantized cache differ in length, each with its bits alone"
    )
    assert _step(layer, x, cache) is not None
    assert plan.is_native


def test_groups_are_encoded_once_where_a_step_is_given_up() -> None:
    """A layer that changes after its cache was told of the tokens."""
    config, make = DIFFERING["codes"]
    layer, cache = drawn_layer(config), make()
    _of_lengths(layer, cache, [15, 21])
    other = cache.fork()
    for seed in range(10):
        x = drawn_tokens(2, 1, seed)
        contents = cache._contents
        assert contents is not None
        lengths, stops = cache.lengths, [*contents.memories["tail"].stops]
        with cache.in_use:
            assert cache.reserve_slots(None, 1) is not None
            cache.release_slots()
        assert (cache.lengths, contents.memories["tail"].stops) == (lengths, stops)
        assert torch.equal(_by_modules(layer, x, cache), _by_modules(layer, x, other))
        for name, memory in contents.memories.items():
            theirs = other._contents.memories[name]  # type: ignore[union-attr]
            assert (memory.stops, memory.firsts) == (theirs.stops, theirs.firsts)


def test_places_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, make = DIFFERING["codes"]
    layer, cache = drawn_layer(config), make()
    _of_lengths(layer, cache, [3, 21])
    x, whole = drawn_tokens(2, 1, 0), reserved._all_of

    def check(said: str, change: Callable[[list[tuple[Any, ...]]], object]) -> None:
        def held(*given: Any) -> list[tuple[Any, ...]]:
            segments: list[tuple[Any, ...]] = [*whole(*given)]
            change(segments)
            return segments

        monkeypatch.setattr(reserved, "_all_of", held)
        with pytest.raises(ValueError, match=said):
            _step(layer, x, cache)
        assert cache.lengths == [3, 21]

    def set_places(segments: list[tuple[Any, ...]], at: int, *places: object) -> None:
        segments[at] = (*segments[at][:6], *places)

    check("of every segment", lambda s: set_places(s, 0, None, None))
    check("leave room", lambda s: set_places(s, -1, s[-1][6] + 1, None))
    check(r"be \[B, n\] int64", lambda s: set_places(s, 0, s[-1][6], None))
    check("to a single segment", lambda s: [set_places(s, i, None, [0, 0]) for i in range(3)])
    check("fewer exact tokens", lambda s: s.pop())


def test_latents_are_absorbed_by_the_length_of_the_longest_row() -> None:
    small = LatentAttentionConfig(
        num_heads=5, kv_lora_rank=64, qk_nope_head_dim=1, qk_rope_head_dim=16, v_head_dim=2
    )
    assert small.absorbed_from == 3
    layer = drawn_layer(replace(LLAMA, attention=small))
    for lengths, native_steps in (([2, 1], 1), ([1, 0], 0)):
        cache = ph.LatentCache(64, 16, capacity=8)
        layer(drawn_tokens(2, 2, 0), mask=ph.Causal(), cache=cache)
        cache.rollback([2 - length for length in lengths])
        assert _alike(layer, cache, [1]) == native_steps


def test_queries_without_a_temperature_go_to_the_modules() -> None:
    """Temperatures of 4096 periods are computed ahead."""
    temperature = QueryTemperatureConfig(0.3, 1, 4087)
    layer = drawn_layer(replace(TEMPERED, attention=replace(TEMPERED.attention, rope=None,
                                                       query_temperature=temperature)))  # fmt: skip
    cache = ph.DenseCache(capacity=64)
    layer(drawn_tokens(1, 5, 0), mask=ph.Causal(), cache=cache)
    assert _alike(layer, cache, [1, 2, 1]) == 3
    assert _alike(layer, cache, [1, 1]) == 0
    cache.rollback(3)
    assert _alike(layer, cache, [3]) == 0
    cache.rollback(3)
    planned = decode_plan.plan_for(cache, [layer])[0]
    assert planned.known is not None
    planned.known = planned.known._replace(max_position=math.inf)
    with pytest.raises(ValueError, match="positions that have no temperature"):
        _step(layer, drawn_tokens(1, 4, 0), cache)
    assert cache.lengths == [8]


def test_more_tokens_than_an_expert_takes_go_to_the_modules() -> None:
    mixture = MixtureConfig(FeedForwardConfig(16), 4, 2, capacity=2)
    layer = drawn_layer(replace(LLAMA, feed_forward=mixture))
    cache = ph.DenseCache(capacity=64)
    layer(drawn_tokens(2, 5, 0), mask=ph.Causal(), cache=cache)
    assert _alike(layer, cache, [1, 2]) == 2
    assert _alike(layer, cache, [3]) == 0


def test_pages_that_are_shared_are_copied_before_a_step_writes() -> None:
    layer, cache = drawn_layer(LLAMA), ph.PagedCache(4)
    layer(drawn_tokens(1, 6, 0), mask=ph.Causal(), cache=cache)
    cache.reorder([0, 0])
    first = cache.fork()
    before = [x.clone() for x in first.source().gather()]
    assert _alike(layer, cache, [1, 1, 3]) == 3
    for mine, theirs in zip(first.source().gather(), before, strict=True):
        assert torch.equal(mine, theirs)


def test_what_a_step_cannot_write_is_taken_back() -> None:
    layer, cache = drawn_layer(LLAMA), ph.PagedCache(4)
    layer(drawn_tokens(1, 7, 0), mask=ph.Causal(), cache=cache)
    assert _step(layer, drawn_tokens(1, 1, 0), cache) is not None
    storage = layer.feed_forward.up_proj.weight.untyped_storage()
    storage.resize_(storage.nbytes() // 2)
    with pytest.raises(ValueError, match=r"storage of \w+ holds|was it resized"):
        layer(drawn_tokens(1, 1, 1), mask=ph.Causal(), cache=cache)
    storage.resize_(storage.nbytes() * 2)
    pages = cache._contents.main  # type: ignore[union-attr]  # a page taken in vain is given back
    assert len(pages.table[0]) == 1 + (cache.length - 1) // 4


@pytest.mark.parametrize("prompt", [1, 2, 3, 4])
def test_first_tokens_of_a_cache_with_codes_fill_the_exact_ones_first(prompt: int) -> None:
    layer = drawn_layer(LLAMA)
    cache = ph.QuantizedCache(group=8, recent=6, sink_tokens=3, capacity=64)
    _by_modules(layer, drawn_tokens(2, prompt, 9), cache)
    assert _alike(layer, cache, [1] * 16)
