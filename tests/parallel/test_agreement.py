"""Ranks that are handed different calls all raise within seconds; histories of caches are equal."""

from __future__ import annotations

import pytest
from cases_of_odd_calls import ODD
from worlds import World

CASES = [(name, dimension) for name, (dimensions, _) in ODD.items() for dimension in dimensions]
FEW = [
    ("an unknown argument", "tensor"), ("an unknown argument beside a hook", "context"),
    ("last", "context"), ("no gradients", "context"),
    ("positions that are a list", "context"), ("a loss beside a call", "tensor"),
    ("an unknown exchange", "context"), ("a backward pass beside a call", "tensor"),
    ("too long a rollback", "context"), ("other rows", "context"),
    ("a gathering of no dimension", "context"), ("a label outside", "context"),
    ("another layer", "tensor"), ("another norm", "tensor"),
]  # fmt: skip


@pytest.fixture(scope="module")
def few(two: World) -> World:
    for dimension in ("tensor", "context"):
        two.run("cases_of_odd_calls:prepared", dimension, False)
    return two


@pytest.fixture(scope="module")
def every(two: World) -> World:
    for dimension in ("tensor", "context"):
        two.run("cases_of_odd_calls:prepared", dimension, True)
    return two


def judge(world: World, name: str, dimension: str) -> None:
    answers = world.run("cases_of_odd_calls:refused", name, dimension)
    first, second = (text.partition(": ")[2] for text in answers)
    # A rank that refuses raises its own error, the others one that quotes it.
    assert second.removeprefix("rank 1 refused: ")[:150] in first, answers
    assert "rank 1" in first or "rank 0 holds" in first, answers
    world.run("cases_of_odd_calls:works", dimension)


@pytest.mark.parametrize(("name", "dimension"), FEW)
def test_another_call_on_one_rank_is_an_error_on_all(few: World, name: str, dimension: str) -> None:
    judge(few, name, dimension)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dimension"), CASES)
def test_any_other_call_on_one_rank_is_an_error_on_all(
    every: World, name: str, dimension: str
) -> None:
    judge(every, name, dimension)


def test_random_histories_of_a_cache_equal_one_process(two: World) -> None:
    # Chunks longer than a window, rows emptied by a reset, padding before the first token.
    for wrong in two.run("cases_of_scripts:equal_all", "context", [18, 25, 47, 52, 268]):
        assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("mesh", "ranks", "count"),
    [("context", 2, 300), ("context", 3, 150), ("context + tensor", 4, 100)],
)
def test_many_random_histories_of_a_cache_equal_one_process(
    mesh: str, ranks: int, count: int
) -> None:
    with World(ranks, timeout=1500) as world:
        for wrong in world.run("cases_of_scripts:equal_all", mesh, [*range(count)]):
            assert wrong == []
