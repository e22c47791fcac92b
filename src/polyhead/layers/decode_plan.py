"""The decode plan: how the layers of a model take a few tokens by native code, and when not.

Computing a layer of a small model takes less time than calling its ten operations from Python.
Here they are one call, for all layers that follow each other, with the bits of the layers' own
path. A ``DecodePlan`` exports each layer to native code once (``native_layer.py``), or takes what
another plan exported. It lives as long as the cache that it decodes with, keeps neither modules
nor weights alive, and is valid while nothing that it has read changes, which native code finds out
in every call before it computes anything (``csrc/module/guards.h``). A layer that has changed is
described again. Layers that native code does not know run as modules, and so do all other cases
(prompts, gradients, other masks, caches that must grow or move tokens); ``DecodePlan.explain``
says which and why.

Shape letters: B batch, E embed size.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyhead.caches import KeyValueCache, ModelCache, SequenceCache
from polyhead.layers.exact import Classes, classes_now
from polyhead.layers.fused_layers import FusedLayers, PlannedLayer
from polyhead.layers.gemm import code_for
from polyhead.layers.native_layer import NETWORK
from polyhead.layers.repeated_step import RepeatedStep
from polyhead.native import Code
from polyhead.native.arguments import MAX_GEMV_ROWS, MAX_STEP_ROWS
from polyhead.semantics import Bias, Causal, Mask

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
        self._classes: Classes | None = None
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

    def classes(self, code: Code) -> Classes:
        """The classes as they were when layers were described."""
        if self._classes is None:
            self._classes = classes_now(code)
        return self._classes

    def check_classes(self, code: Code) -> None:
        """Describes all layers anew if a method of a class has changed."""
        if self._classes is not None and not code.holds(self._classes.guard):
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
        guard = None if self._classes is None else self._classes.guard
        found = repeated.take(x, guard, self._planned, caches)
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
    def is_native(self) -> bool:
        """Whether native code takes every layer to its end, as far as is known."""
        known = [None if each.why_cache else each.known for each in self._planned]
        return all(each and each.last == NETWORK and not each.has_hooks for each in known)

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
        if planned.why_cache is not None:
            return f"modules; {planned.why_cache}"
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
        given: Its cache holds the same tokens where this returns None.

    Returns:
        ``[B, T, E]``, with the bits of the modules one after the other, and the last part that was
        computed. None for more than 8 tokens of a row or 64 in all, masks other than ``Causal``,
        biases other than ``RelativeBias``, caches in which appending is more than writing
        (``caches/reserved.py``), modules that are hooked or replaced, deterministic algorithms,
        and where there is no native code.
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
    counts: list[int] | None = None,
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
        counts: Tokens of each row, where x is ``[1, N, E]``; None: T of each.

    Returns:
        ``[B, T, E]`` with the bits of the layers one after the other, how many they are, and the
        last part that was computed of the next layer.
    """
    if (code := _code_for(x, mask, packed=counts is not None)) is None:
        return x, 0, 0
    ordinary = not first and context is None and counts is None
    if ordinary and (found := plan.repeated(code, parts, x)) is not None:
        y, done = found
        return y, *divmod(done, NETWORK)
    return _stepped(code, plan, first, parts, x, mask, context, context_mask, counts)


def _stepped(
    code: Code,
    plan: DecodePlan,
    first: int,
    parts: Sequence[LayerInput],
    x: Tensor,
    mask: Mask | None,
    context: Tensor | None,
    context_mask: Mask | None,
    counts: list[int] | None = None,
    *,
    alone: bool = False,
) -> tuple[Tensor, int, int]:
    for _ in range(2):  # a layer that has changed is described again
        classes = plan.classes(code)
        with FusedLayers(code, x, mask, context, context_mask, counts) as run:
            for index in range(first, len(parts)):
                layer, bias, cache, context_cache = parts[index]
                planned = plan[index]
                known = planned.native_layer(code, layer, x, classes)
                if (
                    known is None
                    or (known.has_hooks and not alone)
                    or type(cache) in classes.changed
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
            found, done = run.computed(classes.guard, repeated)
        if done:
            return found, *divmod(done, NETWORK)
        plan.check_classes(code)
    return x, 0, 0


def _code_for(x: Tensor, mask: Mask | None, *, packed: bool = False) -> Code | None:
    """Native code for steps, if x is a few tokens of every batch row that a step knows to mask."""
    code, shape = code_for(x), x.shape  # first: under tracing, a comparison fixes a length
    if (
        code is None
        or len(shape) != 3
        or (shape[1] > MAX_GEMV_ROWS and not packed)
        or shape[0] * shape[1] > MAX_STEP_ROWS
        or not (mask is None or type(mask) is Causal)
        or not x.is_contiguous()
        or torch.are_deterministic_algorithms_enabled()  # its threads share the keys
    ):
        return None
    return code
