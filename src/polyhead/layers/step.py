"""A few tokens through a layer by native code: what decoding does once per token and layer.

Computing a layer of a small model takes less time than calling its ten operations from Python. Here
they are one call, with the bits of the layer's own path. In other cases (prompts, gradients, hooks,
other masks, caches that must encode or move tokens) the modules run one by one. A layer is
described to native code once (``described.py``), and again when anything about its modules changed,
which every call finds out.

Shape letters: B batch, E embed size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor

from polyhead.caches import (
    DenseCache,
    KeyValueCache,
    LatentCache,
    PagedCache,
    QuantizedCache,
    Ring,
    RingCache,
    StoredCache,
)
from polyhead.caches.growth import Held
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.described import ROPE, DescribedLayer, describe
from polyhead.layers.exact import Exactly
from polyhead.layers.latent_attention import MultiHeadLatentAttention
from polyhead.layers.rows import code_for_rows
from polyhead.native import Code, by_row, is_plain
from polyhead.native.arguments import MOST_ROWS
from polyhead.semantics import Bias, Causal, Mask, RelativeBias

if TYPE_CHECKING:
    from polyhead.layers.transformer_layer import TransformerLayer

_CACHES = {
    kind: Exactly(kind, "append")
    for kind in (StoredCache, DenseCache, RingCache, PagedCache, LatentCache, QuantizedCache)
}


class Remembered:
    """The description of a layer that ``step`` keeps; a copy of the layer starts without one."""

    __slots__ = ("layer",)

    def __init__(self) -> None:
        self.layer: DescribedLayer | None = None

    def __reduce__(self) -> tuple[type[Remembered], tuple[()]]:
        return Remembered, ()


class Surroundings(NamedTuple):
    """A layer's arguments besides x.

    Attributes:
        mask: Who may look at whom.
        bias: Added to the scores of the self-attention.
        cache: Cache of the self-attention.
        context: What the cross-attention reads, ``[B, S, E]``.
        context_mask: Who may look at which tokens of it.
        context_cache: Cache of the cross-attention.
    """

    mask: Mask | None
    bias: Bias | Tensor | None
    cache: KeyValueCache
    context: Tensor | None = None
    context_mask: Mask | None = None
    context_cache: KeyValueCache | None = None


def step(layer: TransformerLayer, x: Tensor, given: Surroundings) -> tuple[Tensor, int] | None:
    """``x`` behind the first parts of a layer, its keys and values then in the cache; or None.

    Args:
        layer: A ``TransformerLayer``, not in training.
        x: ``[B, T, E]``.
        given: Its cache is untouched where this returns None.

    Returns:
        ``[B, T, E]``, with the bits of the modules one after the other, and the last part that was
        computed. None for more than 8 tokens in all, masks other than ``Causal``, biases other than
        ``RelativeBias``, caches in which appending is more than writing (``caches/growth.py``),
        modules that are hooked or replaced, deterministic algorithms, and where there is no native
        code.
    """
    code, shape, mask, bias = code_for_rows(x), x.shape, given.mask, given.bias
    if (
        code is None
        or len(shape) != 3
        or shape[0] * shape[1] > MOST_ROWS
        or not x.is_contiguous()
        or torch.are_deterministic_algorithms_enabled()  # its threads share the keys
        or not (mask is None or type(mask) is Causal)
        or not (bias is None or type(bias) is RelativeBias)
        or not _in_rows(given.cache)
    ):
        return None
    remembered = layer.remembered
    for known in (remembered.layer, None):
        if known is None or known.dtype is not x.dtype or known.embed_dim != shape[2]:
            remembered.layer = known = describe(code, layer, x)
            if known is None:
                return None
        memory = None if known.cross is None else _memory(known.cross, x, given)
        found = _computed(code, known, x, given, given.cache, bias, memory)
        if found is None:
            return None
        _, done = found
        if done:
            if done < known.last and (memory is not None or known.cross is None):
                remembered.layer = None  # an expert has changed
            return found
    return None


def _in_rows(cache: KeyValueCache | None) -> TypeGuard[StoredCache]:
    kind = _CACHES.get(type(cache))  # type: ignore[arg-type]  # any other kind is not there
    return kind is not None and kind.is_class_of(cache)


def _memory(cross: MultiHeadAttention, x: Tensor, given: Surroundings) -> Held | None:
    """The memory of the context's keys and values; None if the modules must run."""
    cache, context = given.context_cache, given.context
    if (
        cross.is_shown
        or given.context_mask is not None
        or not _in_rows(cache)
        or not isinstance(context, Tensor)
        or (held := cache.held()) is None
    ):
        return None
    k, v, _, length, *_ = held
    sizes = cross.num_kv_heads, cross.head_dim, cross.v_head_dim
    if (
        v is None
        or k.dtype is not x.dtype
        or (k.shape[1], k.shape[3], v.shape[3]) != sizes
        or x.shape[0] % k.shape[0]
        or context.shape[1] != length
    ):
        return None
    return held


def _computed(
    code: Code,
    known: DescribedLayer,
    x: Tensor,
    given: Surroundings,
    cache: StoredCache,
    bias: RelativeBias | None,
    memory: Held | None,
) -> tuple[Tensor, int] | None:
    """The step and its last part (0: the layer has changed); None where modules must take it."""
    if known.attention.is_shown:
        return None
    (B, T, _), lengths, window, rotation = x.shape, cache.lengths, known.window, None
    starts: int | list[int] = lengths[0] if lengths else 0
    if len(lengths) > 1 and lengths.count(lengths[0]) != len(lengths):
        starts = lengths
    if isinstance(starts, list) or T > 1:
        if not _sees_itself(known, given, starts, T):
            return None
    elif starts < known.least_past:
        return None  # keys and values of few tokens are made, and no queries for the latent
    if max(lengths, default=0) + T > known.most_past:
        return None  # queries beyond have no temperature that was computed
    by_distance = None
    if bias is not None:
        by_distance = _by_distance(known, bias)
        if by_distance is None:
            return None
    heads = known.heads
    if known.rope is not None:
        if not ROPE.is_class_of(known.rope) or known.rope.config is not known.rope_config:
            return x, 0
        rotation = known.rope.tables_at(x, starts, T, heads.rotary)
    # A ring is read from what a single token sees on, as the kernel does.
    seen = window if T == 1 and type(cache.layout) is Ring else None
    with cache.in_use:
        held = cache.grow((B, *heads[1:4], x.dtype, x.device), T, seen)
        if held is None:
            return None
        try:
            found = code.step(x, known.data, rotation, held, starts, by_distance, memory)
        except ValueError:
            cache.ungrow()
            raise
        if not found[1]:
            cache.ungrow()
        return found


def _sees_itself(
    known: DescribedLayer, given: Surroundings, starts: int | list[int], count: int
) -> bool:
    """Whether native code knows what several tokens of a row, or of rows of other lengths, see."""
    if type(given.mask) is not Causal or count > known.most_tokens:
        return False
    if count > 1 and by_row.is_asked():
        return False
    if isinstance(known.attention, MultiHeadLatentAttention):
        keys = count + (starts if isinstance(starts, int) else max(starts))
        way = known.attention.config.choose(len(given.cache.lengths), count, keys)
        return way == "absorbed"
    return True


def _by_distance(known: DescribedLayer, bias: RelativeBias) -> Tensor | None:
    """``[H, 2 n + 1]`` float32 as native code reads it."""
    numbers = None if known.biased else bias.numbers()
    found = None if numbers is None else numbers.by_distance
    if found is None or len(found) != known.heads.heads:
        return None
    return found if found.dtype == torch.float32 and is_plain(found, found) else None
