"""Native sparse attention (NSA): three branches of causal attention, gated by head.

    out[t] = Σ_c g_c[t] · Attention(q_t, K_c, V_c)       g = sigmoid(x Wg), one of each head

    compressed   K = φ(k[i d : i d + l]), V likewise     blocks i that end at t or before
    selected     the keys of n blocks of l' tokens       those of highest s[t, j]
    window       the last w keys

    s[t, j] = Σ_h Σ_i p_h[t, i] · |tokens of block i within j| / d
    φ(k_1 … k_l) = silu(concat(k_1 + e_1 … k_l + e_l) W1) W2

Yuan et al. 2025, "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse
Attention", arXiv 2502.11089, eqs. 5-12. p_h are the weights of the compressed branch, and the sum
is over the heads h of one kv head, which choose together. Each branch has keys and values of its
own. Of φ the paper says that it is a network with positions within the block; here one for keys and
one for values, which all kv heads share. Keys are rotated before.

Shape letters: B batch, H query heads, G kv heads, R = H / G, T queries, N compressed blocks,
n new ones, l tokens of a block, D head size, V value size, W = G (D + V), E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.config import AttentionConfig, NativeSparseAttentionConfig
from polyhead.errors import UnsupportedError
from polyhead.layers.causal_attention import CausalAttention
from polyhead.layers.linear import linear
from polyhead.layers.record import hooks_here
from polyhead.layers.registry import register_builder
from polyhead.layers.selectors.base import best_blocks
from polyhead.layers.selectors.places import Places, pooled_blocks
from polyhead.semantics import Causal, DenseSource, Keep, KeyValueSource, Mask, Window


class BlockCompression(nn.Module):
    """φ: makes one key, or one value, of a block of them.

    Attributes:
        positions: ``[l, D]``, added to the tokens of a block.
        up_proj: ``[hidden, l · D]``.
        down_proj: ``[D, hidden]``.
    """

    def __init__(self, block_size: int, size: int, hidden_dim: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(block_size, size))
        self.up_proj = nn.Linear(block_size * size, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the positions anew. Projections stay."""
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, blocks: Tensor) -> Tensor:
        """``[B, n, l, G, D]`` to ``[B, n, G, D]``."""
        placed = (blocks + self.positions[:, None]).transpose(2, 3).flatten(3)
        return linear(F.silu(linear(placed, self.up_proj)), self.down_proj)


class _Branches(NamedTuple):
    """What the branches read: sources, and the keys of the first that queries choose.

    Attributes:
        places: ``[T]`` or ``[B, T]`` places of the queries, by which compressed blocks are seen.
    """

    selected: KeyValueSource
    chosen: Mask | None
    window: KeyValueSource
    compressed: KeyValueSource
    places: Tensor


class NativeSparseAttention(CausalAttention):
    """``CausalAttention`` in three branches; built from its configuration.

    It takes no bias of scores. No gradient flows through the choice.

    Attributes:
        gate_proj: ``[3 · H, E]``: gates of the compressed, selected and window branch of each head.
        compressed_k_proj, compressed_v_proj: Keys and values that are compressed.
        window_k_proj, window_v_proj: Those of the window; ``k_proj``, ``v_proj`` are selected.
        compress_k, compress_v: Networks that compress.
    """

    config_class: ClassVar[type[AttentionConfig]] = NativeSparseAttentionConfig
    config: NativeSparseAttentionConfig
    called = "native sparse attention"

    def _add_modules(self) -> None:
        config, E = self.config, self.embed_dim
        G, D, V = self.num_kv_heads, self.head_dim, self.v_head_dim
        for branch in ("compressed", "window"):
            k_proj = nn.Linear(E, G * D, bias=config.has_k_bias)
            self.add_module(f"{branch}_k_proj", k_proj)
            self.add_module(f"{branch}_v_proj", nn.Linear(E, G * V, bias=config.qkv_bias))
        self.compress_k = BlockCompression(config.block_size, D, config.hidden_dim)
        self.compress_v = BlockCompression(config.block_size, V, config.hidden_dim)
        self.gate_proj = nn.Linear(E, 3 * self.num_heads, bias=False)

    def forward(self, x: Tensor, context: Any = None, *more: Tensor, **call: Any) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``, as ``MultiHeadAttention`` says.

        Args:
            x: ``[B, T, E]``.
            context: None.
            *more: Refused.
            **call: ``mask``, ``positions`` (below 0 is padding), ``cache``, ``kernel``.

        Raises:
            ValueError: Shapes that do not fit, or a context.
            UnsupportedError: A bias, another mask, or a watching hook.
            TypeError: A cache of another kind.
        """
        if call.get("bias") is not None:
            raise UnsupportedError("native sparse attention takes no bias of scores: got one")
        if hooks_here(self._hooks):
            raise UnsupportedError(
                "native sparse attention has the weights of three branches, and none of all keys "
                "that a hook could see"
            )
        return super().forward(x, context, *more, **call)

    def _self_attention(self, x: Tensor, positions: Tensor | None, cache: Any, handed: Any) -> Any:
        at: int | Tensor = 0 if cache is None else cache.length
        at = at if positions is None else positions
        q, k, v = self._project(x, at)
        k_recent, v_recent = self._made("window", x, at)
        raw = [each.transpose(1, 2).flatten(2) for each in self._made("compressed", x, at)]
        joined = torch.cat(raw, dim=-1)  # [B, T, W]
        if cache is None:
            source: KeyValueSource = DenseSource(k, v, positions)
            window: KeyValueSource = DenseSource(k_recent, v_recent, positions)
            places = Places.of(x, source, positions)
            if places.keys is not None:
                joined = joined.gather(1, places.keys[..., None].expand_as(joined))
            tail = F.pad(joined, (0, 0, self.config.block_size - 1, 0))
            entries = self._compressed(tail, places)
        else:
            with cache.step(x, positions) as step:
                source = step.append("kv", k, v)
                window = step.append("window", k_recent, v_recent)
                places = Places.of(x, source, positions, step.before or [0] * len(x))
                tail = step.tail("uncompressed", step.pack(joined))
                entries = step.pooled("compressed", self._compressed(tail, places))
        compressed = self._source(entries)
        chosen = self._chosen(q, compressed, places)
        return q, _Branches(source, chosen, window, compressed, places.queries), None

    def _made(self, branch: str, x: Tensor, at: int | Tensor) -> tuple[Tensor, Tensor]:
        """k ``[B, G, T, D]`` and v ``[B, G, T, V]`` of another branch than the selected one."""
        k = linear(x, self._modules[f"{branch}_k_proj"])
        v = linear(x, self._modules[f"{branch}_v_proj"])
        return self._placed(k, self.num_kv_heads, "k_norm", at), self._values(v)

    def _compressed(self, tail: Tensor, places: Places) -> Tensor:
        """``[B, n, W]`` of the strides that new tokens complete, each with the l − d before it.

        Args:
            tail: ``[B, l − 1 + T, W]``, the new tokens behind the last ones before them.
            places: Where the tokens stand.
        """
        blocks = pooled_blocks(tail, places, self.config.block_size, self.config.stride)
        k, v = torch.split(blocks, self._widths, dim=-1)
        k = self.compress_k(self._by_head(k))
        v = self.compress_v(self._by_head(v))
        return torch.cat((k.flatten(2), v.flatten(2)), dim=-1).to(tail.dtype)

    def _by_head(self, x: Tensor) -> Tensor:
        """``[..., G · D]`` as ``[..., G, D]``."""
        G = self.num_kv_heads
        return x.view(*x.shape[:-1], G, x.shape[-1] // G)

    @property
    def _widths(self) -> list[int]:
        return [self.num_kv_heads * self.head_dim, self.num_kv_heads * self.v_head_dim]

    def _source(self, entries: Tensor) -> DenseSource:
        """Compressed keys and values at the place of the last token of their block."""
        config = self.config
        # The first strides end no whole block.
        entries = entries[:, config.block_size // config.stride - 1 :]
        k, v = (
            self._by_head(each).transpose(1, 2)
            for each in torch.split(entries, self._widths, dim=-1)
        )
        ends = torch.arange(k.shape[2], device=k.device) * config.stride + config.block_size - 1
        return DenseSource(k, v, ends)

    @torch.no_grad()
    def _chosen(self, q: Tensor, compressed: DenseSource, places: Places) -> Mask | None:
        """The blocks that queries ``[B, H, T, D]`` read; None: all that are there."""
        config, (B, H, _, D), G = self.config, q.shape, self.num_kv_heads
        if max(places.after) <= config.top_k * config.selected_size:
            return None
        precise = torch.promote_types(q.dtype, torch.float32)
        keys = compressed.k.to(precise).mT
        ends = torch.arange(keys.shape[-1], device=q.device) * config.stride + config.block_size - 1

        def scores(run: slice) -> Tensor:
            rows = q[:, :, run].to(precise).reshape(B, G, -1, D)
            products = (rows @ keys).view(B, G, H // G, -1, len(ends)) * self.scale
            hidden = ends > places.queries[..., run, None]  # [T, N] or [B, T, N]
            hidden = hidden if hidden.ndim == 2 else hidden[:, None, None]
            weights = products.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            # A query that sees no block has no weights.
            return self._of_blocks(weights.masked_fill(hidden, 0.0).sum(dim=2))

        blocks = best_blocks(
            scores,
            places,
            config.top_k,
            config.selected_size,
            G,
            first=config.first_blocks,
            last=config.last_blocks,
            per_query=H * len(ends),
        )
        return places.seen(blocks, config.selected_size, H // G)

    def _of_blocks(self, weights: Tensor) -> Tensor:
        """``[..., blocks]`` from weights ``[..., N]`` of compressed blocks (eq. 9).

        A stride has the weights of the blocks over it, and a selected block those of its strides.
        """
        config = self.config
        over, within = config.block_size // config.stride, config.selected_size // config.stride
        strides = F.pad(weights, (over - 1, over - 1)).unfold(-1, over, 1).sum(dim=-1)
        strides = F.pad(strides, (0, -strides.shape[-1] % within))
        return strides.view(*strides.shape[:-1], -1, within).sum(dim=-1)

    def _answered(
        self,
        x: Tensor,
        q: Tensor,
        source: Any,
        mask: Mask | None,
        bias: Any,
        positions: Tensor | None,
        kernel: str,
    ) -> Tensor:
        read: _Branches = source
        causal = Causal() if mask is None else mask
        if isinstance(read.selected, DenseSource) and read.places.ndim == 2:
            causal = causal & Keep((read.places >= 0)[:, None, None])  # padding of no cache
        given: dict[str, Any] = {
            "scale": self.scale,
            "dropout_p": self.dropout if self.training else 0.0,
            "kernel": kernel,
        }
        seen = causal if read.chosen is None else causal & read.chosen
        near = causal & Window(self.config.last_keys)
        gates = torch.sigmoid(linear(x, self.gate_proj)).view(*x.shape[:2], -1, 3)
        gates = gates.transpose(1, 2)  # [B, H, T, 3]
        out = q.new_zeros(*q.shape[:3], self.v_head_dim)
        branches = (
            (read.compressed, Causal(), read.places),
            (read.selected, seen, positions),
            (read.window, near, positions),
        )
        for i, (branch, visible, at) in enumerate(branches):
            if branch.tokens.length:
                heads = self._attend(q, branch, mask=visible, q_positions=at, **given)
                out = torch.addcmul(out, gates[..., i : i + 1], heads)
        joined = self._edited(out).transpose(1, 2).flatten(2)
        return linear(joined, self._modules["o_proj"])


register_builder(NativeSparseAttentionConfig, NativeSparseAttention.from_config)
