"""Launches of our Triton kernels in a repeated step, interpreted on a CPU, and their replay.

    TRITON_INTERPRET=1 pytest tests/generation/test_repeated_launches.py

Needs Triton. The recording holds torch's operations and the launches, in order, with their tensors.
"""

import os

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 interprets the kernels", allow_module_level=True)

from replaying import WAITING, Recording, Replayed
from test_captured_steps import FAMILIES, ordinary, running_of, tokens_of

from polyhead.generation.decoding import graphs
from polyhead.kernels.triton import kernel, launch

COUNT = 14


class Launch:
    """A kernel that notes its launches among the operations that are being recorded."""

    def __init__(self, kernel, notes):
        self.kernel, self.notes = kernel, notes

    def __getitem__(self, grid):
        return lambda *arguments, **named: self._launched(grid, arguments, named)

    def _launched(self, grid, arguments, named):
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        seen = next((mode for mode in modes if isinstance(mode, Recording)), None)
        with _disable_current_modes():
            self.kernel[grid](*arguments, **named)
        if seen is not None:
            self.notes.append(grid)
            seen.operations.append((Again(self.kernel, grid), arguments, named, ()))


class Again:
    """A launch as ``replaying`` runs an operation again."""

    class _schema:
        name, is_mutable = "a launch", True

    _overloadname = ""

    def __init__(self, kernel, grid):
        self.kernel, self.grid = kernel, grid

    def __call__(self, *arguments, **named):
        self.kernel[self.grid](*arguments, **named)


@pytest.fixture
def launches(monkeypatch):
    found = []
    monkeypatch.setattr(launch.forward, "attend", Launch(launch.forward.attend, found))
    monkeypatch.setattr(launch.merging, "merge", Launch(launch.merging.merge, found))
    # A recording watches operations, as no CUDA graph does.
    monkeypatch.setattr(kernel, "is_fake", lambda tensors: False)
    monkeypatch.setattr(kernel, "is_traced", lambda tensor: False)
    monkeypatch.setitem(graphs.MAKERS, "cpu", Replayed)
    monkeypatch.setattr(graphs, "_of_kernel", lambda model: None)
    Replayed.made.clear()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_launches_give_the_tokens_of_ordinary_steps(family, launches):
    model = FAMILIES[family]()
    # With more room the keys are split, and states merged.
    room = 1024 if family in ("sinks", "Llama, GQA") else 64
    running, first = running_of(model, capacity=room, kernel="triton")
    found = [*tokens_of(running, first, (), COUNT)]
    assert running.why is None
    assert found == ordinary(model, count=COUNT)
    (graph,) = Replayed.made
    assert graph.replays == COUNT - 2
    assert not graph.names & WAITING
    assert len(launches) >= len(model.layers)  # of one step: what is replayed notes nothing


def test_a_kernel_that_is_told_the_number_of_keys_by_the_host_would_be_seen(launches, monkeypatch):
    model = FAMILIES["Llama, GQA"]()
    running, first = running_of(model, kernel="triton")
    own = launch._arguments

    def told(*arguments):
        names = own(*arguments)
        keys = int(names["bounds"][1].max())
        return names | {"keys": keys, "bounds": None, "BOUNDS": ""}

    monkeypatch.setattr(launch, "_arguments", told)
    assert [*tokens_of(running, first, (), COUNT)] != ordinary(model, count=COUNT)
    assert running.why is None
