"""A mask as a picture: rows are queries, columns are keys, █ is visible and · is not."""

from __future__ import annotations

import torch

from polyhead.semantics.masks import Mask
from polyhead.semantics.tokens import Tokens

MOST = 64
"""Larger sides are thinned out to this many rows and columns."""


def draw(mask: Mask | None, queries: int, keys: int | None = None, *, svg: bool = False) -> str:
    """Draws who may look at whom; the last query lines up with the last key.

    Args:
        mask: A mask expression, or None: everything is visible.
        queries: T.
        keys: S; default T.
        svg: An SVG image instead of text.

    Returns:
        Lines of text, a row per query, one block per batch row (and head) that the mask tells
        apart; or one SVG image of the first.

    Raises:
        ValueError: No queries or keys, or a mask that does not fit so many.
    """
    keys = queries if keys is None else keys
    if queries < 1 or keys < 1:
        raise ValueError(f"draw needs at least one query and key: got {queries} and {keys}")
    allowed = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if mask is not None:
        q, k = Tokens.of(queries, shift=keys - queries), Tokens.of(keys)
        drawn = mask.visible(q, k, torch.device("cpu"))
        mask.check(drawn.shape[0], drawn.shape[1], queries, keys)
        allowed = drawn.expand(*drawn.shape[:2], queries, keys)
    rows = torch.linspace(0, queries - 1, min(queries, MOST)).round().long()
    columns = torch.linspace(0, keys - 1, min(keys, MOST)).round().long()
    pictures = allowed[:, :, rows][..., columns].tolist()
    return (
        _svg(pictures[0][0])
        if svg
        else "\n\n".join(
            "\n".join("".join("█" if seen else "·" for seen in row) for row in picture)
            for heads in pictures
            for picture in heads
        )
    )


def _svg(picture: list[list[bool]], side: int = 10) -> str:
    """One square per visible pair, in the colour of the text around it."""
    squares = "".join(
        f"M{x * side} {y * side}h{side - 1}v{side - 1}h{1 - side}z"
        for y, row in enumerate(picture)
        for x, seen in enumerate(row)
        if seen
    )
    width, height = len(picture[0]) * side, len(picture) * side
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f'<rect width="{width}" height="{height}" fill="none" stroke="currentColor"/>'
        f'<path d="{squares}" fill="currentColor"/></svg>\n'
    )
