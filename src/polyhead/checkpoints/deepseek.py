"""DeepSeek-V2, V2-Lite and V3: their keys of config.json, names and order of tensors.

Both have latent attention in every layer and, after the first ``first_k_dense_replace`` layers, a
mixture of experts (DeepSeek-V2, 2024; DeepSeek-V3, 2024). They differ in the gate: V2 scores
experts by softmax, V3 by a sigmoid each with a bias for the choice.

Files hold the rows that are rotated in interleaved order, and either a tensor per expert (as the
hub's files, and as transformers saves them) or all experts of a layer stacked (as transformers
computes with them). The layers of multi-token prediction that V3's files carry beyond
``num_hidden_layers`` predict further tokens for training and drafting; they are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import Tensor

from polyhead.checkpoints.keys import Keys
from polyhead.checkpoints.rope_in import reach, read_rope
from polyhead.checkpoints.rope_out import stated_length, write_rope
from polyhead.checkpoints.shared_keys import (
    read_activation,
    read_decoder,
    write_activation,
    write_decoder,
)
from polyhead.config import (
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.layers.latent_layout import reordered

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

# Of the mixture; a file without sparse layers may have them all the same.
_MIXTURE_KEYS = (
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "topk_method",
    "norm_topk_prob",
    "routed_scaling_factor",
)
# Of training and of how a cluster shares the experts.
_HARMLESS_KEYS = (
    "aux_loss_alpha",
    "ep_size",
    "router_aux_loss_coef",
    "seq_aux",
)
_ATTENTION = re.compile(r"layers\.(\d+)\.attention\.(\w+)\.(?:weight|bias)")
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
_STACKED = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")


def read(keys: Keys, scoring: Literal["softmax", "sigmoid"]) -> TransformerConfig:
    """The configuration that the keys mean.

    Args:
        keys: Of config.json.
        scoring: The gate: V2's softmax or V3's sigmoid.

    Raises:
        ConfigError: A key is missing, not understood or contradicts another, by name.
    """
    keys.expect("scoring_func", scoring)
    keys.expect("moe_layer_freq", 1)
    keys.whole("num_nextn_predict_layers", 0)
    for key in _HARMLESS_KEYS:
        keys.take(key, None)
    num_layers = keys.num_layers("num_hidden_layers")
    max_positions = keys.whole("max_position_embeddings")
    norm = NormConfig("rmsnorm", eps=keys.number("rms_norm_eps"))
    attention = _read_attention(keys, max_positions)
    if not keys.flag("rope_interleave") and scoring == "softmax":
        raise keys.refused("rope_interleave", False, "True: this family has no other order")
    dense = FeedForwardConfig(
        keys.whole("intermediate_size"),
        activation=read_activation(keys),
        bias=keys.flag("mlp_bias") if scoring == "softmax" else False,
    )
    first = keys.whole("first_k_dense_replace")
    if first < 0:
        raise keys.refused("first_k_dense_replace", first, "a number of layers")
    sparse: FeedForwardConfig | MixtureConfig = dense
    if first < num_layers:
        sparse = _read_mixture(keys, scoring, dense)
    for key in _MIXTURE_KEYS:
        keys.take(key, None)
    layers = [
        LayerConfig(attention, dense if i < first else sparse, norm) for i in range(num_layers)
    ]
    return read_decoder(keys, layers, max_positions=_reach(attention, max_positions), norm=norm)


def write(config: TransformerConfig, model_type: str, class_prefix: str) -> dict[str, Any]:
    """config.json's object, as far as the family can say it.

    Raises:
        ConfigError: The layers are not DeepSeek's.
    """
    attention = config.layers[0].attention
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    mixtures = [i for i, each in enumerate(networks) if isinstance(each, MixtureConfig)]
    first = mixtures[0] if mixtures else len(networks)
    if not isinstance(attention, LatentAttentionConfig) or attention.rope is None:
        raise ConfigError(f"attention={attention}")
    values = {
        **write_decoder(config, class_prefix, model_type),
        "num_key_value_heads": attention.num_heads,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "attention_bias": attention.bias,
        "max_position_embeddings": stated_length(attention.rope, config.max_positions),
        "first_k_dense_replace": first,
        **write_rope(attention.rope, attention.qk_rope_head_dim),
    }
    dense = networks[0]
    if isinstance(dense, MixtureConfig):
        # No layer has the plain network; the mixture's own numbers stand in for the key.
        dense = dense.shared or dense.expert
    values["intermediate_size"] = dense.hidden_dim
    values["hidden_act"] = write_activation(dense.activation)
    if dense.bias:
        values["mlp_bias"] = True
    if mixtures:
        values |= _write_mixture(networks[first])
    return values


def experts_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacked experts as a tensor per expert (views); everything else as it is.

    ``gate_up_proj`` ``[X, 2F, E]`` holds the rows of the gate, then those that it multiplies.
    """
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found = _STACKED.fullmatch(name)
        if found is None or tensor.ndim != 3:
            apart[name] = tensor
            continue
        prefix, kind = found.groups()
        for number, expert in enumerate(tensor):
            if kind == "down_proj":
                apart[f"{prefix}{number}.down_proj.weight"] = expert
            else:
                gate, up = expert.tensor_split(2)
                apart[f"{prefix}{number}.gate_proj.weight"] = gate
                apart[f"{prefix}{number}.up_proj.weight"] = up
    return apart


def of_drafting_layers(names: Iterable[str], values: Mapping[str, Any]) -> set[str]:
    """The tensors of layers for multi-token prediction, which follow on from the model's own.

    Args:
        names: Of a file's tensors.
        values: Of its config.json, read without error.
    """
    first = values.get("num_hidden_layers", 0)
    extra = values.get("num_nextn_predict_layers") or 0
    layers = {name: _LAYER.match(name) for name in names}
    return {name for name, at in layers.items() if at and first <= int(at[1]) < first + extra}


def rows_in_order(name: str, tensor: Tensor, config: TransformerConfig, *, to_ours: bool) -> Tensor:
    """A tensor with its rotary rows half-split (``to_ours``) or interleaved, as files have them.

    Args:
        name: polyhead's name of it.
        tensor: Of any layer; one without rotary rows stays as it is.
        config: Of the model.
        to_ours: Which way.
    """
    found = _ATTENTION.fullmatch(name)
    if found is None or int(found[1]) >= len(config.layers):
        return tensor
    attention = config.layers[int(found[1])].attention
    if not isinstance(attention, LatentAttentionConfig):
        return tensor
    return reordered(tensor, found[2], attention, to_ours=to_ours)


def _read_attention(keys: Keys, max_positions: int) -> LatentAttentionConfig:
    num_heads, rotated = keys.whole("num_attention_heads"), keys.whole("qk_rope_head_dim")
    attention = LatentAttentionConfig(
        num_heads=num_heads,
        kv_lora_rank=keys.whole("kv_lora_rank"),
        qk_nope_head_dim=keys.whole("qk_nope_head_dim"),
        qk_rope_head_dim=rotated,
        v_head_dim=keys.whole("v_head_dim"),
        q_lora_rank=keys.whole("q_lora_rank", None),
        bias=keys.flag("attention_bias"),
        rope=read_rope(keys, rotated, max_positions),
        dropout=keys.number("attention_dropout"),
    )
    # Keys that say again what follows from the others; a file in which they differ is broken.
    keys.expect("num_key_value_heads", num_heads, None)
    keys.expect("head_dim", rotated, None)
    keys.expect("qk_head_dim", attention.qk_head_dim, None)
    return attention


def _read_mixture(
    keys: Keys, scoring: Literal["softmax", "sigmoid"], dense: FeedForwardConfig
) -> MixtureConfig:
    sigmoid, width = scoring == "sigmoid", keys.whole("moe_intermediate_size")
    methods = ("noaux_tc",) if sigmoid else ("greedy", "group_limited_greedy")
    method = keys.take("topk_method")
    if method not in methods:
        raise keys.refused("topk_method", method, " or ".join(map(repr, methods)))
    normalise = keys.flag("norm_topk_prob")
    if normalise and not sigmoid:
        raise keys.refused("norm_topk_prob", True, "False: transformers' V2 does not normalise")
    grouped = method != "greedy"
    shared = keys.whole("n_shared_experts", 0)
    return MixtureConfig(
        expert=FeedForwardConfig(width, activation=dense.activation),
        num_experts=keys.whole("n_routed_experts"),
        experts_per_token=keys.whole("num_experts_per_tok"),
        shared=FeedForwardConfig(shared * width, activation=dense.activation, bias=dense.bias)
        if shared
        else None,
        scoring=scoring,
        choice_bias=sigmoid,
        normalise=normalise,
        scale=keys.number("routed_scaling_factor"),
        groups=keys.whole("n_group") if grouped else 1,
        groups_per_token=keys.whole("topk_group") if grouped else 1,
        group_score="best two" if sigmoid else "best",
    )


def _write_mixture(mixture: FeedForwardConfig | MixtureConfig) -> dict[str, Any]:
    if not isinstance(mixture, MixtureConfig):
        return {}
    width = mixture.expert.hidden_dim
    method = "greedy" if mixture.groups == 1 else "group_limited_greedy"
    return {
        "moe_intermediate_size": width,
        "n_routed_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "n_shared_experts": 0 if mixture.shared is None else mixture.shared.hidden_dim // width,
        "scoring_func": mixture.scoring,
        "topk_method": "noaux_tc" if mixture.scoring == "sigmoid" else method,
        "norm_topk_prob": mixture.normalise,
        "routed_scaling_factor": mixture.scale,
        "n_group": mixture.groups,
        "topk_group": mixture.groups_per_token,
    }


def _reach(attention: LatentAttentionConfig, stated: int) -> int:
    return stated if attention.rope is None else reach(attention.rope, stated)
