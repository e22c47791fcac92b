"""Blocks of keys that a native step chooses: the bits of the modules, and the formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from step_layers import E, drawn_layer, drawn_tokens
from torch import Tensor

import polyhead as ph
from polyhead import native
from polyhead.caches import LayerCache, Paged
from polyhead.config import (
    BlockBoundsConfig,
    BlockMeansConfig,
    FeedForwardConfig,
    LayerConfig,
    QKNormConfig,
    RopeConfig,
    SelectiveAttentionConfig,
)
from polyhead.layers import decode_plan, transformer_layer
from polyhead.layers.decode_plan import LayerArgs
from polyhead.layers.selectors import BlockBounds
from polyhead.layers.transformer_layer import TransformerLayer

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
BOUNDS = BlockBoundsConfig(size=4, top_k=3)
QUEST = LayerConfig(
    SelectiveAttentionConfig(6, 2, 32, rope=RopeConfig(), selector=BOUNDS),
    FeedForwardConfig(hidden_dim=80),
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYERS = {
    "quest": QUEST,
    "one block, the query's own": replace(
        QUEST, attention=replace(QUEST.attention, selector=replace(BOUNDS, size=5, top_k=1))
    ),
    "norms, a cap, sizes of no vector": replace(
        QUEST,
        attention=replace(
            QUEST.attention,
            head_dim=22,
            v_head_dim=13,
            softcap=3.0,
            qkv_bias=True,
            qk_norm=QKNormConfig(),
        ),
    ),
}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _prompted(layer: TransformerLayer, batch: int, count: int = 10, **options: Any) -> LayerCache:
    cache = LayerCache(layer.config.attention.memories, capacity=64, **options)
    dtype = next(layer.parameters()).dtype
    layer(drawn_tokens(batch, count, 7, dtype), mask=ph.Causal(), cache=cache)
    return cache


def _by_modules(layer: TransformerLayer, x: Tensor, cache: LayerCache) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_layer, "step", lambda *arguments: None)
        return layer(x, mask=ph.Causal(), cache=cache)


def _step(layer: TransformerLayer, x: Tensor, cache: LayerCache) -> Tensor | None:
    found = decode_plan.step(layer, x, LayerArgs(ph.Causal(), None, cache))
    return None if found is None else found[0]


def _same(cache: LayerCache, other: LayerCache) -> bool:
    mine, theirs = cache.state()[0], other.state()[0]
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


@pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_chooses_what_the_modules_choose(
    code: native.Code, name: str, dtype: torch.dtype
) -> None:
    with native.using(code):
        layer = drawn_layer(LAYERS[name], dtype)
        cache = _prompted(layer, 2)
        other = cache.fork()
        for seed in range(14):  # blocks are completed, and there are more than a query chooses
            x = drawn_tokens(2, 1, seed, dtype)
            found = _step(layer, x, cache)
            assert found is not None
            assert torch.equal(found, _by_modules(layer, x, other))
        assert cache.lengths == [24, 24]
        assert _same(cache, other)


def test_what_a_step_does_not_choose_changes_nothing() -> None:
    """Keys of a block that is not chosen do not reach the result; those of a chosen one do."""
    layer = drawn_layer(QUEST)
    cache, x = _prompted(layer, 1, 40), drawn_tokens(1, 1, 3)
    wanted = _step(layer, x, cache.fork())
    assert wanted is not None
    changed = []
    for block in range(10):
        other = cache.fork()
        contents = other._tokens["kv"]._contents
        assert contents is not None
        assert contents.exact is not None
        contents.exact.tensors[1][:, :, 4 * block : 4 * block + 4] += 1.0
        found = _step(layer, x, other)
        assert found is not None
        changed.append(not torch.equal(found, wanted))
    assert 2 <= sum(changed) <= 4  # 2 of 10 whole blocks for each of 2 kv heads, and the own one


def test_entries_follow_rollbacks_and_forks() -> None:
    layer = drawn_layer(QUEST)
    cache = _prompted(layer, 2, 14)
    for seed in range(9):
        assert _step(layer, drawn_tokens(2, 1, seed), cache) is not None
    fork = cache.fork()
    for each in (cache, fork):
        each.rollback(6)
    other = _prompted(layer, 2, 14)
    for seed in (0, 1, 2, 20, 21, 22, 23, 24):
        _by_modules(layer, drawn_tokens(2, 1, seed), other)
        if seed >= 20:
            assert _step(layer, drawn_tokens(2, 1, seed), cache) is not None
    assert _same(cache, other)
    assert fork.lengths == [17, 17]


@pytest.mark.parametrize(
    "case",
    [
        "several tokens", "rows of different lengths", "pages", "codes", "no tokens",
        "each head for itself", "block means", "a hook", "another class", "its step was replaced",
    ],
)  # fmt: skip
def test_modules_choose_where_a_step_does_not(case: str) -> None:
    selector = {
        "each head for itself": replace(BOUNDS, shared=False),
        "block means": BlockMeansConfig(size=4, top_k=3),
    }.get(case, BOUNDS)
    layer = drawn_layer(replace(QUEST, attention=replace(QUEST.attention, selector=selector)))
    options: dict[str, Any] = {
        "pages": {"layout": Paged(4)},
        "codes": {"quantized": ph.caches.Quantized()},
    }.get(case, {})
    cache = _prompted(layer, 2, **options)
    x = drawn_tokens(2, 3 if case == "several tokens" else 1, 1)
    if case == "rows of different lengths":
        cache.rollback([1, 0])
    if case == "no tokens":
        cache.reset()
    if case == "its step was replaced":
        cache.step = cache.step  # type: ignore[method-assign]  # as users do
    if case == "a hook":
        layer.attention.selector.register_forward_hook(lambda module, given, out: None)
    if case == "another class":

        class Other(BlockBounds):
            def scores(self, q: Tensor, entries: Tensor) -> Tensor:
                return -super().scores(q, entries)

        layer.attention.selector.__class__ = Other
    other = cache.fork()
    found = decode_plan.step(layer, x, LayerArgs(ph.Causal(), None, cache))
    assert found is None or found[1] == 0
    assert _same(cache, other)
    layer(x, mask=ph.Causal(), cache=cache)
    assert min(cache.lengths) > min(other.lengths, default=0)


def test_a_model_decodes_by_steps_that_choose() -> None:
    torch.manual_seed(0)
    quest = ph.Transformer(
        ph.config.TransformerConfig("decoder", 50, E, 64, (QUEST, QUEST, QUEST))
    ).eval()
    ids = torch.randint(0, 50, (2, 30))
    cache = quest.new_cache()
    steps = [quest(ids[:, :9], cache=cache)[:, -1:]]
    steps += [quest(ids[:, i : i + 1], cache=cache) for i in range(9, 30)]
    assert quest.decode_plan(cache).explain() == "layers 0 to 2: native"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyhead.models.stack.steps", lambda parts, x, *_, **__: (x, 0, 0))
        patch.setattr(transformer_layer, "step", lambda *arguments: None)
        other = quest.new_cache()
        wanted = [quest(ids[:, :9], cache=other)[:, -1:]]
        wanted += [quest(ids[:, i : i + 1], cache=other) for i in range(9, 30)]
    assert torch.equal(torch.cat(steps, 1), torch.cat(wanted, 1))


@pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_the_highest_bounds_are_chosen(code: native.Code, dtype: torch.dtype) -> None:
    B, H, G, T, D, n = 2, 6, 3, 4, 19, 23
    generator = torch.Generator().manual_seed(1)
    # Whole numbers, so that sums are exact and many are equal.
    q = torch.randint(-2, 3, (B, H, T, D), generator=generator).to(dtype)
    k = torch.randint(-2, 3, (B, G, n, 5, D), generator=generator)
    k[0, 1, 3:9] = k[0, 1, 2:3]
    entries = torch.cat((k.amax(3), k.amin(3)), -1).transpose(1, 2).flatten(2).to(dtype)
    entries[1, 4] = torch.nan
    entries[1, 5] = -torch.inf
    own = torch.tensor([[0, 9, 22, 40], [-1, 1, 6, 23]])
    for count in (1, 2, 7, 30):
        found = code.choose_blocks(q, entries, own, count, G)
        for b, g, t in torch.cartesian_prod(*map(torch.arange, (B, G, T))).tolist():
            scores = []
            for j in range(min(int(own[b, t]), n)):
                high, low = entries[b, j].view(G, 2, D)[g].double()
                heads = q[b, 2 * g : 2 * g + 2, t].double()
                scores.append(float(torch.maximum(heads * high, heads * low).sum()))
            scores = [-torch.inf if s != s else s for s in scores]
            best = sorted(range(len(scores)), key=lambda j: (-scores[j], j))[: count - 1]
            wanted = sorted(j for j in best if scores[j] > -torch.inf)
            wanted += [int(own[b, t])] if own[b, t] >= 0 else []
            assert found[b, g, t].tolist() == wanted + [-1] * (count - len(wanted))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"q": torch.zeros(1, 4, 8)}, "q must be"),
        ({"q": torch.zeros(1, 4, 1, 16)[..., ::2]}, "q must be"),
        ({"entries": torch.zeros(1, 3, 31)}, "entries must be"),
        ({"entries": torch.zeros(2, 3, 32)}, "entries must be"),
        ({"entries": torch.zeros(1, 3, 32, dtype=torch.float16)}, "entries must be"),
        ({"own": torch.zeros(1, 2, dtype=torch.int64)}, "own must be"),
        ({"own": torch.zeros(1, 1)}, "own must be"),
        ({"lists": 3}, "chosen must be"),
        ({"count": 0}, "chosen must be"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(changed: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "q": torch.zeros(1, 4, 1, 8),
        "entries": torch.zeros(1, 3, 32),
        "own": torch.zeros(1, 1, dtype=torch.int64),
        "count": 2,
        "lists": 2,
    }
    (code, *_) = native.all_codes()
    assert code.choose_blocks(**given).tolist() == [[[[0, -1]], [[0, -1]]]]
    with pytest.raises(ValueError, match=words):
        code.choose_blocks(**given | changed)
