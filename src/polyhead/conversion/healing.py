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
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from polyhead._utils.checks import number, whole
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
from polyhead.errors import InputError
from polyhead.layers import TransformerLayer
from polyhead.layers.quantized import refuse_quantized
from polyhead.models import Transformer
from polyhead.training.evaluation import Progress, Texts

RATES = (3e-4, 1e-4, 3e-5)
"""Learning rates of Adam, tried from the greatest; a rate that is too large costs a few steps."""

_TRIAL = 0.04
"""Share of the time that each trial of a rate takes."""

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
        seconds: Since the beginning.
        steps: Steps of training so far.
        kl: Validated, nats per token.
        rate: The learning rate behind it.
        kept: Whether it became the best state.
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
        before: KL divergence on the validation texts, nats per token.
        after: The same of the state that was kept.
        rate: The learning rate that was found.
        curve: All validations.
        tokens: Trained on, repeats counted.
        hash: Hash of the training texts.
        parameters: That were trained.
        seconds: In all.
        interrupted: Whether Ctrl-C ended it.
        domains: Figures of the state that was kept.
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
    batch: int = 1,
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
        model: A converted one; it stays as it is.
        teacher: What it was converted from.
        texts: To train on; a tenth of them, whole windows, validates.
        minutes: For everything, wall-clock.
        tokens: Read of the texts at most; they are repeated while there is time.
        window: T of the windows.
        batch: Windows of a step. The teacher's distributions say so much of each token that one
            window's gradient is good enough, and while there is little time steps matter more.
        seed: Seed of their order.
        evaluation: Texts by domain, as given to ``convert``; measured when all is done, beyond
            ``minutes``. They may not overlap ``texts``.
        unseen: Likewise, of domains that were not calibrated on.
        evaluation_tokens: Read at most of each domain.
        progress: Called as ``progress("healing, KL 0.123", seconds done, seconds in all)``.

    Returns:
        The model in its best validated state, and what happened. Where nothing was better than the
        beginning, that is the beginning.

    Raises:
        InputError: Less than ten windows of text, texts that overlap, a model in
            training mode, or nothing that was converted.
        ValueError: A number out of its range, or models of different vocabularies.
    """
    number("minutes", minutes, above=0)
    window = whole("window", window, least=16)
    old, new = source_of(teacher), source_of(model)
    refuse_quantized(new, "healing")
    if old.config.vocab_size != new.config.vocab_size or len(old.layers) != len(new.layers):
        raise ValueError("teacher must be the model that was converted: its sizes are others")
    rows = windows_of(model, texts, whole("tokens", tokens, least=1), window)
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
    student = student.to(next(new.parameters()).device, torch.float32).eval()
    known = Teacher(old)
    size = whole("batch", batch, least=1)
    run = _Run(student, known, trained, validation, 60.0 * minutes, size, seed, progress)
    healing = replace(run.heal(), hash=tokens_hash(trained))
    try:
        healing = replace(healing, domains=measure(student, known, judged, progress))
    except KeyboardInterrupt:  # the healed model is kept, without figures
        healing = replace(healing, interrupted=True)
    healed = student.to(next(new.parameters()).dtype)
    for parameter in healed.parameters():
        parameter.requires_grad_(True)
    return wrapped(model, healed, "healed"), healing


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
        InputError: There are none.
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


class _Run:
    """One healing of one model."""

    def __init__(
        self,
        student: Transformer,
        teacher: Teacher,
        rows: Sequence[Tensor],
        validation: Sequence[Tensor],
        seconds: float,
        batch: int,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self.student, self.teacher, self.validation = student, teacher, validation
        self.rows, self.seconds, self.progress = rows, seconds, progress
        self.batch = batch
        for parameter in student.parameters():
            parameter.requires_grad_(False)
        self.parameters = changed(student, teacher.model)
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self.order = torch.Generator().manual_seed(seed)
        self.queue: list[int] = []
        self.start = time.monotonic()
        self.steps = self.tokens = 0
        self.curve: list[Validation] = []
        self.best = math.inf
        self.state: list[Tensor] = []

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    def heal(self) -> Healing:
        before = mean_kl(self.student, self.teacher, self.validation)
        self.keep(before)
        rate, interrupted = 0.0, False
        try:
            rate = self.find_rate()
            self.train(rate)
        except KeyboardInterrupt:
            interrupted = True
        self.restore()
        return Healing(
            before,
            self.best,
            rate,
            tuple(self.curve),
            self.tokens,
            "",
            sum(parameter.numel() for parameter in self.parameters),
            self.spent,
            interrupted,
        )

    def find_rate(self) -> float:
        """The best of a few, each tried from the beginning; training goes on from its end."""
        beginning, tried = [p.detach().clone() for p in self.parameters], []
        slot = _TRIAL * self.seconds
        for rate in RATES:
            self.load(beginning)
            until = self.spent + slot
            self.run(_optimizer(self.parameters, rate), rate, until, decay=False)
            tried.append((self.validate(rate), rate))
        self.restore()
        return min(tried)[1]

    def train(self, rate: float) -> None:
        """Trains until the time is over; the rate falls to a tenth."""
        optimizer = _optimizer(self.parameters, rate)
        for check in range(_CHECKS):
            left = self.seconds - self.spent
            until = self.spent + left / (_CHECKS - check)
            if left <= 0 or until <= self.spent:
                break
            self.run(optimizer, rate, until, decay=True)
            if self.validate(rate) > _WORSE * self.best:
                self.restore()
                rate /= 2
                optimizer = _optimizer(self.parameters, rate)

    def run(
        self, optimizer: torch.optim.Optimizer, rate: float, until: float, *, decay: bool
    ) -> None:
        """Trains until a point in time, at least one step."""
        first = True
        while first or self.spent < until:
            first = False
            share = min(1.0, self.spent / self.seconds)
            for group in optimizer.param_groups:
                group["lr"] = rate * (0.55 + 0.45 * math.cos(math.pi * share) if decay else 1.0)
            self.step(optimizer)
            if self.progress is not None:
                done = min(int(self.spent), int(self.seconds))
                self.progress(f"healing, KL {self.best:.3f}", done, int(self.seconds) or 1)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        for row in self.draw():
            with torch.enable_grad(), _narrow(row.device):
                hidden = self.student.hidden_states(row[None])[0]
                loss = kl_of(self.student, self.teacher, row, hidden).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            self.tokens += len(row)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        optimizer.step()
        self.steps += 1

    def draw(self) -> list[Tensor]:
        """The windows of a step; none is repeated before all were used."""
        found = []
        for _ in range(self.batch):
            if not self.queue:
                self.queue = torch.randperm(
                    len(self.rows), generator=self.order, device="cpu"
                ).tolist()
            found.append(self.rows[self.queue.pop()])
        return found

    def validate(self, rate: float) -> float:
        kl = mean_kl(self.student, self.teacher, self.validation)
        kept = kl < self.best
        self.curve.append(Validation(self.spent, self.steps, kl, rate, kept))
        if kept:
            self.keep(kl)
        return kl if math.isfinite(kl) else math.inf

    def keep(self, kl: float) -> None:
        state = [parameter.detach().clone() for parameter in self.parameters]
        self.best, self.state = kl, state

    def restore(self) -> None:
        self.load(self.state)

    def load(self, state: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, state, strict=True):
                parameter.copy_(value)


def _optimizer(parameters: Sequence[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.98))


def _narrow(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 products where the processor has them: two to three times as many steps."""
    fast = device.type != "cpu" or (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )
    return torch.autocast(device.type, torch.bfloat16) if fast else nullcontext()
