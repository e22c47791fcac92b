"""A feed-forward network as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from polyhead.config.data import check_choice, check_positive, check_share, check_whole
from polyhead.config.layout import Network, shared
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError

Activation = Literal[
    "relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "mish", "tanh", "xielu"
]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


@dataclass(frozen=True)
class FeedForwardConfig(Network, kind="plain"):
    """A position-wise feed-forward network; ``gated`` multiplies by a second projection (GLU).

    silu + gated is SwiGLU, gelu or gelu_tanh + gated is GeGLU (Shazeer 2020). ``"gelu_tanh"`` is
    the approximation that config.json calls gelu_new, gelu_fast or gelu_pytorch_tanh;
    ``"quick_gelu"`` x · sigmoid(1.702 x); ``"relu2"`` relu(x)²; ``"xielu"`` has two learned numbers
    for each layer (Apertus).

    ``clamp``: what enters the activation is at most ``clamp``, and what a gate multiplies lies
    within ±clamp; ``up_offset`` is then added to it. GPT-OSS's experts are gated quick_gelu with
    clamp 7 and up_offset 1. ``clamp_of`` ``"activated"``: what the activation gives is bounded in
    place of what enters it (Step 3.7).

    ``down_bias``: whether the last projection has a bias, where the others differ (GTE); None: as
    they have.

    ``gate_scale`` is a factor of what enters the activation, ``out_scale`` of the output
    (Falcon-H1).

    ``sparsity``: share of what enters the activation that is set to zero in each token, if its
    numbers are normal: of each that is above mean + Φ⁻¹(sparsity) · deviation the excess is left
    (Gemma 3n).
    """

    hidden_dim: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    dropout: float = 0.0
    clamp: float | None = None
    up_offset: float = 0.0
    down_bias: bool | None = None
    gate_scale: float = 1.0
    out_scale: float = 1.0
    sparsity: float = 0.0
    clamp_of: Literal["entering", "activated"] = "entering"

    def __post_init__(self) -> None:
        check_whole("hidden_dim", self.hidden_dim)
        check_choice("activation", self.activation, ACTIVATIONS)
        if self.clamp is not None:
            check_positive("clamp", self.clamp)
        check_share("sparsity", self.sparsity)
        check_choice("clamp_of", self.clamp_of, ("entering", "activated"))
        if self.clamp_of == "activated" and not self.gated:
            raise ConfigError("clamp_of 'activated' needs a gated network: got gated=False")

    @property
    def has_down_bias(self) -> bool:
        """Whether the last projection has a bias."""
        return self.bias if self.down_bias is None else self.down_bias

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        F, E, into = self.hidden_dim, embed_dim, 2 if self.gated else 1
        yield ParameterGroup("feed_forward", F, (into + 1) * E)
        if self.bias:
            yield ParameterGroup("feed_forward", F, into, multiplied=False)
        if self.has_down_bias:
            yield ParameterGroup("feed_forward", 1, E, multiplied=False)
        if self.activation == "xielu":
            yield ParameterGroup("feed_forward", 1, 2, multiplied=False)

    def peak_activation_elements(self, embed_dim: int, ranks: int) -> int:
        F, E = shared(self.hidden_dim, ranks), embed_dim
        return max((4 if self.sparsity else 2) * F, F + E)

    def widths(self) -> Mapping[str, int]:
        return {"hidden_dim": self.hidden_dim}
