"""Layers, one behind the other, that one native call computes for a few tokens.

Shape letters: B batch, E embed size, T tokens.
"""

from __future__ import annotations

import weakref
from operator import add
from typing import Self, TypeGuard

import torch
from torch import Tensor, nn

from polyhead.caches import (
    DenseCache,
    LatentCache,
    LayerCache,
    PagedCache,
    Quantized,
    QuantizedCache,
    Ring,
    RingCache,
    SequenceCache,
    StoredCache,
)
from polyhead.caches.pooled_step import PooledStep
from polyhead.layers.exact import Classes, ExactType, guarded_attributes
from polyhead.layers.native_attention import ROPE
from polyhead.layers.native_export import NotExportableError
from polyhead.layers.native_layer import (
    NETWORK,
    NativeLayer,
    export_layer,
    has_hooks,
    never,
    phrase,
)
from polyhead.layers.repeated_step import FIELDS, RepeatedStep
from polyhead.layers.selectors import bounds
from polyhead.native import Code, batch_invariant, is_plain
from polyhead.native.arguments import CacheSegment, Guard
from polyhead.native.code import LayerCall
from polyhead.semantics import Bias, Causal, Mask, RelativeBias

_CACHES = {
    kind: ExactType(kind, "append")
    for kind in (StoredCache, DenseCache, RingCache, PagedCache, LatentCache, QuantizedCache)
}


_CHOOSING_CACHE = ExactType(LayerCache, "step")


class PlannedLayer:
    """What a plan knows of one layer.

    Attributes:
        layer: Layer that the plan describes.
        known: Its description, or None.
        why: Why there is none.
        why_cache: Why steps with the cache that it was given last run as modules, or None.
    """

    __slots__ = ("_fitting", "_refused", "known", "layer", "why", "why_cache")

    def __init__(self, layer: nn.Module) -> None:
        self.layer = weakref.ref(layer)
        self._fitting: weakref.ref[object] | None = None
        self.known: NativeLayer | None = None
        self.why = never(layer)
        self.why_cache: str | None = None
        self._refused: tuple[torch.dtype, int, Guard] | None = None

    def native_layer(
        self, code: Code, layer: nn.Module, x: Tensor, classes: Classes
    ) -> NativeLayer | None:
        """The description for the dtype and size of x, made where there is none; None: modules."""
        known, wanted = self.known, (x.dtype, x.shape[2])
        if known is not None and known.dtype is wanted[0] and known.embed_dim == wanted[1]:
            if not known.has_hooks or has_hooks(layer):
                return known
            known = None  # its hooks are gone
        refused = self._refused
        if refused is not None and refused[:2] == wanted and code.holds(refused[2]):
            return None
        if known is None and (known := _described(layer, wanted, classes)) is not None:
            self.known, self.why = known, known.why
            return known
        self.forget()
        try:
            self.known = export_layer(code, layer, x, classes.changed)
            self.why = self.known.why
            if self.known.last == NETWORK:  # else what it ends at may change unseen
                _last[layer] = self.known, classes
        except NotExportableError as error:
            self.why = phrase(layer._modules, error)
            self._refused = *wanted, code.guard(guarded_attributes(layer.modules()))
        return self.known

    def forget(self) -> None:
        """The layer has changed."""
        layer = self.layer()
        if layer is not None and (last := _last.get(layer)) and last[0] is self.known:
            _last.pop(layer, None)
        self.known = self._refused = self._fitting = None

    def reserve_slots(
        self,
        known: NativeLayer,
        cache: StoredCache,
        x: Tensor,
        batch: int,
        count: int | list[int],
        window: int | None,
    ) -> list[CacheSegment] | None:
        """``StoredCache.reserve_slots``, if the cache holds what the layer writes."""
        contents, shape = cache._contents, None
        fitting = None if self._fitting is None else self._fitting()
        if contents is None or contents is not fitting or contents.shape.batch != batch:
            shape = (batch, *known.heads[1:4], x.dtype, x.device)
        held = cache.reserve_slots(shape, count, window)
        if shape is not None and held is not None:
            self._fitting = weakref.ref(contents)
        return held


_last: weakref.WeakKeyDictionary[nn.Module, tuple[NativeLayer, Classes]]
_last = weakref.WeakKeyDictionary()
"""The last whole description of a layer that a plan made: the next one begins with it."""


def _described(
    layer: nn.Module, wanted: tuple[torch.dtype, int], classes: Classes
) -> NativeLayer | None:
    """What another plan knows of a layer, for the dtype and size of x; the step checks the rest."""
    known, before = _last.get(layer, (None, None))
    if known is None or before is not classes or (known.dtype, known.embed_dim) != wanted:
        return None
    return None if known.has_hooks and not has_hooks(layer) else known


class FusedLayers:
    """Layers, one behind the other, that one native call computes.

    Locks their caches; on exit, releases the slots of the layers that did not run.

    Attributes:
        is_complete: Whether the layers so far run to their ends, unless a guard fails.
    """

    def __init__(
        self,
        code: Code,
        x: Tensor,
        mask: Mask | None,
        context: Tensor | None,
        context_mask: Mask | None,
        counts: list[int] | None = None,
    ) -> None:
        self._code, self._x = code, x
        self._batch, self._count = x.shape[:2]
        if counts is None and self._count > 1 and batch_invariant.is_enabled():
            counts = [self._count] * self._batch
        if counts is not None:
            self._batch, self._count = len(counts), max(counts)
        self._counts = counts
        self._mask, self._context, self._context_mask = mask, context, context_mask
        self._layers: list[tuple[PlannedLayer, NativeLayer]] = []
        self._calls: list[LayerCall] = []
        self._caches: list[StoredCache] = []
        self._choosing: dict[int, PooledStep] = {}
        self._locked: list[StoredCache | LayerCache] = []
        self._written = 0
        self._lengths: list[int] = []
        self._longest = 0  # with the new tokens
        self._starts: int | list[int] = 0
        self._rotations: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.is_complete = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for cache in self._caches[self._written :]:
            cache.release_slots()
        for locked in self._locked:
            locked.in_use.__exit__()

    def try_add(
        self,
        planned: PlannedLayer,
        known: NativeLayer,
        bias: Bias | Tensor | None,
        cache: SequenceCache | None,
        context_cache: SequenceCache | None,
    ) -> bool:
        """Adds a layer, whose cache then counts the new tokens; False where modules must run."""
        choosing = PooledStep.of(cache) if known.chooses else None
        kv = cache if choosing is None else choosing.kv
        written = _in_rows(kv)
        planned.why_cache = None if written else f"its cache is of the class {type(kv).__name__}"
        if (
            (known.hooked and known.has_active_hooks())
            or not _in_rows(kv)
            or known.chooses is (choosing is None)
        ):
            return False
        lengths, T = kv._lengths, self._count
        if not self._calls:
            if not self._begins(lengths):
                return False
        elif lengths != self._lengths:
            return False
        starts, by_distance, rotation, memory = self._starts, None, None, None
        if choosing is not None and (T > 1 or self._counts is not None):
            return False
        if isinstance(starts, list) or T > 1:
            if not self._sees_itself(known, T):
                return False
        elif starts < known.min_cached:
            return False  # keys and values of few tokens are made, and no queries for the latent
        if self._longest > known.max_position:
            return False  # queries beyond have no temperature that was computed
        if bias is not None and (by_distance := _by_distance(known, bias)) is None:
            return False
        if known.cross is not None:
            if self._counts is not None:
                return False
            memory = self._memory(known.cross, context_cache)
        rope = known.rope
        if rope is not None:
            key = known.rotation_key
            if (rotation := self._rotations.get(key)) is None:
                if rope.config is not known.rope_config or not ROPE.is_exact(rope):
                    planned.forget()
                    return False
                rotation = rope.tables_at(self._x, starts, self._counts or T, known.heads.rotary)
                self._rotations[key] = rotation
        # A ring is read from what a single token sees on, as the kernel does.
        seen = known.window if T == 1 and type(kv.layout) is Ring else None
        locked = kv if choosing is None else choosing.cache
        locked.in_use.__enter__()
        self._locked.append(locked)
        more = self._counts or T
        held = planned.reserve_slots(known, kv, self._x, self._batch, more, seen)
        if held is None:
            planned.why_cache = _why_more(kv, more)
            return False
        entries = None
        if choosing is not None:
            self._choosing[len(self._calls)], entries = choosing, choosing.entries
        self._caches.append(kv)
        self._layers.append((planned, known))
        self._calls.append((known.data, rotation, held, by_distance, memory, entries))
        self.is_complete = known.last == NETWORK and (memory is not None or known.cross is None)
        return True

    @property
    def count(self) -> int:
        """Layers that were taken."""
        return len(self._calls)

    @property
    def is_repeatable(self) -> bool:
        """Whether the next token may take the same step: one token of rows of equal length."""
        return (
            self.is_complete
            and self._count == 1
            and self._counts is None
            and self._context is None
            and not isinstance(self._starts, list)
            and not self._choosing
            and all(call[3] is None for call in self._calls)
        )

    def computed(self, guard: Guard, repeated: RepeatedStep | None = None) -> tuple[Tensor, int]:
        """``[B, T, E]`` and the parts that were computed, three of each layer.

        Args:
            guard: What must be unchanged beside the layers' own.
            repeated: Remembers the step, if all parts were computed.
        """
        self._written = len(self._calls)  # some of it, if memory runs out
        try:
            run = None if repeated is None else repeated.run
            y, done = self._code.step(self._x, guard, self._calls, self._starts, run, self._counts)
        except ValueError:  # before anything was computed
            self._written = 0
            raise
        whole, part = divmod(done, NETWORK)
        self._written = whole + (part > 0)
        for index, choosing in self._choosing.items():
            if index < self._written:
                choosing.count_token(bounds)
        if whole < len(self._layers):
            planned, known = self._layers[whole]
            across = known.cross is None or self._calls[whole][4] is not None
            if part < known.last and (not part or across):
                planned.forget()  # it or an expert has changed
        elif repeated is not None:
            repeated.keep(self._x, guard, (known for _, known in self._layers), self._caches)
        return (y, done) if done else (self._x, 0)

    def _begins(self, lengths: list[int]) -> bool:
        """Takes the lengths of the first layer's cache; False if they are not those of the rows."""
        counts = self._counts
        self._lengths, self._starts = lengths, _starts(lengths)
        if counts is None:
            self._longest = max(lengths, default=0) + self._count
            return True
        if len(lengths) != len(counts):
            return False
        if min(counts) < self._count:
            self._starts = lengths
        self._longest = max(map(add, lengths, counts))
        return True

    def _sees_itself(self, known: NativeLayer, count: int) -> bool:
        """Whether native code knows what several tokens, or rows of other lengths, see."""
        if type(self._mask) is not Causal or count > known.max_tokens:
            return False
        if known.latent is not None and not batch_invariant.is_enabled():
            way = known.latent.choose(len(self._lengths), count, self._longest)
            return way == "absorbed"
        return True

    def _memory(
        self, sizes: tuple[int, int, int], cache: SequenceCache | None
    ) -> CacheSegment | None:
        """The memory of the context's keys and values; None if the modules must run."""
        x, context = self._x, self._context
        if (
            self._context_mask is not None
            or not _in_rows(cache)
            or not isinstance(context, Tensor)
            or (held := cache.held()) is None
        ):
            return None
        k, v, _, length, *_ = held
        if (
            v is None
            or k.dtype is not x.dtype
            or (k.shape[1], k.shape[3], v.shape[3]) != sizes
            or x.shape[0] % k.shape[0]
            or context.shape[1] != length
        ):
            return None
        return held


def _starts(lengths: list[int]) -> int | list[int]:
    """Where the new tokens of every row begin; one number if that is the same for all."""
    if len(lengths) > 1 and lengths.count(lengths[0]) != len(lengths):
        return lengths
    return lengths[0] if lengths else 0


def _in_rows(cache: SequenceCache | None) -> TypeGuard[StoredCache]:
    """Whether a cache is one of those that steps write to, with the methods of its class."""
    return type(cache) in _CACHES and len(cache.__dict__) == FIELDS


def _why_more(cache: StoredCache, count: int | list[int]) -> str | None:
    """Why appending to a cache that is not empty is more than writing."""
    contents = cache._contents
    if contents is None:
        return None
    uneven = not contents.even or (isinstance(count, list) and min(count) < max(count))
    alone = isinstance(count, list) or batch_invariant.is_enabled()
    if isinstance(cache.storage, Quantized) and uneven and alone:
        return "rows of its quantized cache differ in length, each with its bits alone"
    return "its cache had to make room, or to move or encode tokens"


def _by_distance(known: NativeLayer, bias: Bias | Tensor) -> Tensor | None:
    """``[H, 2 n + 1]`` float32 as native code reads it; None if it does not."""
    if known.biased or type(bias) is not RelativeBias:
        return None
    numbers = bias.kernel_bias()
    found = None if numbers is None else numbers.by_distance
    if found is None or len(found) != known.heads.heads:
        return None
    return found if found.dtype == torch.float32 and is_plain(found, found) else None
