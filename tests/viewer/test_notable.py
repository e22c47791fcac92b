"""The heads that a page tells its reader to look at first."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from polyhead.viewer.notable import notable_heads

IDS = [5, 6, 7, 8, 5, 6, 7]  # the last three have come before


@dataclass
class View:
    """A layer whose heads score as they are told."""

    first: list[float]
    previous: list[float]
    induction: list[float]

    def summary(self) -> SimpleNamespace:
        scores = torch.tensor(self.previous), torch.tensor(self.first)
        return SimpleNamespace(previous_token=scores[0], first_token=scores[1])

    def measure(self, names: list[str]) -> dict[str, Tensor]:
        assert names == ["induction"]
        rows = torch.zeros(1, len(self.induction), len(IDS))
        rows[0, :, 4:] = torch.tensor(self.induction)[:, None]
        return {"induction": rows}


def test_heads_are_named_that_earn_a_label_on_this_text() -> None:
    seen = [
        View([0.9, 0.1, 0.31], [0.39, 0.5, 0.1], [0.0, 0.2, 0.39]),
        View([0.2, 0.1, 0.29], [0.41, 0.7, 0.9], [0.8, 0.4, 0.1]),
    ]
    found = notable_heads(seen, IDS)
    assert found["previous_token"] == [
        [1, 2, pytest.approx(0.9)], [1, 1, pytest.approx(0.7)], [0, 1, pytest.approx(0.5)]
    ]  # fmt: skip
    assert found["induction"] == [[1, 0, pytest.approx(0.8)], [1, 1, pytest.approx(0.4)]]
    assert (found["sinks"], found["all"]) == (2, 6)


def test_a_text_without_repeats_says_nothing_of_induction() -> None:
    seen = [View([0.0], [0.0], [1.0])]
    assert notable_heads(seen, [1, 2, 3, 4, 5, 6, 7])["induction"] == []
    assert notable_heads(seen, [1, 2, 3, 4, 1, 2, 7])["induction"] == []  # two are too few
