"""Qwen 2 and 3 with mixtures of experts (2024, 2025): layers may be dense; 2 has a gated shared
expert, 3 normalized queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from polyhead.config import (
    FeedForwardConfig,
    LayerConfig,
    MixtureConfig,
    QKNormConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    FULL,
    SLIDING,
    read_activation,
    read_decoder,
    read_layer_types,
    read_network,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import AsRow
from polyhead.families.common.tables import DECODER
from polyhead.families.common.tensors import Rule, under
from polyhead.families.common.writing import write_mixture

_MIXTURE = "layers.{i}.feed_forward."
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
EXPERTS = (
    Rule("layers.{i}.mlp.gate", _MIXTURE + "router"),
    *under(
        "layers.{i}.mlp.experts.{j}.",
        _MIXTURE + "experts.{j}.",
        {name: name for name in PROJECTIONS},
    ),
)
"""Names of a mixture in Qwen's and OLMoE's files."""
SHARED = (
    Rule("layers.{i}.mlp.shared_expert_gate", _MIXTURE + "shared_gate"),
    *under(
        "layers.{i}.mlp.shared_expert.", _MIXTURE + "shared.", {name: name for name in PROJECTIONS}
    ),
)

_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def read(keys: Keys, *, third: bool, **rotary: Any) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, **rotary)
    biased = keys.flag("attention_bias" if third else "qkv_bias")
    attention = sizes.attention(
        qkv_bias=biased,
        out_bias=biased and third,
        rope=rope,
        qk_norm=QKNormConfig(norm) if third else None,
        dropout=keys.number("attention_dropout"),
    )
    dense, normalize = read_network(keys), keys.flag("norm_topk_prob")
    mixture = read_mixture(keys, shared=not third, normalize=normalize)
    sparse = sparse_layers(keys, sizes.num_layers)
    layers = [
        LayerConfig(replace(attention, window=window), mixture if i in sparse else dense, norm)
        for i, window in enumerate(_windows(keys, sizes.num_layers, third=third))
    ]
    return read_decoder(keys, layers, max_positions=reach(rope, sizes.max_positions), norm=norm)


def _windows(keys: Keys, count: int, *, third: bool) -> list[int | None]:
    """In 2 of the layers that ``layer_types`` names, in 3 of all."""
    used, window = keys.flag("use_sliding_window"), keys.whole("sliding_window", None)
    if not used:
        window = None
    if third:
        return [window] * count
    first = keys.whole("max_window_layers")
    default = [SLIDING if window is not None and i >= first else FULL for i in range(count)]
    types = read_layer_types(keys, count, default)
    if SLIDING in types and window is None:
        raise keys.refused(
            "layer_types", types, "sliding_attention only with use_sliding_window and a window"
        )
    return [window if kind == SLIDING else None for kind in types]


def read_mixture(keys: Keys, *, shared: bool, normalize: bool) -> MixtureConfig:
    """Experts beside a shared one with a gate, or alone."""
    expert = FeedForwardConfig(keys.whole("moe_intermediate_size"), read_activation(keys))
    beside = None
    if shared:
        beside = replace(expert, hidden_dim=keys.whole("shared_expert_intermediate_size"))
    return MixtureConfig(
        expert,
        keys.whole("num_experts"),
        keys.whole("num_experts_per_tok"),
        shared=beside,
        shared_gate=shared,
        normalize=normalize,
    )


def sparse_layers(keys: Keys, count: int, dense: Sequence[int] = ()) -> frozenset[int]:
    """Every ``decoder_sparse_step``-th layer but ``mlp_only_layers``, or ``dense`` without them."""
    step, found = keys.whole("decoder_sparse_step"), keys.take("mlp_only_layers", None)
    if step < 1:
        raise keys.refused("decoder_sparse_step", step, "at least 1 layer")
    found = [*dense] if found is None else found
    if not isinstance(found, list) or any(type(i) is not int for i in found):
        raise keys.refused("mlp_only_layers", found, "a list of layers' numbers")
    return frozenset(i for i in range(count) if (i + 1) % step == 0 and i not in found)


def write(config: TransformerConfig) -> dict[str, Any]:
    values, mixture = write_networks(config), find_mixture(config)
    if mixture.shared is not None:
        values["qkv_bias"] = getattr(config.layers[0].attention, "qkv_bias", False)
    return values


def find_mixture(config: TransformerConfig) -> MixtureConfig:
    """The first of a family that has them."""
    networks = (layer.feed_forward for layer in config.layers)
    mixture = next((each for each in networks if isinstance(each, MixtureConfig)), None)
    if mixture is None:
        raise ConfigError("this family needs a layer with a mixture of experts: got none")
    return mixture


def write_networks(config: TransformerConfig) -> dict[str, Any]:
    """Sizes of networks and mixtures, and which layers have which."""
    networks: list[Any] = [layer.feed_forward for layer in config.layers]
    dense = [i for i, each in enumerate(networks) if isinstance(each, FeedForwardConfig)]
    mixture = find_mixture(config)
    sizes = networks[dense[0]] if dense else mixture.expert
    return {**write_experts(mixture, dense), "intermediate_size": sizes.hidden_dim}


def write_experts(mixture: MixtureConfig, dense: list[int]) -> dict[str, Any]:
    """The inverse of ``read_mixture`` and ``sparse_layers``."""
    values = {**write_mixture(mixture), "mlp_only_layers": dense}
    if mixture.shared is not None:
        values["shared_expert_intermediate_size"] = mixture.shared.hidden_dim
    return values


HARMLESS = frozenset(("router_aux_loss_coef",))

FAMILIES = (
    Family(
        "qwen2_moe",
        "Qwen2Moe",
        partial(read, third=False),
        DECODER.extended(*EXPERTS, *SHARED),
        defaults=_DEFAULTS
        | {
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "qkv_bias": True,
        },
        write=write,
        harmless=HARMLESS,
        gguf=Gguf(
            "qwen2moe",
            settings={"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
            # Converters of 2024 dropped dimensions of size 1.
            steps={SHARED[0].theirs: (AsRow(),)},
            values=lambda values: {"qkv_bias": values["attention_bias"]},
        ),
    ),
    Family(
        "qwen3_moe",
        "Qwen3Moe",
        partial(read, third=True),
        DECODER.extended(*EXPERTS),
        defaults=_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "sliding_window": 4096,
            "attention_bias": False,
        },
        aliases={"num_experts": "num_local_experts"},
        write=write,
        harmless=HARMLESS | {"max_window_layers"},
        gguf=Gguf("qwen3moe", values=lambda values: {"norm_topk_prob": True}),
    ),
)
