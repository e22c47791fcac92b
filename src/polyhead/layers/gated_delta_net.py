"""Gated DeltaNet: heads that remember a state, which every token decays, corrects and reads.

    [q | k | v] = silu(conv(x [Wq | Wk | Wv]))          a convolution over the last few tokens
    β = sigmoid(x Wb)      decay = −exp(A) · softplus(x Wa + dt)
    S = exp(decay) S;  S = S + β k (v − Sᵀ k)ᵀ;  o = Sᵀ q / √K         with |q| = |k| = 1
    out = concat(norm(o_h) · silu(x Wz)_h) Wo

Yang et al. 2024, arXiv 2412.06464, eq. 10 and section 3.4; the linear-attention layers of
Qwen3-Next. Positions enter by the order of tokens alone.

Shape letters: B batch, T tokens, H heads (states), G heads of queries and keys, K key size,
V value size, C channels of the convolution, E embed size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.caches.layer_cache import Step
from polyhead.config import GatedDeltaNetConfig, NormConfig
from polyhead.layers import fused
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm
from polyhead.layers.positions import RoPE
from polyhead.layers.recurrent import RecurrentLayer, as_heads, convolve, with_tail
from polyhead.layers.registry import register_builder


class GatedDeltaNet(RecurrentLayer):
    """Self-attention by states, causal by nature; ``from_config`` makes one from its data.

    Args:
        embed_dim: E, features of ``x`` and of the output.
        num_heads: H, states and value heads.
        num_key_heads: G, heads of queries and keys; default H.
        head_k_dim: K, features of a key.
        head_v_dim: V, features of a value; default K.
        conv_kernel: Tokens that the convolution sees.
        norm_eps: Of the RMSNorm over a head's output.
        allow_neg_eigval: Whether β reaches from 0 to 2, not 1.

    Attributes:
        config: Everything above as data; it cannot be assigned.
        q_proj, k_proj, v_proj, gate_proj, beta_proj, decay_proj, o_proj: The projections, without
            biases.
        conv_weight: ``[C, conv_kernel]``, for queries, keys and values in this order.
        A_log, dt_bias: ``[H]``, what decays are made with.
        norm: RMSNorm over the V features of a head's output.

    Raises:
        ConfigError: Sizes that do not go together.
    """

    reads_by_heads = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_key_heads: int | None = None,
        *,
        head_k_dim: int,
        head_v_dim: int | None = None,
        conv_kernel: int = 4,
        norm_eps: float = 1e-6,
        allow_neg_eigval: bool = False,
    ) -> None:
        super().__init__()
        config = GatedDeltaNetConfig(
            num_heads,
            num_heads if num_key_heads is None else num_key_heads,
            head_k_dim,
            head_k_dim if head_v_dim is None else head_v_dim,
            conv_kernel,
            norm_eps,
            allow_neg_eigval,
        )
        self._begin(embed_dim, config)
        self._build(None)

    def _build(self, rope: RoPE | None) -> None:
        config, embed_dim = self.config, self.embed_dim
        H, G, K, V = config.num_heads, config.num_key_heads, config.head_k_dim, config.head_v_dim
        self.scale = 1.0 / math.sqrt(K) if config.scale is None else config.scale
        self.q_proj = nn.Linear(embed_dim, G * K, bias=False)
        self.k_proj = nn.Linear(embed_dim, G * K, bias=False)
        self.v_proj = nn.Linear(embed_dim, H * V, bias=False)
        self.beta_proj = nn.Linear(embed_dim, H, bias=False)
        self.o_proj = nn.Linear(H * V, embed_dim, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(config.channels, config.conv_kernel))
        self.A_log = nn.Parameter(torch.empty(H))
        self.norm = build_norm(V, NormConfig(eps=config.norm_eps))
        self._build_gates()
        self.reset_parameters()

    def _build_gates(self) -> None:
        """What decays and gates are made of."""
        H, V = self.config.num_heads, self.config.head_v_dim
        self.gate_proj = nn.Linear(self.embed_dim, H * V, bias=False)
        self.decay_proj = nn.Linear(self.embed_dim, H, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(H))

    def reset_parameters(self) -> None:
        """Draws the convolution and decays anew: exp(A) from 0.01 to 16, dt 1. Projections stay."""
        bound = 1.0 / math.sqrt(self.config.conv_kernel)
        nn.init.uniform_(self.conv_weight, -bound, bound)
        nn.init.ones_(self.dt_bias)
        with torch.no_grad():
            self.A_log.uniform_(0.01, 16.0).log_()

    def _run(self, x: Tensor, real: Tensor | None, kernel: str, step: Step | None) -> Tensor:
        inputs = with_tail("conv", self._inputs(x), self.config.conv_kernel - 1, step)
        q, k, v, decay, beta = self._arguments(x, inputs)
        heads = self._recurrence(
            q, k, v, real, kernel, step, decay=decay, beta=beta, delta=True, scale=self.scale
        )
        return self._projected(x, heads)

    def _inputs(self, x: Tensor) -> Tensor:
        """``[B, T, C]``, what the convolution goes over."""
        return torch.cat(fused.linears(x, self.q_proj, self.k_proj, self.v_proj), dim=-1)

    def _arguments(self, x: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
        """q, k ``[B, G, T, K]``, v ``[B, H, T, V]``, decay and β ``[B, H, T]`` (decays may be for
        each feature too).

        Args:
            x: ``[B, T, E]``.
            inputs: ``[B, conv_kernel − 1 + T, C]``.
        """
        c = self.config
        mixed = convolve(inputs, self.conv_weight)
        keys = c.num_key_heads * c.head_k_dim
        widths = [keys, keys, c.num_heads * c.head_v_dim]
        q, k, v = torch.split(F.silu(mixed), widths, dim=-1)
        q, k = (_unit(as_heads(each, c.num_key_heads)) for each in (q, k))
        beta = linear(x, self.beta_proj).sigmoid().mT
        if c.allow_neg_eigval:
            beta = 2.0 * beta
        return q, k, as_heads(v, c.num_heads), self._decays(x), beta

    def _decays(self, x: Tensor) -> Tensor:
        """``[B, H, T]`` logarithms, in float32 or more."""
        precise = torch.promote_types(x.dtype, torch.float32)
        steps = F.softplus(linear(x, self.decay_proj).to(precise) + self.dt_bias.to(precise))
        return (-self.A_log.to(precise).exp() * steps).mT

    def _gates(self, x: Tensor) -> Tensor:
        """``[B, T, H · V]``, in float32 or more."""
        gates = self._raw_gates(x)
        gates = gates.to(torch.promote_types(gates.dtype, torch.float32))
        return F.silu(gates) if self.config.gate == "silu" else torch.sigmoid(gates)

    def _raw_gates(self, x: Tensor) -> Tensor:
        """``[B, T, H · V]``, what gates are made of."""
        return linear(x, self.gate_proj)

    def _projected(self, x: Tensor, heads: Tensor) -> Tensor:
        """The output of heads ``[B, H, T, V]``."""
        normed = self.norm(heads.transpose(1, 2)).flatten(2)
        gated = as_heads((normed * self._gates(x)).to(x.dtype), self.config.num_heads)
        edited = self._edited(gated)
        return linear(edited.transpose(1, 2).flatten(2), self.o_proj)


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1, computed in float32 or more, as transformers' layers do."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


register_builder(GatedDeltaNetConfig, GatedDeltaNet.from_config)
