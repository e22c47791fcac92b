"""What the families of Hugging Face models take for granted, as data.

A config.json says sizes; whether there are biases, how many norms a layer has or which layers have
the window is often in the code of its ``model_type`` only. Each row says that, and what absent keys
mean. A ``model_type`` that has no row is read like Llama, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Biases = Literal["none", "all", "qkv", "key", "key qkv", "key all"]


@dataclass(frozen=True)
class Family:
    """A ``model_type``.

    Attributes:
        kind: What is built.
        gated: Whether the feed-forward network has a gate.
        biases: Of attention: ``"qkv"``, ``"all"`` (q, k, v, o), or what ``attention_bias`` decides:
            ``"key"`` q, k, v, o; ``"key qkv"`` those three; ``"key all"`` reads ``bias``.
        ffn_bias: Whether feed-forward projections have biases; a string: the key that decides.
        expert_bias: Whether routed experts have them too.
        norm_bias: LayerNorms with biases instead of RMSNorms.
        norms: Norms over the embedding per layer, attention and feed-forward together.
        qk_norm: Norms of queries and keys: per head, or over the full width.
        learned_positions: A table of them; a number: so many rows more than positions.
        window: ``"every"`` layer, ``"late"``: by max_window_layers, ``"pattern"``: all but each
            n-th, or None: ``sliding_window`` is not read. ``layer_types`` is read everywhere.
        sinks: A learned sink per query head.
        embedding_norms: Norms right after the embedding.
        final_norms: After the last layer of each stack.
        encoder_decoder_names: Whether sizes are named for an encoder and a decoder.
        pooler: BERT's.
        defaults: Values of absent keys where transformers' class has one.
    """

    kind: Literal["decoder", "encoder", "encoder-decoder"] = "decoder"
    gated: bool = True
    biases: Biases = "none"
    ffn_bias: bool | str = False
    expert_bias: bool = True
    norm_bias: bool = False
    norms: int = 2
    qk_norm: Literal["head", "full"] | None = None
    learned_positions: int | None = None
    window: Literal["every", "late", "pattern"] | None = None
    sinks: bool = False
    embedding_norms: int = 0
    final_norms: int = 1
    pooler: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


LLAMA = Family(biases="key", ffn_bias="mlp_bias", defaults={"tie_word_embeddings": False})

_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
_QWEN: dict[str, Any] = {"tie_word_embeddings": False, "use_sliding_window": False}
_GEMMA3 = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_GEMMA3_FAMILY = Family(biases="key", norms=4, qk_norm="head", window="pattern", defaults=_GEMMA3)
_DEEPSEEK: dict[str, Any] = {
    "tie_word_embeddings": False,
    "q_lora_rank": None,
    "first_k_dense_replace": 0,
}
_BERT = {"vocab_size": 30_522, "type_vocab_size": 2, "tie_word_embeddings": True}

FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": Family(window="every", defaults=_UNTIED | {"num_key_value_heads": 8}),
    "mixtral": Family(
        window="every",
        defaults=_UNTIED | {"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen2": Family(biases="qkv", window="late", defaults=_QWEN),
    "qwen2_moe": Family(
        biases="qkv",
        window="late",
        defaults=_QWEN | {"decoder_sparse_step": 1, "shared_expert_gate": True},
    ),
    "qwen3": Family(
        biases="key", qk_norm="head", window="late", defaults=_QWEN | {"head_dim": 128}
    ),
    "qwen3_moe": Family(
        biases="key", qk_norm="head", window="late", defaults=_QWEN | {"decoder_sparse_step": 1}
    ),
    "gemma": Family(biases="key", defaults=_TIED | {"head_dim": 256}),
    "gemma2": Family(
        biases="key",
        norms=4,
        window="pattern",
        defaults=_TIED | {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    ),
    "gemma3_text": _GEMMA3_FAMILY,
    "gemma3": _GEMMA3_FAMILY,
    "phi3": Family(window="every", defaults=_UNTIED),
    "olmo2": Family(biases="key", qk_norm="full", defaults=_UNTIED),
    "gpt_oss": Family(
        biases="all",
        ffn_bias=True,
        window="pattern",
        sinks=True,
        defaults=_UNTIED
        | {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2, "router_bias": True},
    ),
    "deepseek_v2": Family(biases="key", ffn_bias="mlp_bias", expert_bias=False, defaults=_DEEPSEEK),
    "deepseek_v3": Family(biases="key", defaults=_DEEPSEEK | {"router_bias": True}),
    "gpt2": Family(
        gated=False,
        biases="all",
        ffn_bias=True,
        norm_bias=True,
        learned_positions=0,
        defaults=_TIED,
    ),
    "gpt_neox": Family(
        gated=False,
        biases="all",
        ffn_bias=True,
        norm_bias=True,
        defaults=_UNTIED,
    ),
    "falcon": Family(
        gated=False,
        biases="key all",
        ffn_bias="bias",
        norm_bias=True,
        defaults=_TIED | {"multi_query": True, "new_decoder_architecture": False},
    ),
    "bert": Family(
        kind="encoder",
        gated=False,
        biases="all",
        ffn_bias=True,
        norm_bias=True,
        learned_positions=0,
        embedding_norms=1,
        final_norms=0,
        pooler=True,
        defaults=_BERT,
    ),
    "bart": Family(
        kind="encoder-decoder",
        gated=False,
        biases="all",
        ffn_bias=True,
        norm_bias=True,
        learned_positions=2,
        embedding_norms=2,
        final_norms=0,
        defaults=_TIED,
    ),
    "marian": Family(
        kind="encoder-decoder",
        gated=False,
        biases="all",
        ffn_bias=True,
        norm_bias=True,
        final_norms=0,
        defaults=_TIED,
    ),
}
"""The families whose parameters are counted exactly (tested against transformers' own modules)."""
