"""The decode loop: one prefill, then a token at a time, yielded as whole characters.

The loop does nothing per token but run the model on one id, draw from the last row of logits and
decode; everything is settled before it starts. Nothing of it runs before text is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from torch import Tensor

from polyhead._utils.checks import check_bool
from polyhead.errors import SharedCacheError, UnsupportedError
from polyhead.generation.decoding import graphs
from polyhead.generation.decoding.captured_steps import StepReplayer, replayer, tokens_of
from polyhead.generation.decoding.logprobs import LogprobRecord, TokenLogprobs
from polyhead.generation.decoding.options import GenerationOptions, room
from polyhead.generation.decoding.rules import rules_of
from polyhead.generation.decoding.sampling import Sampler
from polyhead.generation.decoding.search import draw
from polyhead.generation.decoding.steps import (
    DecoderSteps,
    Sources,
    check_search,
    source_lengths,
    steps_of,
)
from polyhead.generation.decoding.stops import StopTexts

if TYPE_CHECKING:
    from polyhead.caches import ModelCache
    from polyhead.checkpoints import Tokenizer
    from polyhead.models import Transformer

ROOM = 512
"""Tokens beyond the prompt that the cache makes room for at once; it doubles after that."""


@dataclass(frozen=True)
class GenerationStats:
    """Sizes and times of a generation.

    Attributes:
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens drawn, a stop token included.
        prefill_seconds: reading the prompt and drawing the first token.
        decode_seconds: all further tokens; time that the reader of the stream takes is not in it.
        cache_bytes: memory that the KV cache has allocated.
        cache_used_bytes: the part of it that tokens fill.
        cache_tokens: tokens in the cache.
        stop_reason: ``"stop token"``, ``"stop text"``, ``"max_new_tokens"`` or ``"context"`` (no
            room for another token); None while it runs or was given up.
        seed: repeats this generation; None when greedy.
        source_tokens: tokens (or frames) that an encoder read; 0 without one.
        no_graph: why decoding steps are not replayed from a graph; None where they are, and before
            the first token.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    cache_bytes: int
    cache_used_bytes: int
    cache_tokens: int
    stop_reason: str | None
    seed: int | None
    source_tokens: int = 0
    no_graph: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed; None before the second token, since prefill yields the first."""
        steps = self.new_tokens - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds > 0 else None


class TextStream(Iterator[str]):
    """Text as a model writes it, piece by piece; a piece never ends inside a character.

    A model's ``stream`` returns it. ``stats`` can be read at any time. A ``cache`` that you pass
    must hold the first tokens of the prompt, but not all of them, and still belongs to you.

    Attributes:
        ids: the new tokens so far.
        logprobs: one for each of them, if they were asked for.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        options: GenerationOptions,
        stop_ids: frozenset[int],
        stops: StopTexts,
        sources: Sources | None = None,
        cache: ModelCache | None = None,
        graph: bool | None = None,
        logprobs: int | None = None,
    ) -> None:
        check_search(options, model.config.num_logits, sources, logprobs)
        if graph is not None:
            check_bool("graph", graph, error=ValueError)
        self.ids: list[int] = []
        self._record = None if logprobs is None else LogprobRecord(logprobs, 1)
        self._model, self._prompt = model, list(prompt)
        endless = cache is not None and cache.endless
        self._room, self._ends_by = room(
            options, len(self._prompt), model.config.max_positions, endless=endless
        )
        self._options = options.seeded()
        self._sources = sources
        self._stop_ids, self._stops = stop_ids, stops
        self._decoder = tokenizer.stream()
        self._cache, self._graph = cache, graph
        self._no_graph: str | None = None
        self._running: StepReplayer | None = None
        self._rules = rules_of(self._options, sorted(self._stop_ids), self._room)
        if graph and (why := self._why_no_graph()) is not None:
            raise UnsupportedError(f"graph=True cannot be: {why}")
        self._cache_figures = (0, 0, 0)
        self._prefill_seconds = self._decode_seconds = 0.0
        self._stop_reason: str | None = None
        self._pieces = self._write()

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except ValueError as error:
            if inspect.getgeneratorstate(self._pieces) == inspect.GEN_RUNNING:
                raise SharedCacheError(
                    "this stream is in use by another thread: give every thread a stream of its own"
                ) from error
            raise

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return None if self._record is None else self._record.rows[0]

    def close(self) -> None:
        """Ends the stream early and frees its cache."""
        self._pieces.close()

    @property
    def stats(self) -> GenerationStats:
        """Statistics so far."""
        return GenerationStats(
            len(self._prompt),
            len(self.ids),
            self._prefill_seconds,
            self._decode_seconds,
            *self._measure_cache(),
            stop_reason=self._stop_reason,
            seed=self._options.seed,
            source_tokens=source_lengths(self._sources, 1)[0],
            no_graph=self._no_graph if self._running is None else self._running.why,
        )

    def _measure_cache(self) -> tuple[int, int, int]:
        if self._cache is not None:
            self._cache_figures = (
                self._cache.bytes,
                self._cache.used_bytes,
                self._cache.length,
            )
        return self._cache_figures

    def _write(self) -> Generator[str]:
        """The pieces; keeps the model in evaluation mode meanwhile."""
        training = self._model.training
        self._model.eval()
        self._no_graph = self._why_no_graph()
        if self._cache is None:
            self._cache = self._model.new_cache(
                len(self._prompt) + min(self._room, ROOM),
                kind="auto" if self._no_graph else "dense",
            )
        try:
            for token in self._tokens():
                piece = self._stops.feed(self._decoder.push(token))
                if piece:
                    yield piece
                if self._stops.found:
                    self._stop_reason = "stop text"
                    return
            rest = self._stops.feed(self._decoder.flush()) + self._stops.flush()
            if self._stops.found:
                self._stop_reason = "stop text"
            if rest:
                yield rest
        finally:
            self._measure_cache()
            self._cache = None
            self._model.train(training)

    def _tokens(self) -> Iterator[int]:
        """Draws tokens up to a stop token, which is counted but not yielded."""
        if self._room < 1:
            self._stop_reason = self._ends_by
            return
        drawn = self._repeated() if self._no_graph is None else self._drawn()
        while True:
            started = perf_counter()
            token = next(drawn)
            if self.ids:
                self._decode_seconds += perf_counter() - started
            else:
                self._prefill_seconds = perf_counter() - started
            self.ids.append(token)
            if token in self._stop_ids:
                self._stop_reason = "stop token"
                return
            yield token
            if len(self.ids) >= self._room:
                self._stop_reason = self._ends_by
                return

    def _drawn(self) -> Iterator[int]:
        """Tokens of steps that Python takes one by one."""
        drawn = draw(
            self._steps(),
            [self._prompt],
            self._options,
            self._rules,
            self._stop_ids,
            [self._room],
            () if self._sources is None or isinstance(self._sources, Tensor) else self._sources,
            record=self._record,
        )
        return (token for _, token in drawn)

    def _repeated(self) -> Iterator[int]:
        """Tokens of a step that repeats itself on the device."""
        steps = self._steps()
        first = steps.start()
        self._running = replayer(steps, [Sampler(self._options.sampling, first.device)])
        drawn = tokens_of(self._running, first, self._stop_ids, self._room)
        yield from (token for _, token in drawn)

    def _steps(self) -> DecoderSteps:
        assert self._cache is not None  # created by _write, the only function that requests tokens
        prompt = self._prompt[self._cache.length :]
        return steps_of(self._model, [prompt], self._cache, self._sources)

    def _why_no_graph(self) -> str | None:
        if self._record is not None:
            return graphs.LOGPROBS
        return graphs.why_not(
            self._model,
            self._cache,
            wanted=self._graph,
            rules=bool(self._rules),
            tokens=len(self._prompt) + self._room,
        )
