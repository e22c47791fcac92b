"""Drawing tokens: the rule's order, its bounds, and that a seed fixes everything."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyhead.generation.decoding.sampling import Sampler, Sampling

LOGITS = torch.tensor([2.0, 0.0, 3.0, -1.0, 1.0])


@pytest.mark.parametrize("temperature", [None, 0, 0.0])
def test_temperature_none_or_zero_is_greedy(temperature: float | None) -> None:
    sampler = Sampler(Sampling(temperature=temperature, top_k=2, seed=1))
    assert sampler(LOGITS) == 2
    assert sampler.seed is None


def test_greedy_takes_the_first_of_equal_logits() -> None:
    assert Sampler(Sampling())(torch.tensor([1.0, 5.0, 5.0])) == 1


@pytest.mark.parametrize("size", [1, 255, 256, 257, 512, 1000])
def test_greedy_takes_the_first_of_the_largest_wherever_it_is(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for _ in range(20):
        logits = torch.randint(-3, 4, (size,), generator=generator).float()
        logits[torch.rand(size, generator=generator) < 0.2] = -math.inf
        place = int(torch.randint(size, (1,), generator=generator))
        logits[place] = 3
        expected = int((logits == 3).nonzero()[0])
        assert Sampler(Sampling())(logits) == Sampler(Sampling())(logits[None]) == expected
        for bad in (math.nan, math.inf):
            logits[place] = bad
            with pytest.raises(ValueError, match="finite"):
                Sampler(Sampling())(logits)


def test_probabilities_are_softmax_of_logits_over_temperature() -> None:
    got = Sampler(Sampling(temperature=0.5, seed=0)).probabilities(LOGITS)
    torch.testing.assert_close(got, (LOGITS / 0.5).softmax(-1))


def test_top_k_keeps_the_k_largest() -> None:
    got = Sampler(Sampling(temperature=1.0, top_k=2)).probabilities(LOGITS)
    wanted = torch.zeros(5)
    wanted[[0, 2]] = torch.tensor([2.0, 3.0]).softmax(-1)
    torch.testing.assert_close(got, wanted)


def test_top_k_keeps_exactly_k_of_equal_logits() -> None:
    got = Sampler(Sampling(temperature=1.0, top_k=3)).probabilities(torch.zeros(10))
    assert int((got > 0).sum()) == 3


def test_top_p_keeps_the_token_that_crosses_the_threshold() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    got = Sampler(Sampling(temperature=1.0, top_p=0.6)).probabilities(logits)
    torch.testing.assert_close(got, torch.tensor([0.625, 0.375, 0.0, 0.0]))


def test_top_p_near_zero_is_greedy() -> None:
    got = Sampler(Sampling(temperature=5.0, top_p=1e-9)).probabilities(LOGITS)
    assert got.tolist() == [0, 0, 1, 0, 0]


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    got = Sampler(Sampling(temperature=1.0, top_k=2, top_p=0.5)).probabilities(logits)
    # Of the two that remain, 0.4/0.7 = 0.571 already reaches 0.5; of all four, 0.4 would not.
    torch.testing.assert_close(got, torch.tensor([1.0, 0.0, 0.0, 0.0]))


def test_temperature_acts_before_top_p() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    hot = Sampler(Sampling(temperature=100.0, top_p=0.6)).probabilities(logits)
    assert int((hot > 0).sum()) == 2  # nearly uniform: 0.6 needs two
    cold = Sampler(Sampling(temperature=1.0, top_p=0.6)).probabilities(logits)
    assert int((cold > 0).sum()) == 1


@given(
    temperature=st.floats(1e-3, 10),
    top_k=st.none() | st.integers(1, 20),
    top_p=st.none() | st.floats(1e-6, 1.0),
    logits=st.lists(st.integers(-200, 200).map(lambda n: n / 4), min_size=1, max_size=12),
)
def test_probabilities_sum_to_one_and_only_smaller_logits_are_dropped(
    temperature: float, top_k: int | None, top_p: float | None, logits: list[float]
) -> None:
    rule = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    values = torch.tensor(logits)
    got = Sampler(rule).probabilities(values)
    assert float(got.sum()) == pytest.approx(1.0, abs=1e-5)
    kept, dropped = values[got > 0], values[got == 0]
    assert kept.min() >= dropped.max() if len(dropped) else len(kept) == len(values)
    assert int((got > 0).sum()) <= (top_k or len(logits))


def test_same_seed_draws_the_same_tokens() -> None:
    def draw(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler(LOGITS) for _ in range(50)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_draws_leave_torchs_global_generator_alone() -> None:
    before = torch.get_rng_state()
    sampler = Sampler(Sampling(temperature=1.0))
    sampler(LOGITS)
    assert torch.equal(before, torch.get_rng_state())


def test_unseeded_sampler_tells_the_seed_that_repeats_it() -> None:
    first = Sampler(Sampling(temperature=1.0))
    tokens = [first(LOGITS) for _ in range(20)]
    again = Sampler(Sampling(temperature=1.0, seed=first.seed))
    assert [again(LOGITS) for _ in range(20)] == tokens


def test_frequencies_follow_the_probabilities() -> None:
    sampler = Sampler(Sampling(temperature=1.0, seed=3))
    counts = torch.bincount(torch.tensor([sampler(LOGITS) for _ in range(4000)]), minlength=5)
    torch.testing.assert_close(counts / 4000, LOGITS.softmax(-1), atol=0.03, rtol=0.0)


def test_tiny_temperature_does_not_overflow() -> None:
    got = Sampler(Sampling(temperature=1e-320)).probabilities(LOGITS.bfloat16() * 10)
    assert got.tolist() == [0, 0, 1, 0, 0]


def test_a_temperature_beyond_64_bits_makes_all_tokens_alike() -> None:
    got = Sampler(Sampling(temperature=10**30)).probabilities(LOGITS)
    torch.testing.assert_close(got, torch.full_like(LOGITS, 1 / 5))


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf])
    sampler = Sampler(Sampling(temperature=2.0, seed=0))
    assert {sampler(logits) for _ in range(20)} == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(temperature: float, bad: float) -> None:
    with pytest.raises(ValueError, match="logits must be finite"):
        Sampler(Sampling(temperature=temperature))(torch.tensor([0.0, bad]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", 0),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 1.5),
        ("seed", 2**63),
    ],
)
def test_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*: got"):
        Sampling(**{name: value})
