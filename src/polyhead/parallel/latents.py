"""MLA whose tokens are on many ranks: latents are sent, and expanded by the receiver.

What is sent is the latent, R + P numbers of a token. Absorbed, queries meet the latents themselves;
expanded, a rank makes keys and values of its heads, a piece at a time, and of their gradients those
of the latents. From some hundred queries of a rank on that takes fewer operations:

    absorbed   T S H (2 R + P) + T H R (N + V)        expanded   T S H (N + P + V) + S H R (N + V)

Shape letters: B batch, H heads of this rank, T queries, S keys, R latent size, N features of a key
without rotation, P with rotation, V value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.layers import MultiHeadLatentAttention
from polyhead.semantics import DenseSource, KeyValueSource


@dataclass(eq=False)
class Expansion:
    """Keys and values of all heads, made from latents where these have arrived (MLA).

    Attributes:
        weight: ``[H (N + V), R]`` of this rank's heads.
        nope: N, features of a key that are made from the latent; the others come with it.
        heads: Number of heads H.
    """

    weight: Tensor
    nope: int
    heads: int

    def __call__(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, 1, S, R + P]`` as keys ``[B, H, S, N + P]`` and values ``[B, H, S, V]``."""
        B, _, S, _ = latent.shape
        weight = self.weight.to(latent.dtype)
        c, r = latent[:, 0, :, : weight.shape[1]], latent[..., weight.shape[1] :]
        made = F.linear(c, weight).view(B, S, self.heads, -1).transpose(1, 2)
        k = torch.cat((made[..., : self.nope], r.expand(-1, self.heads, -1, -1)), dim=-1)
        return k, made[..., self.nope :]

    def pull_back(
        self, latent: Tensor, grads: Sequence[Tensor], of_latent: Tensor, of_weight: Tensor | None
    ) -> None:
        """Adds to the gradients of latents and weight what those of keys and values bring."""
        weight = self.weight.detach().to(latent.dtype)
        with torch.enable_grad():
            leaves = latent.detach().requires_grad_(), weight.requires_grad_()
            made = replace(self, weight=leaves[1])(leaves[0])
        pieces = torch.autograd.grad(made, leaves, list(grads))
        of_latent += pieces[0]
        if of_weight is not None:
            of_weight += pieces[1]

    def of_heads(self, heads: range) -> Expansion:
        """The same for some heads alone; differentiable."""
        rows = self.weight.view(self.heads, -1, self.weight.shape[1])[heads.start : heads.stop]
        return replace(self, weight=rows.flatten(0, 1), heads=len(heads))


class Latents(DenseSource):
    """Latents ``[B, 1, S, R + P]`` whose keys and values are made by the receiver.

    Args:
        source: Source of the latents.
        expansion: What makes keys and values.
    """

    def __init__(self, source: KeyValueSource, expansion: Expansion) -> None:
        k, v = source.gather()
        super().__init__(k, v)
        self.tokens, self.mask, self.expansion = source.tokens, source.mask, expansion
        self.value_dim = len(expansion.weight) // expansion.heads - expansion.nope


@dataclass(eq=False)
class Unexpanded:
    """``MultiHeadLatentAttention._expanded`` for spread tokens: the receiver expands them later."""

    module: MultiHeadLatentAttention

    def __call__(self, source: KeyValueSource) -> Latents:
        config, weight = self.module.config, self.module.kv_b_proj.weight
        return Latents(source, Expansion(weight, config.qk_nope_head_dim, config.num_heads))
