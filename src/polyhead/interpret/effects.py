"""Numbers by layer, head, position: what patching and attribution return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor

from polyhead.errors import UnsupportedError


@dataclass(frozen=True, eq=False)
class Effects:
    """Numbers along named axes.

    Attributes:
        values: As many dimensions as axes.
        axes: By name the labels along each dimension, in order: ``{"layer": (0, 1), …}``.
    """

    values: Tensor
    axes: Mapping[str, Sequence[Any]]

    def top(self, count: int = 10) -> list[tuple[Any, ...]]:
        """The entries of largest size, each its labels and its number."""
        flat = self.values.flatten()
        labels = [*product(*self.axes.values())]
        order = flat.abs().topk(min(count, len(flat))).indices.tolist()
        return [(*labels[i], float(flat[i])) for i in order]

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row per entry: a column per axis, and ``value``.

        Raises:
            UnsupportedError: pandas is not installed.
        """
        rows = zip(product(*self.axes.values()), self.values.flatten().tolist(), strict=True)
        return frame([(*labels, value) for labels, value in rows], [*self.axes, "value"])


def frame(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> Any:
    """A ``pandas.DataFrame``.

    Raises:
        UnsupportedError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise UnsupportedError("to_pandas needs pandas: pip install pandas") from error
    return pandas.DataFrame(rows, columns=list(columns))
