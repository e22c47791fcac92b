"""Queries, keys and values of heads: projections of tokens, normalized and rotated.

    q = rope(norm(x Wq))        k = rope(norm(c Wk))        v = norm(c Wv)

Shape letters: B batch, H query heads, G kv heads, T tokens, D head size, V value size,
E embed size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_probability
from polyhead.config import AttentionConfig
from polyhead.errors import ConfigError
from polyhead.layers import fused
from polyhead.layers.attention_parts import build_qk_norm, check_sizes, scale_by_temperature
from polyhead.layers.hooks import Hooked
from polyhead.layers.linear import fused_linear
from polyhead.layers.norms import build_norm
from polyhead.layers.positions import RoPE


class HeadProjections(Hooked):
    """Base of ``MultiHeadAttention``: its parameters, and what they make of tokens."""

    _fixed = frozenset(
        [
            "config",
            "embed_dim",
            "kdim",
            "vdim",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "v_head_dim",
            "qk_norm_place",
        ]
    )

    config: AttentionConfig
    sinks: nn.Parameter | None
    k_proj: nn.Linear
    v_proj: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module
    v_norm: nn.Module

    def _build(
        self,
        embed_dim: int,
        config: AttentionConfig,
        kdim: int | None,
        vdim: int | None,
        rope: RoPE | None,
    ) -> None:
        """Makes all parameters, in the order in which they are drawn and saved."""
        check_sizes(embed_dim=embed_dim, kdim=kdim, vdim=vdim)
        check_probability("dropout", config.dropout, error=ConfigError)
        if rope is not None and rope.config != config.rope:
            raise ConfigError(f"rope must be built from config.rope={config.rope}: got {rope}")
        H, G, D = config.num_heads, config.num_kv_heads, config.head_dim
        V = D if config.v_head_dim is None else config.v_head_dim
        self.config = config
        self.embed_dim = embed_dim
        read = config.input_vectors * embed_dim
        self.kdim = read if kdim is None else kdim
        self.vdim = read if vdim is None else vdim
        self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim = H, G, D, V
        self.scale = 1.0 / math.sqrt(D) if config.scale is None else config.scale
        self.softcap, self.dropout = config.softcap, config.dropout

        self.q_proj = nn.Linear(read, config.query_rows, bias=config.qkv_bias)
        if config.makes_keys:
            held = config.projected_kv
            made = held.num_kv_heads
            self.k_proj = nn.Linear(self.kdim, made * held.key_dim, bias=config.has_k_bias)
            if not config.values_from_keys:
                self.v_proj = nn.Linear(self.vdim, made * held.value_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(H * V, embed_dim, bias=config.out_bias)
        self.register_parameter("sinks", nn.Parameter(torch.zeros(H)) if config.sinks else None)
        self.qk_norm_place = None if config.qk_norm is None else config.qk_norm.place
        if config.qk_norm is not None:
            self.q_norm = build_qk_norm(H, D, config.qk_norm)
            if config.makes_keys:
                self.k_norm = build_qk_norm(G, D, config.qk_norm)
        if config.v_norm is not None and config.makes_keys:
            self.v_norm = build_norm(V, config.v_norm)
        self.rope = rope
        if rope is None and config.rope is not None:
            self.rope = RoPE.from_config(config.rope, config.rope_head_dim)
        # If queries and keys are treated alike, one rotation turns both.
        self._rotates_together = (
            self.rope is not None
            and config.makes_keys
            and not config.values_from_keys
            and config.qk_norm is None
            and config.query_temperature is None
        )
        self._clip, self._temperature = config.qkv_clip, config.query_temperature
        self._value_scale = config.value_scale

    def _project(self, x: Tensor, positions: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[B, H, T, D]``, k ``[B, G, T, D]``, v ``[B, G, T, V]`` of self-attention."""
        if self._rotates_together:
            H, G, D = self.num_heads, self.num_kv_heads, self.head_dim
            modules = self._modules  # faster than attributes, which nn.Module looks up here
            joined = fused_linear(x, modules["q_proj"], modules["k_proj"], modules["v_proj"])
            if joined is not None:
                # Queries and keys are neighbours in memory: one rotation turns both.
                qk = self._placed(joined[..., : (H + G) * D], H + G, "q_norm", positions)
                v = self._values(joined[..., (H + G) * D :])
                return qk[:, :H], qk[:, H:], v
        return self._project_apart(x, positions, positions)

    def _project_apart(
        self, x: Tensor, positions: int | Tensor, of_keys: int | Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As ``_project``, keys rotated by positions of their own; None: they are not rotated."""
        modules = self._modules
        if self.config.values_from_keys:
            q, k = fused.linears(x, modules["q_proj"], modules["k_proj"])
            v = k
        else:
            q, k, v = fused.linears(x, modules["q_proj"], modules["k_proj"], modules["v_proj"])
        return (
            self._queries(q, positions),
            self._placed(k, self.num_kv_heads, "k_norm", of_keys),
            self._values(v),
        )

    def _queries(self, projected: Tensor, positions: int | Tensor) -> Tensor:
        """``[B, T, H · D]`` as ``[B, H, T, D]``, as scores take them."""
        q = self._placed(projected, self.num_heads, "q_norm", positions)
        if self._temperature is not None:
            q = scale_by_temperature(q, positions, self._temperature)
        return q

    def _values(self, projected: Tensor) -> Tensor:
        """``[B, T, G · V]`` as ``[B, G, T, V]``."""
        if self._clip is not None:
            projected = projected.clamp(-self._clip, self._clip)
        if self._value_scale != 1.0:
            projected = projected * self._value_scale
        B, T, _ = projected.shape
        values = projected.view(B, T, self.num_kv_heads, self.v_head_dim)
        if self.config.v_norm is not None:
            values = self.v_norm(values)
        return values.transpose(1, 2)

    def _placed(
        self, projected: Tensor, heads: int, norm: str, positions: int | Tensor | None
    ) -> Tensor:
        """``[B, T, heads · D]`` as ``[B, heads, T, D]``, normalized and rotated; None: not that."""
        place = self.qk_norm_place
        if place == "full_width":
            projected = getattr(self, norm)(projected)
        if self._clip is not None:
            projected = projected.clamp(-self._clip, self._clip)
        x = projected.view(*projected.shape[:2], heads, self.head_dim)
        if place == "before_rope":
            x = getattr(self, norm)(x)
        if self.rope is not None and positions is not None:
            x = self.rope.apply(x, positions, head_axis=2)
        if place == "after_rope":
            x = getattr(self, norm)(x)
        return x.transpose(1, 2)
