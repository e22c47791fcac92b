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
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead._utils.checks import check_probability
from polyhead.caches import LayerCache, SequenceCache
from polyhead.config import GatedDeltaNetConfig, NormConfig
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.kernels.recurrence.dispatch import recurrence
from polyhead.layers import fused
from polyhead.layers.attention_parts import check_sizes, ragged_positions
from polyhead.layers.hooks import Hooked
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm
from polyhead.layers.positions import RoPE
from polyhead.layers.record import hooks_here
from polyhead.layers.registry import register_builder
from polyhead.semantics import Causal, KeyLengths, Mask
from polyhead.semantics.argument_hints import refuse
from polyhead.semantics.masks.algebra import And


class GatedDeltaNet(Hooked):
    """Self-attention by states, causal by nature; ``from_config`` makes one from its data.

    Args:
        embed_dim: E, features of ``x`` and of the output.
        num_heads: H, states and value heads.
        num_key_heads: G, heads of queries and keys; default H.
        head_k_dim: K, features of a key.
        head_v_dim: V, features of a value; default K.
        conv_kernel: Tokens that the convolution sees.
        norm_eps: Of the RMSNorm over a head's output.

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
    ) -> None:
        super().__init__()
        self._build(
            embed_dim,
            GatedDeltaNetConfig(
                num_heads,
                num_heads if num_key_heads is None else num_key_heads,
                head_k_dim,
                head_k_dim if head_v_dim is None else head_v_dim,
                conv_kernel,
                norm_eps,
            ),
        )

    @classmethod
    def from_config(
        cls, embed_dim: int, config: GatedDeltaNetConfig, *, rope: RoPE | None = None
    ) -> Self:
        """The layer that ``config`` describes; ``rope`` is None, as in every such configuration."""
        layer = cls.__new__(cls)
        Hooked.__init__(layer)
        layer._build(embed_dim, config)
        return layer

    def _build(self, embed_dim: int, config: GatedDeltaNetConfig) -> None:
        check_sizes(embed_dim=embed_dim)
        check_probability("dropout", config.dropout, error=ConfigError)
        self.config, self.embed_dim = config, embed_dim
        H, G, K, V = config.num_heads, config.num_key_heads, config.head_k_dim, config.head_v_dim
        self.scale = 1.0 / math.sqrt(K) if config.scale is None else config.scale
        self.q_proj = nn.Linear(embed_dim, G * K, bias=False)
        self.k_proj = nn.Linear(embed_dim, G * K, bias=False)
        self.v_proj = nn.Linear(embed_dim, H * V, bias=False)
        self.gate_proj = nn.Linear(embed_dim, H * V, bias=False)
        self.beta_proj = nn.Linear(embed_dim, H, bias=False)
        self.decay_proj = nn.Linear(embed_dim, H, bias=False)
        self.o_proj = nn.Linear(H * V, embed_dim, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(config.channels, config.conv_kernel))
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(H)), nn.Parameter(torch.empty(H))
        self.norm = build_norm(V, NormConfig(eps=config.norm_eps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the convolution and decays anew: exp(A) from 0.01 to 16, dt 1. Projections stay."""
        bound = 1.0 / math.sqrt(self.config.conv_kernel)
        nn.init.uniform_(self.conv_weight, -bound, bound)
        nn.init.ones_(self.dt_bias)
        with torch.no_grad():
            self.A_log.uniform_(0.01, 16.0).log_()

    def forward(
        self,
        x: Tensor,
        context: None = None,
        *,
        mask: Mask | None = None,
        bias: None = None,
        positions: Tensor | None = None,
        cache: SequenceCache | None = None,
        kernel: str = "auto",
        **unknown: Any,
    ) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``; with a cache, the state goes on from earlier calls.

        Args:
            x: ``[B, T, E]``.
            context: None: a state belongs to one sequence.
            mask: ``Causal()``, which the layer is by nature, also ``& KeyLengths(n)`` without a
                cache: tokens from n on are padding.
            bias: None: there are no scores.
            positions: ``[T]`` or ``[B, T]``; below 0 is padding. Other values mean nothing here.
            cache: A ``LayerCache`` of the memories of this layout.
            kernel: ``"auto"`` or the name of a kernel of ``recurrence``.
            **unknown: Refused.

        Raises:
            ValueError: Shapes that do not fit, or no causal mask.
            UnsupportedError: A context, a bias, another mask, or a watching hook.
            TypeError: A cache of another kind.
        """
        if unknown:
            refuse(type(self).__name__, unknown)
        if context is not None or bias is not None:
            given = "a context" if context is not None else "a bias of scores"
            raise UnsupportedError(f"a head with a state takes no {given[2:]}: got {given}")
        if x.ndim != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(f"x must be [B, T, {self.embed_dim}]: got {list(x.shape)}")
        if hooks_here(self._hooks):
            raise UnsupportedError(
                "a head with a state computes no weights that a hook could see: "
                "polyhead.recurrence_rows makes those of chosen rows"
            )
        real = _real(mask, x, positions, cached=cache is not None)
        if cache is None:
            return self._over(x, real, kernel)
        if not isinstance(cache, LayerCache):
            raise TypeError(
                f"cache must be a LayerCache of this layout's memories, as new_cache makes it: got "
                f"{type(cache).__name__}"
            )
        if positions is None:
            positions = ragged_positions(cache, x)
        with cache.step(x, positions) as step:
            packed = step.pack(x)
            inputs = step.tail("conv", self._inputs(packed))
            q, k, v, decay, beta = self._arguments(packed, inputs)
            outs = [
                self._recur((q, k, v, decay, beta), piece, step.real, kernel, step.state("state"))
                for piece in step.pieces
            ]
            heads = torch.cat(outs, dim=2)
            return step.unpack(self._projected(packed, heads))

    def _over(self, x: Tensor, real: Tensor | None, kernel: str) -> Tensor:
        """A whole sequence; padding is moved behind the real tokens of its row and back."""
        order = None
        if real is not None:
            order = (~real).int().argsort(dim=1, stable=True)[..., None].expand_as(x)
            real = real.sort(dim=1, descending=True, stable=True).values
            x = x.gather(1, order).masked_fill(~real[..., None], 0.0)
        inputs = F.pad(self._inputs(x), (0, 0, self.config.conv_kernel - 1, 0))
        arguments = self._arguments(x, inputs)
        heads = self._recur(arguments, slice(None), real, kernel)
        y = self._projected(x, heads)
        return y if order is None else torch.zeros_like(y).scatter(1, order, y)

    def _inputs(self, x: Tensor) -> Tensor:
        """``[B, T, C]``, what the convolution goes over."""
        return torch.cat(fused.linears(x, self.q_proj, self.k_proj, self.v_proj), dim=-1)

    def _arguments(self, x: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
        """q, k ``[B, G, T, K]``, v ``[B, H, T, V]``, decay and β ``[B, H, T]``.

        Args:
            x: ``[B, T, E]``.
            inputs: ``[B, conv_kernel − 1 + T, C]``.
        """
        c = self.config
        mixed = F.conv1d(inputs.mT, self.conv_weight[:, None], groups=c.channels).mT
        keys = c.num_key_heads * c.head_k_dim
        widths = [keys, keys, c.num_heads * c.head_v_dim]
        q, k, v = torch.split(F.silu(mixed), widths, dim=-1)
        q, k = (_unit(_heads(each, c.num_key_heads)) for each in (q, k))
        beta, decay = fused.linears(x, self.beta_proj, self.decay_proj)
        precise = torch.promote_types(x.dtype, torch.float32)
        steps = F.softplus(decay.to(precise) + self.dt_bias.to(precise))
        decay = -self.A_log.to(precise).exp() * steps
        return q, k, _heads(v, c.num_heads), decay.mT, beta.sigmoid().mT

    def _recur(
        self,
        arguments: tuple[Tensor, ...],
        piece: slice,
        real: Tensor | None,
        kernel: str,
        state: Tensor | None = None,
    ) -> Tensor:
        q, k, v, decay, beta = (each[:, :, piece] for each in arguments)
        return recurrence(
            q, k, v, decay=decay, beta=beta, delta=True, scale=self.scale, state=state,
            real=None if real is None else real[:, piece], in_place=state is not None,
            kernel=kernel,
        )  # fmt: skip

    def _projected(self, x: Tensor, heads: Tensor) -> Tensor:
        """The output of heads ``[B, H, T, V]``."""
        gates = linear(x, self.gate_proj)
        gates = F.silu(gates.to(torch.promote_types(gates.dtype, torch.float32)))
        normed = self.norm(heads.transpose(1, 2)).flatten(2)
        gated = _heads((normed * gates).to(x.dtype), self.config.num_heads)
        edited = self._edited(gated)
        return linear(edited.transpose(1, 2).flatten(2), self.o_proj)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.config.described}"


def _real(mask: Mask | None, x: Tensor, positions: Tensor | None, *, cached: bool) -> Tensor | None:
    """``[B, T]`` which tokens are no padding, None: all; refuses what a state cannot respect."""
    if mask is None:
        raise ValueError("a head with a state is causal: got mask=None; pass mask=Causal()")
    parts = list(mask.walk())
    if not any(type(part) is Causal for part in parts):
        raise ValueError(f"a head with a state is causal: got mask={mask!r}, without Causal()")
    B, T, _ = x.shape
    real = None
    if positions is not None and not cached and bool((positions < 0).any()):
        real = (positions >= 0).expand(B, T)
    for part in parts:
        if type(part) is KeyLengths and not cached:
            lengths = part.length.tensor(x.device)
            within = (torch.arange(T, device=x.device) < lengths[:, None]).expand(B, T)
            real = within if real is None else real & within
        elif type(part) not in (Causal, And):
            beside = " beside a cache" if type(part) is KeyLengths else ""
            raise UnsupportedError(
                f"a head with a state cannot hide single tokens: got {part!r}{beside}"
            )
    return real


def _heads(x: Tensor, heads: int) -> Tensor:
    """``[B, T, heads · D]`` as ``[B, heads, T, D]``."""
    B, T, width = x.shape
    return x.view(B, T, heads, width // heads).transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1, computed in float32 or more, as transformers' layers do."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


register_builder(GatedDeltaNetConfig, GatedDeltaNet.from_config)
