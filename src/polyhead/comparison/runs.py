"""One variant, one seed: the decoder trained on the comparison's text, and its validation loss.

Runs of one seed are paired. They read the same blocks of text in the same order, and parameters
that agree in name and shape begin with the same values. All variants have the same schedule:
AdamW, a warm-up over a twentieth of the steps, then a cosine to a tenth of the rate.

Shape letters: B batch, T tokens of a block, E embed size.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.checks import number, one_of, whole
from polyhead.comparison.corpus import Corpus
from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError, DivergedError, InputError
from polyhead.models import Transformer
from polyhead.training import loss

MARKS = (0.25, 0.5, 1.0)
"""Shares of the training after which the validation loss is measured."""

_VALIDATION_TOKENS = 32_768
_INITIAL = 0.02
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Schedule:
    """How every variant is trained.

    Attributes:
        tokens: Read by each run; rounded up to whole steps.
        context: T, tokens of a block.
        batch: Blocks of a step.
        rate: The highest learning rate.
        dtype: ``"float32"``, or ``"bfloat16"``: products in bfloat16 by autocast, parameters in
            float32.

    Raises:
        ConfigError: A number that is impossible.
    """

    tokens: int
    context: int = 256
    batch: int = 8
    rate: float = 2e-3
    dtype: str = "float32"

    def __post_init__(self) -> None:
        whole("tokens", self.tokens, least=1, error=ConfigError)
        whole("context", self.context, least=2, error=ConfigError)
        whole("batch", self.batch, least=1, error=ConfigError)
        number("rate", self.rate, above=0, error=ConfigError)
        one_of("dtype", self.dtype, DTYPES, error=ConfigError)

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / (self.context * self.batch))

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warm = max(1, self.steps // 20)
        if step < warm:
            return self.rate * (step + 1) / warm
        along = (step - warm) / max(1, self.steps - warm)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * along)))

    def autocast(self) -> torch.autocast:
        """In which the model is called."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bfloat16")


def check_length(corpus: Corpus, schedule: Schedule) -> None:
    """Raises InputError unless the text is enough for one step and one block of validation."""
    needed = schedule.context * schedule.batch
    for name, tokens, least in (
        ("training", corpus.train, needed),
        ("validation", corpus.validation, schedule.context),
    ):
        if len(tokens) < least:
            raise InputError(
                f"the {name} part of the text has {len(tokens):,} tokens: at least {least:,} are "
                "needed; give more text, or a smaller context or batch"
            )


def run(
    config: TransformerConfig,
    corpus: Corpus,
    schedule: Schedule,
    seed: int,
    *,
    name: str,
    advance: Callable[[int, int], None] = lambda done, steps: None,
    finish: Callable[[Transformer, Tensor], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Trains one variant with one seed.

    Args:
        config: The decoder.
        corpus: What it reads.
        schedule: How it is trained.
        seed: Of the initial values and of the order of blocks.
        name: Of the variant.
        advance: Called with the number of steps done, and of all.
        finish: What else to find out about the trained model; it gets the validation blocks, and
            what it returns becomes part of the result.

    Returns:
        What is to be written: ``variant``, ``seed``, ``parameters``, ``tokens``, ``loss`` (nats a
        token), ``bits_per_byte``, ``curve`` (tokens and loss at ``MARKS``), ``cpu_seconds``.

    Raises:
        DivergedError: The loss is not finite.
    """
    model = begin(config, seed)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=schedule.rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    held_out = _blocks(corpus.validation[:_VALIDATION_TOKENS], schedule.context)
    marks = {max(1, round(share * schedule.steps)): share for share in MARKS}
    curve: list[tuple[int, float]] = []
    order, started = batches(corpus.train, schedule, seed), time.process_time()
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate_at(step)
        train_step(model, optimizer, next(order), schedule, f"{name}, seed {seed}, step {step}")
        if step + 1 in marks:
            measured = validation_loss(model, held_out)
            curve.append(((step + 1) * schedule.context * schedule.batch, measured))
        advance(step + 1, schedule.steps)
    final = curve[-1][1]
    foretold = held_out.shape[0] * (held_out.shape[1] - 1)
    nats_per_byte = final * len(corpus.validation) / corpus.validation_bytes
    made: dict[str, Any] = {
        "variant": name,
        "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": curve[-1][0],
        "loss": final,
        "bits_per_byte": nats_per_byte / math.log(2),
        "validation_tokens": foretold,
        "curve": curve,
        "cpu_seconds": round(time.process_time() - started, 2),
    }
    if finish is not None:
        made["heads"] = finish(model.eval(), held_out)
    return made


def begin(config: TransformerConfig, seed: int) -> Transformer:
    """A decoder whose parameters depend on their name, their shape and the seed, on nothing else.

    Normal with standard deviation 0.02, in what writes to the residual stream divided by the root
    of the number of such writers (GPT-2, 2019).
    """
    model = Transformer(config).train()
    writers = math.sqrt(2 * len(config.layers))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                continue
            said = f"{seed} {name} {tuple(parameter.shape)}".encode()
            number = int.from_bytes(hashlib.sha256(said).digest()[:7], "big")
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = _INITIAL / writers if writes else _INITIAL
            parameter.normal_(std=std, generator=torch.Generator().manual_seed(number))
    return model


def batches(tokens: Tensor, schedule: Schedule, seed: int) -> Iterator[Tensor]:
    """``[B, T]`` int64 for ever: the blocks of a text in an order that the seed draws anew."""
    blocks = _blocks(tokens, schedule.context)
    generator = torch.Generator().manual_seed(seed)
    waiting = torch.empty(0, dtype=torch.int64)
    while True:
        while len(waiting) < schedule.batch:
            more = torch.randperm(len(blocks), generator=generator)
            waiting = torch.cat((waiting, more))
        yield blocks[waiting[: schedule.batch]]
        waiting = waiting[schedule.batch :]


def train_step(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    schedule: Schedule,
    what: str,
) -> float:
    """One step on ``ids [B, T]``; its loss in nats a token."""
    with schedule.autocast():
        found = loss(model, ids, ids)
    value = found.item()
    if not math.isfinite(value):
        raise DivergedError(f"{what}: the loss is {value}; take a lower learning rate")
    optimizer.zero_grad()
    found.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return value


def validation_loss(model: Transformer, blocks: Tensor) -> float:
    """Nats a token over ``blocks [N, T]``, of all tokens but the first of each."""
    model.eval()
    total = 0.0
    with torch.no_grad():  # in float32: under autocast the sum has the 8 bits of bfloat16
        for ids in torch.split(blocks, max(1, 4096 // blocks.shape[1])):
            total += loss(model, ids, ids, reduction="sum").item()
    model.train()
    return total / (blocks.shape[0] * (blocks.shape[1] - 1))


def _blocks(tokens: Tensor, size: int) -> Tensor:
    """``[N, size]`` int64: the text cut into blocks; what is left over is dropped."""
    count = len(tokens) // size
    return tokens[: count * size].view(count, size).long()
