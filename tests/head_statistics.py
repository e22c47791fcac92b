"""Statistics of heads by their definitions, from weights that are there in full: an oracle."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NAMES = (
    "entropy",
    "first_token",
    "previous_token",
    "self",
    "mean_distance",
    "max_weight",
)


def head_statistics(weights: npt.NDArray[np.floating]) -> dict[str, npt.NDArray[np.float32]]:
    """Means over the queries after the first that see anything, float32 ``[L, H]``; NaN without."""
    layers, heads = weights.shape[:2]
    found = np.full((len(NAMES), layers, heads), np.nan, dtype=np.float32)
    for layer, head in np.ndindex(layers, heads):
        rows = [
            (q, row.astype(float)) for q, row in enumerate(weights[layer, head]) if q and row.any()
        ]
        if rows:
            found[:, layer, head] = np.mean([_of_row(q, row) for q, row in rows], axis=0)
    return dict(zip(NAMES, found, strict=True))


def _of_row(query: int, row: npt.NDArray[np.float64]) -> list[float]:
    distances = np.abs(query - np.arange(len(row)))
    seen = row[row > 0]
    return [
        float(-(seen * np.log(seen)).sum()),
        row[0],
        row[query - 1],
        row[query],
        float((row * distances).sum()),
        row.max(),
    ]
