"""Fewer numbers per token: kv heads merged, or keys and values in one latent.

What rotary embedding does to pair i of a key is a multiplication with e^(iθt), so the pairs with
one frequency of all G kv heads are a vector in ℂ^G of which any complex mixture k' = A k may be
kept. Exact alignment is such a mixture with an inverse; keeping fewer than G components is its
lossy sister, and which to keep is principal component analysis in the metric of ``calibration``:

    components of frequency i: eigenvectors of M^½ C M^½      M, C complex G × G, of that frequency

Merging keeps one component of each frequency. Latent attention keeps those pairs rotated whose
energy times *dispersion* is greatest, dispersion being the fraction of their gradient that no
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

from polyhead.conversion.algebra import LayerRows, ridged, roots_of
from polyhead.conversion.calibration import Moments
from polyhead.conversion.draft import Draft
from polyhead.conversion.exact import explicit_rope, latent_config
from polyhead.conversion.refusals import refuse_latent, refuse_linear
from polyhead.errors import InputError


def merge_kv_heads(
    draft: Draft, layer: int, num_kv_heads: int, moments: Moments, *, pooled: bool = False
) -> float:
    """Fewer kv heads; the query heads of merged ones share what is left.

    Args:
        num_kv_heads: Number of kv heads afterwards, a divisor of the present number.
        pooled: Keys and values are averaged instead (Ainslie et al. 2023), for comparison.

    Returns:
        The price, in nats per token.

    Raises:
        InputError: As many kv heads as there are or more, or no divisor.
        UnsupportedError: Keys that are normalized or clipped after they are projected.
    """
    config = draft.heads(layer, "merging kv heads")
    refuse_linear(config, layer, "merging kv heads")
    G, H, D, V = config.num_kv_heads, config.num_heads, config.head_dim, config.value_dim
    if not 0 < num_kv_heads < G or G % num_kv_heads:
        raise InputError(
            f"kv heads are merged to a divisor of {G} below it: got num_kv_heads={num_kv_heads}"
        )
    whole = LayerRows.of(draft, layer, config, moments)
    if config.rope is None:
        whole = replace(whole, n=0)  # any mixture of features is allowed
    r, rows, columns = G // num_kv_heads, [], []
    price = 0.0
    queries = torch.zeros(H, D, whole.q.shape[-1], dtype=torch.float64, device="cpu")
    for new in range(num_kv_heads):
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
    draft.set_attention(layer, replace(config, num_kv_heads=num_kv_heads))
    return price


@dataclass(frozen=True)
class Latents:
    """A layer as latent attention of any size: what is kept rotated, and what the rest costs.

    Attributes:
        basis: ``[n, G, G]`` complex: columns are components of keys, and
        dual: their inverse transposed, conjugated: component j of k is ``dual[:, j]ᴴ k``.
        phase: ``[n]`` complex: by what queries that are not rotated are multiplied.
        worth: ``[n, G]``: the price of not rotating each component.
        roots: ``[2, GD + GV, GD + GV]``: the root of the metric of what is not rotated, and its
            inverse.
    """

    layer: LayerRows
    basis: Tensor
    dual: Tensor
    phase: Tensor
    worth: Tensor
    roots: Tensor

    @classmethod
    def of(cls, draft: Draft, index: int, moments: Moments) -> Latents:
        """The latents of a layer of a draft.

        Raises:
            UnsupportedError: What latent attention has no place for, by name.
        """
        refuse_latent(draft, index)
        config = draft.heads(index, "latent attention")
        layer = LayerRows.of(draft, index, config, moments)
        keys, turned, still, cross = layer.pair_moments()
        root, inverse = roots_of(ridged(turned))
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
        roots = torch.stack(roots_of(ridged(layer.still_metric(phase))))
        return cls(layer, basis, dual, phase, worth, roots)

    def kept(self, rotated: int) -> Tensor:
        """``[n, G]`` bool: the components that stay rotated, ``rotated / 2`` of them."""
        flat = self.worth.flatten()
        chosen = torch.zeros(flat.numel(), dtype=torch.bool, device="cpu")
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
        """Second moments of ``rows x`` in the metric, a symmetric matrix."""
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
        latents: The latents of this layer of this draft.

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
    group = torch.arange(H, device="cpu") // (H // G)
    asked = part.pairs(part.q)[places[:, 0]]  # [P / 2, H, F]
    asked = asked * chosen.conj()[:, group, None]
    asked = asked.transpose(0, 1)
    still = part.unpaired(part.pairs(part.q) * latents.phase[:, None, None], part.q)
    query = torch.cat((still, asked.real, asked.imag), dim=1)
    lifted = torch.cat(
        (up[: G * D].view(G, D, -1), up[G * D :].view(G, V, -1)), dim=1
    ).repeat_interleave(H // G, dim=0)
    rope = explicit_rope(config, 2 * n, places[:, 0])
    o_bias = draft.find(layer, "o_proj.bias")
    out = draft.get(layer, "o_proj.weight")
    biased = config.has_k_bias or config.qkv_bias or config.out_bias
    draft.clear(layer)
    draft.set_attention(layer, latent_config(config, size, D, rotated, rope))
    E = draft.config.embed_dim
    draft.put(layer, q_proj=query.flatten(0, 1)[:, :E], kv_a_proj_with_mqa=made[:, :E])
    draft.put(layer, kv_b_proj=lifted.flatten(0, 1), o_proj=out)
    if config.qkv_bias:
        draft.put(layer, q_proj_bias=query.flatten(0, 1)[:, E])
    if biased:
        bias = made[:, E] if made.shape[1] > E else made.new_zeros(len(made))
        draft.put(layer, kv_a_proj_with_mqa_bias=bias)
        draft.put(layer, o_proj_bias=out.new_zeros(E) if o_bias is None else o_bias)
    return float(0.5 * s[size:].sum() + latents.worth[~kept].sum())


def _pooled(part: LayerRows) -> Tensor:
    D, V = part.D, part.v.shape[1]
    up = torch.zeros(part.G * (D + V), D + V, dtype=torch.float64, device="cpu")
    up[: part.G * D, :D] = torch.eye(D, dtype=torch.float64, device="cpu").repeat(part.G, 1)
    up[part.G * D :, D:] = torch.eye(V, dtype=torch.float64, device="cpu").repeat(part.G, 1)
    return up


def _put(draft: Draft, layer: int, name: str, rows: Tensor) -> None:
    """A projection with its bias, if it has one, as the last column."""
    E = draft.config.embed_dim
    draft.put(layer, **{name: rows[:, :E]})
    if draft.find(layer, f"{name}.bias") is not None:
        draft.put(layer, **{f"{name}_bias": rows[:, E]})
