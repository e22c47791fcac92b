"""Multi-matrix factorization attention as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from polyhead.config.attention import AttentionConfig
from polyhead.config.data import check_whole
from polyhead.config.layout import NORMED_HALF, Prefill
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup


@dataclass(frozen=True)
class FactorizedAttentionConfig(AttentionConfig, kind="factorized"):
    """``AttentionConfig`` whose queries are made through a low rank.

    With one kv head this is multi-matrix factorization attention (MFA; Hu et al. 2024, arXiv
    2412.19255), which spends what that saves on many heads of a large ``head_dim``. Step-3 (2025,
    arXiv 2507.19427) has an RMS norm over the ``q_rank`` numbers.

    Attributes:
        q_rank: Numbers of a token that all heads' queries are made from.
        q_rank_norm: Norm over them; None: they are used as they are projected.
    """

    q_rank: int = field(kw_only=True)
    q_rank_norm: NormConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("q_rank", self.q_rank)

    @property
    def layout(self) -> str:
        return "MFA" if self.num_kv_heads == 1 else f"MFA-{self.num_kv_heads}"

    @property
    def described(self) -> str:
        return f"{super().described}, queries of rank {self.q_rank}"

    @property
    def query_rows(self) -> int:
        return self.q_rank

    def query_matrices(self, read: int) -> list[tuple[int, int, int, bool]]:
        down = (1, self.q_rank, read, self.qkv_bias)
        return [down, (self.num_heads, self.head_dim, self.q_rank, False)]

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        if self.q_rank_norm is not None:
            count = self.q_rank_norm.parameters(self.q_rank)
            yield ParameterGroup("norms", 1, count, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        normed = 0 if self.q_rank_norm is None else NORMED_HALF if call.half else 1
        kv = self.num_kv_heads * (self.head_dim + self.value_dim)
        made = max(normed * self.q_rank, self.num_heads * self.head_dim + self.q_rank)
        return self.q_rank + max(plain, kv + made)
