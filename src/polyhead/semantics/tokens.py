"""Where the tokens of one axis stand: absolute positions, and places in the sequence.

A mask never asks for the order of keys in memory. It asks three things of a token:

- its *position*: absolute, what "causal" and rotary embedding compare; given by the caller, or
  equal to the place;
- its *place*: the slot in the sequence, counted from the first token ever appended; what key
  lengths and packed documents count;
- its *index*: the row of this call's ``q`` or the column of this call's ``k``; what an explicit
  ``Keep`` tensor is indexed by.

A ``Tokens`` is a run of consecutive indexes, and never changes. Its ``span`` (least and greatest
position) lets a mask tell, without looking at single tokens, that a tile is empty or full.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from polyhead.native import batch_invariant


class Span(NamedTuple):
    """The least and the greatest of some whole numbers; ``None`` where they are not known."""

    low: int
    high: int


@dataclass(eq=False, slots=True)
class Tokens:
    """A run of ``length`` tokens.

    Attributes:
        length: Number of tokens.
        start: Index of the first in the call's axis.
        shift: Place of a token minus its index (times ``stride``).
        positions: ``[length]`` or ``[B, length]`` whole numbers; None where positions are places.
        span: Least and greatest position, or None where unknown (under tracing).
        stride: Places from one token to the next: token i of the axis stands at shift + stride · i.
            Above 1 where every n-th token of a sequence is in the call, as on one of n ranks.
    """

    length: int
    start: int = 0
    shift: int = 0
    positions: Tensor | None = None
    span: Span | None = None
    stride: int = 1

    @classmethod
    def of(
        cls, length: int, *, shift: int = 0, positions: Tensor | None = None, stride: int = 1
    ) -> Tokens:
        """All tokens of an axis, their span worked out where that can be done."""
        if positions is None:
            ends = Span(shift, shift + stride * (length - 1))
            return cls(length, shift=shift, span=ends, stride=stride)
        span = _spans(positions, length)[0]
        return cls(length, shift=shift, positions=positions, span=span, stride=stride)

    @property
    def places(self) -> Span:
        """The first and the last place."""
        first = self.shift + self.stride * self.start
        return Span(first, first + self.stride * (self.length - 1))

    def place_tensor(self, device: torch.device) -> Tensor:
        """``[length]`` places."""
        first = self.places.low
        stop = first + self.stride * self.length
        return torch.arange(first, stop, self.stride, device=device)

    def position_tensor(self, device: torch.device) -> Tensor:
        """``[length]`` or ``[B, length]`` positions."""
        return self.place_tensor(device) if self.positions is None else self.positions.to(device)

    def split(self, size: int) -> list[Tokens]:
        """Consecutive runs of at most ``size`` tokens."""
        starts = range(0, self.length, size)
        lengths = [min(size, self.length - start) for start in starts]
        if self.positions is None:
            first, stride = self.places.low, self.stride
            spans: list[Span | None] = [
                Span(first + stride * start, first + stride * (start + length - 1))
                for start, length in zip(starts, lengths, strict=True)
            ]
            positions: list[Tensor | None] = [None] * len(lengths)
        else:
            spans = _spans(self.positions, size)[: len(starts)]
            positions = [self.positions[..., start : start + size] for start in starts]
        return [
            Tokens(length, self.start + start, self.shift, position, span, self.stride)
            for start, length, position, span in zip(starts, lengths, positions, spans, strict=True)
        ]

    def slice(self, start: int, stop: int) -> Tokens:
        """The tokens with indexes ``start`` to ``stop`` of this run."""
        if self.positions is not None:
            run = Tokens.of(stop - start, positions=self.positions[..., start:stop])
        else:
            first = self.places.low + self.stride * start
            run = Tokens.of(stop - start, shift=first, stride=self.stride)
        return replace(run, shift=self.shift, start=self.start + start, stride=self.stride)


def distance(q: Tokens, k: Tokens, device: torch.device) -> Tensor:
    """Query position minus key position, ``[1 or B, 1, T, S]``."""
    rows = q.position_tensor(device)[..., :, None]
    columns = k.position_tensor(device)[..., None, :]
    difference = rows - columns
    return difference[None, None] if difference.ndim == 2 else difference[:, None]


def is_of(positions: Tensor, batch: int, length: int) -> bool:
    """Whether these are ``[T]``, ``[1, T]`` or ``[B, T]``."""
    if positions.ndim not in (1, 2) or positions.shape[-1] != length:
        return False
    # One by one: torch.compile(dynamic=True) does not know whether a tuple holds such a number.
    return positions.ndim == 1 or positions.shape[0] == 1 or bool(positions.shape[0] == batch)


def is_traced(tensor: Tensor) -> bool:
    """Whether ``tensor`` has no values to look at: compilation, export, ``torch.jit.trace``,
    vmap, meta, fake."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or tensor.is_meta
        or isinstance(tensor, FakeTensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


@dataclass(eq=False)
class GraphCapture:
    """A decoding step that is captured once and replayed on other values of the same tensors.

    Attributes:
        positions: Every position is below this number.
        made: What parts of the step share, such as rotations, by whatever they choose.
        held: What the step reads beside weights, caches and arguments, such as rotary tables:
            whoever runs it again keeps it.
    """

    positions: int
    made: dict[Any, Any] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)


_capture: ContextVar[GraphCapture | None] = ContextVar("polyhead.capturing", default=None)


@contextmanager
def capturing(positions: int) -> Iterator[GraphCapture]:
    """CUDA-graph capture: no tensor value may be read (``item``), since replays see others."""
    token = _capture.set(step := GraphCapture(positions))
    try:
        yield step
    finally:
        _capture.reset(token)


def active_capture() -> GraphCapture | None:
    """The capture in progress in this thread or task, or None."""
    return None if torch.compiler.is_compiling() else _capture.get()


def is_tracing() -> bool:
    """Whether a compiler, tracer or mode records operations, so that tensors must not be cached."""
    return torch.compiler.is_compiling() or torch._C._is_tracing() or batch_invariant.is_watched()


def is_transformed() -> bool:
    """Whether torch.func is at work beyond a single derivative: vmap, forward mode, nesting."""
    if torch.compiler.is_compiling():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or []
    kinds = [level.key() for level in levels]
    return len(kinds) > 1 or any(
        kind is not torch._C._functorch.TransformType.Grad for kind in kinds
    )


def is_differentiated() -> bool:
    """Whether torch.func takes a derivative here, under compilation too."""
    kinds = torch._C._functorch.TransformType
    levels = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() in (kinds.Grad, kinds.Jvp) for level in levels)


# What torch.compiler.assume_constant_result would write, without importing the compiler: the
# levels stand while a graph is traced.
is_differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _spans(positions: Tensor, size: int) -> list[Span | None]:
    """The span of every run of ``size``, with one transfer from the device for all of them."""
    length = positions.shape[-1]
    count = max(1, -(-length // max(1, size)))
    if is_traced(positions) or active_capture() is not None:
        return [None] * count
    if positions.numel() == 0:
        return [Span(0, -1)] * count
    runs = [positions[..., start : start + size] for start in range(0, length, size)]
    ends = torch.stack([torch.stack([run.amin(), run.amax()]) for run in runs]).tolist()
    return [Span(low, high) for low, high in ends]
