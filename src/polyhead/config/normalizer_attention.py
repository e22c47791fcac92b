"""Attention by a normalizer without parameters in place of the softmax, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyhead._utils.checks import check_number
from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_choice
from polyhead.errors import ConfigError

KINDS = ("sigmoid", "softpick", "entmax", "stick_breaking")


@dataclass(frozen=True)
class NormalizerAttentionConfig(AttentionConfig, kind="normalizer"):
    """``AttentionConfig`` with another function than the softmax.

    Attributes:
        normalizer: ``"sigmoid"`` (Ramapuram et al. 2024), ``"softpick"`` (Zuhri et al. 2025),
            ``"entmax"`` (Peters et al. 2019) or ``"stick_breaking"`` (Tan et al. 2024).
        sigmoid_bias: Added to the scores of a sigmoid, −log n for texts of n tokens.
        alpha: Of entmax, above 1 and at most 2, which is sparsemax.
        own_key: Whether a query sees its own key, else only keys behind it. Stick-breaking is
            published without.

    Raises:
        ConfigError: As ``AttentionConfig``, another normalizer or number, or sinks, which join a
            softmax's denominator.
    """

    normalizer: Literal["sigmoid", "softpick", "entmax", "stick_breaking"] = "sigmoid"
    sigmoid_bias: float = 0.0
    alpha: float = 1.5
    own_key: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("normalizer", self.normalizer, KINDS)
        check_number("sigmoid_bias", self.sigmoid_bias, error=ConfigError)
        check_number("alpha", self.alpha, above=1, most=2, error=ConfigError)
        refuse_sinks(self, self.normalizer)

    @property
    def layout(self) -> str:
        name = self.normalizer.replace("_", "-")
        if name == "entmax":
            name += f"-{self.alpha:g}"
        return f"{name} {super().layout}"


def refuse_sinks(config: AttentionConfig, what: str) -> None:
    """Raises ConfigError for sinks beside a normalizer."""
    if config.sinks:
        raise ConfigError(f"sinks join a softmax's denominator: got sinks=True with {what}")
