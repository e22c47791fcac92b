"""A model of two processes that one of them leads: served, driven, refused, and left alone."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cases_of_attention import mesh_of
from cases_of_models import made

import polyhead as ph
from generation.tiny import byte_tokenizer, decoder
from polyhead import parallel
from polyhead.caches import Quantized
from polyhead.errors import PolyheadError
from polyhead.parallel import leading
from polyhead.planning.memory import token_bytes
from polyhead.serving.engine import Engine
from polyhead.serving.requests import Completion

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
from random_requests import check_random, pages_back

PROMPTS = [[3, 5, 7, 9], [3, 5, 7, 9, 11, 2, 4], [1], [3, 5, 7, 9, 11, 2, 4, 40, 41]]


def split(transformer: ph.Transformer) -> ph.LanguageModel:
    parallel.parallelize(transformer, mesh_of("tensor"), training=False)
    return ph.LanguageModel(transformer, byte_tokenizer(), "split").eval()


def run(engine: Engine, *asked: dict[str, Any]) -> list[Completion]:
    requests = [engine.submit(**each) for each in asked]
    while engine.step():
        pass
    return [request.result(0) for request in requests]


def served(seed: int, count: int, options: dict[str, Any]) -> tuple[int, ...] | None:
    """Random requests have the bits that they have alone, and that ``generate`` gives."""
    model = split(decoder(context=256))
    if "draft_tokens" in options:
        options = options | {"draft": ph.LanguageModel(decoder(context=256), byte_tokenizer())}
    with parallel.led(model.transformer) as leads:
        if not leads:
            return None
        stats = check_random(model, seed, count, **options).stats
        asked = {"max_new_tokens": 9, "temperature": 0.9, "seed": 4}
        engine = Engine(model, max_tokens=256, page_size=4)
        found = run(engine, {"prompt": "abcdefgh", **asked}, {"prompt": "abcdefghij", **asked})
        assert engine.stats.pool_bytes == 64 * 4 * 128  # of one kv head of two: 2 layers, k and v
        with ph.batch_invariant():
            texts = [model.generate(each, **asked) for each in ("abcdefgh", "abcdefghij")]
        assert [each.ids for each in found] == [each.ids for each in texts]
        return stats.cached_tokens, stats.preemptions, stats.guessed_tokens, stats.accepted_tokens


def as_in_one_process(family: str) -> None:
    """Tokens and log-probabilities in float64, of prompts that share pages."""
    one = ph.LanguageModel(made(family, torch.float64), byte_tokenizer(), "one").eval()
    model = split(made(family, torch.float64))
    asked = [
        {"prompt": prompt, "max_new_tokens": 7, "logprobs": 3, "temperature": 1.0, "seed": place}
        for place, prompt in enumerate(PROMPTS)
    ]
    options = {"max_tokens": 256, "batch_invariant": False, "page_size": 2, "prompt_chunk": 5}
    with parallel.led(model.transformer) as leads:
        if leads:
            engine = Engine(model, **options)
            made_, alone = run(engine, *asked), run(Engine(one, **options), *asked)
            for found, wanted in zip(made_, alone, strict=True):
                assert found.ids == wanted.ids
                assert len(found.ids) == 7
                for mine, its in zip(found.logprobs or (), wanted.logprobs or (), strict=True):
                    assert abs(mine.logprob - its.logprob) < 1e-12
            assert engine.stats.cached_tokens > 0
            assert pages_back(engine)
    model.transformer(torch.tensor([[1, 2]]))  # by all ranks again


def room(family: str) -> tuple[int, int, int] | None:
    """Tokens by default, and a token's bytes of a rank and of one process."""
    model = split(made(family, torch.float32))
    free = (9 << 17) >> dist.get_rank()  # of two processes that share a machine's memory
    with (
        mock.patch.object(leading, "free_memory", return_value=free),
        parallel.led(model.transformer) as leads,
    ):
        if not leads:
            return None
        engine = Engine(model, max_rows=1000)
        pool = engine._budget.pool
        assert pool is not None
        assert engine._budget.bytes == pool.page_bytes * -(-engine.max_tokens // 16)
        return engine.max_tokens, pool.page_bytes // 16, token_bytes(model.config, "float32")


def refused() -> list[str] | None:
    """What the others cannot be told; afterwards the model answers as before."""
    model = split(made("Llama", torch.float32))
    transformer, found = model.transformer, []

    def tried(call: Callable[[], object]) -> None:
        try:
            call()
        except PolyheadError as error:
            found.append(f"{type(error).__name__}: {error}")
        except TypeError as error:
            found.append(f"TypeError: {error}")

    tried(lambda: Engine(model))
    with parallel.led(transformer) as leads:
        if not leads:
            return None
        ids = torch.tensor([[1, 2]])
        one_layer = replace(transformer.config, layers=transformer.config.layers[:1])
        predictor = ph.MultiTokenPredictor(one_layer, transformer)
        tried(lambda: Engine(model, adapters={"law": "nowhere"}))
        tried(lambda: Engine(model, draft=predictor))
        tried(lambda: Engine(model, max_tokens=64).heads.ask("a", 0, 0))
        tried(lambda: transformer(ids, mask=ph.Window(3)))
        tried(lambda: transformer.new_cache(quantized=Quantized(8, 8)))
        tried(lambda: transformer(ids, masks=None))  # type: ignore[call-arg]
        tried(lambda: transformer.embedding(ids))
        tried(lambda: parallel.whole_state(transformer))
        engine = Engine(model, max_tokens=64)
        (made_,) = run(engine, {"prompt": [1], "max_new_tokens": 3, "rules": [few_of_the_first]})
        assert made_.finish_reason == "length"
        assert set(made_.ids) <= {0, 1, 2}
    return found


def few_of_the_first(rows: Any, scores: torch.Tensor) -> torch.Tensor:
    return scores.where(torch.arange(scores.shape[-1]) < 3, -torch.inf)


def unled(what: str) -> None:
    """A model that no rank can lead."""
    model = made("T5" if what == "an encoder" else "Llama", torch.float32)
    if what != "whole":
        dimension = "context" if what == "context" else "tensor"
        loss_parallel = what == "loss_parallel"
        parallel.parallelize(model, mesh_of(dimension), training=False, loss_parallel=loss_parallel)
    with parallel.led(model):
        pass


def idle() -> int | None:
    """A leader with nothing to do for longer than the process group waits."""
    model = split(made("Llama", torch.float32))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    try:
        with mock.patch.object(leading, "BEAT", 0.1), parallel.led(model.transformer) as leads:
            if not leads:
                return None
            time.sleep(2.2)
            with Engine(model, max_tokens=64) as engine:
                return len(engine.submit([1], max_new_tokens=3).result(20).ids)
    finally:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=60))


def dies(number: int, busy: bool) -> list[str]:
    """A rank is killed in the tenth step, or while there is nothing to do."""
    model = split(decoder(context=256))
    steps, run_layers = [0], model.transformer.layers[0].register_forward_pre_hook

    def count(*_: Any) -> None:
        steps[0] += 1
        if busy and dist.get_rank() == number and steps[0] == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    run_layers(count)
    if not busy and dist.get_rank() == number:
        signal.setitimer(signal.ITIMER_REAL, 1.5)  # whose signal ends a process
    with mock.patch.object(leading, "BEAT", 0.2), parallel.led(model.transformer) as leads:
        assert leads
        with Engine(model, max_tokens=512) as engine:
            if not busy:
                end = time.monotonic() + 20
                while engine.lost is None and time.monotonic() < end:
                    time.sleep(0.05)
            asked, found = [], []
            for _ in range(3):  # the engine may end before it has taken all of them
                try:
                    asked.append(engine.submit("abc", max_new_tokens=200))
                except PolyheadError as error:
                    found.append(f"error: {error}")
            made_ = [request.result(20) for request in asked]
            found += [f"{each.finish_reason}: {each.error}" for each in made_]
            try:
                engine.submit("abc", max_new_tokens=2)
            except PolyheadError as error:
                found.append(str(error))
            return found
    raise AssertionError("a rank that does not lead came here")
