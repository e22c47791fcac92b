"""The exceptions that polyhead raises, beside ``ValueError`` and ``TypeError``.

Each is also a subclass of a built-in exception, so ``except ValueError`` keeps working. A
message names the argument, what came and what may come."""

from __future__ import annotations


class PolyheadError(Exception):
    """Anything that polyhead refuses or cannot do."""


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


class DisagreementError(PolyheadError, ArithmeticError):
    """Two ways of computing the same thing gave different results; nothing was timed."""


class DivergedError(PolyheadError, ArithmeticError):
    """A training run whose loss or gradients are no longer finite numbers."""


class NotPlainError(PolyheadError, ValueError):
    """A tensor that native code cannot read: memory is not its value, or storage is too small."""


class InputError(PolyheadError, ValueError):
    """A text or file that cannot be used: empty, not UTF-8, not readable."""


def shortened(value: object) -> str:
    """A value as messages show it: its ``repr``, of at most 60 characters."""
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


class SharedCacheError(PolyheadError, RuntimeError):
    """Two threads used one cache at the same time."""
