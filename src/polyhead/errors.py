"""The exceptions that polyhead raises, beside ``ValueError`` and ``TypeError``.

Each is also a subclass of a built-in exception, so ``except ValueError`` keeps working. A
message names the argument, what came and what may come."""

from __future__ import annotations

import re

MOST_QUOTED = 200
"""Characters of a name or a value that a message quotes."""
_MOST_WORDS = 2_000
_LONG = re.compile(rf"'[^']{{{MOST_QUOTED},}}'|\"[^\"]{{{MOST_QUOTED},}}\"|\S{{{MOST_QUOTED},}}")


class PolyheadError(Exception):
    """Anything that polyhead refuses or cannot do; a message has at most 2,000 characters."""

    def __str__(self) -> str:  # not __init__, which torch.compile could not trace
        return _bounded(super().__str__())


class UnsupportedError(PolyheadError, NotImplementedError):
    """A kernel named by the caller cannot do everything that the call asks for."""


class ConfigError(PolyheadError, ValueError):
    """A configuration that is impossible, contradicts itself, or has unknown keys."""


class CheckpointError(PolyheadError, ValueError):
    """A file that is truncated, corrupt, of unknown format, or does not fit its configuration."""


class ModelNotFoundError(PolyheadError, LookupError):
    """No such model, directory or file; the message says what is here and how to get one."""

    def __str__(self) -> str:
        # LookupError's subclass KeyError quotes its message; keep plain sentences plain.
        return str(self.args[0]) if self.args else ""


class ContextLengthError(PolyheadError, ValueError):
    """More tokens than the model's context holds."""


class CacheFullError(PolyheadError, MemoryError):
    """More pages than a cache with a limit has free."""


class DisagreementError(PolyheadError, ArithmeticError):
    """Two ways of computing the same thing gave different results; nothing was timed."""


class DivergedError(PolyheadError, ArithmeticError):
    """A training run whose loss or gradients are no longer finite numbers."""


class NotPlainError(PolyheadError, ValueError):
    """A tensor that native code cannot read: memory is not its value, or storage is too small."""


class InputError(PolyheadError, ValueError):
    """A text or file that cannot be used: empty, not UTF-8, not readable."""


def shortened(value: object) -> str:
    """A name or value as messages quote it: its ``repr``, of at most ``MOST_QUOTED`` characters."""
    try:
        text = repr(value[: MOST_QUOTED + 1] if isinstance(value, str) else value)
    except ValueError:  # Python refuses to write a number of so many digits
        text = f"a number of {value.bit_length():,} bits" if isinstance(value, int) else "a value"
    return text if len(text) <= MOST_QUOTED else text[: MOST_QUOTED - 3] + "..."


def _bounded(words: str) -> str:
    """Long messages with what they quote cut, and if that is not enough, cut themselves."""
    if len(words) <= _MOST_WORDS:
        return words
    words = _LONG.sub(lambda found: found[0][: MOST_QUOTED - 3] + "...", words)
    return words if len(words) <= _MOST_WORDS else words[: _MOST_WORDS - 3] + "..."


class SharedCacheError(PolyheadError, RuntimeError):
    """Two threads used one cache at the same time."""
