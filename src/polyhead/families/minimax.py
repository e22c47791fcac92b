"""MiniMax-Text-01 (2025, arXiv 2501.08313): Lightning attention, and softmax in some layers.

The residual path starts behind a norm and is weighed (DeepNorm): norm(a x + b f(x)), where the
first norm is over the embedding, and the last one that of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import (
    EmbeddingConfig,
    LayerConfig,
    LightningAttentionConfig,
    MixtureConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    FULL,
    LINEAR,
    read_decoder,
    read_layer_types,
    read_network,
    read_rms_norm,
    read_sizes,
)
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import QKVPerGroup
from polyhead.families.common.tables import ATTENTION, FREQUENCIES
from polyhead.families.common.tensors import Rule, Tensors
from polyhead.families.mixtral import BLOCK_SPARSE

_FACTORS = ("full_attn", "linear_attn", "mlp")
_KINDS = (LINEAR, FULL)


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(keys, sizes.head_dim, sizes.max_positions, theta=1e6)
    full = sizes.attention(
        rope=rope,
        window=keys.whole("sliding_window", None),
        dropout=keys.number("attention_dropout"),
    )
    network = read_network(keys)
    if network.activation not in ("silu", "gelu", "relu"):
        raise keys.refused("hidden_act", network.activation, "silu, gelu or relu")
    mixture = MixtureConfig(
        network,
        keys.whole("num_local_experts"),
        keys.whole("num_experts_per_tok"),
        normalize=True,
    )
    mixes = {
        name: (keys.number(f"{name}_alpha_factor"), keys.number(f"{name}_beta_factor"))
        for name in _FACTORS
    }
    layers, default = [], _default(sizes.num_layers)
    for i, kind in enumerate(read_layer_types(keys, sizes.num_layers, default, _KINDS)):
        state = LightningAttentionConfig(
            sizes.num_heads,
            sizes.head_dim,
            slope_scale=1 - i / (sizes.num_layers - 1 + 1e-5) + 1e-5,
            activation=network.activation,
        )
        layers.append(
            LayerConfig(
                full if kind == FULL else state,
                mixture,
                norm,
                "post",
                attention_mix=mixes["full_attn" if kind == FULL else "linear_attn"],
                feed_forward_mix=mixes["mlp"],
            )
        )
    return read_decoder(
        keys,
        layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=None,
        embedding=EmbeddingConfig(norm=norm),
    )


def _default(count: int) -> list[str]:
    """Kinds of so many layers, where a file does not say."""
    return [_KINDS[(i + 1) % 2] for i in range(count)]


def write(config: TransformerConfig) -> dict[str, Any]:
    mixture: Any = config.layers[0].feed_forward
    if not isinstance(mixture, MixtureConfig):
        raise ConfigError("this family needs a mixture of experts in every layer")
    mixes = {"mlp": config.layers[0].feed_forward_mix}
    for layer in config.layers:
        name = "linear_attn" if layer.attention.kind == "lightning" else "full_attn"
        mixes[name] = layer.attention_mix
    return {
        "num_local_experts": mixture.num_experts,
        "layer_types": [
            LINEAR if layer.attention.kind == "lightning" else FULL for layer in config.layers
        ],
        **{f"{name}_alpha_factor": kept for name, (kept, _) in mixes.items()},
        **{f"{name}_beta_factor": added for name, (_, added) in mixes.items()},
    }


def tensors(values: Mapping[str, Any]) -> Tensors:
    """The table of names; a norm before one part stands behind the part before it."""
    count, linear = values["num_hidden_layers"], []
    for i, kind in enumerate(values.get("layer_types") or _default(count)):
        if kind == LINEAR:
            theirs, ours = f"layers.{i}.self_attn.", f"layers.{i}.attention."
            names = [f"{ours}{name}_proj" for name in "qkv"]
            linear.append(Rule(theirs + "qkv_proj", names, QKVPerGroup()))
            linear.append(Rule(theirs + "out_proj", ours + "o_proj"))
    return Tensors(
        (
            Rule("embed_tokens", "embedding.tokens"),
            Rule("layers.0.input_layernorm", "embedding.norm"),
            *(
                Rule(f"layers.{i + 1}.input_layernorm", f"layers.{i}.feed_forward_norm")
                for i in range(count - 1)
            ),
            Rule("norm", f"layers.{count - 1}.feed_forward_norm"),
            Rule("layers.{i}.post_attention_layernorm", "layers.{i}.attention_norm"),
            *linear,
            *ATTENTION,
            Rule("layers.{i}.self_attn.norm", "layers.{i}.attention.norm"),
            Rule("layers.{i}.self_attn.output_gate", "layers.{i}.attention.gate_proj"),
            *BLOCK_SPARSE,
        ),
        dropped=FREQUENCIES
        | {
            r"layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)": "follows from the "
            "configuration"
        },
    )


FAMILIES = (
    Family(
        "minimax",
        "MiniMax",
        read,
        tensors,
        defaults={
            "vocab_size": 32_000,
            "num_key_value_heads": 8,
            "head_dim": None,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "sliding_window": None,
            "attention_dropout": 0.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": None,
            **{f"{name}_{end}_factor": 1 for name in _FACTORS for end in ("alpha", "beta")},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
        },
        write=write,
        harmless=frozenset(("block_size", "router_aux_loss_coef", "router_jitter_noise")),
    ),
)
