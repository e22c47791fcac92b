"""Attention to a window and to blocks that the layer compresses itself (DeepSeek-V4, 2026).

    u = norm(x Wqa)      q_h = unit(u Wqb_h)      k = norm(x Wkv)       unit: a norm without weight
    out_h = Attention(q_h, K, K, sink_h),         K = the last w k, and the c of blocks
    c_i   = norm(Σ_j p_j k'_j),  p = softmax_j(g_j + e_j) for each feature       j in block i

All heads share one key per token, which is also its value; the last features of queries, keys and
blocks are rotated, and those of out_h back. k' and g are projections of x; e is learned for each
place in a block. With overlap, tokens make two k' and two g: c_i is made of the first of block
i − 1 and the second of block i. With an indexer a query reads the top_k blocks of highest
Σ_j w_j · relu(q'_j · c'_i), with q' made of u, w of x, and c' as c. Groups of heads are projected
apart, then together.

Shape letters: B batch, H heads, T queries, D head size, g groups of heads, E embed size.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_int
from polyhead.config import CompressedAttentionConfig, NormConfig
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.kernels.dispatch import attention
from polyhead.layers.attention_parts import check_cache, check_input, check_layer_cache, places_of
from polyhead.layers.compressed_blocks import BlockIndexing, BlockPooling, apply_rope
from polyhead.layers.grouped import GroupedLinear
from polyhead.layers.hooks import Hooked
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm
from polyhead.layers.positions import RoPE
from polyhead.layers.record import hooks_here
from polyhead.layers.recurrent import real_tokens
from polyhead.layers.registry import register_builder
from polyhead.layers.selectors.places import Places, source_of
from polyhead.semantics import (
    Causal,
    Chosen,
    DenseSource,
    Keep,
    KeyValueSource,
    Mask,
    Window,
    merge_states,
)
from polyhead.semantics.argument_hints import refuse
from polyhead.semantics.state import State, add_sinks

_WHAT = "attention to compressed blocks"


class _Blocks(NamedTuple):
    """The blocks of a call.

    Attributes:
        source: Their keys.
        chosen: Those that queries read; None: all.
        places: ``[T]`` or ``[B, T]`` places of the queries.
        hidden: Whether padding stands among the keys of the window.
    """

    source: DenseSource
    chosen: Chosen | None
    places: Tensor
    hidden: bool


class CompressedAttention(Hooked):
    """Built from its configuration; see the module.

    It takes no bias of scores, and of masks ``Causal()``, which it is by nature, with
    ``KeyLengths`` without a cache. No gradient flows through the choice. A cache of it is a
    ``LayerCache`` of the layout's memories; without blocks any cache over one kv head.

    Attributes:
        config: A ``CompressedAttentionConfig``; it cannot be assigned, nor can the sizes.
        scale, dropout, rope: As the next call takes them; they may be assigned.
        q_a_proj, q_a_norm, q_b_proj, q_norm: Of queries; ``q_norm`` has no weight.
        kv_proj, kv_norm: Of keys.
        o_a_proj: ``[g · out_rank, H · D / g]`` of all groups.
        o_proj: ``[E, g · out_rank]``.
        sinks: ``[H]``.
        pooling: Makes keys of blocks, or None.
        indexer: Chooses blocks, or None.
    """

    _fixed = frozenset(["config", "embed_dim", "num_heads", "v_head_dim"])

    @classmethod
    def from_config(
        cls, embed_dim: int, config: CompressedAttentionConfig, *, rope: RoPE | None = None
    ) -> Self:
        """The layer that ``config`` describes.

        Args:
            embed_dim: Embedding size E of the residual stream.
            config: Sizes, window, blocks, positions.
            rope: Rotary positions built from ``config.rope`` already, to share their tables.

        Raises:
            ConfigError: A ``rope`` of another configuration.
        """
        layer = cls.__new__(cls)
        Hooked.__init__(layer)
        layer._build(embed_dim, config, rope)
        return layer

    def _build(self, embed_dim: int, config: CompressedAttentionConfig, rope: RoPE | None) -> None:
        check_int("embed_dim", embed_dim, least=1, error=ConfigError)
        if rope is not None and rope.config != config.rope:
            raise ConfigError(f"rope must be built from config.rope={config.rope}: got {rope}")
        H, D, R = config.num_heads, config.head_dim, config.q_lora_rank
        self.config, self.embed_dim = config, embed_dim
        self.num_heads, self.v_head_dim = H, D
        self.scale = D**-0.5 if config.scale is None else config.scale
        self.dropout = config.dropout
        self.q_a_proj = nn.Linear(embed_dim, R, bias=False)
        self.q_a_norm = build_norm(R, config.norm)
        self.q_b_proj = nn.Linear(R, H * D, bias=False)
        self.q_norm = build_norm(D, NormConfig(config.norm.type, config.norm.eps, weight=False))
        self.kv_proj = nn.Linear(embed_dim, D, bias=False)
        self.kv_norm = build_norm(D, config.norm)
        groups, rank = config.out_groups, config.out_rank
        self.o_a_proj = GroupedLinear(H * D, groups * rank, groups, bias=False)
        self.o_proj = nn.Linear(groups * rank, embed_dim, bias=False)
        self.sinks = nn.Parameter(torch.zeros(H))
        self.pooling = None if config.block_size is None else BlockPooling(embed_dim, D, config)
        index = config.indexer
        self.indexer = None if index is None else BlockIndexing(embed_dim, config, index)
        self.rope = rope
        if rope is None and config.rope is not None:
            self.rope = RoPE.from_config(config.rope, config.rotated)

    def reset_parameters(self) -> None:
        """Sets the sinks to 0, as at first. Projections and norms stay."""
        nn.init.zeros_(self.sinks)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        bias: Any = None,
        positions: Tensor | None = None,
        cache: Any = None,
        kernel: str = "auto",
        **unknown: Any,
    ) -> Tensor:
        """Causal self-attention of ``x``.

        Args:
            x: ``[B, T, E]``.
            mask: ``Causal()``, with ``KeyLengths`` where there is no cache; None: ``Causal()``.
            bias: None.
            positions: ``[T]`` or ``[B, T]``, below 0 for padding; default: they follow on from the
                cache. Blocks are counted and rotated by place.
            cache: What is remembered.
            kernel: ``"auto"`` or the name of a kernel.
            **unknown: Refused; the error says what polyhead calls an argument of torch's.

        Returns:
            ``[B, T, E]`` in the dtype of ``x``.

        Raises:
            ValueError: Shapes that do not fit.
            UnsupportedError: A bias, another mask, or a watching hook where there are blocks.
            TypeError: A cache of another kind, or an argument that there is not.
        """
        if unknown:
            refuse(type(self).__name__, unknown)
        check_input(x, self.embed_dim)
        mask = Causal() if mask is None else mask
        self._check(x, mask, bias, positions, cache)
        positions, at = places_of(x, positions, cache)
        latent = self.q_a_norm(linear(x, self.q_a_proj))
        q = linear(latent, self.q_b_proj).view(*x.shape[:2], self.num_heads, -1)
        q, k = self.q_norm(q), self.kv_norm(linear(x, self.kv_proj))[:, :, None]
        q, k = (self._apply_rope(each, at).transpose(1, 2) for each in (q, k))
        source, blocks = self._remembered(x, latent, k, positions, at, cache)
        heads = self._heads(q, source, blocks, mask, positions, kernel)
        heads = self._apply_rope(heads.transpose(1, 2), at, back=True)
        heads = self._edited(heads.transpose(1, 2)).transpose(1, 2)
        return linear(self.o_a_proj(heads.flatten(2)), self.o_proj)

    def _check(
        self, x: Tensor, mask: Mask, bias: Any, positions: Tensor | None, cache: Any
    ) -> None:
        if bias is not None:
            raise UnsupportedError(f"{_WHAT} takes no bias of scores: got one")
        if self.pooling is None:
            if cache is not None:
                check_cache(cache)
            return
        if cache is not None:
            check_layer_cache(cache)
        if hooks_here(self._hooks):
            raise UnsupportedError(
                f"{_WHAT} has weights of keys and of blocks in one softmax, and none of all keys "
                "that a hook could see"
            )
        real_tokens(mask, x, positions, cached=cache is not None, what=_WHAT)

    def _apply_rope(self, x: Tensor, at: int | Tensor, *, back: bool = False) -> Tensor:
        """``[B, T, heads, D]`` with its last features rotated, or rotated back."""
        return apply_rope(x, self.rope, at, self.config.rotated, back=back)

    def _remembered(
        self,
        x: Tensor,
        latent: Tensor,
        k: Tensor,
        positions: Tensor | None,
        at: int | Tensor,
        cache: Any,
    ) -> tuple[KeyValueSource, _Blocks | None]:
        """Keys of the window, and the blocks, those of the cache included."""
        pooling, indexer = self.pooling, self.indexer
        if pooling is None:
            held = DenseSource(k, k, positions) if cache is None else cache.append(k, k, positions)
            return held, None
        makers = {"compressed": ("uncompressed", pooling)}
        if indexer is not None:
            makers["index"] = ("unindexed", indexer.pooling)
        found: dict[str, Tensor] = {}
        source: KeyValueSource
        if cache is None:
            source = DenseSource(k, k, positions)
            places = Places.of(x, source, positions)
            for name, (_, made) in makers.items():
                with torch.set_grad_enabled(name != "index" and torch.is_grad_enabled()):
                    raw = made(x)
                    if places.keys is not None:
                        raw = raw.gather(1, places.keys[..., None].expand_as(raw))
                    tail = nn.functional.pad(raw, (0, 0, self.config.span - 1, 0))
                    found[name] = made.entries(tail, places, self.rope)
        else:
            with cache.step(x, positions) as step:
                source = step.append("kv", k, k)
                places = Places.of(x, source, positions, step.before or [0] * len(x))
                for name, (last, made) in makers.items():
                    tail = step.tail(last, step.pack(made(x)))
                    found[name] = step.pooled(name, made.entries(tail, places, self.rope))
        chosen = None
        if indexer is not None:
            with torch.no_grad():
                chosen = indexer.chosen(x, latent, found["index"], places, self.rope, at)
        padded = cache is None and places.queries.ndim == 2
        held = source_of(found["compressed"], self.config.block_size or 0)
        return source, _Blocks(held, chosen, places.queries, padded)

    def _heads(
        self,
        q: Tensor,
        source: KeyValueSource,
        blocks: _Blocks | None,
        mask: Mask,
        positions: Tensor | None,
        kernel: str,
    ) -> Tensor:
        """``[B, H, T, D]`` one softmax over keys of the window, blocks and sinks."""
        given: dict[str, Any] = {
            "scale": self.scale,
            "dropout_p": self.dropout if self.training else 0.0,
            "kernel": kernel,
        }
        near = mask & Window(self.config.window)
        if blocks is None:
            return self._attend(
                q, source, mask=near, sinks=self.sinks, q_positions=positions, **given
            )
        if blocks.hidden:
            near = near & Keep((blocks.places >= 0)[:, None, None])
        given["return_lse"] = True
        states = [attention(q, source, mask=near, q_positions=positions, **given)]
        if blocks.source.tokens.length:
            seen: Mask = Causal() if blocks.chosen is None else Causal() & blocks.chosen
            states.append(
                attention(q, blocks.source, mask=seen, q_positions=blocks.places, **given)
            )
        out, lse = merge_states(*zip(*states, strict=True))
        return add_sinks(State(out, lse), self.sinks).out

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.config.described}"


register_builder(CompressedAttentionConfig, CompressedAttention.from_config)
