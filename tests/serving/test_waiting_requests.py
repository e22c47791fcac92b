"""Which request starts next: the oldest that has room, and none is passed for ever."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

import polyhead as ph
from polyhead.serving.engine import Engine
from polyhead.serving.requests import Request
from polyhead.serving.row import Row
from polyhead.serving.waiting import PASSES, Waiting


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Requests as they start."""
    found: list[Request] = []
    start = Row.start
    monkeypatch.setattr(
        Row, "start", lambda row, *given: (found.append(row.request), start(row, *given))
    )
    return found


def test_small_requests_pass_a_large_one_so_many_times(
    model: ph.LanguageModel, started: list[Request]
) -> None:
    engine = Engine(model, max_tokens=64, share_prefixes=False)  # four pages
    first = engine.submit("a" * 8, max_new_tokens=30)  # three of them
    large = engine.submit("b" * 40, max_new_tokens=20)  # all four
    small = [engine.submit("c" * 8, max_new_tokens=7) for _ in range(PASSES + 4)]
    while engine.step():
        pass
    assert started == [first, *small[:PASSES], large, *small[PASSES:]]
    assert {each.result(0).finish_reason for each in started} == {"length"}


def test_the_youngest_gives_its_room_back_whenever_it_started(
    model: ph.LanguageModel, started: list[Request]
) -> None:
    engine = Engine(model, max_tokens=64, share_prefixes=False, overcommit=True)
    first = engine.submit("a" * 40, max_new_tokens=5)  # three pages
    second = engine.submit("b" * 30, max_new_tokens=20)  # two
    third = engine.submit("c" * 8, max_new_tokens=40)  # one, and three at the end
    while engine.stats.preemptions < 1:
        engine.step()
    assert started == [first, third, second]
    assert [each.id for each in engine.requests] == [second.id]
    later = engine.submit("d" * 20, max_new_tokens=3)  # two
    while engine.step():
        pass
    assert started.index(later) > 3
    assert started[3] is third
    with ph.batch_invariant():
        for request, text, most in ((second, "b" * 30, 20), (third, "c" * 8, 40)):
            assert request.result(0).ids == model.generate(text, max_new_tokens=most).ids


def test_none_starves_and_none_passes_one_that_has_room() -> None:
    draw, count = random.Random(4), 200

    def room_for(room: int) -> Any:
        return lambda row: row.need <= room or None

    for _ in range(20):
        queue, free, number = Waiting(), 10, 0
        live: list[Any] = []
        ended: list[Any] = []
        while len(ended) < count:
            if number < count and draw.random() < 0.7:
                number += 1
                need = draw.choice([1, 1, 2, 3, 10])
                row: Any = SimpleNamespace(number=0, passed=0, need=need, overtaken=0)
                queue.add(row)
                assert row.number == number
            before: list[Any] = [*queue]
            found = queue.start(room_for(free))
            if found is None:
                assert not before or before[0].need > free
            else:
                for each in before[: before.index(found[0])]:
                    assert each.need > free
                    each.overtaken += 1
                live.append(found[0])
                free -= live[-1].need
            assert max([each.overtaken for each in before], default=0) <= PASSES
            if live and draw.random() < 0.4:
                row = live.pop(draw.randrange(len(live)))
                free += row.need
                if draw.random() < 0.2:
                    queue.add(row)  # it gave its room back, and waits in its old place
                else:
                    ended.append(row)
            assert [each.number for each in queue] == sorted(each.number for each in queue)
        assert (len(queue), free) == (0, 10)
