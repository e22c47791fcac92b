"""Tiles small enough that there are many."""

import pytest


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 queries and 16 keys."""
    from polyhead.kernels import tiled

    monkeypatch.setattr(tiled, "_tile_sizes", lambda q, keys: (8, 16))
