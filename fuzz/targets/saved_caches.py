"""Saved caches whose header or tensors lie: read back as they were, or refused by a sentence."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from polyhead.caches import Dense, Latent, ModelCache, Paged, Plain, Quantized, Ring, StoredCache

KINDS = (
    (Dense(), Plain()),
    (Ring(6, 2), Plain()),
    (Paged(4), Plain()),
    (Dense(), Latent(6, 2)),
    (Dense(), Quantized(8, 4, group=4, sinks=2, recent=4)),
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
    cache = StoredCache(layout, storage)
    k = torch.randn(2, 1 if latent else 2, random.randint(1, 17), 8)
    positions = torch.arange(k.shape[2]) + 3 if random.random() < 0.3 else None
    cache.append(k, k[..., :6] if latent else k, positions)
    # Alone, or with the encoder's output, which a model's caches keep beside them.
    whole = ModelCache([cache]) if random.random() < 0.3 else None
    if whole is not None and random.random() < 0.8:
        whole.context = torch.randn(2, 3, 8)
    (whole or cache).save(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["polyhead.cache"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for _ in range(random.randint(1, 3)):
        if random.random() < 0.7:
            _lie(random, header)
        else:
            cut(random, tensors)
    save_file(tensors, path, {"polyhead.cache": json.dumps(header)})
    loaded = StoredCache(layout, storage)
    if whole is None:
        loaded.load(path)
    else:
        again = ModelCache([loaded])
        again.load(path)
        if again.context is not None and loaded.lengths:
            assert again.context.ndim == 3
            again.fork().reorder([0])
    if not loaded.lengths:
        return
    source = loaded.source()
    source.gather()
    more = torch.randn(len(loaded.lengths), *k.shape[1:])
    if len(set(loaded.lengths)) == 1 and positions is None:
        loaded.append(more, more[..., :6] if latent else more)
    loaded.fork().reset()


def _lie(random: Random, header: dict[str, Any]) -> None:
    """Another value, or none, somewhere in the header."""
    at: Any = header
    inside = header.get("caches")
    if random.random() < 0.9 and isinstance(inside, list) and inside and inside[0]:
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
