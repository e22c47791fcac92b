"""Damage to real inputs: bytes, JSON objects and text."""

from __future__ import annotations

import copy
import json
import struct
from random import Random
from typing import Any

NUMBERS = (
    *(0, 1, -1, 2, 3, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64),
    *(-(2**31), -(2**63), 10**40, 10**400, 0.0, -0.0, 0.5, -1.5, 1e-45, 1e308, -1e308, 1e-308),
    *(float("inf"), float("-inf"), float("nan")),
)
"""Where readers go wrong: nothing, ends of integers, and what is no number."""

MOST_TEXT = 4 << 20
"""Longer texts than these are no cases: making them takes longer than reading them."""

_TEXTS = (
    *("", " ", "\0", "\n", "a", "null", "../../etc/passwd", "/dev/zero", "☃" * 3, "\ud800"),
    *("x" * 5_000, "9" * 5_000, "%s%n{0}{{x}}", "<script>", "model.safetensors"),
)


def value(random: Random, depth: int = 0) -> Any:
    """Any value of JSON, most of them wrong wherever they stand."""
    kind = random.randrange(8 if depth < 3 else 6)
    if kind < 2:
        return random.choice(NUMBERS)
    if kind == 2:
        return random.choice((None, True, False))
    if kind == 3:
        return random.choice(_TEXTS)
    if kind == 4:
        return random.choice(([], {}, [[]], [None], {"": None}, [{}] * 3))
    if kind == 5:
        return random.randrange(-3, 4000)
    items = [value(random, depth + 1) for _ in range(random.randrange(4))]
    return items if kind == 6 else {str(random.choice(_TEXTS)): item for item in items}


def nested(random: Random) -> str:
    """JSON text that is nested deep."""
    depth = random.choice((10, 500, 5_000, 100_000))
    return random.choice(("[" * depth, "[" * depth + "]" * depth, '{"a":' * depth + "1"))


def json_object(random: Random, source: dict[str, Any]) -> dict[str, Any]:
    """A copy of a JSON object with some values changed, keys removed, added, renamed or moved."""
    found = copy.deepcopy(source)
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        holder: Any = found
        while holder:
            key = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            inside = holder[key]
            if isinstance(inside, dict | list) and inside and random.random() < 0.8:
                holder = inside
                continue
            _change(random, holder, key)
            break
    return found


def json_text(random: Random, source: dict[str, Any]) -> bytes:
    """The text of a damaged object, sometimes damaged as text too."""
    kind = random.random()
    changed = source if kind < 0.1 else json_object(random, source)
    # Numbers stand for themselves: Python's writer refuses integers of more than 4,300 digits.
    text = json.dumps(changed)
    if kind > 0.97:
        cut = random.randrange(len(text) + 1)
        return (text[:cut] + nested(random)).encode()
    if kind > 0.94:
        places = [at for at, letter in enumerate(text) if letter == ":"] or [0]
        at = random.choice(places) + 1
        return (text[:at] + random.choice(("9" * 5_000, "-", "1e9999", "NaN")) + text[at:]).encode()
    if kind > 0.91:  # a key that stands twice
        return ("{" + f'"{random.choice(list(source))}": 3, ' + text.lstrip("{")).encode()
    return data(random, text.encode()) if kind < 0.2 else text.encode()


def data(random: Random, source: bytes, start: int = 0) -> bytes:
    """Bytes with some changed, removed, repeated or inserted from ``start`` on."""
    found = bytearray(source)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        if len(found) <= start:
            break
        at, kind = random.randrange(start, len(found)), random.randrange(7)
        if kind < 2:
            found[at] = random.randrange(256)
        elif kind == 2:
            found[at] ^= 1 << random.randrange(8)
        elif kind == 3:
            whole = [number for number in NUMBERS if isinstance(number, int)]
            size, code = random.choice(((4, "<I"), (8, "<Q")))
            number = random.choice(whole) % (1 << 8 * size)
            found[at : at + size] = struct.pack(code, number)
        elif kind == 4:
            del found[at : at + random.choice((1, 2, 8, 100))]
        elif kind == 5:
            found[at:at] = found[at : at + random.choice((1, 8, 100))]
        else:
            found[at:at] = random.randbytes(random.choice((1, 4, 8)))
    if random.random() < 0.05:
        del found[random.randrange(len(found) + 1) :]
    return bytes(found)


def text(random: Random, source: str, words: tuple[str, ...]) -> str:
    """A text with parts removed, repeated, exchanged, or taken from ``words``."""
    found = source
    for _ in range(random.choice((1, 1, 2, 4, 8))):
        at = random.randrange(len(found) + 1)
        end = min(len(found), at + random.choice((0, 1, 3, 20)))
        kind = random.randrange(4)
        if kind == 0:
            found = found[:at] + found[end:]
        elif kind == 1:
            found = found[:end] + found[at:]
        else:
            found = found[:at] + random.choice(words) + found[end:]
    return found


def _change(random: Random, holder: Any, key: Any) -> None:
    kind = random.randrange(6)
    old = holder[key]
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(old, int | float) and not isinstance(old, bool):
        holder[key] = random.choice((old + 1, old - 1, -old, old * 2, old * 10**9, [old] * 3))
    elif kind == 2:
        size = len(json.dumps(old))
        count = min(random.choice((1, 3, 12, 1000)), 1 + 10**6 // size)
        # Copies: one object a thousand times would grow a thousandfold with the next change.
        holder[key] = [copy.deepcopy(old) for _ in range(count)]
    elif kind == 3 and isinstance(holder, dict):
        holder[random.choice((*_TEXTS, str(key).upper(), f"{key}_"))] = holder.pop(key)
    else:
        holder[key] = value(random)
