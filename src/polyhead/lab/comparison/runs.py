"""One variant, one seed: the decoder trained on the comparison's text, and its validation loss.

Runs of one seed are paired. They read the same blocks of text in the same order, and parameters
that agree in name and shape begin with the same values. All variants have the same schedule:
AdamW, a cosine to a tenth of the rate, and a warm-up over a twentieth of the steps.

Shape letters: B batch, T tokens of a block, E embed size.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyhead import training
from polyhead._utils.checks import check_int, check_number, check_one_of
from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError, DivergedError, InputError
from polyhead.lab.comparison.corpus import Corpus
from polyhead.models import Transformer
from polyhead.training import loss
from polyhead.training.batches import Batches

MARKS = (0.25, 0.5, 1.0)
"""Fractions of the training after which the validation loss is measured."""

_VALIDATION_TOKENS = 32_768
_INITIAL = 0.02


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
        check_int("tokens", self.tokens, least=1, error=ConfigError)
        check_int("context", self.context, least=2, error=ConfigError)
        check_int("batch", self.batch, least=1, error=ConfigError)
        check_number("rate", self.rate, above=0, error=ConfigError)
        check_one_of("dtype", self.dtype, ("float32", "bfloat16"), error=ConfigError)

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / (self.context * self.batch))

    @property
    def of_run(self) -> training.Schedule:
        """The training loop's schedule; its seed is for dropout, which these models do not have."""
        return training.Schedule(
            steps=self.steps,
            lr=self.rate,
            floor=0.1,
            warmup=max(1, self.steps // 20),
            weight_decay=0.1,
            beta2=0.95,
            precision="bfloat16" if self.dtype == "bfloat16" else "float32",
        )


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
        seed: Seed of the initial values and of the order of blocks.
        advance: Called with the number of steps done, and of all.
        finish: What else to find out about the trained model; it gets the validation blocks, and
            what it returns becomes part of the result.

    Returns:
        What is to be written: ``variant``, ``seed``, ``parameters``, ``tokens``, ``loss`` (nats a
        token), ``bits_per_byte``, ``curve`` (tokens and loss at ``MARKS``), ``cpu_seconds``.
    """
    model = begin(config, seed)
    held_out = _blocks(corpus.validation[:_VALIDATION_TOKENS], schedule.context)
    marks = {max(1, round(share * schedule.steps)) for share in MARKS}
    curve: list[tuple[int, float]] = []
    order, started = batches(corpus.train, schedule, seed), time.process_time()
    try:
        for step in training.Run(model, order, schedule.of_run):
            if step.number in marks:
                measured = validation_loss(model, held_out)
                curve.append((step.number * schedule.context * schedule.batch, measured))
            advance(step.number, schedule.steps)
    except DivergedError as error:
        raise DivergedError(f"{name}, seed {seed}: {error}") from None
    final = curve[-1][1]
    predicted = held_out.shape[0] * (held_out.shape[1] - 1)
    nats_per_byte = final * len(corpus.validation) / corpus.validation_bytes
    made: dict[str, Any] = {
        "variant": name,
        "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": curve[-1][0],
        "loss": final,
        "bits_per_byte": nats_per_byte / math.log(2),
        "validation_tokens": predicted,
        "curve": curve,
        "cpu_seconds": round(time.process_time() - started, 2),
    }
    if finish is not None:
        made["heads"] = finish(model.eval(), held_out)
    return made


def begin(config: TransformerConfig, seed: int) -> Transformer:
    """A decoder whose parameters depend only on their name, their shape and the seed.

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


def batches(tokens: Tensor, schedule: Schedule, seed: int) -> Batches:
    """Batches of blocks of a text, ``[B, T]``, shuffled anew in each epoch."""
    blocks = _blocks(tokens, schedule.context)
    of_whole_batches = list(blocks[: len(blocks) // schedule.batch * schedule.batch])
    return Batches(of_whole_batches, _batch, schedule.batch * schedule.context, seed)


def repeated(model: Transformer, schedule: Schedule) -> Iterator[training.Step]:
    """Endless training steps on one batch of random tokens, to measure their cost."""
    shape = (schedule.batch, schedule.context)
    generator = torch.Generator().manual_seed(0)
    batch = _batch(torch.randint(model.config.vocab_size, shape, generator=generator))
    return iter(training.Run(model, lambda _: batch, replace(schedule.of_run, steps=1 << 40)))


def validation_loss(model: Transformer, blocks: Tensor) -> float:
    """Nats a token over ``blocks [N, T]``, of all tokens but the first of each."""
    model.eval()
    total, held_out = 0.0, blocks.to(next(model.parameters()).device)
    with torch.no_grad():  # in float32: under autocast the sum has the 8 bits of bfloat16
        for ids in torch.split(held_out, max(1, 4096 // blocks.shape[1])):
            total += loss(model, ids, ids, reduction="sum").item()
    model.train()
    return total / (blocks.shape[0] * (blocks.shape[1] - 1))


def _blocks(tokens: Tensor, size: int) -> Tensor:
    """``[N, size]`` int64: the text cut into blocks; what is left over is dropped."""
    count = len(tokens) // size
    return tokens[: count * size].view(count, size).long()


def _batch(rows: Sequence[Tensor] | Tensor) -> dict[str, Tensor]:
    """What a training step takes: ``[B, T]`` tokens, each predicted from those before it."""
    ids = torch.stack([*rows])
    return {"input_ids": ids, "labels": ids}
