"""What a round of the engine computes: a token for every live row, and tokens of prompts."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from polyhead.caches import ModelCache
from polyhead.checkpoints import RowAdapters
from polyhead.generation import LanguageModel
from polyhead.kernels.batch_invariant import batch_invariant
from polyhead.native.arguments import MAX_STEP_ROWS
from polyhead.serving.batches import Batch, Batches
from polyhead.serving.budget import Budget
from polyhead.serving.chunks import Chunks
from polyhead.serving.guesser import Guesser, guesses_of
from polyhead.serving.heads import RowHeads
from polyhead.serving.row import Row
from polyhead.serving.split import Split
from polyhead.serving.stats import Counts
from polyhead.serving.steps import compute, compute_alone, feed, take, take_guessed
from polyhead.serving.waiting import Waiting


class Rounds:
    """The rows of one model, and the steps that they take together; an ``Engine`` brings them in.

    Args:
        model: A decoder in evaluation mode.
        adapters: Its adapters by name.
        split: How it is split over processes; None: it is not.
        budget: The room for rows.
        guesser: Guesses tokens that are then checked.
        chunks: Cuts prompts.
        max_rows: Rows that are computed at a time.
        prompt_chunk: Tokens of prompts that a round reads at most.
        batch_invariant: Whether a row has the bits it has alone.
    """

    def __init__(
        self,
        model: LanguageModel,
        adapters: RowAdapters,
        split: Split | None,
        budget: Budget,
        guesser: Guesser,
        chunks: Chunks,
        *,
        max_rows: int,
        prompt_chunk: int,
        batch_invariant: bool,
    ) -> None:
        self.model, self.adapters, self.heads = model, adapters, RowHeads(model)
        self.max_rows, self.prompt_chunk = max_rows, prompt_chunk
        self.batch_invariant = batch_invariant
        self._split, self._budget, self._guesser, self._chunks = split, budget, guesser, chunks
        self._batches = None if budget.pool is None else Batches(budget.pool)
        self._lock = threading.Condition()
        self._queue, self._rows = Waiting(), list[Row]()
        self._reading: Row | None = None
        self._counts = Counts()

    @property
    def lost(self) -> Exception | None:
        """Why no request can be computed any more: a process that has a part of the model is gone.

        None while all is well, and always where the model is not split.
        """
        return None if self._split is None else self._split.lost()

    def _exactly(self) -> AbstractContextManager[None]:
        return exactly(self.batch_invariant)

    def _drawing(self, row: Row) -> AbstractContextManager[None]:
        """What a row's draws are made in: a maximum is the same in any order."""
        return nullcontext() if row.is_greedy else self._exactly()

    def _decode(self) -> int:
        """A token for every row that has read its prompt, or can read the rest beside the others.

        Returns:
            How many of ``prompt_chunk`` tokens of prompts are left.
        """
        self._preempt()
        left = self.prompt_chunk
        if self._batches is None:
            for row in [each for each in self._rows if each is not self._reading]:
                self._step([row], None)
        else:
            for batch in self._batches.gathered():
                left = self._join_prompts(self._batches, batch, left)
                self._step([*batch.rows], batch.cache)
        return left

    def _join_prompts(self, batches: Batches, batch: Batch, most: int) -> int:
        """Puts rows into a batch whose step has room for the rest of their prompts.

        Where steps are native; else all rows would be filled up to the longest.

        Returns:
            How many of ``most`` tokens of prompts are left.
        """
        left = most
        if self.model.transformer.decode_plan(batch.cache).is_native:
            while (row := self._reading or self._admit()) is not None:
                self._reading, rest = row, row.length - row.fed
                fits = self._chunks.tokens(rest, left, beside=True)
                if row.adapter or rest > min(fits, MAX_STEP_ROWS - batch.tokens):
                    break
                batches.join(batch, row)
                self._reading, left = None, left - rest
        return left

    def _step(self, rows: list[Row], cache: ModelCache | None) -> None:
        """A token for rows in one cache, and those guessed right; None: for one in its own."""
        guesses: list[list[int]] = [[] for _ in rows]
        read = [row.next_ids(row.length) for row in rows]
        fresh = [row.reads for row in rows]
        try:
            if cache is not None and self._guesser.most:
                spare = self._budget.spare(self._rows, rows) - 1
                guesses = guesses_of(self._guesser, rows, read, spare)
            step = partial(compute, self.model, self.adapters, cache, rows, read, guesses)
            with self._exactly():
                computed = self.heads.watched(rows, read, step)
        except Exception as error:
            if self.lost is not None:
                raise
            # A call that fails leaves its cache as it was: the others are computed in the next.
            youngest = max(rows, key=age)
            youngest.end("error", error)
            self._guesser.drop(rows)
            self._drop([youngest])
            return
        wrong = []
        for row, ids, guess, (logits, hidden) in zip(rows, read, guesses, computed, strict=True):
            feed(row, len(ids), self._counts)
            with self._drawing(row):
                right = take_guessed(row, guess, logits, self._counts)
            wrong.append(len(guess) - right)
            self._guesser.count(row, len(guess), right)
            self._note(row, hidden[: len(ids) + right])
        if cache is not None:
            if any(wrong):
                cache.rollback(wrong)
            for place, row in enumerate(rows):
                if fresh[place]:
                    self._budget.keep_prefix(row, cache, place)
        self._drop([row for row in rows if row.ended])

    def _note(self, row: Row, hidden: Tensor) -> None:
        """Tells what guesses that a row's cache has grown."""
        try:
            self._guesser.read(row, hidden)
        except Exception as error:
            if self.lost is not None:
                raise
            row.end("error", error)

    def _read_prompts(self, left: int) -> None:
        """Reads tokens of prompts, one prompt after the other."""
        while left > 0:
            row = self._reading or self._admit()
            if row is None:
                return
            self._reading = row
            count = self._chunks.tokens(row.length - row.fed, left, beside=len(self._rows) > 1)
            if not count:
                return
            started = time.perf_counter()
            try:
                with self._exactly():
                    logits, hidden = compute_alone(
                        self.model,
                        self.adapters,
                        row,
                        count,
                        wants_hidden=self._guesser.wants_hidden,
                    )
                logits[0, 0].item()  # waits for a device
            except Exception as error:
                if self.lost is not None:
                    raise
                row.end("error", error)
                self._drop([row])
                continue
            feed(row, count, self._counts)
            left -= count
            self._note(row, hidden)
            self._chunks.count(count, time.perf_counter() - started)
            if row.ended:
                self._drop([row])
                continue
            if row.fed < row.length:
                return
            with self._drawing(row):
                take(row, logits, self._counts)
            self._reading = None
            self._finish_reading(row)

    def _finish_reading(self, row: Row) -> None:
        """Keeps the row's pages for others, and puts it among the rows of the batch."""
        if row.cache is not None:
            self._budget.keep_prefix(row, row.cache, 0)
        if row.ended:
            self._drop([row])
        elif self._batches is not None:
            self._batches.add(row)

    def _admit(self) -> Row | None:
        """The next request with room for its prompt and its limit, if there is a free row."""
        with self._lock:
            if not self._queue or len(self._rows) >= self.max_rows:
                return None
            if (found := self._queue.start(self._budget.allocator(self._rows))) is None:
                return None
            row, cache = found
            row.start(*cache)
            self._counts.cached_tokens += row.cached
            self._rows.append(row)
            return row

    def _preempt(self) -> None:
        """Where more was promised than there is: queues the youngest again until a token fits."""
        while self._rows and not self._budget.has_room(self._rows):
            row = max(self._rows, key=age)
            self._drop([row])
            row.restart()
            with self._lock:
                self._counts.preemptions += 1
                self._queue.add(row)

    def _drop(self, rows: Sequence[Row]) -> None:
        """Takes rows out, and gives their pages back."""
        if not rows:
            return
        if self._batches is not None:
            self._batches.drop(rows)
        self._guesser.drop(rows)
        for row in rows:
            if row.cache is not None:
                row.cache.reset()
                row.cache = None
            if row is self._reading:
                self._reading = None
        with self._lock:
            self._rows = [row for row in self._rows if row not in rows]


def exactly(wanted: bool) -> AbstractContextManager[None]:
    """A block in which a row has the bits that it has alone, if that is wanted."""
    return batch_invariant() if wanted else nullcontext()


def age(row: Row) -> int:
    """Its place in the order in which requests came."""
    return row.number
