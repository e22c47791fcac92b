"""What a plan needs to know of a model: its layers as shapes, as plain data.

An attention is described by the configuration of its layer (``AttentionConfig``,
``LatentAttentionConfig``), so that there is one meaning of every field. Nothing here knows where a
description came from.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    HeadLayout,
    LayerConfig,
    MixtureConfig,
    Network,
    NormConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError

AttentionShape = HeadLayout


@dataclass(frozen=True)
class FeedForwardShape:
    """A feed-forward network, or a mixture of ``experts`` of them.

    Attributes:
        hidden_dim: Hidden features of the network, or of one routed expert.
        gated: Three projections instead of two.
        bias: Of every projection.
        experts: Routed experts; 1: a plain network without a router.
        experts_per_token: How many of them a token visits.
        shared_hidden_dim: Hidden features of the experts that every token visits, together.
        shared_bias: Biases of their projections.
        router_bias: A number per expert beside the router's weight.
        shared_gate: A gate on the shared experts.
    """

    hidden_dim: int
    gated: bool = True
    bias: bool = False
    experts: int = 1
    experts_per_token: int = 1
    shared_hidden_dim: int = 0
    shared_bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.experts:
            raise ConfigError(
                f"experts_per_token must be 1 to experts={self.experts}: got "
                f"{self.experts_per_token}"
            )


@dataclass(frozen=True)
class LayerShape:
    """One layer; ``norms`` counts those over the embedding, not those inside of attention."""

    attention: AttentionShape
    feed_forward: FeedForwardShape
    cross_attention: AttentionConfig | None = None
    norms: int = 2


@dataclass(frozen=True)
class Architecture:
    """A Transformer as its costs see it.

    Attributes:
        name: For people.
        kind: A decoder's self-attention is causal; an encoder's is not, and it keeps no cache.
        layers: The decoder's (the encoder's, of an encoder).
        encoder_layers: The encoder's, of an encoder-decoder.
        max_positions: Tokens that the model was made for, or None where nobody says.
        learned_positions: Rows of a table of learned positions; 0: there is none.
        segments: Rows of a table of segments.
        norm_bias: Whether the norms over the embedding have biases.
        embedding_norms: Norms right after the embedding.
        final_norms: Norms after the last layer of each stack.
        head: As in ``TransformerConfig``.
        pooler: A square projection of one token, with bias (BERT).
        extra_attention: Parameters of attention that no layer's shape shows (T5's position biases).
    """

    name: str
    kind: Literal["decoder", "encoder", "encoder-decoder"]
    vocab_size: int
    embed_dim: int
    layers: tuple[LayerShape, ...]
    encoder_layers: tuple[LayerShape, ...] = ()
    max_positions: int | None = None
    learned_positions: int = 0
    segments: int = 0
    norm_bias: bool = False
    embedding_norms: int = 0
    final_norms: int = 1
    head: Literal["tied", "untied"] | None = "tied"
    head_bias: bool = False
    pooler: bool = False
    extra_attention: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As plain dicts, lists, numbers, strings and None."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, config: TransformerConfig, name: str = "TransformerConfig") -> Architecture:
        """The shapes of a model that ``Transformer(config)`` builds."""
        embedding = config.embedding
        bias = _has_bias(config.layers[0].norm)
        final = 0 if config.final_norm is None else 1 + bool(config.encoder_layers)
        return cls(
            name=name,
            kind=config.kind,
            vocab_size=config.vocab_size,
            embed_dim=config.embed_dim,
            layers=tuple(_shape_of(layer) for layer in config.layers),
            encoder_layers=tuple(_shape_of(layer) for layer in config.encoder_layers),
            max_positions=config.max_positions,
            learned_positions=config.max_positions + embedding.position_offset
            if embedding.positions == "learned"
            else 0,
            segments=embedding.num_segments,
            norm_bias=bias,
            embedding_norms=int(embedding.norm is not None),
            final_norms=final,
            head=config.head,
            head_bias=config.head_bias and config.head is not None,
        )


def _shape_of(layer: LayerConfig) -> LayerShape:
    return LayerShape(
        attention=layer.attention,
        feed_forward=_network_of(layer.feed_forward),
        cross_attention=layer.cross_attention,
        norms=layer.norms,
    )


def _network_of(config: Network) -> FeedForwardShape:
    if isinstance(config, FeedForwardConfig):
        return FeedForwardShape(config.hidden_dim, gated=config.gated, bias=config.bias)
    if not isinstance(config, MixtureConfig):
        raise ConfigError(f"a plan knows no {type(config).__name__}")
    expert, shared = config.expert, config.shared
    return FeedForwardShape(
        expert.hidden_dim,
        gated=expert.gated,
        bias=expert.bias,
        experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        shared_hidden_dim=0 if shared is None else shared.hidden_dim,
        shared_bias=shared is not None and shared.bias,
        router_bias=config.choice_bias,
    )


def _has_bias(norm: NormConfig) -> bool:
    return norm.type == "layernorm" and norm.bias
