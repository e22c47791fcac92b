"""Reads a file's settings; a setting that is not read is an error.

With an unknown key a model loads cleanly and is wrong. So every key is *taken*
from here by the code that uses it, and what is left over at the end is an error by name, unless it
stands on a list of keys known to change nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, overload

from polyhead.config.data import MOST_NUMBER
from polyhead.errors import ConfigError, shortened

_T = TypeVar("_T")
MISSING: Any = object()
"""Stands for no default."""
_MOST_LAYERS = 10_000
_MOST_WHOLE = 2**63 - 1
"""Largest integer of torch."""


class Keys:
    """A file's settings.

    Args:
        values: Settings by key, as config.json holds them.
        where: the file, for messages.
        prefix: put before every key asked for (``"llama."`` in GGUF metadata).
        defaults: what an absent key means in this family.
        aliases: the family's own spelling of a key (``{"hidden_size": "n_embd"}``); both are read.
        shown: what messages call a key, where ``values`` were translated from another format.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: object,
        *,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
        shown: Mapping[str, str] | None = None,
    ) -> None:
        self._values = values
        self.where = where
        self._prefix = prefix
        self._defaults = defaults or {}
        self._aliases = aliases or {}
        self._shown = shown or {}
        self._taken: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the file has the key, in either spelling."""
        return self._prefix + key in self._values or self._name(key) in self._values

    def named(self, key: str) -> str:
        """What messages call a key: as the file spells it."""
        name, shared = self._name(key), self._prefix + key
        if name not in self._values and shared in self._values:
            name = shared
        return self._shown.get(name, name)

    def take(self, key: str, default: Any = MISSING) -> Any:
        """The value as it is; ``default``, or the family's, where the key is absent.

        Raises:
            ConfigError: the key is absent and has no default, or is there in two spellings that say
                different things.
        """
        name, shared = self._name(key), self._prefix + key
        self._taken |= {name, shared}
        both = name != shared and name in self._values and shared in self._values
        if both and self._values[name] != self._values[shared]:
            raise ConfigError(
                f"{self.where}: {name} is {shortened(self._values[name])} and {shared}, which "
                f"means the same, {shortened(self._values[shared])}"
            )
        for each in (name, shared):
            if each in self._values:
                return self._values[each]
        if key in self._defaults:
            return self._defaults[key]
        if default is MISSING:
            raise ConfigError(
                f"{self.where}: key {shortened(self.named(key))} is missing{self.misspelt()}"
            )
        return default

    @overload
    def whole(self, key: str) -> int: ...
    @overload
    def whole(self, key: str, default: _T) -> int | _T: ...
    def whole(self, key: str, default: Any = MISSING) -> Any:
        """A whole number of 64 bits; null counts as absent where there is a default."""
        value = self._typed(key, default, int, "a whole number")
        if isinstance(value, int) and not -_MOST_WHOLE <= value <= _MOST_WHOLE:
            raise self._wrong(key, value, "a whole number of 64 bits")
        return value

    @overload
    def size(self, key: str) -> int: ...
    @overload
    def size(self, key: str, default: _T) -> int | _T: ...
    def size(self, key: str, default: Any = MISSING) -> Any:
        """A whole number from 1; null counts as absent where there is a default."""
        value = self.whole(key, default)
        if value is not None and value < 1:
            raise self.refused(key, value, "a whole number from 1")
        return value

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
    def number(self, key: str, default: Any = MISSING) -> Any:
        """A finite number, as float; null counts as absent where there is a default."""
        value = self._typed(key, default, (int, float), "a number")
        if value is None:
            return None
        if not -MOST_NUMBER <= value <= MOST_NUMBER:  # false for NaN
            raise self._wrong(key, value, f"a number up to {MOST_NUMBER:g}")
        return float(value)

    def positive(self, key: str) -> float:
        """A finite number above 0."""
        value = self.number(key)
        if value <= 0:
            raise self.refused(key, value, "a number above 0")
        return value

    def choice(self, key: str, choices: Mapping[str, _T], default: Any = MISSING) -> _T:
        """What the name under a key stands for.

        Raises:
            ConfigError: it is not one of the names.
        """
        name = self.take(key, default)
        if not isinstance(name, str) or name not in choices:
            raise self.refused(key, name, ", ".join(choices))
        return choices[name]

    def flag(self, key: str, default: Any = MISSING) -> bool:
        """True or false."""
        return bool(self._typed(key, default, bool, "true or false"))

    def text(self, key: str, default: Any = MISSING) -> Any:
        """A text; null counts as absent where there is a default."""
        return self._typed(key, default, str, "a text")

    def texts(self, key: str, default: Any = MISSING) -> list[str]:
        """A list of texts."""
        return self._list(key, (str,), "a list of texts", default)

    def numbers(self, key: str, default: Any = MISSING) -> list[Any]:
        """A list of numbers."""
        return self._list(key, (int, float), "a list of numbers", default)

    def wholes(self, key: str) -> list[int]:
        """A list of whole numbers; an absent one is empty."""
        return self._list(key, (int,), "a list of whole numbers", [])

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
            f"{self.where}: {self.named(key)} is {shortened(value)}; supported is {supported}"
            f"{self.misspelt()}"
        )

    def finish(self, harmless: Collection[str] = ()) -> None:
        """Ends the reading.

        Raises:
            ConfigError: a key was never taken and is not known to be harmless.
        """
        for name in self.untaken():
            if name.removeprefix(self._prefix) not in harmless:
                value, shown = self._values[name], self._shown.get(name, name)
                raise ConfigError(
                    f"{self.where}: key {shortened(shown)} (value {shortened(value)}) is not "
                    f"understood, so the model might load and be wrong{self.misspelt()}"
                )

    def misspelt(self) -> str:
        """A hint if a key that was not taken is similar to one that was looked for."""
        absent = [name for name in self._taken if name not in self._values]
        for name in self.untaken():
            near = difflib.get_close_matches(name, absent, 1, 0.85)
            if near:
                return f"; is {shortened(name)} meant to be {near[0]!r}?"
        return ""

    def untaken(self) -> list[str]:
        """The keys that were there and were not taken."""
        return [
            name
            for name in self._values
            if name.startswith(self._prefix) and name not in self._taken
        ]

    def _typed(self, key: str, default: Any, kind: Any, what: str) -> Any:
        value = self.take(key, default)
        if value is None and default is not MISSING:
            return default
        wrong_bool = isinstance(value, bool) and kind is not bool
        if value is default or (isinstance(value, kind) and not wrong_bool):
            return value
        raise self._wrong(key, value, what)

    def _list(
        self, key: str, kinds: tuple[type, ...], what: str, default: Any = MISSING
    ) -> list[Any]:
        values: list[Any] = self._typed(key, default, (list, tuple), what)
        if not all(type(value) in kinds for value in values):
            raise self._wrong(key, values, what)
        return values

    def _name(self, key: str) -> str:
        return self._prefix + self._aliases.get(key, key)

    def _wrong(self, key: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: {self.named(key)} must be {wanted}: got {shortened(value)}"
        )
