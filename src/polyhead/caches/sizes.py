"""The bytes of a cache, before and after it exists: one description for planner and allocator.

A cache is a *storage* (how tokens are encoded) in a *layout* (where they lie). Both are plain data
here. ``stores`` says what tensors that makes: each store keeps *units* (one token, or one group of
quantized tokens), a unit is a few fields, and a field is ``heads × width`` numbers of one dtype.
The caches allocate exactly these stores, so ``cache_bytes`` is not an estimate.

    bytes = Σ over stores of capacity in units × Σ over fields of heads × width × bytes of dtype

``cache_bytes(...)`` equals ``cache.bytes`` of a cache that was made with ``capacity=tokens`` or
that got its ``tokens`` in one append. A cache that grows token by token doubles its capacity
(``Store.capacity``), which is at most twice as much.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from polyhead._utils.checks import check_int
from polyhead.caches.eviction import Evicting
from polyhead.errors import ConfigError

BLOCK = 64
"""Room is made for a multiple of this many tokens at a time, where there are no pages."""

SCALE_DTYPE = torch.bfloat16
"""Dtype of scales and zero points of quantized groups: the range of float32 in two bytes."""


@dataclass(frozen=True)
class Dense:
    """Tokens in order; room doubles as they come."""


@dataclass(frozen=True)
class Ring:
    """The last ``window + spare`` tokens: a sliding window of constant memory.

    Attributes:
        window: Keys that a query sees, itself included.
        spare: Tokens kept beyond the window. A ring can roll back ``spare + 1`` tokens, and
            takes as many in one append without copying what their queries still see.
    """

    window: int
    spare: int = 0

    def __post_init__(self) -> None:
        check_int("window", self.window, least=1, error=ConfigError)
        check_int("spare", self.spare, least=0, error=ConfigError)


@dataclass(frozen=True)
class Paged:
    """Pages of ``page_size`` tokens, found through a table per batch row."""

    page_size: int

    def __post_init__(self) -> None:
        check_int("page_size", self.page_size, least=1, most=1 << 20, error=ConfigError)


@dataclass(frozen=True)
class Plain:
    """Keys and values as they are given."""


@dataclass(frozen=True)
class Latent:
    """One row per token whose first ``kv_lora_rank`` columns are also its value (absorbed MLA).

    Attributes:
        kv_lora_rank: Columns of the compressed latent, the value.
        qk_rope_head_dim: Columns of the rotary key that follow it.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int

    def __post_init__(self) -> None:
        check_int("kv_lora_rank", self.kv_lora_rank, least=1, error=ConfigError)
        check_int("qk_rope_head_dim", self.qk_rope_head_dim, least=0, error=ConfigError)


@dataclass(frozen=True)
class Quantized:
    """Old tokens in 8 or 4 bits, asymmetric, with the first and the most recent ones exact.

    Keys are scaled per channel over ``group`` tokens, values per token over ``group`` channels
    (over the whole head where ``group`` does not divide it): Liu et al. 2024 (KIVI). A group is
    encoded once, when it is complete and older than ``recent``, and never again.

    Attributes:
        k_bits: 8 or 4 for keys.
        v_bits: 8 or 4 for values.
        group: Tokens (keys) or channels (values) that share a scale; even.
        sink_tokens: First tokens that stay exact (Xiao et al. 2023); a ring has none.
        recent: At least this many of the last tokens stay exact.
        latent: Quantize latent rows, by the keys' rule; ``v_bits`` is then not read.
    """

    k_bits: int = 8
    v_bits: int = 8
    group: int = 32
    sink_tokens: int = 4
    recent: int = 32
    latent: Latent | None = None

    def __post_init__(self) -> None:
        for name in ("k_bits", "v_bits"):
            if getattr(self, name) not in (4, 8):
                raise ConfigError(f"{name} must be 8 or 4: got {getattr(self, name)!r}")
        check_int("group", self.group, least=2, error=ConfigError)
        if self.group % 2:
            raise ConfigError(f"group must be even, two 4-bit codes share a byte: got {self.group}")
        check_int("sink_tokens", self.sink_tokens, least=0, error=ConfigError)
        check_int("recent", self.recent, least=0, error=ConfigError)


Layout = Dense | Ring | Paged | Evicting
Storage = Plain | Latent | Quantized


@dataclass(frozen=True)
class Field:
    """A tensor of a store: ``[..., heads, units, width]``."""

    name: str
    heads: int
    width: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of one unit."""
        return self.heads * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Store:
    """Tensors that keep one kind of unit.

    Attributes:
        name: ``"tokens"``; of a quantized cache ``"sinks"``, ``"codes"`` and ``"tail"``.
        tokens: Tokens in a unit.
        fields: The tensors of a unit.
        limit: Most units kept per batch row; None: no limit. Beyond it the store wraps around.
        page: Units in a page; None: no pages.
    """

    name: str
    tokens: int
    fields: tuple[Field, ...]
    limit: int | None = None
    page: int | None = None

    @property
    def unit_bytes(self) -> int:
        return sum(field.bytes for field in self.fields)

    def capacity(self, units: int, have: int = 0) -> int:
        """Units per batch row to make room for, where ``units`` are needed and ``have`` are there.

        Doubling reallocates at most log2(length) times. A paged store counts pages instead, all
        rows together: see ``pages``.
        """
        if units <= have:
            return have
        block = max(1, BLOCK // self.tokens)
        wanted = max(-(-units // block) * block, 2 * have)
        return wanted if self.limit is None else min(wanted, self.limit)

    def pages(self, units: int) -> int:
        """Pages that hold ``units`` units of one batch row."""
        return -(-units // (self.page or 1))

    def bytes(self, units: int, batch: int) -> int:
        """Bytes of room for ``units`` units in each of ``batch`` rows."""
        if self.page is not None:
            return batch * self.pages(units) * self.page * self.unit_bytes
        return batch * self.capacity(units) * self.unit_bytes


def stores(
    layout: Layout,
    storage: Storage,
    *,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    positions: bool = False,
) -> tuple[Store, ...]:
    """What a cache consists of.

    Args:
        layout: Where tokens lie.
        storage: How they are encoded.
        num_kv_heads: G; 1 for a latent.
        key_dim: D; ``kv_lora_rank + qk_rope_head_dim`` for a latent.
        value_dim: V; ``kv_lora_rank`` for a latent.
        dtype: Dtype of keys and values as they come and go.
        positions: Whether positions are stored too. They are from the first append on whose
            positions are not simply the number of tokens before each.

    Raises:
        ConfigError: A layout and a storage that do not go together, or sizes below 1.
    """
    for name, value in (
        ("num_kv_heads", num_kv_heads),
        ("key_dim", key_dim),
        ("value_dim", value_dim),
    ):
        check_int(name, value, least=1, error=ConfigError)
    latent = storage if isinstance(storage, Latent) else getattr(storage, "latent", None)
    if latent is not None:
        wanted = (1, latent.kv_lora_rank + latent.qk_rope_head_dim, latent.kv_lora_rank)
        if (num_kv_heads, key_dim, value_dim) != wanted:
            raise ConfigError(
                f"a latent cache of kv_lora_rank={latent.kv_lora_rank} and qk_rope_head_dim="
                f"{latent.qk_rope_head_dim} holds kv heads, key size and value size "
                f"{wanted}: got {(num_kv_heads, key_dim, value_dim)}"
            )
    exact = [Field("k", num_kv_heads, key_dim, dtype)]
    if latent is None:
        exact.append(Field("v", num_kv_heads, value_dim, dtype))
    if isinstance(layout, Evicting):
        if not isinstance(storage, Plain):
            raise ConfigError(f"{layout} stores keys and values as they are: got {storage}")
        if layout.accumulates:
            wide = torch.promote_types(dtype, torch.float32)
            exact.append(Field("weights", num_kv_heads, 1, wide))
        exact.append(Field("positions", num_kv_heads, 1, torch.int64))
        return (Store("tokens", 1, tuple(exact), layout.most_tokens),)
    if positions:
        exact.append(Field("positions", 1, 1, torch.int64))
    if not isinstance(storage, Quantized):
        limit = layout.window + layout.spare if isinstance(layout, Ring) else None
        page = layout.page_size if isinstance(layout, Paged) else None
        return (Store("tokens", 1, tuple(exact), limit, page),)

    group, limit, page = storage.group, None, None
    if isinstance(layout, Paged):
        if layout.page_size % group:
            raise ConfigError(
                f"page_size must be a multiple of group={group}: got {layout.page_size}"
            )
        page = layout.page_size // group
    if isinstance(layout, Ring):
        if storage.sink_tokens:
            raise ConfigError(
                f"sink_tokens must be 0 in a ring, which forgets its first tokens: got "
                f"{storage.sink_tokens}"
            )
        limit = max(1, -(-(layout.window + layout.spare - storage.recent) // group))
    fields = _codes("k", num_kv_heads, storage.k_bits, group, key_dim, key_dim)
    if latent is None:
        scales = group * (value_dim // value_group(value_dim, group))
        fields += _codes("v", num_kv_heads, storage.v_bits, group, value_dim, scales)
    if positions:
        fields += (Field("positions", 1, group, torch.int64),)
    parts = [
        Store("codes", group, fields, limit, page),
        Store("tail", 1, tuple(exact), storage.recent + group),
    ]
    if storage.sink_tokens:
        parts.insert(0, Store("sinks", 1, tuple(exact), storage.sink_tokens))
    return tuple(parts)


def held_tokens(layout: Layout, tokens: int) -> int:
    """Tokens of a row that are still held where so many were appended at once."""
    return min(tokens, layout.budget) if isinstance(layout, Evicting) else tokens


def units(storage: Storage, tokens: int) -> dict[str, int]:
    """Units that ``tokens`` tokens of one batch row, appended at once, put into each store."""
    if not isinstance(storage, Quantized):
        return {"tokens": tokens}
    rest = max(0, tokens - storage.sink_tokens)
    groups = max(0, rest - storage.recent) // storage.group
    return {
        "sinks": tokens - rest,
        "codes": groups,
        "tail": min(rest, storage.recent + storage.group),
    }


def cache_bytes(
    layout: Layout,
    storage: Storage,
    *,
    tokens: int,
    batch_size: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    positions: bool = False,
) -> int:
    """Bytes of all tensors of one layer's cache with room for ``tokens`` tokens per batch row.

    Args:
        layout: ``Dense()``, ``Ring(window)``, ``Paged(page_size)``, ``H2O(budget)``,
            ``SnapKV(budget)`` or ``StreamingLLM(budget)``.
        storage: ``Plain()``, ``Latent(rank, rope)`` or ``Quantized(...)``.
        tokens: Tokens of each row; a ring keeps its window of them, what evicts its budget.
        batch_size: Number of rows.
        num_kv_heads: Number of kv heads G.
        key_dim: Key size D of a head.
        value_dim: Value size V of a head.
        dtype: Dtype of keys and values as they come and go.
        positions: Whether positions are stored too, as in ``stores``.

    Returns:
        Bytes, equal to ``cache.bytes``.

    Raises:
        ConfigError: Numbers that do not go together, named.
    """
    check_int("tokens", tokens, least=0, error=ConfigError)
    check_int("batch_size", batch_size, least=1, error=ConfigError)
    parts = stores(
        layout,
        storage,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
        positions=positions,
    )
    needed = units(storage, held_tokens(layout, tokens))
    return sum(store.bytes(needed[store.name], batch_size) for store in parts)


def value_group(value_dim: int, group: int) -> int:
    """Channels of a value that share a scale: ``group``, or all where it does not divide them."""
    return group if value_dim % group == 0 else value_dim


def _codes(
    name: str, heads: int, bits: int, group: int, width: int, scales: int
) -> tuple[Field, ...]:
    return (
        Field(f"{name}_codes", heads, group * width * bits // 8, torch.uint8),
        Field(f"{name}_scale", heads, scales, SCALE_DTYPE),
        Field(f"{name}_zero", heads, scales, SCALE_DTYPE),
    )
