"""A request as the engine has it: what it has read and written, and how its next token is drawn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from polyhead.caches import ModelCache
from polyhead.generation import LanguageModel, TextSampler
from polyhead.generation.decoding.rules import Rule
from polyhead.serving.requests import Completion, FinishReason, Request
from polyhead.serving.stats import RequestStats


class Row:
    """A request as the engine has it.

    Attributes:
        fed: Tokens of prompt and text that its cache holds.
        read: Tokens of the prompt that were computed for it, those computed again not counted.
        cached: Tokens of the prompt that other requests had read.
        cache: Its own, while it is not among the others of a batch.
        ended: Whether it has ended.
        guessed: Guesses at its tokens that were checked.
        accepted: Of these, those that were right.
        adapter: Name of its adapter, or None.
        number: Its place by age among those of its engine, from 1; 0 before it is queued.
        passed: Later rows that started before it while it waited.
        sharing: Rows share the pages of common prefixes with rows for which this is equal.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: str | Sequence[int],
        options: dict[str, Any],
        stop: str | Sequence[str] | None,
        rules: Sequence[Rule],
        logprobs: int | None,
        deadline: float | None,
        share_with: str,
        adapter: str | None,
    ) -> None:
        self._sampler = TextSampler(
            model, prompt, stop=stop, rules=rules, logprobs=logprobs, **options
        )
        self.request, self.adapter, self.sharing = Request(), adapter, (share_with, adapter)
        self.ended, self._submitted, self._deadline = False, time.monotonic(), deadline
        self.fed = self.read = self.cached = self.guessed = self.accepted = 0
        self.number = self.passed = 0
        self.cache: ModelCache | None = None

    @property
    def stats(self) -> RequestStats:
        """How far it has come."""
        share_with, adapter = self.sharing
        return RequestStats(
            self.request.id,
            adapter,
            share_with,
            prompt_tokens=len(self._sampler.prompt),
            read_tokens=min(self.fed, len(self._sampler.prompt)),
            cached_tokens=self.cached,
            output_tokens=len(self.ids),
            limit=self._sampler.limit,
            seconds=time.monotonic() - self._submitted,
        )

    @property
    def ids(self) -> list[int]:
        """Tokens that were written."""
        return self._sampler.ids

    @property
    def all_ids(self) -> list[int]:
        """Prompt and text."""
        return [*self._sampler.prompt, *self.ids]

    @property
    def length(self) -> int:
        """Tokens of prompt and text."""
        return len(self._sampler.prompt) + len(self.ids)

    def next_ids(self, most: int) -> list[int]:
        """The next tokens that its cache does not hold."""
        if self.ids and self.fed == self.length - 1:
            return self.ids[-1:]
        return self.all_ids[self.fed : self.fed + most]

    @property
    def reads(self) -> bool:
        """Whether its cache lacks more than its last token."""
        return not self.ids or self.fed < self.length - 1

    def feed(self, count: int) -> None:
        """Counts tokens that its cache now holds."""
        self.fed += count
        self.read = max(self.read, min(self.fed, len(self._sampler.prompt)) - self.cached)

    def start(self, cache: ModelCache, fed: int) -> None:
        """Begins with a cache that holds its first tokens."""
        self.cache, self.fed = cache, fed
        if not self.ids and not self.read:
            self.cached = fed

    def restart(self) -> None:
        """Gives up its cache; what it wrote stays, and is read again."""
        self.cache, self.fed = None, 0

    @property
    def left(self) -> int:
        """Tokens that it may still draw."""
        return self._sampler.limit - len(self.ids)

    @property
    def tokens(self) -> int:
        """Tokens that its cache holds at most."""
        return len(self._sampler.prompt) + self._sampler.limit

    def unwanted(self) -> bool:
        """Ends it where it was cancelled or is late."""
        if self.request.cancelled:
            self.end("cancelled")
        elif self._deadline is not None and time.monotonic() > self._deadline:
            self.end("deadline")
        return self.ended

    def take(self, logits: Tensor) -> None:
        """Draws a token from the logits ``[1, V]`` after all that it has, and tells the caller."""
        try:
            piece = self._sampler.take(logits)
        except Exception as error:  # of this request; others go on
            self.end("error", error)
            return
        if not self.request.put(piece):
            self.end("slow reader")
        if (reason := self._sampler.finish_reason) is not None:
            self.end(reason)

    @property
    def empty(self) -> bool:
        """Whether there is no room for a token."""
        return self._sampler.limit < 1

    @property
    def is_greedy(self) -> bool:
        """Whether its tokens are those of the largest logits, and nothing else is computed."""
        return self._sampler.is_greedy

    def end(self, reason: FinishReason, error: Exception | None = None) -> None:
        if not self.ended:
            self.ended = True
            told = self._sampler.logprobs
            self.request.end(
                Completion(
                    self._sampler.text,
                    tuple(self.ids),
                    reason,
                    len(self._sampler.prompt),
                    self.cached,
                    None if told is None else tuple(told),
                    error,
                    self.guessed,
                    self.accepted,
                )
            )
