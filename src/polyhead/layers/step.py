"""A few tokens through layers by native code: what decoding does once per token.

Computing a layer of a small model takes less time than calling its ten operations from Python. Here
they are one call, for all layers of a run that follow each other, with the bits of the layers' own
path. In other cases (prompts, gradients, hooks, other masks, caches that must encode or move
tokens) the modules run one by one. A layer is described to native code once (``described.py``), in
a call of its own, and again when anything about its modules changed, which every call finds out.

Shape letters: B batch, E embed size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Self, TypeGuard

import torch
from torch import Tensor, nn

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
from polyhead.layers.described import NETWORK, ROPE, DescribedLayer, describe
from polyhead.layers.exact import Exactly
from polyhead.layers.latent_attention import MultiHeadLatentAttention
from polyhead.layers.rows import code_for_rows
from polyhead.native import Code, by_row, is_plain
from polyhead.native.arguments import MOST_ROWS
from polyhead.native.code import LayerCall
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
        layer: A ``TransformerLayer``, not in training; it is described where it was not yet.
        x: ``[B, T, E]``.
        given: Its cache is untouched where this returns None.

    Returns:
        ``[B, T, E]``, with the bits of the modules one after the other, and the last part that was
        computed. None for more than 8 tokens in all, masks other than ``Causal``, biases other than
        ``RelativeBias``, caches in which appending is more than writing (``caches/growth.py``),
        modules that are hooked or replaced, deterministic algorithms, and where there is no native
        code.
    """
    code, remembered = _code_for(x, given.mask), layer.remembered
    if code is None:
        return None
    for known in (remembered.layer, None):
        if known is None or not _is_for(known, x):
            remembered.layer = known = describe(code, layer, x)
            if known is None:
                return None
        with _Run(code, x, given.mask, given.context, given.context_mask) as run:
            if not run.takes(remembered, known, given.bias, given.cache, given.context_cache):
                return None
            found = run.computed()
        if found[1]:
            return found
    return None


Part = tuple[nn.Module, Bias | Tensor | None, KeyValueCache | None, KeyValueCache | None]
"""A layer and what it alone is given: the fields ``bias``, ``cache`` and ``context_cache``."""


def steps(
    parts: Iterable[Part],
    x: Tensor,
    mask: Mask | None,
    context: Tensor | None = None,
    context_mask: Mask | None = None,
) -> tuple[Tensor, int, int]:
    """``x`` behind as many of the first layers as one native call computes.

    Those are layers that a step of their own has described (``step``), whose calls nobody sees.

    Args:
        parts: The layers. Caches of those that are not computed are untouched.
        x: ``[B, T, E]``.
        mask: As in ``Surroundings``, and so the next two.
        context: What the cross-attention reads.
        context_mask: Who may look at which tokens of it.

    Returns:
        ``[B, T, E]`` with the bits of the layers one after the other, how many they are, and the
        last part that was computed of the next layer.
    """
    code = _code_for(x, mask)
    if code is None:
        return x, 0, 0
    with _Run(code, x, mask, context, context_mask) as run:
        for layer, bias, cache, context_cache in parts:
            remembered = layer.__dict__.get("remembered")
            if not isinstance(remembered, Remembered):
                break  # some other module
            known = remembered.layer
            if (
                known is None
                or known.is_called
                or not _is_for(known, x)
                or known.crosses is (context is None)  # the layer says what is wrong
                or not run.takes(remembered, known, bias, cache, context_cache)
                or not run.goes_on
            ):
                break
        x, done = run.computed()
    return x, *divmod(done, NETWORK)


def _code_for(x: Tensor, mask: Mask | None) -> Code | None:
    """Native code for steps, if x is a few tokens of every batch row that a step knows to mask."""
    code, shape = code_for_rows(x), x.shape  # first: under tracing, a comparison fixes a length
    if (
        code is None
        or len(shape) != 3
        or shape[0] * shape[1] > MOST_ROWS
        or not (mask is None or type(mask) is Causal)
        or not x.is_contiguous()
        or torch.are_deterministic_algorithms_enabled()  # its threads share the keys
    ):
        return None
    return code


class _Run:
    """Layers, one behind the other, that one native call computes.

    Inside ``with`` nobody else uses their caches. Behind it these count the new tokens of the
    layers that were computed, and only of those.

    Attributes:
        goes_on: Whether the layers so far are computed to their ends, unless anything has changed.
    """

    def __init__(
        self,
        code: Code,
        x: Tensor,
        mask: Mask | None,
        context: Tensor | None,
        context_mask: Mask | None,
    ) -> None:
        self._code, self._x = code, x
        self._mask, self._context, self._context_mask = mask, context, context_mask
        self._layers: list[tuple[Remembered, DescribedLayer]] = []
        self._calls: list[LayerCall] = []
        self._caches: list[StoredCache] = []
        self._locked: list[StoredCache] = []
        self._written = 0
        self._lengths: list[int] = []
        self._starts: int | list[int] = 0
        self._rotations: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.goes_on = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for cache in self._caches[self._written :]:
            cache.ungrow()
        for cache in self._locked:
            cache.in_use.__exit__()

    def takes(
        self,
        remembered: Remembered,
        known: DescribedLayer,
        bias: Bias | Tensor | None,
        cache: KeyValueCache | None,
        context_cache: KeyValueCache | None,
    ) -> bool:
        """Adds a layer, whose cache then counts the new tokens; False where modules must run."""
        if known.attention.is_shown or not _in_rows(cache):
            return False
        x, lengths = self._x, cache.lengths
        B, T, _ = x.shape
        if not self._calls:
            self._lengths, self._starts = lengths, _starts(lengths)
        elif lengths != self._lengths:
            return False
        starts, by_distance, rotation, memory = self._starts, None, None, None
        if isinstance(starts, list) or T > 1:
            if not self._sees_itself(known, T):
                return False
        elif starts < known.least_past:
            return False  # keys and values of few tokens are made, and no queries for the latent
        if max(lengths, default=0) + T > known.most_past:
            return False  # queries beyond have no temperature that was computed
        if bias is not None and (by_distance := _by_distance(known, bias)) is None:
            return False
        if known.cross is not None:
            memory = self._memory(known.cross, context_cache)
        heads, rope = known.heads, known.rope
        if rope is not None:
            turn = id(rope), id(known.rope_config), heads.rotary
            if (rotation := self._rotations.get(turn)) is None:
                if rope.config is not known.rope_config or not ROPE.is_class_of(rope):
                    remembered.layer = None
                    return False
                rotation = self._rotations[turn] = rope.tables_at(x, starts, T, heads.rotary)
        # A ring is read from what a single token sees on, as the kernel does.
        seen = known.window if T == 1 and type(cache.layout) is Ring else None
        cache.in_use.__enter__()
        self._locked.append(cache)
        held = cache.grow((B, *heads[1:4], x.dtype, x.device), T, seen)
        if held is None:
            return False
        self._caches.append(cache)
        self._layers.append((remembered, known))
        self._calls.append((known.data, rotation, held, by_distance, memory))
        self.goes_on = known.last == NETWORK and (memory is not None or known.cross is None)
        return True

    def computed(self) -> tuple[Tensor, int]:
        """``[B, T, E]`` and the parts that were computed, three of each layer."""
        if not self._calls:
            return self._x, 0
        self._written = len(self._calls)  # some of it, if memory runs out
        try:
            y, done = self._code.step(self._x, self._calls, self._starts)
        except ValueError:  # before anything was computed
            self._written = 0
            raise
        whole, part = divmod(done, NETWORK)
        self._written = whole + (part > 0)
        if whole < len(self._layers):
            remembered, known = self._layers[whole]
            across = known.cross is None or self._calls[whole][-1] is not None
            if part < known.last and (not part or across):
                remembered.layer = None  # it or an expert has changed
        return (y, done) if done else (self._x, 0)

    def _sees_itself(self, known: DescribedLayer, count: int) -> bool:
        """Whether native code knows what several tokens, or rows of other lengths, see."""
        starts = self._starts
        if type(self._mask) is not Causal or count > known.most_tokens:
            return False
        if count > 1 and by_row.is_asked():
            return False
        if isinstance(known.attention, MultiHeadLatentAttention):
            keys = count + (starts if isinstance(starts, int) else max(starts))
            way = known.attention.config.choose(len(self._lengths), count, keys)
            return way == "absorbed"
        return True

    def _memory(self, cross: MultiHeadAttention, cache: KeyValueCache | None) -> Held | None:
        """The memory of the context's keys and values; None if the modules must run."""
        x, context = self._x, self._context
        if (
            cross.is_shown
            or self._context_mask is not None
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


def _is_for(known: DescribedLayer, x: Tensor) -> bool:
    """Whether a description is for the dtype and size of x."""
    return known.dtype is x.dtype and known.embed_dim == x.shape[2]


def _starts(lengths: list[int]) -> int | list[int]:
    """Where the new tokens of every row begin; one number if that is the same for all."""
    if len(lengths) > 1 and lengths.count(lengths[0]) != len(lengths):
        return lengths
    return lengths[0] if lengths else 0


def _in_rows(cache: KeyValueCache | None) -> TypeGuard[StoredCache]:
    kind = _CACHES.get(type(cache))  # type: ignore[arg-type]  # any other kind is not there
    return kind is not None and kind.is_class_of(cache)


def _by_distance(known: DescribedLayer, bias: Bias | Tensor) -> Tensor | None:
    """``[H, 2 n + 1]`` float32 as native code reads it; None if it does not."""
    if known.biased or type(bias) is not RelativeBias:
        return None
    numbers = bias.numbers()
    found = None if numbers is None else numbers.by_distance
    if found is None or len(found) != known.heads.heads:
        return None
    return found if found.dtype == torch.float32 and is_plain(found, found) else None
