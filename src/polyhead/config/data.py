"""What every configuration is: a frozen dataclass that round-trips through JSON.

``from_dict`` refuses unknown keys by name: with an unknown key a model would load without error and
be wrong.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from polyhead._utils.checks import (
    check_int,
    check_number,
    check_one_of,
    check_probability,
    is_finite,
    is_whole,
    shown,
)
from polyhead._utils.extensions import extensions
from polyhead.errors import ConfigError

MOST_NUMBER = 1e18
"""Largest number: beyond any constant of a model, and products of two still fit float32."""


@dataclass(frozen=True)
class Data:
    """JSON round trip for nested frozen dataclasses.

    Raises:
        ConfigError: A value of another kind than its field's type: text for a number, a number for
            True or False, a number that is not finite or beyond 1e18. Lists become tuples.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = cls.__dict__.get("__post_init__")
        if own is not None:
            # Types first: the checks of the class may then compare numbers.
            def __post_init__(self: Data) -> None:
                Data.__post_init__(self)
                own(self)

            cls.__post_init__ = __post_init__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for field in dataclasses.fields(self):
            value, hint = getattr(self, field.name), hints[field.name]
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, field.name, value)
            if not _fits(hint, value):
                raise ConfigError(f"{field.name} must be {_said(hint)}: got {shown(value)}")

    def to_dict(self) -> dict[str, Any]:
        """This configuration as plain dicts, lists, numbers, strings and None."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Builds it; raises ConfigError naming an unknown, missing or misshapen key."""
        hints = _hints(cls)
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(
                f"{cls.__name__}: unknown key {unknown[0]!r}; known keys are "
                f"{', '.join(sorted(known))}"
            )
        try:
            return cls(**{name: _revive(hints[name], value) for name, value in data.items()})
        except TypeError as error:
            raise ConfigError(f"{cls.__name__}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(json.loads(text))


@dataclass(frozen=True)
class OneOfSeveral(Data):
    """A part of which there are several kinds. The JSON of one names its kind.

    A direct subclass is such a part and lists its kinds in ``where``: the module of each, which is
    imported when a configuration of that kind is read. A subclass of it is one kind:
    ``class AttentionConfig(HeadLayout, kind="heads")``. Others may come from installed packages
    (``_utils.extensions``), under names that are free.
    """

    kind: ClassVar[str]
    where: ClassVar[Mapping[str, str]]
    _kinds: ClassVar[dict[str, type[OneOfSeveral]]]

    def __init_subclass__(cls, kind: str | None = None) -> None:
        super().__init_subclass__()
        if kind is None:
            cls._kinds = {}
        else:
            taken = cls._kinds.get(kind)
            module = cls.where.get(kind, taken.__module__ if taken else cls.__module__)
            if module != cls.__module__:
                raise TypeError(
                    f"{cls.__name__}: kind {kind!r} is taken by {module}; choose another"
                )
            cls.kind = kind
            cls._kinds[kind] = cls

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind} | super().to_dict()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Builds the kind that ``data`` names.

        Older files have no ``kind``; then it is the kind of which ``data`` has most required
        fields.
        """
        values = dict(data)
        name = values.pop("kind", None)
        if "kind" in cls.__dict__:
            if name not in (None, cls.kind):
                raise ConfigError(f"{cls.__name__}: kind must be {cls.kind!r}: got {name!r}")
            return super().from_dict(values)
        if name is None:
            found = max(cls._kinds.values(), key=lambda kind: _share(kind, values))
        else:
            found = cls._kind_of(name)
        return typing.cast(Self, found.from_dict(values))

    @classmethod
    def _kind_of(cls, name: Any) -> type[OneOfSeveral]:
        """The class of a kind, polyhead's or an extension's."""
        if isinstance(name, str) and name in cls.where:
            importlib.import_module(cls.where[name])
            return cls._kinds[name]
        extensions()
        if not isinstance(name, str) or name not in cls._kinds:
            known = ", ".join({**cls.where, **cls._kinds})
            raise ConfigError(f"{cls.__name__}: kind must be one of {known}: got {shown(name)}")
        return cls._kinds[name]


def _plain(value: Any) -> Any:
    if isinstance(value, Data):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raises ConfigError unless ``value`` is one of ``choices``."""
    check_one_of(name, value, choices, error=ConfigError)


def check_whole(name: str, value: object, *, least: int = 1) -> None:
    """Raises ConfigError unless ``value`` is a whole number of at least ``least``."""
    check_int(name, value, least=least, error=ConfigError)


def check_positive(name: str, value: float) -> None:
    """Raises ConfigError unless ``value`` is above 0."""
    check_number(name, value, above=0, error=ConfigError)


def check_share(name: str, value: float) -> None:
    """Raises ConfigError unless ``value`` is a dropout probability, at least 0 and below 1."""
    check_probability(name, value, error=ConfigError)


def _revive(hint: Any, value: Any) -> Any:
    """Turns JSON's dicts and lists back into the dataclasses and tuples that ``hint`` names."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return _revive(inner[0], value) if len(inner) == 1 else value
    if origin is tuple and isinstance(value, list | tuple):
        item = typing.get_args(hint)[0]
        return tuple(_revive(item, entry) for entry in value)
    if isinstance(hint, type) and issubclass(hint, Data) and isinstance(value, Mapping):
        return hint.from_dict(value)
    return value


def _share(kind: type[Data], values: Mapping[str, Any]) -> float:
    """Fraction of the required fields of ``kind`` that ``values`` has."""
    missing = dataclasses.MISSING
    required = [
        f.name
        for f in dataclasses.fields(kind)
        if f.default is missing and f.default_factory is missing
    ]
    return sum(name in values for name in required) / len(required)


_HINTS: dict[type[Data], dict[str, Any]] = {}


def _hints(cls: type[Data]) -> dict[str, Any]:
    """The type of every field; cached, because resolving them takes 0.1 ms."""
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value is of the kind that a field's type names."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(arg, value) for arg in typing.get_args(hint))
    if origin is typing.Literal:
        return True  # the class checks its values itself
    if origin is tuple:
        item, *_ = typing.get_args(hint)
        return isinstance(value, tuple) and all(_fits(item, entry) for entry in value)
    if hint is float:
        return is_finite(value) and abs(value) <= MOST_NUMBER
    if hint is int:
        return is_whole(value)
    return hint is Any or isinstance(value, origin or hint)


_WORDS = {
    bool: "True or False",
    int: "a whole number of 64 bits",
    float: f"a finite number of at most {MOST_NUMBER:g}",
    str: "text",
}


def _said(hint: Any) -> str:
    """What a field takes, in words."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_said(arg) for arg in typing.get_args(hint))
    if origin is tuple:
        return f"a tuple, each entry {_said(typing.get_args(hint)[0])}"
    if hint is type(None):
        return "None"
    return _WORDS.get(hint) or str(getattr(hint, "__name__", hint))
