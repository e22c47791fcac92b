"""Two processes for all tests of many: they start once, and import once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import World


@pytest.fixture(scope="session")
def two() -> Iterator[World]:
    with World(2) as world:
        yield world
