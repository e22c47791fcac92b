"""The training loop, on accelerate: CPU or GPU, one process or those that torchrun starts.

    schedule = Schedule(steps=1_000, lr=1e-3, warmup=50, validate_every=100)
    run = Run(model, batches, schedule, validation=held_out, folder="run")
    for step in run:
        print(step.number, step.loss, step.validation)

``batches`` is a function of the batch's number alone, and so is everything that is drawn: what a
run computes depends only on its arguments and the number of the step. A run that was
stopped therefore continues with the same losses, to the bit, and W processes compute what one
does that accumulates W times as many batches.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyhead._utils.atomic_write import write_tensors
from polyhead._utils.checks import needed
from polyhead.errors import CheckpointError, DivergedError
from polyhead.training.losses import IGNORED
from polyhead.training.schedule import Schedule
from polyhead.training.state import FILE, load_state, save_state
from polyhead.training.trainable import Trainable

if TYPE_CHECKING:
    from types import FrameType

Batch = Mapping[str, Tensor]
"""What ``Trainable.forward`` takes: ``input_ids``, ``labels`` and more."""

BEST = "best.safetensors"
"""The weights of the least validation loss."""

_PRIME = 1_000_003  # numbers of batches of other seeds stay apart


@dataclass(frozen=True)
class Step:
    """A step that was done.

    Attributes:
        number: Number of the step, from 1.
        loss: Mean loss per labeled token over all batches of the step, in nats.
        lr: Learning rate of the step.
        gradient_norm: L2 norm of all gradients before clipping.
        tokens: Labeled tokens of all processes.
        seconds: Wall-clock seconds, without validation.
        progress: Fraction of the budget used so far.
        validation: Mean loss of the validation batches, if it was measured.
        best: Whether that is the lowest so far.
    """

    number: int
    loss: float
    lr: float
    gradient_norm: float
    tokens: int
    seconds: float
    progress: float
    validation: float | None = None
    best: bool = False


class Run:
    """Trains a model; iterating does the steps.

    Args:
        model: A ``Transformer``, or what ``polyhead.load`` makes of a decoder or encoder-decoder.
        batches: The batch of a number from 0; of ``schedule.accumulate`` batches and W processes,
            step n (from 0) takes those from n · accumulate · W on.
        schedule: Budget, learning rate and other hyperparameters.
        validation: Batches of the validation loss, without dropout.
        folder: Folder for the state and the best weights; None: nothing is saved.
        about: JSON data saved with the state.
        trainable: The model with a loss of its own; default: the cross-entropy.

    Attributes:
        model: The model given.
        steps, tokens, seconds: Done so far.
        best: Lowest validation loss, or None.
        is_main: Whether this process is the one that writes and prints.

    Raises:
        ConfigError: A model without a head over its vocabulary.
        InputError: accelerate is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Callable[[int], Batch],
        schedule: Schedule,
        *,
        validation: Sequence[Batch] = (),
        folder: str | Path | None = None,
        about: Mapping[str, Any] | None = None,
        trainable: Trainable | None = None,
    ) -> None:
        self.model, self.batches, self.schedule = model, batches, schedule
        self.validation, self.about = validation, dict(about or {})
        self.folder = None if folder is None else Path(folder)
        self.steps, self.tokens, self.seconds = 0, 0, 0.0
        self.best: float | None = None
        self._validated = -1
        self._accelerator = needed("accelerate", "polyhead[train]").Accelerator()
        trained = trainable or Trainable(model, label_smoothing=schedule.label_smoothing)
        self._optimizer = _adamw(trained, schedule)
        self._trained = self._accelerator.prepare_model(trained)
        self.is_main: bool = self._accelerator.is_main_process

    @property
    def progress(self) -> float:
        """The part of the budget that is used."""
        return self.schedule.progress(self.steps, self.tokens, self.seconds)

    @property
    def state_file(self) -> Path:
        """Where the state is saved.

        Raises:
            CheckpointError: The run has no folder.
        """
        if self.folder is None:
            raise CheckpointError("this run has no folder: nothing of it is saved")
        return self.folder / FILE

    def __iter__(self) -> Iterator[Step]:
        """Steps until the budget is used.

        Ctrl-C ends it after the step in hand: the state is saved, and KeyboardInterrupt raised.

        Raises:
            DivergedError: A loss or gradient is not finite; the state before that step is saved.
            OSError: The state cannot be saved; the former one is left.
        """
        with _interruptions(self.folder is not None) as asked:
            began = time.perf_counter() - self.seconds
            while True:
                self.seconds = self._agreed(time.perf_counter() - began)
                if self._agreed(float(asked.is_set())):
                    self.save()
                    raise KeyboardInterrupt
                if self.progress >= 1.0:
                    break
                yield self._step()
        if self.validation and self._validated != self.steps:  # time ended between two steps
            self._judge()
        self.save()

    def _step(self) -> Step:
        started, schedule = time.perf_counter(), self.schedule
        lr = schedule.rate(self.steps, self.progress)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        loss, norm, count = self._gradients()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._optimizer.zero_grad()
            if self.folder is not None:
                self.save()
            what = "loss" if not math.isfinite(loss) else "norm of the gradients"
            value = loss if not math.isfinite(loss) else norm
            kept = "nothing is saved" if self.folder is None else f"is kept in {self.state_file}"
            raise DivergedError(
                f"the {what} at step {self.steps + 1} is {value}: the state of step {self.steps} "
                f"{kept}; a lower lr, a longer warm-up or clip may help"
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps, self.tokens = self.steps + 1, self.tokens + count
        seconds = time.perf_counter() - started
        self.seconds += seconds
        validation, best = None, False
        due = schedule.validate_every and self.steps % schedule.validate_every == 0
        if self.validation and (due or self.progress >= 1.0):
            validation, best = self._judge()
        if schedule.save_every and self.steps % schedule.save_every == 0 and self.folder:
            self.save()
        return Step(self.steps, loss, lr, norm, count, seconds, self.progress, validation, best)

    def _judge(self) -> tuple[float, bool]:
        """The validation loss, and whether it is the least so far; the best weights are kept."""
        found = self.validate()
        self._validated = self.steps
        best = self.best is None or found < self.best
        if best:
            self.best = found
            self._keep_best()
        return found, best

    def _gradients(self) -> tuple[float, float, int]:
        """Adds up the gradients of a step: its loss, their norm, and the tokens with a label."""
        accelerator, schedule = self._accelerator, self.schedule
        processes = accelerator.num_processes
        first = self.steps * schedule.accumulate * processes
        numbers = [
            first + k * processes + accelerator.process_index for k in range(schedule.accumulate)
        ]
        taken = [self._moved(self.batches(number)) for number in numbers]
        count = self._summed(float(sum(self._learned(batch) for batch in taken)))
        self._trained.train()
        total = 0.0
        for number, batch in zip(numbers, taken, strict=True):
            torch.manual_seed(schedule.seed * _PRIME + number)
            last = number == numbers[-1]
            with nullcontext() if last else accelerator.no_sync(self._trained):
                # DistributedDataParallel makes the mean over processes of what is to be a sum.
                divisor = max(count, 1.0) / processes
                with self._autocast():
                    loss = self._trained(**batch, num_items_in_batch=divisor)["loss"]
                accelerator.backward(loss)
            total += float(loss.detach()) / processes
        norm = nn.utils.get_total_norm(
            [p.grad for p in self.model.parameters() if p.grad is not None]
        )
        if schedule.clip:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), schedule.clip, norm)
        return self._summed(total), float(norm), int(count)

    @torch.no_grad()
    def validate(self, batches: Sequence[Batch] | None = None) -> float:
        """The mean loss of held-out batches, without label smoothing or dropout.

        Args:
            batches: Batches to measure; default: ``validation``.
        """
        accelerator, trained = self._accelerator, self._trained
        held = self.validation if batches is None else batches
        inner = accelerator.unwrap_model(trained)
        smoothing, inner.label_smoothing = inner.label_smoothing, 0.0
        training = [(module, module.training) for module in self.model.modules()]
        total, count = 0.0, 0.0
        try:
            for batch in held[accelerator.process_index :: accelerator.num_processes]:
                moved = self._moved(batch)
                count += self._learned(moved)
                self.model.eval()
                inner.training = True  # then no logits are computed
                with self._autocast():
                    total += float(inner(**moved, num_items_in_batch=1)["loss"])
        finally:
            inner.label_smoothing = smoothing
            for module, was in training:
                module.training = was
        return self._summed(total) / max(self._summed(count), 1.0)

    def save(self) -> None:
        """Saves the state.

        Raises:
            OSError: It cannot be written; the former one is left.
        """
        if self.folder is None:
            return
        if self.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            facts = {
                "steps": self.steps, "tokens": self.tokens, "seconds": self.seconds,
                "best": self.best, "about": self.about,
            }  # fmt: skip
            save_state(self.state_file, self.model, self._optimizer, facts)
        self._accelerator.wait_for_everyone()

    def resume(self) -> None:
        """Continues from the state in the folder.

        Raises:
            CheckpointError: There is none, it is damaged, or of another model.
        """
        facts = load_state(self.state_file, self.model, self._optimizer)
        self.steps, self.tokens = int(facts["steps"]), int(facts["tokens"])
        self.seconds, self.best = float(facts["seconds"]), facts["best"]

    def use_best(self) -> None:
        """Puts the weights of the least validation loss into the model, where they were saved."""
        if self.folder is None or self.best is None:
            return
        from safetensors.torch import load_file

        self.model.load_state_dict(load_file(self.folder / BEST))

    def _keep_best(self) -> None:
        if self.folder is None or not self.is_main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in self.model.state_dict().items()
        }
        write_tensors(self.folder / BEST, weights, {"step": str(self.steps)})

    def _autocast(self) -> torch.autocast:
        wanted = self.schedule.precision == "bfloat16"
        return torch.autocast(self._accelerator.device.type, torch.bfloat16, enabled=wanted)

    def _learned(self, batch: Batch) -> int:
        """Tokens whose label is predicted; the first of a decoder's row is not."""
        labels = batch["labels"]
        if self._accelerator.unwrap_model(self._trained).transformer.config.kind == "decoder":
            labels = labels[:, 1:]
        return int((labels != IGNORED).sum())

    def _moved(self, batch: Batch) -> dict[str, Tensor]:
        device = self._accelerator.device
        return {name: tensor.to(device) for name, tensor in batch.items()}

    def _summed(self, value: float) -> float:
        """The sum over all processes."""
        if self._accelerator.num_processes == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self._accelerator.device)
        summed: Tensor = self._accelerator.reduce(tensor, "sum")
        return float(summed)

    def _agreed(self, value: float) -> float:
        """The mean over all processes, so that all decide alike."""
        processes: int = self._accelerator.num_processes
        return self._summed(value) / processes


def _adamw(model: nn.Module, schedule: Schedule) -> torch.optim.AdamW:
    """AdamW: matrices decay, vectors do not; tables of tokens have their own learning rate."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            kind = (parameter.ndim > 1, id(parameter) in tables)
            groups.setdefault(kind, []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "weight_decay": schedule.weight_decay if matrix else 0.0,
                "lr_scale": schedule.embedding_lr if table else 1.0,
            }
            for (matrix, table), parameters in groups.items()
        ],
        lr=schedule.lr,
        betas=(schedule.beta1, schedule.beta2),
        fused=True,
    )


@contextmanager
def _interruptions(heard: bool) -> Iterator[threading.Event]:
    """An event that Ctrl-C sets; the second one interrupts at once.

    Args:
        heard: Where nothing can be saved, or in another thread than the main one, Ctrl-C stays
            what it is.
    """
    asked = threading.Event()
    if not heard or threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
