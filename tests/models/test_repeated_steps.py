"""A step that is taken again is a new one to the bit, whatever happens to caches in between."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead import native
from polyhead.caches import ModelCache
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import SharedCacheError
from polyhead.layers import transformer_layer
from polyhead.models import Transformer, stack

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
E, W, S, COUNT, TOKENS = 32, 40, 8, 3, 12
HEADS = LayerConfig(
    AttentionConfig(4, 2, 16, rope=RopeConfig()), FeedForwardConfig(40), NormConfig("rmsnorm")
)
FAR = replace(HEADS, attention=AttentionConfig(4, 2, 16, rope=RopeConfig(1e6), window=5))
STILL = replace(HEADS, attention=AttentionConfig(4, 4, 16))
LATENT = replace(HEADS, attention=LatentAttentionConfig(4, 16, 8, 8, 8))
MIXED = replace(HEADS, feed_forward=MixtureConfig(FeedForwardConfig(24), 4, 2))


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _model(*layers: LayerConfig) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(TransformerConfig("decoder", W, E, 256, layers or (HEADS,) * COUNT)).eval()
    for parameter in model.parameters():
        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


def _ids(batch: int, count: int, seed: int) -> Tensor:
    return torch.randint(0, W, (batch, count), generator=torch.Generator().manual_seed(seed))


def _by_modules(model: nn.Module, ids: Tensor, cache: ModelCache) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_layer, "step", lambda *call: None)
        patch.setattr(stack, "steps", lambda parts, x, *_, **__: (x, 0, 0))
        found: Tensor = model(ids, cache=cache)
        return found


def _decoding(model: Transformer, batch: int = 1, capacity: int = 64) -> ModelCache:
    """A cache of which the next token takes the last one's step again."""
    cache = model.new_cache(capacity, kind="dense")
    model(_ids(batch, S, 0), cache=cache)
    for seed in (1, 2):
        model(_ids(batch, 1, seed), cache=cache)
    return cache


def _same(model: Transformer, cache: ModelCache, other: ModelCache, batch: int = 1) -> None:
    """Two more tokens have the bits of modules, and leave the same behind."""
    for seed in (3, 4):
        ids = _ids(batch, 1, seed)
        found, wanted = model(ids, cache=cache), _by_modules(model, ids, other)
        torch.testing.assert_close(found, wanted, atol=0, rtol=0)
    for mine, its in zip(cache.layers, other.layers, strict=True):
        assert (mine.lengths, mine.max_rollback) == (its.lengths, its.max_rollback)
        held = zip(mine.source().gather(), its.source().gather(), strict=True)
        for a, b in held:  # empty slots, where rows differ in length, hold anything
            for row, length in enumerate(mine.lengths):
                assert torch.equal(a[row, :, :length], b[row, :, :length])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often native code is called, by name."""
    code, found = native.code(), Counter[str]()

    def count(name: str) -> None:
        own = getattr(code, name)

        def counted(*call: Any) -> Any:
            y, done = own(*call)
            found[name] += done > 0
            return y, done

        monkeypatch.setattr(code, name, counted)

    count("step")
    count("again")
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "layers",
    [(HEADS,) * 3, (LATENT,) * 2, (MIXED, HEADS), (HEADS, FAR, STILL, FAR, LATENT)],
    ids=["heads", "latent", "experts", "several rotations"],
)
def test_tokens_after_the_first_take_its_step_again(
    layers: tuple[LayerConfig, ...], batch: int, dtype: torch.dtype, calls: Counter[str]
) -> None:
    model = _model(*layers).to(dtype)
    cache = model.new_cache(kind="dense")
    model(_ids(batch, 60, 0), cache=cache)
    other = cache.fork()
    capacities = []
    for seed in range(TOKENS):
        ids = _ids(batch, 1, seed)
        found = model(ids, cache=cache)
        assert torch.equal(found, _by_modules(model, ids, other))
        assert [layer.lengths for layer in cache.layers] == [[61 + seed] * batch] * len(layers)
        capacities.append(cache.capacity)
    # Where memory grows modules write, and another step is read.
    grown = sum(a != b for a, b in pairwise(capacities))
    assert grown >= 1
    assert calls == {"step": 1 + grown, "again": TOKENS - 1 - 2 * grown}


Change = Callable[[ModelCache], Any]
CHANGES: dict[str, Change] = {
    "nothing": lambda c: None,
    "all take a token back": lambda c: c.rollback(1),
    "a layer takes a token back": lambda c: c.layers[1].rollback(1),
    "rows take tokens back": lambda c: c.rollback([1, 0]),
    "a row of a layer takes a token back": lambda c: c.layers[0].rollback([0, 1]),
    "a layer takes a token back and gets another": lambda c: [
        c.layers[1].rollback(1),
        c.layers[1].append(torch.ones(2, 2, 1, 16), torch.ones(2, 2, 1, 16)),
    ],
    "a layer gets a token": lambda c: c.layers[1].append(
        torch.ones(2, 2, 1, 16), torch.ones(2, 2, 1, 16)
    ),
    "a layer gets no token": lambda c: c.layers[1].append(
        torch.ones(2, 2, 0, 16), torch.ones(2, 2, 0, 16)
    ),
    "all lose everything": lambda c: c.reset(),
    "a layer loses everything": lambda c: c.layers[2].reset(),
    "rows trade places": lambda c: c.reorder([1, 0]),
    "a layer's rows trade places": lambda c: c.layers[1].reorder([1, 0]),
    "layers trade places": lambda c: setattr(c, "layers", c.layers[::-1]),
    "a layer becomes its copy": lambda c: setattr(
        c, "layers", (c.layers[0], c.layers[1].fork(), c.layers[2])
    ),
    "a layer becomes another's copy": lambda c: setattr(
        c, "layers", (c.layers[0], c.layers[1], c.layers[0].fork())
    ),
    "a layer reads what was saved": lambda c: c.layers[1].restore(
        *(part for part in c.layers[0].state()), torch.device("cpu")
    ),
    "a layer's memory moves": lambda c: c.layers[1]._contents.main.tensors.__setitem__(
        0, c.layers[1]._contents.main.tensors[0].clone() * 2
    ),
    "a layer's keys change": lambda c: c.layers[1]._contents.main.tensors[0].mul_(2),
    "a layer's keys are set": lambda c: c.layers[1]._contents.main.tensors[0].set_(
        c.layers[0]._contents.main.tensors[0].clone()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_cache_counts_at_once(name: str, calls: Counter[str]) -> None:
    model = _model()
    first = _decoding(model, 2)
    _same(model, first, first.fork(), 2)  # imports of a first use change classes, which is noticed
    cache = _decoding(model, 2)
    other = cache.fork()
    for each in (cache, other):
        CHANGES[name](each)
    calls.clear()
    _same(model, cache, other, 2)
    if name in ("nothing", "a layer's keys change"):
        assert calls == {"again": 2}


def test_rows_that_are_left_out_or_doubled_count_at_once() -> None:
    model = _model()
    for rows in ([1], [1, 0, 1]):
        cache = _decoding(model, 2)
        other = cache.fork()
        for each in (cache, other):
            each.reorder(rows)
        _same(model, cache, other, len(rows))


def test_copies_of_a_cache_count_for_themselves() -> None:
    model = _model()
    cache = _decoding(model)
    copies = [copy.deepcopy(cache), cache.fork(), cache.fork()]
    _same(model, cache, copies[0])
    for each in copies[1:]:
        assert [layer.length for layer in each.layers] == [S + 2] * COUNT
    _same(model, copies[1], copies[2])
    assert [layer.length for layer in cache.layers] == [S + 4] * COUNT


def test_several_tokens_between_single_ones() -> None:
    model = _model()
    cache = _decoding(model)
    other = cache.fork()
    assert torch.equal(model(_ids(1, 3, 5), cache=cache), _by_modules(model, _ids(1, 3, 5), other))
    _same(model, cache, other)


def test_a_method_that_is_replaced_on_a_cache_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    cache = _decoding(model)
    layer, seen = cache.layers[1], []
    own = layer.append
    layer.append = lambda k, v, *more: [seen.append(k.shape), own(k, v, *more)][1]  # type: ignore[method-assign]
    model(_ids(1, 1, 3), cache=cache)
    assert seen == [(1, 2, 1, 16)]
    assert [each.length for each in cache.layers] == [S + 3] * COUNT


def test_an_expert_that_is_replaced_counts_at_once() -> None:
    for number in range(4):
        model = _model(HEADS, MIXED, HEADS)
        cache = _decoding(model)
        other = cache.fork()
        expert = model.layers[1].feed_forward.experts[number]
        expert.down_proj.weight = nn.Parameter(torch.randn_like(expert.down_proj.weight))
        _same(model, cache, other)


def test_another_thread_that_uses_a_layer_is_refused() -> None:
    model = _model()
    cache = _decoding(model)
    refused: list[SharedCacheError] = []

    @torch.no_grad()
    def elsewhere() -> None:
        try:
            model(_ids(1, 1, 3), cache=cache)
        except SharedCacheError as error:
            refused.append(error)

    for held, length in ((True, S + 2), (False, S + 3)):
        thread = Thread(target=elsewhere)
        if held:
            with cache.layers[2].in_use:
                thread.start()
                thread.join()
        else:
            thread.start()
            thread.join()
        assert [layer.length for layer in cache.layers] == [length] * COUNT
        assert len(refused) == 1
    for layer in cache.layers:
        assert layer.in_use._lock.acquire(blocking=False)  # nobody holds it
        layer.in_use._lock.release()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_step_that_fails_counts_no_token(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model()
    cache = _decoding(model)
    other = cache.fork()

    def fails(*call: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(native.code(), "again", fails)
        with pytest.raises(error):
            model(_ids(1, 1, 3), cache=cache)
    assert [layer.length for layer in cache.layers] == [S + 2] * COUNT
    _same(model, cache, other)


def test_memory_is_freed_when_a_cache_grows_or_goes() -> None:
    model = _model()
    cache = _decoding(model, capacity=S + 3)
    model(_ids(1, 1, 3), cache=cache)

    def storages(cache: ModelCache) -> list[weakref.ref[Any]]:
        memories = [layer._contents.main for layer in cache.layers]  # type: ignore[attr-defined]
        return [weakref.ref(x.untyped_storage()) for each in memories for x in each.tensors]

    gc.collect()
    gc.disable()
    try:
        old, capacity = storages(cache), cache.capacity
        while cache.capacity == capacity:
            model(_ids(1, 1, 3), cache=cache)
        assert all(each() is None for each in old)
        for _ in range(3):
            model(_ids(1, 1, 3), cache=cache)
        plan, old = model.decode_plan(cache), storages(cache)
        del cache
        assert all(each() is None for each in old)
        assert plan.explain() == "layers 0 to 2: native"
    finally:
        gc.enable()


def test_native_code_repeats_only_what_it_has_read() -> None:
    code = native.code()
    assert code is not None
    x, guard = torch.zeros(1, 1, E), code.guard(())
    assert code.again(x, guard, code.run(), 0, ())[1] == 0  # nothing
    with pytest.raises(TypeError, match=r"what run\(\) returned"):
        code.again(x, guard, guard, 0, ())  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError, match=r"what run\(\) returned"):
        code.step(x, guard, [], 0, guard)  # type: ignore[arg-type]  # on purpose

    model = _model()
    cache = _decoding(model)
    repeated = model.decode_plan(cache)._repeated
    assert repeated is not None
    (rotation,) = (rope.tables_at(x, S + 2, 1, dim) for rope, _, dim in repeated._rotations)
    size = cache.capacity

    def parts(x: Tensor = x, start: int = S + 2, rotations: Any = (rotation,)) -> int:
        return code.again(x, guard, repeated.run, start, rotations)[1]

    whole = 3 * COUNT
    assert parts() == whole
    assert parts(start=size - 1) == whole
    for refused in (
        {"start": -1},
        {"start": size},
        {"start": 1 << 62},
        {"x": torch.zeros(2, 1, E)},
        {"x": torch.zeros(1, 2, E)},
        {"x": torch.zeros(1, 1, E, dtype=torch.bfloat16)},
        {"x": torch.zeros(1, E)},
        {"rotations": ()},
        {"rotations": (rotation, rotation)},
        {"rotations": [rotation]},
        {"rotations": (None,)},
        {"rotations": ((rotation[0][..., :8], rotation[1]),)},
    ):
        assert parts(**refused) == 0, refused  # type: ignore[arg-type]
        assert parts() == whole
    memory = cache.layers[1]._contents.main  # type: ignore[attr-defined]
    memory.tensors[1].untyped_storage().resize_(64)
    assert parts() == 0
