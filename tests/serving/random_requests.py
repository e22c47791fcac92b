"""Random requests of one engine, each of which has the tokens that it has alone."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch

import polyhead as ph
from polyhead.serving import grammars
from polyhead.serving.engine import Engine
from polyhead.serving.requests import Completion, Request

DRAWN: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.1},
    {"temperature": 0.8, "top_k": 12, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_p": 0.9, "stop": ["e", "zz"]},
    {"no_repeat_ngram_size": 2, "stop": "k"},
)

SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"enum": ["yes", "no", "perhaps"]},
)


def pages_back(engine: Engine) -> bool:
    engine.forget_prefixes()
    pool = engine._budget.pool
    return pool is not None and pool.free == pool.pages


def few_tokens(rows: Any, scores: torch.Tensor) -> torch.Tensor:
    """A rule that leaves three tokens."""
    left = torch.full_like(scores, -torch.inf)
    left[:, 97:100] = scores[:, 97:100]
    return left


def alone(model: ph.LanguageModel, asked: dict[str, Any]) -> Completion:
    engine = Engine(model, max_tokens=256, share_prefixes=False)
    request = engine.submit(**asked)
    while engine.step():
        pass
    return request.result(0)


def check_random(model: ph.LanguageModel, seed: int, count: int, **options: Any) -> Engine:
    """Random requests arrive at random and are cancelled at random; the others are as alone.

    Alone: on a model with their adapter and no other.
    """
    draw = random.Random(seed)
    alones = {"": model}
    for name, folder in options.get("adapters", {}).items():
        alones[name] = copy.deepcopy(model)
        ph.attach_adapter(alones[name], folder)
    options.setdefault("max_tokens", 640)
    options.setdefault("prompt_seconds", None)  # no clock decides what is tried
    engine = Engine(model, max_rows=draw.choice([6, 9, 20]), max_queue=1000, **options)
    system = "One of several prompts with a long beginning that they share. "
    rules: list[list[Any]] = [[], [], []]
    if grammars.installed():
        stops = model.stop_ids(model.options)
        compiler = grammars.Grammars(model.tokenizer, model.config.vocab_size, stops)
        rules += [[compiler.of_schema(schema)] for schema in SCHEMAS]
    if options.get("lookup_tokens") or isinstance(options.get("draft"), ph.MultiTokenPredictor):
        rules = [[few_tokens]]  # so that texts repeat themselves, often but not always
    running: list[tuple[Request, ph.LanguageModel, dict[str, Any]]] = []
    for number in range(count):
        words = "".join(draw.choices("abcde fgh", k=draw.randrange(1, 60)))
        asked = {
            "prompt": (system if draw.random() < 0.5 else "") + words,
            "max_new_tokens": draw.randrange(1, 40),
            "seed": number,
            "logprobs": draw.choice([None, 0, 2]),
            "share_with": draw.choice(["", "", "other"]),
            "rules": draw.choice(rules),
            **draw.choice(DRAWN),
        }
        adapter = draw.choice([*alones]) if len(alones) > 1 else ""
        single = alones[adapter]
        running.append((engine.submit(**asked, adapter=adapter or None), single, asked))
        if draw.random() < 0.1:
            draw.choice(running)[0].cancel()
        for _ in range(draw.choice([0, 0, 1, 3])):
            engine.step()
    while engine.step():
        pass
    for request, one, asked in running:
        made, single = request.result(0), alone(one, asked)
        if made.finish_reason == "cancelled":
            assert made.ids == single.ids[: len(made.ids)]
            continue
        assert (made.text, made.ids, made.finish_reason) == (
            single.text,
            single.ids,
            single.finish_reason,
        )
        assert made.logprobs == single.logprobs  # the same bits
    assert pages_back(engine)
    return engine
