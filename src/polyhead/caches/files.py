"""Caches in and out of safetensors files, checked against what they should be.

The header says what each cache was made as (layout, storage, shape) and, for a model's caches,
which configuration they belong to. A file is written beside its place and moved there when it is
whole. Nothing of a cache changes before everything in the file has been checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from polyhead._utils.atomic_write import write_tensors
from polyhead._utils.checks import shown
from polyhead._utils.paths import kind_of, size_of
from polyhead.config import TransformerConfig
from polyhead.errors import CheckpointError

_KEY = "polyhead.cache"
_VERSION = 2


class Saved(Protocol):
    """What saving and loading need from a cache; see ``KeyValueCache``."""

    def description(self) -> dict[str, Any]: ...
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...
    def fork(self) -> Self: ...
    def restore(
        self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], device: torch.device
    ) -> None: ...


def write(
    path: str | PathLike[str],
    owner: str,
    caches: Sequence[Saved],
    extra: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes caches to one file, whole or not at all.

    Args:
        path: Path of the file; one that is there is replaced.
        owner: What they belong to, a model's configuration as JSON; ``""`` for a cache alone.
        caches: Caches of the layers, in order.
        extra: Other tensors to store, by name.
    """
    tensors: dict[str, Tensor] = dict(extra or {})
    all_facts = []
    for i, cache in enumerate(caches):
        held, facts = cache.state()
        tensors |= {f"{i}.{name}": tensor for name, tensor in held.items()}
        all_facts.append(facts)
    header = json.dumps({"version": _VERSION, "owner": owner, "caches": all_facts})
    write_tensors(path, tensors, {_KEY: header})


def read(
    path: str | PathLike[str],
    owner: str,
    caches: Sequence[Saved],
    device: torch.device,
    extra: Sequence[str] = (),
) -> dict[str, Tensor]:
    """Fills caches from a file that ``write`` made of caches like them; returns the extra tensors.

    Args:
        path: Path of the file.
        owner: As ``write`` got it.
        caches: In order; they stay as they were where anything is wrong.
        device: Where the tensors go.
        extra: Names that extra tensors may have; each is ``[B, S, E]`` with the caches' B.

    Raises:
        CheckpointError: Not such a file, or of other caches; names the difference.
    """
    header, tensors = _opened(Path(path), device)
    _check_owner(path, header["owner"], owner)
    if len(header["caches"]) != len(caches):
        raise CheckpointError(
            f"{path}: holds {len(header['caches'])} caches, one per layer: expected {len(caches)}"
        )
    parts = []
    for i, (facts, cache) in enumerate(zip(header["caches"], caches, strict=True)):
        _check_description(f"{path}: cache {i}", facts, cache.description())
        prefix = f"{i}."
        parts.append(
            {
                name.removeprefix(prefix): tensors.pop(name)
                for name in [*tensors]
                if name.startswith(prefix)
            }
        )
    # Into copies first: a tensor that does not fit must not leave half the layers changed.
    filled = [cache.fork() for cache in caches]
    try:
        for fork, part, facts in zip(filled, parts, header["caches"], strict=True):
            fork.restore(part, facts, device)
        batch = _check_together(filled)
        _check_extra(tensors, extra, batch, owner)
    except KeyError as error:
        raise CheckpointError(f"{path}: its header has no {error}") from error
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: its tensors do not fit its header: {error}") from error
    for cache, fork in zip(caches, filled, strict=True):
        cache.__dict__.update(fork.__dict__)
    return tensors


def _opened(path: Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if kind_of(path) is None:
        raise CheckpointError(f"{path}: no such file")
    size_of(path)
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            text = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from error
    try:
        header = json.loads(text or "")
        version = header["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a file of caches: it has no {_KEY} header") from error
    if version != _VERSION:
        raise CheckpointError(f"{path}: version must be {_VERSION}: got {shown(version)}")
    caches = header.get("caches")
    if not isinstance(header.get("owner"), str) or not isinstance(caches, list):
        raise CheckpointError(f"{path}: its header must have an owner and a list of caches")
    if not all(isinstance(facts, dict) for facts in caches):
        raise CheckpointError(f"{path}: its header must say of every cache what it is")
    return header, tensors


def _check_together(caches: Sequence[Saved]) -> int | None:
    """The batch of the caches, None while all are empty; raises ValueError where they differ."""
    batches = {facts["batch"] for cache in caches if "batch" in (facts := cache.description())}
    if len(batches) > 1:
        raise ValueError(f"its caches must have one batch: got {sorted(batches)}")
    return batches.pop() if batches else None


def _check_extra(
    tensors: Mapping[str, Tensor], names: Sequence[str], batch: int | None, owner: str
) -> None:
    """Raises ValueError unless the extra tensors are encoder states ``[B, S, E]`` of the owner."""
    if not tensors:
        return
    try:
        config = TransformerConfig.from_json(owner)
    except (ValueError, TypeError):  # caches made without a model
        config = None
    if config is not None and not config.encoder_layers:
        names = ()
    for name, tensor in tensors.items():
        if name not in names:
            raise ValueError(f"no tensor may be called {shown(name)}")
        wanted: list[Any] = [batch, "S", None]
        if config is not None:
            wanted[2] = config.encoder.embed_dim or config.embed_dim
        have = [*tensor.shape]
        if len(have) != 3 or any(
            isinstance(want, int) and size != want for size, want in zip(have, wanted, strict=True)
        ):
            shape = ", ".join("any" if want is None else str(want) for want in wanted)
            raise ValueError(f"{name} must be [{shape}]: got {have}")
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise ValueError(f"{name} must be floating point: got {tensor.dtype}")


def _check_owner(path: str | PathLike[str], got: str, want: str) -> None:
    if want in (got, _read_again(got)):
        return
    if not got or not want:
        have = "a model's caches" if got else "a cache without a model"
        raise CheckpointError(f"{path}: holds {have}: expected {'one' if got else 'a model'}")
    try:
        said = difference(json.loads(got), json.loads(want), "config", "in the file")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its owner is no configuration") from error
    raise CheckpointError(f"{path}: is the cache of another model: {said}")


def _read_again(owner: str) -> str:
    """An owner's configuration with all fields of today: older files have fewer."""
    try:
        return TransformerConfig.from_json(owner).to_json()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return owner


def _check_description(where: str, got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    for name, value in want.items():
        if name in got and got[name] != value:
            said = difference(got[name], value, name, "in the file")
            raise CheckpointError(f"{where} is of another kind: {said}")


def difference(got: Any, want: Any, name: str, where: str) -> str:
    """The first place where two pieces of JSON differ, in words; ``where`` is where ``got`` is."""
    if isinstance(got, dict) and isinstance(want, dict):
        for key in [*want, *got]:
            if key not in got or key not in want or got[key] != want[key]:
                return difference(got.get(key), want.get(key), f"{name}.{key}", where)
    if isinstance(got, list) and isinstance(want, list):
        if len(got) != len(want):
            return f"{name} has {len(got)} entries {where}, {len(want)} here"
        for i, (have, wanted) in enumerate(zip(got, want, strict=True)):
            if have != wanted:
                return difference(have, wanted, f"{name}[{i}]", where)
    return f"{name} is {shown(got)} {where}, {shown(want)} here"
