"""Reading a file's settings so that none goes unread.

A key that nobody understands is a model that loads cleanly and is wrong. So every key is *taken*
from here by the code that uses it, and what is left over at the end is an error by name, unless it
stands on a list of keys known to change nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar, overload

from polyhead.errors import ConfigError

_T = TypeVar("_T")
_MISSING: Any = object()
_MOST_LAYERS = 10_000


class Keys:
    """A file's settings.

    Args:
        values: the settings.
        where: the file, for messages.
        prefix: put before every key asked for (``"llama."`` in GGUF metadata).
        defaults: what an absent key means in this family.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: object,
        *,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._values = values
        self.where = where
        self._prefix = prefix
        self._defaults = defaults or {}
        self._taken: set[str] = set()

    def has(self, key: str) -> bool:
        return self._prefix + key in self._values

    def take(self, key: str, default: Any = _MISSING) -> Any:
        """The value as it is; ``default``, or the family's, where the key is absent.

        Raises:
            ConfigError: the key is absent and has no default.
        """
        name = self._prefix + key
        self._taken.add(name)
        if name in self._values:
            return self._values[name]
        if key in self._defaults:
            return self._defaults[key]
        if default is _MISSING:
            raise ConfigError(f"{self.where}: key {name!r} is missing")
        return default

    @overload
    def whole(self, key: str) -> int: ...
    @overload
    def whole(self, key: str, default: _T) -> int | _T: ...
    def whole(self, key: str, default: Any = _MISSING) -> Any:
        """A whole number; null counts as absent where there is a default."""
        return self._typed(key, default, int, "a whole number")

    def num_layers(self, key: str) -> int:
        """A number of layers, small enough to build a configuration for each."""
        count = self.whole(key)
        if not 1 <= count <= _MOST_LAYERS:
            raise self.refused(key, count, f"1 to {_MOST_LAYERS} layers")
        return count

    @overload
    def number(self, key: str) -> float: ...
    @overload
    def number(self, key: str, default: _T) -> float | _T: ...
    def number(self, key: str, default: Any = _MISSING) -> Any:
        """A number, as float."""
        value = self._typed(key, default, (int, float), "a number")
        return value if value is None else float(value)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        """True or false."""
        return bool(self._typed(key, default, bool, "true or false"))

    def expect(self, key: str, *allowed: Any) -> None:
        """Takes a key that may only say what this reader assumes.

        Raises:
            ConfigError: it is there and says something else.
        """
        value = self.take(key, allowed[0])
        if value not in allowed:
            raise self.refused(key, value, " or ".join(repr(choice) for choice in allowed))

    def refused(self, key: str, value: Any, supported: str) -> ConfigError:
        """The error for a value that is understood but not supported."""
        return ConfigError(
            f"{self.where}: {self._prefix + key} is {value!r}; supported is {supported}"
        )

    def finish(self, harmless: Collection[str] = ()) -> None:
        """Ends the reading.

        Raises:
            ConfigError: a key was never taken and is not known to be harmless.
        """
        for name in self._values:
            if (
                name.startswith(self._prefix)
                and name not in self._taken
                and name.removeprefix(self._prefix) not in harmless
            ):
                raise ConfigError(
                    f"{self.where}: key {name!r} (value {_short(self._values[name])}) is not "
                    f"understood, so the model might load and be wrong"
                )

    def _typed(self, key: str, default: Any, kind: Any, what: str) -> Any:
        value = self.take(key, default)
        if value is None and default is not _MISSING:
            return default
        wrong_bool = isinstance(value, bool) and kind is not bool
        if value is default or (isinstance(value, kind) and not wrong_bool):
            return value
        raise ConfigError(f"{self.where}: {self._prefix + key} must be {what}: got {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
