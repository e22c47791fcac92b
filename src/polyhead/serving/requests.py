"""A request from its submission to its end: what its caller reads while the engine writes."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from polyhead.errors import PolyheadError
from polyhead.generation import TextChunk, TokenLogprobs

MOST_UNREAD = 4_096
"""Pieces that wait for their reader, above which a request is ended ("slow reader")."""

FinishReason = Literal["stop", "length", "cancelled", "deadline", "slow reader", "error"]


class QueueFull(PolyheadError):
    """As many requests wait as may.

    Attributes:
        retry_after: Seconds after which there may be room.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineEnding(QueueFull):
    """The engine takes no more requests."""


@dataclass(frozen=True)
class Completion:
    """A request that has ended.

    Attributes:
        text, ids: All that was written; the ids include a stop token.
        finish_reason: "stop" (a stop token or text), "length", "cancelled", "deadline", "slow
            reader" or "error".
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Of these, tokens that another request had read.
        logprobs: One for each token, if they were asked for.
        error: What went wrong.
        guessed_tokens: Tokens that were guessed and checked.
        accepted_tokens: Of these, tokens that were right.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: Exception | None = None
    guessed_tokens: int = 0
    accepted_tokens: int = 0


class Request:
    """A request as its caller has it; safe on any thread. ``Engine.submit`` returns it.

    Attributes:
        id: Its name.
        cancelled: Whether nobody wants it any more.
    """

    def __init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.cancelled = False
        self._changed = threading.Condition()
        self._pieces: deque[TextChunk] = deque()
        self._done: Completion | None = None
        self._told: Callable[[], None] | None = None
        self._awaited = False

    def cancel(self) -> None:
        """Ends it at the next step; what is written stays."""
        self.cancelled = True

    def __iter__(self) -> Iterator[TextChunk]:
        """The pieces as they come."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._done is not None)
                if not self._pieces:
                    return
                piece = self._pieces.popleft()
            yield piece

    async def __aiter__(self) -> AsyncIterator[TextChunk]:
        """The pieces as they come, for one task."""
        loop, more = asyncio.get_running_loop(), asyncio.Event()

        def told() -> None:
            loop.call_soon_threadsafe(more.set)

        with self._changed:
            self._told = told
        try:
            while True:
                more.clear()
                while self._pieces:
                    yield self._pieces.popleft()
                if self._done is not None and not self._pieces:
                    return
                await more.wait()
        finally:
            self._told = None

    def result(self, timeout: float | None = None) -> Completion:
        """What became of it; waits until it has ended.

        Raises:
            TimeoutError: It has not ended in this time.
        """
        with self._changed:
            self._awaited = True  # nobody need read the pieces
            if not self._changed.wait_for(lambda: self._done is not None, timeout):
                raise TimeoutError(f"the request has not ended in {timeout:g} seconds")
        assert self._done is not None
        return self._done

    def put(self, piece: TextChunk) -> bool:
        """Adds a piece; False where too many wait to be read, and nobody waits for the result.

        For the engine.
        """
        with self._changed:
            self._pieces.append(piece)
            self._tell()
            return self._awaited or len(self._pieces) <= MOST_UNREAD

    def end(self, completion: Completion) -> None:
        """Ends it. For the engine."""
        with self._changed:
            self._done = completion
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        if self._told is not None:
            try:
                self._told()
            except RuntimeError:  # its loop is closed: nobody reads
                self._told = None
