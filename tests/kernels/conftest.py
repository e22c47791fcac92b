"""Makes the oracle and the matrix importable, and tiles small enough that there are many."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 queries and 16 keys."""
    from polyhead.kernels import tiled

    monkeypatch.setattr(tiled, "_tile_sizes", lambda q, keys: (8, 16))
