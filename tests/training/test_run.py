"""The loop: what it computes, how it ends, and that it goes on with the same losses."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import islice
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
from polyhead.errors import CheckpointError, ConfigError, DivergedError
from polyhead.models import Transformer
from polyhead.training import Batch, Run, Schedule, Step
from polyhead.training.run import _adamw

V, T = 31, 12
LAYER = LayerConfig(
    AttentionConfig(4, 2, 8, rope=RopeConfig(), dropout=0.1), FeedForwardConfig(48), dropout=0.1
)
CONFIG = TransformerConfig("decoder", V, 16, 64, (LAYER,) * 2)
PLAIN = replace(
    CONFIG,
    layers=(replace(LAYER, dropout=0.0, attention=replace(LAYER.attention, dropout=0.0)),) * 2,
)
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


def test_what_is_not_finite_stops_the_run_and_keeps_the_state_before_it(tmp_path: Path) -> None:
    whole = _run()
    list(islice(whole, 3))

    run = _run(folder=tmp_path)

    def poison(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * float("nan") if run.steps == 3 and module.training else output

    run.model.get_submodule("embedding").register_forward_hook(poison)
    with pytest.raises(DivergedError, match=r"the loss at step 4 is nan: the state of step 3 is"):
        list(run)
    assert run.steps == 3
    kept = _run(folder=tmp_path)
    kept.resume()
    assert kept.steps == 3
    for ours, theirs in zip(kept.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    other = _run()
    weight = next(other.model.parameters())
    weight.register_hook(lambda gradient: gradient * float("inf"))
    before = weight.detach().clone()
    with pytest.raises(
        DivergedError, match=r"norm of the gradients at step 1 is .*nothing is saved"
    ):
        list(other)
    assert torch.equal(weight, before)


def test_a_full_disk_leaves_the_former_state_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(folder=tmp_path)
    steps = iter(run)
    while run.steps < 4:
        next(steps)
    before = run.state_file.read_bytes()

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("polyhead._utils.atomic_write.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        list(steps)
    assert run.state_file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.safetensors",
        "state.safetensors",
    ]
    again = _run(folder=tmp_path)
    again.resume()
    assert again.steps == 4


def test_files_that_are_no_state_of_this_model_are_refused(tmp_path: Path) -> None:
    run = _run(replace(SCHEDULE, steps=1), tmp_path)
    with pytest.raises(CheckpointError, match=r"no .*state\.safetensors: nothing was saved"):
        run.resume()
    list(run)
    torch.manual_seed(0)
    other = Run(Transformer(replace(CONFIG, vocab_size=V + 1)), _batch, SCHEDULE, folder=tmp_path)
    before = [p.detach().clone() for p in other.model.parameters()]
    with pytest.raises(CheckpointError, match=r"of another model: .* must be \[32, 16\]"):
        other.resume()
    assert all(torch.equal(a, b) for a, b in zip(before, other.model.parameters(), strict=True))
    run.state_file.write_bytes(run.state_file.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="is not the state of a training run"):
        run.resume()
    with pytest.raises(CheckpointError, match="has no folder"):
        _run().state_file  # noqa: B018


def test_accumulated_batches_are_one_large_batch_whatever_they_hold() -> None:
    """The mean is over all labels: batches with few count less."""

    def together(number: int) -> Batch:
        parts = [_batch(2 * number), _batch(2 * number + 1)]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    found = []
    for accumulate, batches in ((2, _batch), (1, together)):
        torch.manual_seed(0)
        schedule = replace(SCHEDULE, steps=3, accumulate=accumulate)
        found.append([s.loss for s in Run(Transformer(PLAIN), batches, schedule)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_best_weights_come_back_and_a_budget_of_tokens_or_time_ends_a_run(
    tmp_path: Path,
) -> None:

    def misleading(number: int) -> Batch:
        batch = _batch(number)
        return batch if number < 4 else {**batch, "labels": batch["labels"].clamp(max=3)}

    schedule = replace(SCHEDULE, validate_every=1, lr=3e-2, shape="constant")
    run = _run(schedule, tmp_path, misleading)
    measured = {s.number: s.validation for s in run}
    best = min(measured.values(), key=lambda v: v or 0.0)
    assert best != measured[8]
    run.use_best()
    assert run.validate() == best
    tokens = sum(int((_batch(n)["labels"][:, 1:] != -100).sum()) for n in range(2))
    short = _run(replace(SCHEDULE, steps=None, tokens=tokens))
    assert [s.number for s in short] == [1, 2]
    clocked = _run(replace(SCHEDULE, steps=None, minutes=1e-9))
    clocked.seconds = 1.0
    assert not list(clocked)
    assert clocked.best is not None


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 0.8, 0.6, 0.2]),
        ("cosine", [0.5, 0.5 + 0.5 * 0.7071, 0.5, 0.5 - 0.5 * 0.7071]),
        ("inverse-sqrt", [0.5, 1.0, (2 / 3) ** 0.5, 0.5]),
    ],
)
def test_learning_rates(shape: Any, wanted: list[float]) -> None:
    floor = {"linear": 0.2}.get(shape, 0.0)
    shares = {"linear": [0.0, 0.25, 0.5, 1.0]}.get(shape, [0.0, 0.25, 0.5, 0.75])
    schedule = Schedule(steps=8, lr=3.0, warmup=2, shape=shape, floor=floor)
    steps = [0, 1, 2, 7]
    found = [schedule.rate(n, share) / 3.0 for n, share in zip(steps, shares, strict=True)]
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(("every", "wanted"), [(0, [8]), (3, [3, 6, 8]), (1, [*range(1, 9)])])
def test_a_run_validates_every_so_many_steps_and_at_its_end(every: int, wanted: list[int]) -> None:
    run = _run(replace(SCHEDULE, validate_every=every))
    assert [step.number for step in run if step.validation is not None] == wanted


def test_matrices_decay_and_vectors_do_not_and_tables_have_their_own_rate() -> None:
    model = Transformer(CONFIG)
    schedule = Schedule(steps=1, lr=0.1, weight_decay=0.3, embedding_lr=0.5)
    optimizer = _adamw(model, schedule)
    shares = {id(p): g["lr_scale"] for g in optimizer.param_groups for p in g["params"]}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        kept = 1 - 0.1 * 0.3 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * kept)
        assert shares[id(parameter)] == (0.5 if name == "embedding.tokens.weight" else 1.0)
    assert {p.ndim for p in model.parameters()} == {1, 2}


def test_numbers_that_cannot_be_are_refused() -> None:
    for values, message in (
        ({}, "steps, tokens or minutes: got none"),
        ({"steps": 0}, "steps must be a whole number of at least 1: got 0"),
        ({"steps": 1, "lr": 0.0}, "lr must be .* above 0"),
        ({"steps": 1, "shape": "round"}, "shape must be one of .*: got 'round'"),
        ({"steps": 1, "precision": "float16"}, "precision must be one of"),
    ):
        with pytest.raises(ConfigError, match=message):
            Schedule(**values)


_PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from dataclasses import replace
import test_run as this
torch.manual_seed(0)
run = this.Run(this.Transformer(this.PLAIN), this._batch, replace(this.SCHEDULE, steps=4),
               validation=this.HELD, folder=sys.argv[2])
seen = [(s.loss, s.validation, s.tokens) for s in run]
if run.is_main:
    torch.distributed.barrier()
    print(seen)
else:
    torch.distributed.barrier()
"""


@pytest.mark.slow
def test_two_processes_compute_what_one_does_that_accumulates_two_batches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one = Run(Transformer(PLAIN), _batch, replace(SCHEDULE, steps=4, accumulate=2), validation=HELD)
    wanted = [(s.loss, s.validation, s.tokens) for s in one]
    script = tmp_path / "process.py"
    script.write_text(_PROCESS)
    made = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(script), str(Path(__file__).parent), str(tmp_path / "run")],
        capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    found = ast.literal_eval(made.stdout.strip().splitlines()[-1])
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
        assert ours[1] == (None if theirs[1] is None else pytest.approx(theirs[1], rel=1e-6))
        assert ours[2] == theirs[2]
    assert (tmp_path / "run" / "state.safetensors").exists()


def test_autocast_trains_nearly_as_float32() -> None:
    found = []
    for precision in ("float32", "bfloat16"):
        schedule = replace(SCHEDULE, steps=3, precision=precision)  # type: ignore[arg-type]
        torch.manual_seed(0)
        run = Run(Transformer(PLAIN), _batch, schedule, validation=HELD)
        found.append([(s.loss, s.gradient_norm) for s in run])
        assert all(p.dtype == torch.float32 for p in run.model.parameters())
    assert found[0] != found[1]
    for exact, rounded in zip(*found, strict=True):
        assert rounded == pytest.approx(exact, rel=0.02)
