"""Command R (Cohere 2024), Command R7B, Command A+: parallel layers with one norm, scaled logits.

The second has windows with rotation in three of four layers and neither in the fourth. The third
(2026) adds mixtures of experts, behind a few dense layers that may rotate without a window; a
shared network is added to the chosen experts or averaged with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from polyhead.config import (
    FeedForwardConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.mixtures import EXPERTS, dense_layers
from polyhead.families.common.plain import PLAIN_DEFAULTS, Plain, every, windowed, write_window
from polyhead.families.common.reading import read_layer_norm
from polyhead.families.common.rope import write_parameters
from polyhead.families.common.steps import At, RotaryPairs
from polyhead.families.common.tables import AROUND_LAYERS, NETWORK
from polyhead.families.common.tensors import Rule, Tensors, under

DEFAULTS = {key: value for key, value in PLAIN_DEFAULTS.items() if key != "rms_norm_eps"} | {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "pad_token_id": 0,
}


def read_first(keys: Keys) -> TransformerConfig:
    norm = read_layer_norm(keys, bias=False)
    plain = Plain(keys, norm=norm, theta=5e5)
    qk_norm = QKNormConfig(norm, per_head=True) if keys.flag("use_qk_norm") else None
    layer = plain.layer(plain.attention(qk_norm=qk_norm), parallel="one norm")
    return plain.decoder([layer], logit_scale=keys.number("logit_scale"))


def read_second(keys: Keys) -> TransformerConfig:
    plain = Plain(keys, norm=read_layer_norm(keys, bias=False))
    count, pattern = plain.sizes.num_layers, keys.whole("sliding_window_pattern", 4)
    keys.take("_sliding_window_pattern", None)  # follows from layer_types
    attentions = windowed(keys, plain.attention(), count, every(count, max(pattern, 1)), rope=None)
    layers = [plain.layer(each, parallel="one norm") for each in attentions]
    return plain.decoder(layers, logit_scale=keys.number("logit_scale"))


def read_mixed(keys: Keys) -> TransformerConfig:
    eps = keys.number("rms_norm_eps", None)
    layer_norm = read_layer_norm(keys, bias=False)
    norm = layer_norm if eps is None else NormConfig("rmsnorm", eps=eps)
    plain = Plain(keys, norm=norm, filled_in=True)
    keys.expect("use_parallel_block", True)
    keys.expect("use_qk_norm", False)
    count = plain.sizes.num_layers
    pattern, prefix = (
        keys.size(key) for key in ("sliding_window_pattern", "prefix_dense_sliding_window_pattern")
    )
    are_dense = dense_layers(keys, count, keys.texts("mlp_layer_types", []))
    first = min(keys.whole("first_k_dense_replace"), count)
    default = every(first, prefix) + every(count - first, pattern)
    attentions = windowed(keys, plain.attention(), count, default, rope=None)
    mixture, width = _read_mixture(keys, plain.network), plain.network.hidden_dim
    dense = replace(plain.network, hidden_dim=keys.size("prefix_dense_intermediate_size", width))
    layers = []
    for attention, is_dense in zip(attentions, are_dense, strict=True):
        if is_dense and prefix == 1:
            attention = replace(attention, rope=plain.rope)
        layers.append(plain.layer(attention, dense if is_dense else mixture, parallel="one norm"))
    return plain.decoder(layers, logit_scale=keys.number("logit_scale"))


def _read_mixture(keys: Keys, expert: FeedForwardConfig) -> MixtureConfig:
    scorings = {"softmax": "softmax", "sigmoid": "sigmoid"}
    scoring: Any = keys.choice("expert_selection_fn", scorings)
    share = keys.choice("shared_expert_combination_strategy", {"average": 0.5, "sum": 1.0})
    shared, normalize = keys.whole("num_shared_experts"), keys.flag("norm_topk_prob")
    return MixtureConfig(
        expert,
        keys.whole("num_experts"),
        keys.whole("num_experts_per_tok"),
        shared=replace(expert, hidden_dim=shared * expert.hidden_dim) if shared else None,
        scoring=scoring,
        normalize=normalize or scoring == "softmax",
        scale=share if shared else 1.0,
        shared_scale=share if shared else 1.0,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return {"logit_scale": config.logit_scale, "use_qk_norm": attention.qk_norm is not None}


def write_second(config: TransformerConfig) -> dict[str, Any]:
    return {"logit_scale": config.logit_scale, **write_window(config, 4096)}


def write_mixed(config: TransformerConfig) -> dict[str, Any]:
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    mixture = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    if mixture is None:
        raise ConfigError("this family needs a layer with a mixture of experts: got none")
    width, shared, norm = mixture.expert.hidden_dim, mixture.shared, config.layers[0].norm
    dense = [each for each in networks if isinstance(each, FeedForwardConfig)]
    turned = [
        layer.attention.rope is not None
        for layer in config.layers
        if isinstance(layer.feed_forward, FeedForwardConfig)
    ]
    rope = next((layer.attention.rope for layer in config.layers if layer.attention.rope), None)
    values = {
        **write_second(config),
        **({} if rope is None else write_parameters(rope)),
        "intermediate_size": width,
        "mlp_layer_types": ["sparse" if each == mixture else "dense" for each in networks],
        "rms_norm_eps": norm.eps if norm.type == "rmsnorm" else None,
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.experts_per_token,
        "norm_topk_prob": mixture.normalize,
        "expert_selection_fn": mixture.scoring,
        "num_shared_experts": 0 if shared is None else shared.hidden_dim // width,
        "shared_expert_combination_strategy": "average" if mixture.shared_scale == 0.5 else "sum",
        "prefix_dense_sliding_window_pattern": 1 if all(turned) else 2,
    }
    if dense:
        values["prefix_dense_intermediate_size"] = dense[0].hidden_dim
    return values


@dataclass(frozen=True)
class WeightPairs(RotaryPairs):
    """``RotaryPairs`` of norms with a weight for each head, ``[H, D]``."""

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return super().changed(tensor.flatten(), at).view_as(tensor)

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return super().restored(tensor.flatten(), at).view_as(tensor)


NORM = Rule("layers.{i}.input_layernorm", "layers.{i}.attention_norm")


def _tensors() -> Tensors:
    theirs, ours = "layers.{i}.self_attn.", "layers.{i}.attention."
    return Tensors(
        (
            *AROUND_LAYERS,
            NORM,
            *(Rule(theirs + name, ours + name, RotaryPairs()) for name in ("q_proj", "k_proj")),
            *(Rule(theirs + name, ours + name, WeightPairs()) for name in ("q_norm", "k_norm")),
            *under(theirs, ours, {"v_proj": "v_proj", "o_proj": "o_proj"}),
            *NETWORK,
        )
    )


FAMILIES = (
    Family(
        "cohere",
        "Cohere",
        read_first,
        _tensors(),
        defaults=DEFAULTS | {"use_qk_norm": False},
        write=write,
        gguf=Gguf("command-r"),
    ),
    Family(
        "cohere2",
        "Cohere2",
        read_second,
        _tensors(),
        defaults=DEFAULTS | {"sliding_window": 4096},
        write=write_second,
        gguf=Gguf("cohere2"),
    ),
    Family(
        "cohere2_moe",
        "Cohere2Moe",
        read_mixed,
        _tensors().extended(*EXPERTS),
        defaults=DEFAULTS
        | {
            "head_dim": 128,
            "rms_norm_eps": None,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "prefix_dense_sliding_window_pattern": 1,
            "first_k_dense_replace": 0,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 0,
            "norm_topk_prob": True,
            "expert_selection_fn": "softmax",
            "shared_expert_combination_strategy": "average",
        },
        write=write_mixed,
    ),
)
