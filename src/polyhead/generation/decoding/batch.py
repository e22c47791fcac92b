"""Generates several texts at once, or several beams of one, and returns the finished texts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from polyhead._utils.checks import shown
from polyhead.caches.eviction import Evicting
from polyhead.errors import UnsupportedError
from polyhead.generation.decoding import graphs
from polyhead.generation.decoding.captured_steps import replayer, tokens_of
from polyhead.generation.decoding.logprobs import LogprobRecord, TokenLogprobs
from polyhead.generation.decoding.options import GenerationOptions, room
from polyhead.generation.decoding.rules import rules_of
from polyhead.generation.decoding.sampling import Sampler
from polyhead.generation.decoding.search import BeamSearch, Hypothesis, draw
from polyhead.generation.decoding.steps import (
    DecoderSteps,
    Sources,
    check_search,
    source_lengths,
    steps_of,
)
from polyhead.generation.decoding.stops import StopTexts
from polyhead.generation.decoding.stream import ROOM, GenerationStats

if TYPE_CHECKING:
    from polyhead.caches import ModelCache
    from polyhead.checkpoints import Tokenizer
    from polyhead.models import Transformer


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    Attributes:
        text: what was written, without the prompt and the stop.
        ids: the tokens drawn, a stop token included.
        stats: sizes and speeds; of a batch, those of the whole batch but for the tokens.
        score: score of beam search: sum of log-probabilities / length to the ``length_penalty``.
        others: the other texts of the same prompt, with ``num_return_sequences``, best first.
        logprobs: one for each of ``ids``, if they were asked for.
    """

    text: str
    ids: tuple[int, ...]
    stats: GenerationStats
    score: float | None = None
    others: tuple[Generation, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None


def continued(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    stop_ids: frozenset[int],
    stops: Sequence[str],
    cache: Mapping[str, Any],
    sources: Sources | None = None,
    graph: bool | None = None,
    logprobs: int | None = None,
) -> list[Generation]:
    """A generation for every prompt.

    Args:
        model: A decoder, or an encoder-decoder.
        tokenizer: Tokenizer of the model.
        prompts: Tokens of each, at least one.
        options: What is asked for.
        stop_ids: Tokens that end a text.
        stops: Texts that end a text.
        cache: Arguments of ``new_cache``.
        sources: What the encoder of an encoder-decoder reads for each.
        graph, logprobs: As in ``LanguageModel.stream``.

    Raises:
        UnsupportedError: ``graph=True`` where steps cannot be replayed.
        ValueError: More beams than tokens to begin them with, or a rule about the tokens of a
            source that has none.
    """
    check_search(options, model.config.num_logits, sources, logprobs)
    options = options.seeded()
    evicting = cache.get("evicting") if isinstance(cache, Mapping) else None
    context = model.config.max_positions
    endless = isinstance(evicting, Evicting) and not evicting.by_weight
    rooms = [room(options, len(prompt), context, endless=endless) for prompt in prompts]
    training = model.training
    model.eval()
    try:
        why: str | None = graphs.LOGPROBS
        if logprobs is None:
            why = _why_no_graph(model, prompts, options, stop_ids, cache, rooms, graph, sources)
        if graph and why is not None:
            raise UnsupportedError(f"graph=True cannot be: {why}")
        if why is None:
            most = max(left for left, _ in rooms)
            held = model.new_cache(len(prompts[0]) + min(most, ROOM), kind="dense")
        else:
            held = _new_cache(model, cache)
        steps = steps_of(model, prompts, held, sources)
        read = () if sources is None or isinstance(sources, Tensor) else sources
        started = perf_counter()
        if why is None:
            found, why = _repeated(steps, len(prompts), options, stop_ids, rooms[0][0])
        else:
            limits = [left for left, _ in rooms]
            if options.num_beams > 1:
                found = _beams(steps, prompts, options, stop_ids, limits, read, logprobs)
            else:
                rows = len(prompts) * options.num_return_sequences
                watched = [
                    _Watch(tokenizer, stop_ids, stops) if stops else None for _ in range(rows)
                ]
                record = None if logprobs is None else LogprobRecord(logprobs, rows)
                found = _drawn(steps, prompts, options, stop_ids, limits, read, watched, record)
        seconds = perf_counter() - started
    finally:
        model.train(training)
    sizes = held.bytes, held.used_bytes, held.length
    made = []
    lengths = source_lengths(sources, len(prompts))
    for prompt, (left, ends_by), texts, length in zip(prompts, rooms, found, lengths, strict=True):
        finished = []
        for each in texts:
            text, cut = _text(tokenizer, each.ids, stop_ids, stops)
            reason = "stop text" if cut else ends_by if len(each.ids) >= left else "stop token"
            if not cut and each.ids and each.ids[-1] in stop_ids:
                reason = "stop token"
            stats = GenerationStats(
                len(prompt), len(each.ids), 0.0, seconds, *sizes, reason, options.seed, length, why
            )
            finished.append(Generation(text, each.ids, stats, each.score, (), each.logprobs))
        best, *others = finished
        made.append(replace(best, others=tuple(others)))
    return made


def _why_no_graph(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    stop_ids: frozenset[int],
    cache: Mapping[str, Any],
    rooms: Sequence[tuple[int, str]],
    graph: bool | None,
    sources: Sources | None,
) -> str | None:
    """Why the steps of these texts are not replayed, or None."""
    if sources is not None:
        return "steps of encoder-decoders are not replayed"
    if options.num_beams > 1:
        return "steps of beams are not replayed: which rows go on is known after each"
    if cache:
        return "the kind of cache is the caller's"
    if len({*map(len, prompts)}) > 1:
        return "the prompts differ in length"
    most = max(left for left, _ in rooms)
    if most < 1:
        return "there is no room for a token"
    tokens, rules = len(prompts[0]) + most, bool(rules_of(options, sorted(stop_ids), most))
    return graphs.why_not(model, None, wanted=graph, rules=rules, tokens=tokens)


def _new_cache(model: Transformer, options: object) -> ModelCache:
    # Of the class: on many ranks the model's own is a wrapper that takes any argument.
    _, *known = inspect.signature(type(model).new_cache).parameters
    if not isinstance(options, Mapping):
        raise TypeError(
            "cache must be arguments of new_cache, such as {'kind': 'paged'}, since a generation "
            f"begins with an empty one: got {type(options).__name__}"
        )
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"cache must be arguments of new_cache, {known}: got {shown(unknown[0])}")
    return model.new_cache(**options)


def _beams(
    steps: DecoderSteps,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    stop_ids: frozenset[int],
    rooms: Sequence[int],
    sources: Sequence[Sequence[int]],
    logprobs: int | None,
) -> list[list[Hypothesis]]:
    """All sentences have as much room as the one that has least."""
    most = min(rooms)
    rules = rules_of(options, sorted(stop_ids), most)
    return BeamSearch(options, rules, stop_ids, most, logprobs).run(steps, prompts, sources)


def _drawn(
    steps: DecoderSteps,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    stop_ids: frozenset[int],
    rooms: Sequence[int],
    sources: Sequence[Sequence[int]],
    watched: Sequence[_Watch | None],
    record: LogprobRecord | None,
) -> list[list[Hypothesis]]:
    samples = options.num_return_sequences
    rules = rules_of(options, sorted(stop_ids), max(rooms))
    ids: list[list[int]] = [[] for _ in range(len(prompts) * samples)]
    ended = set[int]()
    drawn = draw(steps, prompts, options, rules, stop_ids, rooms, sources, ended, record)
    for row, token in drawn:
        ids[row].append(token)
        watch = watched[row]
        if watch is not None and watch.ends(token):
            ended.add(row)
    return _by_sentence(ids, samples, record)


def _repeated(
    steps: DecoderSteps, count: int, options: GenerationOptions, stop_ids: frozenset[int], most: int
) -> tuple[list[list[Hypothesis]], str | None]:
    """What ``_drawn`` gives, by a step that repeats itself, and why there was no graph, or None."""
    samples, logits = options.num_return_sequences, steps.start()
    if samples > 1:
        of = [sentence for sentence in range(count) for _ in range(samples)]
        steps.reorder(of, of)
        logits = logits[of]
    ids: list[list[int]] = [[] for _ in logits]
    running = replayer(
        steps,
        [Sampler(options.sampling, logits.device, sample=row % samples) for row in range(len(ids))],
    )
    for row, token in tokens_of(running, logits, stop_ids, most):
        ids[row].append(token)
    return _by_sentence(ids, samples), running.why


def _by_sentence(
    ids: Sequence[Sequence[int]], samples: int, record: LogprobRecord | None = None
) -> list[list[Hypothesis]]:
    made = [Hypothesis(tuple(row)) for row in ids]
    if record is not None:
        told = zip(made, record.rows, strict=True)
        made = [replace(each, logprobs=tuple(row)) for each, row in told]
    return [made[i : i + samples] for i in range(0, len(made), samples)]


class _Watch:
    """Whether a stop text has appeared in a row."""

    def __init__(
        self, tokenizer: Tokenizer, stop_ids: frozenset[int], stops: Sequence[str]
    ) -> None:
        self._decoder, self._stop_ids, self._stops = tokenizer.stream(), stop_ids, StopTexts(stops)

    def ends(self, token: int) -> bool:
        if token not in self._stop_ids:
            self._stops.feed(self._decoder.push(token))
        return self._stops.found


def _text(
    tokenizer: Tokenizer, ids: Sequence[int], stop_ids: frozenset[int], stops: Sequence[str]
) -> tuple[str, bool]:
    """The text of some tokens, up to a stop text; and whether there was one."""
    decoder, watch = tokenizer.stream(), StopTexts(stops)
    pieces = [watch.feed(decoder.push(token)) for token in ids if token not in stop_ids]
    pieces.append(watch.feed(decoder.flush()) + watch.flush())
    return "".join(pieces), watch.found
