"""The numbers of a mask: whole, checked, one for all batch rows or one for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.semantics.component import same
from polyhead.semantics.masks.algebra import Visibility
from polyhead.semantics.tokens import Span, is_traced


def below(keys: Span | None, bound: Span | None) -> Visibility:
    if keys is None or bound is None:
        return Visibility.SOME
    if keys.high < bound.low:
        return Visibility.ALL
    return Visibility.NONE if keys.low >= bound.high else Visibility.SOME


def short(numbers: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(str(n) for n in numbers[:most])
    return f"[{shown}, … {len(numbers)} in all]" if len(numbers) > most else f"[{shown}]"


class PerRow:
    """A whole number for all batch rows, or one for each."""

    def __init__(self, name: str, value: int | Sequence[int] | Tensor) -> None:
        self.name = name
        self.values: Tensor | list[int]
        self.span: Span | None = None
        if isinstance(value, Tensor):
            if value.ndim > 1 or value.dtype.is_floating_point or value.dtype == torch.bool:
                raise ValueError(
                    f"{name} must be a whole number or one per batch row, [B]: got {value.dtype} "
                    f"of shape {list(value.shape)}"
                )
            self.values = value.reshape(-1)
            if is_traced(value):
                return
            numbers = self.values.tolist()
        else:
            numbers = [*value] if isinstance(value, Sequence) else [value]
            self.values = numbers = [check_int(name, n, least=0) for n in numbers]
        if not numbers or min(numbers) < 0:
            raise ValueError(
                f"{name} must be at least 0, one number or one per batch row: got {value}"
            )
        self.span = Span(min(numbers), max(numbers))

    def tensor(self, device: torch.device) -> Tensor:
        """``[1 or B]``."""
        return torch.as_tensor(self.values, device=device)

    def of_rows(self, rows: Sequence[int]) -> Tensor | list[int]:
        """The numbers of some batch rows, for a ``PerRow`` of them."""
        if len(self.values) == 1:
            return self.values
        if isinstance(self.values, Tensor):
            return self.values[list(rows)]
        return [self.values[row] for row in rows]

    def check(self, batch: int) -> None:
        if 1 != len(self.values) != batch:
            raise ValueError(
                f"{self.name} must be one number or one per batch row: got {len(self.values)} "
                f"for batch {batch}"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerRow) and same(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]  # its tensor can change

    def __repr__(self) -> str:
        numbers = self.values if isinstance(self.values, list) else None
        if numbers is None:
            return "tensor" if self.span is None else f"{self.span.low}..{self.span.high}"
        return str(numbers[0]) if len(numbers) == 1 else short(numbers)
