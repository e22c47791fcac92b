"""Sizes of tiles, as data: how many rows and keys a program takes, on how many warps.

A tile must fit into registers and shared memory, so it shrinks where heads and numbers are larger.
``tests/kernels/test_triton_compiled.py`` compiles each of these and looks for spilled registers: on
compute capability 9.0 there are none where ``fits`` says so.
"""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """How a pass is cut.

    Attributes:
        rows: Query rows of a tile, the heads of a group beside each other; at least 16.
        keys: Keys of a tile; at least 16.
        warps: Warps of 32 threads that share a program.
        stages: Tiles of keys that are on their way at a time.
    """

    rows: int
    keys: int
    warps: int
    stages: int


class Parts(NamedTuple):
    """A head size as powers of two: 576 is 512 + 64, 80 is 64 + 16.

    Attributes:
        head: The first features; at least 16, which a product needs.
        tail: The others, or 0.
        value: The size of values, rounded up.
    """

    head: int
    tail: int
    value: int


LARGEST = 512
"""Features of a head's first part, and of a value."""
LARGEST_LEARNT = 256
"""The same where gradients are asked for."""

_FEW_ROWS = {64: Tiles(16, 64, 4, 3), 128: Tiles(16, 64, 4, 3), 256: Tiles(16, 32, 4, 2)}
_MANY_ROWS = {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 64, 8, 2), 256: Tiles(64, 16, 8, 2)}
_LATENT = {2: Tiles(16, 16, 8, 1), 4: Tiles(16, 16, 8, 1)}
_GRADIENTS = {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 8, 1), 256: Tiles(32, 32, 8, 1)}
_FLOAT32 = {64: Tiles(32, 32, 4, 2), 128: Tiles(16, 16, 8, 1), 256: Tiles(16, 16, 8, 1)}


def parts_of(key_dim: int, value_dim: int) -> Parts:
    """The powers of two that hold a key and a value."""
    head = max(16, 1 << (key_dim.bit_length() - 1))
    tail = max(16, power_above(key_dim - head)) if key_dim > head else 0
    return Parts(head, tail, max(16, power_above(value_dim)))


def forward_tiles(parts: Parts, itemsize: int, rows: int, *, busy: bool) -> Tiles:
    """For the forward pass over so many rows of a group.

    Args:
        parts: Of head and value.
        itemsize: Bytes of a number.
        rows: Tokens times query heads of a group.
        busy: Whether pairs have a bias or dropout, whose numbers take registers too.
    """
    size = _size(parts)
    if size > 256:
        tiles = _LATENT[itemsize]
    else:
        tiles = _FLOAT32[size] if itemsize == 4 else _MANY_ROWS[size]
    if rows <= 16:
        return _FEW_ROWS[size] if itemsize == 2 and size <= 256 else tiles._replace(rows=16)
    return tiles._replace(keys=max(16, tiles.keys // 2)) if busy else tiles


def gradient_tiles(parts: Parts, itemsize: int, *, busy: bool) -> tuple[Tiles, Tiles]:
    """For the gradients: the pass over keys, and that over queries."""
    size = _size(parts)
    if itemsize == 4:
        return _FLOAT32[size], _FLOAT32[size]
    tiles = _GRADIENTS[size]
    if not busy or size == 64:
        return tiles, tiles
    return tiles._replace(rows=32), tiles._replace(keys=16) if size == 256 else tiles


def fits(parts: Parts, itemsize: int) -> bool:
    """Whether such heads are known to compile without spilling registers, which ``auto`` asks."""
    if itemsize == 4:
        return _size(parts) <= 64
    return _size(parts) <= 256 or parts == Parts(512, 64, 512)


def splits_of(programs: int, keys: int, tile: int, processors: int) -> tuple[int, int]:
    """Into how many shares the keys are cut, so that every processor has work, and their size.

    Args:
        programs: Programs without a cut.
        keys: S.
        tile: Keys of a tile; a share has whole tiles, at least 4.
        processors: Of the device.
    """
    wanted = max(1, min(2 * processors // max(1, programs), keys // (4 * tile), 128))
    share = _upwards(_upwards(keys, wanted), tile) * tile
    return _upwards(keys, share), share


def _size(parts: Parts) -> int:
    """The size that tables have for such heads."""
    return max(64, power_above(parts.head + parts.tail), parts.value)


def _upwards(n: int, by: int) -> int:
    return -(-n // by)


def power_above(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
