"""The caches that have a name; ``StoredCache(layout, storage)`` is any other pair."""

from __future__ import annotations

from polyhead.caches.sizes import (
    Dense,
    Latent,
    Layout,
    Paged,
    Quantized,
    Ring,
    Storage,
)
from polyhead.caches.stored import StoredCache


class RingCache(StoredCache):
    """A sliding window: the last ``window + spare`` tokens in constant memory.

    For layers whose mask is ``Causal() & Window(window)``: it forgets what they cannot see, and a
    chunk longer than the window works. It rolls back at most ``spare + 1`` tokens once it is full.

    Args:
        window: Keys that a query sees, itself included.
        spare: Tokens kept beyond the window.
        storage: ``Plain()``, ``Latent(...)`` or ``Quantized(..., sink_tokens=0)``.
        capacity: Tokens per row to make room for at the first append, at most window + spare.

    Raises:
        ConfigError: A window below 1, a spare below 0, or a storage that a ring cannot have.
    """

    def __init__(
        self,
        window: int,
        *,
        spare: int = 0,
        storage: Storage | None = None,
        capacity: int = 0,
    ) -> None:
        super().__init__(Ring(window, spare), storage, capacity)


class PagedCache(StoredCache):
    """Pages of ``page_size`` tokens that forks, beams and common prefixes share.

    ``fork`` and ``reorder`` copy no tokens: a page is copied when a row writes to it while others
    point to it. ``fork`` then ``crop`` reuses a prefix; ``reorder([0] * n)`` gives it n rows.

    Args:
        page_size: Tokens in a page; of a quantized storage a multiple of its group.
        storage: ``Plain()``, ``Latent(...)`` or ``Quantized(...)``.
        capacity: Tokens per row to make room for at the first append.

    Raises:
        ConfigError: A page size below 1, or one that is not a multiple of a quantized group.
    """

    def __init__(
        self, page_size: int, *, storage: Storage | None = None, capacity: int = 0
    ) -> None:
        super().__init__(Paged(page_size), storage, capacity)


class LatentCache(StoredCache):
    """One kv head of ``kv_lora_rank + qk_rope_head_dim`` numbers per token (absorbed MLA).

    The value of a token is the first ``kv_lora_rank`` columns of the same memory
    (DeepSeek-V2, 2024, §2.1.2).

    Args:
        kv_lora_rank: Columns of the compressed latent.
        qk_rope_head_dim: Columns of the rotary key that follow it.
        layout: ``Dense()``, ``Ring(window)`` or ``Paged(page_size)``.
        capacity: Tokens per row to make room for at the first append.

    Raises:
        ConfigError: A rank below 1 or a rotary size below 0.
    """

    def __init__(
        self,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        *,
        layout: Layout | None = None,
        capacity: int = 0,
    ) -> None:
        super().__init__(layout, Latent(kv_lora_rank, qk_rope_head_dim), capacity)


class QuantizedCache(StoredCache):
    """Old tokens in 8 or 4 bits, the first and the most recent ones exact; see ``Quantized``.

    Args:
        k_bits: 8 or 4 for keys, scaled per channel over ``group`` tokens.
        v_bits: 8 or 4 for values, scaled per token over ``group`` channels.
        group: Tokens or channels that share a scale, an even number.
        sink_tokens: First tokens that stay exact; default 4, and 0 in a ring.
        recent: At least this many of the last tokens stay exact.
        latent: Quantize latent rows, by the keys' rule.
        layout: ``Dense()``, ``Ring(window)`` or ``Paged(page_size)``.
        capacity: Tokens per row to make room for at the first append.

    Raises:
        ConfigError: Numbers that cannot be, named.
    """

    def __init__(
        self,
        k_bits: int = 8,
        v_bits: int = 8,
        *,
        group: int = 32,
        sink_tokens: int | None = None,
        recent: int = 32,
        latent: Latent | None = None,
        layout: Layout | None = None,
        capacity: int = 0,
    ) -> None:
        layout = Dense() if layout is None else layout
        if sink_tokens is None:
            sink_tokens = 0 if isinstance(layout, Ring) else 4
        storage = Quantized(k_bits, v_bits, group, sink_tokens, recent, latent)
        super().__init__(layout, storage, capacity)
