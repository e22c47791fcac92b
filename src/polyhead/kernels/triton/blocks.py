"""Sizes of tiles, as data: how many rows and keys a program takes, on how many warps.

A tile must fit into registers and shared memory, so it shrinks where heads and numbers are larger.
``tests/kernels/test_triton_compiled.py`` compiles each of these and looks for spilled registers: on
the compute capabilities of ``KNOWN`` there are none where ``fits`` says so.
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


KNOWN = frozenset({(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)})
"""Compute capabilities that the tiles are known to fit, so that ``auto`` may take them there."""
LARGEST = 512
"""Features of a head's first part, and of a value."""
LARGEST_LEARNT = 256
"""The same where gradients are asked for."""
LARGEST_STATE = 256
"""Key features of a state."""


class Table(NamedTuple):
    """Tiles of a generation of GPUs, by the size that ``_size`` says.

    Attributes:
        few: Tiles for numbers of 16 bits and up to 16 rows.
        many: The same for more rows.
        kept: More rows beside an explicit mask, whose bytes take registers too.
        few_codes: As ``few``, of keys and values in codes, whose scales take registers too.
        many_codes: Tile for many rows over codes.
        gradients: Tiles of both backward passes.
        busy_gradients: Where pairs have a bias or dropout: the pass over keys, that over queries.
        latent: Tiles for sizes above 256, by bytes of a number.
        float32: Tiles of the forward pass in float32.
        float32_gradients: Both backward passes.
        tails: Whether gradients take a head in two parts, or in one as large as both.
    """

    few: dict[int, Tiles]
    many: dict[int, Tiles]
    kept: dict[int, Tiles]
    few_codes: dict[int, Tiles]
    many_codes: dict[int, Tiles]
    gradients: dict[int, Tiles]
    busy_gradients: dict[int, tuple[Tiles, Tiles]]
    latent: dict[int, Tiles]
    float32: dict[int, Tiles]
    float32_gradients: dict[int, Tiles]
    tails: bool


_FEW = {64: Tiles(16, 64, 4, 3), 128: Tiles(16, 64, 4, 3), 256: Tiles(16, 32, 8, 2)}
_FEW_CODES = {64: Tiles(16, 32, 4, 2), 128: Tiles(16, 32, 4, 2), 256: Tiles(16, 32, 8, 2)}
_LATENT = {2: Tiles(16, 16, 8, 1), 4: Tiles(16, 16, 8, 1)}
_FLOAT32 = {64: Tiles(32, 32, 4, 2), 128: Tiles(16, 16, 8, 1), 256: Tiles(16, 16, 8, 1)}
_HOPPER = Table(
    few=_FEW,
    many={64: Tiles(128, 64, 8, 3), 128: Tiles(128, 64, 8, 2), 256: Tiles(64, 16, 8, 2)},
    kept={64: Tiles(128, 32, 8, 2), 128: Tiles(64, 32, 8, 2), 256: Tiles(64, 16, 8, 2)},
    few_codes=_FEW_CODES,
    many_codes={64: Tiles(128, 64, 8, 3), 128: Tiles(128, 32, 8, 2), 256: Tiles(32, 16, 8, 2)},
    gradients={64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 8, 1), 256: Tiles(32, 32, 8, 1)},
    busy_gradients={
        64: (Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1)),
        128: (Tiles(32, 64, 8, 1), Tiles(64, 64, 8, 1)),
        256: (Tiles(32, 32, 8, 1), Tiles(32, 16, 8, 1)),
    },
    latent=_LATENT,
    float32=_FLOAT32,
    float32_gradients=_FLOAT32 | {64: Tiles(32, 32, 8, 2)},
    tails=True,
)
_AMPERE = Table(
    few=_FEW,
    many={64: Tiles(128, 32, 8, 2), 128: Tiles(64, 64, 8, 2), 256: Tiles(32, 32, 8, 2)},
    kept={64: Tiles(128, 16, 8, 2), 128: Tiles(64, 32, 8, 2), 256: Tiles(32, 16, 8, 2)},
    few_codes=_FEW_CODES,
    many_codes={64: Tiles(128, 32, 8, 2), 128: Tiles(32, 32, 8, 2), 256: Tiles(16, 16, 8, 2)},
    gradients={64: Tiles(64, 32, 4, 2), 128: Tiles(64, 32, 8, 1), 256: Tiles(32, 32, 8, 1)},
    busy_gradients={
        64: (Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2)),
        128: (Tiles(64, 32, 8, 1), Tiles(64, 32, 8, 1)),
        256: (Tiles(32, 32, 8, 1), Tiles(32, 16, 8, 1)),
    },
    latent=_LATENT,
    float32=_FLOAT32,
    float32_gradients=_FLOAT32,
    tails=False,
)
"""A program of compute capability 8.6, 8.9 and 12.0 has at most 99 KiB of shared memory."""
_BLACKWELL = _HOPPER._replace(
    kept=_HOPPER.kept | {64: Tiles(128, 16, 8, 2)},
    busy_gradients=_HOPPER.busy_gradients | {128: (Tiles(32, 64, 8, 1), Tiles(64, 32, 8, 1))},
)
"""Compute capability 10: ``tcgen05`` keeps sums in memory of its own, and loads cost registers."""

_CONSUMER_BLACKWELL = _AMPERE._replace(
    many=_AMPERE.many | {128: Tiles(64, 32, 8, 2)},
    kept={64: Tiles(128, 16, 8, 2), 128: Tiles(64, 16, 8, 2), 256: Tiles(16, 16, 8, 2)},
    gradients=_AMPERE.gradients | {64: Tiles(64, 32, 8, 2)},
    busy_gradients=_AMPERE.busy_gradients | {256: (Tiles(32, 32, 8, 1), Tiles(16, 16, 8, 1))},
)
"""Compute capability 12: shared memory as in 8.9, and some kernels take more registers."""


def table_of(capability: tuple[int, int]) -> Table:
    """The tiles for devices of a compute capability; for unknown ones those of the one before."""
    tables = {(8, 0): _AMPERE, (9, 0): _HOPPER, (10, 0): _BLACKWELL, (12, 0): _CONSUMER_BLACKWELL}
    return tables[max((least for least in tables if least <= capability), default=(8, 0))]


def parts_of(key_dim: int, value_dim: int) -> Parts:
    """The powers of two that hold a key and a value."""
    head = max(16, 1 << (key_dim.bit_length() - 1))
    tail = max(16, power_above(key_dim - head)) if key_dim > head else 0
    return Parts(head, tail, max(16, power_above(value_dim)))


def forward_tiles(
    table: Table,
    parts: Parts,
    itemsize: int,
    rows: int,
    *,
    busy: bool,
    kept: bool = False,
    coded: bool = False,
) -> Tiles:
    """Tile sizes of the forward pass over so many rows of a group.

    Args:
        table: The device's table of tiles.
        parts: The powers of two that hold a key and a value.
        itemsize: Bytes of a number of the query.
        rows: Tokens times query heads of a group.
        busy: Whether pairs have a bias or dropout, whose numbers take registers too.
        kept: Whether there is an explicit mask.
        coded: Whether keys and values are codes.
    """
    size, few = _size(parts), rows <= 16
    if size > 256:
        tiles = table.latent[itemsize]
    elif itemsize == 4:
        tiles = table.float32[size]
    elif few:
        return (table.few_codes if coded else table.few)[size]
    else:
        tiles = (table.kept if kept else table.many_codes if coded else table.many)[size]
    if few:
        return tiles._replace(rows=16)
    return tiles._replace(keys=max(16, tiles.keys // 2)) if busy else tiles


def gradient_parts(table: Table, parts: Parts) -> Parts:
    """The parts of a head where gradients are computed."""
    if table.tails or not parts.tail:
        return parts
    return Parts(power_above(parts.head + parts.tail), 0, parts.value)


def gradient_tiles(table: Table, parts: Parts, itemsize: int, *, busy: bool) -> tuple[Tiles, Tiles]:
    """Tile sizes of the gradients: of the pass over keys, and of that over queries."""
    size = _size(parts)
    if itemsize == 4:
        return (table.float32_gradients[size],) * 2
    return table.busy_gradients[size] if busy else (table.gradients[size],) * 2


def fits(parts: Parts, itemsize: int, *, coded: bool = False) -> bool:
    """Whether such heads are known to compile without spilling registers, which ``auto`` asks."""
    if itemsize == 4:
        return _size(parts) <= 64
    return _size(parts) <= 256 or (parts == Parts(512, 64, 512) and not coded)


def splits_of(programs: int, keys: int, tile: int, processors: int) -> tuple[int, int]:
    """Into how many shares the keys are cut, so that every processor has work, and their size.

    Args:
        programs: Programs without a cut.
        keys: Number of keys S.
        tile: Keys of a tile; a split has whole tiles, at least 4.
        processors: Processors of the device.
    """
    wanted = max(1, min(2 * processors // max(1, programs), keys // (4 * tile), 128))
    share = _upwards(_upwards(keys, wanted), tile) * tile
    return _upwards(keys, share), share


LARGEST_STATE = 256
"""Features of a state's keys."""


class StateTiles(NamedTuple):
    """How a state is cut.

    Attributes:
        key: Its key size as a power of two.
        part: Key features of a product, where it goes from chunk to chunk.
        decayed: Key features whose own decays a program holds for all pairs of tokens.
        value: Values of a program that goes from token to token.
        chunk: Tokens of a chunk.
        chunk_value: Values of a program that goes from chunk to chunk.
    """

    key: int
    part: int
    decayed: int
    value: int
    chunk: int
    chunk_value: int


def state_tiles(key_dim: int, value_dim: int, *, by_feature: bool = False) -> StateTiles:
    """Tiles of a state, whose key features may have decays of their own.

    By the delta rule a chunk of more tokens than key features loses digits.
    """
    key = max(16, power_above(key_dim))
    value = min(32, power_above(value_dim))
    chunk = 32 if 32 <= key <= (64 if by_feature else 128) else 16
    return StateTiles(key, 16, min(64, key), value, chunk, 16)


def state_parts(key_dim: int, value_dim: int) -> Parts:
    """What is compiled for a state: its key size, and values of a program."""
    tiles = state_tiles(key_dim, value_dim)
    return Parts(tiles.key, 0, tiles.value)


def _size(parts: Parts) -> int:
    """The size that tables have for such heads."""
    return max(64, power_above(parts.head + parts.tail), parts.value)


def _upwards(n: int, by: int) -> int:
    return -(-n // by)


def power_above(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
