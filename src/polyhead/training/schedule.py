"""The length of a run and its learning rate.

    progress = the part of the budget that is used: of steps, tokens or minutes, whichever is most
    rate  = lr · warm-up · shape(progress)

If minutes limit a run, the rate decays by time, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from polyhead._utils.checks import check_int, check_number, check_one_of
from polyhead.config.data import Data
from polyhead.errors import ConfigError

Shape = Literal["constant", "linear", "cosine", "inverse-sqrt"]
_SHAPES = ("constant", "linear", "cosine", "inverse-sqrt")


@dataclass(frozen=True)
class Schedule(Data):
    """The numbers of a run.

    Attributes:
        steps: Largest number of optimizer steps.
        tokens: Largest number of labeled tokens.
        minutes: Largest wall-clock time; the first limit reached ends the run.
        lr: Peak learning rate of AdamW.
        embedding_lr: Learning rate of the token embedding, as a fraction of ``lr``.
        shape: How it falls after the warm-up: to ``floor`` at the end of the budget (``"linear"``,
            ``"cosine"``), as 1/√step (``"inverse-sqrt"``, the 2017 paper), or not.
        warmup: Steps of linear warm-up.
        floor: Final learning rate, as a fraction of ``lr``.
        weight_decay: Weight decay of matrices; vectors have none.
        beta1, beta2: AdamW's decay rates of the moments.
        clip: Maximum norm of the gradients; 0: no clipping.
        accumulate: Batches per step and process whose gradients are accumulated.
        label_smoothing: Probability of each label that is spread over all tokens.
        precision: ``"float32"``, or ``"bfloat16"`` by autocast.
        validate_every: Steps between validations; 0: at the end alone.
        save_every: Steps between saves of the state; 0: at the end alone.
        seed: Seed of initial weights, data order and dropout.
    """

    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    lr: float = 1e-3
    embedding_lr: float = 1.0
    shape: Shape = "cosine"
    warmup: int = 100
    floor: float = 0.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float = 1.0
    accumulate: int = 1
    label_smoothing: float = 0.0
    precision: Literal["float32", "bfloat16"] = "float32"
    validate_every: int = 0
    save_every: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("tokens", 1), ("accumulate", 1), ("warmup", 0),
                            ("validate_every", 0), ("save_every", 0), ("seed", 0)):  # fmt: skip
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least=least, error=ConfigError)
        if self.minutes is not None:
            check_number("minutes", self.minutes, above=0, error=ConfigError)
        check_number("lr", self.lr, above=0, error=ConfigError)
        for name in ("weight_decay", "clip"):
            check_number(name, getattr(self, name), least=0, error=ConfigError)
        for name in ("floor", "label_smoothing", "embedding_lr"):
            check_number(name, getattr(self, name), least=0, most=1, error=ConfigError)
        for name in ("beta1", "beta2"):
            check_number(name, getattr(self, name), least=0, below=1, error=ConfigError)
        check_one_of("shape", self.shape, _SHAPES, error=ConfigError)
        check_one_of("precision", self.precision, ("float32", "bfloat16"), error=ConfigError)
        if self.steps is None and self.tokens is None and self.minutes is None:
            raise ConfigError("a run needs steps, tokens or minutes: got none of them")

    def progress(self, steps: int, tokens: int, seconds: float) -> float:
        """The part of the budget that so much uses; from 1 on the run is over."""
        return max(
            steps / self.steps if self.steps else 0.0,
            tokens / self.tokens if self.tokens else 0.0,
            seconds / (60 * self.minutes) if self.minutes else 0.0,
        )

    def rate(self, step: int, progress: float) -> float:
        """The learning rate of a step.

        Args:
            step: Index of the step, from 0.
            progress: Fraction of the budget used before the step.
        """
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        shape = 1.0
        if self.shape == "inverse-sqrt":
            shape = math.sqrt(max(self.warmup, 1) / max(step + 1, self.warmup, 1))
        elif self.shape == "linear":
            shape = 1.0 - (1.0 - self.floor) * min(progress, 1.0)
        elif self.shape == "cosine":
            falling = (1.0 + math.cos(math.pi * min(progress, 1.0))) / 2
            shape = self.floor + (1.0 - self.floor) * falling
        return self.lr * warm * shape
