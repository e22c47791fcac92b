"""DeepSeek-V2, V2-Lite, V3 and V3.2: their keys of config.json, names and order of tensors.

All have latent attention in every layer and, after the first ``first_k_dense_replace`` layers, a
mixture of experts (DeepSeek-V2, 2024; DeepSeek-V3, 2024). They differ in the gate: V2 scores
experts by softmax, V3 by a sigmoid each with a bias for the choice. V3.2 (2025) is V3 with an
indexer in every layer, which chooses the keys of each query. A.X K1 (SK Telecom 2026) is V3 with a
norm behind each mixture; its published files have no bias for the choice.

Files hold the rows that are rotated in interleaved order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from polyhead.config import (
    FeedForwardConfig,
    IndexerConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    SparseLatentAttentionConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import (
    EXPERTS,
    STACKED_EXPERTS,
    drafting,
    read_networks,
    write_networks,
)
from polyhead.families.common.predictors import BEHIND_LAYERS
from polyhead.families.common.reading import read_activation, read_decoder
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import RotaryPairs, Step
from polyhead.families.common.tables import AROUND_LAYERS, FREQUENCIES, NETWORK, NORMS
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.deepseek_gguf import SECOND, SPARSE, THIRD

_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_interleave": True,
}
V2_DEFAULTS: Mapping[str, Any] = {
    **_DEFAULTS,
    "mlp_bias": False,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
V3_DEFAULTS: Mapping[str, Any] = {
    **_DEFAULTS,
    "num_key_value_heads": 128,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""What absent keys mean; V3's are those of the published model."""
V32_DEFAULTS: Mapping[str, Any] = {
    **V3_DEFAULTS,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}

# Keys about training and about experts on a cluster.
HARMLESS = frozenset(("aux_loss_alpha", "ep_size", "router_aux_loss_coef", "seq_aux"))
INDEXER = under(
    "layers.{i}.self_attn.indexer.",
    "layers.{i}.attention.indexer.",
    {"wq_b": "q_proj", "wk": "k_proj", "k_norm": "k_norm", "weights_proj": "weights_proj"},
)
_INDEXED = "indexed_attention"
_FULL, _SHARED = "full", "shared"


@dataclass(frozen=True)
class LatentPairs(RotaryPairs):
    """``RotaryPairs`` of latent attention: the last features of a query, or of the shared key."""

    last: bool = True
    shared: bool = False

    def _sizes(self, attention: Any) -> tuple[int, int]:
        size = attention.latent_dim if self.shared else attention.qk_head_dim
        return size, attention.qk_rope_head_dim


def read(
    keys: Keys,
    scoring: Literal["softmax", "sigmoid"],
    *,
    sparse_attention: Literal["own", "shared"] | None = None,
    listed: bool = False,
    out_norm: bool = False,
) -> TransformerConfig:
    """The configuration that the keys mean.

    Args:
        keys: Keys of config.json.
        scoring: The gate: V2's softmax or V3's sigmoid.
        sparse_attention: Whether every layer has V3.2's indexer, or layers may read the selection
            of an earlier one (GLM-5); None: all keys are read.
        listed: Whether a list may say which layers are dense.
        out_norm: Whether what a mixture gives is normalized (A.X K1).
    """
    keys.expect("scoring_func", scoring)
    keys.whole("num_nextn_predict_layers", 0)
    num_layers = keys.num_layers("num_hidden_layers")
    max_positions = keys.whole("max_position_embeddings")
    norm = NormConfig("rmsnorm", eps=keys.number("rms_norm_eps"))
    attention = read_attention(keys, max_positions)
    attentions: Sequence[LatentAttentionConfig] = [attention] * num_layers
    if sparse_attention:
        attentions = with_indexers(keys, attention, num_layers, shared=sparse_attention == "shared")
    if not keys.flag("rope_interleave") and scoring == "softmax":
        raise keys.refused("rope_interleave", False, "True: this family has no other order")
    dense = FeedForwardConfig(
        keys.whole("intermediate_size"),
        activation=read_activation(keys),
        bias=keys.flag("mlp_bias") if scoring == "softmax" else False,
    )
    networks = read_networks(keys, scoring, dense, num_layers, listed=listed)
    layers = [
        LayerConfig(
            each,
            network,
            norm,
            feed_forward_out_norm=out_norm and isinstance(network, MixtureConfig),
        )
        for each, network in zip(attentions, networks, strict=True)
    ]
    return read_decoder(keys, layers, max_positions=reach_of(attention, max_positions), norm=norm)


def write(config: TransformerConfig) -> dict[str, Any]:
    """Keys of this family alone; empty if the layers are not DeepSeek's."""
    attention: Any = config.layers[0].attention
    networks = [layer.feed_forward for layer in config.layers]
    values = write_attention(attention) | write_networks(config)
    if isinstance(attention, SparseLatentAttentionConfig):
        values |= _write_indexer(attention.indexer, len(config.layers))
    modes = [_SHARED if layer.attention.reads else _FULL for layer in config.layers]
    if _SHARED in modes:
        values["indexer_types"] = modes
    mixture = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    return values if mixture is None else values | {"scoring_func": mixture.scoring}


def write_dense(config: TransformerConfig) -> dict[str, Any]:
    """Keys of a family without experts."""
    if any(isinstance(layer.feed_forward, MixtureConfig) for layer in config.layers):
        raise ConfigError("this family has no mixtures of experts")
    return write_attention(config.layers[0].attention)


def with_indexers(
    keys: Keys, attention: LatentAttentionConfig, num_layers: int, *, shared: bool
) -> list[SparseLatentAttentionConfig]:
    """The same latent attention in every layer with V3.2's indexer, or a selection that it reads.

    Args:
        keys: Keys of config.json.
        attention: Without an indexer.
        num_layers: How many layers.
        shared: Whether the family has layers that read a selection.
    """
    kinds = keys.texts("layer_types", [])
    if kinds and kinds != [_INDEXED] * num_layers:
        raise keys.refused("layer_types", kinds, f"{_INDEXED!r} for {num_layers} layers")
    indexer = IndexerConfig(
        keys.size("index_n_heads"), keys.size("index_head_dim"), keys.size("index_topk")
    )
    dense = {field.name: getattr(attention, field.name) for field in fields(attention)}
    own = SparseLatentAttentionConfig(**dense, indexer=indexer)
    modes = indexer_types(keys, num_layers) if shared else [_FULL] * num_layers
    found: list[SparseLatentAttentionConfig] = []
    source = 0
    for i, mode in enumerate(modes):
        source = i if mode == _FULL else source
        found.append(own if mode == _FULL else replace(own, selection_of=source))
    return found


def indexer_types(keys: Keys, num_layers: int) -> list[str]:
    """Which layers have an indexer of their own: by a list, a pattern or a period."""
    modes = keys.texts("indexer_types", [])
    pattern = keys.take("index_topk_pattern", None)
    every, first = keys.whole("index_topk_freq", 1), keys.whole("index_skip_topk_offset", 2)
    if not modes and isinstance(pattern, str):
        modes = [{"F": _FULL, "S": _SHARED}.get(letter, letter) for letter in pattern]
    elif not modes and pattern is not None:
        modes = pattern
    elif not modes:
        modes = [
            _SHARED if max(i - first + 1, 0) % max(every, 1) else _FULL for i in range(num_layers)
        ]
    known = isinstance(modes, list) and all(mode in (_FULL, _SHARED) for mode in modes)
    if not known or len(modes) != num_layers or modes[0] != _FULL:
        key = "indexer_types" if keys.has("indexer_types") else "index_topk_pattern"
        wanted = f"{_FULL!r} or {_SHARED!r} for {num_layers} layers, the first {_FULL!r}"
        raise keys.refused(key, modes, wanted)
    return modes


def _write_indexer(indexer: IndexerConfig, num_layers: int) -> dict[str, Any]:
    return {
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.top_k,
        "layer_types": [_INDEXED] * num_layers,
    }


def write_attention(attention: Any) -> dict[str, Any]:
    """The inverse of ``read_attention``, beyond the shared keys."""
    return {
        "head_dim": attention.qk_rope_head_dim,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
    }


@dataclass(frozen=True)
class IndexerPairs(RotaryPairs):
    """``RotaryPairs`` of an indexer: the first features of its queries and keys."""

    def _sizes(self, attention: Any) -> tuple[int, int]:
        indexer = getattr(attention, "indexer", None)
        return (0, 0) if indexer is None else (indexer.head_dim, attention.qk_rope_head_dim)


def tensors_with_pairs(values: Mapping[str, Any]) -> Tensors:
    """The same table, where files hold the rotary rows of the indexers interleaved too."""
    paired = (rule.with_(rule.theirs, IndexerPairs()) for rule in INDEXER[:3])
    return tensors(values).extended(*paired)


def tensors(values: Mapping[str, Any]) -> Tensors:
    """Rotary rows are interleaved unless the file says otherwise."""
    pairs = values.get("rope_interleave", True)
    attention = latent_attention("layers.{i}.self_attn.", "layers.{i}.attention.", pairs=pairs)
    return Tensors(
        (
            *AROUND_LAYERS,
            *NORMS,
            *NETWORK,
            *attention,
            *INDEXER,
            *EXPERTS,
            *STACKED_EXPERTS,
        ),
        dropped=FREQUENCIES | drafting(values),
    )


def latent_attention(theirs: str, ours: str, *, pairs: bool = True) -> tuple[Rule, ...]:
    """Rules of one attention: ``pairs`` says whether the file's rotary rows are interleaved."""
    of_queries: tuple[Step, ...] = (LatentPairs(),) if pairs else ()
    of_keys: tuple[Step, ...] = (LatentPairs(shared=True),) if pairs else ()
    same = {name: name for name in ("q_a_proj", "kv_b_proj", "o_proj")}
    norms = {"q_a_layernorm": "q_a_norm", "kv_a_layernorm": "kv_a_norm"}
    return (
        Rule(theirs + "q_proj", ours + "q_proj", *of_queries),
        Rule(theirs + "q_b_proj", ours + "q_b_proj", *of_queries),
        Rule(theirs + "kv_a_proj_with_mqa", ours + "kv_a_proj_with_mqa", *of_keys),
        *under(theirs, ours, same | norms),
    )


def tensors_of_axk1(values: Mapping[str, Any]) -> Tensors:
    """The same table with the norms behind the mixtures; files have them in dense layers too."""
    theirs = ("post_mlp_layernorm", "mlp.post_mlp_layernorm")
    table = tensors(values).extended(
        *(Rule("layers.{i}." + name, "layers.{i}.feed_forward_out_norm") for name in theirs)
    )
    kinds = values.get("mlp_layer_types")
    if not isinstance(kinds, list):
        first = min(values.get("first_k_dense_replace", 1), values["num_hidden_layers"])
        kinds = ["dense"] * first
    dense = "|".join(str(i) for i, kind in enumerate(kinds) if kind == "dense")
    unused = rf"layers\.({dense})\.(mlp\.)?post_mlp_layernorm\.weight"
    reason = "dense layers have no norm behind their network"
    return replace(table, dropped={**table.dropped, unused: reason}) if dense else table


def observed_choice(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, str | None]:
    """A file without biases of the choice has none, whatever its config.json says."""
    biased = any(name.endswith("e_score_correction_bias") for name in tensors)
    return {"topk_method": "noaux_tc" if biased else None}


def read_attention(
    keys: Keys,
    max_positions: int,
    *,
    theta: float = 10_000.0,
    value_size: int | None = None,
    of_key: bool = False,
    **rope: Any,
) -> LatentAttentionConfig:
    """Latent attention in DeepSeek's keys.

    Args:
        keys: Of the file.
        max_positions: Tokens that it was trained for.
        theta: The rotary base where the file has none.
        value_size: Features of a head's value where the file has none; None: it must have them.
        of_key: Whether ``head_dim`` is a whole key's, not that of its rotary part.
        **rope: As of ``read_rope``.
    """
    num_heads, rotated = keys.size("num_attention_heads"), keys.whole("qk_rope_head_dim")
    attention = LatentAttentionConfig(
        num_heads=num_heads,
        kv_lora_rank=keys.whole("kv_lora_rank"),
        qk_nope_head_dim=keys.whole("qk_nope_head_dim"),
        qk_rope_head_dim=rotated,
        v_head_dim=keys.whole("v_head_dim", *(() if value_size is None else (value_size,))),
        q_lora_rank=keys.whole("q_lora_rank", None),
        bias=keys.flag("attention_bias"),
        rope=read_rope(keys, rotated, max_positions, theta=theta, **rope),
        dropout=keys.number("attention_dropout"),
    )
    # Keys that repeat others; a file where they differ is broken.
    keys.expect("num_key_value_heads", num_heads, None)
    keys.expect("head_dim", attention.qk_head_dim if of_key else rotated, None)
    keys.expect("qk_head_dim", attention.qk_head_dim, None)
    return attention


def reach_of(attention: LatentAttentionConfig, stated: int) -> int:
    return stated if attention.rope is None else reach(attention.rope, stated)


FAMILIES = (
    Family(
        "deepseek_v2",
        "DeepseekV2",
        partial(read, scoring="softmax"),
        tensors,
        defaults=V2_DEFAULTS,
        write=write,
        harmless=HARMLESS,
        gguf=SECOND,
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3",
        partial(read, scoring="sigmoid"),
        tensors,
        defaults=V3_DEFAULTS,
        write=write,
        harmless=HARMLESS,
        gguf=THIRD,
        predictor=BEHIND_LAYERS,
    ),
    Family(
        "deepseek_v32",
        "DeepseekV32",
        partial(read, scoring="sigmoid", sparse_attention="own", listed=True),
        tensors,
        defaults=V32_DEFAULTS,
        write=write,
        harmless=HARMLESS | {"mlp_bias"},
        predictor=BEHIND_LAYERS,
    ),
    Family(
        "glm_moe_dsa",
        "GlmMoeDsa",
        partial(read, scoring="sigmoid", sparse_attention="shared", listed=True),
        tensors_with_pairs,
        defaults={
            **V32_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 64,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_group": 1,
            "topk_group": 1,
            "index_n_heads": 32,
            "indexer_types": None,
        },
        write=write,
        harmless=HARMLESS | {"mlp_bias"},
        gguf=SPARSE,
        predictor=BEHIND_LAYERS,
    ),
    Family(
        "glm4_moe_lite",
        "Glm4MoeLite",
        partial(read, scoring="sigmoid", listed=True),
        tensors,
        defaults={
            **V3_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 20,
            "first_k_dense_replace": 1,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
        },
        write=write,
        harmless=HARMLESS,
        predictor=BEHIND_LAYERS,
    ),
    Family(
        "axk1",
        "AXK1",
        partial(read, scoring="sigmoid", listed=True, out_norm=True),
        tensors_of_axk1,
        defaults={
            **V3_DEFAULTS,
            "num_key_value_heads": 64,
            "first_k_dense_replace": 1,
            "n_routed_experts": 192,
            "bos_token_id": 163_691,
            "eos_token_id": 163_691,
        },
        write=write,
        harmless=HARMLESS,
        observed=observed_choice,
    ),
    Family(
        "youtu",
        "Youtu",
        partial(read, scoring="sigmoid"),
        tensors,
        defaults={
            **_DEFAULTS,
            "num_key_value_heads": 16,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131_072,
            "first_k_dense_replace": 1 << 20,
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
        },
        write=write_dense,
        harmless=HARMLESS | {"embedding_initializer_range", "mlp_bias"},
    ),
)
