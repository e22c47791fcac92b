"""How prompts are cut while others wait: by invented times alone, and whatever the cut is."""

from __future__ import annotations

import random
from typing import Any

import pytest
from random_requests import check_random

import polyhead as ph
from polyhead import native
from polyhead.serving.chunks import Chunks
from polyhead.serving.engine import Engine


def test_a_chunk_is_what_the_last_ones_say_there_is_time_for() -> None:
    chunks = Chunks(256, 1.0, 16)
    assert chunks.tokens(900, 256, beside=True) == 256  # nothing is known yet
    chunks.count(200, 2.0)
    assert chunks.tokens(900, 256, beside=True) == 100
    assert chunks.tokens(70, 256, beside=True) == 70
    assert chunks.tokens(900, 256, beside=False) == 256  # nobody waits
    assert chunks.tokens(900, 226, beside=True) == 70  # 30 were read in this round
    assert [chunks.tokens(rest, 160, beside=True) for rest in (4, 9)] == [4, 0]  # 4 are left
    chunks.count(100, 2.0)  # half the weight of the one before: 200 tokens in 3 s
    assert chunks.tokens(900, 256, beside=True) == 66
    chunks.count(2000, 0.5)
    assert chunks.tokens(900, 256, beside=True) == 256


def test_a_round_reads_a_page_however_long_it_takes_but_no_second_one() -> None:
    chunks = Chunks(256, 0.5, 16)
    chunks.count(10, 10.0)
    assert chunks.tokens(900, 256, beside=True) == 16
    assert chunks.tokens(5, 256, beside=True) == 5
    assert chunks.tokens(900, 240, beside=True) == 0
    assert chunks.tokens(900, 240, beside=False) == 240
    few = Chunks(8, 0.5, 16)  # rounds shorter than a page
    few.count(10, 10.0)
    assert few.tokens(900, 8, beside=True) == 8


def test_chunks_grow_to_what_takes_the_time_though_each_call_has_a_price_of_its_own() -> None:
    for price, token, best in ((0.2, 0.01, 80), (0.0, 0.02, 50), (2.0, 0.01, 16)):
        chunks = Chunks(256, 1.0, 16)
        chunks.count(2, price + 2 * token)
        for _ in range(40):
            count = chunks.tokens(9999, 256, beside=True)
            chunks.count(count, price + count * token)
        assert abs(count - best) <= 1


def test_without_a_limit_the_tokens_alone_count() -> None:
    chunks = Chunks(256, None, 16)
    chunks.count(1, 1e9)
    assert chunks.tokens(900, 256, beside=True) == 256
    assert chunks.tokens(900, 3, beside=True) == 3


def test_an_engine_cuts_prompts_while_others_write(
    model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chunks, "count", lambda self, tokens, seconds: None)
    engine = Engine(model, max_tokens=800, prompt_chunk=80, page_size=8, prompt_seconds=2.0)
    engine._chunks._read, engine._chunks._took = 11.0, 1.0
    long = engine.submit("x" * 150, max_new_tokens=9)
    read = []
    while engine.stats.output_tokens < 1:
        engine.step()
        read.append(engine.stats.prompt_tokens)
    engine.submit("y" * 70, max_new_tokens=2)
    engine.submit("z" * 5, max_new_tokens=2)
    while engine.step():
        read.append(engine.stats.prompt_tokens)
    assert long.result(0).finish_reason == "length"
    assert read[:6] == [80, 150, 172, 194, 216, 225]


@pytest.mark.skipif(native.unavailable() is not None, reason="no native code here")
def test_random_requests_have_their_bits_however_prompts_are_cut(
    model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, cuts = random.Random(5), list[tuple[int, int]]()

    def cut(self: Chunks, rest: int, left: int, **beside: Any) -> int:
        cuts.append((min(rest, left), draw.randrange(left < self._most, min(rest, left) + 1)))
        return max(cuts[-1][1], 1) if left == self._most else cuts[-1][1]

    monkeypatch.setattr(Chunks, "tokens", cut)
    check_random(model, 31, 12, prompt_chunk=64, max_tokens=320)
    assert sum(count < most for most, count in cuts) > 20


def test_seconds_that_cannot_be_are_refused(model: ph.LanguageModel) -> None:
    for wrong in (0, -1.0, float("nan"), True):
        with pytest.raises(ValueError, match=r"prompt_seconds must be .*above 0, or None"):
            Engine(model, max_tokens=64, prompt_seconds=wrong)
