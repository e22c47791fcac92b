"""A model's configuration: plain data, composed of parts, that round-trips through JSON.

``TransformerConfig`` says everything that a Transformer's arithmetic depends on and nothing about
where it came from: no model name is ever tested. Every layer has its own ``LayerConfig``, so mixes
of local and global attention (Gemma) or of head counts need no special case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from polyhead.config.data import Data
from polyhead.config.layer import LayerConfig
from polyhead.config.norm import NormConfig
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class EmbeddingConfig(Data):
    """Token embedding, with absolute positions and segments where the family has them."""

    positions: Literal["learned", "sinusoidal"] | None = None
    num_segments: int = 0  # BERT's token types
    norm: NormConfig | None = None  # a norm over the sum (BERT)
    scale: float = 1.0  # sqrt(embed_dim) in the 2017 paper and Gemma
    dropout: float = 0.0


@dataclass(frozen=True)
class TransformerConfig(Data):
    """An encoder, a decoder or an encoder-decoder.

    ``layers`` are the decoder's layers (the encoder's, for ``"encoder"``); ``encoder_layers`` the
    encoder's of an ``"encoder-decoder"``. A decoder's self-attention is causal; an encoder's is
    not. ``head``: ``"tied"`` logits with the embedding, ``"untied"`` logits with their own matrix,
    None hidden states only.
    """

    kind: Literal["decoder", "encoder", "encoder-decoder"]
    vocab_size: int
    embed_dim: int
    max_positions: int
    layers: tuple[LayerConfig, ...]
    encoder_layers: tuple[LayerConfig, ...] = ()
    embedding: EmbeddingConfig = EmbeddingConfig()
    final_norm: NormConfig | None = field(default_factory=NormConfig)
    head: Literal["tied", "untied"] | None = "tied"
    head_bias: bool = False
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1: got {value!r}")
        if self.kind not in ("decoder", "encoder", "encoder-decoder"):
            raise ConfigError(
                f"kind must be 'decoder', 'encoder' or 'encoder-decoder': got {self.kind!r}"
            )
        if not self.layers:
            raise ConfigError("layers must hold at least one layer: got none")
        if (self.kind == "encoder-decoder") != bool(self.encoder_layers):
            raise ConfigError(
                f"encoder_layers belong to kind 'encoder-decoder' and to no other: got "
                f"{len(self.encoder_layers)} encoder layers with kind={self.kind!r}"
            )
