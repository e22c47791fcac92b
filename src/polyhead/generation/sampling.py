"""How the next token is drawn from the logits.

In this order: logits / temperature → the ``top_k`` largest → the smallest set of the rest whose
probabilities reach ``top_p`` (nucleus sampling, Holtzman et al. 2020; the token that crosses the
threshold belongs to it, so one always remains) → one draw with an explicit generator. Temperature
0 or None is greedy: the largest logit, the first of equals.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """The rule by which tokens are drawn.

    Attributes:
        temperature: Divides the logits; 0 or None: greedy, and the rest does not matter.
        top_k: Only the k most likely tokens; None: all.
        top_p: Only the most likely tokens that together reach this probability, in (0, 1];
            None or 1: all.
        seed: Whole number from which all draws follow; None: a fresh one every time.

    Raises:
        ValueError: a value outside of these ranges, by name.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None:
            check_number("temperature", self.temperature)
            if self.temperature < 0:
                raise ValueError(
                    f"temperature must be 0 (greedy) or more: got {self.temperature!r}"
                )
        if self.top_k is not None:
            check_whole("top_k", self.top_k)
            if self.top_k < 1:
                raise ValueError(f"top_k must be at least 1, or None for all: got {self.top_k!r}")
        if self.top_p is not None:
            check_number("top_p", self.top_p)
            if not 0 < self.top_p <= 1:
                raise ValueError(f"top_p must be above 0 and at most 1: got {self.top_p!r}")
        if self.seed is not None:
            check_whole("seed", self.seed)
            if not 0 <= self.seed < 2**63:
                raise ValueError(f"seed must be at least 0 and below 2**63: got {self.seed!r}")

    @property
    def greedy(self) -> bool:
        return not self.temperature


def check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number: got {value!r}")


def check_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number: got {value!r}")


class Sampler:
    """Draws tokens by a ``Sampling`` rule; the same seed and logits give the same tokens.

    Args:
        rule: The rule.
        device: Where the logits are.

    Attributes:
        seed: The seed in use, drawn if the rule names none; None when greedy.
    """

    def __init__(self, rule: Sampling, device: torch.device | str = "cpu") -> None:
        self.rule = rule
        self.seed: int | None = None
        self._generator: torch.Generator | None = None
        if not rule.greedy:
            # 32 bits: enough variety, and short enough to type again.
            self.seed = secrets.randbits(32) if rule.seed is None else int(rule.seed)
            self._generator = torch.Generator(device=device).manual_seed(self.seed)

    def __call__(self, logits: Tensor) -> int:
        """The next token from the logits ``[V]`` of the last position.

        Raises:
            ValueError: no logit is finite, or one is NaN: nothing can be drawn from them.
        """
        if self._generator is None:
            token = int(logits.argmax())
            if not torch.isfinite(logits[token]):
                raise ValueError("logits must be finite: the model produced NaN or infinity")
            return token
        probabilities = self.probabilities(logits)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities ``[V]`` (float32) from which a token is drawn, zeros left out."""
        rule = self.rule
        if rule.greedy:
            return torch.nn.functional.one_hot(logits.argmax(), logits.numel()).float()
        # Near temperature 0 logits / temperature overflows; differences to the largest only reach
        # −∞, as long as float32 can hold the temperature.
        temperature = max(rule.temperature or 0.0, torch.finfo(torch.float32).tiny)
        scaled = (logits.float() - logits.max()) / temperature
        if not torch.isfinite(scaled.max()):
            raise ValueError("logits must be finite: the model produced NaN or infinity")
        if rule.top_k is not None and rule.top_k < scaled.numel():
            kept = torch.full_like(scaled, -math.inf)
            values, tokens = scaled.topk(rule.top_k)
            scaled = kept.scatter_(0, tokens, values)
        probabilities = scaled.softmax(dim=-1)
        if rule.top_p is not None and rule.top_p < 1:
            ranked, tokens = probabilities.sort(descending=True, stable=True)
            before = ranked.cumsum(dim=-1) - ranked
            ranked = ranked.masked_fill(before >= rule.top_p, 0.0)
            probabilities = torch.zeros_like(probabilities).scatter_(0, tokens, ranked)
            probabilities /= probabilities.sum()
        return probabilities
