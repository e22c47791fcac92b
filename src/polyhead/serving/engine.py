"""One model for many callers: one thread steps the requests in turn.

Each round every live request takes one token, or reads one chunk of its prompt. A request has a
cache of its own and is computed as it is alone, so its tokens do not depend on the others. First
come, first served: a request starts when there is a free row and room for its prompt and its limit.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.errors import InputError
from polyhead.generation import LanguageModel
from polyhead.generation.decoding.options import room
from polyhead.generation.decoding.rules import Rows, Rule, rules_of
from polyhead.generation.decoding.sampling import Sampler
from polyhead.generation.decoding.steps import check_search
from polyhead.generation.decoding.stops import StopTexts
from polyhead.planning.memory import caches
from polyhead.serving.requests import (
    Completion,
    FinishReason,
    Piece,
    QueueFull,
    Request,
    TokenLogprobs,
)

_SHARE = 0.5
"""Part of the free memory that caches may take by default."""


@dataclass(frozen=True)
class EngineStats:
    """Counts of an engine.

    Attributes:
        live: Requests that are being computed.
        queued: Requests that wait.
        used_tokens: Tokens that live requests have room for.
        free_tokens: Tokens that there is room for.
        pool_bytes: Bytes of all that room.
        prompt_tokens: Tokens of prompts that were read so far.
        output_tokens: Tokens that were written so far.
        cached_tokens: Tokens of prompts that had been read before.
        preemptions: Requests that were queued again.
    """

    live: int
    queued: int
    used_tokens: int
    free_tokens: int
    pool_bytes: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    preemptions: int = 0


class Engine:
    """Runs the requests of many callers on one model.

        with Engine(model) as engine:
            request = engine.submit("The capital of France is", max_new_tokens=20)
            print(request.result().text)

    Args:
        model: A decoder; the engine keeps it in evaluation mode.
        max_tokens: Tokens of all caches together; None: half of the free memory, but no more than
            ``max_rows`` whole contexts.
        max_rows: Requests that are computed at a time.
        max_queue: Requests that wait.
        prompt_chunk: Tokens of a prompt that are read in one round.

    Raises:
        ValueError: A number out of range, by name.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_tokens: int | None = None,
        max_rows: int = 32,
        max_queue: int = 256,
        prompt_chunk: int = 256,
    ) -> None:
        self.model = model.eval()
        self.max_rows = check_int("max_rows", max_rows, least=1, error=ValueError)
        self.max_queue = check_int("max_queue", max_queue, least=1, error=ValueError)
        self.prompt_chunk = check_int("prompt_chunk", prompt_chunk, least=1, error=ValueError)
        weights = model.transformer.embedding.like
        self._token_bytes = _token_bytes(model, str(weights.dtype).removeprefix("torch."))
        if max_tokens is None:
            fitting = int(_free_memory() * _SHARE) // max(1, self._token_bytes)
            max_tokens = max(1, min(fitting, max_rows * model.config.max_positions))
        self.max_tokens = check_int("max_tokens", max_tokens, least=1, error=ValueError)
        self._lock = threading.Condition()
        self._queue: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._read = self._written = 0
        self._thread: threading.Thread | None = None
        self._ending = False

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int,
        stop: str | Sequence[str] | None = None,
        rules: Sequence[Rule] = (),
        logprobs: int | None = None,
        deadline: float | None = None,
        share_with: str = "",
        **options: Any,
    ) -> Request:
        """Queues a request.

        Args:
            prompt: The text, or its tokens.
            max_new_tokens: New tokens at most.
            stop: The text ends before this text, or before the first of several.
            rules: Change the scores ``[1, V]`` of the next token, after those of the options.
            logprobs: Log-probabilities of the tokens, and of so many likeliest in the place of
                each; None: none.
            deadline: Seconds from now in which it must end; None: any.
            share_with: Requests of one name may share what they have in common.
            options: Fields of ``GenerationOptions``, such as ``temperature`` and ``seed``; no
                beams.

        Raises:
            QueueFull: As many requests wait as may.
            InputError: An empty prompt, or one that needs more tokens than ``max_tokens``.
            ContextLengthError, ValueError, TypeError: As ``LanguageModel.stream`` raises.
        """
        row = _Row(
            self.model,
            prompt,
            {"max_new_tokens": max_new_tokens, **options},
            StopTexts(stop),
            rules,
            logprobs,
            None if deadline is None else time.monotonic() + deadline,
        )
        if row.tokens > self.max_tokens:
            raise InputError(
                f"the prompt and max_new_tokens are {row.tokens:,} tokens: the cache holds "
                f"{self.max_tokens:,}"
            )
        with self._lock:
            if self._ending:
                raise QueueFull("the engine is ending", 10.0)
            if len(self._queue) >= self.max_queue:
                raise QueueFull(f"{len(self._queue)} requests wait", 1.0)
            self._queue.append(row)
            self._lock.notify_all()
        return row.request

    def step(self) -> bool:
        """One round: a token, or a chunk of its prompt, for every live request.

        Returns:
            False where there was nothing to do.
        """
        with self._lock:
            self._admit()
            rows = list(self._rows)
        for row in rows:
            row.advance(self.prompt_chunk)
        with self._lock:
            ended = [row for row in self._rows if row.ended]
            self._read += sum(row.read for row in ended)
            self._written += sum(len(row.ids) for row in ended)
            self._rows = [row for row in self._rows if not row.ended]
        return bool(rows)

    def start(self) -> None:
        """Starts the thread that steps."""
        with self._lock:
            if self._thread is None:
                self._ending = False
                self._thread = threading.Thread(target=self._run, name="polyhead-engine")
                self._thread.start()

    def close(self, timeout: float = 30.0) -> None:
        """Ends the thread; requests that have not ended in ``timeout`` seconds are cancelled."""
        with self._lock:
            self._ending = True
            self._lock.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout)
        with self._lock:
            for row in (*self._queue, *self._rows):
                row.request.cancel()
        if thread is not None:
            thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def stats(self) -> EngineStats:
        """Counts of now."""
        with self._lock:
            live = [row for row in self._rows if not row.ended]
            used = sum(row.tokens for row in live)
            return EngineStats(
                live=len(live),
                queued=len(self._queue),
                used_tokens=used,
                free_tokens=self.max_tokens - used,
                pool_bytes=self.max_tokens * self._token_bytes,
                prompt_tokens=self._read + sum(row.read for row in self._rows),
                output_tokens=self._written + sum(len(row.ids) for row in self._rows),
            )

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._rows or self._queue or self._ending)
                if self._ending and not self._rows and not self._queue:
                    return
            self.step()

    def _admit(self) -> None:
        """Starts requests while there is room, and ends those in the queue that nobody wants."""
        for row in [each for each in self._queue if each.unwanted()]:
            self._queue.remove(row)
        used = sum(row.tokens for row in self._rows)
        while (
            self._queue
            and len(self._rows) < self.max_rows
            and used + self._queue[0].tokens <= self.max_tokens
        ):
            row = self._queue.popleft()
            used += row.tokens
            self._rows.append(row)


class _Row:
    """A request as the engine has it."""

    def __init__(
        self,
        model: LanguageModel,
        prompt: str | Sequence[int],
        options: dict[str, Any],
        stops: StopTexts,
        rules: Sequence[Rule],
        logprobs: int | None,
        deadline: float | None,
    ) -> None:
        wanted = model.options.with_(**options)
        wanted.check_stream()
        check_search(wanted, model.config.vocab_size, None)
        if logprobs is not None:
            most = model.config.vocab_size
            check_int("logprobs", logprobs, least=0, most=most, error=ValueError)
        self.request, self.ids, self.read, self.ended = Request(), list[int](), 0, False
        self._model, self._stops, self._deadline = model, stops, deadline
        self._prompt = model.prompt_ids(prompt)
        self._limit, _ = room(wanted, len(self._prompt), model.config.max_positions)
        self._stop_ids = model.stop_ids(wanted)
        self._rules = [*rules_of(wanted, sorted(self._stop_ids), self._limit), *rules]
        self._sampler = Sampler(wanted.sampling, model.transformer.embedding.like.device)
        self._likeliest, self._logprobs = logprobs, list[TokenLogprobs]()
        self._decoder, self._text = model.tokenizer.stream(), ""
        self._cache: Any = None

    @property
    def tokens(self) -> int:
        """Tokens that its cache holds at most."""
        return len(self._prompt) + self._limit

    def unwanted(self) -> bool:
        """Ends it where it was cancelled or is late."""
        if self.request.cancelled:
            self._end("cancelled")
        elif self._deadline is not None and time.monotonic() > self._deadline:
            self._end("deadline")
        return self.ended

    def advance(self, chunk: int) -> None:
        """One token more, or one chunk of the prompt."""
        if self.unwanted():
            return
        try:
            if self._limit < 1:
                self._end("length")
                return
            logits = self._step(chunk)
            if logits is not None:
                self._take(logits)
        except Exception as error:  # of this request; others go on
            self._end("error", error)

    @torch.inference_mode()
    def _step(self, chunk: int) -> Tensor | None:
        """Logits ``[1, V]`` of the next token; None while the prompt is being read."""
        if self._cache is None:
            self._cache = self._model.new_cache(self.tokens)
        if self.read < len(self._prompt):
            ids = self._prompt[self.read : self.read + chunk]
            self.read += len(ids)
        else:
            ids = self.ids[-1:]
        logits = self._model(torch.tensor([ids]), cache=self._cache, last=1)[:, -1]
        return logits if self.read == len(self._prompt) else None

    @torch.inference_mode()
    def _take(self, logits: Tensor) -> None:
        """Draws a token, and tells the caller."""
        scores, count = logits, len(self._prompt)
        rows = Rows([[*self._prompt, *self.ids]], len(self.ids), [count], [self._prompt])
        for rule in self._rules:
            scores = rule(rows, scores)
        token = self._sampler(scores[0])
        self.ids.append(token)
        told = None if self._likeliest is None else (self._told(logits[0], token),)
        self._logprobs += told or ()
        if token in self._stop_ids:
            self._flush(Piece("", (token,), told), "stop")
            return
        piece = self._stops.feed(self._decoder.push(token))
        if not self._stops.found and len(self.ids) < self._limit:
            self._put(Piece(piece, (token,), told))
            return
        if self._stops.found:
            self._put(Piece(piece, (token,), told))
            self._end("stop")
        else:
            self._flush(Piece(piece, (token,), told), "length")

    def _flush(self, piece: Piece, reason: FinishReason) -> None:
        """Ends the text with what was held back."""
        rest = self._stops.feed(self._decoder.flush()) + self._stops.flush()
        if self._stops.found:
            reason = "stop"
        self._put(Piece(piece.text + rest, piece.ids, piece.logprobs))
        self._end(reason)

    def _told(self, logits: Tensor, token: int) -> TokenLogprobs:
        logprobs = logits.float().log_softmax(dim=-1)
        best = logprobs.topk(self._likeliest or 0)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return TokenLogprobs(token, float(logprobs[token]), tuple(pairs))

    def _put(self, piece: Piece) -> None:
        self._text += piece.text
        if not self.request.put(piece):
            self._end("slow reader")

    def _end(self, reason: FinishReason, error: Exception | None = None) -> None:
        if not self.ended:
            self.ended, self._cache = True, None
            told = None if self._likeliest is None else tuple(self._logprobs)
            self.request.end(
                Completion(self._text, tuple(self.ids), reason, len(self._prompt), 0, told, error)
            )


def _token_bytes(model: LanguageModel, dtype: str) -> int:
    """Bytes that one more token takes in a cache."""
    layers = caches(model.config, dtype)
    most = model.config.max_positions
    return sum(layer.bytes(most, 1) for layer in layers) // most + 1


def _free_memory() -> int:
    """Bytes of memory that are free, as the system says."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 << 30
