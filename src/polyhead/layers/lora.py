"""A projection with a low-rank change beside it, the same for all rows or one for each.

    y = W x + b + s · B A x,     A [R, in], B [out, R]

Hu et al. 2022. It is deliberately no ``nn.Linear``: fast paths and tools that read weights accept
exactly that class, so none can miss the change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyhead.errors import InputError, UnsupportedError
from polyhead.layers.exact import ExactType
from polyhead.layers.linear import WITH_CHANGE, linear, product
from polyhead.native import batch_invariant


class Change(NamedTuple):
    """A low-rank change of one projection.

    Attributes:
        down: A ``[R, in]``.
        up: B ``[out, R]``.
        scale: Factor s of the product.
    """

    down: Tensor
    up: Tensor
    scale: float

    def added(self, y: Tensor, x: Tensor, places: Tensor | None = None) -> Tensor:
        """``y + s · B A x``; the product is computed in the dtype of A and B.

        Args:
            y: ``[B, ..., out]``.
            x: ``[B, ..., in]``.
            places: Rows to which it is added; None: all.
        """
        with batch_invariant.elementwise():
            x = (x if places is None else x[places]).to(self.down.dtype)
        z = product(product(x, self.down, None), self.up, None)
        with batch_invariant.elementwise():
            z = (z * self.scale).to(y.dtype)
            return y + z if places is None else y.index_copy(0, places, y[places] + z)


class LoraLinear(nn.Module):
    """``base`` and the change beside it.

    Args:
        base: The frozen projection.
        down: LoRA's A, which reduces the features to the rank.
        up: LoRA's B, which expands the rank to the features.
        scale: Factor s of the low-rank product.
        dropout: Dropout probability of the inputs of A, when training.

    Attributes:
        active: Whether the change is added.
    """

    def __init__(
        self,
        base: nn.Linear,
        down: nn.Parameter,
        up: nn.Parameter,
        scale: float,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.base, self.down, self.up = base, down, up
        self.scale, self.dropout, self.active = scale, dropout, True

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``; the change is computed in the dtype of A and B."""
        y = linear(x, self.base)
        if not self.active:
            return y
        z = nn.functional.dropout(x.to(self.down.dtype), self.dropout, self.training)
        return Change(self.down, self.up, self.scale).added(y, z)

    @property
    def out_features(self) -> int:
        """Features of the output."""
        return self.base.out_features

    @property
    def weight(self) -> Tensor:
        """Raises: the base's weight lacks the change.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "this projection has an adapter beside its weight: call merge() of the adapter first"
        )

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """``base`` with the change added to its weight."""
        weight = self.base.weight
        change = self.up.float() @ self.down.float()
        weight.copy_((weight.float() + self.scale * change).to(weight.dtype))
        return self.base

    def extra_repr(self) -> str:
        return f"rank={len(self.down)}, scale={self.scale:g}, active={self.active}"


class ChosenRows(threading.local):
    """Which rows of a batch have which changes, in this thread.

    Attributes:
        names: Of the changes of each batch row, None for none; or one name for all rows.
    """

    def __init__(self) -> None:
        self.names: str | Sequence[str | None] = ()
        self._groups: dict[str, Tensor] = {}

    @contextmanager
    def chosen(self, names: str | Sequence[str | None]) -> Iterator[None]:
        """Chooses, within the block."""
        before = self.names, self._groups
        self.names, self._groups = names, {}
        try:
            yield
        finally:
            self.names, self._groups = before

    def groups(self, x: Tensor) -> Mapping[str, Tensor | None]:
        """Places of the rows of each name in x ``[B, ...]``; None: all rows."""
        if isinstance(self.names, str):
            return {self.names: None}
        if self.names and len(self.names) != len(x):
            raise InputError(f"adapters were chosen for {len(self.names)} rows: got {len(x)}")
        if not self._groups:
            for name in dict.fromkeys(filter(None, self.names)):
                places = [place for place, each in enumerate(self.names) if each == name]
                self._groups[name] = torch.tensor(places, device=x.device)
        if len(self._groups) == 1 and None not in self.names:
            return dict.fromkeys(self._groups)
        return self._groups


class RowLora(nn.Module):
    """``base``, computed once for all rows, and beside it the change that each row has chosen.

    A row has the bits that it has in a ``LoraLinear``, within ``batch_invariant()``. Without
    gradients of the changes, which are no parameters.

    Args:
        base: An ``nn.Linear`` or ``QuantizedLinear``.
        changes: By name.
        rows: Which rows have which.
    """

    def __init__(self, base: nn.Module, changes: Mapping[str, Change], rows: ChosenRows) -> None:
        super().__init__()
        self.base, self.changes, self.rows = base, changes, rows

    @property
    def active(self) -> bool:
        """Whether a row has chosen one of the changes."""
        names = self.rows.names
        return names in self.changes if isinstance(names, str) else self._any(names)

    def _any(self, names: Sequence[str | None]) -> bool:
        return any(name in self.changes for name in names)

    @property
    def out_features(self) -> int:
        """Features of the output."""
        found: int = self.base.out_features  # type: ignore[assignment]
        return found

    def forward(self, x: Tensor) -> Tensor:
        """``[B, ..., in]`` to ``[B, ..., out]``.

        Raises:
            InputError: Another number of rows than changes were chosen for.
        """
        y = linear(x, self.base)
        for name, places in self.rows.groups(x).items():
            change = self.changes.get(name)
            if change is not None:
                y = change.added(y, x, places)
        return y

    def extra_repr(self) -> str:
        return f"changes={', '.join(self.changes)}"


def split_rows(
    network: Callable[[Tensor], Tensor], x: Tensor, *parts: nn.Module | None
) -> Tensor | None:
    """``network(x)``, the rows that have a change in its parts apart from the others.

    Those are computed by modules, which round between them, the others as they are alone.

    Args:
        network: What is computed of ``[B, ..., in]``.
        x: Its input.
        parts: Modules that it calls.

    Returns:
        None where all rows have a change, or none.
    """
    loras = [part for part in parts if type(part) is RowLora]
    if not loras or isinstance(names := loras[0].rows.names, str):
        return None
    changed = [any(name in part.changes for part in loras) for name in names]
    if all(changed) or not any(changed):
        return None
    loras[0].rows.groups(x)  # as many rows as names
    y: Tensor | None = None
    for kind in (True, False):
        places = [place for place, each in enumerate(changed) if each is kind]
        index = torch.tensor(places, device=x.device)
        with loras[0].rows.chosen([names[place] for place in places]):
            found = network(x[index])
        if y is None:
            y = found.new_empty(len(x), *found.shape[1:])
        y = y.index_copy(0, index, found)
    return y


WITH_CHANGE |= {kind: ExactType(kind) for kind in (LoraLinear, RowLora)}
