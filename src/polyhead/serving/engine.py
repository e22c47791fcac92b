"""One model for many callers: one thread owns it, and computes their requests together.

Each round every live request takes one token, up to 64 of them in one call, and prompts are
read in chunks, one after the other; the rest of a prompt in that call, where it has room. The
oldest request that has room for its prompt and its limit starts when there is a free row, but none
is passed for ever (``waiting.py``). Requests share the pages of their prefixes. Within
``ph.batch_invariant()`` a row has the bits it has alone, whoever is beside it, and whether its
prefix was read for it or for others.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from polyhead import native
from polyhead._utils.checks import check_bool, check_int, check_number
from polyhead.checkpoints import RowAdapters
from polyhead.errors import InputError, UnsupportedError
from polyhead.generation import LanguageModel
from polyhead.generation.decoding.rules import Rule
from polyhead.models import MultiTokenPredictor
from polyhead.native.arguments import MAX_GEMV_ROWS
from polyhead.native.threads import end_team
from polyhead.serving.budget import Budget, fitting_tokens
from polyhead.serving.chunks import Chunks
from polyhead.serving.drafts import SPARE, Drafts
from polyhead.serving.guesser import Guesser
from polyhead.serving.lookup import Lookups
from polyhead.serving.requests import EngineEnding, QueueFull, Request
from polyhead.serving.rounds import Rounds, age, exactly
from polyhead.serving.row import Row
from polyhead.serving.split import split_of
from polyhead.serving.stats import EngineStats, RequestStats
from polyhead.serving.waiting import Waiting


class Engine(Rounds):
    """Runs the requests of many callers on one model.

        with Engine(model) as engine:
            request = engine.submit("The capital of France is", max_new_tokens=20)
            print(request.result().text)

    Args:
        model: A decoder; the engine keeps it in evaluation mode.
        max_tokens: Tokens of all caches together; default: half of the free memory, but no more
            than ``max_rows`` whole contexts.
        max_rows: Requests that are computed at a time; default 32.
        max_queue: Requests that wait; default 256.
        prompt_chunk: Tokens of prompts that are read in one round; default 256.
        prompt_seconds: What reading them may take while other requests write, by the speed of the
            last; a page is read however long it takes. Default 1.0; None: no limit. Results depend
            on it only as they depend on ``prompt_chunk``: with ``batch_invariant`` not at all,
            without it within rounding, and then not the same from run to run.
        share_prefixes: Whether full pages of prompts are kept for later requests while there is
            room, the least recently used given up first; default True.
        overcommit: Start requests when there is room for the prompt and a token; where room runs
            out, the youngest gives back its memory, waits and is computed again. Default False: a
            request starts when there is room for its prompt and its limit.
        batch_invariant: Compute within ``ph.batch_invariant()``; default: on a CPU with native
            code.
        page_size: Tokens of a page; default 16.
        lookup_tokens: Tokens of a request that are guessed from its own text (prompt lookup) and
            checked in one step, at most; 0 to 7, default 0. What is drawn does not change.
        draft: A smaller decoder with the same vocabulary, or the model's module of multi-token
            prediction (``ph.load_predictor``), which guesses tokens that are then checked in one
            step; what is drawn does not change. Its caches hold ``max_tokens`` too. Default none.
        draft_tokens: Tokens of a request that it guesses at most, fewer or none where that does
            not pay; 1 to 7, default 4.
        adapters: LoRA adapters by name, as ``ph.RowAdapters`` takes them; default none.

    A model with layers that remember more than keys and values is computed row by row, without
    shared prefixes.

    Raises:
        ValueError: A number or flag that cannot be, by name.
        UnsupportedError: ``lookup_tokens`` or ``draft`` for a model that is computed row by row;
            for a model that is split over processes adapters, or its module of multi-token
            prediction; such a model outside ``parallel.led``.
        PolyheadError: What ``ph.RowAdapters`` raises.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_tokens: int | None = None,
        max_rows: int = 32,
        max_queue: int = 256,
        prompt_chunk: int = 256,
        prompt_seconds: float | None = 1.0,
        share_prefixes: bool = True,
        overcommit: bool = False,
        batch_invariant: bool | None = None,
        page_size: int = 16,
        lookup_tokens: int = 0,
        draft: LanguageModel | MultiTokenPredictor | None = None,
        draft_tokens: int = 4,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    ) -> None:
        split = split_of(model.transformer)
        if split is not None:
            _check_split(adapters, draft)
        check_bool("share_prefixes", share_prefixes, error=ValueError)
        self.overcommit = check_bool("overcommit", overcommit, error=ValueError)
        check_int("max_rows", max_rows, least=1, error=ValueError)
        self.max_queue = check_int("max_queue", max_queue, least=1, error=ValueError)
        check_int("prompt_chunk", prompt_chunk, least=1, error=ValueError)
        self.page_size = check_int("page_size", page_size, least=1, error=ValueError)
        if prompt_seconds is not None:
            hint = ", or None for no limit"
            check_number("prompt_seconds", prompt_seconds, above=0, hint=hint, error=ValueError)
        most = MAX_GEMV_ROWS - 1
        check_int("lookup_tokens", lookup_tokens, least=0, most=most, error=ValueError)
        check_int("draft_tokens", draft_tokens, least=1, most=most, error=ValueError)
        if lookup_tokens and draft is not None:
            raise ValueError("give lookup_tokens or draft, not both: one of them guesses tokens")
        if max_tokens is None:
            max_tokens = fitting_tokens([model] if draft is None else [model, draft], max_rows)
        self.max_tokens = check_int("max_tokens", max_tokens, least=1, error=ValueError)
        if batch_invariant is None:
            batch_invariant = model.transformer.embedding.like.is_cpu and not native.unavailable()
        check_bool("batch_invariant", batch_invariant, error=ValueError)
        model, guesser = model.eval(), Guesser()
        with exactly(batch_invariant), torch.inference_mode():
            kept = {"share_prefixes": share_prefixes, "overcommit": overcommit}
            budget = Budget(model, self.max_tokens, page_size, **kept)
        if budget.pool is None and (lookup_tokens or draft is not None):
            raise UnsupportedError(
                "lookup_tokens must be 0 and draft must be None for a model computed row by row"
            )
        if lookup_tokens:
            guesser = Lookups(lookup_tokens)
        if draft is not None:
            tokens = self.max_tokens + max_rows * (SPARE + page_size)
            with torch.inference_mode():
                guesser = Drafts(
                    model, draft, draft_tokens, tokens, page_size, share_prefixes=share_prefixes
                )
        super().__init__(
            model,
            RowAdapters(model, adapters or {}),
            split,
            budget,
            guesser,
            Chunks(prompt_chunk, prompt_seconds, page_size),
            max_rows=max_rows,
            prompt_chunk=prompt_chunk,
            batch_invariant=batch_invariant,
        )
        self._turn = threading.Lock()
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
        adapter: str | None = None,
        **options: Any,
    ) -> Request:
        """Queues a request.

        Args:
            prompt: The text, or its tokens.
            max_new_tokens: New tokens at most.
            stop: The text ends before this text, or before the first of several; default: only at
                the model's stop tokens.
            rules: Functions that change the scores ``[1, V]`` of the next token, called after
                those of the options; default none.
            logprobs: Also give the log-probability of each token, and those of so many likeliest
                tokens in its place; default: none.
            deadline: Seconds from now after which it ends, unfinished or not; default: no limit.
            share_with: Only requests of the same name and adapter share the pages of common
                prefixes; default "".
            adapter: Name of its adapter; default none.
            options: Fields of ``GenerationOptions``, such as ``temperature`` and ``seed``; no
                beams. Default: the model's own.

        Returns:
            The request, whose pieces and result any thread may read. One without room for a token
            has ended already.

        Raises:
            QueueFull: ``max_queue`` requests wait; its kind ``EngineEnding``: the engine is ending.
            InputError: An empty prompt or one too long for ``max_tokens``; an unknown adapter.
            ContextLengthError: The prompt is longer than the model's context.
            TypeError: An unknown option.
            ValueError: An option out of range, by name.
        """
        self.adapters.check(adapter)
        row = Row(
            self.model,
            prompt,
            {"max_new_tokens": max_new_tokens, **options},
            stop,
            rules,
            logprobs,
            None if deadline is None else time.monotonic() + deadline,
            share_with,
            adapter,
        )
        if row.empty:
            row.end("length")
            return row.request
        if row.tokens > self.max_tokens:
            raise InputError(
                f"the prompt and max_new_tokens are {row.tokens:,} tokens: the cache holds "
                f"{self.max_tokens:,}"
            )
        with self._lock:
            if self._ending:
                raise self._ending_now()
            if len(self._queue) >= self.max_queue:
                raise QueueFull(f"{len(self._queue)} requests wait", 1.0)
            self._queue.add(row)
            self._lock.notify_all()
        return row.request

    def step(self) -> bool:
        """One round: a token for every live request, and up to ``prompt_chunk`` of prompts.

        For callers without ``start``; errors of a request are in its result.

        Returns:
            False if there was nothing to do.
        """
        with self._turn:
            with self._lock:
                busy = bool(self._rows or self._queue)
                for row in [each for each in self._queue if each.unwanted()]:
                    self._queue.remove(row)
            try:
                with torch.inference_mode():
                    self._drop([row for row in self._rows if row.unwanted()])
                    self._read_prompts(self._decode())
            except Exception:
                if self.lost is None:
                    raise
            if self.lost is not None:
                self._give_up()
            return busy

    def forget_prefixes(self) -> None:
        """Forgets the prefixes that no live request has, and gives the memory of free pages back.

        The caches grow again as requests need them.
        """
        with self._turn:
            self._budget.forget_prefixes()
            self._guesser.forget_prefixes()

    def _ending_now(self) -> EngineEnding:
        why = "" if self.lost is None else f": {self.lost}"
        return EngineEnding(f"the engine is ending{why}", 10.0)

    def _give_up(self) -> None:
        """Ends all requests with an error, and takes no more."""
        with self._lock:
            left, self._rows, self._ending = [*self._rows, *self._queue], [], True
            self._queue = Waiting()
            self._reading = None
        for row in left:
            row.end("error", self._ending_now())

    def start(self) -> None:
        """Starts the thread that computes; does nothing if it runs."""
        with self._lock:
            if self._thread is None:
                end_team()
                self._ending = False
                self._thread = threading.Thread(target=self._run, name="polyhead-engine")
                self._thread.start()

    def close(self, timeout: float = 30.0) -> None:
        """Ends the thread that computes, and refuses new requests.

        Args:
            timeout: Seconds that requests have to end; the others are then cancelled. Default 30.
        """
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
            stats = self._budget.stats(self._rows, len(self._queue), self._counts)
            return replace(stats, pool_bytes=stats.pool_bytes + self._guesser.bytes)

    @property
    def requests(self) -> tuple[RequestStats, ...]:
        """The live requests, the oldest first."""
        with self._lock:
            rows = sorted(self._rows, key=age)
            return tuple(row.stats for row in rows if not row.ended)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._rows and not self._queue:
                    end_team()
                self._lock.wait_for(lambda: self._rows or self._queue or self._ending)
                if self._ending and not self._rows and not self._queue:
                    return
            self.step()


def _check_split(
    adapters: Mapping[str, str | os.PathLike[str]] | None,
    draft: LanguageModel | MultiTokenPredictor | None,
) -> None:
    """Raises UnsupportedError for what other processes would have to know of."""
    if adapters:
        raise UnsupportedError(
            "adapters must be none for a model that is split over processes: merge one when it is "
            "loaded (ph.load(…, adapter=DIR))"
        )
    if draft is not None and not isinstance(draft, LanguageModel):
        raise UnsupportedError(
            f"draft must be a smaller decoder for a model that is split over processes: got a "
            f"{type(draft).__name__}"
        )
