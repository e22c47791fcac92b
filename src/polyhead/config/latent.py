"""Multi-head latent attention as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from polyhead.config.data import Data
from polyhead.config.norm import NormConfig
from polyhead.config.rope import RopeConfig
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class LatentAttentionConfig(Data):
    """One latent attention layer (DeepSeek-V2, 2024, §2.1), in the names of DeepSeek's config.json.

    A key has ``qk_nope_head_dim`` features made from the latent and ``qk_rope_head_dim`` rotated
    ones that all heads share. ``bias`` is of the projections into the latents and of ``o_proj``
    (``attention_bias`` in the files). ``scale`` None is 1/√(key size), times the square of yarn's
    temperature where the rotary scaling has ``mscale_all_dim``.

    Raises:
        ConfigError: A size that is impossible, or a ``rope`` over other features than the rotary
            part.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None  # None: queries straight from the input (V2-Lite)
    bias: bool = False
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    norm: NormConfig = field(default_factory=lambda: NormConfig(eps=1e-6))
    scale: float | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "num_heads",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "q_lora_rank",
        ):
            value = getattr(self, name)
            if value is None and name == "q_lora_rank":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1: got {value!r}")
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim must be even: got {self.qk_rope_head_dim}")
        if self.rope is not None and self.rope.dim not in (None, self.qk_rope_head_dim):
            raise ConfigError(
                f"rope dim must be qk_rope_head_dim={self.qk_rope_head_dim} or None: got "
                f"{self.rope.dim}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout must be at least 0 and below 1: got {self.dropout}")

    @property
    def qk_head_dim(self) -> int:
        """Features of one head's query and key when expanded."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_head_dim(self) -> int:
        """Features of a head that ``rope`` is over."""
        return self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Elements that the cache keeps per token: the latent and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def score_scale(self) -> float:
        """The factor of the scores."""
        if self.scale is not None:
            return self.scale
        temperature, rope = 1.0, self.rope
        if rope is not None and rope.mscale_all_dim and rope.factor is not None and rope.factor > 1:
            temperature = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
        return temperature**2 / math.sqrt(self.qk_head_dim)
