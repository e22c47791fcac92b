"""Granite 3 and 4 (IBM 2024, 2025): Llama with four multipliers, its mixture of experts, hybrids of
Mamba-2 and attention, and models with windows, sinks and a rotary base for each layer. HyperCLOVA X
(Naver 2025) has the multipliers and norms on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    HeadLayout,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import PAIRS, Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.mamba2 import DEFAULTS as MAMBA2
from polyhead.families.common.mamba2 import HARMLESS as MAMBA2_HARMLESS
from polyhead.families.common.mamba2 import mamba2_rules, read_mamba2, write_mamba2
from polyhead.families.common.plain import windowed, write_window
from polyhead.families.common.reading import (
    FULL,
    LINEAR,
    SLIDING,
    Sizes,
    read_decoder,
    read_network,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import PerExpert, Rows
from polyhead.families.common.tables import (
    AROUND_LAYERS,
    ATTENTION,
    DECODER,
    FREQUENCIES,
    NORMS,
    SINKS,
)
from polyhead.families.common.tensors import Rule, Tensors
from polyhead.families.granite_gguf import BAILINGMOE, HYBRID, MINICPM, MIXTURE, SCALES, SHARED

_MIXTURE = "layers.{i}.feed_forward."
_SPARSE = "layers.{i}.block_sparse_moe."


def experts(router: str, into: str, out: str) -> tuple[Rule, ...]:
    """Names of a mixture whose experts lie stacked, gate and up in one tensor."""
    expert = _MIXTURE + "experts.{j}."
    pair = (expert + "gate_proj.weight", expert + "up_proj.weight")
    return (
        Rule(_SPARSE + router, _MIXTURE + "router"),
        Rule(_SPARSE + into, pair, PerExpert(), Rows()),
        Rule(_SPARSE + out, expert + "down_proj.weight", PerExpert()),
    )


EXPERTS = experts("router.layer", "input_linear.weight", "output_linear.weight")


def read(keys: Keys, network: Callable[[Keys], Any]) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions)
    return _decoder(keys, sizes, norm, rope, [_attention(keys, sizes, rope)], network(keys))


def read_windowed(keys: Keys, network: Callable[[Keys], Any]) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    count = sizes.num_layers
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions)
    thetas = keys.numbers("layer_rope_theta", []) or [rope.theta] * count
    if len(thetas) != count:
        raise keys.refused("layer_rope_theta", thetas, f"{count} numbers, one for each layer")
    default = [SLIDING if i % 4 else FULL for i in range(count)]
    attention = _attention(keys, sizes, rope, sinks=True)
    attentions = [
        replace(each, rope=replace(rope, theta=float(theta)) if theta else None)
        for each, theta in zip(windowed(keys, attention, count, default), thetas, strict=True)
    ]
    return _decoder(keys, sizes, norm, rope, attentions, network(keys))


def read_hyperclovax(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions)
    scale = keys.number("attention_multiplier", None)
    return _decoder(
        keys,
        sizes,
        norm,
        rope,
        [_attention(keys, sizes, rope, scale=scale)],
        dense(keys),
        norm_placement="sandwich" if keys.flag("use_post_norm") else "pre",
        logit_scale=keys.number("logits_scaling"),
    )


def dense(keys: Keys) -> FeedForwardConfig:
    return read_network(keys, bias=keys.flag("mlp_bias"))


def sparse(keys: Keys) -> MixtureConfig:
    return _mixture(keys, read_network(keys))


def shared(keys: Keys) -> MixtureConfig:
    expert, width = read_network(keys), keys.whole("shared_intermediate_size")
    beside = replace(expert, hidden_dim=width) if width else None
    return replace(_mixture(keys, expert), shared=beside)


def read_hybrid(keys: Keys) -> TransformerConfig:
    sizes, norm, expert = read_sizes(keys), read_rms_norm(keys), read_network(keys)
    rope: RopeConfig | None = read_rope(keys, sizes.head_dim, sizes.max_positions)
    kind = keys.take("position_embedding_type")
    if kind not in (None, "rope", "nope"):
        raise keys.refused("position_embedding_type", kind, "'rope', 'nope' or null")
    if kind != "rope":
        rope = None
    network: Any = replace(expert, hidden_dim=keys.size("shared_intermediate_size"))
    experts = keys.whole("num_local_experts", 0)
    if experts:
        network = replace(_mixture(keys, expert), shared=network)
    else:
        keys.take("num_experts_per_tok", None)
    state = read_mamba2(keys, sizes.embed_dim, norm.eps)
    known = {LINEAR: state, "mamba": state, FULL: (full := _attention(keys, sizes, rope))}
    known["attention"] = full
    kinds = keys.texts("layer_types", [LINEAR] * sizes.num_layers)
    if len(kinds) != sizes.num_layers or not {*kinds} <= {*known}:
        raise keys.refused("layer_types", kinds, f"{sizes.num_layers} of {', '.join(known)}")
    return _decoder(keys, sizes, norm, rope, [known[kind] for kind in kinds], network)


def _attention(
    keys: Keys, sizes: Sizes, rope: RopeConfig | None, **options: Any
) -> AttentionConfig:
    biased = keys.flag("attention_bias")
    if "scale" not in options:
        options["scale"] = keys.number("attention_multiplier")
    return sizes.attention(
        qkv_bias=biased,
        out_bias=biased,
        rope=rope,
        dropout=keys.number("attention_dropout"),
        **options,
    )


def _mixture(keys: Keys, expert: FeedForwardConfig) -> MixtureConfig:
    experts, visited = keys.whole("num_local_experts"), keys.whole("num_experts_per_tok")
    return MixtureConfig(expert, experts, visited, normalize=True)


def _decoder(
    keys: Keys,
    sizes: Sizes,
    norm: NormConfig,
    rope: RopeConfig | None,
    attentions: Sequence[HeadLayout],
    network: Any,
    *,
    norm_placement: Literal["pre", "sandwich"] = "pre",
    logit_scale: float | None = None,
) -> TransformerConfig:
    """The model of these layers; one stands for all."""
    scale = keys.number("residual_multiplier")
    layers = [
        LayerConfig(each, network, norm, norm_placement, residual_scale=scale)
        for each in attentions
    ]
    return read_decoder(
        keys,
        layers if len(layers) > 1 else layers * sizes.num_layers,
        max_positions=sizes.max_positions if rope is None else reach(rope, sizes.max_positions),
        norm=norm,
        embedding=EmbeddingConfig(scale=keys.number("embedding_multiplier")),
        logit_scale=1.0 / keys.positive("logits_scaling") if logit_scale is None else logit_scale,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.attention for layer in config.layers]
    attention = next((each for each in found if each.kind == "heads"), None)
    if attention is None:
        raise ConfigError("this family needs a layer of attention: got none")
    network: Any = config.layers[0].feed_forward
    values = {
        "attention_multiplier": attention.head_dim**-0.5
        if attention.scale is None
        else attention.scale,
        "residual_multiplier": config.layers[0].residual_scale,
        "embedding_multiplier": config.embedding.scale,
        "logits_scaling": 1.0 / config.logit_scale,
    }
    if isinstance(network, MixtureConfig):
        values["num_local_experts"] = network.num_experts
    return values


def write_windowed(config: TransformerConfig) -> dict[str, Any]:
    ropes = [layer.attention.rope for layer in config.layers]
    mixed = isinstance(config.layers[0].feed_forward, MixtureConfig)
    return {
        **(write_shared(config) if mixed else write(config)),
        "layer_rope_theta": [0 if each is None else each.theta for each in ropes],
        **write_window(config, 128),
    }


def write_hyperclovax(config: TransformerConfig) -> dict[str, Any]:
    attention: Any = config.layers[0].attention
    return write(config) | {
        "attention_multiplier": attention.scale,
        "logits_scaling": config.logit_scale,
        "use_post_norm": config.layers[0].norm_placement == "sandwich",
    }


def write_shared(config: TransformerConfig) -> dict[str, Any]:
    network: Any = config.layers[0].feed_forward
    if not isinstance(network, MixtureConfig):
        raise ConfigError("this family needs a mixture of experts: got none")
    width = 0 if network.shared is None else network.shared.hidden_dim
    sizes = {
        "intermediate_size": network.expert.hidden_dim,
        "shared_intermediate_size": width,
    }
    return write(config) | sizes


def write_hybrid(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.attention for layer in config.layers]
    state = next((each for each in found if each.kind == "mamba2"), None)
    values = write(config)
    full = next(each for each in found if each.kind == "heads")
    network: Any = config.layers[0].feed_forward
    if state is None:
        raise ConfigError("this family needs a layer of Mamba-2: got none")
    expert = getattr(network, "expert", network)
    return values | {
        "position_embedding_type": "nope" if full.rope is None else "rope",
        "layer_types": [FULL if each == full else LINEAR for each in found],
        "num_local_experts": getattr(network, "num_experts", 0),
        "intermediate_size": expert.hidden_dim,
        "shared_intermediate_size": getattr(network, "shared", network).hidden_dim,
        **write_mamba2(state, config.embed_dim),
    }


def _network_beside(prefix: str) -> tuple[Rule, ...]:
    """Names of the network beside experts, or alone."""
    return (
        Rule(
            "layers.{i}.shared_mlp.input_linear.weight",
            (prefix + "gate_proj.weight", prefix + "up_proj.weight"),
            Rows(),
        ),
        Rule("layers.{i}.shared_mlp.output_linear", prefix + "down_proj"),
    )


def tensors_of_hybrid(values: Mapping[str, Any]) -> Tensors:
    """Where there are experts, the other network stands beside them."""
    beside = _MIXTURE + ("shared." if values.get("num_local_experts") else "")
    kinds = values.get("layer_types") or []
    return Tensors(
        (
            *AROUND_LAYERS,
            *NORMS,
            *EXPERTS,
            *_network_beside(beside),
            *(
                Rule(f"layers.{i}.self_attn.o_proj", f"layers.{i}.attention.o_proj")
                for i, kind in enumerate(kinds)
                if kind in (FULL, "attention")
            ),
            *mamba2_rules("layers.{i}.mamba.", "layers.{i}.attention."),
            *ATTENTION,
        ),
        dropped=FREQUENCIES,
    )


_DEFAULTS = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def _tensors_of_shared(experts: tuple[Rule, ...]) -> Tensors:
    beside = _network_beside(_MIXTURE + "shared.")
    return Tensors((*AROUND_LAYERS, *NORMS, *ATTENTION, *experts, *beside), dropped=FREQUENCIES)


_EXPERTS_OF_SHARED = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 0,
}
_WINDOWS = {"sliding_window": 128, "layer_types": None, "layer_rope_theta": None}

FAMILIES = (
    Family(
        "granite",
        "Granite",
        partial(read, network=dense),
        DECODER,
        defaults=_DEFAULTS | {"mlp_bias": False},
        write=write,
        gguf=Gguf("granite", settings=SCALES, steps=PAIRS),
        more_gguf=(MINICPM,),
    ),
    Family(
        "granitemoe",
        "GraniteMoe",
        partial(read, network=sparse),
        Tensors((*AROUND_LAYERS, *NORMS, *ATTENTION, *EXPERTS), dropped=FREQUENCIES),
        defaults=_DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2},
        write=write,
        harmless=frozenset(("router_aux_loss_coef",)),
        gguf=MIXTURE,
    ),
    Family(
        "granitemoeshared",
        "GraniteMoeShared",
        partial(read, network=shared),
        _tensors_of_shared(EXPERTS),
        defaults=_DEFAULTS | _EXPERTS_OF_SHARED,
        write=write_shared,
        harmless=frozenset(("router_aux_loss_coef",)),
        gguf=SHARED,
        more_gguf=(BAILINGMOE,),
    ),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        read_hybrid,
        tensors_of_hybrid,
        defaults={
            **_DEFAULTS,
            **MAMBA2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "position_embedding_type": None,
            "layer_types": None,
        },
        write=write_hybrid,
        harmless=MAMBA2_HARMLESS | {"router_aux_loss_coef"},
        gguf=HYBRID,
    ),
    Family(
        "granite_swa",
        "GraniteSWA",
        partial(read_windowed, network=dense),
        DECODER.extended(SINKS),
        defaults=_DEFAULTS
        | _WINDOWS
        | {
            "mlp_bias": False,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 100_257,
            "eos_token_id": 100_257,
        },
        write=write_windowed,
    ),
    Family(
        "granitemoe_swa",
        "GraniteMoeSWA",
        partial(read_windowed, network=shared),
        _tensors_of_shared(experts("router", "experts.gate_up_proj", "experts.down_proj")).extended(
            SINKS
        ),
        defaults=_DEFAULTS | _WINDOWS | _EXPERTS_OF_SHARED,
        write=write_windowed,
        harmless=frozenset(("router_aux_loss_coef",)),
    ),
    Family(
        "hyperclovax",
        "HyperCLOVAX",
        read_hyperclovax,
        DECODER.extended(
            Rule("layers.{i}.post_norm1", "layers.{i}.attention_out_norm"),
            Rule("layers.{i}.post_norm2", "layers.{i}.feed_forward_out_norm"),
        ),
        defaults=_DEFAULTS
        | {"mlp_bias": False, "attention_multiplier": None, "use_post_norm": True},
        write=write_hyperclovax,
    ),
)
