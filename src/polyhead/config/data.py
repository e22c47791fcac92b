"""What every configuration is: a frozen dataclass that round-trips through JSON.

``from_dict`` refuses unknown keys by name: a key that nobody understands is a model that would load
cleanly and be wrong.
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

from polyhead.errors import ConfigError


@dataclass(frozen=True)
class Data:
    """JSON round trip for nested frozen dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """This configuration as plain dicts, lists, numbers, strings and None."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Builds it; raises ConfigError naming an unknown, missing or misshapen key."""
        hints = typing.get_type_hints(cls)
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
    ``class AttentionConfig(HeadLayout, kind="heads")``.
    """

    kind: ClassVar[str]
    where: ClassVar[Mapping[str, str]]
    _kinds: ClassVar[dict[str, type[OneOfSeveral]]]

    def __init_subclass__(cls, kind: str | None = None) -> None:
        super().__init_subclass__()
        if kind is None:
            cls._kinds = {}
        else:
            cls.kind = kind
            cls._kinds[kind] = cls

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind} | super().to_dict()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Builds the kind that ``data`` names.

        Before there was a ``kind`` in the files, there were two of each part: the one is meant
        most of whose required fields ``data`` has.
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
            if name not in cls.where:
                raise ConfigError(
                    f"{cls.__name__}: kind must be one of {', '.join(cls.where)}: got {name!r}"
                )
            importlib.import_module(cls.where[name])
            found = cls._kinds[name]
        return typing.cast(Self, found.from_dict(values))


def _plain(value: Any) -> Any:
    if isinstance(value, Data):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raises ConfigError unless ``value`` is one of ``choices``."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ConfigError(f"{name} must be one of {listed}: got {value!r}")


def check_whole(name: str, value: object, *, least: int = 1) -> None:
    """Raises ConfigError unless ``value`` is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}: got {value!r}")


def check_positive(name: str, value: float) -> None:
    """Raises ConfigError unless ``value`` is above 0."""
    if not value > 0:
        raise ConfigError(f"{name} must be positive: got {value!r}")


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
    """Share of the required fields of ``kind`` that ``values`` has."""
    missing = dataclasses.MISSING
    required = [
        f.name
        for f in dataclasses.fields(kind)
        if f.default is missing and f.default_factory is missing
    ]
    return sum(name in values for name in required) / len(required)
