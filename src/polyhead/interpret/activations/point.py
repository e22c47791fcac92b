"""One activation: what is asked of it, and what it was.

What is asked of an activation happens in the order in which it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from polyhead.errors import InputError

if TYPE_CHECKING:
    from polyhead.interpret.activations.tracing import Trace

Change = Callable[[Tensor], Tensor | None]
Install = Callable[["Trace", "Point"], None]


class Saved:
    """What an activation was, once the model has run.

    Attributes:
        name: The activation's name.
    """

    def __init__(self, name: str, *, all_calls: bool = False) -> None:
        self.name, self._all = name, all_calls
        self._kept: list[Tensor | Callable[[], Tensor]] = []

    @property
    def value(self) -> Tensor:
        """What it was in the latest call.

        Raises:
            InputError: The model has not run.
        """
        if not self._kept:
            raise InputError(
                f"nothing was seen of {self.name}: run the model inside `with ph.trace(model) as "
                "t:`, after save()"
            )
        return self._made(len(self._kept) - 1)

    @property
    def values(self) -> list[Tensor]:
        """What it was in each call, with ``save(all_calls=True)``; else in the latest alone."""
        return [self._made(index) for index in range(len(self._kept))]

    def keep(self, value: Tensor | Callable[[], Tensor]) -> None:
        """Takes the activation of a call, or what makes it when it is first asked for."""
        if not self._all:
            self._kept.clear()
        self._kept.append(value)

    def _made(self, index: int) -> Tensor:
        kept = self._kept[index]
        if not isinstance(kept, Tensor):
            kept = self._kept[index] = kept()
        return kept

    def __repr__(self) -> str:
        if not self._kept:
            return f"Saved({self.name}, not seen yet)"
        kept = self._kept[-1]
        return f"Saved({self.name}, {list(kept.shape) if isinstance(kept, Tensor) else 'seen'})"


class Point:
    """One activation of a model, while a trace is open; what is asked of it happens in order.

    Attributes:
        name: Its name, ``layers.5.mlp.out``.
        edits: Whether something changes it.
    """

    def __init__(self, trace: Trace, name: str, install: Install) -> None:
        self.name, self.edits = name, False
        self._trace, self._install = trace, install
        self._asked: list[Saved | Change] = []

    def save(self, *, all_calls: bool = False) -> Saved:
        """Keeps the activation, as it is after the edits asked for so far.

        Args:
            all_calls: Of every call (in generation, every step); else of the latest.
        """
        saved = Saved(self.name, all_calls=all_calls)
        self._ask(saved)
        return saved

    def edit(self, change: Change) -> None:
        """Puts ``change(activation)`` in its place; None leaves it.

        Args:
            change: Of the activation, which it must not change in place.
        """
        self.edits = True
        self._ask(change)

    def set(self, value: Tensor | float) -> None:
        """Puts ``value`` in its place.

        Args:
            value: What broadcasts to it.
        """

        def put(x: Tensor) -> Tensor:
            if not isinstance(value, Tensor):
                return x.new_full(x.shape, value)
            return value.to(x).expand(x.shape)

        self.edit(put)

    def _ask(self, wanted: Saved | Change) -> None:
        if not self._trace.is_open:
            raise InputError(f"the trace of {self.name} has ended: ask inside its `with` block")
        if not self._asked:
            self._install(self._trace, self)
        self._asked.append(wanted)

    @property
    def is_asked(self) -> bool:
        """Whether anything is asked of it."""
        return bool(self._asked)

    def passed(self, x: Tensor) -> Tensor:
        """The activation of a call behind all that is asked of it."""
        for wanted in self._asked:
            if isinstance(wanted, Saved):
                wanted.keep(x)
                continue
            changed = wanted(x)
            if changed is None:
                continue
            if changed.shape != x.shape:
                raise InputError(
                    f"an edit of {self.name} must keep its shape {list(x.shape)}: got "
                    f"{list(changed.shape)}"
                )
            x = changed
        return x

    def keep(self, make: Callable[[], Tensor]) -> None:
        """Gives what only saves what makes the activation, in place of the activation."""
        for wanted in self._asked:
            if isinstance(wanted, Saved):
                wanted.keep(make)

    def __repr__(self) -> str:
        return f"Point({self.name})"
