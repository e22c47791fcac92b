"""A training step is measured of models that learn the same, losses compared first."""

from __future__ import annotations

import pytest
import torch

from polyhead.errors import DisagreementError
from polyhead.lab.benchmarks import Settings, measure, training

QUICK = Settings(quick=True, dtypes=(torch.float32, torch.float16), rounds=1)


@pytest.fixture(autouse=True)
def _no_import_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "installed", lambda name: False)


def test_models_of_torch_learn_as_ours_and_both_are_measured() -> None:
    torch.manual_seed(0)
    with torch.no_grad():  # as the command calls it
        found = [measure(case, QUICK) for case in training.cases(QUICK)]
    units = [result.case.unit for result in found]
    assert units in (["FLOP/s", "", "FLOP/s", "", "FLOP/s"], ["FLOP/s"] * 3)  # memory on Linux
    assert {name for result in found for name in result.peers} == {
        training.PLAIN, training.TORCH, "without dropout", "torch SDPA"
    }  # fmt: skip
    assert all(result.ours.median > 0 for result in found)


@pytest.mark.parametrize("peer", ["PlainDecoder", "TorchTransformer"])
def test_gradients_that_differ_stop_it_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, peer: str
) -> None:
    kind = getattr(training, peer)
    right = kind.loss

    def wrong(self: torch.nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        loss = right(self, *batch)
        return loss.detach() - (loss - loss.detach())  # the first losses agree

    monkeypatch.setattr(kind, "loss", wrong)
    with pytest.raises(DisagreementError, match=r"losses of (plain SDPA|nn\.Transformer)"):
        list(training.cases(QUICK))
