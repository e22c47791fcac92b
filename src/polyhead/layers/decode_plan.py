"""The decode plan: how the layers of a model take a few tokens by native code, and when not.

Computing a layer of a small model takes less time than calling its ten operations from Python. Here
they are one call, for all layers that follow each other, with the bits of the layers' own path. A
``DecodePlan`` exports each layer to native code once (``native_layer.py``). It lives as long as the
cache that it decodes with, keeps neither modules nor weights alive, and is valid while nothing that
it has read changes, which native code finds out in every call before it computes anything
(``csrc/module/guards.h``). A layer that has changed is described again. Layers that native code
does not know run as modules, and so do all other cases (prompts, gradients, other masks, caches
that must encode or move tokens); ``DecodePlan.explain`` says which and why.

Shape letters: B batch, E embed size.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self, TypeGuard

import torch
from torch import Tensor, nn

from polyhead.caches import (
    DenseCache,
    KeyValueCache,
    LatentCache,
    ModelCache,
    PagedCache,
    QuantizedCache,
    Ring,
    RingCache,
    SequenceCache,
    StoredCache,
)
from polyhead.caches.reserved import KVSegment
from polyhead.layers.exact import ExactType, changed_classes, guarded_attributes, guarded_classes
from polyhead.layers.gemm import code_for_gemv
from polyhead.layers.native_export import NotExportableError
from polyhead.layers.native_layer import NETWORK, ROPE, NativeLayer, export_layer, has_hooks, phrase
from polyhead.layers.repeated_step import FIELDS, RepeatedStep
from polyhead.native import Code, batch_invariant, is_plain
from polyhead.native.arguments import MAX_GEMV_ROWS, Guard
from polyhead.native.code import LayerCall
from polyhead.semantics import Bias, Causal, Mask, RelativeBias

if TYPE_CHECKING:
    pass

_CACHES = {
    kind: ExactType(kind, "append")
    for kind in (StoredCache, DenseCache, RingCache, PagedCache, LatentCache, QuantizedCache)
}
_PARTS = {0: "nothing", 1: "self-attention", 2: "both attentions"}


class LayerArgs(NamedTuple):
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


class PlannedLayer:
    """What a plan knows of one layer.

    Attributes:
        layer: Layer that the plan describes.
        known: Its description, or None.
        why: Why there is none.
    """

    __slots__ = ("_fitting", "_refused", "known", "layer", "why")

    def __init__(self, layer: nn.Module) -> None:
        self.layer = weakref.ref(layer)
        self._fitting: weakref.ref[object] | None = None
        self.known: NativeLayer | None = None
        self.why = ""
        self._refused: tuple[torch.dtype, int, Guard] | None = None

    def native_layer(
        self, code: Code, layer: nn.Module, x: Tensor, changed: dict[type, str]
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
        self.forget()
        try:
            self.known = export_layer(code, layer, x, changed)
            self.why = self.known.why
        except NotExportableError as error:
            self.why = phrase(layer._modules, error)
            self._refused = *wanted, code.guard(guarded_attributes(layer.modules()))
        return self.known

    def forget(self) -> None:
        """The layer has changed."""
        self.known = self._refused = self._fitting = None

    def reserve_slots(
        self, known: NativeLayer, cache: StoredCache, x: Tensor, count: int, window: int | None
    ) -> list[KVSegment] | None:
        """``StoredCache.reserve_slots``, if the cache holds what the layer writes."""
        contents, shape = cache._contents, None
        fitting = None if self._fitting is None else self._fitting()
        if contents is None or contents is not fitting or contents.shape.batch != x.shape[0]:
            shape = (x.shape[0], *known.heads[1:4], x.dtype, x.device)
        held = cache.reserve_slots(shape, count, window)
        if shape is not None and held is not None:
            self._fitting = weakref.ref(contents)
        return held


class DecodePlan:
    """How each layer takes a decoding step: by native code, or by its modules, and why.

    ``Transformer.decode_plan`` returns the plan of a cache. It belongs to the cache and is made
    when the first few tokens are decoded; nothing has to be done with it. One thread at a time may
    decode with it, as with the cache.

    Args:
        layers: Those of a model, in order. The plan holds them weakly.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._planned = [PlannedLayer(layer) for layer in layers]
        self._classes: Guard | None = None
        self._changed: dict[type, str] = {}
        self._repeated: RepeatedStep | None = None

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a DecodePlan describes memory of this process: make one for the copy")

    def is_of(self, layers: Sequence[nn.Module] | nn.ModuleList) -> bool:
        """Whether it is the plan of exactly these layers."""
        if len(self._planned) != len(layers):
            return False
        for planned, layer in zip(self._planned, layers, strict=True):
            if planned.layer() is not layer:
                return False
        return True

    def guard(self, code: Code) -> Guard:
        """What must be unchanged of classes."""
        if self._classes is None:
            self._changed = changed_classes()
            self._classes = code.guard(guarded_classes())
        return self._classes

    def check_classes(self, code: Code) -> None:
        """Describes all layers anew if a method of a class has changed."""
        if self._classes is not None and not code.holds(self._classes):
            self._classes = None
            for planned in self._planned:
                planned.forget()

    def repeated(
        self, code: Code, parts: Sequence[LayerInput], x: Tensor
    ) -> tuple[Tensor, int] | None:
        """The step of the last token again, if all is as it was (``repeated_step.py``)."""
        repeated = self._repeated
        if repeated is None or repeated.code is not code:
            return None
        caches = [cache for _, bias, cache, _ in parts if bias is None]
        found = repeated.take(x, self._classes, self._planned, caches)
        if found is None:
            repeated.forget()
        elif (whole := found[1] // NETWORK) < len(parts):
            self._planned[whole].forget()  # an expert has changed
        return found

    def to_repeat(self, code: Code) -> RepeatedStep:
        """What remembers a step of code."""
        if self._repeated is None or self._repeated.code is not code:
            self._repeated = RepeatedStep(code)
        return self._repeated

    @property
    def changed(self) -> dict[type, str]:
        """Classes that are not as they were defined."""
        return self._changed

    def __getitem__(self, index: int) -> PlannedLayer:
        return self._planned[index]

    def explain(self) -> str:
        """A line for each layer, equal ones together: by native code, or why not."""
        lines: list[tuple[int, int, str]] = []
        for number, planned in enumerate(self._planned):
            phrase = self._said(planned)
            if lines and lines[-1][2] == phrase:
                lines[-1] = lines[-1][0], number, phrase
            else:
                lines.append((number, number, phrase))
        return "\n".join(
            f"layer {first}: {phrase}" if first == last else f"layers {first} to {last}: {phrase}"
            for first, last, phrase in lines
        )

    @staticmethod
    def _said(planned: PlannedLayer) -> str:
        known = planned.known
        if known is None:
            return f"modules; {planned.why or 'no token has been decoded yet'}"
        alone = ", in a call of its own, which hooks or compilation see" if known.has_hooks else ""
        if known.last == NETWORK:
            return f"native{alone}"
        return f"native up to its {_PARTS[known.last]}{alone}; then modules: {known.why}"


_plans: weakref.WeakKeyDictionary[object, DecodePlan] = weakref.WeakKeyDictionary()


def plan_for(
    cache: ModelCache | KeyValueCache, layers: Sequence[nn.Module] | nn.ModuleList
) -> DecodePlan:
    """The plan of these layers that goes with a cache, as long as the cache exists."""
    plan = _plans.get(cache)
    if plan is None or not plan.is_of(layers):
        plan = _plans[cache] = DecodePlan(layers)
    return plan


def step(layer: nn.Module, x: Tensor, given: LayerArgs) -> tuple[Tensor, int] | None:
    """Runs the first sub-layers of a layer natively and appends K and V; None if not supported.

    Args:
        layer: A ``TransformerLayer``, not in training.
        x: ``[B, T, E]``.
        given: Its cache is untouched where this returns None.

    Returns:
        ``[B, T, E]``, with the bits of the modules one after the other, and the last part that was
        computed. None for more than 8 tokens in all, masks other than ``Causal``, biases other than
        ``RelativeBias``, caches in which appending is more than writing (``caches/reserved.py``),
        modules that are hooked or replaced, deterministic algorithms, and where there is no native
        code.
    """
    if (code := _code_for(x, given.mask)) is None:
        return None
    layers = [layer]
    plan = plan_for(given.cache, layers)
    parts = [(layer, given.bias, given.cache, given.context_cache)]
    x, whole, part = _stepped(
        code, plan, 0, parts, x, given.mask, given.context, given.context_mask, alone=True
    )
    return (x, NETWORK if whole else part) if whole or part else None


LayerInput = tuple[nn.Module, Bias | Tensor | None, SequenceCache | None, SequenceCache | None]
"""A layer and what it alone is given: the fields ``bias``, ``cache`` and ``context_cache``."""


def steps(
    parts: Sequence[LayerInput],
    x: Tensor,
    mask: Mask | None,
    context: Tensor | None = None,
    context_mask: Mask | None = None,
    *,
    plan: DecodePlan,
    first: int = 0,
) -> tuple[Tensor, int, int]:
    """``x`` behind as many of the layers from ``first`` on as one native call computes.

    Only layers that the plan has exported and that have no forward hooks.

    Args:
        parts: All layers of the plan; the cache of a layer that is not computed stays as it is.
        x: ``[B, T, E]``.
        mask: As in ``LayerArgs``, and so the next two.
        context: What the cross-attention reads.
        context_mask: Who may look at which tokens of it.
        plan: Of the layers.
        first: The first of them to compute.

    Returns:
        ``[B, T, E]`` with the bits of the layers one after the other, how many they are, and the
        last part that was computed of the next layer.
    """
    if (code := _code_for(x, mask)) is None:
        return x, 0, 0
    if not first and context is None and (found := plan.repeated(code, parts, x)) is not None:
        y, done = found
        return y, *divmod(done, NETWORK)
    return _stepped(code, plan, first, parts, x, mask, context, context_mask)


def _stepped(
    code: Code,
    plan: DecodePlan,
    first: int,
    parts: Sequence[LayerInput],
    x: Tensor,
    mask: Mask | None,
    context: Tensor | None,
    context_mask: Mask | None,
    *,
    alone: bool = False,
) -> tuple[Tensor, int, int]:
    for _ in range(2):  # a layer that has changed is described again
        guard, changed = plan.guard(code), plan.changed
        with _FusedLayers(code, x, mask, context, context_mask) as run:
            for index in range(first, len(parts)):
                layer, bias, cache, context_cache = parts[index]
                planned = plan[index]
                known = planned.native_layer(code, layer, x, changed)
                if (
                    known is None
                    or (known.has_hooks and not alone)
                    or type(cache) in changed
                    or known.crosses is (context is None)  # the layer says what is wrong
                    or not run.try_add(planned, known, bias, cache, context_cache)
                    or not run.is_complete
                ):
                    break
            if not run.count:
                return x, 0, 0
            repeated = None
            if run.is_repeatable and run.count == len(parts) and not alone:
                repeated = plan.to_repeat(code)
            found, done = run.computed(guard, repeated)
        if done:
            return found, *divmod(done, NETWORK)
        plan.check_classes(code)
    return x, 0, 0


def _code_for(x: Tensor, mask: Mask | None) -> Code | None:
    """Native code for steps, if x is a few tokens of every batch row that a step knows to mask."""
    code, shape = code_for_gemv(x), x.shape  # first: under tracing, a comparison fixes a length
    if (
        code is None
        or len(shape) != 3
        or shape[0] * shape[1] > MAX_GEMV_ROWS
        or not (mask is None or type(mask) is Causal)
        or not x.is_contiguous()
        or torch.are_deterministic_algorithms_enabled()  # its threads share the keys
    ):
        return None
    return code


class _FusedLayers:
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
    ) -> None:
        self._code, self._x, self._count = code, x, x.shape[1]
        self._mask, self._context, self._context_mask = mask, context, context_mask
        self._layers: list[tuple[PlannedLayer, NativeLayer]] = []
        self._calls: list[LayerCall] = []
        self._caches: list[StoredCache] = []
        self._locked: list[StoredCache] = []
        self._written = 0
        self._lengths: list[int] = []
        self._longest = 0
        self._starts: int | list[int] = 0
        self._rotations: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.is_complete = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for cache in self._caches[self._written :]:
            cache.release_slots()
        for cache in self._locked:
            cache.in_use.__exit__()

    def try_add(
        self,
        planned: PlannedLayer,
        known: NativeLayer,
        bias: Bias | Tensor | None,
        cache: SequenceCache | None,
        context_cache: SequenceCache | None,
    ) -> bool:
        """Adds a layer, whose cache then counts the new tokens; False where modules must run."""
        if (known.hooked and known.has_active_hooks()) or not _in_rows(cache):
            return False
        lengths, T = cache._lengths, self._count
        if not self._calls:
            self._lengths, self._starts = lengths, _starts(lengths)
            self._longest = max(lengths, default=0)
        elif lengths != self._lengths:
            return False
        starts, by_distance, rotation, memory = self._starts, None, None, None
        if isinstance(starts, list) or T > 1:
            if not self._sees_itself(known, T):
                return False
        elif starts < known.min_cached:
            return False  # keys and values of few tokens are made, and no queries for the latent
        if self._longest + T > known.max_position:
            return False  # queries beyond have no temperature that was computed
        if bias is not None and (by_distance := _by_distance(known, bias)) is None:
            return False
        if known.cross is not None:
            memory = self._memory(known.cross, context_cache)
        rope = known.rope
        if rope is not None:
            key = known.rotation_key
            if (rotation := self._rotations.get(key)) is None:
                if rope.config is not known.rope_config or not ROPE.is_exact(rope):
                    planned.forget()
                    return False
                rotation = rope.tables_at(self._x, starts, T, known.heads.rotary)
                self._rotations[key] = rotation
        # A ring is read from what a single token sees on, as the kernel does.
        seen = known.window if T == 1 and type(cache.layout) is Ring else None
        cache.in_use.__enter__()
        self._locked.append(cache)
        held = planned.reserve_slots(known, cache, self._x, T, seen)
        if held is None:
            return False
        self._caches.append(cache)
        self._layers.append((planned, known))
        self._calls.append((known.data, rotation, held, by_distance, memory))
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
            and self._context is None
            and not isinstance(self._starts, list)
            and all(by_distance is None for *_, by_distance, _ in self._calls)
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
            y, done = self._code.step(self._x, guard, self._calls, self._starts, run)
        except ValueError:  # before anything was computed
            self._written = 0
            raise
        whole, part = divmod(done, NETWORK)
        self._written = whole + (part > 0)
        if whole < len(self._layers):
            planned, known = self._layers[whole]
            across = known.cross is None or self._calls[whole][-1] is not None
            if part < known.last and (not part or across):
                planned.forget()  # it or an expert has changed
        elif repeated is not None:
            repeated.keep(self._x, guard, (known for _, known in self._layers), self._caches)
        return (y, done) if done else (self._x, 0)

    def _sees_itself(self, known: NativeLayer, count: int) -> bool:
        """Whether native code knows what several tokens, or rows of other lengths, see."""
        starts = self._starts
        if type(self._mask) is not Causal or count > known.max_tokens:
            return False
        if count > 1 and batch_invariant.is_enabled():
            return False
        if known.latent is not None:
            keys = count + (starts if isinstance(starts, int) else max(starts))
            way = known.latent.choose(len(self._lengths), count, keys)
            return way == "absorbed"
        return True

    def _memory(self, sizes: tuple[int, int, int], cache: SequenceCache | None) -> KVSegment | None:
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


def _by_distance(known: NativeLayer, bias: Bias | Tensor) -> Tensor | None:
    """``[H, 2 n + 1]`` float32 as native code reads it; None if it does not."""
    if known.biased or type(bias) is not RelativeBias:
        return None
    numbers = bias.kernel_bias()
    found = None if numbers is None else numbers.by_distance
    if found is None or len(found) != known.heads.heads:
        return None
    return found if found.dtype == torch.float32 and is_plain(found, found) else None
