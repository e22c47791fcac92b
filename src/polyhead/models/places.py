"""A call with a cache: where its tokens stand, and the cache as it was, should the call fail.

Shape letters: B batch, T tokens, N tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.caches import ModelCache
from polyhead.config import TransformerConfig
from polyhead.layers.attention_parts import ragged_positions
from polyhead.layers.packed import PackedRows
from polyhead.models.inputs import check_cache


class Places(NamedTuple):
    """Where the tokens of a call stand.

    Attributes:
        start: Tokens in the cache, of its longest row.
        before: Tokens in the cache of each row; none without one.
        positions: ``[T]`` or ``[B, T]``, of packed rows ``[1, N]``; None: from ``start`` on.
        rows: Of packed rows; None: T tokens of each.
    """

    start: int
    before: list[int]
    positions: Tensor | None
    rows: PackedRows | None


def places_of_call(
    config: TransformerConfig,
    ids: Tensor,
    device: torch.device,
    *,
    cache: ModelCache | None,
    counts: Sequence[int] | None,
    positions: Tensor | None = None,
    beside: tuple[object, ...] = (),
) -> Places:
    """Where the tokens of a call stand, once its cache and its counts are checked.

    Args:
        config: Configuration of the model.
        ids: ``[B, T]``, of packed rows ``[1, N]``.
        device: Of the model.
        cache: Cache of the caller, or None.
        counts: Tokens of each row, where those are packed.
        positions: Positions of the caller, or None.
        beside: ``segments``, ``mask`` and ``last`` of the call.

    Raises:
        TypeError: A cache of another class, or counts that are not whole numbers.
        ValueError: As of ``check_counts``.
    """
    start, before = 0, []
    if cache is not None:
        check_cache(cache)
        start, before = cache.length, cache.lengths
        if positions is None and counts is None:
            positions = ragged_positions(cache.layers[0], ids)
    if counts is None:
        return Places(start, before, positions, None)
    lengths = check_counts(config, ids, counts, cache, (positions, *beside))
    rows = PackedRows(counts, lengths, device)
    return Places(start, before, rows.positions, rows)


def undo(cache: ModelCache | None, before: list[int]) -> None:
    """Takes back what a call has appended: interrupted between two layers, a cache would hold more
    tokens in some than in others."""
    if cache is not None:
        cache.truncate(before or 0)
        if cache.context is None:
            cache.reset_context()


def check_counts(
    config: TransformerConfig,
    ids: Tensor,
    counts: Sequence[int],
    cache: ModelCache | None,
    beside: tuple[object, ...],
) -> list[int]:
    """Checks the numbers of tokens that rows have in one call.

    Args:
        config: Configuration of the model.
        ids: ``[1, N]``, those of all rows.
        counts: Of each row.
        cache: Cache of the caller, or None.
        beside: ``positions``, ``segments``, ``mask`` and ``last`` of the call, or the first of
            them.

    Returns:
        Tokens of each row in the cache.

    Raises:
        TypeError: Counts that are not whole numbers.
        ValueError: Counts of other tokens or rows, or not a decoder's call with a cache alone.
    """
    if cache is None or config.kind != "decoder" or config.task is not None:
        got = "no cache" if cache is None else f"kind={config.kind!r}, task={config.task}"
        raise ValueError(f"counts are rows of a decoder's cache: got {got}")
    for name, given in zip(("positions", "segments", "mask", "last"), beside, strict=False):
        if given is not None:
            raise ValueError(f"counts and {name} do not go together: give one of them")
    numbers = [check_int("counts", count, least=1, error=ValueError) for count in counts]
    lengths = cache.lengths or [0] * len(numbers)
    if len(numbers) != len(lengths) or ids.ndim != 2 or ids.shape != (1, sum(numbers)):
        raise ValueError(
            f"counts must be of each row, and ids [1, sum(counts)]: got {len(numbers)} counts, "
            f"{sum(numbers)} in all, for {len(lengths)} rows and ids {list(ids.shape)}"
        )
    return lengths
