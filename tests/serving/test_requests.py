"""Requests of many callers have the tokens that they have alone, and end as they should."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch
from tiny import byte_tokenizer, decoder

import polyhead as ph
from polyhead.errors import ContextLengthError, InputError
from polyhead.generation.decoding.rules import Rows
from polyhead.serving import requests
from polyhead.serving.engine import Engine
from polyhead.serving.requests import QueueFull


@pytest.fixture(scope="module")
def model() -> ph.LanguageModel:
    return ph.LanguageModel(decoder(context=256), byte_tokenizer(), "tiny").eval()


DRAWN: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.2, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_k": 9, "repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2, "stop": "e"},
)


def test_many_requests_are_each_as_alone(model: ph.LanguageModel) -> None:
    asked = [
        (f"text {number} " * (1 + number % 3), 5 + 7 * (number % 4), DRAWN[number % len(DRAWN)])
        for number in range(24)
    ]
    alone = [model.generate(text, max_new_tokens=most, **drawn) for text, most, drawn in asked]
    with Engine(model, max_tokens=600, max_rows=5) as engine:
        found = [engine.submit(text, max_new_tokens=most, **drawn) for text, most, drawn in asked]
        given_up = engine.submit("never read", max_new_tokens=200)
        given_up.cancel()
        for request, single in zip(found, alone, strict=True):
            text = "".join(piece.text for piece in request)
            made = request.result()
            assert (made.text, made.ids) == (single.text, single.ids)
            assert text == made.text
            reason = "length" if single.stats.stop_reason == "max_new_tokens" else "stop"
            assert made.finish_reason == reason
            assert made.prompt_tokens == single.stats.prompt_tokens
        assert given_up.result().finish_reason == "cancelled"
        stats = engine.stats
    assert (stats.live, stats.queued, stats.used_tokens) == (0, 0, 0)
    assert stats.output_tokens >= sum(len(single.ids) for single in alone)


def test_no_more_is_computed_at_a_time_than_fits(model: ph.LanguageModel) -> None:
    engine = Engine(model, max_tokens=100, max_rows=3)
    for _ in range(6):
        engine.submit("12345678", max_new_tokens=22)
    most = 0
    while engine.step():
        stats = engine.stats
        most = max(most, stats.used_tokens)
        assert stats.live <= 3
        assert stats.used_tokens + stats.free_tokens == 112
    assert most == 96  # three times two pages
    assert engine.stats.output_tokens == 6 * 22
    with pytest.raises(InputError, match="101 tokens: the cache holds 100"):
        engine.submit("1", max_new_tokens=100)


def test_a_long_prompt_is_read_in_chunks_beside_others(model: ph.LanguageModel) -> None:
    engine = Engine(model, prompt_chunk=8)
    short, long = (engine.submit("x" * n, max_new_tokens=6) for n in (4, 60))
    for _ in range(6):
        engine.step()
    assert short.result(0).ids == model.generate("xxxx", max_new_tokens=6).ids
    assert (engine.stats.live, engine.stats.output_tokens) == (1, 6)
    assert engine.stats.prompt_tokens == 6 * 8
    while engine.step():
        pass
    assert long.result(0).ids == model.generate("x" * 60, max_new_tokens=6).ids


def test_requests_end_by_deadlines_readers_and_errors_alone(
    model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(rows: Rows, scores: torch.Tensor) -> torch.Tensor:
        if rows.new == 3:
            raise ZeroDivisionError("a rule")
        return scores

    monkeypatch.setattr(requests, "MOST_UNREAD", 10)
    engine = Engine(model)
    late = engine.submit("a", max_new_tokens=20, deadline=0.0)
    unread = engine.submit("b", max_new_tokens=20)
    wrong = engine.submit("c", max_new_tokens=20, rules=[broken])
    right = engine.submit("d", max_new_tokens=9)
    time.sleep(0.01)
    while engine.step():
        pass
    assert late.result().finish_reason == "deadline"
    assert unread.result().finish_reason == "slow reader"
    assert (wrong.result().finish_reason, len(wrong.result().ids)) == ("error", 3)
    assert isinstance(wrong.result().error, ZeroDivisionError)
    assert right.result().text == model.generate("d", max_new_tokens=9).text


def test_a_full_queue_and_wrong_requests_are_refused(model: ph.LanguageModel) -> None:
    engine = Engine(model, max_queue=2)
    for _ in range(2):
        engine.submit("a", max_new_tokens=1)
    with pytest.raises(QueueFull, match="2 requests wait") as full:
        engine.submit("a", max_new_tokens=1)
    assert full.value.retry_after > 0
    for prompt, options, error, words in (
        ("", {}, InputError, "empty"),
        ("a" * 300, {}, ContextLengthError, "300 tokens"),
        ("a", {"temperature": -1}, ValueError, "temperature"),
        ("a", {"num_beams": 2}, ValueError, "a stream is one text"),
        ("a", {"tempreature": 1}, TypeError, "tempreature"),
        ("a", {"logprobs": -1}, ValueError, "logprobs"),
    ):
        with pytest.raises(error, match=words):
            Engine(model).submit(prompt, max_new_tokens=1, **options)
    for name in ("max_rows", "max_queue", "max_tokens", "prompt_chunk"):
        with pytest.raises(ValueError, match=name):
            Engine(model, **{name: 0})


def test_closing_finishes_what_has_time_and_cancels_the_rest(model: ph.LanguageModel) -> None:
    engine = Engine(model, max_rows=1)
    engine.start()
    hook = model.transformer.layers[0].register_forward_pre_hook(lambda *call: time.sleep(0.01))
    try:
        short, long = (engine.submit("a", max_new_tokens=n) for n in (5, 250))
        engine.close(0.5)
    finally:
        hook.remove()
    assert short.result(0).finish_reason == "length"
    assert long.result(0).finish_reason == "cancelled"
    with pytest.raises(QueueFull, match="ending"):
        engine.submit("a", max_new_tokens=1)


def test_tasks_and_threads_read_the_same(model: ph.LanguageModel) -> None:
    async def read(engine: Engine) -> list[str]:
        async def one(number: int) -> str:
            request = engine.submit(f"text {number}", max_new_tokens=12)
            return "".join([piece.text async for piece in request])

        return await asyncio.gather(*map(one, range(6)))

    with Engine(model) as engine:
        found = asyncio.run(read(engine))
    assert found == [model.generate(f"text {n}", max_new_tokens=12).text for n in range(6)]
