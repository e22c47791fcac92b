"""A model's configuration: plain data, composed of parts, that round-trips through JSON.

``TransformerConfig`` says everything that a Transformer's arithmetic depends on and nothing about
where it came from: no model name is ever tested. Every layer has its own ``LayerConfig``, so mixes
of local and global attention (Gemma) or of head counts need no special case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from polyhead.config.attention import AttentionConfig, RelativeBiasConfig
from polyhead.config.data import Data, check_choice, check_positive, check_whole
from polyhead.config.disentangled import DISTANCES, RelativeEmbeddingConfig
from polyhead.config.embedding import EmbeddingConfig, SinusoidConfig
from polyhead.config.feed_forward import FeedForwardConfig
from polyhead.config.funnel import FunnelConfig
from polyhead.config.head import HeadTransformConfig, TaskHeadConfig, last_dim
from polyhead.config.initial import InitialConfig
from polyhead.config.layer import LayerConfig
from polyhead.config.layout import EMBEDDED, EMBEDDING, GLOBAL_TOKENS, SEGMENTS, TOKENS
from polyhead.config.norm import NormConfig
from polyhead.config.per_layer import PerLayerEmbeddingConfig
from polyhead.config.streams import StreamsConfig
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class EncoderConfig(Data):
    """Where the encoder of an encoder-decoder differs from its decoder; None is the decoder's.

    Attributes:
        embedding: The encoder's own positions, norm and the like (BART, Whisper); None: one
            embedding module for both (T5).
        own_tokens: With an ``embedding``: a token table of its own (T5Gemma, some Marian); else
            the decoder's table serves both.
        vocab_size: Size of its own token table.
        embed_dim: Width of the encoder; the decoder's cross-attention reads it.
        max_positions: Length of what the encoder reads.
        relative_bias: T5's bias in the encoder's layers (not taken from the decoder).
        weights_of: As of ``TransformerConfig``, for the encoder's layers.
    """

    embedding: EmbeddingConfig | None = None
    own_tokens: bool = False
    vocab_size: int | None = None
    embed_dim: int | None = None
    max_positions: int | None = None
    relative_bias: RelativeBiasConfig | None = None
    weights_of: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim", "max_positions"):
            if getattr(self, name) is not None:
                check_whole(f"encoder {name}", getattr(self, name))
        own = self.own_tokens or self.embed_dim is not None or self.vocab_size is not None
        if own and self.embedding is None:
            raise ConfigError(
                "an encoder with its own tokens, vocab_size or embed_dim needs an embedding: got "
                "None"
            )
        if self.vocab_size is not None and not self.own_tokens:
            raise ConfigError("encoder vocab_size needs own_tokens: got own_tokens=False")


@dataclass(frozen=True)
class TransformerConfig(Data):
    """An encoder, a decoder or an encoder-decoder.

    ``layers`` are the decoder's layers (the encoder's, for ``"encoder"``); ``encoder_layers`` the
    encoder's of an ``"encoder-decoder"``. A decoder's self-attention is causal; an encoder's is
    not. ``head``: ``"tied"`` logits with the embedding, ``"untied"`` logits with their own matrix,
    None hidden states only.

    Attributes:
        encoder: Where an encoder-decoder's encoder differs from its decoder.
        relative_bias: T5's bias, shared by ``layers`` (MPNet has it in an encoder).
        weights_of: For each layer the number of the layer whose weights it has (ALBERT: all 0);
            empty: its own.
        head_transforms: Before the logits, one after the other (BERT's masked tokens, OPT-350m's
            projection).
        head_beside: Columns of the head's own beside those of the matrix that ``head`` names
            (MobileBERT, whose hidden states have more features than its embedding).
        logit_scale: Factor of the logits, before the softcap (Cohere; 1 / logits_scaling of
            Granite; 1/√E of T5 with a tied head).
        task: Classes or pooled states in place of logits; only without ``head``.
        per_layer_embedding: Where layers read vectors of their own (``per_layer_input``).
        relative_embedding: Where the layers of an encoder score distances (``disentangled``).
        unused_ids: The last so many of the vocabulary's ids are no tokens: there are rows for them,
            and no logits (Inkling).
        funnel: Where an encoder's layers are blocks that read ever fewer tokens.
        initial: How new weights are drawn. Configurations that differ in nothing else are equal.
    """

    kind: Literal["decoder", "encoder", "encoder-decoder"]
    vocab_size: int
    embed_dim: int
    max_positions: int
    layers: tuple[LayerConfig, ...]
    encoder_layers: tuple[LayerConfig, ...] = ()
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    final_norm: NormConfig | None = field(default_factory=NormConfig)
    head: Literal["tied", "untied"] | None = "tied"
    head_bias: bool = False
    head_beside: int = 0
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    encoder: EncoderConfig = EncoderConfig()
    relative_bias: RelativeBiasConfig | None = None
    weights_of: tuple[int, ...] = ()
    head_transforms: tuple[HeadTransformConfig, ...] = ()
    task: TaskHeadConfig | None = None
    logit_scale: float = 1.0
    unused_ids: int = 0
    per_layer_embedding: PerLayerEmbeddingConfig | None = None
    relative_embedding: RelativeEmbeddingConfig | None = None
    funnel: FunnelConfig | None = None
    initial: InitialConfig = field(default=InitialConfig(), compare=False)

    def __post_init__(self) -> None:
        read = self.embedding.frontend is None
        check_whole("vocab_size", self.vocab_size, least=1 if read else 0)
        for name in ("embed_dim", "max_positions"):
            check_whole(name, getattr(self, name))
        check_choice("kind", self.kind, ("decoder", "encoder", "encoder-decoder"))
        check_choice("head", self.head, (None, "tied", "untied"))
        check_positive("logit_scale", self.logit_scale)
        check_whole("unused_ids", self.unused_ids, least=0)
        apart = self.head is None or self.head_bias or self.head_beside
        if self.unused_ids and (apart or self.unused_ids >= self.vocab_size):
            raise ConfigError(
                f"unused_ids need a head that is one matrix, of more than {self.unused_ids} ids: "
                f"got head={self.head!r}, head_bias={self.head_bias}, head_beside="
                f"{self.head_beside}, vocab_size={self.vocab_size}"
            )
        if self.logit_softcap is not None:
            check_positive("logit_softcap", self.logit_softcap)
        if not self.layers:
            raise ConfigError("layers must hold at least one layer: got none")
        if (self.kind == "encoder-decoder") != bool(self.encoder_layers):
            raise ConfigError(
                f"encoder_layers belong to kind 'encoder-decoder' and to no other: got "
                f"{len(self.encoder_layers)} encoder layers with kind={self.kind!r}"
            )
        if self.kind != "encoder-decoder" and self.encoder != EncoderConfig():
            raise ConfigError(f"encoder belongs to kind 'encoder-decoder': got kind={self.kind!r}")
        if self.embedding.prefix:
            raise ConfigError("a prefix belongs to the embedding of an encoder-decoder's encoder")
        _check_soft_prompt(self)
        _check_per_layer(self)
        _check_distances(self)
        _check_streams(self)
        _check_funnel(self)
        own = self.encoder.embedding
        if (self.kind != "encoder" and self.embedding.reads_lengths) or (own and own.reads_lengths):
            raise ConfigError(
                "token_dropout and neighbours read a whole text at once: they belong to kind "
                f"'encoder', got kind={self.kind!r}"
            )
        _check_reads("layers", self.layers)
        _check_reads("encoder_layers", self.encoder_layers)
        for name in ("layers", "encoder_layers"):
            _check_states(name, getattr(self, name))
        _check_sharing("weights_of", self.weights_of, self.layers)
        _check_sharing("encoder weights_of", self.encoder.weights_of, self.encoder_layers)
        _check_relative_bias("relative_bias", self.relative_bias, self.layers)
        _check_relative_bias(
            "encoder relative_bias", self.encoder.relative_bias, self.encoder_layers
        )
        self._check_head()

    @classmethod
    def vanilla(
        cls,
        vocab_size: int,
        embed_dim: int = 512,
        num_layers: int = 6,
        num_heads: int = 8,
        hidden_dim: int = 2048,
        *,
        max_positions: int = 1024,
        dropout: float = 0.1,
        sinusoids: Literal["halves", "interleaved"] = "halves",
        pad_token_id: int | None = None,
        eos_token_id: int = 0,
    ) -> Self:
        """The encoder-decoder of Vaswani et al. 2017: sinusoids, norms last, ReLU, one embedding.

            model = ph.Transformer(ph.TransformerConfig.vanilla(8_000, embed_dim=256))

        Defaults are the paper's base model. Like Marian's it has a bias over the logits, and texts
        begin with the padding token. With ``sinusoids="halves"`` it can be saved as a Marian
        directory, which transformers reads.

        Args:
            vocab_size: Tokens, of both languages.
            embed_dim: Embedding size E of the residual stream.
            num_layers: Layers of the encoder, and of the decoder.
            num_heads: Heads of each attention.
            hidden_dim: Hidden size of the feed-forward networks.
            max_positions: Tokens of a source or a text at most.
            dropout: Dropout probability in training.
            sinusoids: ``"interleaved"``: sin, cos, sin, cos … as the paper writes them;
                ``"halves"``: all sin, then all cos, which is the same model with its features in
                another order.
            pad_token_id: Default the last token.
            eos_token_id: Ends a text.

        Raises:
            ConfigError: Sizes or ids that do not go together.
        """
        check_whole("num_heads", num_heads)
        check_whole("num_layers", num_layers)
        check_whole("embed_dim", embed_dim)
        check_whole("vocab_size", vocab_size)
        pad = vocab_size - 1 if pad_token_id is None else pad_token_id
        for name, token in (("pad_token_id", pad), ("eos_token_id", eos_token_id)):
            check_whole(name, token, least=0)
            if token >= vocab_size:
                raise ConfigError(f"{name} must be below vocab_size={vocab_size}: got {token}")
        if embed_dim % num_heads or embed_dim % 2:
            raise ConfigError(
                f"embed_dim must be even and a multiple of num_heads={num_heads}: got {embed_dim}"
            )
        attention = AttentionConfig(
            num_heads, num_heads, embed_dim // num_heads, qkv_bias=True, out_bias=True
        )
        network = FeedForwardConfig(hidden_dim, "relu", gated=False, bias=True)
        norm = NormConfig("layernorm", bias=True)
        encoder = LayerConfig(attention, network, norm, "post", dropout=dropout)
        embedding = EmbeddingConfig(
            "sinusoidal",
            scale=math.sqrt(embed_dim),
            dropout=dropout,
            sinusoid=SinusoidConfig(sinusoids),
        )
        return cls(
            "encoder-decoder",
            vocab_size,
            embed_dim,
            max_positions,
            (replace(encoder, cross_attention=attention),) * num_layers,
            (encoder,) * num_layers,
            embedding,
            final_norm=None,
            head_bias=True,
            bos_token_id=pad,
            eos_token_ids=(eos_token_id,),
            pad_token_id=pad,
            encoder=EncoderConfig(embedding),
        )

    @property
    def num_logits(self) -> int:
        """Logits of a token."""
        return self.vocab_size - self.unused_ids

    @property
    def streams(self) -> StreamsConfig | None:
        """The residual streams between ``layers``, the same in all; None: there is one."""
        return self.layers[0].streams

    @property
    def hidden_dim(self) -> int:
        """Features behind ``layers``, which the final norm and the head read."""
        E, streams = self.embed_dim, self.streams
        return E if streams is None else streams.last_dim(E)

    @property
    def reads_embedded(self) -> bool:
        """Whether layers read what the embedding gives, beside the stream."""
        return any(EMBEDDED in layer.attention.reads for layer in self.layers)

    @property
    def reads_tokens(self) -> bool:
        """Whether layers read the ids of the call."""
        read = (layer.reads_tokens or TOKENS in layer.attention.reads for layer in self.layers)
        return any(read)

    def _check_head(self) -> None:
        if self.task is not None and self.head is not None:
            raise ConfigError(f"a task head needs head=None: got head={self.head!r}")
        check_whole("head_beside", self.head_beside, least=0)
        if self.head is None and (self.head_transforms or self.head_bias or self.head_beside):
            raise ConfigError(
                "head_transforms, head_bias and head_beside need a head: got head=None"
            )
        if self.head is None:
            return
        if self.embedding.frontend is not None and self.kind != "encoder-decoder":
            raise ConfigError(f"patches and sound have no logits: got head={self.head!r}")
        size = last_dim(self.hidden_dim, self.head_transforms)
        projection = self.embedding.projection
        table = self.embed_dim if projection is None else projection.dim
        if any(each.tied for each in self.head_transforms):
            first, made = self.head_transforms[0], self.embedding.projected_dim
            if len(self.head_transforms) > 1 or not made or first.dim != made:
                raise ConfigError(
                    f"a tied head transform is the only one, of the {made} features that the "
                    f"embedding projects: got {list(self.head_transforms)}"
                )
        if self.head == "tied" and size - self.head_beside != table:
            raise ConfigError(
                f"a tied head needs hidden states of the embedding's size {table}: got {size}; "
                "give the last of head_transforms that dim, or head_beside what is beyond it"
            )
        if self.head == "untied" and self.head_beside >= size:
            raise ConfigError(f"head_beside must be below {size} features: got {self.head_beside}")


def _check_soft_prompt(config: TransformerConfig) -> None:
    """Raises unless a soft prompt is of an encoder whose layers know tokens by attention alone."""
    both = config.embedding, config.encoder.embedding
    if all(each is None or each.soft_prompt is None for each in both):
        return
    kinds = sorted({layer.attention.kind for layer in config.layers})
    beside = config.per_layer_embedding is not None or config.reads_tokens
    if config.kind != "encoder" or kinds != ["heads"] or beside:
        raise ConfigError(
            "a soft prompt belongs to kind 'encoder' with attention of kind 'heads', and nothing "
            f"that reads ids in its layers: got kind={config.kind!r}, attention {kinds}"
        )


def _check_per_layer(config: TransformerConfig) -> None:
    """Raises unless the layers that read vectors of their own are given vectors of that size."""
    made = config.per_layer_embedding
    for i, layer in enumerate(config.layers):
        read = layer.per_layer_input
        if read is not None and (made is None or made.dim != read.dim):
            raise ConfigError(
                f"layers: layer {i} reads per_layer_input of {read.dim} features, which "
                f"per_layer_embedding must make: got {made}"
            )
    if any(layer.per_layer_input is not None for layer in config.encoder_layers):
        raise ConfigError("encoder_layers read no per_layer_input: there is none in an encoder")
    if any(layer.reads_tokens for layer in config.encoder_layers):
        raise ConfigError("encoder_layers have no networks that read ids: these are the decoder's")


def _check_distances(config: TransformerConfig) -> None:
    """Raises unless layers that score distances, or are convolved, belong to such an encoder."""
    known = config.relative_embedding
    for i, layer in enumerate((*config.layers, *config.encoder_layers)):
        if layer.convolution is not None and config.kind != "encoder":
            raise ConfigError(
                "a convolution beside a layer sees tokens ahead: it belongs to kind 'encoder', got "
                f"kind={config.kind!r}"
            )
        read = layer.attention.reads
        if DISTANCES not in read and SEGMENTS not in read:
            continue
        if config.kind != "encoder":
            raise ConfigError(
                f"layers that score distances belong to kind 'encoder': got kind={config.kind!r}"
            )
        scored = getattr(layer.attention, "num_distances", None)
        if DISTANCES in read and (known is None or known.num_distances != scored):
            raise ConfigError(
                f"layers: layer {i} scores {scored} distances, which relative_embedding must "
                f"have: got {known}"
            )


def _check_funnel(config: TransformerConfig) -> None:
    """Raises unless a funnel has layers of its kind, and no other model has."""
    layers = (*config.layers, *config.encoder_layers)
    count = sum(layer.attention.kind == "funnel" for layer in layers)
    wanted = 0 if config.funnel is None else len(config.funnel.strides)
    plain = config.funnel is None or (config.kind == "encoder" and config.streams is None)
    if (count, len(layers) if wanted else 0) != (wanted, wanted) or not plain:
        raise ConfigError(
            f"a funnel's layers are those of an encoder with one residual stream, {wanted} with "
            f"FunnelAttentionConfig: got {count} of {len(layers)} with kind={config.kind!r}"
        )


def _check_streams(config: TransformerConfig) -> None:
    """Raises unless all layers have the same residual streams."""
    found = [layer.streams for layer in config.layers]
    between = [None if each is None else each.between for each in found]
    for i, layer in enumerate(config.layers):
        if between[i] != between[0]:
            raise ConfigError(
                f"layers must have the same streams: got {config.streams} in layer 0, "
                f"{layer.streams} in layer {i}"
            )
    if any(layer.streams is not None for layer in config.encoder_layers):
        raise ConfigError("encoder_layers have one residual stream: got streams")


_OF_CALL = (DISTANCES, EMBEDDED, GLOBAL_TOKENS, SEGMENTS, TOKENS)
"""What the call and the embedding hand on."""


def _check_reads(name: str, layers: tuple[LayerConfig, ...]) -> None:
    """Raises unless what every layer reads is handed on by an earlier one."""
    for i, layer in enumerate(layers):
        for what, source in layer.attention.reads.items():
            if source == EMBEDDING and what in _OF_CALL:
                continue
            if not 0 <= source < i or what not in layers[source].attention.hands_on:
                raise ConfigError(
                    f"{name}: layer {i} reads the {what} of layer {source}, which must come before "
                    f"it and hand on its {what}"
                )
            _check_source(f"{name}: layer {i}", what, layer, layers[source])
        for what, owner in layer.attention.shared_weights.items():
            if not 0 <= owner < i or what in layers[owner].attention.shared_weights:
                raise ConfigError(
                    f"{name}: layer {i} has the {what} of layer {owner}, which must come before it "
                    "and have its own"
                )
            _check_source(f"{name}: layer {i}", what, layer, layers[owner])
    given = [layer.shortcut is not None for layer in layers]
    joined = [layer.joins_shortcut for layer in layers]
    if [False, *given] != [*joined, False]:
        raise ConfigError(
            f"{name}: what a shortcut gives joins the stream behind the next layer: got shortcuts "
            f"in {given}, joins_shortcut={joined}"
        )


def _check_states(name: str, layers: tuple[LayerConfig, ...]) -> None:
    """Raises unless the state that a network reads is handed on by that of the layer before."""
    given = 0
    for i, layer in enumerate(layers):
        network = layer.feed_forward
        if network is not None and network.reads_dim not in (0, given):
            raise ConfigError(
                f"{name}: the network of layer {i} reads a state of {network.reads_dim} features, "
                f"which the one of the layer before must hand on: it hands on {given or 'none'}"
            )
        given = 0 if network is None else network.state_dim


def _check_source(where: str, what: str, layer: LayerConfig, source: LayerConfig) -> None:
    try:
        layer.attention.check_source(what, source.attention)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_sharing(name: str, weights_of: tuple[int, ...], layers: tuple[LayerConfig, ...]) -> None:
    """Raises unless every layer has weights of one that has its own and is configured alike."""
    if not weights_of:
        return
    if len(weights_of) != len(layers):
        raise ConfigError(
            f"{name} must have a number for each of the {len(layers)} layers: got {len(weights_of)}"
        )
    for index, owner in enumerate(weights_of):
        check_whole(name, owner, least=0)
        if owner > index or weights_of[owner] != owner:
            raise ConfigError(
                f"{name}: layer {index} must have its own weights or those of an earlier layer "
                f"that has its own: got {owner}"
            )
        if layers[owner] != layers[index]:
            raise ConfigError(f"{name}: layers {owner} and {index} are configured differently")


def _check_relative_bias(
    name: str, config: RelativeBiasConfig | None, layers: tuple[LayerConfig, ...]
) -> None:
    heads = {layer.attention.num_heads for layer in layers}
    if config is not None and len(heads) != 1:
        raise ConfigError(f"{name} needs layers of one number of heads: got {sorted(heads)}")
