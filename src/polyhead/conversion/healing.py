"""Healing: trains a converted model to match the old one.

The loss is the KL divergence from the old model's next-token distributions (Hinton et al. 2015);
the projections of attention that the conversion changed are trained, nothing else. The learning
rate is found on texts that are not trained on, by short runs from the same start; training then
goes on from the best of them, is validated again and again, returns to the best state with half the
rate where it got worse, and ends with the best state that was seen.

Shape letters: T tokens of a window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, Self, cast

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_int, check_number, needed
from polyhead.conversion.calibration import (
    EVALUATION_TOKENS,
    domains_of,
    refuse_overlap,
    tokens_hash,
    windows_of,
)
from polyhead.conversion.draft import Model, source_of, wrapped
from polyhead.conversion.measure import DomainFigures, Teacher, kl_of, mean_kl, measure
from polyhead.conversion.report import domain_table
from polyhead.errors import DivergedError, InputError
from polyhead.layers import TransformerLayer
from polyhead.layers.quantized import refuse_quantized
from polyhead.models import Transformer
from polyhead.training.batches import Batches
from polyhead.training.evaluation import Progress, Texts
from polyhead.training.run import Run, Step
from polyhead.training.schedule import Schedule, Shape
from polyhead.training.trainable import Trainable

RATES = (3e-4, 1e-4, 3e-5)
"""Learning rates of Adam, tried from the greatest; a rate that is too large costs a few steps."""

_TRIAL = 0.04
"""Fraction of the time that each trial of a rate takes."""

_WORSE = 1.02
"""If a validation is above the best by this factor, training returns to the best state."""

_VALIDATED = 8
"""Windows that are validated on, at most: each validation takes time from training."""

_CHECKS = 12
"""Validations during training."""


@dataclass(frozen=True)
class Validation:
    """One point of the healing curve.

    Attributes:
        seconds: Wall-clock seconds since healing began.
        steps: Training steps so far.
        kl: KL divergence on the validation texts, nats per token.
        rate: Learning rate of the steps before it.
        kept: Whether its state became the best state.
    """

    seconds: float
    steps: int
    kl: float
    rate: float
    kept: bool


@dataclass(frozen=True)
class Healing:
    """The result of healing; print it.

    Attributes:
        before: KL divergence on the validation texts before training, nats per token.
        after: KL divergence of the returned model, nats per token.
        rate: Learning rate that was chosen.
        curve: All validations in order.
        tokens: Tokens trained on, repetitions included.
        hash: Hash of the training tokens (first 16 digits of SHA-256).
        parameters: Number of trained parameters.
        seconds: Wall-clock seconds in all.
        interrupted: Whether Ctrl-C ended it.
        domains: Figures of the returned model on each evaluation domain.
    """

    before: float
    after: float
    rate: float
    curve: tuple[Validation, ...]
    tokens: int
    hash: str
    parameters: int
    seconds: float
    interrupted: bool
    domains: tuple[DomainFigures, ...] = ()

    def __str__(self) -> str:
        ended = ", interrupted" if self.interrupted else ""
        lines = [
            f"healed for {self.seconds:.0f} s{ended}: KL {self.before:.4f} → {self.after:.4f} on "
            f"validation texts, {self.tokens:,} tokens (texts {self.hash}), learning rate "
            f"{self.rate:g}, {self.parameters:,} parameters",
        ]
        lines += [
            f"  {each.seconds:>6.0f} s  step {each.steps:>5}  KL {each.kl:.4f}  rate "
            f"{each.rate:.1e}{'' if each.kept else '  gone back'}"
            for each in self.curve
        ]
        if self.domains:
            lines += ["", *domain_table(self.domains)]
        return "\n".join(lines)


def heal(
    model: Model,
    *,
    teacher: nn.Module,
    texts: Texts,
    minutes: float = 10,
    tokens: int = 2_000_000,
    window: int = 256,
    batch_size: int = 1,
    seed: int = 0,
    evaluation: Mapping[str, Texts] | None = None,
    unseen: Mapping[str, Texts] | None = None,
    evaluation_tokens: int = EVALUATION_TOKENS,
    progress: Progress | None = None,
) -> tuple[Model, Healing]:
    """Trains a converted model to match the model it was made from.

        new, healing = ph.heal(new, teacher=model, texts=texts, minutes=10)

    Ctrl-C ends it early and keeps what is best so far.

    Args:
        model: The converted model; it is not changed.
        teacher: The model that it was converted from.
        texts: Training texts; a tenth of their windows is used for validation.
        minutes: Wall-clock limit in minutes.
        tokens: Largest number of tokens taken from the texts; they are repeated while there is
            time.
        window: Tokens per window.
        batch_size: Windows of a step. The teacher's distributions say so much of each token that
            one window's gradient is good enough, and while there is little time steps matter more.
        seed: Seed of the order of windows.
        evaluation: Texts by domain, as given to ``convert``; measured when all is done, beyond
            ``minutes``. They may not overlap ``texts``.
        unseen: Texts by domain that were not calibrated on, measured in the same way.
        evaluation_tokens: Largest number of tokens per domain.
        progress: Called as ``progress("healing, KL 0.123", seconds done, seconds in all)``.

    Returns:
        The model in its best validated state, and what happened. Where nothing was better than the
        beginning, that is the beginning.

    Raises:
        InputError: Less than ten windows of text, texts that overlap, a model in training mode,
            nothing that was converted, or accelerate is not installed.
        ValueError: A number out of its range, or models of different vocabularies.
    """
    check_number("minutes", minutes, above=0)
    needed("accelerate", "polyhead[train]")
    window = check_int("window", window, least=16)
    old, new = source_of(teacher), source_of(model)
    refuse_quantized(new, "healing")
    if old.config.vocab_size != new.config.vocab_size or len(old.layers) != len(new.layers):
        raise ValueError("teacher must be the model that was converted: its sizes differ")
    rows = windows_of(model, texts, check_int("tokens", tokens, least=1), window)
    rows = [row for row in rows if len(row) == min(window, len(rows[0]))]
    if len(rows) < 10:
        raise InputError(
            f"texts must hold at least ten windows of {window} tokens: got {len(rows)}; give more "
            "text or a smaller window"
        )
    judged = _judged(model, evaluation, unseen, evaluation_tokens, rows)
    validation = rows[5::10][:_VALIDATED]
    chosen = {id(row) for row in validation}
    trained = [row for row in rows if id(row) not in chosen]
    student = Transformer(new.config)
    student.load_state_dict(new.state_dict())
    student = student.float().eval()
    known, length = Teacher(old), len(rows[0])
    batches = Batches(trained, _batch, check_int("batch_size", batch_size, least=1) * length, seed)
    healer = _Healer(student, known, batches, validation, 60.0 * minutes, progress)
    healing = replace(healer.heal(), hash=tokens_hash(trained))
    student.to(next(new.parameters()).device).requires_grad_(True)
    try:
        healing = replace(healing, domains=measure(student, known, judged, progress))
    except KeyboardInterrupt:  # the healed model is kept, without figures
        healing = replace(healing, interrupted=True)
    return wrapped(model, student.to(next(new.parameters()).dtype), "healed"), healing


def _judged(
    model: nn.Module,
    evaluation: Mapping[str, Texts] | None,
    unseen: Mapping[str, Texts] | None,
    tokens: int,
    rows: Sequence[Tensor],
) -> dict[str, tuple[bool, list[Tensor]]]:
    """The domains to evaluate; raises if one of them is trained on."""
    domains = domains_of(model, evaluation, unseen, tokens)
    refuse_overlap([("healing", rows), *((name, each) for name, (_, each) in domains.items())])
    return domains


def changed(student: Transformer, teacher: Transformer) -> list[nn.Parameter]:
    """The projections of attention that differ from the teacher's.

    Raises:
        InputError: No projection differs from the teacher's.
    """
    found: list[nn.Parameter] = []
    for index, layer in enumerate(student.layers):
        theirs = dict(cast(TransformerLayer, teacher.layers[index]).attention.named_parameters())
        for name, parameter in cast(TransformerLayer, layer).attention.named_parameters():
            other = theirs.get(name, parameter.new_empty(0)).to(parameter.dtype)
            if not torch.equal(other, parameter):  # also if shapes differ
                found.append(parameter)
    if not found:
        raise InputError("there is nothing to heal: no projection of the model was converted")
    return found


class _Distillation(Trainable):
    """The KL divergence from a teacher in place of the cross-entropy; dropout is off."""

    def __init__(self, student: Transformer, teacher: Teacher) -> None:
        super().__init__(student)
        self.teacher = teacher

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: float
    ) -> dict[str, Tensor]:
        hidden = self.transformer.hidden_states(input_ids)
        pairs = zip(input_ids, hidden, strict=True)
        kl = torch.cat([kl_of(self.transformer, self.teacher, row, of) for row, of in pairs])
        return {"loss": kl.sum() / num_items_in_batch}


class _Healer:
    """Trains one model; keeps the best validated state."""

    def __init__(
        self,
        student: Transformer,
        teacher: Teacher,
        batches: Batches,
        validation: Sequence[Tensor],
        seconds: float,
        progress: Progress | None,
    ) -> None:
        self.student, self.teacher, self.batches = student, teacher, batches
        self.validation, self.seconds, self.progress = validation, seconds, progress
        for parameter in student.parameters():
            parameter.requires_grad_(False)
        self.parameters = changed(student, teacher.model)
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self.start = time.monotonic()
        self.steps = self.tokens = 0
        self.curve: list[Validation] = []
        self.best, self.state = math.inf, list[Tensor]()

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    def heal(self) -> Healing:
        before = mean_kl(self.student, self.teacher, self.validation)
        self.keep(before)
        rate, interrupted = 0.0, False
        try:
            with torch.random.fork_rng(), torch.enable_grad():
                rate = self.find_rate()
                self.train(rate)
        except KeyboardInterrupt:
            interrupted = True
        self.load(self.state)
        count = sum(parameter.numel() for parameter in self.parameters)
        return Healing(
            before, self.best, rate, tuple(self.curve), self.tokens, "", count, self.spent,
            interrupted,
        )  # fmt: skip

    def find_rate(self) -> float:
        """The best of ``RATES``, each tried from the beginning; leaves the best state loaded."""
        beginning, tried = [p.detach().clone() for p in self.parameters], []
        for rate in RATES:
            self.load(beginning)
            for _ in self.run(rate, self.spent + _TRIAL * self.seconds, "constant"):
                pass
            tried.append((self.validate(rate), rate))
        self.load(self.state)
        return min(tried)[1]

    def train(self, rate: float) -> None:
        """Trains until the time is over; the rate falls to a tenth."""
        interval = (self.seconds - self.spent) / _CHECKS
        while self.spent < self.seconds:
            due = self.spent + interval
            for _ in self.run(rate, self.seconds, "cosine"):
                if self.spent >= min(due, self.seconds):
                    if self.validate(rate) > _WORSE * self.best:
                        break
                    due = self.spent + interval
            else:
                if self.spent >= self.seconds:
                    break
            self.load(self.state)
            rate /= 2
        if self.curve[-1].steps != self.steps:
            self.validate(rate)

    def run(self, rate: float, until: float, shape: Shape) -> Iterator[Step]:
        """Steps of training until a point in time, at least one."""
        schedule = Schedule(
            minutes=max(until, 1e-3) / 60, lr=rate, shape=shape, floor=0.1, warmup=0,
            weight_decay=0.0, precision=_precision(self.parameters[0].device),
        )  # fmt: skip
        first = self.steps
        run = Run(
            self.student,
            lambda number: self.batches(first + number),
            schedule,
            trainable=_Distillation(self.student, self.teacher),
        )
        run.seconds = min(self.spent, 0.999 * until)
        with suppress(DivergedError):
            for step in run:
                self.steps += 1
                self.tokens += step.tokens
                if self.progress is not None:
                    done = min(int(self.spent), int(self.seconds))
                    self.progress(f"healing, KL {self.best:.3f}", done, int(self.seconds) or 1)
                yield step

    def validate(self, rate: float) -> float:
        kl = mean_kl(self.student, self.teacher, self.validation)
        kept = kl < self.best
        self.curve.append(Validation(self.spent, self.steps, kl, rate, kept))
        if kept:
            self.keep(kl)
        return kl if math.isfinite(kl) else math.inf

    def keep(self, kl: float) -> None:
        self.best = kl
        self.state = [parameter.detach().clone() for parameter in self.parameters]

    def load(self, state: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, state, strict=True):
                parameter.copy_(value)


def _batch(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    ids = torch.stack([*rows])
    return {"input_ids": ids, "labels": ids}


def _precision(device: torch.device) -> Literal["float32", "bfloat16"]:
    """bfloat16 products where the processor has them: two to three times as many steps."""
    fast = device.type != "cpu" or (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )
    return "bfloat16" if fast else "float32"
