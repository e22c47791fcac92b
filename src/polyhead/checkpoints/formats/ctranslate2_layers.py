"""What the variables of a CTranslate2 file mean: a configuration, and polyhead's names.

The layout is one for all families. Where norms stand, the activation, the number of heads and the
like are variables without dimensions; sizes are those of the matrices. The rows of a projection
lie as ``[q; k; v]``, in cross-attention as ``[q]`` and ``[k; v]``.

Source: ``python/ctranslate2/specs/transformer_spec.py`` and ``src/layers/`` of OpenNMT/CTranslate2.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from polyhead.checkpoints.formats.ctranslate2_file import CTranslate2File
from polyhead.checkpoints.formats.ctranslate2_names import table
from polyhead.checkpoints.formats.ctranslate2_positions import positions_of
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    AudioConfig,
    EmbeddingConfig,
    EncoderConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    RelativeBiasConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.config.feed_forward import Activation
from polyhead.errors import CheckpointError, ConfigError
from polyhead.families.common.keys import Keys
from polyhead.families.common.tensors import Tensors

_ACTIVATIONS: tuple[Activation, ...] = (
    "relu",
    "gelu_tanh",
    "silu",
    "gelu",
    "quick_gelu",
    "tanh",
)
"""Activations by CTranslate2's numbers; no family's network uses the sigmoid, 6."""

_LAYER = re.compile(r"(?:encoder|decoder)/layer_(\d+)/.+")
_PARALLEL = ("shared_layer_norm", "input_layer_norm", "post_attention_layer_norm")
_TABLE = "position_encodings/encodings"
_MOST_LAYERS = 10_000
_UNLIMITED = 1 << 20
"""Positions of a model that has no table of them."""

# They select the heads that CTranslate2 reports, or belong to an unused option.
_HARMLESS = frozenset(
    f"{side}/{name}"
    for side in ("encoder", "decoder")
    for name in (
        "alignment_layer",
        "alignment_heads",
        "embeddings_merge",
        "multi_query_attention",
        "scale_alibi",
        "alibi_use_positive_positions",
    )
)


class Stack:
    """The encoder or the decoder of a file.

    Args:
        file: the opened model.bin.
        keys: its variables without dimensions.
        side: ``"encoder"`` or ``"decoder"``.
        eps: epsilon of its norms; None: 1e-5, and 1e-6 of those without a bias.
    """

    def __init__(self, file: CTranslate2File, keys: Keys, side: str, eps: float | None) -> None:
        self.file, self.keys, self.side, self._eps = file, keys, side, eps
        self.sound = self.has("conv1/weight")
        self.depth = self._depth()

    def has(self, name: str) -> bool:
        """Whether there is a variable of that name."""
        return f"{self.side}/{name}" in self.file.variables

    def shape(self, name: str, rank: int) -> tuple[int, ...]:
        """The shape of a variable that must have ``rank`` dimensions.

        Raises:
            CheckpointError: it is missing, or has another number of dimensions.
        """
        found = self.file.variables.get(f"{self.side}/{name}")
        if found is None or len(found.shape) != rank:
            got = "it is missing" if found is None else f"got shape {list(found.shape)}"
            raise CheckpointError(
                f"{self.file.path}: variable '{self.side}/{name}' must have {rank} dimensions: "
                f"{got}"
            )
        return found.shape

    @property
    def tokens(self) -> str:
        """The name of the token table's variable, without encoder or decoder."""
        return "embeddings_0/weight" if self.has("embeddings_0/weight") else "embeddings/weight"

    @property
    def embed_dim(self) -> int:
        return self.shape("conv2/weight", 3)[0] if self.sound else self.shape(self.tokens, 2)[1]

    @property
    def max_positions(self) -> int:
        return self.shape(_TABLE, 2)[0] if self.has(_TABLE) else _UNLIMITED

    def norm(self, name: str) -> NormConfig | None:
        """The configuration of the norm with this name; None if there is none."""
        if not self.has(f"{name}/gamma"):
            return None
        if self.has(f"{name}/beta"):
            return NormConfig("layernorm", eps=1e-5 if self._eps is None else self._eps, bias=True)
        added = self._flag(f"{name}/layer_norm_use_residual", False)  # Gemma's weight, less 1
        eps = 1e-6 if self._eps is None else self._eps
        return NormConfig("rmsnorm", eps=eps, weight_offset=float(added))

    def embedding(self) -> EmbeddingConfig:
        """The configuration of the embedding."""
        if self.sound:
            return EmbeddingConfig(
                "learned", frontend=AudioConfig(self.shape("conv1/weight", 3)[1])
            )
        if self.has(_TABLE):
            self.shape(_TABLE, 2)
            found = positions_of(self.file.tensor(f"{self.side}/{_TABLE}"))
        elif (
            self.relative_bias() is not None
            or self._rotary("layer_0/self_attention")
            or self._flag("alibi", False)
        ):
            found = EmbeddingConfig()
        else:
            found = positions_of(None)
        return replace(found, norm=self.norm("layernorm_embedding"), scale=self._scale())

    def layers(self) -> tuple[LayerConfig, ...]:
        """Every layer's configuration."""
        activation = _ACTIVATIONS[3]
        pre = True
        if not self.sound:  # omitted in the encoder, where it never varies
            pre = self._flag("pre_norm", True)
            number = self.keys.whole(f"{self.side}/activation", 0)
            if not 0 <= number < len(_ACTIVATIONS):
                raise self.keys.refused(f"{self.side}/activation", number, "0 to 5")
            activation = _ACTIVATIONS[number]
        heads = self.keys.whole(f"{self.side}/num_heads")
        return tuple(self._layer(f"layer_{i}", heads, pre, activation) for i in range(self.depth))

    def relative_bias(self) -> RelativeBiasConfig | None:
        """T5's relative bias: one table for all layers, or (UMT5) one for each."""
        first = "layer_0/self_attention/relative_attention_bias"
        if not self.has(first):
            return None
        distance, apart = 0, False
        for i in range(self.depth):
            start = f"layer_{i}/self_attention/relative_attention"
            self.shape(f"{start}_bias", 2)
            apart = apart or not self.file.same(f"{self.side}/{first}", f"{self.side}/{start}_bias")
            key = f"{self.side}/{start}_max_distance"
            own = self.keys.whole(key)
            distance = distance or own
            if own != distance:
                raise self.keys.refused(key, own, f"{distance}, as in layer 0")
        return RelativeBiasConfig(self.shape(first, 2)[0], distance, per_layer=apart)

    def _layer(self, name: str, heads: int, pre: bool, activation: Activation) -> LayerConfig:
        gated = self.has(f"{name}/ffn/linear_0_noact/weight")
        network = FeedForwardConfig(
            self.shape(f"{name}/ffn/linear_0/weight", 2)[0],
            activation,
            gated=gated,
            bias=self.has(f"{name}/ffn/linear_0/bias"),
        )
        parallel: Any = None
        norm = self.norm(f"{name}/ffn/layer_norm")
        if norm is None:
            parallel, norm = "one norm", self.norm(f"{name}/shared_layer_norm")
        if norm is None:
            parallel, norm = "two norms", self.norm(f"{name}/input_layer_norm")
        if norm is None:
            raise CheckpointError(f"{self.file.path}: {self.side}/{name} has no norms")
        for other in ("self_attention/layer_norm", "attention/layer_norm", *_PARALLEL):
            if self.norm(f"{name}/{other}") not in (None, norm):
                raise ConfigError(
                    f"{self.file.path}: '{self.side}/{name}/{other}' must be a norm of the kind "
                    f"that the layer's others are"
                )
        crossed = self.has(f"{name}/attention/linear_0/weight")
        return LayerConfig(
            self._attention(f"{name}/self_attention", heads, crossed=False),
            network,
            norm,
            norm_placement="pre" if pre else "post",
            parallel=parallel,
            cross_attention=self._attention(f"{name}/attention", heads, crossed=True)
            if crossed
            else None,
        )

    def _attention(self, name: str, heads: int, *, crossed: bool) -> AttentionConfig:
        whole, side = self.keys.whole, self.side
        single = self._flag("multi_query_attention", False)
        num_kv_heads = whole(f"{side}/{name}/num_heads_kv", 1 if single else heads)
        rows = self.shape(f"{name}/linear_0/weight", 2)[0]
        parts = heads if crossed else heads + 2 * num_kv_heads
        if heads < 1 or num_kv_heads < 1 or rows % parts:
            raise CheckpointError(
                f"{self.file.path}: the {rows} rows of '{side}/{name}/linear_0/weight' cannot be "
                f"divided among {heads} query heads and {num_kv_heads} key and value heads"
            )
        size = whole(f"{side}/{name}/head_dim", rows // parts)
        if size != rows // parts:
            raise self.keys.refused(f"{side}/{name}/head_dim", size, f"{rows // parts}")
        window = whole(f"{side}/sliding_window", None)
        norm = self.norm(f"{name}/q_norm")
        if norm != self.norm(f"{name}/k_norm"):
            raise ConfigError(
                f"{self.file.path}: queries and keys of '{side}/{name}' must be normalized alike"
            )
        alibi = None
        if self._flag("alibi", False):
            alibi = ALiBiConfig(scale=size**-0.5 if self._flag("scale_alibi", False) else 1.0)
        return AttentionConfig(
            heads,
            num_kv_heads,
            size,
            scale=self.keys.number(f"{side}/{name}/queries_scale", None),
            qkv_bias=self.has(f"{name}/linear_0/bias"),
            out_bias=self.has(f"{name}/linear_{2 if crossed else 1}/bias"),
            rope=self._rope(name, size),
            qk_norm=None if norm is None else QKNormConfig(norm),
            window=whole(f"{side}/{name}/sliding_window", window) or None,
            alibi=alibi,
            # Whisper's keys have none; where they are fused with others the file has zeros.
            k_bias=False if self.file.specification == "WhisperSpec" else None,
        )

    def _rotary(self, name: str) -> bool:
        return self.keys.has(f"{self.side}/{name}/rotary_dim")

    def _rope(self, name: str, size: int) -> RopeConfig | None:
        if not self._rotary(name):
            return None
        start = f"{self.side}/{name}"
        first = f"{self.side}/layer_0/self_attention/rotary_interleave"
        if self.keys.whole(f"{start}/rotary_interleave", 1) != self.keys.whole(first, 1):
            raise self.keys.refused(f"{start}/rotary_interleave", "another", "what layer 0 has")
        dim = self.keys.whole(f"{start}/rotary_dim")
        return RopeConfig(
            theta=self.keys.number(f"{start}/rotary_base", 10_000.0),
            dim=None if dim in (0, size) else dim,
            **self._rope_scaling(start),
        )

    def _rope_scaling(self, start: str) -> dict[str, Any]:
        kind = self.keys.whole(f"{start}/rotary_scaling_type", None)
        if kind is None:
            return {}
        if kind != 0:
            raise self.keys.refused(f"{start}/rotary_scaling_type", kind, "0, linear")
        return {"type": "linear", "factor": self.keys.number(f"{start}/rotary_scaling_factor")}

    def _scale(self) -> float:
        """The factor of token embeddings: a number, or a flag for the root of their size."""
        root = math.sqrt(self.embed_dim)
        key, old = f"{self.side}/scale_embeddings", f"{self.side}/embeddings/multiply_by_sqrt_depth"
        if self.keys.has(key):
            self.keys.take(old, None)
        else:
            key = old
        found = self.keys.number(key, 1.0)
        stored = self.file.variables.get(key)
        if stored is None or not stored.dtype.is_floating_point:
            return root if found else 1.0
        return root if math.isclose(found, root, rel_tol=1e-6) else found  # it was rounded

    def _flag(self, name: str, default: bool) -> bool:
        return bool(self.keys.whole(f"{self.side}/{name}", int(default)))

    def _depth(self) -> int:
        start = f"{self.side}/"
        found = {
            int(match[1])
            for name in self.file.variables
            if name.startswith(start) and (match := _LAYER.fullmatch(name))
        }
        if len(found) > _MOST_LAYERS or found != set(range(len(found))):
            raise CheckpointError(
                f"{self.file.path}: layers of the {self.side} must be numbered from 0 on: got "
                f"{len(found)} up to {max(found)}"
            )
        return len(found)


def read_layers(file: CTranslate2File, eps: float | None) -> tuple[TransformerConfig, Tensors]:
    """The configuration that a file's variables mean, and the table of their names.

    Args:
        file: the opened model.bin.
        eps: epsilon of its norms, where config.json says one.

    Raises:
        CheckpointError: a variable is missing or misshapen.
        ConfigError: a variable asks for what is not built; by name.
    """
    keys = Keys(file.scalars(), file.path)
    decoder = Stack(file, keys, "decoder", eps)
    encoder = Stack(file, keys, "encoder", eps)
    if not decoder.depth:
        raise CheckpointError(f"{file.path} has no layers of a decoder")
    layers, others = decoder.layers(), encoder.layers() if encoder.depth else ()
    if any((layer.cross_attention is not None) != bool(others) for layer in layers):
        raise ConfigError(f"{file.path}: every layer of a decoder has cross-attention, or none")
    norm = decoder.norm("layer_norm")
    if others and norm != encoder.norm("layer_norm"):
        raise ConfigError(f"{file.path}: one of encoder and decoder has a last norm, both may")
    for name in ("projection/weight", decoder.tokens):
        decoder.shape(name, 2)
    if others and not encoder.sound:
        encoder.shape(encoder.tokens, 2)
    tied = file.same("decoder/projection/weight", f"decoder/{decoder.tokens}")
    embedding = decoder.embedding()
    shared = (
        bool(others)
        and not encoder.sound
        and file.same(f"encoder/{encoder.tokens}", f"decoder/{decoder.tokens}")
    )
    config = TransformerConfig(
        kind="encoder-decoder" if others else "decoder",
        vocab_size=decoder.shape(decoder.tokens, 2)[0],
        embed_dim=decoder.embed_dim,
        max_positions=decoder.max_positions,
        layers=layers,
        encoder_layers=others,
        embedding=embedding,
        final_norm=norm,
        head="tied" if tied else "untied",
        head_bias=decoder.has("projection/bias"),
        logit_scale=_logit_scale(keys, decoder),
        logit_softcap=keys.number("decoder/final_logit_softcapping", None),
        encoder=_encoder(encoder, decoder, embedding, shared) if others else EncoderConfig(),
        relative_bias=decoder.relative_bias(),
    )
    names = table(config, interleaved=_interleaved(keys))
    keys.whole("decoder/start_from_zero_embedding", 0)
    keys.finish(_HARMLESS)
    return config, names


def _encoder(
    encoder: Stack, decoder: Stack, embedding: EmbeddingConfig, shared: bool
) -> EncoderConfig:
    own = encoder.embedding()
    bias = encoder.relative_bias()
    if shared and own == embedding and own.positions is None and own.norm is None:
        return EncoderConfig(relative_bias=bias)
    most, width = encoder.max_positions, encoder.embed_dim
    apart = not shared and not encoder.sound
    return EncoderConfig(
        own,
        own_tokens=apart,
        vocab_size=encoder.shape(encoder.tokens, 2)[0] if apart else None,
        embed_dim=None if width == decoder.embed_dim else width,
        max_positions=None if most == decoder.max_positions else most,
        relative_bias=bias,
    )


def _logit_scale(keys: Keys, decoder: Stack) -> float:
    scale = keys.number("decoder/scale_outputs", 1.0)
    if scale != 1.0 and decoder.has("projection/bias"):
        raise keys.refused("decoder/scale_outputs", scale, "1 beside a bias of the logits")
    root: float = decoder.embed_dim**-0.5
    return root if math.isclose(scale, root, rel_tol=1e-6) else scale


def _interleaved(keys: Keys) -> bool:
    """Whether rotated features stand in pairs; the same in all layers."""
    start = "decoder/layer_0/self_attention"
    return keys.has(f"{start}/rotary_dim") and bool(keys.whole(f"{start}/rotary_interleave", 1))
