"""The position-wise feed-forward network.

    down(act(up(x)))                    Vaswani et al. 2017, eq. 2
    down(act(gate(x)) · up(x))          gated: SwiGLU with silu, GeGLU with gelu (Shazeer 2020)

Shape letters: B batch, T tokens, E embed size, F hidden size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import native
from polyhead._utils.checks import check_int, check_probability
from polyhead.config import FeedForwardConfig
from polyhead.config.feed_forward import Activation
from polyhead.errors import ConfigError
from polyhead.layers import fused
from polyhead.layers import linear as few_rows
from polyhead.layers.exact import ExactType
from polyhead.layers.fixed import Fixed
from polyhead.layers.lora import RowLora, split_rows
from polyhead.layers.registry import register_builder
from polyhead.native.arguments import ACTIVATIONS

Form = tuple[int, float, float, tuple[Tensor, Tensor] | None]
"""The last fields of ``native.arguments.Network``."""


def activate(x: Tensor, activation: str) -> Tensor:
    """Applies an activation without weights, by name."""
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "gelu":
        return F.gelu(x)
    if activation == "relu":
        return torch.relu(x)
    return _RARE[activation](x)


_RARE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: torch.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "mish": F.mish,
    "tanh": torch.tanh,
}


class XIELU(nn.Module):
    """An activation with two learned numbers (Huang 2024, arXiv 2411.13010; Apertus).

    x > 0:  a x² + x / 2            a = softplus(alpha_p)
    x ≤ 0:  b (eˣ − 1 − x) + x / 2  b = 1/2 + softplus(alpha_n)
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """a = b = 0.8."""
        nn.init.constant_(self.alpha_p, math.log(math.expm1(0.8)))
        nn.init.constant_(self.alpha_n, math.log(math.expm1(0.3)))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same."""
        above = F.softplus(self.alpha_p) * x * x + 0.5 * x
        # Not quite 0, as the model was trained: there the gradient of both sides is the same.
        low = torch.expm1(x.clamp(max=-1e-6)) - x
        return torch.where(x > 0, above, low * (0.5 + F.softplus(self.alpha_n)) + 0.5 * x)


_XIELU = ExactType(XIELU)


class FeedForward(Fixed):
    """Two projections with an activation between, or three with a gate.

    Args:
        embed_dim: Embedding size E of the residual stream.
        hidden_dim: Hidden size F of the network.
        activation: One of ``FeedForwardConfig``.
        gated: Multiply the activated ``gate_proj`` with ``up_proj``.
        bias: Whether every projection has a bias; default True, as in torch.
        dropout: On the hidden features, when training.

    Attributes:
        config: Everything but ``embed_dim`` as data; it cannot be assigned, nor ``gated`` and
            ``hidden_dim``.
        activation, dropout: As the next call takes them; they may be assigned.

    Raises:
        ValueError: An unknown activation or a dropout that is not a probability.
    """

    config_class: ClassVar[type[FeedForwardConfig]] = FeedForwardConfig
    _fixed = frozenset({"config", "gated", "hidden_dim"})

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        activation: Activation = "silu",
        gated: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        config = self.config_class(hidden_dim, activation, gated, bias, dropout)
        self._build(embed_dim, config)

    @classmethod
    def from_config(cls, embed_dim: int, config: FeedForwardConfig) -> Self:
        """The network that ``config`` describes."""
        network = cls.__new__(cls)
        Fixed.__init__(network)
        network._build(embed_dim, config)
        return network

    def _build(self, embed_dim: int, config: FeedForwardConfig) -> None:
        check_int("embed_dim", embed_dim, least=1, error=ConfigError)
        check_probability("dropout", config.dropout, error=ConfigError)
        self.config = config
        self.activation, self.gated, self.dropout = config.activation, config.gated, config.dropout
        self.hidden_dim, bias = config.hidden_dim, config.bias
        self._is_clamped = config.clamp is not None or config.up_offset != 0.0
        self._is_scaled = config.gate_scale != 1.0 or config.out_scale != 1.0
        self._cutoff = statistics.NormalDist().inv_cdf(config.sparsity) if config.sparsity else None
        gate = nn.Linear(embed_dim, self.hidden_dim, bias=bias) if self.gated else None
        self.register_module("gate_proj", gate)
        self.up_proj = nn.Linear(embed_dim, self.hidden_dim, bias=bias)
        self.down_proj = nn.Linear(self.hidden_dim, embed_dim, bias=config.has_down_bias)
        if config.activation == "xielu":
            self.xielu = XIELU()

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``."""
        modules = self._modules  # faster than attributes, which nn.Module looks up here
        up, gate, down = modules["up_proj"], modules["gate_proj"], modules["down_proj"]
        if RowLora in (type(up), type(gate), type(down)):
            # Not ``self(...)``: hooks are about the whole call.
            y = split_rows(partial(type(self).forward, self), x, up, gate, down)
            if y is not None:
                return y
        if (form := self.form(x)) is not None and not (self.training and self.dropout):
            y = few_rows.feed_forward(x, gate, up, down, form)
            if y is not None:
                return y
        hidden = (
            self._activated(few_rows.linear(x, self.up_proj))
            if gate is None
            else self._gated(x, gate)
        )
        if self.training and self.dropout:
            hidden = fused.dropped(hidden, self.dropout)
        out = few_rows.linear(hidden, self.down_proj)
        return out if self.config.out_scale == 1.0 else out * self.config.out_scale

    def form(self, x: Tensor) -> Form | None:
        """What native code takes beside the projections, for the dtype of ``x``.

        None if it does not know the activation or a factor, or if something watches or replaced
        it.
        """
        number, config = ACTIVATIONS.get(self.activation), self.config
        if number is None or self._is_scaled or self._cutoff is not None:
            return None
        if config.clamp is not None and config.clamp_of == "activated":
            return None
        clamp = math.inf if config.clamp is None else config.clamp
        if self.activation != "xielu":
            return number, clamp, config.up_offset, None
        bend = self._modules.get("xielu")
        if bend is None:
            raise ValueError(
                "activation 'xielu' has parameters of its own, which this network lacks: build a "
                f"network with it, or assign another (it was built with {config.activation!r})"
            )
        if not _XIELU.is_exact_and_unhooked(bend):
            return None
        above, below = bend.alpha_p, bend.alpha_n
        if not all(native.is_plain(each, x) and each.shape == (1,) for each in (above, below)):
            return None
        return number, clamp, config.up_offset, (above, below)

    def _gated(self, x: Tensor, gate: nn.Module) -> Tensor:
        """The activated gates times what they gate."""
        if not torch.is_grad_enabled():
            # Activated before the values are there, and in place: a fresh buffer of this size costs
            # more than the product, because its pages are touched for the first time.
            hidden = self._activated(gate(x))
            return hidden.mul_(self._clamped(self.up_proj(x)))
        gates, values = fused.linears(x, gate, self.up_proj)
        joined = None
        if not self._is_clamped and not self._is_scaled and self._cutoff is None:
            joined = fused.gated(gates, values, self.activation, self._activated)
        return self._activated(gates) * self._clamped(values) if joined is None else joined

    def _activated(self, x: Tensor) -> Tensor:
        if self.config.gate_scale != 1.0:
            x = x * self.config.gate_scale
        clamp, late = self.config.clamp, self.config.clamp_of == "activated"
        if clamp is not None and not late:
            x = x.clamp(max=clamp)
        if self._cutoff is not None:
            mean = x.mean(-1, keepdim=True)
            deviation = (x - mean).square().mean(-1, keepdim=True).sqrt()
            x = torch.relu(x - (mean + deviation * self._cutoff))
        made: Tensor = self.xielu(x) if self.activation == "xielu" else activate(x, self.activation)
        return made if clamp is None or not late else made.clamp(max=clamp)

    def _clamped(self, values: Tensor) -> Tensor:
        """What a gate multiplies."""
        if not self._is_clamped:
            return values
        if (most := self.config.clamp) is not None:
            values = values.clamp(-most, most)
        return values + self.config.up_offset

    def extra_repr(self) -> str:
        return f"activation={self.activation}, gated={self.gated}, dropout={self.dropout}"


register_builder(FeedForwardConfig, FeedForward.from_config)
