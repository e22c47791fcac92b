"""What a file says of a cache, checked against its tensors before any of it is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyhead._utils.checks import check_bool, check_int, check_one_of
from polyhead.caches.eviction import Evicting
from polyhead.caches.layer_kv import Shape
from polyhead.caches.memory import Memory
from polyhead.caches.sizes import Layout, Quantized, Storage, Store, held_tokens

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_MOST = 1 << 48
"""Tokens of a sequence: more than any has, and few enough to count on with 64 bits."""


class Saved(NamedTuple):
    """A cache as stored in a file: fields of each store; per row the units written and held."""

    shape: Shape
    positions: bool
    explicit: bool
    lengths: list[int]
    records: dict[str, list[Tensor]]
    stops: dict[str, list[int]]
    firsts: dict[str, list[int]]


def described(layout: Layout, storage: Storage, shape: Shape | None) -> dict[str, Any]:
    """What a file says of a cache's kind, and of the shape of its tokens once there are some."""
    facts: dict[str, Any] = {
        what: {"kind": type(part).__name__} | dataclasses.asdict(part)
        for what, part in (("layout", layout), ("storage", storage))
    }
    if shape is not None:
        sizes = shape._asdict() | {"dtype": str(shape.dtype).removeprefix("torch.")}
        facts |= {name: value for name, value in sizes.items() if name != "device"}
    return facts


def saved(
    memories: Mapping[str, Memory],
) -> tuple[dict[str, Tensor], dict[str, dict[str, list[int]]]]:
    """The tensors of all stores, slots without a token set to 0, and where their rows end."""
    tensors, stores = {}, {}
    for name, memory in memories.items():
        records = memory.read(0, memory.extent)
        nowhere = (memory.units(0, memory.extent) < 0).to(memory.device)[:, None, :, None]
        for field, record in zip(memory.store.fields, records, strict=False):
            tensors[f"{name}.{field.name}"] = record.masked_fill(nowhere, 0).contiguous()
        stores[name] = {"stops": memory.stops, "firsts": memory.firsts}
    return tensors, stores


def checked(
    layout: Layout,
    storage: Storage,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    device: torch.device,
) -> Saved:
    """The state that ``StoredCache.state`` returned, checked for contradictions.

    Raises:
        KeyError: A fact or a tensor is missing.
        TypeError: A fact of another kind.
        ValueError: Facts that contradict each other, or that the tensors contradict.
    """
    B, G, D, V = (
        check_int(name, facts[name], least=1)
        for name in ("batch", "num_kv_heads", "key_dim", "value_dim")
    )
    dtype = getattr(torch, check_one_of("dtype", facts["dtype"], _DTYPES))
    shape = Shape(B, G, D, V, dtype, device)
    explicit = check_bool("explicit", facts["explicit"])
    positions = any(name.endswith(".positions") for name in tensors)
    if explicit and not positions:
        raise ValueError("explicit is true, and there are no positions")
    lengths = _numbers("lengths", facts["lengths"], shape.batch)
    stores = shape.stores(layout, storage, positions=positions)
    _same_names("stores", facts["stores"], [store.name for store in stores])
    fields = [f"{store.name}.{field.name}" for store in stores for field in store.fields]
    _same_names("tensors", tensors, fields)
    found = Saved(shape, positions, explicit, lengths, {}, {}, {})
    for store in stores:
        ends = facts["stores"][store.name]
        stops = _numbers(f"{store.name} stops", ends["stops"], shape.batch)
        firsts = _numbers(f"{store.name} firsts", ends["firsts"], shape.batch)
        for of_row in zip(lengths, stops, firsts, strict=True):
            _check_row(layout, storage, store, *of_row)
        found.records[store.name] = _records(store, tensors, shape.batch, max(stops))
        found.stops[store.name], found.firsts[store.name] = stops, firsts
    if isinstance(storage, Quantized):
        for row, length in enumerate(lengths):
            exact = max(0, length - storage.sink_tokens) - found.stops["codes"][row] * storage.group
            if not 0 <= exact <= storage.recent + storage.group:
                raise ValueError(f"row {row} has codes that do not reach its last tokens")
    return found


def _check_row(
    layout: Layout, storage: Storage, store: Store, length: int, stop: int, first: int
) -> None:
    """Raises ValueError unless a row of ``length`` tokens can have these units in a store."""
    wanted: int | None = length
    if isinstance(layout, Evicting) and held_tokens(layout, length) <= stop < length:
        wanted = None
    if isinstance(storage, Quantized):
        rest = max(0, length - storage.sink_tokens)
        wanted = {"sinks": length - rest, "tail": rest}.get(store.name)
    if wanted is not None and stop != wanted:
        raise ValueError(f"{store.name} of a row of {length} tokens must end at {wanted}: {stop}")
    if first > stop or (store.limit is not None and stop - first > store.limit):
        raise ValueError(f"{store.name} cannot hold units {first} to {stop}")
    if first and (store.limit is None or store.name == "sinks"):
        raise ValueError(f"{store.name} forgets nothing, and begins at {first}")


def _records(store: Store, tensors: Mapping[str, Tensor], batch: int, stop: int) -> list[Tensor]:
    records = []
    units = stop if store.limit is None else min(stop, store.limit)
    for field in store.fields:
        name = f"{store.name}.{field.name}"
        wanted = (batch, field.heads, units, field.width)
        record = tensors[name]
        if record.shape != wanted or record.dtype != field.dtype:
            raise ValueError(
                f"{name} must be {field.dtype} {list(wanted)}: got {record.dtype} "
                f"{list(record.shape)}"
            )
        records.append(record)
    return records


def _numbers(name: str, values: Any, count: int) -> list[int]:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{name} must be a list of {count} numbers, one per row")
    return [check_int(name, value, least=0, most=_MOST) for value in values]


def _same_names(what: str, got: Any, wanted: list[str]) -> None:
    if not isinstance(got, Mapping) or set(got) != set(wanted):
        raise ValueError(f"{what} must be {', '.join(wanted)}")
