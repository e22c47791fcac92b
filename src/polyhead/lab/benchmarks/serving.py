"""Cases of many callers: SmolLM2's 4-bit file in polyhead's engine, llama.cpp and transformers.

Texts are greedy and have all their tokens. Ours are compared with those that the model writes
alone, token by token, in every run. llama.cpp multiplies activations of 8 bits, so its texts come
to differ: the share that is ours is told.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pydoc_data.topics import topics
from typing import Any

import torch

from polyhead import native
from polyhead.checkpoints import find
from polyhead.errors import DisagreementError
from polyhead.generation import LanguageModel, load
from polyhead.kernels.batch_invariant import batch_invariant
from polyhead.lab.benchmarks.case import Call, Case, Contestant, Settings, Wall
from polyhead.lab.benchmarks.llama_cpp import LlamaCpp
from polyhead.lab.benchmarks.model import INT8, MODEL, theirs
from polyhead.lab.benchmarks.over_http import OverHttp
from polyhead.lab.benchmarks.peers import HTTP, SMOLLM2, installed
from polyhead.serving.engine import Engine

OVER_HTTP, UNSHARED = "polyhead, over HTTP", "polyhead, nothing shared"
CHUNK, MEDIAN = "a chunk of the prompt alone", "the median token"
_BESIDE_TRANSFORMERS = 8
"""Callers at which transformers and HTTP are measured too."""
_PAGE, _CHUNK = 32, 256
"""Tokens of a page and of prompts in a step, for transformers; ours are 16 and 256."""
_ALONE = 8
"""Texts of a run that are compared with those alone, at most."""


@dataclass(frozen=True)
class Load:
    """What callers ask at the same time.

    Attributes:
        prompts: Tokens of each caller's prompt.
        new: Tokens of each text.
    """

    prompts: Sequence[Sequence[int]]
    new: int

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and texts."""
        return sum(map(len, self.prompts)) + self.new * len(self.prompts)

    @property
    def longest(self) -> int:
        """Most tokens of a caller, prompt and text."""
        return max(map(len, self.prompts)) + self.new


@dataclass(frozen=True)
class Made:
    """What came out.

    Attributes:
        texts: Of the callers.
        taken: How long it took.
    """

    texts: Sequence[str]
    taken: float


def cases(settings: Settings) -> Iterator[Case]:
    """SmolLM2 for 1, 8 and 32 callers; a beginning that they share; tokens while a prompt joins.

    Quick: 8 callers and short prompts.
    """
    if not installed(SMOLLM2):
        return
    for dtype in settings.dtypes:
        model = load(MODEL, expect=LanguageModel).to(dtype)  # 4 bits as the file holds them
        int8 = None
        if native.code() is not None:
            int8 = load(MODEL, activations="int8", expect=LanguageModel).to(dtype)
        yield from of_model(model, int8, dtype, settings)


def of_model(
    model: LanguageModel, int8: LanguageModel | None, dtype: torch.dtype, settings: Settings
) -> Iterator[Case]:
    """The cases of a model, and with activations of 8 bits; texts end by their length alone."""
    never = (model.config.vocab_size - 1,)
    for each in (model, int8):
        if each is not None:
            each.options = each.options.with_(eos_token_ids=never)
    text = model.tokenizer.encode("\n".join(topics.values())[:200_000])
    quick = settings.quick
    with_prompts = "with prompts", (64 if quick else 256), (8 if quick else 32)
    alone = "decoding alone", 8, (16 if quick else 64)
    library = cache(lambda: theirs().to(dtype))
    for callers in (8,) if quick else (1, 8, 32):
        for group, tokens, new in (with_prompts, alone):
            load = Load(_prompts(text, callers, tokens), new)
            with ExitStack() as stack:
                yield _case(f"{group}, callers:", model, int8, library, load, dtype, quick, stack)
    yield _sharing(model, text, 4 if quick else 32, 256 if quick else 1000, dtype)
    yield _joining(model, text[: 1024 if quick else 7900], dtype)


def _prompts(text: Sequence[int], callers: int, tokens: int) -> list[list[int]]:
    """Prompts that begin in different places of a text."""
    step = (len(text) - tokens) // callers
    return [[*text[step * i : step * i + tokens]] for i in range(callers)]


def _case(
    group: str,
    model: LanguageModel,
    int8: LanguageModel | None,
    library: Callable[[], Any],
    load: Load,
    dtype: torch.dtype,
    quick: bool,
    stack: ExitStack,
) -> Case:
    """All callers at once.

    Args:
        library: Gives transformers' model, which takes long to read.
        stack: Ends what was started for it.
    """
    callers = len(load.prompts)
    room: dict[str, Any] = {"max_tokens": callers * (load.longest + 16), "max_rows": callers}
    peers = {}
    if int8 is not None:
        peers[INT8] = _contestant(in_engine(Engine(int8, share_prefixes=False, **room), load))
    if installed("llama.cpp"):
        llama = LlamaCpp(find(MODEL).path, callers, load.longest + 16)
        stack.callback(llama.close)
        peers["llama.cpp"] = _contestant(lambda: Made(*llama.texts(load.prompts, load.new)))
    if callers == _BESIDE_TRANSFORMERS:
        if installed("transformers") and not quick:
            peers["transformers"] = _contestant(in_transformers(library(), load))
        if installed(HTTP):
            http = OverHttp(model, share_prefixes=False, **room)
            stack.callback(http.close)
            peers[OVER_HTTP] = Contestant(
                lambda: Made(*http.texts(load.prompts, load.new)), _other_texts
            )
    engine = Engine(model, share_prefixes=False, **room)
    return Case(
        group, callers, dtype, checked(model, load, in_engine(engine, load)), peers,
        work=load.tokens, unit="tokens/s", gauge=_taken, turns=2,
    )  # fmt: skip


def in_engine(engine: Engine, load: Load) -> Callable[[], Made]:
    """The texts of polyhead's engine in this process."""

    def run() -> Made:
        engine.forget_prefixes()
        with _Clock() as clock:
            asked = [engine.submit(ids, max_new_tokens=load.new) for ids in load.prompts]
            while engine.step():
                pass
        return Made([request.result(0).text for request in asked], clock.wall)

    return run


def checked(model: LanguageModel, load: Load, run: Callable[[], Made]) -> Callable[[], Made]:
    """A run whose texts are compared with those that the model writes alone."""
    alone: dict[int, str] = {}

    def compared() -> Made:
        made = run()
        if not alone:
            places = range(0, len(load.prompts), -(-len(load.prompts) // _ALONE))
            with batch_invariant():
                for place in places:
                    ids = torch.tensor(load.prompts[place])
                    alone[place] = model.generate(ids, max_new_tokens=load.new).text
        for place, text in alone.items():
            if made.texts[place] != text:
                raise DisagreementError(
                    f"caller {place} of {len(load.prompts)} got another text than alone: "
                    f"{made.texts[place]!r}, alone {text!r}"
                )
        return made

    return compared


def in_transformers(model: Any, load: Load) -> Callable[[], Made]:
    """The texts of transformers' continuous batching."""
    import transformers

    library: Any = transformers
    library.utils.logging.set_verbosity_error()
    config = library.GenerationConfig(max_new_tokens=load.new, do_sample=False, eos_token_id=-1)
    # By default each call takes nine tenths of the free memory and writes zeros to it.
    room = library.ContinuousBatchingConfig(
        page_size=_PAGE,
        num_blocks=len(load.prompts) * -(-(load.longest + 1) // _PAGE),
        max_batch_tokens=max(_CHUNK, len(load.prompts)),
        max_requests_per_batch=len(load.prompts),
    )
    tokenizer = library.AutoTokenizer.from_pretrained(
        find(MODEL).path.parent, gguf_file=find(MODEL).path.name
    )

    def run() -> Made:
        with _Clock() as clock:
            made = model.generate_batch(
                [[*ids] for ids in load.prompts],
                generation_config=config,
                continuous_batching_config=room,
                warmup=False,
            )
        return Made([tokenizer.decode(each.generated_tokens) for each in made.values()], clock.wall)

    return run


def _sharing(
    model: LanguageModel, text: Sequence[int], callers: int, tokens: int, dtype: torch.dtype
) -> Case:
    """Prompts that begin with the same tokens, until the first token of each text."""
    tails = _prompts(text[tokens:], callers, 24)
    load = Load([[*text[:tokens], *tail] for tail in tails], 1)
    room: dict[str, Any] = {"max_tokens": callers * (load.longest + 16), "max_rows": callers}
    unshared = in_engine(Engine(model, share_prefixes=False, **room), load)
    return Case(
        f"{callers} callers with a shared beginning, tokens:", tokens, dtype,
        in_engine(Engine(model, **room), load), {UNSHARED: Contestant(unshared, _other_texts)},
        work=load.tokens, unit="tokens/s", gauge=_taken, turns=1,
    )  # fmt: skip


def _joining(model: LanguageModel, prompt: Sequence[int], dtype: torch.dtype) -> Case:
    """How long callers wait for a token while a long prompt is read: the 99th of a hundred.

    Beside it the mean time of the prompt's chunks where nobody else is served.
    """
    engine = Engine(model, max_tokens=2 * len(prompt) + 2048, share_prefixes=False)
    chunks = -(-len(prompt) // engine.prompt_chunk)
    waits: list[float] = []

    def joined() -> float:
        waits[:] = waits_beside(engine, prompt, 4, chunks + 8)
        return statistics.quantiles(waits, n=100)[98]

    def alone() -> float:
        with _Clock() as clock:
            engine.submit(prompt, max_new_tokens=1)
            while engine.step():
                pass
        return clock.wall / chunks

    peers = {
        CHUNK: Contestant(alone, None),
        MEDIAN: Contestant(lambda: statistics.median(waits), None),
    }
    return Case(
        "99% of tokens while a prompt joins, its tokens:", len(prompt), dtype, joined, peers,
        work=1, unit="tokens/s", gauge=lambda run: float(run()), turns=1,
    )  # fmt: skip


def waits_beside(engine: Engine, prompt: Sequence[int], callers: int, new: int) -> list[float]:
    """Seconds before each token of callers who are served while a prompt is read."""
    times: list[list[float]] = [[] for _ in range(callers + 1)]
    readers: list[threading.Thread] = []

    def ask(ids: Sequence[int], new: int) -> None:
        request, seen = engine.submit(ids, max_new_tokens=new), times[len(readers)]

        def read() -> None:
            for _ in request:
                seen.append(time.perf_counter())

        readers.append(threading.Thread(target=read))
        readers[-1].start()

    for caller in range(callers):
        ask(prompt[caller : caller + 8], new)
    while min(map(len, times[:callers])) < 2:
        engine.step()
    begin = time.perf_counter()
    ask(prompt, 1)
    while engine.step():
        pass
    for reader in readers:
        reader.join()
    *others, (end,) = times
    return [
        after - before
        for seen in others
        for before, after in pairwise(seen)
        if after > begin and before < end
    ]


class _Clock:
    """Time of the clock and of the processor, of this process."""

    def __enter__(self) -> _Clock:
        self._begin, self._busy = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        wall = time.perf_counter() - self._begin
        self.wall = Wall(wall, time.process_time() - self._busy)


def _contestant(run: Call) -> Contestant:
    """One that rounds otherwise than we do."""
    return Contestant(run, _other_beginnings, _alike)


def _taken(run: Call) -> float:
    made: Made = run()
    return made.taken


def _alike(ours: Made, theirs: Made) -> float:
    """The share of texts that are ours."""
    pairs = zip(ours.texts, theirs.texts, strict=True)
    return sum(one == other for one, other in pairs) / len(ours.texts)


def _other_beginnings(ours: Made, theirs: Made) -> str | None:
    """At least half of the texts begin with the same four characters."""
    pairs = [*zip(ours.texts, theirs.texts, strict=True)]
    if 2 * sum(one[:4] == other[:4] for one, other in pairs) >= len(pairs):
        return None
    return f"texts begin otherwise: {pairs[0][1][:40]!r}, ours {pairs[0][0][:40]!r}"


def _other_texts(ours: Made, theirs: Made) -> str | None:
    return None if [*ours.texts] == [*theirs.texts] else "texts differ"
