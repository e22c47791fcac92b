"""Calls drawn at random on the kernels of a CPU, forward and backward, against float64."""

from contextlib import suppress

import pytest
from random_calls import drawn, worst_share

import polyhead as ph


def judge(kernel, seeds):
    computed = 0
    for seed in seeds:
        call, found = drawn(seed), None
        for grads in (True, False):  # some masks are read by native code without gradients only
            with suppress(ph.UnsupportedError):
                found = found or worst_share(call, kernel, "cpu", grads=grads)
        if found is None:
            continue
        share, part = found
        computed += 1
        assert share <= 1.0, f"{part} is off {share:.3g} times what it may: {call.words}"
    assert computed >= len(seeds) / 4


@pytest.mark.parametrize("kernel", ["native", "tiled"])
def test_random_calls_match_the_formula(kernel):
    judge(kernel, range(5000, 5040))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kernel", ["native", "tiled", "reference"])
def test_many_random_calls_match_the_formula(kernel):
    judge(kernel, range(1000))
