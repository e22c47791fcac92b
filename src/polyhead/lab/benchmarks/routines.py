"""The routines of ``polyhead bench`` by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from polyhead._utils.checks import meant
from polyhead.errors import InputError
from polyhead.lab.benchmarks import (
    attention,
    beams,
    gpu_peers,
    memory,
    model,
    overhead,
    sentences,
    serving,
    speech,
    training,
    watched,
)
from polyhead.lab.benchmarks.attention import FLEX, MODULE, ONNX, SDPA, X_TRANSFORMERS
from polyhead.lab.benchmarks.case import Case, Settings, device_seconds
from polyhead.lab.benchmarks.peers import GEMMA3, HTTP, MINILM, ONNX_MODELS, SMOLLM2, WHISPER


@dataclass(frozen=True)
class Routine:
    """A group of cases, and the peers that some of them are compared with.

    Attributes:
        gpu_peers: On a GPU; None where it is measured on a CPU only.
        long_from: The least length that counts where lengths are summed up (``section``).
    """

    cases: Callable[[Settings], Iterator[Case]]
    peers: tuple[str, ...]
    gpu_peers: tuple[str, ...] | None = None
    long_from: int = 0

    def drawn(self, settings: Settings) -> Iterator[Case]:
        """The cases, on the device of the settings."""
        if settings.device == "cpu":
            yield from self.cases(settings)
            return
        cases = iter(self.cases(settings))
        while True:
            with torch.device(settings.device):  # only while they are made: it costs every call
                case = next(cases, None)
            if case is None:
                return
            gauge = device_seconds if settings.device.startswith("cuda") else case.gauge
            yield replace(case, gauge=gauge)

    def meets(self, settings: Settings) -> tuple[str, ...]:
        """Names of the peers that some case is compared with."""
        return self.peers if settings.device == "cpu" else self.gpu_peers or ()

    @property
    def summary(self) -> str:
        """The first sentence of the routine's docstring."""
        return (self.cases.__doc__ or "").splitlines()[0]


def _calls(cases: Callable[[Settings], Iterator[Case]], *peers: str, long_from: int = 0) -> Routine:
    """Of attention alone."""
    on_gpu = (*(name for name in peers if name != ONNX), *gpu_peers.NAMES)
    return Routine(cases, peers, on_gpu, long_from)


ROUTINES = {
    "prefill": _calls(attention.prefill, SDPA, MODULE, X_TRANSFORMERS, FLEX, long_from=2048),
    "decode": _calls(attention.decode, SDPA, ONNX, long_from=4096),
    "chunk": _calls(attention.chunk, SDPA),
    "window": _calls(attention.window, SDPA, FLEX),
    "features": _calls(attention.features, SDPA, FLEX),
    "mla": _calls(attention.mla, SDPA),
    "backward": _calls(attention.backward, SDPA),
    "growth": _calls(attention.growth, SDPA),
    "overhead": Routine(overhead.cases, (SDPA,)),
    "model": Routine(
        model.cases,
        (SMOLLM2, GEMMA3, "transformers", "llama.cpp"),
        (SMOLLM2, GEMMA3, "transformers"),
    ),
    "serving": Routine(serving.cases, (SMOLLM2, "llama.cpp", "transformers", HTTP)),
    "sentences": Routine(sentences.cases, (MINILM, "transformers", ONNX_MODELS)),
    "speech": Routine(speech.cases, (WHISPER, speech.CTRANSLATE2, "transformers")),
    "beams": Routine(beams.cases, ("transformers", SMOLLM2)),
    "memory": Routine(memory.cases, (SDPA,)),
    "train": Routine(training.cases, (training.TRANSFORMERS, SDPA)),
    "statistics": Routine(watched.cases, (), ()),
}


def chosen(names: Sequence[str], device: str = "cpu") -> dict[str, Routine]:
    """The routines of these names, in the order of ``ROUTINES``; without names all of them.

    Args:
        device: Elsewhere than on the CPU only calls of attention and whole models are measured.

    Raises:
        InputError: There is no such routine, here or on that device; the message lists those
            there are.
    """
    able = [
        name for name, each in ROUTINES.items() if each.gpu_peers is not None or device == "cpu"
    ]
    for name in names:
        if name not in ROUTINES:
            raise InputError(
                f"unknown routine {name!r}{meant(name, ROUTINES)}: routines are "
                f"{', '.join(ROUTINES)}"
            )
        if name not in able:
            raise InputError(
                f"routine {name!r} is measured on a CPU only: on {device} give some of "
                f"{', '.join(able)}, or none"
            )
    return {name: ROUTINES[name] for name in able if not names or name in names}
