"""What every configuration is: a frozen dataclass that round-trips through JSON.

``from_dict`` refuses unknown keys by name: a key that nobody understands is a model that would load
cleanly and be wrong.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from polyhead.errors import ConfigError


@dataclass(frozen=True)
class Data:
    """JSON round trip for nested frozen dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """This configuration as plain dicts, lists, numbers, strings and None."""
        return dataclasses.asdict(self)

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


def _revive(hint: Any, value: Any) -> Any:
    """Turns JSON's dicts and lists back into the dataclasses and tuples that ``hint`` names."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return _revive(inner[0] if len(inner) == 1 else _meant(inner, value), value)
    if origin is tuple and isinstance(value, list | tuple):
        item = typing.get_args(hint)[0]
        return tuple(_revive(item, entry) for entry in value)
    if isinstance(hint, type) and issubclass(hint, Data) and isinstance(value, Mapping):
        return hint.from_dict(value)
    return value


def _meant(hints: list[type[Data]], value: Any) -> type[Data]:
    """Of several dataclasses the one most of whose required fields ``value`` has."""

    def share(hint: type[Data]) -> float:
        names = [f.name for f in dataclasses.fields(hint) if _is_required(f)]
        return sum(name in value for name in names) / len(names)

    return max(hints, key=share) if isinstance(value, Mapping) else hints[0]


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing
