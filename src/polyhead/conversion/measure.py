"""How far a converted model is from the one it was made of, and what it costs to run.

Shape letters: T tokens of a window, L layers.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead.models import Transformer
from polyhead.training.evaluation import Progress

_ROWS = 128
"""Tokens whose logits are held at once."""


@dataclass(frozen=True)
class DomainFigures:
    """Figures of one set of texts.

    Attributes:
        name: Name of the domain.
        calibrated: Whether the conversion read texts of this domain (others than these).
        tokens: How many tokens were read.
        before: Perplexity of the model that was converted.
        after: The perplexity of the new one.
        kl: KL divergence of the new model's next-token distributions from the old ones', nats per
            token.
        top1: Fraction of tokens after which both find the same token likeliest.
        by_position: The KL divergence in each quarter of a window.
    """

    name: str
    calibrated: bool
    tokens: int
    before: float
    after: float
    kl: float
    top1: float
    by_position: tuple[float, float, float, float]

    @property
    def ratio(self) -> float:
        """The ratio of the perplexities."""
        return self.after / self.before


@dataclass(frozen=True)
class Speed:
    """Measured speed of one model with one number of threads.

    Attributes:
        prefill: Tokens read per second.
        decode: Tokens written per second, one at a time behind a prompt.
        cache_bytes: That the cache has allocated, and
        cache_tokens: for how many tokens.
    """

    prefill: float
    decode: float
    cache_bytes: int
    cache_tokens: int


class Teacher:
    """A model's final hidden states of windows, each computed once."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self._hidden: dict[bytes, Tensor] = {}

    def hidden(self, row: Tensor) -> Tensor:
        """``[T, E]`` of a window ``[T]``, which are kept."""
        key = row.cpu().numpy().tobytes()
        if key not in self._hidden:
            with torch.no_grad():
                self._hidden[key] = self.model.hidden_states(row[None])[0]
        return self._hidden[key]

    def log_probs(self, hidden: Tensor) -> Tensor:
        """``[T, W]`` float32."""
        with torch.no_grad():
            return F.log_softmax(self.model.logits(hidden[None])[0].float(), dim=-1)


def _log_probs(
    model: Transformer, teacher: Teacher, row: Tensor, hidden: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Runs of tokens: the index of the first, and log p ``[run, W]`` of teacher and model."""
    for first in range(0, len(row), _ROWS):
        there = teacher.log_probs(teacher.hidden(row)[first : first + _ROWS]).to(hidden.device)
        here = F.log_softmax(model.logits(hidden[None, first : first + _ROWS])[0].float(), dim=-1)
        yield first, there, here


def kl_of(model: Transformer, teacher: Teacher, row: Tensor, hidden: Tensor) -> Tensor:
    """KL divergence from the teacher, ``[T]`` nats, of hidden states ``[T, E]`` of ``model``."""
    pairs = _log_probs(model, teacher, row, hidden)
    return torch.cat([(there.exp() * (there - here)).sum(-1) for _, there, here in pairs])


def mean_kl(model: Transformer, teacher: Teacher, rows: Sequence[Tensor]) -> float:
    """KL divergence from the teacher, nats per token."""
    with torch.no_grad():
        total = sum(
            float(kl_of(model, teacher, row, model.hidden_states(row[None])[0]).sum())
            for row in rows
        )
    return total / sum(len(row) for row in rows)


def measure(
    model: Transformer,
    teacher: Teacher,
    domains: Mapping[str, tuple[bool, Sequence[Tensor]]],
    progress: Progress | None = None,
) -> tuple[DomainFigures, ...]:
    """Perplexity and KL divergence on windows of several domains.

    Args:
        teacher: The model that it was made of.
        domains: For each name whether it was calibrated on, and windows ``[T]``.
        progress: Called as ``progress("evaluation", windows, windows in all)``.
    """
    total, done, found = sum(len(rows) for _, rows in domains.values()), 0, []
    for name, (calibrated, rows) in domains.items():
        sums = {"kl": 0.0, "same": 0.0, "before": 0.0, "after": 0.0}
        quarters, counts = torch.zeros(2, 4, dtype=torch.float32, device="cpu")
        for row in rows:
            one = _figures(model, teacher, row, quarters, counts)
            sums = {key: value + one[key] for key, value in sums.items()}
            done += 1
            if progress is not None:
                progress("evaluation", done, total)
        tokens = sum(len(row) for row in rows)
        predicted = max(tokens - len(rows), 1)
        found.append(
            DomainFigures(
                name,
                calibrated,
                tokens,
                math.exp(sums["before"] / predicted),
                math.exp(min(sums["after"] / predicted, 700.0)),
                sums["kl"] / tokens,
                sums["same"] / tokens,
                tuple((quarters / counts.clamp_min(1)).tolist()),
            )
        )
    return tuple(found)


@torch.no_grad()
def _figures(
    model: Transformer, teacher: Teacher, row: Tensor, quarters: Tensor, counts: Tensor
) -> dict[str, float]:
    """Sums over one window; KL by quarter is added to ``quarters``."""
    hidden = model.hidden_states(row[None])[0]
    sums = {"kl": 0.0, "same": 0.0, "before": 0.0, "after": 0.0}
    for first, there, here in _log_probs(model, teacher, row, hidden):
        kl = (there.exp() * (there - here)).sum(-1)
        sums["kl"] += float(kl.sum())
        sums["same"] += float((there.argmax(-1) == here.argmax(-1)).sum())
        wanted = row[first + 1 : first + 1 + _ROWS, None]
        sums["before"] -= float(there[: len(wanted)].gather(1, wanted).sum())
        sums["after"] -= float(here[: len(wanted)].gather(1, wanted).sum())
        places = (torch.arange(first, first + len(kl), device="cpu") * 4 // len(row)).clamp(max=3)
        quarters.index_add_(0, places, kl.float())
        counts.index_add_(0, places, torch.ones_like(kl, dtype=torch.float32))
    return sums


def each_layer_alone(
    model: Transformer,
    teacher: Teacher,
    rows: Sequence[Tensor],
    progress: Progress | None = None,
) -> tuple[float, ...]:
    """KL divergence with one converted layer at a time among the old ones, ``[L]``."""
    old, new = [*teacher.model.layers], [*model.layers]
    found = []
    for index in range(len(old)):
        mixed = _with_layers(teacher.model, [*old[:index], new[index], *old[index + 1 :]])
        found.append(mean_kl(mixed, teacher, rows))
        if progress is not None:
            progress("each layer alone", index + 1, len(old))
    return tuple(found)


def _with_layers(model: Transformer, layers: Sequence[nn.Module]) -> Transformer:
    """The same model with other layers; nothing is copied."""
    mixed = copy.copy(model)
    mixed.__dict__["_modules"] = model._modules | {"layers": nn.ModuleList(layers)}
    return mixed


def speed(model: Transformer) -> Speed:
    """Prefill of 256 tokens and decoding of 16, the best of three runs; fewer in short contexts."""
    steps = min(16, max(1, model.config.max_positions // 4))
    prompt = max(1, min(256, model.config.max_positions - steps))
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(
        model.config.vocab_size, (1, prompt + steps), generator=drawn, device="cpu"
    ).to(next(model.parameters()).device)
    best = [math.inf, math.inf]
    with torch.inference_mode():
        for _ in range(3):
            cache = model.new_cache(prompt + steps)
            best[0] = min(best[0], _seconds(partial(model, ids[:, :prompt], cache=cache, last=1)))
            best[1] = min(best[1], _seconds(partial(_decode, model, ids, prompt, cache)))
    return Speed(prompt / best[0], steps / best[1], cache.bytes, cache.length)


def _decode(model: Transformer, ids: Tensor, prompt: int, cache: object) -> None:
    for t in range(prompt, ids.shape[1]):
        model(ids[:, t : t + 1], cache=cache)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
