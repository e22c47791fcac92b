"""Layers that take a step in one call: the bits of one call each, and of their modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyhead as ph
from polyhead import native
from polyhead.caches import ModelCache, StoredCache
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    RelativeBiasConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import SharedCacheError
from polyhead.layers import RoPE, decode_plan, transformer_layer
from polyhead.layers.fused_layers import FusedLayers
from polyhead.layers.native_layer import ATTENTION, CROSS_ATTENTION
from polyhead.models import Transformer, stack

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
E, W, S = 32, 40, 8
FULL = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig())
LLAMA = LayerConfig(FULL, FeedForwardConfig(40))
LOCAL = replace(LLAMA, attention=replace(FULL, window=6, rope=RopeConfig(theta=100.0)))
LATENT = replace(LLAMA, attention=LatentAttentionConfig(4, 16, 8, 8, 8))
MIXED = replace(LLAMA, feed_forward=MixtureConfig(FeedForwardConfig(24), 4, 2))
BY_MODULES = replace(LLAMA, feed_forward=FeedForwardConfig(40, "mish"), parallel="one norm")
CROSSING = replace(LLAMA, cross_attention=replace(FULL, rope=None))
STACKS = {
    "alike": ([LLAMA] * 3, [(3, 0)]),
    "of all kinds": (
        [LLAMA, LOCAL, BY_MODULES, LATENT, MIXED, replace(LLAMA, parallel="one norm"), BY_MODULES],
        [(2, 0), (3, 0)],
    ),
    "a network that runs as a module": (
        [LLAMA, replace(LLAMA, feed_forward=FeedForwardConfig(40, "mish")), LLAMA],
        [(1, ATTENTION), (1, 0)],
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _model(layers: list[LayerConfig], dtype: torch.dtype = torch.float32, **more) -> Transformer:
    torch.manual_seed(0)
    kind = more.pop("kind", "decoder")
    built = Transformer(TransformerConfig(kind, W, E, 256, tuple(layers), **more)).eval()
    for parameter in built.parameters():
        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return built.to(dtype)


def _ids(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, W, (batch, count), generator=torch.Generator().manual_seed(seed))


class _Ways:
    """The same steps of a model in three ways: runs of layers, layer by layer, module by module.

    Attributes:
        runs: Of the last step: whole layers and the last part of the next, run by run.
    """

    def __init__(
        self, model: Transformer, cache: ModelCache, batch: int = 1, **context: Tensor
    ) -> None:
        self.model, self.runs = model, list[tuple[int, int]]()
        model(_ids(batch, S), cache=cache, **context)
        self.caches = [cache, cache.fork(), cache.fork()]
        self.step(_ids(batch, 1))  # in which layers are described

    def step(self, ids: Tensor) -> Tensor:
        """The logits, of which no bit differs."""
        own, found = stack.steps, []
        self.runs = []

        def counted(*arguments: Any, **named: Any) -> tuple[Tensor, int, int]:
            made = own(*arguments, **named)
            self.runs.append(made[1:])
            return made

        def alone(parts: object, x: Tensor, *_: object, **__: object) -> tuple[Tensor, int, int]:
            return x, 0, 0

        for number, cache in enumerate(self.caches):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(stack, "steps", alone if number else counted)
                if number == 2:
                    patch.setattr(transformer_layer, "step", lambda *arguments: None)
                found.append(self.model(ids, cache=cache))
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        for caches in zip(*(cache.layers for cache in self.caches), strict=True):
            assert len({(*cache.lengths, cache.max_rollback) for cache in caches}) == 1
            if len({*caches[0].lengths}) == 1:
                held = [cache.source().gather() for cache in caches]
                assert all(torch.equal(a, b) for a, b in zip(held[0], held[1], strict=True))
                assert all(torch.equal(a, b) for a, b in zip(held[0], held[2], strict=True))
        return found[0]

    def rollback(self, count: int | list[int]) -> None:
        for cache in self.caches:
            cache.rollback(count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STACKS)
def test_runs_have_the_bits_of_layers_and_of_modules(name: str, dtype: torch.dtype) -> None:
    layers, runs = STACKS[name]
    model = _model(layers, dtype)
    for batch, counts in ((1, [1, 1, 3, 8, 1]), (2, [1, 4, 1])):
        ways = _Ways(model, model.new_cache(64, spare=7), batch)
        for seed, count in enumerate(counts):
            ways.step(_ids(batch, count, seed))
            assert ways.runs == runs, count
        ways.rollback(3)
        ways.step(_ids(batch, 1))


def test_a_run_has_the_same_bits_with_any_number_of_threads() -> None:
    """Layers large enough that threads share them; a run keeps its threads from layer to layer."""
    wide = replace(LLAMA, feed_forward=FeedForwardConfig(768))
    config = TransformerConfig("decoder", W, 256, 256, (wide,) * 3)
    torch.manual_seed(0)
    model = Transformer(config).eval()
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            cache = model.new_cache(64)
            model(_ids(1, S), cache=cache)
            steps = [model(_ids(1, count), cache=cache) for count in (1, 1, 1, 5, 1)]
            found.append(torch.cat(steps, 1))
    finally:
        torch.set_num_threads(before)
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_call_of_a_run_is_a_call_of_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    code, calls = native.code(), []
    assert code is not None
    model = _model([LLAMA, LOCAL, LLAMA])
    ways = _Ways(model, model.new_cache(64))
    own = code.step

    def counted(x: Tensor, guard: Any, layers: Any, *others: Any) -> tuple[Tensor, int]:
        calls.append(len(layers))
        return own(x, guard, layers, *others)

    monkeypatch.setattr(code, "step", counted)
    model(_ids(1, 1), cache=ways.caches[0])
    assert calls == [3]


def test_rows_of_different_lengths_run_together() -> None:
    model = _model([LLAMA, LLAMA, LATENT, LLAMA])
    ways = _Ways(model, model.new_cache(64, kind="dense"), 3)
    ways.rollback([0, 4, 2])
    for seed in range(3):
        ways.step(_ids(3, 1, seed))
        assert ways.runs == [(4, 0)]


def test_a_cache_that_must_do_more_than_write_ends_a_run() -> None:
    model = _model([LLAMA, LLAMA, LOCAL, LLAMA, LLAMA])
    kinds = [ph.DenseCache(90), ph.PagedCache(4), ph.RingCache(6),
             ph.QuantizedCache(8, 8, group=4, recent=6), ph.DenseCache()]  # fmt: skip
    ways, seen = _Ways(model, ModelCache(kinds)), []
    for _ in range(ways.caches[0].layers[4].capacity - S):
        ways.step(_ids(1, 1))
        seen.append(ways.runs)
    codes = ways.caches[0].layers[3]._contents.memories["codes"]
    assert codes.stops[0] > 2  # groups, which are encoded before a run
    assert seen.count([(4, 0)]) == 1  # the last cache makes room
    assert seen.count([(5, 0)]) == len(seen) - 1


def test_caches_that_differ_in_length_run_apart() -> None:
    model = _model([LLAMA] * 3)
    cache = model.new_cache(64)
    model(_ids(1, S), cache=cache)
    cache.layers[1].rollback(2)
    assert isinstance(cache.layers[2], StoredCache)
    before = [layer.fork() for layer in cache.layers]
    for _ in range(2):
        model(_ids(1, 1), cache=cache)
    assert [layer.length for layer in cache.layers] == [S + 2, S, S + 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_layer, "step", lambda *arguments: None)
        patch.setattr(stack, "steps", lambda parts, x, *_, **__: (x, 0, 0))
        other = ModelCache(before)
        for _ in range(2):
            model(_ids(1, 1), cache=other)
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        for a, b in zip(mine.source().gather(), theirs.source().gather(), strict=True):
            assert torch.equal(a, b)


def _doubled(module: nn.Module, arguments: object, out: Tensor) -> Tensor:
    return out * 2


WATCHED: dict[str, tuple[Callable[[Any], Any], list[tuple[int, int]]]] = {
    "a layer": (lambda layer: layer.register_forward_hook(_doubled), [(1, 0), (2, 0)]),
    "a layer's input": (
        lambda layer: layer.register_forward_pre_hook(lambda module, given: (given[0] * 2,)),
        [(1, 0), (2, 0)],
    ),
    "a network": (
        lambda layer: layer.feed_forward.register_forward_hook(_doubled), [(1, ATTENTION), (2, 0)]),
    "a projection": (
        lambda layer: layer.attention.q_proj.register_forward_hook(_doubled), [(1, 0), (2, 0)]),
    "attention": (
        lambda layer: layer.attention.register_attention_hook(lambda record: None),
        [(1, 0), (2, 0)],
    ),
    "heads": (
        lambda layer: layer.attention.register_head_edit(lambda out: out * 2), [(1, 0), (2, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", WATCHED)
def test_a_hook_inside_a_run_is_called_from_the_next_token_on(name: str) -> None:
    hook, runs = WATCHED[name]
    model = _model([LLAMA] * 4)
    ways = _Ways(model, model.new_cache(64))
    plain = ways.step(_ids(1, 1))
    assert ways.runs == [(4, 0)]
    ways.rollback(1)
    handle = hook(model.layers[1])
    for _ in range(3):
        seen = ways.step(_ids(1, 1))
        ways.rollback(1)
    assert ways.runs == runs
    assert torch.equal(seen, plain) is (name == "attention")
    handle.remove()
    for _ in range(2):
        assert torch.equal(ways.step(_ids(1, 1)), plain)
        ways.rollback(1)
    assert ways.runs == [(4, 0)]


def test_outputs_of_layers_are_observed() -> None:
    model = _model([LLAMA] * 3)
    ways = _Ways(model, model.new_cache(64))
    with model.observe() as seen:
        model(_ids(1, 1), cache=ways.caches[0])
    assert [out.layer for out in seen] == [0, 1, 2]


def _own_forward(layer: Any) -> None:
    layer.forward = lambda x, *context, own=layer.forward, **call: own(x, *context, **call) * 2


def _own_rotation(layer: Any) -> None:
    layer.attention.rope = RoPE.from_config(RopeConfig(theta=7.0))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "numbers": lambda layer: layer.attention.q_proj.weight.mul_(2.0),
    "data": lambda layer: setattr(
        layer.feed_forward.up_proj.weight, "data", torch.ones(40, E)),
    "a parameter": lambda layer: setattr(
        layer.attention_norm, "weight", nn.Parameter(torch.full((E,), 3.0))),
    "a module": lambda layer: setattr(layer.feed_forward, "down_proj", nn.Linear(40, E)),
    "a layer's forward": _own_forward,
    "a rotation": _own_rotation,
    "dropout": lambda layer: layer.train(),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_two_tokens_counts_at_once(name: str) -> None:
    model = _model([LLAMA, LLAMA, LOCAL, LLAMA])
    ways = _Ways(model, model.new_cache(64))
    before = ways.step(_ids(1, 1, 1))
    ways.rollback(1)
    CHANGES[name](model.layers[2])
    for _ in range(3):
        found = ways.step(_ids(1, 1, 1))
        ways.rollback(1)
    assert torch.equal(found, before) is (name == "dropout")


def test_an_expert_that_changed_is_called_in_the_middle_of_a_run() -> None:
    model = _model([LLAMA, MIXED, LLAMA])
    ways = _Ways(model, model.new_cache(64))
    for expert in model.layers[1].feed_forward.experts:
        expert.register_forward_hook(_doubled)
    ways.step(_ids(1, 1))
    assert ways.runs == [(1, ATTENTION), (1, 0)]


def test_layers_that_read_a_context_run_together() -> None:
    model = _model(
        [CROSSING] * 3,
        kind="encoder-decoder",
        encoder_layers=(LLAMA,),
        relative_bias=RelativeBiasConfig(num_buckets=8, max_distance=16),
    )
    ways = _Ways(model, model.new_cache(64), 2, encoder_ids=_ids(2, 5, 1))
    plain = ways.step(_ids(2, 1, 4))
    assert ways.runs == [(3, 0)]
    ways.rollback(1)
    with model.layers[1].feed_forward.register_forward_hook(_doubled):
        for _ in range(2):
            assert not torch.equal(ways.step(_ids(2, 1, 4)), plain)
            ways.rollback(1)
        assert ways.runs == [(1, CROSS_ATTENTION), (1, 0)]


def _parts(model: Transformer, cache: ModelCache) -> list[Any]:
    return [(layer, None, own, None) for layer, own in zip(model.layers, cache.layers, strict=True)]


def test_a_step_that_is_refused_has_written_nothing() -> None:
    model = _model([LLAMA] * 3)
    cache = _Ways(model, model.new_cache(64, kind="paged")).caches[0]
    x = torch.randn(1, 1, E)
    pages = [[*layer._contents.main.table[0]] for layer in cache.layers]
    before = [[part.clone() for part in layer.source().gather()] for layer in cache.layers]
    storage = cache.layers[1]._contents.main.tensors[0].untyped_storage()
    size = storage.nbytes()
    storage.resize_(8)
    with pytest.raises(ValueError, match="storage of segments holds 8 bytes"):
        stack.steps(_parts(model, cache), x, ph.Causal(), plan=model.decode_plan(cache))
    storage.resize_(size)
    assert [layer.length for layer in cache.layers] == [S + 1] * 3
    assert [[*layer._contents.main.table[0]] for layer in cache.layers] == pages
    for layer, kept in list(zip(cache.layers, before, strict=True))[::2]:
        for a, b in zip(layer.source().gather(), kept, strict=True):
            assert torch.equal(a, b)


def test_a_cache_in_use_elsewhere_ends_the_step_for_all_layers() -> None:
    model = _model([LLAMA] * 3)
    cache = _Ways(model, model.new_cache(64)).caches[0]
    refused = []

    def elsewhere() -> None:
        try:
            with torch.no_grad():
                plan = model.decode_plan(cache)
                stack.steps(_parts(model, cache), torch.randn(1, 1, E), ph.Causal(), plan=plan)
        except SharedCacheError as error:
            refused.append(error)

    def run() -> list[int]:
        thread = Thread(target=elsewhere)
        thread.start()
        thread.join()
        return [layer.length for layer in cache.layers]

    with cache.layers[2].in_use:
        assert run() == [S + 1] * 3
    assert len(refused) == 1
    assert run() == [S + 2] * 3  # nobody holds any of them


def test_without_memory_a_model_takes_the_token_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model([LLAMA, LOCAL, LLAMA])
    ways = _Ways(model, model.new_cache(64, spare=2))
    code = native.code()
    assert code is not None

    def fails(*arguments: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(code, "step", fails)
        with pytest.raises(MemoryError):
            model(_ids(1, 1), cache=ways.caches[0])
    assert [layer.length for layer in ways.caches[0].layers] == [S + 1] * 3
    ways.step(_ids(1, 1))


def test_native_code_goes_no_further_than_a_layer_that_it_ends_early() -> None:
    model = _model([replace(LLAMA, feed_forward=FeedForwardConfig(40, "mish"))] * 2)
    cache, code, x = model.new_cache(64), native.code(), torch.randn(1, 1, E)
    _Ways(model, cache)
    assert code is not None
    plan = decode_plan.DecodePlan(model.layers)
    classes = plan.classes(code)
    with FusedLayers(code, x, None, None, None) as run:
        for index, layer in enumerate(model.layers):
            known = plan[index].native_layer(code, layer, x, classes)
            assert known is not None
            assert run.try_add(plan[index], known, None, cache.layers[index], None)
        assert run.computed(classes.guard)[1] == ATTENTION
    assert [layer.length for layer in cache.layers] == [S + 2, S + 1]


def test_runs_that_cannot_be_are_refused() -> None:
    code = native.code()
    assert code is not None
    x, guard = torch.zeros(1, 1, E), code.guard(())
    with pytest.raises(ValueError, match="a list of one or more layers"):
        code.step(x, guard, [])
    with pytest.raises(TypeError, match="call must be a tuple of 6 fields"):
        code.step(x, guard, [(None,)])  # type: ignore[list-item]  # on purpose
    with pytest.raises(TypeError, match=r"what layer\(\) returned"):
        code.step(x, guard, [(None, None, [], None, None, None)])  # type: ignore[list-item]  # on purpose
