"""Answers of the engine as OpenAI's objects: whole, or as server-sent events.

Events of the API are JSON after ``data:``, ``[DONE]`` at the end. An error after the first event is
an event too, since the status is sent.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any

from polyhead.generation import TextChunk
from polyhead.serving.http.errors import ApiError, api_error, server_ending
from polyhead.serving.http.jobs import Job
from polyhead.serving.http.logprobs import chat_logprobs, completion_logprobs
from polyhead.serving.http.tools import Call, CallReader
from polyhead.serving.requests import Completion, EngineEnding, QueueFull, Request

DONE = b"data: [DONE]\n\n"
_log = logging.getLogger("polyhead.serving")


def submitted(job: Job) -> list[Request]:
    """A job's requests, all of them queued or none.

    Raises:
        ApiError: 429 where the queue is full, 503 where the server ends.
        ValueError: What the engine refuses, such as more tokens than its pool holds.
    """
    assert job.served.engine is not None  # a decoder's
    found: list[Request] = []
    try:
        for prompt in job.prompts:
            for sample in range(job.answers):
                rules = list(job.rules)
                if job.grammar is not None:
                    rules.append(job.grammar.copy())
                found.append(
                    job.served.engine.submit(
                        prompt,
                        max_new_tokens=job.max_new_tokens,
                        seed=None if job.seed is None else job.seed + sample,
                        stop=job.stop or None,
                        rules=rules,
                        logprobs=job.logprobs,
                        deadline=job.timeout,
                        share_with=job.caller,
                        adapter=job.served.adapter,
                        **job.options,
                    )
                )
    except BaseException as error:
        for request in found:
            request.cancel()
        if isinstance(error, EngineEnding):
            raise server_ending() from error
        if isinstance(error, QueueFull):
            raise ApiError(
                429, str(error), code="queue_full", retry_after=error.retry_after
            ) from error
        raise
    return found


async def whole(job: Job, requests: Sequence[Request]) -> dict[str, Any]:
    """The answer when all texts are there. Cancelled, it cancels the requests.

    Raises:
        ApiError: A text ended otherwise than by a stop or its length.
    """
    try:
        made = [await _completed(request) for request in requests]
    finally:
        for request in requests:
            request.cancel()
    choices = []
    for index, each in enumerate(made):
        reason = _reason(each)
        text = _chat_choice if job.chat else _completion_choice
        choices.append({"index": index, **text(job, each, reason)})
    return {**job.head(), "choices": choices, "usage": _usage(job, made)}


async def events(job: Job, requests: Sequence[Request]) -> AsyncGenerator[bytes]:
    """The answer as it is written. Closed, it cancels the requests."""
    writers = [_Writer(job, index) for index in range(len(requests))]
    ended: dict[int, Completion] = {}
    try:
        for writer in writers if job.chat else ():
            yield writer.first()
        async for index, piece in _merged(requests):
            if isinstance(piece, Completion):
                ended[index] = piece
                for event in writers[index].last(piece):
                    yield event
            else:
                for event in writers[index].next(piece):
                    yield event
        if job.usage:
            usage = _usage(job, [ended[index] for index in range(len(requests))])
            yield _event({**job.head(), "choices": [], "usage": usage})
        yield DONE
    except Exception as error:
        failed = api_error(error)
        if failed.status == 500:
            _log.exception("a stream failed")
        yield _event(failed.body())
    finally:
        for request in requests:
            request.cancel()


async def _merged(requests: Sequence[Request]) -> AsyncIterator[tuple[int, TextChunk | Completion]]:
    """Pieces of several requests as they come, and the completion of each at its end."""
    if len(requests) == 1:
        async for piece in requests[0]:
            yield 0, piece
        yield 0, requests[0].result()
        return
    found: asyncio.Queue[tuple[int, TextChunk | Completion | Exception]]
    found = asyncio.Queue(2 * len(requests))

    async def pump(index: int, request: Request) -> None:
        try:
            async for piece in request:
                await found.put((index, piece))
            await found.put((index, request.result()))
        except Exception as error:
            await found.put((index, error))

    tasks = [asyncio.create_task(pump(*each)) for each in enumerate(requests)]
    try:
        left = len(requests)
        while left:
            index, each = await found.get()
            if isinstance(each, Exception):
                raise each
            left -= isinstance(each, Completion)
            yield index, each
    finally:
        for task in tasks:
            task.cancel()


async def _completed(request: Request) -> Completion:
    async for _ in request:
        pass
    return request.result()


def _reason(made: Completion) -> str:
    """OpenAI's word for why a text ended.

    Raises:
        ApiError: It did not come to its end; or what went wrong.
    """
    if made.finish_reason in ("stop", "length"):
        return made.finish_reason
    if made.finish_reason == "deadline":
        raise ApiError(
            503, "the request took longer than the server allows", code="deadline_exceeded",
            retry=False,
        )  # fmt: skip
    if made.finish_reason == "cancelled":
        raise server_ending()
    if made.error is not None:
        raise made.error
    raise ApiError(503, f"the request was ended: {made.finish_reason}", retry=False)


def _chat_choice(job: Job, made: Completion, reason: str) -> dict[str, Any]:
    text, calls = made.text, []
    if job.tools is not None:
        reader, words = CallReader(job.tools), []
        for found in (*reader.feed(text), *reader.flush()):
            if isinstance(found, Call):
                calls.append(found.as_json())
            else:
                words.append(found)
        text = "".join(words)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
        reason = "tool_calls" if reason == "stop" else reason
    told = None
    if job.logprobs is not None:
        told = {"content": chat_logprobs(job.tokenizer, made.logprobs or ()), "refusal": None}
    return {"message": message, "logprobs": told, "finish_reason": reason}


def _completion_choice(job: Job, made: Completion, reason: str) -> dict[str, Any]:
    told = None
    if job.logprobs is not None:
        told, _ = completion_logprobs(job.tokenizer, made.logprobs or (), 0)
    return {"text": made.text, "logprobs": told, "finish_reason": reason}


def _usage(job: Job, made: Sequence[Completion]) -> dict[str, Any]:
    """Tokens read and written; a prompt counts once, however many answers it has."""
    prompts = made[:: job.answers]
    read = sum(each.prompt_tokens for each in prompts)
    written = sum(len(each.ids) for each in made)
    guessed = sum(each.guessed_tokens for each in made)
    right = sum(each.accepted_tokens for each in made)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in prompts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": right,
            "rejected_prediction_tokens": guessed - right,
        },
    }


def _event(value: Any) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class _Writer:
    """The events of one answer."""

    def __init__(self, job: Job, index: int) -> None:
        self._job, self._index = job, index
        self._reader = None if job.tools is None else CallReader(job.tools)
        self._offset = 0
        # Every event begins with the same words, which are encoded once.
        head = json.dumps(
            job.head() | ({"usage": None} if job.usage else {}), separators=(",", ":")
        )
        self._head = f'data: {head[:-1]},"choices":[{{"index":{index},'

    def first(self) -> bytes:
        return self._event('"delta":{"role":"assistant","content":""},"logprobs":null')

    def next(self, piece: TextChunk) -> Iterator[bytes]:
        """The events of a piece; none where it holds no text yet."""
        told = self._logprobs(piece)
        if not self._job.chat:
            yield self._event(f'"text":{_quoted(piece.text)},"logprobs":{told}')
        elif self._reader is None:
            yield self._event(f'"delta":{{"content":{_quoted(piece.text)}}},"logprobs":{told}')
        else:
            yield from self._found(self._reader.feed(piece.text), told)

    def last(self, made: Completion) -> Iterator[bytes]:
        """The events after the last piece: what was held back, and why the text ended."""
        reason = _reason(made)
        if self._reader is not None:
            yield from self._found(self._reader.flush(), "null")
            if self._reader.calls and reason == "stop":
                reason = "tool_calls"
        content = '"delta":{}' if self._job.chat else '"text":""'
        yield self._event(f'{content},"logprobs":null', f'"{reason}"')

    def _found(self, found: Iterator[str | Call], told: str) -> Iterator[bytes]:
        for each in found:
            if isinstance(each, Call):
                assert self._reader is not None
                call = {"index": self._reader.calls - 1, **each.as_json()}
                yield self._event(f'"delta":{{"tool_calls":[{json.dumps(call)}]}},"logprobs":null')
            else:
                yield self._event(f'"delta":{{"content":{_quoted(each)}}},"logprobs":{told}')

    def _logprobs(self, piece: TextChunk) -> str:
        job = self._job
        if job.logprobs is None:
            return "null"
        if job.chat:
            content = chat_logprobs(job.tokenizer, piece.logprobs or ())
            return json.dumps({"content": content, "refusal": None})
        told, self._offset = completion_logprobs(job.tokenizer, piece.logprobs or (), self._offset)
        return json.dumps(told)

    def _event(self, choice: str, reason: str = "null") -> bytes:
        return f'{self._head}{choice},"finish_reason":{reason}}}]}}\n\n'.encode()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
