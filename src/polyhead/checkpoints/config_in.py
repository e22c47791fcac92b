"""config.json of Hugging Face directories, read into a ``TransformerConfig``.

``model_type`` selects a family, a row of data; from there every key decides for itself. A key that
no reader takes, and that is not known to be harmless, is an error by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from polyhead.checkpoints import block_float8, deepseek, gemma
from polyhead.checkpoints.keys import Keys
from polyhead.checkpoints.rope_in import reach, read_rope
from polyhead.checkpoints.shared_keys import (
    FULL,
    SLIDING,
    divided,
    read_activation,
    read_architecture,
    read_decoder,
    read_layer_types,
    read_token_ids,
)
from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """What a ``model_type`` takes for granted.

    Attributes:
        body: which reader understands the keys.
        biases: ``"qkv"``: q, k and v always have them; ``"key"``: attention_bias decides for q, k,
            v and o; None: there are none.
        ffn_bias: whether mlp_bias is a key of the family.
        qk_norm: q and k are normalised per head before rotary.
        window: how sliding_window is meant: in every layer, by layer_types, or not at all.
        scoring: how a mixture of experts scores them.
        defaults: values of absent keys where transformers' class has one.
    """

    body: Literal["decoder", "gemma", "deepseek", "bert"]
    biases: Literal["qkv", "key"] | None = None
    ffn_bias: bool = False
    qk_norm: bool = False
    window: Literal["every layer", "by layer"] | None = None
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    defaults: Mapping[str, Any] = field(default_factory=dict)


_DECODER_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
_QWEN_DEFAULTS = _DECODER_DEFAULTS | {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "decoder",
        biases="key",
        ffn_bias=True,
        defaults=_DECODER_DEFAULTS | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "mistral": Family(
        "decoder",
        window="every layer",
        defaults=_DECODER_DEFAULTS
        | {
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "qwen2": Family("decoder", biases="qkv", window="by layer", defaults=_QWEN_DEFAULTS),
    "qwen3": Family(
        "decoder",
        biases="key",
        qk_norm=True,
        window="by layer",
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
    ),
    "gemma3_text": Family("gemma", defaults=gemma.DEFAULTS),
    "deepseek_v2": Family("deepseek", defaults=deepseek.V2_DEFAULTS),
    "deepseek_v3": Family("deepseek", scoring="sigmoid", defaults=deepseek.V3_DEFAULTS),
    "bert": Family(
        "bert",
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "type_vocab_size": 2,
            "pad_token_id": 0,
        },
    ),
}

# Keys that change no number a model computes in evaluation: bookkeeping, training, generation and
# the labels of task heads.
HARMLESS = frozenset(
    (
        "_name_or_path",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "architectures",
        "auto_map",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "use_bfloat16",
        "initializer_range",
        "initializer_factor",
        "pretraining_tp",
        "gradient_checkpointing",
        "torchscript",
        "is_llama_config",
        "transformers.js_config",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "chunk_size_feed_forward",
        "tokenizer_class",
        "prefix",
        "task_specific_params",
        "problem_type",
        "finetuning_task",
        "id2label",
        "label2id",
        "num_labels",
        "classifier_dropout",
        "sep_token_id",
        "cls_token_id",
        "mask_token_id",
        "decoder_start_token_id",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
    )
)


def read_config(values: Mapping[str, Any], where: object) -> TransformerConfig:
    """The configuration that a config.json means.

    Args:
        values: the file's object.
        where: the file, for messages.

    Raises:
        ConfigError: the family is not supported, a key is missing or not understood, or a value is
            impossible; always by name.
    """
    model_type = values.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise ConfigError(
            f"{where}: model_type is {model_type!r}; supported are {', '.join(FAMILIES)}"
        )
    keys = Keys(values, where, defaults=family.defaults)
    keys.take("model_type")
    keys.expect("is_encoder_decoder", False)
    keys.expect("pruned_heads", {}, None)
    block_float8.read_blocks(values, where)
    keys.take(block_float8.KEY, None)
    try:
        config = _read(keys, family)
    except ConfigError as error:
        if str(where) in str(error):
            raise
        raise ConfigError(f"{where}: {error}") from error
    keys.finish(HARMLESS)
    return config


def _read(keys: Keys, family: Family) -> TransformerConfig:
    if family.body == "bert":
        return _bert(keys)
    if family.body == "gemma":
        return gemma.read(keys)
    if family.body == "deepseek":
        return deepseek.read(keys, family.scoring)
    return _decoder(keys, family)


def _decoder(keys: Keys, family: Family) -> TransformerConfig:
    embed_dim = keys.whole("hidden_size")
    num_heads = keys.whole("num_attention_heads")
    num_layers = keys.num_layers("num_hidden_layers")
    max_positions = keys.whole("max_position_embeddings")
    head_dim = keys.whole("head_dim", None) or divided(keys, embed_dim, num_heads)
    norm = NormConfig("rmsnorm", eps=keys.number("rms_norm_eps"))
    biased = family.biases == "key" and keys.flag("attention_bias", False)
    keys.expect("rope_interleaved", False, None)
    rope = read_rope(keys, head_dim, max_positions)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=keys.whole("num_key_value_heads", num_heads),
        head_dim=head_dim,
        qkv_bias=biased or family.biases == "qkv",
        out_bias=biased,
        rope=rope,
        qk_norm=QKNormConfig(norm) if family.qk_norm else None,
        dropout=keys.number("attention_dropout", 0.0),
    )
    feed_forward = FeedForwardConfig(
        keys.whole("intermediate_size"),
        activation=read_activation(keys),
        bias=family.ffn_bias and keys.flag("mlp_bias", False),
    )
    layers = [
        LayerConfig(replace(attention, window=window), feed_forward, norm)
        for window in _windows(keys, family, num_layers)
    ]
    return read_decoder(keys, layers, max_positions=reach(rope, max_positions), norm=norm)


def _bert(keys: Keys) -> TransformerConfig:
    embed_dim = keys.whole("hidden_size")
    num_heads = keys.whole("num_attention_heads")
    norm = NormConfig("layernorm", eps=keys.number("layer_norm_eps"), bias=True)
    dropout = keys.number("hidden_dropout_prob")
    keys.expect("position_embedding_type", "absolute")
    keys.expect("is_decoder", False)
    keys.expect("add_cross_attention", False)
    keys.take("tie_word_embeddings", True)  # of the masked-token head, which is not built
    read_architecture(keys, "Model", "ForMaskedLM", "ForPreTraining")
    layer = LayerConfig(
        AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=divided(keys, embed_dim, num_heads),
            qkv_bias=True,
            out_bias=True,
            dropout=keys.number("attention_probs_dropout_prob"),
        ),
        FeedForwardConfig(
            keys.whole("intermediate_size"),
            activation=read_activation(keys),
            gated=False,
            bias=True,
        ),
        norm,
        norm_placement="post",
        dropout=dropout,
    )
    return TransformerConfig(
        kind="encoder",
        vocab_size=keys.whole("vocab_size"),
        embed_dim=embed_dim,
        max_positions=keys.whole("max_position_embeddings"),
        layers=(layer,) * keys.num_layers("num_hidden_layers"),
        embedding=EmbeddingConfig(
            positions="learned",
            num_segments=keys.whole("type_vocab_size"),
            norm=norm,
            dropout=dropout,
        ),
        final_norm=None,
        head=None,
        **read_token_ids(keys),
    )


def _windows(keys: Keys, family: Family, num_layers: int) -> list[int | None]:
    """The attention window of every layer."""
    if family.window is None:
        return [None] * num_layers
    window = keys.whole("sliding_window", None)
    if family.window == "every layer":
        return [window] * num_layers
    used = keys.flag("use_sliding_window")
    first = keys.whole("max_window_layers")
    late = SLIDING if used and window is not None else FULL
    types = read_layer_types(
        keys, num_layers, [FULL if i < first else late for i in range(num_layers)]
    )
    if SLIDING in types and not (used and window is not None):
        raise keys.refused(
            "layer_types", types, "sliding_attention only with use_sliding_window and a window"
        )
    return [window if kind == SLIDING else None for kind in types]
