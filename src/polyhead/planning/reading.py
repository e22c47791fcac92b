"""A Hugging Face config.json as an ``Architecture``.

Sizes are read under their several names; what the file leaves to the code of its ``model_type`` is
a row of ``families``. The reader is for planning only: keys that change no size are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import AttentionConfig, LatentAttentionConfig, NormConfig, QKNormConfig
from polyhead.errors import ConfigError
from polyhead.planning.architecture import (
    Architecture,
    AttentionShape,
    FeedForwardShape,
    LayerShape,
)
from polyhead.planning.families import FAMILIES, LLAMA, Family
from polyhead.planning.fields import Fields

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "su")
_NESTED = ("text_config", "llm_config", "language_config")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_architecture(
    values: Mapping[str, Any], where: str, name: str | None = None
) -> tuple[Architecture, tuple[str, ...]]:
    """What the config.json means, and what had to be assumed.

    Args:
        values: Its object; a model of several kinds of input keeps the text model's in
            ``text_config``.
        where: The file, for messages.
        name: For people; default the file's own ``_name_or_path`` or ``model_type``.

    Raises:
        ConfigError: A field is missing, impossible, or contradicts another; always by name.
    """
    notes = []
    for key in _NESTED:
        nested = values.get(key)
        if isinstance(nested, Mapping):
            outer = {k: v for k, v in values.items() if k in ("tie_word_embeddings", "vocab_size")}
            outer["model_type"] = values.get("model_type")
            values = outer | {k: v for k, v in nested.items() if v is not None}
            notes.append(f"only the text model ({key}) is counted")
            break
    model_type = values.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        family = LLAMA
        notes.append(f"model_type {model_type!r} is not known: counted as a Llama-like decoder")
    fields = Fields(values, where, family.defaults)
    _check_rope(fields)
    read = _encoder_decoder if family.kind == "encoder-decoder" else _one_stack
    try:
        model = read(fields, family, name or str(values.get("_name_or_path") or model_type))
    except ConfigError as error:
        if str(error).startswith(where):
            raise
        raise ConfigError(f"{where}: {error}") from error
    return model, tuple(notes)


def _one_stack(fields: Fields, family: Family, name: str) -> Architecture:
    embed_dim, count = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
    attentions = _attentions(fields, family, embed_dim, count)
    networks = _networks(fields, family, embed_dim, count)
    norms = family.norms
    if fields.values.get("model_type") == "falcon" and not fields.flag("new_decoder_architecture"):
        norms = 1 if fields.flag("parallel_attn", True) else 2
    limit = fields.optional("max_position_embeddings")
    learned = 0
    if family.learned_positions is not None:
        learned = fields.whole("max_position_embeddings") + family.learned_positions
    return Architecture(
        name=name,
        kind="encoder" if family.kind == "encoder" else "decoder",
        vocab_size=fields.whole("vocab_size"),
        embed_dim=embed_dim,
        layers=tuple(
            LayerShape(attention, network, norms=norms)
            for attention, network in zip(attentions, networks, strict=True)
        ),
        max_positions=limit,
        learned_positions=learned,
        segments=fields.optional("type_vocab_size") or 0 if family.kind == "encoder" else 0,
        norm_bias=family.norm_bias,
        embedding_norms=family.embedding_norms,
        final_norms=family.final_norms,
        head=_head(fields, family),
        pooler=family.pooler,
    )


def _encoder_decoder(fields: Fields, family: Family, name: str) -> Architecture:
    embed_dim = fields.whole("hidden_size")

    def layer(side: str, *, cross: bool) -> LayerShape:
        heads = fields.whole(f"{side}_attention_heads")
        attention = AttentionConfig(
            heads, heads, _divided(fields, embed_dim, heads), qkv_bias=True, out_bias=True
        )
        network = FeedForwardShape(
            fields.whole(f"{side}_ffn_dim"), gated=family.gated, bias=bool(family.ffn_bias)
        )
        return LayerShape(attention, network, attention if cross else None, norms=3 if cross else 2)

    limit = fields.optional("max_position_embeddings")
    learned = 0
    if family.learned_positions is not None and limit is not None:
        learned = 2 * (limit + family.learned_positions)
    return Architecture(
        name=name,
        kind="encoder-decoder",
        vocab_size=fields.whole("vocab_size"),
        embed_dim=embed_dim,
        layers=(layer("decoder", cross=True),) * fields.whole("decoder_layers"),
        encoder_layers=(layer("encoder", cross=False),) * fields.whole("encoder_layers"),
        max_positions=limit,
        learned_positions=learned,
        norm_bias=family.norm_bias,
        embedding_norms=family.embedding_norms,
        final_norms=family.final_norms,
        head=_head(fields, family),
    )


def _attentions(
    fields: Fields, family: Family, embed_dim: int, count: int
) -> tuple[AttentionShape, ...]:
    heads = fields.per_layer("num_attention_heads", count)
    biased = family.biases in ("all", "qkv")
    if family.biases.startswith("key"):
        biased = fields.flag("bias" if family.biases == "key all" else "attention_bias")
    if fields.get("kv_lora_rank") is not None:
        return tuple(
            LatentAttentionConfig(
                num_heads=H,
                kv_lora_rank=fields.whole("kv_lora_rank"),
                qk_nope_head_dim=fields.whole("qk_nope_head_dim"),
                qk_rope_head_dim=fields.whole("qk_rope_head_dim"),
                v_head_dim=fields.whole("v_head_dim"),
                q_lora_rank=fields.optional("q_lora_rank"),
                bias=biased,
            )
            for H in heads
        )
    kv_heads = fields.per_layer("num_key_value_heads", count, _kv_default(fields, heads[0]))
    if fields.get("num_key_value_heads") is None and len(set(heads)) > 1:
        kv_heads = heads
    norm = NormConfig()
    qk_norm = None
    if family.qk_norm is not None:
        qk_norm = QKNormConfig(norm, "before_rope" if family.qk_norm == "head" else "full_width")
    made = []
    for H, G, window in zip(heads, kv_heads, _windows(fields, family, count), strict=True):
        if H % G:
            raise ConfigError(
                f"{fields.where}: num_key_value_heads={G} must divide num_attention_heads={H}"
            )
        head_dim = fields.get("head_dim")
        made.append(
            AttentionConfig(
                num_heads=H,
                num_kv_heads=G,
                head_dim=fields.whole("head_dim")
                if head_dim is not None
                else _divided(fields, embed_dim, H),
                qkv_bias=biased,
                out_bias=biased and family.biases not in ("qkv", "key qkv"),
                qk_norm=qk_norm,
                window=window,
                sinks=family.sinks,
            )
        )
    return tuple(made)


def _kv_default(fields: Fields, heads: int) -> int:
    """Falcon says ``multi_query``; elsewhere an absent number means as many as query heads."""
    if fields.get("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1
    return heads


def _windows(fields: Fields, family: Family, count: int) -> list[int | None]:
    """The attention window of every layer."""
    types = fields.get("layer_types")
    window = fields.optional("sliding_window")
    if types is not None:
        if not isinstance(types, list | tuple) or len(types) != count:
            raise fields.refused("layer_types", types, f"a list of num_hidden_layers={count} names")
        for kind in types:
            if kind not in _LAYER_TYPES:
                raise fields.refused("layer_types", kind, " or ".join(_LAYER_TYPES))
        if window is None and "sliding_attention" in types:
            raise ConfigError(
                f"{fields.where}: layer_types has 'sliding_attention' but sliding_window is missing"
            )
        return [window if kind == "sliding_attention" else None for kind in types]
    if window is None or family.window is None or not fields.flag("use_sliding_window", True):
        return [None] * count
    if family.window == "every":
        return [window] * count
    if family.window == "late":
        first = fields.get("max_window_layers", count)
        return [window if i >= first else None for i in range(count)]
    pattern = fields.whole("sliding_window_pattern")
    return [window if (i + 1) % pattern else None for i in range(count)]


def _networks(fields: Fields, family: Family, embed_dim: int, count: int) -> list[FeedForwardShape]:
    bias = family.ffn_bias
    if isinstance(bias, str):
        bias = fields.flag(bias)
    default = None if family.gated else 4 * embed_dim
    experts = fields.optional("num_experts") or 1
    if experts == 1:
        widths = fields.per_layer("intermediate_size", count, default)
        return [FeedForwardShape(width, gated=family.gated, bias=bias) for width in widths]
    visited = fields.whole("num_experts_per_tok")
    if visited > experts:
        raise ConfigError(
            f"{fields.where}: num_experts_per_tok={visited} must be at most the experts, {experts}"
        )
    width = fields.optional("moe_intermediate_size") or fields.whole("intermediate_size")
    shared = fields.optional("shared_expert_intermediate_size")
    if shared is None:
        shared = (fields.get("n_shared_experts") or 0) * width
    sparse = FeedForwardShape(
        width,
        gated=family.gated,
        bias=bias and family.expert_bias,
        experts=experts,
        experts_per_token=visited,
        shared_hidden_dim=shared,
        shared_bias=bias and shared > 0,
        router_bias=fields.flag("router_bias"),
        shared_gate=fields.flag("shared_expert_gate"),
    )
    without = _dense_layers(fields, count)
    if not without:
        return [sparse] * count
    dense = FeedForwardShape(fields.whole("intermediate_size"), gated=family.gated, bias=bias)
    return [dense if i in without else sparse for i in range(count)]


def _dense_layers(fields: Fields, count: int) -> set[int]:
    """Layers of a mixture model that have a plain network all the same."""
    first = fields.count("first_k_dense_replace")
    step = fields.count("decoder_sparse_step") or 1
    named = set(_listed(fields, "mlp_only_layers"))
    if isinstance(fields.get("moe_layer_freq"), list):  # one entry per layer: 1 where it is sparse
        named |= {i for i, sparse in enumerate(_listed(fields, "moe_layer_freq")) if not sparse}
        every = 1
    else:
        every = fields.count("moe_layer_freq") or 1
    return {i for i in range(count) if i < first or i % every or (i + 1) % step or i in named}


def _listed(fields: Fields, name: str) -> list[int]:
    values = fields.get(name, [])
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise fields.refused(name, values, "a list of whole numbers")
    return values


def _head(fields: Fields, family: Family) -> Any:
    if family.kind == "encoder":
        return None
    return "tied" if fields.flag("tie_word_embeddings", True) else "untied"


def _divided(fields: Fields, embed_dim: int, heads: int) -> int:
    if embed_dim % heads:
        raise ConfigError(
            f"{fields.where}: num_attention_heads={heads} must divide hidden_size={embed_dim}, or "
            f"head_dim must be given"
        )
    return embed_dim // heads


def _check_rope(fields: Fields) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        value = fields.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise fields.refused(key, value, "an object")
        several = [each for each in value.values() if isinstance(each, Mapping)]
        for one in several or [value]:
            kind = one.get("rope_type", one.get("type", "default"))
            if kind not in ROPE_TYPES:
                raise fields.refused(f"{key}: rope type", kind, f"one of {', '.join(ROPE_TYPES)}")
