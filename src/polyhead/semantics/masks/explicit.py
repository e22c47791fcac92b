"""Masks that are a tensor, with its polarity said: Keep (True: may attend) and Drop (True: not)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead.semantics.masks.algebra import Mask, Range
from polyhead.semantics.pairs import PairExpr, QueryKeyPairs
from polyhead.semantics.tokens import Tokens


class Keep(Mask, arguments={"mask": Tensor}):
    """An explicit mask: True where the query may attend.

    Args:
        mask: bool, broadcasts to ``[B, H, T, S]``; rows and columns are the indexes of this
            call's q and k.

    Raises:
        TypeError: Not a bool tensor.
    """

    compares = "indexes"

    def __init__(self, mask: Tensor) -> None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = f"{mask.dtype} tensor" if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(
                f"{type(self).__name__} takes a bool tensor: got a {got}; an additive float mask "
                "is a bias"
            )
        if not 1 <= mask.ndim <= 4:
            raise ValueError(
                f"{type(self).__name__} takes 1 to 4 dimensions that broadcast to [B, H, T, S]: "
                f"got shape {list(mask.shape)}"
            )
        self.mask = mask[(None,) * (4 - mask.ndim)]

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        return of.of_pair(self.mask)

    def range(self, q: Tokens, k: Tokens, device: torch.device) -> Range:
        return Range(None, None, self.visible(q, k, device))

    def made_for(self) -> tuple[int, int]:
        queries, keys = self.mask.shape[-2:]
        return queries, keys

    def of_heads(self, heads: Sequence[int]) -> Keep:
        return type(self)(of_heads(self.mask, heads))

    def of_tokens(self, queries: slice, keys: slice) -> Keep:
        return type(self)(of_tokens(self.mask, queries, keys))

    def of_rows(self, rows: Sequence[int]) -> Keep:
        return self if len(self.mask) == 1 else type(self)(self.mask[list(rows)])

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        check_broadcast(type(self).__name__, self.mask, (batch, heads, queries, keys))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.mask.shape)})"


class Drop(Keep, arguments={"mask": Tensor}):
    """An explicit mask of the other polarity, that of torch's ``key_padding_mask``.

    Args:
        mask: bool, True where the query may NOT attend; as in ``Keep``.
    """

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        hidden = super().rule(of)
        return lambda pair: ~hidden(pair)

    range = Keep.range  # a class with a rule of its own inherits no shortcut


def of_heads(tensor: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of a 4-D tensor that broadcasts to ``[B, H, T, S]``; a view where they adjoin."""
    if tensor.shape[1] == 1:
        return tensor
    if list(heads) == list(range(heads[0], heads[0] + len(heads))):
        return tensor.narrow(1, heads[0], len(heads))
    return tensor[:, list(heads)]


def of_tokens(tensor: Tensor, queries: slice, keys: slice) -> Tensor:
    """Some rows and columns of a 4-D tensor that broadcasts to ``[B, H, T, S]``; a view."""
    if tensor.shape[-2] != 1:
        tensor = tensor[:, :, queries]
    return tensor if tensor.shape[-1] == 1 else tensor[..., keys]


def check_broadcast(name: str, tensor: Tensor, shape: tuple[int, int, int, int]) -> None:
    """Raises ValueError unless 4-D ``tensor`` broadcasts to ``shape``."""
    if any(1 != have != want for have, want in zip(tensor.shape, shape, strict=True)):
        raise ValueError(
            f"{name} must broadcast to [B, H, T, S] = {list(shape)}: got {list(tensor.shape)}"
        )
