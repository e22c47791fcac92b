"""MiniMax-M3's text model (2026): layers whose kv heads choose blocks of keys by an indexer.

Queries and keys are normed per head; networks and experts have gpt-oss's clamped SwiGLU, and each
layer of experts one that every token visits. Read by the names that transformers writes.
"""

from __future__ import annotations

from typing import Any

from polyhead.config import (
    BlockIndexerConfig,
    FeedForwardConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    SelectiveAttentionConfig,
    TransformerConfig,
)
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import EXPERTS, STACKED_EXPERTS, write_dense_layers
from polyhead.families.common.plain import Plain
from polyhead.families.common.reading import FULL, read_layer_types
from polyhead.families.common.steps import Rows
from polyhead.families.common.tables import DECODER
from polyhead.families.common.tensors import Rule, under

_ALPHA = 1.702
_SPARSE = "minimax_m3_sparse"
_KINDS = ("sparse", "dense")
_NETWORK = "layers.{i}.feed_forward."


def read(keys: Keys) -> TransformerConfig:
    keys.expect("swiglu_alpha", _ALPHA)
    norm = NormConfig(eps=keys.number("rms_norm_eps"), weight_offset=1.0)
    dense = _network(keys, "dense_intermediate_size")
    plain = Plain(keys, norm=norm, network=dense, theta=5e6, partial_rotary_factor=1.0)
    count, qk_norm = plain.sizes.num_layers, QKNormConfig(norm)
    indexer = BlockIndexerConfig(
        keys.size("index_block_size"),
        keys.size("index_topk_blocks"),
        keys.size("index_n_heads"),
        keys.size("index_head_dim"),
        norm,
        keys.size("index_local_blocks"),
    )
    kinds = read_layer_types(keys, count, [FULL] * count, (FULL, _SPARSE))
    sparse = None
    if _SPARSE in kinds:
        sparse = plain.attention(kind=SelectiveAttentionConfig, selector=indexer, qk_norm=qk_norm)
    attentions = {FULL: plain.attention(qk_norm=qk_norm), _SPARSE: sparse}
    mixture = MixtureConfig(
        _network(keys, "intermediate_size"),
        keys.whole("num_local_experts"),
        keys.whole("num_experts_per_tok"),
        shared=_network(keys, "shared_intermediate_size"),
        scoring="sigmoid",
        choice_bias=True,
        normalize=True,
        scale=keys.number("routed_scaling_factor"),
    )
    networks = read_layer_types(keys, count, ["sparse"] * count, _KINDS, "mlp_layer_types")
    return plain.decoder(
        [
            plain.layer(attentions[kind], mixture if each == "sparse" else dense)
            for kind, each in zip(kinds, networks, strict=True)
        ]
    )


def _network(keys: Keys, width: str) -> FeedForwardConfig:
    clamp = keys.number("swiglu_limit")
    return FeedForwardConfig(keys.whole(width), "quick_gelu", clamp=clamp, up_offset=1.0)


def write(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.feed_forward for layer in config.layers]
    attentions: list[Any] = [layer.attention for layer in config.layers]
    mixture = next((each for each in found if isinstance(each, MixtureConfig)), None)
    dense = next((each for each in found if isinstance(each, FeedForwardConfig)), None)
    chooses = [isinstance(each, SelectiveAttentionConfig) for each in attentions]
    values: dict[str, Any] = {
        "hidden_act": "silu",
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": found[0].expert.clamp if dense is None else dense.clamp,
        "layer_types": [_SPARSE if each else FULL for each in chooses],
        **write_dense_layers(config),
    }
    if dense is not None:
        values["dense_intermediate_size"] = dense.hidden_dim
    if mixture is not None and mixture.shared is not None:
        values |= {
            "intermediate_size": mixture.expert.hidden_dim,
            "shared_intermediate_size": mixture.shared.hidden_dim,
            "num_local_experts": mixture.num_experts,
            "num_experts_per_tok": mixture.experts_per_token,
            "routed_scaling_factor": mixture.scale,
        }
    if any(chooses):
        selector = attentions[chooses.index(True)].selector
        values |= {
            "index_block_size": selector.size,
            "index_topk_blocks": selector.top_k,
            "index_n_heads": selector.num_heads,
            "index_head_dim": selector.head_dim,
            "index_local_blocks": selector.last_blocks,
        }
    return values


def _pair(theirs: str, ours: str) -> Rule:
    names = (ours + "gate_proj.weight", ours + "up_proj.weight")
    return Rule(theirs + "gate_up_proj.weight", names, Rows())


_TENSORS = DECODER.extended(
    *EXPERTS,
    *STACKED_EXPERTS,
    _pair("layers.{i}.mlp.", _NETWORK),
    _pair("layers.{i}.mlp.shared_experts.", _NETWORK + "shared."),
    *under(
        "layers.{i}.self_attn.indexer.",
        "layers.{i}.attention.selector.",
        {name: name for name in ("q_proj", "k_proj", "q_norm", "k_norm")},
    ),
)

FAMILIES = (
    Family(
        "minimax_m3_vl_text",
        "MiniMaxM3VL",
        read,
        _TENSORS,
        bare="TextModel",
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 128,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "attention_dropout": 0.0,
            "dense_intermediate_size": 12_288,
            "shared_intermediate_size": 3072,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 2.0,
            "swiglu_alpha": _ALPHA,
            "swiglu_limit": 7.0,
            "mlp_layer_types": None,
            "layer_types": None,
            "index_n_heads": 4,
            "index_head_dim": 128,
            "index_block_size": 128,
            "index_topk_blocks": 16,
            "index_local_blocks": 1,
            "bos_token_id": 200_034,
            "eos_token_id": 200_020,
            "pad_token_id": None,
        },
        write=write,
        # transformers rotates by partial_rotary_factor, and its activation is the clamped SwiGLU
        # whatever hidden_act says.
        harmless=frozenset(
            ("rotary_dim", "hidden_act", "router_aux_loss_coef", "router_jitter_noise")
        ),
    ),
)
