"""Exclusive self-attention, with values that ids add to, as plain data (NeoMME)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from polyhead.config.data import check_whole
from polyhead.config.gated_attention import GatedAttentionConfig
from polyhead.config.layout import (
    EMBEDDED,
    EMBEDDING,
    NORMED_HALF,
    TOKENS,
    HeadLayout,
    Prefill,
    shared,
)
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.sparse_encoder import check_plain
from polyhead.errors import ConfigError

_TABLE = "value_table"


@dataclass(frozen=True)
class ExclusiveAttentionConfig(GatedAttentionConfig, kind="exclusive"):
    """``GatedAttentionConfig`` of an encoder whose heads lose what lies along a token's own value.

    Attributes:
        mix_norm: The layer reads norm(a · x + b · e), with e what the embedding gives and a and b
            learned. The norm is the attention's own, so its layer has ``attention_norm=False``;
            None: it reads what it is given.
        value_vocab_size: Rows of a table whose vectors are added to the values of tokens, by their
            ids; None: there is none.
        value_table_of: Number of the earlier layer whose table it is; None: its own.

    Raises:
        ConfigError: As ``GatedAttentionConfig``, or what an encoder's heads cannot have.
    """

    mix_norm: NormConfig | None = None
    value_vocab_size: int | None = None
    value_table_of: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_plain(self, "exclusive heads", allowed=("rope", "qk_norm"))
        for name, least in (("value_vocab_size", 1), ("value_table_of", 0)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least=least)
        if self.value_table_of is not None and self.value_vocab_size is None:
            raise ConfigError("value_table_of needs a value_vocab_size: got None")

    @property
    def layout(self) -> str:
        return f"exclusive {super().layout}"

    @property
    def reads(self) -> Mapping[str, int]:
        given = {EMBEDDED: self.mix_norm, TOKENS: self.value_vocab_size}
        return {what: EMBEDDING for what, needs in given.items() if needs is not None}

    @property
    def shared_weights(self) -> Mapping[str, int]:
        return {} if self.value_table_of is None else {_TABLE: self.value_table_of}

    def check_source(self, what: str, source: HeadLayout) -> None:
        found = getattr(source, "value_vocab_size", None), source.kv.num_kv_heads, source.value_dim
        wanted = self.value_vocab_size, self.num_kv_heads, self.value_dim
        if what == _TABLE and found != wanted:
            raise ConfigError(
                f"value_table_of needs a layer with a table of {wanted[0]} rows for {wanted[1]} kv "
                f"heads and values of {wanted[2]} features: layer {self.value_table_of} is "
                f"{source.described} with value_vocab_size={found[0]}"
            )

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        yield from super().parameter_groups(embed_dim, context_dim)
        yield ParameterGroup("attention", self.num_heads, 1, multiplied=False)
        if self.mix_norm is not None:
            yield ParameterGroup("attention", 1, 2, multiplied=False)
            size = self.mix_norm.parameters(embed_dim)
            yield ParameterGroup("norms", 1, size, multiplied=False)
        if self.value_vocab_size is not None:
            row = self.num_kv_heads * self.value_dim
            table = ParameterGroup(
                "attention", self.value_vocab_size, row, multiplied=False, looked_up=True
            )
            yield replace(table, held=self.value_table_of is None)

    def peak_activation_elements(self, embed_dim: int, call: Prefill) -> int:
        plain = super().peak_activation_elements(embed_dim, call)
        H, G = shared(self.num_heads, call.ranks), shared(self.num_kv_heads, call.ranks)
        made = H * self.head_dim + G * (self.head_dim + self.value_dim)
        # Heads before and behind, and their own values, in float32 first.
        taken = (
            made + 3 * H * self.value_dim + (NORMED_HALF if call.half else 2) * G * self.value_dim
        )
        mixed = 0 if self.mix_norm is None else embed_dim
        entered = (2 + (NORMED_HALF if call.half else 1)) * embed_dim if mixed else 0
        return max(entered, mixed + max(plain, taken))
