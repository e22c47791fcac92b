"""What a probe sees and an ablation changes is what its own thread or task runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from tiny import decoder

import polyhead as ph
from polyhead.interpret.contributions import Contributions
from polyhead.layers.record import AttentionRecord

IDS = torch.arange(5, 17)[None]
OTHER = torch.arange(40, 47)[None]


def in_thread(run: Callable[[], Any]) -> Any:
    """What ``run`` returns in another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def interrupted(model: torch.nn.Module) -> Callable[..., None]:
    """A torch hook by which another thread runs the model in the middle of this one's run."""
    own = threading.current_thread()

    def hook(*call: object) -> None:
        if threading.current_thread() is own:
            in_thread(lambda: model(OTHER))

    return hook


@torch.no_grad()
def test_a_probe_sees_the_calls_of_its_own_thread_alone() -> None:
    model = decoder()
    with ph.probe(model) as alone:
        model(IDS)
    with ph.probe(model) as seen:
        model(IDS)
        in_thread(lambda: model(OTHER))
        theirs = in_thread(lambda: probed(model, OTHER))
    assert seen[0].rows().shape == alone[0].rows().shape
    assert torch.equal(seen[1].rows(), alone[1].rows())
    assert torch.equal(seen[0].induction, alone[0].induction)  # which needs the ids it saw
    assert theirs[0].rows().shape[-1] == OTHER.shape[1]
    assert len(seen) == len(theirs) == 2


def probed(model: torch.nn.Module, ids: torch.Tensor) -> ph.Probe:
    with torch.no_grad(), ph.probe(model) as seen:
        model(ids)
    return seen


@torch.no_grad()
def test_a_probe_is_not_disturbed_while_its_model_runs() -> None:
    """Another thread runs the model between two layers of a probed run."""
    model = decoder()
    with ph.probe(model) as alone:
        model(IDS)
    handle = model.layers[0].register_forward_hook(interrupted(model))
    with handle, ph.probe(model) as seen:
        model(IDS)
    for layer in (0, 1):
        assert torch.equal(seen[layer].rows(), alone[layer].rows())
    assert len(seen) == 2


def ablated(model: torch.nn.Module) -> AbstractContextManager[Any]:
    return ph.ablate(model, {0: [0, 1], 1: [2]})


def edited(model: torch.nn.Module) -> AbstractContextManager[Any]:
    return model.layers[1].attention.register_head_edit(lambda out: out * 3)


@pytest.mark.parametrize("change", [ablated, edited])
@torch.no_grad()
def test_heads_are_changed_for_one_thread_alone(
    change: Callable[[torch.nn.Module], AbstractContextManager[Any]],
) -> None:
    model = decoder().double()
    whole = model(IDS)
    with change(model):
        changed = model(IDS)
        assert torch.equal(in_thread(lambda: untouched(model)), whole)
        cache = model.new_cache(64)
        model(IDS[:, :-1], cache=cache)
        step = model(IDS[:, -1:], cache=cache)
    assert (changed - whole).abs().max() > 1e-3
    torch.testing.assert_close(step, changed[:, -1:])
    assert torch.equal(model(IDS), whole)


def untouched(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS)


def test_a_hook_observation_and_contributions_are_of_one_thread() -> None:
    model = decoder()
    records: list[AttentionRecord] = []
    with model.layers[0].attention.register_attention_hook(records.append), model.observe() as seen:
        in_thread(lambda: untouched(model))
        assert not records
        assert not seen
        untouched(model)
    assert len(records) == 1
    assert len(seen) == 2
    handle = model.layers[0].register_forward_hook(interrupted(model))
    with handle:
        disturbed = Contributions(model, IDS)
    assert torch.equal(disturbed.residual(1), Contributions(model, IDS).residual(1))


def test_a_probe_goes_with_the_tasks_that_are_started_inside_it() -> None:
    model = decoder()

    async def run(ids: torch.Tensor) -> None:
        await asyncio.sleep(0)
        with torch.no_grad():
            model(ids)

    async def both() -> tuple[int, int]:
        outside = asyncio.create_task(run(OTHER))
        with ph.probe(model) as seen:
            await outside
            before = len(seen)
            await asyncio.create_task(run(IDS))
        return before, len(seen)

    # A thread of its own: the main thread's event loop may be running (Playwright's).
    assert in_thread(lambda: asyncio.run(both())) == (0, 2)
