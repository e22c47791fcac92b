"""How new weights are drawn: normal numbers, biases 0, norms 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyhead._utils.checks import check_number
from polyhead.config.data import Data, check_choice
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class InitialConfig(Data):
    """The standard deviations of new weights; a trained model does not depend on them.

    Attributes:
        rule: ``"normal"``: ``scale`` everywhere. ``"residual"``: matrices that write to the
            residual stream scale / √(2 · layers) (GPT-2), so that its size does not grow with
            depth. ``"width"``: tables of tokens ``scale``, matrices scale / √(their inputs), those
            of queries another √head_dim less (T5, whose scores have no factor).
        scale: config.json's initializer_range, init_std or initializer_factor.
    """

    rule: Literal["normal", "residual", "width"] = "normal"
    scale: float = 0.02

    def __post_init__(self) -> None:
        check_choice("initial rule", self.rule, ("normal", "residual", "width"))
        check_number("initial scale", self.scale, least=0.0, error=ConfigError)
