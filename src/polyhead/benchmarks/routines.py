"""The routines of ``polyhead bench`` by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from polyhead.benchmarks import attention, beams, memory, model, overhead, training, watched
from polyhead.benchmarks.attention import FLEX, MODULE, ONNX, SDPA, X_TRANSFORMERS
from polyhead.benchmarks.case import Case, Settings
from polyhead.benchmarks.peers import SMOLLM2
from polyhead.checks import meant
from polyhead.errors import InputError


@dataclass(frozen=True)
class Routine:
    """A group of cases, and the peers that some of them are compared with."""

    cases: Callable[[Settings], Iterator[Case]]
    peers: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The first sentence of the routine's docstring."""
        return (self.cases.__doc__ or "").splitlines()[0]


ROUTINES = {
    "prefill": Routine(attention.prefill, (SDPA, MODULE, X_TRANSFORMERS, FLEX)),
    "decode": Routine(attention.decode, (SDPA, ONNX)),
    "chunk": Routine(attention.chunk, (SDPA,)),
    "window": Routine(attention.window, (SDPA, FLEX)),
    "features": Routine(attention.features, (SDPA, FLEX)),
    "mla": Routine(attention.mla, (SDPA,)),
    "backward": Routine(attention.backward, (SDPA,)),
    "growth": Routine(attention.growth, (SDPA,)),
    "overhead": Routine(overhead.cases, (SDPA,)),
    "model": Routine(model.cases, (SMOLLM2, "transformers", "llama.cpp")),
    "beams": Routine(beams.cases, ("transformers", SMOLLM2)),
    "memory": Routine(memory.cases, (SDPA,)),
    "train": Routine(training.cases, (training.TRANSFORMERS, SDPA)),
    "statistics": Routine(watched.cases, ()),
}


def chosen(names: Sequence[str]) -> dict[str, Routine]:
    """The routines of these names, in the order of ``ROUTINES``; without names all of them.

    Raises:
        InputError: There is no such routine; the message lists those there are.
    """
    for name in names:
        if name not in ROUTINES:
            raise InputError(
                f"no routine {name!r}{meant(name, ROUTINES)}: give some of {', '.join(ROUTINES)}, "
                "or none"
            )
    return {name: each for name, each in ROUTINES.items() if not names or name in names}
