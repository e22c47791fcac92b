"""The requests that wait for room, by age.

The oldest that has room starts. So one that needs little may pass older ones that wait for much,
but only ``PASSES`` times any of them: then all behind it wait until it has started, and what others
give back is room for it. None waits for ever, as the live ones end.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import TypeVar

from polyhead.serving.row import Row

PASSES = 16
"""Times that later requests start before one that waits; as many behind the oldest are tried."""

_Found = TypeVar("_Found")


class Waiting:
    """A queue whose rows keep their place by age, wherever they come back from."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def add(self, row: Row) -> None:
        """Queues a row: the last, or in its old place where it has been here before."""
        row.number = row.number or next(self._numbers)
        insort(self._rows, row, key=lambda each: each.number)

    def remove(self, row: Row) -> None:
        """Takes a row out that does not start."""
        self._rows.remove(row)

    def start(self, room_for: Callable[[Row], _Found | None]) -> tuple[Row, _Found] | None:
        """Takes out the oldest row that may start and has room.

        Args:
            room_for: What a row starts with; None where there is no room.

        Returns:
            It, and what it starts with; None where there is none.
        """
        for place, row in enumerate(islice(self._rows, 1 + PASSES)):
            if (found := room_for(row)) is not None:
                for older in self._rows[:place]:
                    older.passed += 1
                del self._rows[place]
                return row, found
            if row.passed >= PASSES:
                break
        return None
