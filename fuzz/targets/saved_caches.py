"""Saved caches whose header or tensors lie: read back as they were, or refused by a sentence."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import polyhead as ph
from fuzz.mutation import MOST_TEXT
from polyhead.caches import (
    H2O,
    Dense,
    Evicting,
    EvictingCache,
    KeyValueCache,
    Latent,
    Layout,
    ModelCache,
    Paged,
    Plain,
    Quantized,
    Ring,
    SnapKV,
    Storage,
    StoredCache,
)
from polyhead.semantics import KeyValueSource, Specification, Tokens

KINDS = (
    (Dense(), Plain()),
    (Ring(6, 2), Plain()),
    (Paged(4), Plain()),
    (Dense(), Latent(6, 2)),
    (Dense(), Quantized(8, 4, group=4, sink_tokens=2, recent=4)),
    (H2O(6), Plain()),
    (SnapKV(6, window=2, kernel=3), Plain()),
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2,
    5,
    1 << 20,
    1 << 40,
    1 << 62,
    10**30,
    1.5,
    "",
    "float32",
    [],
    {},
)


path = Path()


def prepare() -> None:
    global path
    path = Path(tempfile.mkdtemp()) / "cache"


@torch.no_grad()
def case(random: Random) -> None:
    layout, storage = random.choice(KINDS)
    latent = isinstance(storage, Latent)
    cache = _new(layout, storage)
    k = torch.randn(2, 1 if latent else 2, random.randint(1, 17), 8)
    apart = random.random() < 0.3 and not isinstance(layout, Evicting)
    positions = torch.arange(k.shape[2]) + 3 if apart else None
    _append(cache, k, k[..., :6] if latent else k, positions)
    # Alone, or with the encoder's output, which a model's caches keep beside them.
    whole = ModelCache([cache]) if random.random() < 0.3 else None
    if whole is not None and random.random() < 0.8:
        whole.context = torch.randn(2, 3, 8)
    (whole or cache).save(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["polyhead.cache"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # the file itself cannot be iterated
    kind = random.random()
    for _ in range(0 if kind < 0.1 else random.choice((1, 1, 2, 3))):
        damage(random, header, tensors, _lie, in_tensors=kind < 0.4)
    text = json.dumps(header)
    if len(text) > MOST_TEXT:  # lies within lies
        return
    save_file(tensors, path, {"polyhead.cache": text})
    loaded = _new(layout, storage)
    again = None if whole is None else ModelCache([loaded])
    (again or loaded).load(path)
    if again is not None and again.context is not None and loaded.lengths:
        assert again.context.ndim == 3
        again.fork().reorder([0])
    if not loaded.lengths:
        return
    if kind < 0.1:
        wanted = cache.source().gather()
        assert all(map(torch.equal, loaded.source().gather(), wanted))
    _use(loaded, k[:, :, :1], latent, explicit=positions is not None)


def _new(layout: Layout, storage: Storage) -> StoredCache:
    if isinstance(layout, Evicting):
        return EvictingCache(layout)
    return StoredCache(layout, storage)


def _append(
    cache: KeyValueCache, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor | None = None
) -> KeyValueSource:
    """As ``append``, and shows a cache that evicts as many queries, as layers do."""
    source = cache.append(k, v, positions)
    if source.observer is not None:
        q, T = torch.ones(len(k), 2, k.shape[2], 8), k.shape[2]
        _, lse = ph.attention(q, source, mask=ph.Causal(), return_lse=True)
        tokens = Tokens.of(T, shift=cache.length)
        source.observer(q, lse, Specification(1.0, ph.Causal()), tokens)
    return source


def damage(
    random: Random,
    header: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    lie: Callable[[Random, dict[str, Any]], None],
    *,
    in_tensors: bool,
) -> None:
    """Other numbers in a tensor; or a lie in the header, or a tensor cut."""
    if in_tensors:
        overwrite(random, tensors)
    elif random.random() < 0.7:
        lie(random, header)
    else:
        cut(random, tensors)


def _use(cache: StoredCache, k: torch.Tensor, latent: bool, explicit: bool) -> None:
    """What is done with a cache that was loaded: read, written, taken back, forked, saved."""
    cache.source().gather()
    batch = len(cache.lengths)
    more = k[:1].expand(batch, -1, -1, -1)
    if len(set(cache.lengths)) == 1:
        last = torch.tensor([cache.length + 3]) if explicit else None
        source = _append(cache, more, more[..., :6] if latent else more, last)
        q = torch.ones(batch, 2, 1, 8)
        out = ph.attention(q, source, mask=ph.Causal() & ph.Window(5), q_positions=last)
        assert out.shape[:3] == (batch, 2, 1)
        cache.rollback(min(1, cache.max_rollback))
    other = cache.fork()
    other.reorder([batch - 1, 0])
    other.save(path)
    other.reset()


def _lie(random: Random, header: dict[str, Any]) -> None:
    """Another value, or none, somewhere in the header."""
    at: Any = header
    inside = header.get("caches")
    if random.random() < 0.95 and isinstance(inside, list) and inside and inside[0]:
        at = inside[0] if isinstance(inside[0], dict) else header
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        if not keys:
            return
        key = random.choice(list(keys))
        if isinstance(at[key], dict | list) and at[key] and random.random() < 0.8:
            at = at[key]
            continue
        if random.random() < 0.2:
            del at[key]
        elif isinstance(at[key], int) and random.random() < 0.5:
            at[key] += random.choice((-1, 1, 7))
        else:
            at[key] = random.choice(VALUES)
        return


def overwrite(random: Random, tensors: dict[str, torch.Tensor]) -> None:
    """Other bytes in a tensor: NaN, infinities, positions and scales that cannot be."""
    if held := [tensor for tensor in tensors.values() if tensor.numel()]:
        data = random.choice(held).view(-1).view(torch.uint8)
        for _ in range(random.choice((1, 1, 8, 100))):
            at, size = random.randrange(len(data)), random.choice((1, 1, 4, 8))
            data[at : at + size] = random.choice((0, 0x7F, 0x80, 0xFF, random.randrange(256)))


def cut(random: Random, tensors: dict[str, torch.Tensor]) -> None:
    """A tensor that is missing, shorter, of another dtype, or one too many."""
    if not tensors:
        return
    name = random.choice(sorted(tensors))
    tensor = tensors[name]
    how = random.randrange(4)
    if how == 0:
        del tensors[name]
    elif how == 1 and tensor.ndim and tensor.shape[random.randrange(tensor.ndim)]:
        axis = random.randrange(tensor.ndim)
        tensors[name] = tensor.narrow(axis, 0, max(0, tensor.shape[axis] - 1)).contiguous()
    elif how == 2:
        tensors[name] = tensor.to(random.choice((torch.float64, torch.int32, torch.bool)))
    else:
        tensors[random.choice(("0.more", "1.k", "context", ""))] = tensor.clone()
