"""A request as the engine has it: what it has read and written, and how its next token is drawn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyhead._utils.checks import check_int
from polyhead.caches import ModelCache
from polyhead.generation import LanguageModel
from polyhead.generation.decoding.options import room
from polyhead.generation.decoding.rules import Rows, Rule, rules_of
from polyhead.generation.decoding.sampling import Sampler
from polyhead.generation.decoding.steps import check_search
from polyhead.generation.decoding.stops import StopTexts
from polyhead.serving.requests import Completion, FinishReason, Piece, Request, TokenLogprobs
from polyhead.serving.stats import RequestStats


class Row:
    """A request as the engine has it.

    Attributes:
        ids: Tokens that were written.
        fed: Tokens of prompt and text that its cache holds.
        read: Tokens of the prompt that were computed for it, those computed again not counted.
        cached: Tokens of the prompt that other requests had read.
        cache: Its own, while it is not among the others of a batch.
        ended: Whether it has ended.
        guessed: Guesses at its tokens that were checked.
        accepted: Of these, those that were right.
        adapter: Name of its adapter, or None.
        sharing: Rows share the pages of common prefixes with rows for which this is equal.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: str | Sequence[int],
        options: dict[str, Any],
        stops: StopTexts,
        rules: Sequence[Rule],
        logprobs: int | None,
        deadline: float | None,
        share_with: str,
        adapter: str | None,
    ) -> None:
        wanted = model.options.with_(**options)
        wanted.check_stream()
        check_search(wanted, model.config.num_logits, None)
        if logprobs is not None:
            most = model.config.num_logits
            check_int("logprobs", logprobs, least=0, most=most, error=ValueError)
        self.request, self.adapter, self.sharing = Request(), adapter, (share_with, adapter)
        self.ids, self.ended, self._submitted = list[int](), False, time.monotonic()
        self.fed = self.read = self.cached = self.guessed = self.accepted = 0
        self.cache: ModelCache | None = None
        self._stops, self._deadline = stops, deadline
        self._prompt = model.prompt_ids(prompt)
        self._limit, _ = room(wanted, len(self._prompt), model.config.max_positions)
        self._stop_ids = model.stop_ids(wanted)
        self._rules = [*rules_of(wanted, sorted(self._stop_ids), self._limit), *rules]
        self._sampler = Sampler(wanted.sampling, model.transformer.embedding.like.device)
        self._likeliest, self._logprobs = logprobs, list[TokenLogprobs]()
        self._decoder, self._text = model.tokenizer.stream(), ""

    @property
    def stats(self) -> RequestStats:
        """How far it has come."""
        share_with, adapter = self.sharing
        return RequestStats(
            self.request.id,
            adapter,
            share_with,
            prompt_tokens=len(self._prompt),
            read_tokens=min(self.fed, len(self._prompt)),
            cached_tokens=self.cached,
            output_tokens=len(self.ids),
            limit=self._limit,
            seconds=time.monotonic() - self._submitted,
        )

    @property
    def all_ids(self) -> list[int]:
        """Prompt and text."""
        return [*self._prompt, *self.ids]

    @property
    def length(self) -> int:
        """Tokens of prompt and text."""
        return len(self._prompt) + len(self.ids)

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
        self.read = max(self.read, min(self.fed, len(self._prompt)) - self.cached)

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
        return self._limit - len(self.ids)

    @property
    def tokens(self) -> int:
        """Tokens that its cache holds at most."""
        return len(self._prompt) + self._limit

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
            self._take(logits)
        except Exception as error:  # of this request; others go on
            self.end("error", error)

    @property
    def empty(self) -> bool:
        """Whether there is no room for a token."""
        return self._limit < 1

    @property
    def is_greedy(self) -> bool:
        """Whether its tokens are those of the largest logits, and nothing else is computed."""
        return self._sampler.rule.greedy and not self._rules and self._likeliest is None

    @torch.inference_mode()
    def _take(self, logits: Tensor) -> None:
        """Draws a token, and tells the caller."""
        scores = logits
        if self._rules:
            scores = scores.float()
            rows = Rows([self.all_ids], len(self.ids), [len(self._prompt)], [self._prompt])
            for rule in self._rules:
                scores = rule(rows, scores)
        token = self._sampler(scores)
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
            self.end("stop")
        else:
            self._flush(Piece(piece, (token,), told), "length")

    def _flush(self, piece: Piece, reason: FinishReason) -> None:
        """Ends the text with what was held back."""
        rest = self._stops.feed(self._decoder.flush()) + self._stops.flush()
        if self._stops.found:
            reason = "stop"
        self._put(Piece(piece.text + rest, piece.ids, piece.logprobs))
        self.end(reason)

    def _told(self, logits: Tensor, token: int) -> TokenLogprobs:
        logprobs = logits.float().log_softmax(dim=-1)
        best = logprobs.topk(self._likeliest or 0)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return TokenLogprobs(token, float(logprobs[token]), tuple(pairs))

    def _put(self, piece: Piece) -> None:
        self._text += piece.text
        if not self.request.put(piece):
            self.end("slow reader")

    def end(self, reason: FinishReason, error: Exception | None = None) -> None:
        if not self.ended:
            self.ended = True
            told = None if self._likeliest is None else tuple(self._logprobs)
            self.request.end(
                Completion(
                    self._text,
                    tuple(self.ids),
                    reason,
                    len(self._prompt),
                    self.cached,
                    told,
                    error,
                    self.guessed,
                    self.accepted,
                )
            )
