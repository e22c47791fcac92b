"""The loop: what it computes, how it ends, and that it goes on with the same losses."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.models import Transformer
from polyhead.training import Batch, Run, Schedule, Step

V, T = 31, 12
LAYER = LayerConfig(
    AttentionConfig(4, 2, 8, rope=RopeConfig(), dropout=0.1), FeedForwardConfig(48), dropout=0.1
)
CONFIG = TransformerConfig("decoder", V, 16, 64, (LAYER,) * 2)
SCHEDULE = Schedule(steps=8, lr=1e-2, warmup=3, validate_every=3, save_every=4, seed=3)


def _batch(number: int) -> Batch:
    """Whole numbers that count upwards, with tokens here and there that are not learned."""
    generator = torch.Generator().manual_seed(number)
    ids = (torch.randint(V, (3, 1), generator=generator) + torch.arange(T)) % V
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(torch.rand(3, T, generator=generator) < 0.2, -100),
    }


HELD = [_batch(1000), _batch(1001)]


def _run(schedule: Schedule = SCHEDULE, folder: Path | None = None, batches: Any = _batch) -> Run:
    torch.manual_seed(0)
    return Run(Transformer(CONFIG), batches, schedule, validation=HELD, folder=folder)


def _seen(steps: list[Step]) -> list[tuple[Any, ...]]:
    return [(s.number, s.loss, s.lr, s.gradient_norm, s.tokens, s.validation) for s in steps]


def test_a_run_that_was_interrupted_goes_on_with_the_same_losses_to_the_bit(tmp_path: Path) -> None:
    whole = _run()
    wanted = _seen(list(whole))
    assert [each[5] is not None for each in wanted] == [n in (3, 6, 8) for n in range(1, 9)]
    assert wanted[-1][1] < wanted[0][1]
    first = _run(folder=tmp_path)
    found = []

    def until_interrupted() -> None:
        for step in first:
            found.append(step)
            if step.number == 5:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        until_interrupted()
    assert first.steps == 5
    again = _run(folder=tmp_path)
    with torch.no_grad():
        for parameter in again.model.parameters():
            parameter.zero_()
    again.resume()
    found += list(again)
    assert _seen(found) == wanted
    for ours, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
