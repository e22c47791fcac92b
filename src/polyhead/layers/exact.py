"""Which objects a fast path may replace: an allowlist, never a denylist.

A fast path computes what modules would compute, without calling them. It may do so for exactly the
classes and configurations that it was written for: a subclass, a method that was replaced on one
object or on the class, a hook, or a configuration with a field that the path does not know of means
that the modules run.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Container, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

from torch import nn

from polyhead.config import Data
from polyhead.native import Code
from polyhead.native.arguments import Guard

_T = TypeVar("_T")
_NEVER_IN_A_CALL = {
    "__init__", "_add_modules", "_build", "extra_repr", "from_config", "reset_parameters",
}  # fmt: skip
_CALL = nn.Module.__call__
_OF_CALLS = {
    "__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__getattribute__", "forward",
}  # fmt: skip
_DEFINED: dict[type, dict[str, Any]] = {}
"""The classes that fast paths know and their bases, with what they held when they were defined."""


class ExactType(Generic[_T]):
    """Matches instances of exactly this class whose methods are not replaced.

    Args:
        kind: Class whose instances match.
        method: Its method that a fast path stands in for.
    """

    __slots__ = ("_as_defined", "_kind", "_method", "_methods")

    def __init__(self, kind: type[_T], method: str = "forward") -> None:
        self._kind, self._method = kind, method
        self._as_defined = getattr(kind, method)
        for base in kind.__mro__[:-1]:
            _DEFINED.setdefault(base, dict(vars(base)))
        bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
        found = {name for base in bases for name, part in vars(base).items() if callable(part)}
        # Calling a module goes through _call_impl, which tools replace on single modules.
        self._methods = frozenset(found | {"_call_impl"}) - _NEVER_IN_A_CALL

    def is_class(self, thing: object) -> bool:
        """Whether ``thing`` is of this class itself, whatever was done to either."""
        return type(thing) is self._kind

    def is_exact(self, thing: object) -> TypeGuard[_T]:
        """Whether ``thing`` is of this class itself, with the methods that the class defines."""
        kind = self._kind
        return (
            type(thing) is kind
            and getattr(kind, self._method) is self._as_defined
            and thing.__dict__.keys().isdisjoint(self._methods)
        )

    def is_exact_and_unhooked(self, module: nn.Module | None) -> TypeGuard[_T]:
        """Whether ``module`` is of this class itself, and no hook sees or changes its calls."""
        kind = self._kind
        if (
            type(module) is not kind
            or getattr(kind, self._method) is not self._as_defined
            or kind.__call__ is not _CALL
        ):
            return False
        fields = module.__dict__
        return fields.keys().isdisjoint(self._methods) and not (
            fields["_forward_hooks"] or fields["_forward_pre_hooks"]
        )

    def why_not(self, module: object) -> str:
        """Why ``is_exact_and_unhooked`` is False, in words."""
        kind = self._kind
        if type(module) is not kind:
            return f"it is a {type(module).__name__}, not exactly a {kind.__name__}"
        fields = vars(module)
        if fields.get("_forward_hooks") or fields.get("_forward_pre_hooks"):
            return "it has forward hooks"
        own = sorted(fields.keys() & self._methods)
        if own:
            return f"its method {own[0]} was replaced"
        return f"its class was changed ({class_change(kind)})"


def class_change(kind: type) -> str | None:
    """What was changed in a class since it was defined, ``"RMSNorm.forward"``; None: nothing.

    Args:
        kind: A class that an ``ExactType`` was made for, or a base of one.
    """
    bases = kind.__mro__[:-1]
    for number, base in enumerate(bases):
        defined, now = _DEFINED[base], vars(base)
        # Others change what Module does beside calls: torch.package replaces __setstate__.
        names = _OF_CALLS if base is nn.Module else now.keys() | defined.keys()
        for name in names - _NEVER_IN_A_CALL:
            if name in defined:
                if now.get(name) is not defined[name]:
                    return f"{base.__name__}.{name}"
                continue
            if name not in now:
                continue
            # A new name matters where it hides another or stands between names and objects.
            if name in _OF_CALLS or any(name in _DEFINED[other] for other in bases[number + 1 :]):
                return f"{base.__name__}.{name}"
    return None


def changed_classes() -> dict[type, str]:
    """The classes that were changed since they were defined, and what in them."""
    found = ((kind, class_change(kind)) for kind in _DEFINED)
    return {kind: change for kind, change in found if change is not None}


def guarded_classes() -> tuple[tuple[dict[str, Any], None], ...]:
    """What classes hold, for ``Code.guard``: their dicts themselves, behind the read-only views."""
    return tuple(
        (held, None)
        for base in _DEFINED
        for held in gc.get_referents(vars(base))
        if isinstance(held, dict)
    )


class Classes(NamedTuple):
    """The classes of modules as they are.

    Attributes:
        guard: Holds while nothing in them changes.
        changed: Those that were changed since they were defined, and what in them.
    """

    guard: Guard
    changed: dict[type, str]


_classes: dict[tuple[Code, int], Classes] = {}


def classes_now(code: Code) -> Classes:
    """The classes as they are; the same object while nothing in them changes."""
    key = code, len(_DEFINED)
    found = _classes.get(key)
    if found is None or not code.holds(found.guard):
        found = _classes[key] = Classes(code.guard(guarded_classes()), changed_classes())
    return found


_TABLES = "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"
_UNREAD = frozenset(vars(nn.Module())) - {*_TABLES, "training"}


def guarded_attributes(
    modules: Iterable[nn.Module],
) -> tuple[tuple[nn.Module, frozenset[str]], ...]:
    """Modules with the attributes whose change a fast path must notice, for ``Code.guard``.

    Those are all that a call may read: parameters, parts, hooks, mode, and the module's own.
    """
    return tuple((module, frozenset(vars(module).keys() - _UNREAD)) for module in modules)


CHECKED_ELSEWHERE = frozenset[Any]()
"""The fast path checks this field elsewhere."""


class SupportedFields:
    """The fields of configurations that a fast path was written for.

    A field that is not listed must have its default, so with a field that is added later the
    modules run until it is listed.

    Args:
        fields: By class of configuration the names of its fields, each with the values that are
            supported; None: any value, and any of the classes listed here;
            ``CHECKED_ELSEWHERE``: do not check.
    """

    def __init__(self, fields: Mapping[type[Data], Mapping[str, Container[Any] | None]]) -> None:
        self._fields = fields
        self._answers: dict[int, tuple[weakref.ref[Data], bool]] = {}

    def accepts(self, config: Data) -> bool:
        """Whether every field of ``config`` is understood; asked once for each object."""
        # By identity: the hash of nested data takes longer than the step of a small layer.
        found = self._answers.get(id(config))
        if found is not None and found[0]() is config:
            return found[1]
        key, answers = id(config), self._answers
        answer = self._covered(config)
        answers[key] = weakref.ref(config, lambda _: answers.pop(key, None)), answer
        return answer

    def unknown(self, config: Data) -> str:
        """What of ``config`` is not understood: its class or fields, as a phrase."""
        known, kind = self._fields.get(type(config)), type(config).__name__
        if known is None:
            return kind
        fields = (
            f"{field.name}={value!s:.40}"
            for field in dataclasses.fields(config)
            if not self._understood(field, value := getattr(config, field.name), known)
        )
        return f"{kind} with {', '.join(fields)}"

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
        if values is CHECKED_ELSEWHERE:
            return True
        if isinstance(value, Data) and not self._covered(value):
            return False
        return values is None or value in values
