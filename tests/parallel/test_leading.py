"""A model of two processes is served by one of them, as a model of one process is."""

from __future__ import annotations

import time
from typing import Any

import pytest
from worlds import World

from polyhead import native

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)


def test_random_requests_of_a_split_model_are_each_as_alone(two: World) -> None:
    cached, preempted, _, _ = two.run("cases_of_leading:served", 1, 8, {"prompt_chunk": 32})[0]
    assert cached > 50
    assert preempted == 0
    options = {"max_tokens": 192, "overcommit": True, "lookup_tokens": 3}
    _, preempted, guessed, right = two.run("cases_of_leading:served", 4, 6, options)[0]
    assert preempted > 0
    assert 0 < right < guessed


@pytest.mark.slow
def test_many_random_requests_of_split_models_are_each_as_alone(two: World) -> None:
    for seed, options in enumerate(
        (
            {"prompt_chunk": 100, "max_tokens": 320},
            {"prompt_chunk": 16, "max_tokens": 160, "overcommit": True},
            {"draft_tokens": 3},
        )
    ):
        two.run("cases_of_leading:served", 20 + seed, 40, options)


@pytest.mark.slow
def test_four_ranks_add_in_one_order() -> None:
    with World(4, timeout=280) as world:
        world.run("cases_of_leading:served", 7, 20, {"prompt_chunk": 32})


@pytest.mark.parametrize("family", ["Llama", "Falcon", "gpt-oss", "DeepSeek"])
def test_requests_are_answered_as_in_one_process(two: World, family: str) -> None:
    two.run("cases_of_leading:as_in_one_process", family)


def test_room_is_that_of_the_rank_with_the_least_memory(two: World) -> None:
    least = (9 << 16) // 2 // 2  # half of the free memory, shared by two on one machine
    tokens, here, whole = two.run("cases_of_leading:room", "Llama")[0]
    assert (tokens, here) == (least // here, whole // 2)
    tokens, here, whole = two.run("cases_of_leading:room", "Falcon")[0]
    assert (tokens, here) == (least // here, whole)  # its only kv head is on both


def test_what_others_cannot_be_told_is_refused_by_name(two: World) -> None:
    found = two.run("cases_of_leading:refused")[0]
    words = [
        "UnsupportedError: a model whose parts are on other processes is served within polyhead.p",
        "UnsupportedError: adapters must be none for a model that is split",
        "UnsupportedError: draft must be a smaller decoder for a model that is split over process",
        "UnsupportedError: heads of a model that is split over processes are not shown",
        "UnsupportedError: polyhead.parallel cannot do mask=Window in a call that other ranks are",
        "UnsupportedError: polyhead.parallel cannot do quantized=Quantized in a call that other",
        "TypeError: Transformer: got an unexpected keyword argument 'masks'",
        "RankError: ranks of 'tensor' exchange nothing but in calls that rank 0 tells",
        "RankError: ranks of 'tensor' exchange nothing but in calls that rank 0 tells",
    ]
    for text, said in zip(found, words, strict=True):
        assert text.startswith(said), text


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("whole", "got a model that was not parallelized"),
        ("context", "the one dimension 'tensor': got context"),
        ("an encoder", "other than a decoder: encoder-decoder"),
        ("loss_parallel", "loss_parallel or sequence_parallel of a model that one rank leads"),
    ],
)
def test_models_that_no_rank_can_lead_are_refused_on_every_rank(
    two: World, what: str, words: str
) -> None:
    for kind, text in two.tell("cases_of_leading:unled", what):
        assert kind != "ok"
        assert words in text, text


def test_an_idle_leader_says_that_it_is_there(two: World) -> None:
    assert two.run("cases_of_leading:idle") == [3, None]


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_follower_that_dies_ends_all_requests(busy: bool) -> None:
    with World(2) as world:
        began = time.monotonic()
        (kind, found), (other, _) = world.tell("cases_of_leading:dies", 1, busy)
        assert time.monotonic() - began < 25
        assert (kind, other) == ("ok", "gone"), found
        _all_name_the_rank(found, busy)


def _all_name_the_rank(found: Any, busy: bool) -> None:
    *ended, refused = found
    assert len(ended) == 3
    for text in ended:
        assert text.startswith("error: the engine is ending: "), text
        assert "rank 1 is gone" in text
    assert "rank 1 is gone" in refused


@pytest.mark.slow
def test_a_leader_that_dies_ends_the_others() -> None:
    with World(2) as world:
        (kind, _), (other, text) = world.tell("cases_of_leading:dies", 0, True)
        assert (kind, other) == ("gone", "RankError"), text
        assert "rank 0 is gone" in text
