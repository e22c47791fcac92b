"""Writes the pictures of masks that docs/attention.md shows.

python tools/mask_pictures.py
"""

from __future__ import annotations

from pathlib import Path

import polyhead as ph

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
MASKS = {
    # name: mask, queries, keys
    "causal": (ph.Causal(), 8, 8),
    "causal-chunk": (ph.Causal(), 3, 8),
    "window": (ph.Causal() & ph.Window(3), 8, 8),
    "both-sides": (ph.Window(2, ahead=1), 8, 8),
    "prefix": (ph.Prefix(3) | ph.Causal(), 8, 8),
    "documents": (ph.Documents([3, 1, 4]) & ph.Causal(), 8, 8),
    "key-lengths": (ph.KeyLengths(5), 8, 8),
    "combined": ((ph.Prefix(2) | ph.Window(3)) & ph.Causal(), 8, 8),
}


def pictures() -> dict[str, str]:
    """The SVG of each mask, by the name of its file."""
    return {
        f"mask-{name}.svg": ph.draw_mask(mask, queries, keys, svg=True)
        for name, (mask, queries, keys) in MASKS.items()
    }


if __name__ == "__main__":
    for name, picture in pictures().items():
        (FOLDER / name).write_text(picture, encoding="utf-8")
        print(FOLDER / name)
