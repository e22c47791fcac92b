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

from polyhead.errors import SharedCacheError
from polyhead.generation.options import GenerationOptions, room
from polyhead.generation.rules import rules_of
from polyhead.generation.search import draw
from polyhead.generation.steps import Sources, check_search, source_lengths, steps_of
from polyhead.generation.stops import StopTexts

if TYPE_CHECKING:
    from polyhead.caches import ModelCache
    from polyhead.checkpoints import Tokenizer
    from polyhead.models import Transformer

_ROOM = 512
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
    ) -> None:
        check_search(options, model.config.vocab_size, sources)
        self.ids: list[int] = []
        self._model, self._prompt = model, list(prompt)
        self._room, self._ends_by = room(options, len(self._prompt), model.config.max_positions)
        self._options = options.seeded()
        self._sources = sources
        self._stop_ids, self._stops = stop_ids, stops
        self._decoder = tokenizer.stream()
        self._cache = cache
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
        if self._cache is None:
            self._cache = self._model.new_cache(len(self._prompt) + min(self._room, _ROOM))
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
        assert self._cache is not None  # created by _write, the only function that requests tokens
        drawn = draw(
            steps_of(self._model, [self._prompt[self._cache.length :]], self._cache, self._sources),
            [self._prompt],
            self._options,
            rules_of(self._options, sorted(self._stop_ids), self._room),
            self._stop_ids,
            [self._room],
            () if self._sources is None or isinstance(self._sources, Tensor) else self._sources,
        )
        while True:
            started = perf_counter()
            _, token = next(drawn)
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
