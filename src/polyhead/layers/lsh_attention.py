"""Attention within chunks of tokens that are sorted by hashes: Reformer's LSH attention.

    q = x Wq        k = q / √mean(q²)        v = x Wv
    bucket(q) = argmax([q R; −q R])          R normal numbers of a seed, others in each round
    out_i = Σ_j softmax_j(q_i · k_j · scale) v_j        j < i in the chunks that i sees, or v_i

In each round tokens are sorted by bucket and cut into chunks; a query sees its own and those before
it. Before the first chunk of a round stands the last of the round before. Rounds are states, which
merge, so that a key seen n times counts n times. A query with no other key sees itself. Kitaev et
al. 2020, arXiv 2001.04451, §2, by transformers' code, which hides no other buckets within a chunk.

Shape letters: B batch, H heads, T tokens, L tokens with padding, D head size, R rounds, n chunks of
all rounds, C tokens of a chunk, E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyhead.config import AttentionConfig, LshAttentionConfig
from polyhead.errors import UnsupportedError
from polyhead.kernels.dispatch import attention
from polyhead.layers.attention import Context, MultiHeadAttention
from polyhead.layers.handed import Handed
from polyhead.layers.linear import linear
from polyhead.layers.record import hooks_here
from polyhead.layers.registry import register_builder
from polyhead.semantics import Bias, Causal, Mask, merge_states

_EPS = 1e-6


class LshAttention(MultiHeadAttention):
    """Causal self-attention of whole texts without padding; built from its config.

    Hooks and probes of attention are refused: there is no one call that they could be shown.

    Attributes:
        q_proj: ``[H · D, E]``, of queries, which are keys too.
        v_proj: ``[H · D, E]``.
    """

    config_class: ClassVar[type[AttentionConfig]] = LshAttentionConfig
    config: LshAttentionConfig

    def _add_modules(self) -> None:
        self.v_proj = nn.Linear(self.embed_dim, self.num_heads * self.head_dim, bias=False)

    def forward(
        self,
        x: Tensor,
        context: Context | None = None,
        *more: Tensor,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        cache: Any = None,
        kernel: str = "auto",
        handed: Handed | None = None,
        **unknown: Any,
    ) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``.

        Args:
            x: ``[B, T, E]``.
            context: None.
            *more: Refused.
            mask: ``Causal()``.
            bias: None.
            positions: None: tokens are counted from 0.
            context_positions: None.
            cache: None.
            kernel: ``"auto"`` or the name of a kernel.
            handed: Not read.
            **unknown: Refused.

        Raises:
            UnsupportedError: A context, a cache, positions, a bias, hooks or another mask.
            ValueError: Shapes that do not fit.
        """
        if more or unknown or x.ndim != 3 or x.shape[2] != self.embed_dim:
            return super().forward(x, context, *more, **unknown)  # which says why
        refused = {
            "a context": context, "a cache": cache, "positions": positions, "a bias": bias,
            "context_positions": context_positions,
            "hooks": (self._hooks and hooks_here(self._hooks)) or None,
        }  # fmt: skip
        for name, given in refused.items():
            if given is not None:
                raise UnsupportedError(
                    f"{type(self).__name__} is self-attention of a whole text by hashes of all of "
                    f"its tokens: got {name}"
                )
        if type(mask) is not Causal:
            raise UnsupportedError(
                f"{type(self).__name__} understands no mask but Causal(), so give texts of "
                f"different lengths one by one: got {mask!r}"
            )
        (B, T, _), H = x.shape, self.num_heads
        q, v = (
            linear(x, each).view(B, T, H, self.head_dim).transpose(1, 2)
            for each in (self.q_proj, self.v_proj)
        )
        k = q * torch.rsqrt(q.square().mean(dim=-1, keepdim=True) + _EPS)
        if self.config.chunk_length >= T:
            places = torch.arange(T, device=x.device)
            heads, lse = self._earlier(q, k, v, places, places, kernel)
        else:
            order = self._order(q, self.config.padded(T))
            heads, lse = self._in_chunks(q, k, v, order, kernel)
        heads = torch.where((lse == -torch.inf)[..., None], v, heads)
        return self._output(x, self._edited(heads))

    def _earlier(
        self, q: Tensor, k: Tensor, v: Tensor, places: Tensor, of_keys: Tensor, kernel: str
    ) -> tuple[Tensor, Tensor]:
        """Output and lse of queries that see keys at places before their own."""
        p = self.dropout if self.training else 0.0
        return attention(
            q, k, v, mask=Causal(), scale=self.scale, q_positions=places - 1,
            kv_positions=of_keys, dropout_p=p, return_lse=True, kernel=kernel,
        )  # fmt: skip

    def _in_chunks(
        self, q: Tensor, k: Tensor, v: Tensor, order: Tensor, kernel: str
    ) -> tuple[Tensor, Tensor]:
        """Output ``[B, H, T, D]`` and lse of all rounds; ``order`` ``[B, H, R, L]``."""
        (B, H, T, D), C = q.shape, self.config.chunk_length
        chunks = order.reshape(B, H, -1, C)
        n = chunks.shape[2]
        # Further back than there are chunks transformers looks at a query's own.
        back = [i if i <= n else 0 for i in range(self.config.look_back, -1, -1)]
        seen = torch.cat([chunks.roll(i, dims=2) for i in back], dim=3)

        def rows(x: Tensor, places: Tensor) -> Tensor:
            index = places.clamp(max=T - 1).flatten(2)[..., None].expand(-1, -1, -1, D)
            return x.gather(2, index).view(B * H * n, 1, -1, D)

        out, lse = self._earlier(
            rows(q, chunks), rows(k, seen), rows(v, seen),
            chunks.reshape(B * H * n, C), seen.reshape(B * H * n, -1), kernel,
        )  # fmt: skip
        back_to_places = order.argsort(dim=-1)[..., :T]
        lse = lse.view(order.shape).gather(3, back_to_places)
        index = back_to_places[..., None].expand(-1, -1, -1, -1, D)
        out = out.view(*order.shape, D).gather(3, index)
        return merge_states(out.unbind(2), lse.unbind(2))

    @torch.no_grad()
    def _order(self, q: Tensor, length: int) -> Tensor:
        """``[B, H, R, L]`` places sorted by bucket in each round, those of padding at the end."""
        sizes, rounds = self.config.num_buckets, self.config.num_hashes
        generator = torch.Generator(q.device).manual_seed(self.config.hash_seed)
        shape = (self.num_heads, self.head_dim, rounds, sum(sizes) // 2)
        drawn = torch.randn(shape, generator=generator, device=q.device, dtype=q.dtype)
        rotated = torch.einsum("bhtd,hdrm->bhrtm", q, drawn)
        buckets, times = torch.zeros((), dtype=torch.int64, device=q.device), 1
        for part, size in zip(
            torch.split(rotated, [n // 2 for n in sizes], -1), sizes, strict=True
        ):
            buckets = buckets + times * torch.cat((part, -part), dim=-1).argmax(dim=-1)
            times *= size
        order = buckets.argsort(dim=-1, stable=True)
        padding = torch.arange(q.shape[2], length, device=q.device)
        return torch.cat((order, padding.expand(*order.shape[:3], -1)), dim=-1)


register_builder(LshAttentionConfig, LshAttention.from_config)
