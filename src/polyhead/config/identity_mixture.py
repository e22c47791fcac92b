"""A mixture some of whose experts give back their input, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.config.data import check_whole
from polyhead.config.mixture import MixtureConfig
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class IdentityMixtureConfig(MixtureConfig, kind="identity_mixture"):
    """``MixtureConfig`` with zero-computation experts (LongCat-Flash 2025, arXiv 2509.01322, §2.1).

    Attributes:
        identities: Experts Z that give back their input; tokens choose them as the others, and
            their numbers follow those of the ``num_experts`` networks.

    Raises:
        ConfigError: Groups of experts, or a choice by sparsemixer.
    """

    identities: int = 1

    def __post_init__(self) -> None:
        check_whole("identities", self.identities)
        if self.groups > 1 or self.scoring == "sparsemixer":
            raise ConfigError(
                "experts that give back their input are in no groups, and sparsemixer does not "
                f"choose them: got groups={self.groups}, scoring={self.scoring!r}"
            )
        super().__post_init__()

    @property
    def choices(self) -> int:
        return self.num_experts + self.identities
