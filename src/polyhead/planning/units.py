"""Quantities as people write them: 24GiB, 3.35TB/s, 128k tokens."""

from __future__ import annotations

import math
import re

from polyhead.errors import ConfigError

_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_QUANTITY = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([kmgtp]?)(i?)([a-z/]*)")
_TOKENS = re.compile(r"([0-9]+(?:[_,][0-9]+)*)([km]?)")
_TOKEN_FACTORS = {"": 1, "k": 1024, "m": 1024**2}


def token_count(name: str, text: str) -> int:
    """A number of tokens as text: ``"8192"``, ``"131,072"``, ``"128k"``, ``"1m"``.

    k is 1,024 and m 1,024²: lengths of contexts are named so, unlike bytes.

    Args:
        text: As given, in any case of letters.

    Raises:
        ConfigError: Not such a number.
    """
    found = _TOKENS.fullmatch(text.strip().lower())
    if found is None:
        raise ConfigError(
            f"{name} must be a whole number of tokens, such as 8192 or 128k (131,072; k is 1,024, "
            f"m 1,024²): got {text!r}"
        )
    return int(re.sub("[_,]", "", found[1])) * _TOKEN_FACTORS[found[2]]


def quantity(name: str, value: float | str, *, unit: str) -> float:
    """A positive number, given as one or as text: ``"24GiB"``, ``"3.35TB/s"``, ``"989 TFLOP/s"``.

    Args:
        unit: ``"B"``, ``"B/s"`` or ``"FLOP/s"``; may be left out, in any case of letters.

    Raises:
        ConfigError: Not such a quantity, or not positive.
    """
    number: float
    if isinstance(value, str):
        found = _QUANTITY.fullmatch(value.strip().lower())
        if found is None or found[4] not in _spellings(unit):
            raise ConfigError(
                f"{name} must be a number of {unit}, such as 24G{unit}: got {value!r}"
            )
        base = 1024 if found[3] else 1000
        number = float(found[1].replace(",", "").replace("_", "")) * base ** _PREFIXES[found[2]]
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number of {unit}: got {value!r}")
    else:
        number = value
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"{name} must be positive: got {value!r}")
    return number


def _spellings(unit: str) -> tuple[str, ...]:
    plain = unit.lower()
    return (plain, plain.replace("/s", ""), "flops", "") if "flop" in plain else (plain, "b", "")


def binary(count: float) -> str:
    """Bytes in the largest binary unit: ``"10.41 GiB"``."""
    for prefix in ("", "Ki", "Mi", "Gi"):
        if abs(count) < 1024:
            return f"{count:,.0f} B" if not prefix else f"{count:,.2f} {prefix}B"
        count /= 1024
    return f"{count:,.2f} TiB"


def decimal(count: float, unit: str = "") -> str:
    """A count in thousands: ``"8.03 G"``."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(count) < 1000:
            return f"{count:,.4g} {prefix}{unit}".rstrip()
        count /= 1000
    return f"{count:,.4g} P{unit}"
