"""What variants cost: training, prefill and decoding speed, cache bytes, memory.

The models are those of the comparison with new weights; speed does not depend on them. Variants
take turns in one process, so that other load on the machine affects all of them, and a speed is the
median over turns.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from polyhead.caches import ModelCache
from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError, DisagreementError
from polyhead.lab.benchmarks.case import seconds
from polyhead.lab.benchmarks.memory import MEASURED, taken
from polyhead.lab.comparison import runs
from polyhead.lab.comparison.runs import Schedule
from polyhead.lab.comparison.variants import Sizes, Variant, decoder
from polyhead.models import Transformer
from polyhead.planning import plan

LENGTHS = (1024, 8192)
"""Tokens of context at which prefill, decoding and caches are measured."""

_DECODED = 16
_MOST_STEPS = 256


class Contestant:
    """One variant while it is measured."""

    def __init__(
        self, config: TransformerConfig, schedule: Schedule, lengths: Sequence[int]
    ) -> None:
        self.schedule, self.lengths = schedule, lengths
        self.model = runs.begin(config, 0)
        self.steps = runs.repeated(self.model, schedule)
        self.caches: dict[int, ModelCache] = {}
        generator = torch.Generator().manual_seed(0)
        longest = (1, max(lengths))
        device = next(self.model.parameters()).device
        self.prompt = torch.randint(config.vocab_size, longest, generator=generator).to(device)

    def train(self) -> Tensor:
        """One training step."""
        return torch.tensor(next(self.steps).loss)

    def prefill(self, length: int) -> None:
        """A prompt read in one piece; its cache has room for the tokens of ``decode``."""
        cache = self.model.new_cache(length + _MOST_STEPS)
        with torch.inference_mode():
            self.model(self.prompt[:, :length], cache=cache, last=1)
        self.caches[length] = cache

    def decode(self, length: int) -> None:
        """Some tokens one by one behind a prompt."""
        with torch.inference_mode():
            for step in range(_DECODED):
                self.model(self.prompt[:, step : step + 1], cache=self.caches[length])


def speeds(
    variants: Sequence[Variant],
    sizes: Sizes,
    schedule: Schedule,
    *,
    lengths: Sequence[int] = LENGTHS,
    turns: int = 5,
    advance: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, dict[str, Any]]:
    """What each variant costs.

    Args:
        turns: Turns of each measurement; the first of more than one warms up and does not count.
        advance: Called with what is measured, turns done and turns in all.

    Returns:
        By variant: ``train``, and by length ``prefill`` and ``decode``, in tokens a second;
        ``cache``, by length, in bytes; ``step_bytes``, the most that a training step takes beside
        weights and the optimizer's state, None where the system does not tell.

    Raises:
        ConfigError: A length beyond the positions of the model.
        DisagreementError: A cache has not the bytes that its plan says.
    """
    if max(lengths) + _MOST_STEPS > sizes.max_positions:
        raise ConfigError(
            f"max_positions={sizes.max_positions} are too few to measure {max(lengths)} tokens: at "
            f"least {max(lengths) + _MOST_STEPS} are needed"
        )
    entrants = {each.name: Contestant(decoder(each, sizes), schedule, lengths) for each in variants}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in entrants}
    total = turns * len(entrants)
    for turn in range(turns):
        for index, (name, each) in enumerate(entrants.items()):
            for what, rate in _turn(each).items():
                if turn or turns == 1:
                    found[name].setdefault(what, []).append(rate)
            advance(f"measuring {name}", turn * len(entrants) + index + 1, total)
    return {
        name: {
            **_nested({what: median(rates) for what, rates in found[name].items()}),
            "cache": {str(n): cache_bytes(each.model, n) for n in lengths},
            "step_bytes": taken(each.train) if MEASURED else None,
        }
        for name, each in entrants.items()
    }


def cache_bytes(model: Transformer, tokens: int) -> int:
    """Bytes of a cache that holds so many tokens, as allocated; and as planned, or an error."""
    cache = model.new_cache(tokens)
    with torch.inference_mode():
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=next(model.parameters()).device)
        model(ids, cache=cache, last=1)
    planned = plan(model.config, tokens=tokens, dtype="float32").cache_bytes
    if cache.bytes != planned:
        raise DisagreementError(
            f"a cache of {tokens:,} tokens has {cache.bytes:,} bytes, its plan says {planned:,}"
        )
    return cache.bytes


def _turn(each: Contestant) -> dict[str, float]:
    """Every measurement once, in tokens a second."""
    rates = {"train": each.schedule.batch * each.schedule.context / seconds(each.train)}
    each.model.eval()
    for length in each.lengths:
        rates[f"prefill {length}"] = length / seconds(partial(each.prefill, length))
        rates[f"decode {length}"] = _DECODED / seconds(partial(each.decode, length))
    each.caches.clear()
    each.model.train()
    return rates


def _nested(flat: Mapping[str, float]) -> dict[str, Any]:
    """``{"decode 1024": 1.0}`` as ``{"decode": {"1024": 1.0}}``."""
    made: dict[str, Any] = {}
    for what, rate in flat.items():
        name, _, length = what.partition(" ")
        if length:
            made.setdefault(name, {})[length] = rate
        else:
            made[name] = rate
    return made
