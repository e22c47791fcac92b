"""Training over processes: precision, accumulation, runs that are killed, and the way back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases_of_training import alone
from worlds import World


def _equals_alone(first: int, seen: list[tuple[float, float]]) -> None:
    for ours, theirs in zip(seen, alone(first + len(seen))[first:], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-10)


def test_a_run_killed_in_the_middle_resumes_on_another_number_of_processes(tmp_path: Path) -> None:
    with World(2) as world:
        answers = world.tell("cases_of_training:continued", str(tmp_path), "shard", 4, 2)
        assert answers[1][0] == "gone"
    with World(1) as world:
        ((first, seen),) = world.run("cases_of_training:continued", str(tmp_path), "context", 4)
    assert (first, len(seen)) == (2, 2)
    _equals_alone(first, seen)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("context", "shard"), ("shard", "context")])
def test_a_run_of_torchrun_that_is_killed_resumes_on_other_ranks(
    tmp_path: Path, first: str, second: str
) -> None:
    def launched(count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc-per-node={count}", str(Path(__file__).parent / "run_training.py"),
             str(tmp_path), *arguments],
            capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip

    killed = launched(2, first, "5", "3")
    assert killed.returncode != 0
    assert "Signal 9 (SIGKILL)" in killed.stderr
    for count in (3, 4):
        made = launched(count, second, str(count + 1))
        assert made.returncode == 0, made.stderr[-2000:]
        began, seen = json.loads(made.stdout.strip().splitlines()[-1])
        assert (began, len(seen)) == (count, 1)
        _equals_alone(began, seen)


@pytest.mark.parametrize(
    ("family", "dimension"),
    [pytest.param("Llama", "shard", marks=pytest.mark.slow), ("Mixtral", "expert")],
)
def test_transformers_reads_what_processes_trained(
    two: World, tmp_path: Path, family: str, dimension: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = str(tmp_path / "whole")
    wanted = two.run("cases_of_training:trained", folder, family, dimension)[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(47, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(ids).logits
    assert torch.allclose(logits, wanted.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dimension", "family"),
    [("data", "Llama"), ("shard", "DeepSeek"), ("tensor", "gpt-oss"), ("expert", "Mixtral")],
)
def test_accumulated_and_clipped_steps_equal_one_process(
    two: World, dimension: str, family: str
) -> None:
    two.run("cases_of_training:accumulated", dimension, family)


@pytest.mark.parametrize("dimension", ["shard", "context"])
def test_mixed_precision_is_as_near_as_in_one_process(two: World, dimension: str) -> None:
    two.run("cases_of_training:mixed", dimension)
