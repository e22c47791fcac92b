"""A mixture whose experts the ids of tokens choose, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from polyhead.config.data import check_whole
from polyhead.config.mixture import MixtureConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class TokenMixtureConfig(MixtureConfig, kind="token_mixture"):
    """``MixtureConfig`` with a table of the experts of every token (Roller et al. 2021, "Hash
    layers", arXiv 2106.04426; DeepSeek-V4). The router weighs them, and chooses none.

    Attributes:
        vocab_size: Rows of the table.

    Raises:
        ConfigError: What is about a choice: biases of it, groups, sparsemixer, a capacity.
    """

    reads_tokens: ClassVar[bool] = True

    vocab_size: int = 1

    def __post_init__(self) -> None:
        check_whole("vocab_size", self.vocab_size)
        if self.choice_bias or self.groups > 1 or self.capacity or self.scoring == "sparsemixer":
            raise ConfigError(
                "experts that ids choose have no choice_bias, groups, capacity or sparsemixer: got "
                f"choice_bias={self.choice_bias}, groups={self.groups}, capacity={self.capacity}, "
                f"scoring={self.scoring!r}"
            )
        super().__post_init__()

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim)
        rows, each = self.vocab_size, self.experts_per_token
        yield ParameterGroup("feed_forward", rows, each, multiplied=False, looked_up=True)
