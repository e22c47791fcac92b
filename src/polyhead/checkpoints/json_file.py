"""JSON files in and out, with errors that name the file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from polyhead._utils.paths import size_of
from polyhead.errors import CheckpointError, shortened

_MOST_BYTES = 32 << 20
"""Most bytes of a JSON file: ten times the longest known tensor index. Parsed, it takes about eight
times as much."""
_MOST_DIGITS = 1_000
"""Most digits of a number. Python's own limit is 4,300; real files have up to 31."""


def read_text(path: Path) -> str:
    """A file's text, at most 32 MiB of it.

    Raises:
        CheckpointError: the file is unreadable, larger, or not UTF-8.
    """
    try:
        if (size := size_of(path)) > _MOST_BYTES:
            raise CheckpointError(f"{path} has {size:,} bytes: at most {_MOST_BYTES:,} are read")
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is not UTF-8 text: byte {error.start} is not valid"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        CheckpointError: the file is unreadable, empty, not UTF-8, not JSON, or not an object.
    """
    text = read_text(path)
    if not text.strip():
        raise CheckpointError(f"{path} is empty")
    try:
        value = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object: got {type(value).__name__}")
    return value


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: The text is not JSON, is nested too deep, has a whole number of more than 1,000
            digits, or an object in which a key stands twice.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a whole number has {len(digits):,} digits")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"key {shortened(name)} stands twice in one object")
    return found


_DECODER = json.JSONDecoder(parse_int=_whole, object_pairs_hook=_object)


def write_json(path: Path, value: dict[str, Any] | list[Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
