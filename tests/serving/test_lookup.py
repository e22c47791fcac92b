"""Guesses at the next tokens: which are made, and when none are."""

from __future__ import annotations

from polyhead.serving.lookup import CREDIT, WORTH, Lookup


def test_the_guess_is_what_followed_the_same_tokens_last() -> None:
    lookup = Lookup()
    ids = [1, 2, 3, 4, 5, 1, 2, 3, 9, 8, 7, 1, 2]
    assert lookup.guess(ids, 4) == []
    assert lookup.guess([*ids, 3], 4) == [9, 8, 7, 1]
    assert lookup.guess([*ids, 3, 4], 2) == [5, 1]
    assert Lookup().guess([1, 2], 4) == []


def test_guesses_stop_below_break_even_and_begin_again_when_they_would_be_right() -> None:
    lookup, ids = Lookup(), [1, 2, 3, 4] * 3
    for _ in range(CREDIT // 4):
        assert len(lookup.guess(ids, 4)) == 4
        lookup.count(4, 0)
    assert lookup.guess(ids, 4) == []
    ids.append(1)  # what would have been guessed
    assert lookup.guess(ids, 4) == [2, 3, 4, 1]
    lookup.count(WORTH, 0)
    assert lookup.guess(ids, 4) == []


def test_guesses_that_pay_go_on() -> None:
    lookup, ids = Lookup(), [1, 2, 3, 4] * 3
    for _ in range(3 * CREDIT):
        assert len(lookup.guess(ids, 4)) == 4
        lookup.count(WORTH, 1)
