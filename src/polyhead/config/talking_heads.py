"""Talking-heads attention as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polyhead.config.attention import AttentionConfig
from polyhead.config.normalizer_attention import refuse_sinks
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class TalkingHeadsAttentionConfig(AttentionConfig, kind="talking_heads"):
    """``AttentionConfig`` whose heads are mixed (Shazeer et al. 2020, arXiv 2003.02436).

    Attributes:
        before: Scores are mixed, before the softmax.
        after: Weights are mixed, behind it.

    Raises:
        ConfigError: As ``AttentionConfig``, neither, or sinks.
    """

    before: bool = True
    after: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.before or self.after):
            raise ConfigError("talking heads are mixed before, after or both: got neither")
        refuse_sinks(self, "talking heads")

    @property
    def layout(self) -> str:
        return f"talking-heads {super().layout}"

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        mixed = int(self.before) + int(self.after)
        yield ParameterGroup("attention", mixed * self.num_heads, self.num_heads, as_numbers=True)
