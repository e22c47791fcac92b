"""Checks of arguments: messages name the argument, the received and the accepted values.

A wrong type is a TypeError and a number out of its range a ValueError; where a caller promises one
error for both, it is given as ``error``.
"""

from __future__ import annotations

import difflib
import importlib
import reprlib
import sys
from collections.abc import Iterable
from numbers import Real
from types import ModuleType
from typing import Any

from polyhead.errors import InputError

_BIG = 1 << 63
_LARGEST: Any = sys.float_info.max


def check_int(
    name: str,
    value: Any,
    *,
    least: int | None = None,
    most: int | None = None,
    error: type[Exception] | None = None,
) -> int:
    """``value`` as an int: a whole number in a range, of any type; True and False are refused.

    Args:
        name: Name of the argument.
        value: The received value.
        least: Smallest accepted value; None: no limit.
        most: Largest accepted value; None: no limit.
        error: Raised for a wrong kind and for a wrong number; default TypeError and ValueError.
    """
    wanted = f"{name} must be a whole number" + _limits(least, most)
    if type(value) is not int:  # the usual case costs no more than this
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise (error or TypeError)(f"{wanted}: got {shown(value)}")
        try:
            value = value.__index__()
        except (TypeError, RuntimeError) as cause:  # a tensor of several numbers, or of fractions
            raise (error or TypeError)(f"{wanted}: got {shown(value)}") from cause
    if not is_whole(value):
        wanted += " and of 64 bits"
        raise (error or ValueError)(f"{wanted}: got {shown(value)}")
    if (least is not None and value < least) or (most is not None and value > most):
        raise (error or ValueError)(f"{wanted}: got {shown(value)}")
    return int(value)


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    hint: str = "",
    error: type[Exception] | None = None,
) -> float:
    """``value``: a finite number in a range; True and False are not allowed.

    Args:
        name: Name of the argument.
        value: The received value.
        above: Exclusive lower limit.
        least: Inclusive lower limit.
        below: Exclusive upper limit.
        most: Inclusive upper limit.
        hint: Appended to the accepted values, such as ``", or None for off"``.
        error: Raised for a wrong kind and for a wrong number; default TypeError and ValueError.
    """
    parts = (("above", above), ("at least", least), ("below", below), ("at most", most))
    limits = " and ".join(f"{word} {end:g}" for word, end in parts if end is not None)
    wanted = f"{name} must be a finite number" + (f", {limits}" if limits else "") + hint
    kind: type = type(value)
    if kind is bool or not issubclass(kind, Real):
        raise (error or TypeError)(f"{wanted}: got {shown(value)}")
    if (
        not is_finite(value)
        or (above is not None and value <= above)
        or (least is not None and value < least)
        or (below is not None and value >= below)
        or (most is not None and value > most)
    ):
        raise (error or ValueError)(f"{wanted}: got {shown(value)}")
    real: float = value  # every real number serves as one
    return real


def check_probability(name: str, value: Any, *, error: type[Exception] | None = None) -> float:
    """``value``: a dropout probability, at least 0 and below 1."""
    return check_number(name, value, least=0.0, below=1.0, error=error)


def check_bool(name: str, value: Any, *, error: type[Exception] = TypeError) -> bool:
    """``value``: True or False."""
    if not isinstance(value, bool):
        raise error(f"{name} must be True or False: got {shown(value)}")
    return value


def check_one_of(
    name: str, value: Any, choices: Iterable[Any], *, error: type[Exception] = ValueError
) -> Any:
    """``value``: one of a few."""
    choices = list(choices)
    if not any(value is each or (type(value) is type(each) and value == each) for each in choices):
        said = ("one of " if len(choices) > 1 else "") + ", ".join(map(repr, choices))
        raise error(f"{name} must be {said}: got {shown(value)}")
    return value


def check_several(name: str, texts: Any) -> None:
    """InputError where ``texts`` is one text: iterating over it would give its characters."""
    if isinstance(texts, str):
        raise InputError(
            f"{name} must be a list of texts: got one text, {shown(texts)}; write [text]"
        )


def is_whole(value: Any) -> bool:
    """Whether ``value`` is an int of 64 bits; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and -_BIG <= value < _BIG


def is_finite(value: Any) -> bool:
    """Whether ``value`` is a real number that a float can hold; True and False are not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    # Comparisons, which torch.compile(dynamic=True) knows of numbers, and math.isfinite is not.
    return bool(-_LARGEST <= value <= _LARGEST)


def shown(value: Any) -> str:
    """``value`` in a sentence: cut where it is long."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to write a number of so many digits
        return f"a number of {value.bit_length():,} bits"


def meant(given: str, known: Iterable[str]) -> str:
    """`` (did you mean 'llama-3-8b'?)`` if a known name is similar, else an empty text."""
    near = difflib.get_close_matches(given.lower(), [*known], 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _limits(least: int | None, most: int | None) -> str:
    if least is None:
        return "" if most is None else f" of at most {most:,}"
    return f" of at least {least:,}" if most is None else f" from {least:,} to {most:,}"


def needed(module: str, extra: str) -> ModuleType:
    """A module of an optional package.

    Raises:
        InputError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise InputError(f"this needs the package {package}: pip install '{extra}'") from error
