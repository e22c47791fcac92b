"""What holds for a layer, and a model, of any layout that remembers more than keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import polyhead as ph
from polyhead.caches import LayerCache, ModelCache
from polyhead.models.transformer import Transformer


def check_decoding(model: Transformer, kind: str, path: Path) -> ModelCache:
    """A model decodes as in one pass, holds what is planned, and goes on from a saved cache.

    Args:
        model: A decoder, or an encoder and one, with a vocabulary of 50.
        kind: Of its cache: "auto" or "paged".
        path: A folder to save the cache in.

    Returns:
        The cache.
    """
    ids = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(0))
    source = {"encoder_ids": ids.flip(0)} if model.config.kind == "encoder-decoder" else {}
    whole, cache = model(ids, **source), model.new_cache(kind=kind, capacity=40)
    first, *more = ids.split([30, 1, 1, 8], dim=1)
    parts = [model(first, cache=cache, **source), *(model(part, cache=cache) for part in more)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
    plan = ph.plan(
        model.config, tokens=40, batch_size=2, dtype="float32",
        page_size=None if kind == "auto" else 16,
    )  # fmt: skip
    assert cache.bytes == plan.cache_bytes
    assert plan.parameters.total == sum(p.numel() for p in model.parameters())
    cache.save(path / "cache.safetensors")
    other = model.new_cache(kind=kind)
    other.load(path / "cache.safetensors")
    for each in (cache, other):
        each.rollback(1)
        again = model(ids[:, -1:], cache=each)
        torch.testing.assert_close(again, whole[:, -1:], atol=1e-5, rtol=1e-5)
    return cache


def check_fork(layer: Any, x: Tensor, cache: LayerCache, **close: float) -> None:
    """Rows of a fork, rolled back and reordered, go on as each alone does, and so does the cache.

    Args:
        layer: Of any causal layout.
        x: ``[3, 31, E]``, what the cache has read.
        cache: It.
        close: Tolerances.
    """
    mask = ph.Causal()
    fork = cache.fork()
    fork.rollback([2, 7, 0])  # rows now differ in what they hold
    fork.reorder([1, 0, 0, 2])
    rows = [x[1, :24], x[0, :29], x[0, :29], x[2]]
    for seed, count in ((5, 3), (6, 1), (7, 6)):
        more = _drawn((4, count, x.shape[2]), seed).to(x.dtype)
        found = layer(more, mask=mask, cache=fork)
        rows = [torch.cat((row, new)) for row, new in zip(rows, more, strict=True)]
        for i, row in enumerate(rows):
            alone = layer(row[None], mask=mask)[:, -count:]
            torch.testing.assert_close(found[i : i + 1], alone, **close)
    again = layer(x[:, :1], mask=mask, cache=cache)  # the fork left it alone
    alone = layer(torch.cat((x, x[:, :1]), dim=1), mask=mask)[:, -1:]
    torch.testing.assert_close(again, alone, **close)


def check_padded_rows(layer: Any, cached: bool) -> None:
    """A row behind padding, of NaN, has the results that it has alone, in float64.

    Args:
        layer: Of any causal layout.
        cached: Whether with a cache, and tokens after it; else with ``KeyLengths`` too.
    """
    mask, x = ph.Causal(), _drawn((2, 26, layer.embed_dim), 1)
    positions = torch.arange(26).expand(2, 26).clone()
    positions[0] = torch.where(positions[0] < 5, -1, positions[0] - 5)
    cache = LayerCache(layer.config.memories) if cached else None
    x[0, :5] = torch.nan
    found = layer(x, mask=mask, positions=positions, cache=cache)
    torch.testing.assert_close(found[:1, 5:], layer(x[:1, 5:], mask=mask))
    torch.testing.assert_close(found[1:], layer(x[1:], mask=mask))
    if cache is None:
        x[1, 20:] = torch.nan
        known = layer(x[1:], mask=mask & ph.KeyLengths(torch.tensor([20])))
        torch.testing.assert_close(known[:, :20], found[1:, :20])
        return
    assert cache.lengths == [21, 26]
    for seed in range(7):  # past the ends of blocks, which differ by row
        more = _drawn((2, 1, layer.embed_dim), 9 + seed)
        x = torch.cat((x, more), dim=1)
        last = layer(more, mask=mask, cache=cache)
        torch.testing.assert_close(last[:1], layer(x[:1, 5:], mask=mask)[:, -1:])
        torch.testing.assert_close(last[1:], layer(x[1:], mask=mask)[:, -1:])


def _drawn(shape: tuple[int, int, int], seed: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu"
    )
