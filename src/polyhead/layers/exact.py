"""Which objects a fast path may replace: an allowlist, never a denylist.

A fast path computes what modules would compute, without calling them. It may do so for exactly the
classes and configurations that it was written for: a subclass, a method that was replaced on one
object or on the class, a hook, or a configuration with a field that the path does not know of means
that the modules run.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Container, Iterable, Mapping
from typing import Any, Generic, TypeGuard, TypeVar

from torch import nn

from polyhead.config import Data

_T = TypeVar("_T")
_NEVER_IN_A_CALL = {"__init__", "_build", "extra_repr", "from_config", "reset_parameters"}
_HELD = "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"


class Exactly(Generic[_T]):
    """One class, as it was defined.

    Args:
        kind: The class.
        method: Its method that a fast path stands in for.
    """

    __slots__ = ("_as_defined", "_kind", "_method", "_methods")

    def __init__(self, kind: type[_T], method: str = "forward") -> None:
        self._kind, self._method = kind, method
        self._as_defined = getattr(kind, method)
        bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
        found = {name for base in bases for name, part in vars(base).items() if callable(part)}
        # Calling a module goes through _call_impl, which tools replace on single modules.
        self._methods = frozenset(found | {"_call_impl"}) - _NEVER_IN_A_CALL

    def is_class_of(self, thing: object) -> TypeGuard[_T]:
        """Whether ``thing`` is of this class itself, with the methods that the class defines."""
        kind = self._kind
        return (
            type(thing) is kind
            and getattr(kind, self._method) is self._as_defined
            and thing.__dict__.keys().isdisjoint(self._methods)
        )

    def is_unwatched(self, module: nn.Module | None) -> TypeGuard[_T]:
        """Whether ``module`` is of this class itself, and no hook sees or changes its calls."""
        kind = self._kind
        if type(module) is not kind or getattr(kind, self._method) is not self._as_defined:
            return False
        fields = module.__dict__
        return fields.keys().isdisjoint(self._methods) and not (
            fields["_forward_hooks"] or fields["_forward_pre_hooks"]
        )


Fact = tuple[object, str | None, object]


def facts_of(modules: Iterable[nn.Module]) -> tuple[Fact, ...]:
    """Facts about modules that a fast path found, valid until something changes them.

    While they and their classes hold the same objects, no parameter, part or method was replaced,
    no hook added and no mode changed. ``Code.step`` looks at all of it in every call, and at where
    the parameters lie in memory.

    Args:
        modules: All that were described.

    Returns:
        (thing, name of an attribute, its value), or (a dict, None, what it holds).
    """
    facts: list[Fact] = []
    kinds = {}
    for module in modules:
        kind = type(module)
        kinds[kind] = kind.forward
        facts.append((module, "__class__", kind))
        held = [module.__dict__, *(module.__dict__[name] for name in _HELD)]
        facts += [(fields, None, dict(fields)) for fields in held]
    return (*facts, *((kind, "forward", forward) for kind, forward in kinds.items()))


UNSEEN = frozenset[Any]()
"""Stands for a field whose value a fast path checks elsewhere."""


class KnownFields:
    """The fields of configurations that a fast path was written for.

    A field that is not listed must have its default, so with a field that is added later the
    modules run until it is listed.

    Args:
        fields: By class of configuration the names of the fields, each with the values that are
            understood; None: any value, and any of the classes listed here; ``UNSEEN``: anything.
    """

    def __init__(self, fields: Mapping[type[Data], Mapping[str, Container[Any] | None]]) -> None:
        self._fields = fields
        self._answers: dict[int, tuple[weakref.ref[Data], bool]] = {}

    def cover(self, config: Data) -> bool:
        """Whether every field of ``config`` is understood; asked once for each object."""
        # By identity: the hash of nested data takes longer than the step of a small layer.
        found = self._answers.get(id(config))
        if found is not None and found[0]() is config:
            return found[1]
        key, answers = id(config), self._answers
        answer = self._covered(config)
        answers[key] = weakref.ref(config, lambda _: answers.pop(key, None)), answer
        return answer

    def _covered(self, config: Data) -> bool:
        known = self._fields.get(type(config))
        return known is not None and all(
            self._understood(field, getattr(config, field.name), known)
            for field in dataclasses.fields(config)
        )

    def _understood(
        self,
        field: dataclasses.Field[Any],
        value: Any,
        known: Mapping[str, Container[Any] | None],
    ) -> bool:
        if field.name not in known:
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            return bool(value == default)  # a required field has no default that equals a value
        values = known[field.name]
        if values is UNSEEN:
            return True
        if isinstance(value, Data) and not self._covered(value):
            return False
        return values is None or value in values
