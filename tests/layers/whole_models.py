"""What holds for a model of any layout whose layers remember more than keys and values."""

from __future__ import annotations

from pathlib import Path

import torch

import polyhead as ph
from polyhead.caches import ModelCache
from polyhead.models.transformer import Transformer


def check_decoding(model: Transformer, kind: str, path: Path) -> ModelCache:
    """A model decodes as in one pass, holds what is planned, and goes on from a saved cache.

    Args:
        model: A decoder with a vocabulary of 50.
        kind: Of its cache: "auto" or "paged".
        path: A folder to save the cache in.

    Returns:
        The cache.
    """
    ids = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(0))
    whole, cache = model(ids), model.new_cache(kind=kind, capacity=40)
    parts = [model(part, cache=cache) for part in ids.split([30, 1, 1, 8], dim=1)]
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
