"""Learned and sinusoidal positions."""

from __future__ import annotations

import math

import pytest
import torch

from polyhead.errors import ConfigError, ContextLengthError
from polyhead.layers import LearnedPositions, SinusoidalPositions


def test_sinusoidal_is_the_formula_of_2017():
    table = SinusoidalPositions(6)(10, 3)
    for row, position in enumerate((10, 11, 12)):
        for i in range(3):
            angle = position / 10_000 ** (2 * i / 6)
            assert math.isclose(table[row, 2 * i], math.sin(angle), abs_tol=1e-5)
            assert math.isclose(table[row, 2 * i + 1], math.cos(angle), abs_tol=1e-5)


@pytest.mark.parametrize("positions", [SinusoidalPositions(8), LearnedPositions(32, 8)])
def test_explicit_positions_equal_those_that_follow_on(positions):
    torch.testing.assert_close(positions(torch.arange(4, 9), 5), positions(4, 5))
    ragged = torch.tensor([[0, 1], [7, 3]])
    torch.testing.assert_close(positions(ragged, 2)[1, 0], positions(7, 1)[0])


def test_learned_positions_end_somewhere():
    with pytest.raises(ContextLengthError, match="32 learned positions"):
        LearnedPositions(32, 8)(30, 3)


def test_sinusoidal_needs_pairs():
    with pytest.raises(ConfigError, match="even embed_dim"):
        SinusoidalPositions(7)
