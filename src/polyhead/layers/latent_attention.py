"""Multi-head latent attention: keys and values of all heads from one small latent per token.

    [c | r] = x Wkv_a            c = norm(c), r = rotate(r): all that a cache keeps, R + P numbers
    k_h     = [c Wuk_h | r]      v_h = c Wuv_h                        (Wkv_b holds Wuk and Wuv)
    q_h     = [n_h | rotate(p_h)] from x, or from a latent of x
    out     = concat(softmax(q_h k_hᵀ · scale) v_h) Wo

DeepSeek-V2 (2024), §2.1, eqs. 9-19. There are two ways to compute it:

    expanded   makes k_h and v_h for every token
    absorbed   n_h (c Wuk_h)ᵀ = (n_h Wuk_hᵀ) cᵀ, so with q'_h = [n_h Wuk_hᵀ | rotate(p_h)] the
               scores are q'_h [c | r]ᵀ, and weighting values is weighting c and then applying
               Wuv_h: MQA with one kv head of R + P features whose value is a slice of its key

With L latent heads c is divided into L parts, each normed by itself, and k_h and v_h are made of
part h // (H / L): grouped latent attention (GLA, Zadouri et al. 2025, arXiv 2505.21487). Absorbed,
that is GQA with L kv heads of R / L + P features, which are copied out of the latents.

Shape letters: B batch, H heads, T queries, S keys, E embed size, R latent size, N features of a key
without rotation, P with rotation, V value size.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_int
from polyhead.caches import KeyValueCache
from polyhead.config import LatentAttentionConfig, NormConfig, RopeConfig
from polyhead.config.latent import COMPUTATIONS, Computation
from polyhead.errors import ConfigError
from polyhead.layers import fused
from polyhead.layers.attention_parts import (
    check_cache,
    check_input,
    places_of,
    scale_by_temperature,
)
from polyhead.layers.handed import Handed
from polyhead.layers.hooks import Hooked
from polyhead.layers.latent_cost import LatentExplanation, explain_choice
from polyhead.layers.linear import linear, linear_per_head
from polyhead.layers.norms import HeadNorm, build_norm
from polyhead.layers.positions import RoPE
from polyhead.layers.registry import register_builder
from polyhead.native import batch_invariant
from polyhead.semantics import Bias, DenseSource, KeyValueSource, Mask, Window
from polyhead.semantics.argument_hints import other_names, refuse


class MultiHeadLatentAttention(Hooked):
    """Self-attention on a latent, with a cache of R + P numbers per token or without one.

    Names of parameters are DeepSeek's, but for the norms (``q_a_layernorm`` is ``q_a_norm``,
    ``kv_a_layernorm`` is ``kv_a_norm``) and the order of rotary rows, which is half-split here and
    interleaved in the files: the family's table of tensors renames and permutes.

    Args:
        embed_dim: E, features of ``x`` and of the output.
        num_heads: Number of query heads H.
        q_lora_rank: Size of the latent that queries are made from; None: straight from ``x``.
        kv_lora_rank: Size R of the compressed latent.
        qk_nope_head_dim: N; 0 where all of a key is rotated.
        qk_rope_head_dim: Rotated features P of a head, an even number.
        v_head_dim: Value size V of a head.
        bias: Biases on the projections into the latents and on ``o_proj``; default True, as in
            torch. DeepSeek's models have none.
        latent_heads: Parts of the latent L, each of which serves H / L query heads; 1 is MLA.
        rope: Rotary positions over the P features; None: nothing is rotated.
        dropout: Dropout probability of the attention weights, when training.

    Attributes:
        config: Everything above as data; it cannot be assigned, nor can the sizes.
        scale, dropout, rope: As the next call takes them; they may be assigned.
        q_proj: ``[H(N + P), E]``, with ``config.q_bias`` a bias, where there is no
            ``q_lora_rank``; otherwise ``q_a_proj``, ``q_a_norm``, ``q_b_proj``.
        kv_a_proj_with_mqa: ``[R + P, E]``.
        kv_a_norm: Over the R features, or with a weight ``[L, R / L]`` over those of each latent
            head; nothing where ``config.norm`` is None.
        k_rope_norm: Over the P features, where ``config.rope_norm`` says so.
        kv_b_proj: ``[H(N + V), R / L]``.
        o_proj: ``[E, H · V]``.
        preferred: The computation that ``"auto"`` takes; None: the one of fewer operations.

    Raises:
        ConfigError: Sizes or numbers that do not go together.
    """

    _fixed = frozenset(["config", "embed_dim", "num_heads", "v_head_dim"])
    _reads_query_latent = False

    @other_names
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        bias: bool = True,
        latent_heads: int = 1,
        rope: RoPE | RopeConfig | None = RopeConfig(),  # noqa: B008  # frozen
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        config = LatentAttentionConfig(
            num_heads=num_heads,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            q_lora_rank=q_lora_rank,
            bias=bias,
            latent_heads=latent_heads,
            rope=rope.config if isinstance(rope, RoPE) else rope,
            dropout=dropout,
        )
        self._build(embed_dim, config, rope if isinstance(rope, RoPE) else None)

    @classmethod
    def from_config(
        cls, embed_dim: int, config: LatentAttentionConfig, *, rope: RoPE | None = None
    ) -> Self:
        """The layer that ``config`` describes.

        Args:
            embed_dim: Embedding size E of the residual stream.
            config: Sizes, biases, positions, norm, scale.
            rope: Rotary positions built from ``config.rope`` already, to share their tables.

        Raises:
            ConfigError: A ``rope`` of another configuration.
        """
        layer = cls.__new__(cls)
        Hooked.__init__(layer)
        layer._build(embed_dim, config, rope)
        return layer

    def _build(self, embed_dim: int, config: LatentAttentionConfig, rope: RoPE | None) -> None:
        check_int("embed_dim", embed_dim, least=1, error=ConfigError)
        if rope is not None and rope.config != config.rope:
            raise ConfigError(f"rope must be built from config.rope={config.rope}: got {rope}")
        self.config, self.embed_dim = config, embed_dim
        self.preferred: Computation | None = None
        self.num_heads, self.v_head_dim = config.num_heads, config.v_head_dim
        self.scale, self.dropout = config.score_scale, config.dropout
        H, R, L = config.num_heads, config.kv_lora_rank, config.latent_heads
        into, out = config.q_lora_rank, H * config.qk_head_dim
        if into is None:
            self.q_proj = nn.Linear(embed_dim, out, bias=config.q_bias)
        else:
            self.q_a_proj = nn.Linear(embed_dim, into, bias=config.bias)
            self.q_a_norm = _latent_norm(into, config.norm)
            self.q_b_proj = nn.Linear(into, out, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(embed_dim, config.latent_dim, bias=config.bias)
        if L == 1 or config.norm is None:
            self.kv_a_norm = _latent_norm(R, config.norm)
        else:
            self.kv_a_norm = HeadNorm(L, R // L, config.norm)
        if config.rope_norm:
            self.k_rope_norm = _latent_norm(config.qk_rope_head_dim, config.norm)
        self._window = None if config.window is None else Window(config.window)
        up = H * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = nn.Linear(R // L, up, bias=False)
        self.o_proj = nn.Linear(H * config.v_head_dim, embed_dim, bias=config.bias)
        self.rope = rope
        if rope is None and config.rope is not None:
            self.rope = RoPE.from_config(config.rope, config.qk_rope_head_dim)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        kernel: str = "auto",
        computation: Literal["auto", "absorbed", "expanded"] = "auto",
        handed: Handed | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Self-attention of ``x`` to itself and to what the cache holds.

        Args:
            x: ``[B, T, E]``.
            mask: Who may look at whom; None: everything is visible. A window is added to it.
            bias: Added to the scores: ``ALiBi``, ``RelativeBias`` or ``[B, H, T, S]``.
            positions: ``[T]`` or ``[B, T]`` of ``x``; default: they follow on from the cache.
            cache: What is remembered: a ``LatentCache``, or another over one kv head.
            kernel: ``"auto"`` or the name of a kernel.
            computation: ``"absorbed"``, ``"expanded"``, or ``"auto"``: whichever takes fewer
                operations for these shapes (``explain`` tells).
            handed: What layers of the same call hand on, for layouts that do.
            **unknown: Refused; the error says what polyhead calls an argument of torch's.

        Returns:
            ``[B, T, E]`` in the dtype of ``x``.

        Raises:
            ValueError: Shapes that do not fit, or an unknown computation, named.
            TypeError: An argument that there is not, or of another kind, such as a cache's class.
        """
        if unknown:
            refuse(type(self).__name__, unknown)
        if cache is not None:
            self._check_cache(cache)
        check_input(x, self.embed_dim)
        forced = _forced(computation)
        positions, at = places_of(x, positions, cache)
        n, p, latent, of_queries = self._project(x, at)
        source, mask = self._remembered(x, latent, of_queries, mask, at, positions, cache, handed)
        if self._window is not None:
            mask = self._window if mask is None else mask & self._window
        B, T, _ = x.shape
        way = forced or self.preferred or self.config.choose(B, T, source.tokens.length)
        if batch_invariant.is_enabled():
            way = forced or "absorbed"  # what decoding takes, for every number of tokens
        if way == "absorbed":
            q = torch.cat((self._to_latent(n), p), dim=-1)
            if self.config.latent_heads > 1:
                source = DenseSource.remade(source, self._by_latent_head)
        else:
            q = torch.cat((n, p), dim=-1)
            source = self._expanded(source)
        heads = self._attend(
            q,
            source,
            mask=mask,
            bias=bias,
            scale=self.scale,
            sinks=self._sinks(),
            q_positions=positions,
            dropout_p=self.dropout if self.training else 0.0,
            kernel=kernel,
        )
        if way == "absorbed":
            heads = self._from_latent(heads)
        heads = self._finished(x, heads, of_queries)
        return linear(self._edited(heads).transpose(1, 2).reshape(B, T, -1), self.o_proj)

    def explain(
        self,
        queries: int,
        keys: int,
        *,
        batch_size: int = 1,
        computation: Literal["auto", "absorbed", "expanded"] = "auto",
    ) -> LatentExplanation:
        """Which computation ``forward`` takes for T queries and S keys in all, and what both cost.

        Args:
            queries: T, tokens of ``x``.
            keys: S, those of ``x`` and those in the cache.
            batch_size: Batch size B.
            computation: As in ``forward``.

        Raises:
            ValueError: Fewer keys than queries, or an unknown computation.
        """
        if batch_size < 1 or queries < 1 or keys < queries:
            raise ValueError(
                f"keys are at least the queries, and both at least 1: got batch_size={batch_size}, "
                f"queries={queries}, keys={keys}"
            )
        return explain_choice(self.config, batch_size, queries, keys, _forced(computation))

    def _sinks(self) -> Tensor | None:
        """``[H]`` what joins the softmax of each head, for layouts that have it."""
        return None

    def _finished(self, x: Tensor, heads: Tensor, of_queries: Tensor) -> Tensor:
        """What ``o_proj`` is given of the heads' outputs ``[B, H, T, V]``."""
        return heads

    def _query_latent(self, projected: Tensor) -> Tensor:
        """``[B, T, ..]`` what queries are made from, of their latent as it is projected."""
        normed: Tensor = self.q_a_norm(projected)
        return normed

    def _check_cache(self, cache: Any) -> None:
        """Raises TypeError unless ``cache`` holds what this layer remembers."""
        check_cache(cache)

    def _remembered(
        self,
        x: Tensor,
        latent: Tensor,
        of_queries: Tensor,
        mask: Mask | None,
        at: int | Tensor,
        positions: Tensor | None,
        cache: Any,
        handed: Handed | None,
    ) -> tuple[KeyValueSource, Mask | None]:
        """The latents of all tokens, those of the cache included, and who may look at whom."""
        values = latent[..., : self.config.kv_lora_rank]
        if cache is None:
            return DenseSource(latent, values, positions), mask
        return cache.append(latent, values, positions), mask

    def _project(self, x: Tensor, positions: int | Tensor) -> tuple[Tensor, ...]:
        """n ``[B, H, T, N]``, p ``[B, H, T, P]`` rotated, ``[c | r]`` ``[B, 1, T, R + P]``, and
        what queries are made from, where the layer reads that.
        """
        config = self.config
        N, P, R = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        B, T, _ = x.shape
        first = self.q_proj if config.q_lora_rank is None else self.q_a_proj
        q, latent = fused.linears(x, first, self.kv_a_proj_with_mqa)
        of_queries = x
        if config.q_lora_rank is not None:
            read = self._query_latent(q)
            q = linear(read, self.q_b_proj)
            if self._reads_query_latent:
                of_queries = read
            del read
        q = q.view(B, T, config.num_heads, N + P)
        n, p = q[..., :N], q[..., N:]
        latent = latent.view(B, T, 1, R + P)
        c, r = latent[..., :R], latent[..., R:]
        if config.rope_norm:
            r = self.k_rope_norm(r)
        if self.rope is not None:
            p = self.rope.apply(p, positions, head_axis=2)
            r = self.rope.apply(r, positions, head_axis=2)
        if config.latent_heads == 1:
            c = self.kv_a_norm(c)
        else:
            c = self.kv_a_norm(c.view(B, T, config.latent_heads, -1)).reshape(B, T, 1, R)
        if config.latent_scale != 1.0:
            c = c * config.latent_scale
        latent = torch.cat((c, r), dim=-1)
        n, p = n.transpose(1, 2), p.transpose(1, 2)
        if config.query_temperature is not None:
            n, p = (scale_by_temperature(q, positions, config.query_temperature) for q in (n, p))
        return n, p, latent.transpose(1, 2), of_queries

    def _to_latent(self, n: Tensor) -> Tensor:
        """Queries ``[B, H, T, N]`` as what they ask of the latent, ``[B, H, T, R / L]``."""
        return _apply_up_proj(n, self._up()[0], "bhtn,hnr->bhtr", transposed=True)

    def _from_latent(self, heads: Tensor) -> Tensor:
        """Weighted latents ``[B, H, T, R / L]`` as heads' outputs ``[B, H, T, V]``."""
        return _apply_up_proj(heads, self._up()[1], "bhtr,hvr->bhtv", transposed=False)

    def _up(self) -> tuple[Tensor, Tensor]:
        """Wuk ``[H, N, R / L]`` and Wuv ``[H, V, R / L]``, views of ``kv_b_proj``."""
        config = self.config
        weight = self.kv_b_proj.weight.view(config.num_heads, -1, config.latent_head_dim)
        return weight[:, : config.qk_nope_head_dim], weight[:, config.qk_nope_head_dim :]

    def _expanded(self, source: KeyValueSource) -> DenseSource:
        """Keys ``[B, H, S, N + P]`` and values ``[B, H, S, V]`` of all tokens of a source."""
        return DenseSource.remade(source, self._keys_and_values)

    def _keys_and_values(self, latent: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        """Of latents ``[B, 1, S, R + P]``."""
        config = self.config
        N, R, L = config.qk_nope_head_dim, config.kv_lora_rank, config.latent_heads
        latent = latent[:, 0]
        c, r = latent[..., :R], latent[..., None, R:]
        if L == 1:
            made = self.kv_b_proj(c)
        else:
            up = self.kv_b_proj.weight.view(L, -1, R // L)
            parts = c.view(*c.shape[:2], L, -1).transpose(1, 2)
            made = _apply_up_proj(parts, up, "blsr,lvr->blsv", transposed=False)
            made = made.transpose(1, 2).flatten(2)
        made = made.unflatten(-1, (config.num_heads, -1))
        k = torch.cat((made[..., :N], r.expand(-1, -1, config.num_heads, -1)), dim=-1)
        v = made[..., N:]
        return k.transpose(1, 2), v.transpose(1, 2)

    def _by_latent_head(self, latent: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, L, S, R / L + P]``, each latent head beside the rotary key, and its own part."""
        config = self.config
        R, L = config.kv_lora_rank, config.latent_heads
        c = latent[:, 0, :, :R]
        parts = c.view(*c.shape[:2], L, -1).transpose(1, 2)
        k = torch.cat((parts, latent[..., R:].expand(-1, L, -1, -1)), dim=-1)
        return k, k[..., : R // L]

    def extra_repr(self) -> str:
        config = self.config
        parts = [
            f"{self.embed_dim}, heads={config.num_heads}×({config.qk_nope_head_dim}+"
            f"{config.qk_rope_head_dim} → {config.v_head_dim})",
            f"latent={config.kv_lora_rank}+{config.qk_rope_head_dim}",
        ]
        if config.latent_heads > 1:
            parts.append(f"latent_heads={config.latent_heads}")
        if self.rope is not None:
            parts.append(repr(self.rope))
        if config.dropout:
            parts.append(f"dropout={config.dropout}")
        return ", ".join(parts)


register_builder(LatentAttentionConfig, MultiHeadLatentAttention.from_config)


def _latent_norm(dim: int, config: NormConfig | None) -> nn.Module:
    return nn.Identity() if config is None else build_norm(dim, config)


def _forced(computation: str) -> Computation | None:
    for name in COMPUTATIONS:
        if computation == name:
            return name
    if computation != "auto":
        raise ValueError(
            f"computation must be 'auto', 'absorbed' or 'expanded': got {computation!r}"
        )
    return None


def _apply_up_proj(x: Tensor, up: Tensor, formula: str, *, transposed: bool) -> Tensor:
    """Each head's ``x [B, H, T, …]`` times its part of ``up``, by native code where it can."""
    made = linear_per_head(x.transpose(1, 2), up, transposed=transposed)
    return torch.einsum(formula, x, up.to(x.dtype)) if made is None else made.transpose(1, 2)
