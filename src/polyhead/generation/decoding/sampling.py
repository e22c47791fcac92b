"""How the next token is drawn from the logits.

In this order: logits / temperature → the ``top_k`` largest → the smallest set of the rest whose
probabilities reach ``top_p`` (nucleus sampling, Holtzman et al. 2020; the token that crosses the
threshold belongs to it, so one always remains) → tokens that are likely beside the likeliest
(``min_p``, Nguyen et al. 2024), typical (``typical_p``, Meister et al. 2022) or above a bound
(``epsilon_cutoff``, ``eta_cutoff``, Hewitt et al. 2022) → one draw with an explicit generator.
Temperature 0 or None is greedy: the largest logit, the first of equals.

Shape letters: N rows, V vocabulary size.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead._utils.checks import check_int, check_number

_RUN = 256
"""Logits of which the largest is found together."""
NO_TOKEN = "logits must be finite: the model produced NaN or infinity, or rules leave no token"


@dataclass(frozen=True)
class Sampling:
    """The rule by which tokens are drawn.

    Attributes:
        temperature: Divides the logits; 0 or None: greedy, and the rest does not matter.
        top_k: Only the k most likely tokens; None: all.
        top_p: Only the most likely tokens that together reach this probability, in (0, 1];
            None or 1: all.
        seed: Whole number from which all draws follow; None: a fresh one every time.
        min_p: Only tokens at least this share as likely as the likeliest.
        typical_p: Only the most typical tokens of this mass: those whose surprise is near the
            entropy.
        epsilon_cutoff: Only tokens at least this likely, and the likeliest.
        eta_cutoff: The same with the bound min(η, √η · exp(−entropy)).

    Raises:
        ValueError: a value outside of these ranges, by name.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None

    def __post_init__(self) -> None:
        for name in ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
            value = getattr(self, name)
            if value is not None:
                check_number(
                    name, value, least=0, most=1, hint=", or None for off", error=ValueError
                )
        if self.temperature is not None:
            check_number(
                "temperature", self.temperature, least=0, hint=" (0: greedy)", error=ValueError
            )
        if self.top_k is not None:
            check_int("top_k", self.top_k, least=1, error=ValueError)
        if self.top_p is not None:
            check_number("top_p", self.top_p, above=0, most=1, error=ValueError)
        if self.seed is not None:
            check_int("seed", self.seed, least=0, error=ValueError)

    @property
    def greedy(self) -> bool:
        return not self.temperature


class Sampler:
    """Draws tokens by a ``Sampling`` rule; the same seed and logits give the same tokens.

    Args:
        rule: Sampling rule: temperature, top-k, top-p.
        device: Where the logits are.
        sample: Which of several texts of one prompt these draws make; each has its own seed.
        least: Tokens that every restriction leaves at least.

    Attributes:
        seed: The seed in use, drawn if the rule names none; None when greedy.
        generator: What is drawn from; None when greedy.
    """

    def __init__(
        self,
        rule: Sampling,
        device: torch.device | str = "cpu",
        *,
        sample: int = 0,
        least: int = 1,
    ) -> None:
        self.rule = rule
        self.seed: int | None = None
        self._least = least
        self.generator: torch.Generator | None = None
        if not rule.greedy:
            # 32 bits: enough variety, and short enough to type again.
            self.seed = secrets.randbits(32) if rule.seed is None else int(rule.seed)
            # Seeds are whole numbers below 2^64, and so is their sum with a small one, wrapped.
            seed = (self.seed + sample) % 2**64
            self.generator = torch.Generator(device=device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """The next token from the logits ``[V]`` or ``[1, V]`` of the last position.

        Raises:
            ValueError: no logit is finite, or one is NaN: nothing can be drawn from them.
        """
        if self.generator is None:
            return likeliest(logits.reshape(-1))
        probabilities = self.probabilities(logits.reshape(-1))
        return int(torch.multinomial(probabilities, 1, generator=self.generator))

    def drawn(self, logits: Tensor) -> Tensor:
        """``[1]`` the token that a call gives, as a tensor, and nothing waits for it.

        −1 where a call raises.
        """
        if self.generator is None:
            token = logits.argmax(dim=0, keepdim=True)
            sound = torch.isfinite(logits.gather(0, token))
        else:
            scores = self.restricted((logits.float() - logits.max())[None])[0]
            sound = torch.isfinite(scores.max())
            weights = scores.softmax(dim=-1)
            # What torch.multinomial computes after it has looked at the weights, which waits.
            noise = torch.empty_like(weights).exponential_(1, generator=self.generator)
            token = weights.div_(noise).argmax(dim=0, keepdim=True)
        return torch.where(sound, token, -1)

    def several(self, scores: Tensor, count: int) -> Tensor:
        """``count`` places of ``scores [M]``, drawn without replacement by their softmax.

        Raises:
            ValueError: no score is finite, or one is NaN.
        """
        if not torch.isfinite(scores.max()):
            raise ValueError(NO_TOKEN)
        return torch.multinomial(scores.softmax(dim=-1), count, generator=self.generator)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities ``[V]`` (float32) from which a token is drawn, zeros left out."""
        if self.rule.greedy:
            return torch.nn.functional.one_hot(logits.argmax(), logits.numel()).float()
        # Near temperature 0 logits / temperature overflows; differences to the largest only reach
        # −∞, as long as float32 can hold the temperature.
        scores = self.restricted((logits.float() - logits.max())[None])[0]
        if not torch.isfinite(scores.max()):
            raise ValueError(NO_TOKEN)
        return scores.softmax(dim=-1)

    def restricted(self, scores: Tensor) -> Tensor:
        """``scores [N, V]`` / temperature, and −∞ for tokens that are not to be drawn."""
        rule, least = self.rule, min(self._least, scores.shape[-1])
        temperature = float(rule.temperature or 0.0)  # torch takes no int beyond 64 bits
        scores = scores / max(temperature, torch.finfo(torch.float32).tiny)
        if rule.top_k is not None and rule.top_k < scores.shape[-1]:
            values, tokens = scores.topk(max(rule.top_k, least))
            scores = torch.full_like(scores, -math.inf).scatter_(-1, tokens, values)
        if rule.top_p is not None and rule.top_p < 1:
            ranked, tokens = scores.softmax(dim=-1).sort(descending=True, stable=True)
            beyond = ranked.cumsum(dim=-1) - ranked >= rule.top_p
            scores = self._without(scores, beyond, tokens)
        if rule.min_p is not None:
            p = scores.softmax(dim=-1)
            ranked, tokens = p.sort(descending=True, stable=True)
            scores = self._without(scores, ranked < rule.min_p * ranked[:, :1], tokens)
        if rule.typical_p is not None and rule.typical_p < 1:
            log_p = scores.log_softmax(dim=-1)
            entropy = -(log_p * log_p.exp()).nansum(dim=-1, keepdim=True)
            oddness, tokens = (-log_p - entropy).abs().sort()
            mass = scores.gather(-1, tokens).softmax(dim=-1).cumsum(dim=-1)
            last = (mass < rule.typical_p).sum(dim=-1, keepdim=True).clamp_(max=mass.shape[-1] - 1)
            scores = self._without(scores, oddness > oddness.gather(-1, last), tokens)
        for cutoff, falls in ((rule.epsilon_cutoff, False), (rule.eta_cutoff, True)):
            if cutoff is not None and 0 < cutoff < 1:
                p = scores.softmax(dim=-1)
                bound = torch.full_like(p[:, :1], cutoff)
                if falls:
                    entropy = -torch.special.xlogy(p, p).sum(dim=-1, keepdim=True)
                    bound = torch.minimum(bound, bound.sqrt() * torch.exp(-entropy))
                unlikely = (p < bound) & (scores < scores.topk(least).values[:, -1:])
                scores = scores.masked_fill(unlikely, -math.inf)
        return scores

    def _without(self, scores: Tensor, dropped: Tensor, tokens: Tensor) -> Tensor:
        """−∞ for those of ``tokens [N, V]``, the best first, that are ``dropped``."""
        dropped[:, : self._least].fill_(False)
        return scores.masked_fill(
            torch.zeros_like(dropped).scatter_(-1, tokens, dropped), -math.inf
        )


def likeliest(logits: Tensor) -> int:
    """The place of the largest of ``logits [V]``, the first of several.

    Raises:
        ValueError: None is finite, or one is NaN.
    """
    first, whole = 0, logits.numel() // _RUN * _RUN
    if logits.is_cpu and whole:  # torch finds a maximum ten times faster than its place
        runs = logits[:whole].view(-1, _RUN).amax(dim=-1)
        if whole < logits.numel():
            runs = torch.cat([runs, logits[whole:].amax(dim=-1, keepdim=True)])
        first = _RUN * int(runs.argmax())
        logits = logits[first : first + _RUN]
    place = int(logits.argmax())
    if not math.isfinite(float(logits[place])):
        raise ValueError(NO_TOKEN)
    return first + place


def drawn_each(samplers: Sequence[Sampler], scores: Tensor) -> list[int]:
    """The next token of each row of ``scores [N, V]``; a device is waited for once.

    Raises:
        ValueError: As a call of the row's sampler raises.
    """
    rows = zip(samplers, scores, strict=True)
    if scores.is_cpu:
        return [sampler(row) for sampler, row in rows]
    tokens: list[int] = torch.cat([sampler.drawn(row) for sampler, row in rows]).tolist()
    if min(tokens) < 0:
        raise ValueError(NO_TOKEN)
    return tokens
