"""Mixtures of experts after some dense layers, in the keys and names that many families share.

DeepSeek's keys (DeepSeek-V2, 2024; DeepSeek-V3, 2024) say which layers have experts, how many and
how they are chosen. Files hold a tensor per expert (as the hub's files, and as transformers saves
them) or all experts of a layer stacked (as transformers computes with them). Layers of multi-token
prediction beyond ``num_hidden_layers`` predict further tokens for training and drafting; a model
leaves them out, and ``predictors.py`` says which families' files a predictor is read from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from polyhead.config import FeedForwardConfig, MixtureConfig, TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.common.keys import Keys
from polyhead.families.common.steps import PerExpert, Rows
from polyhead.families.common.tensors import Rule, under

DRAFTS = "predicts further tokens, for training and drafting"

# Keys of the mixture, also in files without sparse layers.
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
_MIXTURE = "layers.{i}.feed_forward."
EXPERTS = (
    Rule("layers.{i}.mlp.gate", _MIXTURE + "router"),
    Rule("layers.{i}.mlp.gate.e_score_correction_bias", _MIXTURE + "choice_bias"),
    *under(
        "layers.{i}.mlp.",
        _MIXTURE,
        {
            f"{theirs}{name}": f"{ours}{name}"
            for theirs, ours in (("experts.{j}.", "experts.{j}."), ("shared_experts.", "shared."))
            for name in ("gate_proj", "up_proj", "down_proj")
        },
    ),
)
STACKED_EXPERTS = (
    Rule(
        "layers.{i}.mlp.experts.gate_up_proj",
        (_MIXTURE + "experts.{j}.gate_proj.weight", _MIXTURE + "experts.{j}.up_proj.weight"),
        PerExpert(),
        Rows(),
    ),
    Rule(
        "layers.{i}.mlp.experts.down_proj",
        _MIXTURE + "experts.{j}.down_proj.weight",
        PerExpert(),
    ),
)

GGUF_MIXTURE: Mapping[str, str | None] = {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
CHOICE_BIAS = {"layers.{i}.mlp.gate.e_score_correction_bias": "blk.{i}.exp_probs_b.bias"}
"""Settings and a name of the mixture in GGUF files."""


def read_networks(
    keys: Keys,
    scoring: Literal["softmax", "sigmoid"],
    dense: FeedForwardConfig,
    num_layers: int,
    *,
    listed: bool = False,
) -> list[FeedForwardConfig | MixtureConfig]:
    """The network of every layer.

    Args:
        keys: Keys of config.json.
        scoring: The gate: V2's softmax or V3's sigmoid.
        dense: The network of layers without experts.
        num_layers: How many layers.
        listed: Whether a list may say which layers are dense.
    """
    keys.expect("moe_layer_freq", 1)
    kinds = keys.texts("mlp_layer_types", []) if listed else []
    are_dense = dense_layers(keys, num_layers, kinds)
    sparse = dense if all(are_dense) else read_mixture(keys, scoring, dense)
    for key in _MIXTURE_KEYS:
        keys.take(key, None)
    return [dense if is_dense else sparse for is_dense in are_dense]


def dense_layers(keys: Keys, num_layers: int, kinds: list[str]) -> list[bool]:
    """Which layers have a dense network: those that a list names, or the first few."""
    first = keys.whole("first_k_dense_replace")
    if first < 0:
        raise keys.refused("first_k_dense_replace", first, "a number of layers")
    if not kinds:
        return [i < first for i in range(num_layers)]
    if len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}:
        raise keys.refused("mlp_layer_types", kinds, f"'dense' or 'sparse' for {num_layers} layers")
    return [kind == "dense" for kind in kinds]


def read_mixture(
    keys: Keys, scoring: Literal["softmax", "sigmoid"], dense: FeedForwardConfig
) -> MixtureConfig:
    """The experts, with the activation of dense networks."""
    sigmoid, width = scoring == "sigmoid", keys.whole("moe_intermediate_size")
    methods = ("noaux_tc", None) if sigmoid else ("greedy", "group_limited_greedy")
    method = keys.take("topk_method", methods[0])
    if method not in methods:
        raise keys.refused("topk_method", method, " or ".join(map(repr, methods)))
    normalize = keys.flag("norm_topk_prob")
    if normalize and not sigmoid:
        raise keys.refused("norm_topk_prob", True, "False: transformers' V2 does not normalize")
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
        choice_bias=method == "noaux_tc",
        normalize=normalize,
        scale=keys.number("routed_scaling_factor"),
        groups=keys.whole("n_group", 1) if grouped else 1,
        groups_per_token=keys.whole("topk_group", 1) if grouped else 1,
        group_score="best two" if sigmoid else "best",
    )


def write_networks(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of ``read_networks``."""
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    mixtures = [i for i, each in enumerate(networks) if isinstance(each, MixtureConfig)]
    dense = next((each for each in networks if isinstance(each, FeedForwardConfig)), None)
    first = mixtures[0] if mixtures else len(networks)
    values: dict[str, Any] = {"first_k_dense_replace": first}
    if dense is not None:
        values["intermediate_size"] = dense.hidden_dim
    if mixtures != [*range(first, len(networks))]:
        values |= write_dense_layers(config)
    return values | (write_mixture(networks[first]) if mixtures else {})


def write_dense_layers(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of ``dense_layers``."""
    networks = [layer.feed_forward for layer in config.layers]
    return {"mlp_layer_types": ["sparse" if hasattr(n, "expert") else "dense" for n in networks]}


def write_mixture(mixture: FeedForwardConfig | MixtureConfig) -> dict[str, Any]:
    if not isinstance(mixture, MixtureConfig):
        return {}
    width = mixture.expert.hidden_dim
    method: str | None = "greedy" if mixture.groups == 1 else "group_limited_greedy"
    if mixture.scoring == "sigmoid":
        method = "noaux_tc" if mixture.choice_bias else None
    return {
        "moe_intermediate_size": width,
        "n_routed_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "n_shared_experts": 0 if mixture.shared is None else mixture.shared.hidden_dim // width,
        "topk_method": method,
        "norm_topk_prob": mixture.normalize,
        "routed_scaling_factor": mixture.scale,
        "n_group": mixture.groups,
        "topk_group": mixture.groups_per_token,
    }


def drafting(values: Mapping[str, Any], key: str = "num_nextn_predict_layers") -> dict[str, str]:
    """Layers of multi-token prediction, which follow the model's own; ``key`` says how many."""
    first, extra = values["num_hidden_layers"], values.get(key) or 0
    numbers = "|".join(str(first + i) for i in range(extra))
    return {rf"layers\.({numbers})\..+": DRAFTS} if extra else {}


def without_drafts(
    values: Mapping[str, Any], key: str = "num_nextn_predict_layers"
) -> dict[str, Any]:
    """The number of layers of a GGUF file, which counts those among the others.

    Raises:
        ConfigError: There are no layers but those.
    """
    layers, extra = values["num_hidden_layers"], values.get(key, 0)
    if type(extra) is not int or not 0 <= extra < layers:
        raise ConfigError(
            f"nextn_predict_layers is {extra}; supported is 0 to {layers - 1}, below block_count"
        )
    return {"num_hidden_layers": layers - extra}
