"""Fewer numbers per token: kv heads merged, or keys and values in one latent.

What rotary embedding does to pair i of a key is a multiplication with e^(iθt), so the pairs with
one frequency of all G kv heads are a vector in ℂ^G of which any complex mixture k' = A k may be
kept. Exact alignment is such a mixture with an inverse; keeping fewer than G components is its
lossy sister, and which to keep is principal component analysis in the metric of ``calibration``:

    components of frequency i: eigenvectors of M^½ C M^½      M, C complex G × G, of that frequency

Merging keeps one component of each frequency. Latent attention keeps those pairs rotated whose
energy times *dispersion* is greatest, dispersion being the share of their gradient that no
constant phase explains: a pair that hardly turns over the distances that matter can do without
rotation. What is left of the keys, and all values, become one latent by reduced-rank regression in
the same metric.

Every step returns its price: the KL divergence per token that it is expected to cost.

Shape letters as in ``draft``; F = E + 1 where projections have biases, else E; n pairs of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead.config import AttentionConfig, LatentAttentionConfig, RopeConfig
from polyhead.conversion.calibration import Moments
from polyhead.conversion.draft import Draft
from polyhead.conversion.exact import refuse_latent, refuse_linear
from polyhead.errors import InputError
from polyhead.layers.frequencies import inverse_frequencies

_RIDGE = 1e-3
"""Of the mean of a metric's diagonal: directions that calibration never saw cost a little too."""


def merge_kv_heads(
    draft: Draft, layer: int, kv_heads: int, moments: Moments, *, pooled: bool = False
) -> float:
    """Fewer kv heads; the query heads of merged ones share what is left.

    Args:
        draft: Changed.
        layer: Its number.
        kv_heads: Left; a divisor of those there are.
        moments: Of the layer.
        pooled: Keys and values are averaged instead (Ainslie et al. 2023), for comparison.

    Returns:
        The price, in nats per token.

    Raises:
        InputError: As many kv heads as there are or more, or no divisor.
        UnsupportedError: Keys that are normalised or clipped after they are projected.
    """
    config = draft.heads(layer, "merging kv heads")
    refuse_linear(config, layer, "merging kv heads")
    G, H, D, V = config.num_kv_heads, config.num_heads, config.head_dim, config.value_dim
    if not 0 < kv_heads < G or G % kv_heads:
        raise InputError(
            f"kv heads are merged to a divisor of {G} below it: got kv_heads={kv_heads}"
        )
    whole = _Layer.of(draft, layer, config, moments)
    if config.rope is None:
        whole = replace(whole, n=0)  # any mixture of features will do
    r, rows, columns = G // kv_heads, [], []
    price = 0.0
    queries = torch.zeros(H, D, whole.q.shape[-1], dtype=torch.float64)
    for new in range(kv_heads):
        part = whole.part(range(new * r, (new + 1) * r))
        up = _pooled(part) if pooled else part.merged()
        down = part.regressed(up)
        price += part.price(up @ down)
        rows.append(down)
        columns.append(up)
        for old in range(r):
            first = (new * r + old) * (H // G)
            heads = slice(first, first + H // G)
            queries[heads] = torch.einsum(
                "dk,hdf->hkf", up[old * D : (old + 1) * D, :D], whole.q[heads]
            )
    key = torch.stack([down[:D] for down in rows]).flatten(0, 1)
    value = torch.stack([down[D:] for down in rows]).flatten(0, 1)
    out = draft.get(layer, "o_proj.weight").view(-1, H, V)
    lifts = torch.stack(
        [columns[g // r][r * D + (g % r) * V : r * D + (g % r + 1) * V, D:] for g in range(G)]
    )
    made = torch.einsum("ehv,hvw->ehw", out, lifts.repeat_interleave(H // G, dim=0))
    _put(draft, layer, "q_proj", queries.flatten(0, 1))
    _put(draft, layer, "k_proj", key)
    _put(draft, layer, "v_proj", value)
    draft.put(layer, o_proj=made.flatten(1))
    draft.set_attention(layer, replace(config, num_kv_heads=kv_heads))
    return price


@dataclass(frozen=True)
class Latents:
    """A layer as latent attention of any size: what is kept rotated, and what the rest costs.

    Attributes:
        layer: Its numbers.
        basis: ``[n, G, G]`` complex: columns are components of keys, and
        dual: their inverse transposed, conjugated: component j of k is ``dual[:, j]ᴴ k``.
        phase: ``[n]`` complex: by what queries that are not rotated are multiplied.
        worth: ``[n, G]``: the price of not rotating each component.
        roots: ``[2, GD + GV, GD + GV]``: the root of the metric of what is not rotated, and its
            inverse.
    """

    layer: _Layer
    basis: Tensor
    dual: Tensor
    phase: Tensor
    worth: Tensor
    roots: Tensor

    @classmethod
    def of(cls, draft: Draft, index: int, moments: Moments) -> Latents:
        """Of a layer.

        Raises:
            UnsupportedError: What latent attention has no place for, by name.
        """
        refuse_latent(draft, index)
        config = draft.heads(index, "latent attention")
        layer = _Layer.of(draft, index, config, moments)
        keys, turned, still, cross = layer.pair_moments()
        root, inverse = _roots(_ridged(turned))
        size, u = torch.linalg.eigh(root @ keys @ root)
        basis, dual = inverse @ u, root @ u

        def seen(moment: Tensor) -> Tensor:
            return torch.einsum("ngj,ngh,nhj->nj", basis.conj(), moment, basis)

        explained = seen(cross).abs().square()
        least = torch.finfo(torch.float64).tiny
        both = (seen(turned).real * seen(still).real).clamp_min(least)
        dispersion = (1 - explained / both).clamp(0, 1)
        traces = [torch.einsum("ngg->n", each) for each in (cross, still)]
        phase = traces[0] / traces[1].real.clamp_min(least)
        if config.rope is None:
            dispersion, phase = torch.zeros_like(dispersion), torch.ones_like(phase)
        # A circular pair has half the energy of a complex number in each feature.
        worth = 0.25 * size.clamp_min(0) * dispersion
        roots = torch.stack(_roots(_ridged(layer.still_metric(phase))))
        return cls(layer, basis, dual, phase, worth, roots)

    def kept(self, rotated: int) -> Tensor:
        """``[n, G]`` bool: the components that stay rotated, ``rotated / 2`` of them."""
        flat = self.worth.flatten()
        chosen = torch.zeros(flat.numel(), dtype=torch.bool)
        chosen[flat.argsort(descending=True, stable=True)[: rotated // 2]] = True
        return chosen.view_as(self.worth)

    @property
    def elements(self) -> int:
        """Numbers per token that the layer's cache holds now."""
        return self.layer.k.shape[:2].numel() + self.layer.v.shape[:2].numel()

    def rest(self, kept: Tensor) -> Tensor:
        """What the latent stands for, keys that are not rotated and values, ``[GD + GV, F]``."""
        layer = self.layer
        parts = torch.einsum("ngj,ngf->njf", self.dual.conj(), layer.pairs(layer.k))
        left = torch.einsum("ngj,njf->ngf", self.basis, parts * ~kept[..., None])
        still = layer.unpaired(left, layer.k)
        return torch.cat((still.flatten(0, 1), layer.v.flatten(0, 1)))

    def energy(self, rows: Tensor) -> Tensor:
        """Of ``rows x`` in the metric, a symmetric matrix."""
        root = self.roots[0]
        return root @ rows @ self.layer.inputs @ rows.T @ root

    def prices(self, rotated: int) -> Tensor:
        """Nats per token for each latent size from 0 up, with so many rotated features."""
        kept = self.kept(rotated)
        s = torch.linalg.eigvalsh(self.energy(self.rest(kept))).clamp_min(0).flip(0)
        lost = torch.cat((s.flip(0).cumsum(0).flip(0), s.new_zeros(1)))
        return 0.5 * lost + self.worth[~kept].sum()


def to_small_latent(draft: Draft, layer: int, latents: Latents, rotated: int, size: int) -> float:
    """Latent attention with ``rotated`` features of a key rotated and a latent of ``size``.

    Args:
        draft: Changed.
        layer: Its number.
        latents: Of this layer of this draft.
        rotated: P, even.
        size: R.

    Returns:
        The price, in nats per token.

    Raises:
        InputError: More than the layer has to say, or no pair.
    """
    config = draft.heads(layer, "latent attention")
    part = latents.layer
    H, G, D, V = config.num_heads, part.G, config.head_dim, config.value_dim
    n = latents.worth.shape[0]
    if not 2 <= rotated <= 2 * n * G or rotated % 2:
        raise InputError(
            f"latent: the rotated features of layer {layer} must be an even number from 2 to "
            f"{2 * n * G}: got {rotated}"
        )
    kept = latents.kept(rotated)
    rows = latents.rest(kept)
    energies, u = torch.linalg.eigh(latents.energy(rows))
    s, u = energies.clamp_min(0).flip(0), u.flip(1)
    root, inverse = latents.roots
    if not 1 <= size <= len(s):
        raise InputError(
            f"latent: the latent of layer {layer} must hold from 1 to {len(s)} numbers: got {size}"
        )
    u = u[:, :size]
    up, down = inverse @ u, u.T @ root @ rows
    places = kept.nonzero()  # [P / 2, 2]: frequency, component
    chosen, dual = latents.basis[places[:, 0], :, places[:, 1]], latents.dual
    keys = torch.einsum(
        "pg,pgf->pf",
        dual[places[:, 0], :, places[:, 1]].conj(),
        part.pairs(part.k)[places[:, 0]],
    )
    made = torch.cat((down, keys.real, keys.imag))
    group = torch.arange(H) // (H // G)
    asked = part.pairs(part.q)[places[:, 0]]  # [P / 2, H, F]
    asked = asked * chosen.conj()[:, group, None]
    asked = asked.transpose(0, 1)
    still = part.unpaired(part.pairs(part.q) * latents.phase[:, None, None], part.q)
    query = torch.cat((still, asked.real, asked.imag), dim=1)
    lifted = torch.cat(
        (up[: G * D].view(G, D, -1), up[G * D :].view(G, V, -1)), dim=1
    ).repeat_interleave(H // G, dim=0)
    rope = config.rope
    if rope is not None:
        frequencies, factor = inverse_frequencies(rope, 2 * n)
        rope = RopeConfig(
            type="explicit",
            frequencies=tuple(frequencies.double()[places[:, 0]].tolist()),
            attention_factor=None if factor == 1.0 else factor,
        )
    biases = {"o_proj_bias": draft.find(layer, "o_proj.bias")}
    out = draft.get(layer, "o_proj.weight")
    biased = config.has_k_bias or config.qkv_bias or config.out_bias
    draft.clear(layer)
    draft.set_attention(
        layer,
        LatentAttentionConfig(
            num_heads=H,
            kv_lora_rank=size,
            qk_nope_head_dim=D,
            qk_rope_head_dim=rotated,
            v_head_dim=V,
            bias=biased,
            q_bias=config.qkv_bias,
            norm=None,
            rope=rope,
            scale=D**-0.5 if config.scale is None else config.scale,
            dropout=config.dropout,
        ),
    )
    E = draft.config.embed_dim
    draft.put(layer, q_proj=query.flatten(0, 1)[:, :E], kv_a_proj_with_mqa=made[:, :E])
    draft.put(layer, kv_b_proj=lifted.flatten(0, 1), o_proj=out)
    if config.qkv_bias:
        draft.put(layer, q_proj_bias=query.flatten(0, 1)[:, E])
    if biased:
        bias = made[:, E] if made.shape[1] > E else made.new_zeros(len(made))
        o_bias = biases["o_proj_bias"]
        draft.put(layer, kv_a_proj_with_mqa_bias=bias)
        draft.put(layer, o_proj_bias=out.new_zeros(E) if o_bias is None else o_bias)
    return float(0.5 * s[size:].sum() + latents.worth[~kept].sum())


@dataclass(frozen=True)
class _Layer:
    """Keys, values and queries of a layer as functions of its input, and its metric.

    Attributes:
        G: kv heads.
        D: Head size.
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
    def of(cls, draft: Draft, index: int, config: AttentionConfig, moments: Moments) -> _Layer:
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

    def part(self, heads: range) -> _Layer:
        """Some kv heads alone."""
        which = torch.zeros(self.G, dtype=torch.bool)
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
        return _ridged(self.metric[keep][:, keep])

    def still_metric(self, phase: Tensor) -> Tensor:
        """M of keys whose pairs are not rotated, their queries multiplied by ``phase``, and of
        values."""
        K, D, n = self.G * self.D, self.D, self.n
        pick = torch.zeros(len(self.metric) - K, len(self.metric), dtype=torch.float64)
        for g in range(self.G):
            for i in range(n):
                a, b = g * D + i, g * D + n + i
                re, im = float(phase[i].real), float(phase[i].imag)
                pick[a, K + a], pick[a, K + b] = re, -im
                pick[b, K + a], pick[b, K + b] = im, re
            for d in range(2 * n, D):
                pick[g * D + d, g * D + d] = 1.0
        rest = torch.arange(K, len(pick))
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
        root, inverse = _roots(_ridged(turned))
        b = (inverse @ torch.linalg.eigh(root @ energy @ root)[1][..., -1:])[..., 0]  # [n, G]
        up = torch.zeros(G * D + G * V, D + V, dtype=torch.float64)
        i = torch.arange(n)
        for g in range(G):
            re, im = b[:, g].real, b[:, g].imag
            up[g * D + i, i], up[g * D + i, n + i] = re, -im
            up[g * D + n + i, i], up[g * D + n + i, n + i] = im, re
        still = [g * D + d for g in range(G) for d in range(2 * n, D)]
        metric, rows = self.turned_metric, self.rows
        if still:
            up[still, 2 * n : D] = _principal(
                metric[still][:, still], rows[still], self.inputs, D - 2 * n
            )
        values = slice(G * D, None)
        up[values, D:] = _principal(metric[values, values], rows[values], self.inputs, V)
        return up

    def regressed(self, up: Tensor) -> Tensor:
        """The rows from which ``up`` makes keys and values at the least price."""
        weighted = up.T @ self.turned_metric
        down: Tensor = torch.linalg.solve(weighted @ up, weighted @ self.rows)
        return down

    def price(self, made: Tensor) -> float:
        """Of ``made [GD + GV, F]`` in the place of keys and values."""
        lost = self.rows - made
        K = self.G * self.D
        keep = [*range(K), *range(2 * K, len(self.metric))]
        metric = self.metric[keep][:, keep]
        return float(0.5 * torch.einsum("ij,jf,fe,ie->", metric, lost, self.inputs, lost))


def _pooled(part: _Layer) -> Tensor:
    D, V = part.D, part.v.shape[1]
    up = torch.zeros(part.G * (D + V), D + V, dtype=torch.float64)
    up[: part.G * D, :D] = torch.eye(D, dtype=torch.float64).repeat(part.G, 1)
    up[part.G * D :, D:] = torch.eye(V, dtype=torch.float64).repeat(part.G, 1)
    return up


def _principal(metric: Tensor, rows: Tensor, inputs: Tensor, size: int) -> Tensor:
    """``[rows, size]``: the principal directions of ``rows x`` in a metric."""
    root, inverse = _roots(metric)
    vectors = torch.linalg.eigh(root @ rows @ inputs @ rows.T @ root)[1]
    made: Tensor = inverse @ vectors[:, -size:]
    return made


def _ridged(metric: Tensor) -> Tensor:
    size = metric.shape[-1]
    mean = torch.diagonal(metric, dim1=-2, dim2=-1).real.mean(-1).clamp_min(1e-30)
    return metric + _RIDGE * mean[..., None, None] * torch.eye(size, dtype=metric.dtype)


def _roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a symmetric or Hermitian matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(metric)
    values = values.clamp_min(1e-12 * values.max().clamp_min(1e-30)).sqrt()
    scaled = vectors * values[..., None, :]
    return scaled @ vectors.mH, (vectors / values[..., None, :]) @ vectors.mH


def _put(draft: Draft, layer: int, name: str, rows: Tensor) -> None:
    """A projection with its bias, if it has one, as the last column."""
    E = draft.config.embed_dim
    draft.put(layer, **{name: rows[:, :E]})
    if draft.find(layer, f"{name}.bias") is not None:
        draft.put(layer, **{f"{name}_bias": rows[:, E]})
