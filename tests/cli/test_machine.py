"""What ``polyhead doctor`` says of a machine: its processor, and a torch without CUDA for it."""

from __future__ import annotations

import pytest
import torch

from polyhead.cli import doctor
from polyhead.cli.doctor import machine


@pytest.mark.parametrize(
    ("cuda", "gpus", "told"), [("13.0", 0, True), ("13.0", 1, False), (None, 0, False)]
)
def test_torch_for_cuda_without_a_gpu_is_told_of(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, gpus: int, told: bool
) -> None:
    monkeypatch.setattr(doctor, "_triton_switched_off", dict)  # it asks the GPU that is not there
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    assert ("whl/cpu" in (machine()["smaller_torch"] or "")) == told


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"model name": "EPYC", "cpu family": "26", "model": "2"}, "EPYC (family 26, model 2)"),
        ({"model name": "EPYC", "model": "2"}, "EPYC"),
    ],
)
def test_a_processor_is_named_with_its_generation(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(doctor, "_cpuinfo", lambda: facts)
    assert machine()["processor"] == said
