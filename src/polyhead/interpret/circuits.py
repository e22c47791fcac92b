"""What a head can read and write, from its weights alone: QK and OV circuits.

    QK = W_Qᵀ W_K     scores a pair of residual vectors, x_i QK x_j (at distance 0, before rotary)
    OV = W_O W_V      what a residual vector that is looked at adds to the residual stream

Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits". A query head's circuits use
the kv head that it reads, so grouped heads share W_K and W_V and nothing else. Each circuit has the
rank of a head and is kept as its two factors. Weights of the norms before the layer and before the
logits are folded in; biases, QK-norm and the mean of a LayerNorm are left out.

    copying  = Σ λ / Σ |λ| over the eigenvalues λ of W_U OV W_E    1: raises what is looked at
    matching = Σ λ / Σ |λ| over those of W_Eᵀ QK W_E               1: looks at tokens like its own

The eigenvalues that are not 0 are those of a head_dim × head_dim matrix, since AB and BA share
them, so no vocabulary × vocabulary matrix is made.

Letters: H query heads, D head size, V value size, E embed size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.errors import InputError, UnsupportedError
from polyhead.layers import MultiHeadAttention
from polyhead.layers.norms import RMSNorm
from polyhead.models.parts import layer_of, projections_of, transformer_of


class HeadCircuits:
    """The circuits of all query heads of one self-attention layer, in float64.

    Args:
        model: A Transformer, or what holds one.
        layer: Index of the layer, from 0.

    Raises:
        InputError: The model has no such layer.
        UnsupportedError: Attention of another layout, whose factors are others, or several
            residual streams.
    """

    def __init__(self, model: torch.nn.Module, layer: int) -> None:
        self._transformer = transformer_of(model)
        if (streams := self._transformer.config.streams) is not None:
            raise UnsupportedError(
                f"circuits need one residual stream that heads read and write: got {streams}"
            )
        module = projections_of(self._transformer, layer)
        H, G = module.num_heads, module.num_kv_heads
        block = layer_of(self._transformer, layer)
        if block.config.norm_gate is not None:
            raise UnsupportedError(
                "circuits need factors that are the same for every token: got "
                f"norm_gate={block.config.norm_gate}"
            )
        norm = block.attention_norm if block.config.norm_placement in ("pre", "sandwich") else None
        gain = None if norm is None else norm_weight(norm)
        q, k, v = (
            _folded(projection.weight, gain).view(heads, -1, module.embed_dim)
            for projection, heads in ((module.q_proj, H), (module.k_proj, G), (module.v_proj, G))
        )
        self._q = q
        self._k = k.repeat_interleave(H // G, dim=0)
        self._v = module.config.value_scale * v.repeat_interleave(H // G, dim=0)
        self._o = head_outputs(module).double()

    def qk(self, head: int) -> tuple[Tensor, Tensor]:
        """``(W_Q, W_K)``, both ``[D, E]``: the circuit is W_Qᵀ W_K."""
        return self._q[self._checked(head)], self._k[head]

    def ov(self, head: int) -> tuple[Tensor, Tensor]:
        """``(W_O [E, V], W_V [V, E])``: the circuit is their product."""
        return self._o[self._checked(head)], self._v[head]

    def copying(self) -> Tensor:
        """``[H]`` from −1 to 1: how much the OV circuit raises the token that is looked at.

        Raises:
            UnsupportedError: The model has no logits.
        """
        model = self._transformer
        if model.head is None:
            raise UnsupportedError("copying needs logits: this model has no head")
        embedded = model.embedding.table.detach().double()
        tied = model.head.weight is None
        unembedded = embedded if tied else model.unembedding.detach().double()
        gain = None if model.final_norm is None else norm_weight(model.final_norm)
        through = embedded.mT @ _folded(unembedded, gain)  # [E, E], over the vocabulary
        return _positive_share(self._v @ through @ self._o)

    def matching(self) -> Tensor:
        """``[H]`` from −1 to 1: how much the QK circuit prefers tokens like the query's own."""
        embedded = self._transformer.embedding.table.detach().double()
        return _positive_share(self._k @ (embedded.mT @ embedded) @ self._q.mT)

    def _checked(self, head: int) -> int:
        if not 0 <= head < len(self._q):
            raise InputError(f"heads must be from 0 to {len(self._q) - 1}: got {head}")
        return head


def head_outputs(module: MultiHeadAttention) -> Tensor:
    """``[H, E, V]`` the columns of o_proj that each head's output meets."""
    weight = module.o_proj.weight.detach()
    return weight.view(weight.shape[0], module.num_heads, module.v_head_dim).transpose(0, 1)


def norm_weight(norm: torch.nn.Module) -> Tensor | None:
    """What a norm multiplies by, ``[E]`` in float64."""
    weight = getattr(norm, "weight", None)
    if weight is None:
        return None
    offset = norm.weight_offset if isinstance(norm, RMSNorm) else 0.0
    gain: Tensor = weight.detach().double() + offset
    return gain


def _folded(weight: Tensor, gain: Tensor | None) -> Tensor:
    weight = weight.detach().double()
    return weight if gain is None else weight * gain


def _positive_share(matrices: Tensor) -> Tensor:
    """Σ λ / Σ |λ| of each matrix's eigenvalues λ, which come in conjugate pairs."""
    eigenvalues = torch.linalg.eigvals(matrices)
    share: Tensor = eigenvalues.sum(dim=-1).real / eigenvalues.abs().sum(dim=-1)
    return share
