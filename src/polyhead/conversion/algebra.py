"""A layer's keys, values and queries as functions of its input, and the metric of their errors.

Pairs of features that rotary embedding turns are complex numbers here: re the first half of a
head's rotated features, im the second.

Shape letters: G kv heads, H query heads, D head size, V value size, n pairs of a head, F features
of a layer's input and, where projections have biases, a 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead.config import AttentionConfig
from polyhead.conversion.calibration import Moments
from polyhead.conversion.draft import Draft

_RIDGE = 1e-3
"""Ridge added to a metric's diagonal, as a fraction of its mean."""


@dataclass(frozen=True)
class LayerRows:
    """Keys, values and queries of a layer as functions of its input, and its metric.

    Attributes:
        n: Pairs of a head that are rotated; without rotary positions all.
        k, v, q: ``[G, D, F]``, ``[G, V, F]``, ``[H, D, F]`` with biases as last column.
        inputs: C ``[F, F]``.
        metric: M ``[2GD + GV, ...]``.
    """

    G: int
    D: int
    n: int
    k: Tensor
    v: Tensor
    q: Tensor
    inputs: Tensor
    metric: Tensor

    @classmethod
    def of(cls, draft: Draft, index: int, config: AttentionConfig, moments: Moments) -> LayerRows:
        G, H, D = config.num_kv_heads, config.num_heads, config.head_dim
        biased = config.qkv_bias or config.has_k_bias
        F = draft.config.embed_dim + biased

        def rows(name: str, heads: int) -> Tensor:
            weight = draft.get(index, f"{name}.weight")
            bias = draft.find(index, f"{name}.bias")
            if biased:
                column = weight.new_zeros(len(weight)) if bias is None else bias
                weight = torch.cat((weight, column[:, None]), dim=1)
            return weight.view(heads, -1, F)

        rotated = D if config.rope is None or config.rope.dim is None else config.rope.dim
        return cls(
            G,
            D,
            rotated // 2,
            rows("k_proj", G),
            rows("v_proj", G),
            rows("q_proj", H),
            moments.inputs[:F, :F],
            moments.gradients,
        )

    def part(self, heads: range) -> LayerRows:
        """The same functions for some kv heads."""
        which = torch.zeros(self.G, dtype=torch.bool, device="cpu")
        which[list(heads)] = True
        V, D = self.v.shape[1], self.D
        keep = torch.cat((which.repeat_interleave(D).repeat(2), which.repeat_interleave(V)))
        metric = self.metric[keep][:, keep]
        return replace(self, G=len(heads), k=self.k[which], v=self.v[which], metric=metric)

    @property
    def rows(self) -> Tensor:
        return torch.cat((self.k.flatten(0, 1), self.v.flatten(0, 1)))

    @property
    def turned_metric(self) -> Tensor:
        """M of keys as they are, and values."""
        K = self.G * self.D
        keep = [*range(K), *range(2 * K, len(self.metric))]
        return ridged(self.metric[keep][:, keep])

    def still_metric(self, phase: Tensor) -> Tensor:
        """M of keys whose pairs are not rotated, their queries multiplied by ``phase``, and of
        values."""
        K, D, n = self.G * self.D, self.D, self.n
        pick = torch.zeros(
            len(self.metric) - K, len(self.metric), dtype=torch.float64, device="cpu"
        )
        for g in range(self.G):
            for i in range(n):
                a, b = g * D + i, g * D + n + i
                re, im = float(phase[i].real), float(phase[i].imag)
                pick[a, K + a], pick[a, K + b] = re, -im
                pick[b, K + a], pick[b, K + b] = im, re
            for d in range(2 * n, D):
                pick[g * D + d, g * D + d] = 1.0
        rest = torch.arange(K, len(pick), device="cpu")
        pick[rest, K + rest] = 1.0
        return pick @ self.metric @ pick.T

    def pairs(self, heads: Tensor) -> Tensor:
        """``[heads, D, F]`` to ``[n, heads, F]`` complex."""
        n = self.n
        return torch.complex(heads[:, :n], heads[:, n : 2 * n]).transpose(0, 1)

    def unpaired(self, pairs: Tensor, heads: Tensor) -> Tensor:
        """The inverse of ``pairs``; features that are in no pair are those of ``heads``."""
        pairs = pairs.transpose(0, 1)
        return torch.cat((pairs.real, pairs.imag, heads[:, 2 * self.n :]), dim=1)

    def pair_moments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``[n, G, G]`` complex: E[k kᴴ], E[g gᴴ] of rotated and of unrotated keys' gradients, and
        E[g sᴴ] between the two."""
        keys = self.pairs(self.k)
        energy = torch.einsum("ngf,fe,nhe->ngh", keys, self.inputs.to(keys.dtype), keys.conj())
        K = self.G * self.D
        blocks = [
            self.metric[:K, :K],
            self.metric[K : 2 * K, K : 2 * K],
            self.metric[:K, K : 2 * K],
        ]
        turned, still, cross = (self._paired(block) for block in blocks)
        return energy, turned, still, cross

    def _paired(self, block: Tensor) -> Tensor:
        n, D = self.n, self.D
        split = block.view(self.G, D, self.G, D)[:, : 2 * n, :, : 2 * n]
        split = split.reshape(self.G, 2, n, self.G, 2, n)
        same = torch.diagonal(split, dim1=2, dim2=5)  # [G, 2, G, 2, n]
        real = same[:, 0, :, 0] + same[:, 1, :, 1]
        imaginary = same[:, 1, :, 0] - same[:, 0, :, 1]
        return torch.complex(real, imaginary).permute(2, 0, 1)

    def merged(self) -> Tensor:
        """How keys and values of all G heads are made of one head's: ``[GD + GV, D + V]``."""
        G, D, V, n = self.G, self.D, self.v.shape[1], self.n
        energy, turned, _, _ = self.pair_moments()
        root, inverse = roots_of(ridged(turned))
        b = (inverse @ torch.linalg.eigh(root @ energy @ root)[1][..., -1:])[..., 0]  # [n, G]
        up = torch.zeros(G * D + G * V, D + V, dtype=torch.float64, device="cpu")
        i = torch.arange(n, device="cpu")
        for g in range(G):
            re, im = b[:, g].real, b[:, g].imag
            up[g * D + i, i], up[g * D + i, n + i] = re, -im
            up[g * D + n + i, i], up[g * D + n + i, n + i] = im, re
        still = [g * D + d for g in range(G) for d in range(2 * n, D)]
        metric, rows = self.turned_metric, self.rows
        if still:
            up[still, 2 * n : D] = principal(
                metric[still][:, still], rows[still], self.inputs, D - 2 * n
            )
        values = slice(G * D, None)
        up[values, D:] = principal(metric[values, values], rows[values], self.inputs, V)
        return up

    def regressed(self, up: Tensor) -> Tensor:
        """The rows from which ``up`` makes keys and values at the least price."""
        weighted = up.T @ self.turned_metric
        down: Tensor = torch.linalg.solve(weighted @ up, weighted @ self.rows)
        return down

    def price(self, made: Tensor) -> float:
        """The price of ``made [GD + GV, F]`` in place of keys and values."""
        lost = self.rows - made
        K = self.G * self.D
        keep = [*range(K), *range(2 * K, len(self.metric))]
        metric = self.metric[keep][:, keep]
        return float(0.5 * torch.einsum("ij,jf,fe,ie->", metric, lost, self.inputs, lost))


def principal(metric: Tensor, rows: Tensor, inputs: Tensor, size: int) -> Tensor:
    """``[rows, size]``: the principal directions of ``rows x`` in a metric."""
    root, inverse = roots_of(metric)
    vectors = torch.linalg.eigh(root @ rows @ inputs @ rows.T @ root)[1]
    made: Tensor = inverse @ vectors[:, -size:]
    return made


def ridged(metric: Tensor) -> Tensor:
    size = metric.shape[-1]
    mean = torch.diagonal(metric, dim1=-2, dim2=-1).real.mean(-1).clamp_min(1e-30)
    return metric + _RIDGE * mean[..., None, None] * torch.eye(
        size, dtype=metric.dtype, device="cpu"
    )


def roots_of(metric: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a symmetric or Hermitian matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(metric)
    values = values.clamp_min(1e-12 * values.max().clamp_min(1e-30)).sqrt()
    scaled = vectors * values[..., None, :]
    return scaled @ vectors.mH, (vectors / values[..., None, :]) @ vectors.mH
