"""Idle connections, prompts without room and refused memory harm nobody else."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from served_tiny import listening, models_of, post

import polyhead as ph

ASKED = {"model": "tiny", "prompt": "a", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def port(model: ph.LanguageModel) -> Iterator[int]:
    with listening(models_of(model, {"max_rows": 2, "max_queue": 2, "max_tokens": 128})) as found:
        yield found


def text(port: int) -> str:
    status, answer = post(port, "/v1/completions", ASKED)
    assert status == 200, answer
    found: str = answer["choices"][0]["text"]
    return found


def test_500_idle_connections_leave_room_for_requests(port: int) -> None:
    alone = text(port)
    with ExitStack() as stack:
        for _ in range(500):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        assert text(port) == alone


def test_more_tokens_than_the_pool_holds_are_refused_by_name(port: int) -> None:
    alone = text(port)
    said = [{"role": "user", "content": "a" * 300}]
    for path, changes, param in (
        ("/v1/completions", {"prompt": "a" * 300}, "prompt"),
        ("/v1/completions", {"max_tokens": 128}, "max_tokens"),
        ("/v1/chat/completions", {"messages": said}, "messages"),
    ):
        body: dict[str, Any] = {**ASKED, **changes}
        if param == "messages":
            del body["prompt"]
        status, answer = post(port, path, body)
        error = answer["error"]
        assert (status, error["param"]) == (400, param), answer
        assert error["code"] == "context_length_exceeded"
        assert "the cache holds 128" in error["message"]
    status, answer = post(port, "/v1/completions", {**ASKED, "max_tokens": 127})
    assert status == 200, answer  # what just fits
    assert text(port) == alone


def no_memory() -> None:
    raise MemoryError("no memory is left")


def no_memory_for_torch() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("refuse", [no_memory, no_memory_for_torch])
def test_memory_that_is_refused_in_a_step_ends_one_request(
    refuse: Callable[[], None], port: int, model: ph.LanguageModel
) -> None:
    alone, refusals = text(port), [True]

    def once(*call: Any) -> None:
        if refusals:
            refusals.pop()
            refuse()

    hook = model.transformer.layers[0].register_forward_pre_hook(once)
    try:
        status, answer = post(port, "/v1/completions", {**ASKED, "prompt": "bcd"})
        assert status == 503, answer
        assert answer["error"]["message"] == "not enough memory for this request"
        assert not refusals
        assert text(port) == alone
    finally:
        hook.remove()
