"""Attention of another library's modules that polyhead computes, watched like polyhead's own.

An integration says which modules these are and shows each of their calls; a tool registers hooks.
Neither knows the other.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch import nn

from polyhead.layers.hooks import Hooked
from polyhead.layers.record import AttentionHook, HookHandle, hooks_here

_recognisers: list[Callable[[nn.Module], bool]] = []
_hooks: WeakKeyDictionary[nn.Module, dict[HookHandle[AttentionHook], AttentionHook]] = (
    WeakKeyDictionary()
)


def recognise(test: Callable[[nn.Module], bool]) -> Callable[[nn.Module], bool]:
    """From now on, modules that pass ``test`` are attentions whose calls will be shown."""
    _recognisers.append(test)
    return test


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention that polyhead computes."""
    return isinstance(module, Hooked) or any(test(module) for test in _recognisers)


def register_attention_hook(module: nn.Module, hook: AttentionHook) -> HookHandle[AttentionHook]:
    """Calls ``hook(record)`` for every call of a module's attention, polyhead's own or foreign.

    Returns:
        A handle; ``handle.remove()`` ends it, and so does leaving ``with handle:``.
    """
    if isinstance(module, Hooked):
        return module.register_attention_hook(hook)
    hooks = _hooks.setdefault(module, {})
    return HookHandle(hooks, hook)


def hooks_of(module: nn.Module) -> tuple[AttentionHook, ...]:
    """The hooks of a foreign module, which its integration is to call."""
    return hooks_here(_hooks.get(module, {})) if _hooks else ()
