"""Random histories of a cache over ranks against the same histories in one process.

A script appends chunks and single tokens, with padding and in rows of different lengths, takes
tokens back, forks, reorders, crops and resets. After every call the logits are compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from cases_of_attention import mesh_of
from cases_of_models import FAMILIES, W, made

import polyhead as ph
from polyhead import parallel

DECODERS = [family for family in FAMILIES if family != "T5"]
LONGEST = 60
"""Tokens of a row; the models read 64."""

_MODELS: dict[tuple[str, str], tuple[ph.Transformer, ph.Transformer]] = {}


def equal_all(mesh: str, seeds: list[int]) -> list[str]:
    """What differs from one process, by seed; empty if nothing does."""
    wrong = []
    for seed in seeds:
        try:
            _run(mesh, seed)
        except Exception as error:
            wrong.append(f"seed {seed}: {type(error).__name__}: {error}")
    return wrong


def _models(mesh: str, family: str) -> tuple[ph.Transformer, ph.Transformer]:
    if (mesh, family) not in _MODELS:
        one, model = (made(family, torch.float64).eval() for _ in range(2))
        names = mesh.split(" + ")
        sizes = (2, 2) if len(names) == 2 else None
        parallel.parallelize(model, mesh_of(*names, sizes=sizes), training=False)
        _MODELS[mesh, family] = one, model
    return _MODELS[mesh, family]


def _run(mesh: str, seed: int) -> None:
    dice, words = random.Random(seed), []
    family = dice.choice(DECODERS)
    models = _models(mesh, family)
    options: dict[str, Any] = {"kind": dice.choice(["auto", "auto", "dense", "paged"])}
    options |= {"page_size": dice.choice([2, 4]), "spare": dice.choice([0, 0, 3])}
    caches = [tuple(model.new_cache(**options) for model in models)]
    words.append(f"{family} {options}")
    try:
        with torch.inference_mode():
            for step in _steps(dice, caches):
                words.append(step[0])
                step[1](models)
    except Exception as error:
        raise AssertionError(f"{error} in {'; '.join(words)}") from error


def _steps(dice: random.Random, caches: list[Any]) -> Iterator[tuple[str, Any]]:
    """What happens next, in words and as a function of both models."""
    for _ in range(dice.randint(6, 16)):
        which = dice.randrange(len(caches))
        pair = caches[which]
        lengths = pair[0].lengths
        what = dice.choice(["chunk", "chunk", "token", "token", "back", "fork", "rows", "rare"])
        if what in ("chunk", "token") or not lengths:
            rows = len(lengths) or dice.randint(1, 3)
            count = 1 if what == "token" and lengths else dice.choice([1, 2, 3, 5, 9, 17, 30])
            count = min(count, LONGEST - max(lengths, default=0))
            if count < 1:
                continue
            padding = dice.choice([0.0, 0.0, 0.4])
            yield _call(dice, pair, rows, count, padding, f"call {which}: {rows} x {count}")
        elif what == "back":
            most = pair[0].max_rollback
            if dice.random() < 0.3:  # all of it can always be taken back
                most = min(lengths)
            counts: Any = dice.randint(0, most)
            if most == pair[0].max_rollback and dice.random() < 0.6:
                counts = [dice.randint(0, min(most, length)) for length in lengths]
            elif counts > pair[0].max_rollback:
                counts = lengths
            yield f"rollback {which}: {counts}", _on(pair, "rollback", counts)
        elif what == "fork":
            forks = tuple(cache.fork() for cache in pair)
            caches[:] = [*caches[-2:], forks]
            yield f"fork {which}", lambda models: None
        elif what == "rows":
            chosen = [dice.randrange(len(lengths)) for _ in range(dice.randint(1, 3))]
            yield f"reorder {which}: {chosen}", _on(pair, "reorder", chosen)
        elif dice.random() < 0.3:
            yield f"reset {which}", _on(pair, "reset")


def _on(pair: Any, method: str, *arguments: Any) -> Any:
    def both(models: object) -> None:
        for cache in pair:
            getattr(cache, method)(*arguments)
        lengths = [cache.lengths for cache in pair]
        assert lengths[0] == lengths[1] or not any(lengths[0]), lengths

    return both


def _call(
    dice: random.Random, pair: Any, rows: int, count: int, padding: float, words: str
) -> tuple[str, Any]:
    generator = torch.Generator().manual_seed(dice.randrange(1 << 30))
    ids = torch.randint(W, (rows, count), generator=generator)
    real = torch.rand(rows, count, generator=generator) >= padding

    def call(models: tuple[ph.Transformer, ph.Transformer]) -> None:
        found = []
        for model, cache in zip(models, pair, strict=True):
            more = {"positions": cache.next_positions(real)} if padding else {}
            found.append(model(ids, cache=cache, **more)[real])
        theirs, ours = found
        apart = (ours - theirs).abs().max().item() if len(ours) else 0.0
        assert apart <= 1e-10, f"logits differ by {apart:.1e}"
        assert pair[0].lengths == pair[1].lengths

    return f"{words}{', padded' if padding else ''}", call
