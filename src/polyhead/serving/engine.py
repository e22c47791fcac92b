"""One model for many callers: one thread owns it, and computes their requests together.

Each round every live request takes one token, up to eight of them in one call, and prompts are
read in chunks, first come, first served. A request starts when there is a free row and room for its
prompt and its limit. Requests share the pages of their prefixes. Within ``ph.batch_invariant()`` a
row has the bits it has alone, whoever is beside it, and whether its prefix was read for it or for
others.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from polyhead import native
from polyhead._utils.checks import check_bool, check_int
from polyhead.caches import ModelCache
from polyhead.caches.shared_pool import SharedPool
from polyhead.errors import InputError, UnsupportedError
from polyhead.generation import LanguageModel
from polyhead.generation.decoding.rules import Rule
from polyhead.generation.decoding.stops import StopTexts
from polyhead.kernels.batch_invariant import batch_invariant
from polyhead.planning.memory import caches
from polyhead.serving.batches import Batches
from polyhead.serving.prefixes import Prefixes
from polyhead.serving.requests import QueueFull, Request
from polyhead.serving.row import Row

_SHARE = 0.5
"""Part of the free memory that caches may take by default."""


@dataclass(frozen=True)
class EngineStats:
    """Counts of an engine.

    Attributes:
        live: Requests that are being computed.
        queued: Requests that wait.
        used_tokens: Tokens that live requests have room for, in whole pages.
        free_tokens: Tokens that there is room for beside them.
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
        prompt_chunk: Tokens of prompts that are read in one round.
        share_prefixes: Whether full pages of prompts are kept for later requests, while there is
            room, those used longest ago first out.
        overcommit: Start requests when there is room for the prompt and a token; where room runs
            out, the youngest gives back its memory, waits and is computed again.
        batch_invariant: Compute within ``ph.batch_invariant()``; None: on a CPU with native code.
        page_size: Tokens of a page.

    A model with layers that remember more than keys and values is computed row by row, without
    shared prefixes.

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
        share_prefixes: bool = True,
        overcommit: bool = False,
        batch_invariant: bool | None = None,
        page_size: int = 16,
    ) -> None:
        self.model = model.eval()
        check_bool("share_prefixes", share_prefixes, error=ValueError)
        self.overcommit = check_bool("overcommit", overcommit, error=ValueError)
        self.max_rows = check_int("max_rows", max_rows, least=1, error=ValueError)
        self.max_queue = check_int("max_queue", max_queue, least=1, error=ValueError)
        self.prompt_chunk = check_int("prompt_chunk", prompt_chunk, least=1, error=ValueError)
        weights = model.transformer.embedding.like
        self._token_bytes = _token_bytes(model, str(weights.dtype).removeprefix("torch."))
        if max_tokens is None:
            fitting = int(_free_memory() * _SHARE) // max(1, self._token_bytes)
            max_tokens = max(1, min(fitting, max_rows * model.config.max_positions))
        self.max_tokens = check_int("max_tokens", max_tokens, least=1, error=ValueError)
        if batch_invariant is None:
            batch_invariant = weights.is_cpu and native.unavailable() is None
        self.batch_invariant = check_bool("batch_invariant", batch_invariant, error=ValueError)
        self.page_size = check_int("page_size", page_size, least=1, error=ValueError)
        self._pool = self._new_pool()
        self._prefixes = Prefixes(self._pool) if share_prefixes and self._pool else None
        self._lock, self._turn = threading.Condition(), threading.Lock()
        self._queue: deque[Row] = deque()
        self._rows: list[Row] = []
        self._reading: Row | None = None
        self._batches = None if self._pool is None else Batches(self._pool)
        self._read = self._written = self._cached = self._preemptions = 0
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
        row = Row(
            self.model,
            prompt,
            {"max_new_tokens": max_new_tokens, **options},
            StopTexts(stop),
            rules,
            logprobs,
            None if deadline is None else time.monotonic() + deadline,
            share_with,
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
                raise QueueFull("the engine is ending", 10.0)
            if len(self._queue) >= self.max_queue:
                raise QueueFull(f"{len(self._queue)} requests wait", 1.0)
            self._queue.append(row)
            self._lock.notify_all()
        return row.request

    def step(self) -> bool:
        """One round: a token for every live request, and ``prompt_chunk`` tokens of prompts.

        Returns:
            False where there was nothing to do.
        """
        with self._turn:
            with self._lock:
                busy = bool(self._rows or self._queue)
                for row in [each for each in self._queue if each.unwanted()]:
                    self._queue.remove(row)
            with self._exactly(), torch.inference_mode():
                self._drop([row for row in self._rows if row.unwanted()])
                self._decode()
                self._read_prompts()
            return busy

    def forget_prefixes(self) -> None:
        """Gives back the pages that are kept for later requests."""
        with self._turn:
            if self._prefixes is not None:
                self._prefixes.evict(self._pages(self.max_tokens))

    def _exactly(self) -> AbstractContextManager[None]:
        return batch_invariant() if self.batch_invariant else nullcontext()

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
            total = self._pages(self.max_tokens) * self.page_size
            live = [row for row in self._rows if not row.ended]
            used = sum(self._pages(self._wanted(row)) for row in live) * self.page_size
            used = min(used, total)  # rows share pages
            return EngineStats(
                live=len(live),
                queued=len(self._queue),
                used_tokens=used,
                free_tokens=total - used,
                pool_bytes=total * self._token_bytes if self._pool is None else self._pool.bytes,
                prompt_tokens=self._read,
                output_tokens=self._written,
                cached_tokens=self._cached,
                preemptions=self._preemptions,
            )

    def _new_pool(self) -> SharedPool | None:
        """Pages for all tokens, where every layer of the model can lie in them."""
        pages = self._pages(self.max_tokens)
        cache = self.model.new_cache(pages * self.page_size, kind="paged", page_size=self.page_size)
        with self._exactly(), torch.inference_mode():
            self.model.transformer(torch.zeros(1, 1, dtype=torch.int64), cache=cache, last=1)
        try:
            return SharedPool(cache)
        except UnsupportedError:
            return None

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._rows or self._queue or self._ending)
                if self._ending and not self._rows and not self._queue:
                    return
            self.step()

    def _decode(self) -> None:
        """A token for every row that has read its prompt."""
        self._make_room()
        if self._batches is None:
            for row in [each for each in self._rows if each is not self._reading]:
                self._step([row], None)
        else:
            for batch in self._batches.gathered():
                self._step([*batch.rows], batch.cache)

    def _step(self, rows: list[Row], cache: ModelCache | None) -> None:
        """A token for rows in one cache; None: for one row in its own."""
        try:
            if cache is None:
                logits = [self._logits(rows[0], 1)]
            else:
                ids = torch.tensor([row.ids[-1:] for row in rows], device="cpu")
                logits = [*self.model.transformer(ids, cache=cache, last=1)[:, -1:]]
        except Exception as error:
            # A call that fails leaves its cache as it was: the others are computed in the next.
            youngest = max(rows, key=self._rows.index)
            youngest.end("error", error)
            self._drop([youngest])
            return
        for row, scores in zip(rows, logits, strict=True):
            row.feed(1)
            self._take(row, scores)
        self._drop([row for row in rows if row.ended])

    def _read_prompts(self) -> None:
        """Reads prompts, first come, first served."""
        left = self.prompt_chunk
        while left > 0:
            row = self._reading or self._admit()
            if row is None:
                return
            self._reading = row
            count = min(left, row.length - row.fed)
            try:
                logits = self._logits(row, count)
            except Exception as error:
                row.end("error", error)
                self._drop([row])
                continue
            before = row.read
            row.feed(count)
            self._read += row.read - before
            left -= count
            if row.fed < row.length:
                return
            self._take(row, logits)
            self._reading = None
            self._finish_reading(row)

    def _logits(self, row: Row, count: int) -> Tensor:
        assert row.cache is not None
        ids = torch.tensor([row.next_ids(count)], device="cpu")
        logits: Tensor = self.model.transformer(ids, cache=row.cache, last=1)
        return logits[0, -1]

    def _take(self, row: Row, logits: Tensor) -> None:
        after = len(row.ids) + 1
        self._written += 1  # before its caller hears of it
        row.take(logits.reshape(1, -1))
        self._written -= after - len(row.ids)

    def _finish_reading(self, row: Row) -> None:
        """Keeps the row's pages for others, and puts it among the rows of the batch."""
        if self._pool is None or self._batches is None or row.cache is None:
            self._drop([row] if row.ended else [])
            return
        if self._prefixes is not None:
            pages = self._pool.pages_of(row.cache, 0, row.fed)
            self._prefixes.add(row.all_ids[: row.fed], row.share_with, pages)
        if row.ended:
            self._drop([row])
        else:
            self._batches.add(row)

    def _admit(self) -> Row | None:
        """The next request, if there is a free row, and room for its prompt and its limit."""
        with self._lock:
            if not self._queue or len(self._rows) >= self.max_rows:
                return None
            row = self._queue[0]
            cache, fed = None, 0
            if self._pool is None:
                used = sum(each.tokens for each in self._rows)
                if used + row.tokens > self.max_tokens:
                    return None
                cache = self.model.new_cache(row.tokens)
            else:
                ids = row.all_ids
                prefix = [] if self._prefixes is None else self._prefixes.find(ids, row.share_with)
                cache, fed = self._pool.row(prefix), len(prefix) * self._pool.page_size
                lacking = self._pages(self._wanted(row)) - len(prefix) - self._unclaimed()
                if lacking > 0:
                    idle = 0 if self._prefixes is None else self._prefixes.idle()
                    if lacking > idle or self._prefixes is None:
                        cache.reset()
                        return None
                    self._prefixes.evict(lacking)
            self._queue.popleft()
            row.start(cache, fed)
            self._cached += row.cached
            self._rows.append(row)
            return row

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _wanted(self, row: Row) -> int:
        """Tokens that there must be room for before a row goes on."""
        return row.length + 1 if self.overcommit else row.tokens

    def _unclaimed(self) -> int:
        """Free pages that no row is going to need."""
        assert self._pool is not None
        claims = 0
        for row in self._rows:
            claims += self._pages(self._wanted(row)) - self._pages(row.fed)
        return self._pool.free - claims

    def _make_room(self) -> None:
        """Where more was promised than there is: preempts the youngest until a token fits."""
        if self._pool is None or not self.overcommit:
            return
        while self._rows and (lacking := -self._unclaimed()) > 0:
            if self._prefixes is not None and self._prefixes.evict(lacking):
                continue
            row = self._rows[-1]
            self._drop([row])
            row.restart()
            with self._lock:
                self._preemptions += 1
                self._queue.appendleft(row)

    def _drop(self, rows: Sequence[Row]) -> None:
        """Takes rows out, and gives their pages back."""
        if not rows:
            return
        if self._batches is not None:
            self._batches.drop(rows)
        for row in rows:
            if row.cache is not None:
                if self._pool is not None:
                    row.cache.reset()
                row.cache = None
            if row is self._reading:
                self._reading = None
        with self._lock:
            self._rows = [row for row in self._rows if row not in rows]


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
