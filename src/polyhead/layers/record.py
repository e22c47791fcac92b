"""What a tool sees of one attention: everything needed to recompute any weight exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from torch import Tensor, nn

from polyhead.layers.scope import Scope
from polyhead.semantics import Bias, Mask, Normalizer, Tokens
from polyhead.semantics.recurrence_call import RecurrenceCall


@dataclass(frozen=True, eq=False, slots=True)
class AttentionRecord:
    """One call of ``attention`` by a layer, and its result.

    The weight of query i on key j is exp(score_ij − lse_i), with the score of
    ``semantics/reference.py``.

    Attributes:
        layer: The module that made the call.
        q: ``[B, H, T, D]`` queries, after norm and rotary.
        k: ``[B, G, S, D]`` all keys of the call, those of a cache included.
        v: ``[B, G, S, V]`` their values.
        mask: The mask of the call, with the layer's window and what hides the keys that are no
            tokens of a batch row.
        bias: Added to the scores, or None.
        scale: Factor of the scores.
        softcap: Softcap of the scores, or None.
        sinks: ``[H]``, ``[1 or B, H, T]`` or None.
        q_tokens: Positions and places of the T queries.
        kv_tokens: Positions and places of the S keys.
        out: ``[B, H, T, V]`` the heads' outputs, before ``o_proj``.
        lse: ``[B, H, T]`` natural-log log-sum-exp of each row, sinks included; NaN with a
            normalizer, whose weights it does not tell.
        normalizer: What took the softmax's place, or None.
    """

    layer: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    bias: Bias | Tensor | None
    scale: float
    softcap: float | None
    sinks: Tensor | None
    q_tokens: Tokens
    kv_tokens: Tokens
    out: Tensor
    lse: Tensor
    normalizer: Normalizer | None = None


@dataclass(frozen=True, eq=False)
class RecurrenceHook:
    """An attention hook of a layer whose heads remember a state in place of tokens.

    Attributes:
        show: Is given the layer and the recurrence of each call, over a whole text.
    """

    show: Callable[[nn.Module, RecurrenceCall], None]

    def __call__(self, record: AttentionRecord) -> None:
        raise TypeError("a RecurrenceHook is for layers with a state: got a call of attention")


AttentionHook = Callable[[AttentionRecord], None]
HeadEdit = Callable[[Tensor], Tensor]
_Hook = TypeVar("_Hook")


class HookHandle(Generic[_Hook]):
    """Removes a hook; also a context manager that removes it at the end of the block."""

    def __init__(self, hooks: dict[HookHandle[_Hook], _Hook], hook: _Hook) -> None:
        self._hooks, self._scope = hooks, Scope()
        hooks[self] = hook

    def remove(self) -> None:
        """Removes the hook; a second call does nothing."""
        self._hooks.pop(self, None)
        self._scope.close()

    @property
    def is_here(self) -> bool:
        """Whether the hook was registered by this thread or task, or one that started the task."""
        return self._scope.is_here

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def hooks_here(hooks: dict[HookHandle[_Hook], _Hook]) -> tuple[_Hook, ...]:
    """The hooks that this thread or task registered, in order."""
    # All at once: another thread may register or remove one meanwhile.
    return tuple(hook for handle, hook in tuple(hooks.items()) if handle.is_here)
