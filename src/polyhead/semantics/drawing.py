"""A mask as a picture: rows are queries, columns are keys, █ is visible and · is not."""

from __future__ import annotations

import torch

from polyhead._utils.svg import ACCENT, PAPER, QUIET, element, image, squares
from polyhead.semantics.masks import Mask
from polyhead.semantics.tokens import Tokens

MOST = 64
"""Most rows and columns; larger masks are sampled."""

_SIDE, _EDGE = 16, 4


def draw_mask(
    mask: Mask | None, queries: int, keys: int | None = None, *, svg: bool = False
) -> str:
    """Draws which queries see which keys; the last query lines up with the last key.

    Args:
        mask: A mask expression, or None: everything is visible.
        queries: Number of queries T.
        keys: S; default T.
        svg: An SVG image instead of text, on a ground of its own, light or dark, which reads on
            any page.

    Returns:
        Lines of text, a row per query, one block per batch row (and head) that the mask tells
        apart; or one SVG image of the first.

    Raises:
        ValueError: No queries or keys, or a mask that does not fit so many.
    """
    keys = queries if keys is None else keys
    if queries < 1 or keys < 1:
        raise ValueError(f"draw_mask needs at least one query and key: got {queries} and {keys}")
    allowed = torch.ones(1, 1, queries, keys, dtype=torch.bool, device="cpu")
    if mask is not None:
        q, k = Tokens.of(queries, shift=keys - queries), Tokens.of(keys)
        drawn = mask.visible(q, k, torch.device("cpu"))
        mask.check(drawn.shape[0], drawn.shape[1], queries, keys)
        allowed = drawn.expand(*drawn.shape[:2], queries, keys)
    rows = (
        torch.linspace(0, queries - 1, min(queries, MOST), dtype=torch.float32, device="cpu")
        .round()
        .long()
    )
    columns = (
        torch.linspace(0, keys - 1, min(keys, MOST), dtype=torch.float32, device="cpu")
        .round()
        .long()
    )
    pictures = allowed[:, :, rows][..., columns].tolist()
    return (
        _svg(pictures[0][0], "everything is visible" if mask is None else repr(mask))
        if svg
        else "\n\n".join(
            "\n".join("".join("█" if seen else "·" for seen in row) for row in picture)
            for heads in pictures
            for picture in heads
        )
    )


def _svg(picture: list[list[bool]], title: str) -> str:
    """A square for each pair, dark where it is visible."""
    rows, columns = len(picture), len(picture[0])
    width, height = columns * _SIDE, rows * _SIDE
    seen = [(y, x) for y, row in enumerate(picture) for x, value in enumerate(row) if value]
    lines = "".join(f"M{x * _SIDE} 0v{height}" for x in range(1, columns))
    lines += "".join(f"M0 {y * _SIDE}h{width}" for y in range(1, rows))
    return image(
        (-_EDGE, -_EDGE, width + 2 * _EDGE, height + 2 * _EDGE),
        element("rect", width=width, height=height, fill=QUIET),
        element("path", d=squares(seen, _SIDE), fill=ACCENT),
        element("path", d=lines, stroke=PAPER),
        title=title,
        paper=PAPER,
        sized=True,
    )
