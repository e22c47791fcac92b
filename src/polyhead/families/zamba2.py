"""Zamba 2 (Zyphra 2024, arXiv 2411.15242): Mamba-2, and before some of its layers blocks of
attention and network whose weights several layers share, with adapters of each layer's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyhead.config import (
    FeedForwardConfig,
    HeadLayout,
    LayerConfig,
    Mamba2Config,
    SharedBlockConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.mamba2 import mamba2_rules
from polyhead.families.common.reading import (
    LINEAR,
    divided,
    read_activation,
    read_decoder,
    read_rms_norm,
)
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import Rows
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.common.writing import write_activation

HYBRID = "hybrid"
TYPES, _LONG = "layers_block_type", 16_384


def read(keys: Keys) -> TransformerConfig:
    embed_dim, norm, biased = keys.size("hidden_size"), read_rms_norm(keys), keys.flag(_BIAS)
    heads, positions = keys.size("num_attention_heads"), keys.whole("max_position_embeddings")
    if keys.flag("use_long_context"):
        positions = _LONG
    keys.expect("tie_word_embeddings", True)  # else transformers ties no blocks either
    head_dim = divided(keys, 2 * embed_dim, heads)
    keys.expect("attention_head_dim", head_dim, None)
    keys.expect("attention_hidden_size", 2 * embed_dim, None)
    kinds = read_kinds(keys, _kinds(keys.num_layers("num_hidden_layers")))
    hidden = keys.size("intermediate_size", None) or 4 * embed_dim
    rope = read_rope(keys, head_dim, positions)
    block = SharedBlockConfig(
        heads,
        keys.size("num_key_value_heads", heads),
        head_dim,
        rope=rope if keys.flag("use_mem_rope") else None,
        scale=(head_dim / 2) ** -0.5,
        dropout=keys.number("attention_dropout"),
        mixer=_read_mixer(keys, embed_dim, biased),
        network=FeedForwardConfig(hidden, read_activation(keys), bias=biased),
        norm=norm,
        adapter_rank=keys.size("adapter_rank"),
        head_adapters=keys.flag("use_shared_attention_adapter"),
    )
    if block.head_adapters and block.num_kv_heads != heads:
        raise keys.refused("num_key_value_heads", block.num_kv_heads, f"{heads} beside adapters")
    layers = layers_of(kinds, block, keys.size("num_mem_blocks"))
    reached = positions if block.rope is None else reach(block.rope, positions)
    return read_decoder(keys, layers, max_positions=reached, norm=norm)


def _read_mixer(keys: Keys, embed_dim: int, biased: bool) -> Mamba2Config:
    heads, width = keys.size("n_mamba_heads"), keys.size("mamba_expand") * embed_dim
    if width % heads:
        raise keys.refused("n_mamba_heads", heads, f"a divisor of {width} features")
    keys.expect("mamba_headdim", width // heads, None)
    return Mamba2Config(
        heads,
        keys.size("mamba_ngroups"),
        keys.size("mamba_d_state"),
        width // heads,
        keys.whole("mamba_d_conv"),
        bias=biased,
        dt_min=keys.number("time_step_min"),
    )


def read_kinds(keys: Keys, default: Sequence[str]) -> list[str]:
    """Of each layer whether a block stands before its mixer; the first such has its own."""
    stated = keys.texts(TYPES, []) or [*default]
    kinds = kinds_of(stated)
    count = keys.num_layers("num_hidden_layers")
    if len(kinds) != count or not {*kinds} <= {LINEAR, HYBRID} or HYBRID not in kinds:
        raise keys.refused(TYPES, stated, f"{count} of {LINEAR} and {HYBRID}, and one {HYBRID}")
    return kinds


def kinds_of(stated: Sequence[str]) -> list[str]:
    """In today's words."""
    return [_OLDER.get(each, each) for each in stated]


def _kinds(count: int) -> list[str]:
    """Of Zamba2-2.7B, where the file does not say."""
    blocks = {*range(6, 43, 6), 47, 51}
    return [HYBRID if i in blocks else LINEAR for i in range(54 if count == 54 else 0)]


def layers_of(kinds: Sequence[str], block: SharedBlockConfig, num_blocks: int) -> list[LayerConfig]:
    """Layers with a mixer, and those with a block, of which the first ``num_blocks`` have their own
    and the others take turns.
    """
    plain = LayerConfig(block.mixer, None, block.norm)
    layers: list[LayerConfig] = []
    owners: list[int] = []
    for i, kind in enumerate(kinds):
        if kind == LINEAR:
            layers.append(plain)
            continue
        of = None if len(owners) < num_blocks else owners[len(owners) % num_blocks]
        owners.append(i if of is None else of)
        layers.append(
            LayerConfig(replace(block, block_of=of), None, block.norm, attention_norm=False)
        )
    return layers


def write(config: TransformerConfig) -> dict[str, Any]:
    found: list[HeadLayout] = [layer.attention for layer in config.layers]
    blocks = [each for each in found if isinstance(each, SharedBlockConfig)]
    state = blocks[0].mixer if blocks else None
    if not isinstance(state, Mamba2Config):
        raise ConfigError("this family needs Mamba-2, and a block before it in some layers")
    block = blocks[0]
    return {
        TYPES: [HYBRID if each.kind == block.kind else LINEAR for each in found],
        "intermediate_size": block.network.hidden_dim,
        "hidden_act": write_activation(block.network.activation),
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "rms_norm_eps": block.norm.eps,
        "attention_dropout": block.dropout,
        "num_mem_blocks": sum(each.block_of is None for each in blocks),
        "use_mem_rope": block.rope is not None,
        "use_shared_attention_adapter": block.head_adapters,
        "adapter_rank": block.adapter_rank,
        _BIAS: block.network.bias,
        "n_mamba_heads": state.num_heads,
        "mamba_ngroups": state.num_groups,
        "mamba_d_state": state.state_dim,
        "mamba_d_conv": state.conv_kernel,
        "mamba_expand": state.num_heads * state.head_dim // config.embed_dim,
        "time_step_min": state.dt_min,
    }


def tensors(values: Mapping[str, Any]) -> Tensors:
    """The table of names: a block's tensors and all its adapters stand in its first layer."""
    values = {**DEFAULTS, **values}
    kinds = kinds_of(values.get(TYPES) or _kinds(values["num_hidden_layers"]))
    count = values["num_mem_blocks"]
    rules = [Rule("embed_tokens", "embedding.tokens"), Rule("final_layernorm", "final_norm")]
    hybrids: list[int] = []
    for i, kind in enumerate(kinds):
        theirs, ours = f"layers.{i}.", f"layers.{i}.attention."
        if kind == LINEAR:
            rules += mamba2_rules(theirs + "mamba.", ours)
            rules.append(Rule(theirs + "input_layernorm", f"layers.{i}.attention_norm"))
            continue
        hybrids.append(i)
        rules += mamba2_rules(theirs + "mamba_decoder.mamba.", ours + "mixer.")
        rules.append(Rule(theirs + "mamba_decoder.input_layernorm", ours + "mixer_norm"))
        rules.append(Rule(theirs + "linear", ours + "out_proj"))
        use = len(hybrids) - 1
        block = f"layers.{hybrids[use % count]}.shared_transformer."
        if use < count:
            both = [f"{ours}feed_forward.{name}_proj" for name in ("gate", "up")]
            rules += under(block, ours, BLOCK)
            rules.append(Rule(block + "feed_forward.gate_up_proj", both, Rows()))
        for name, listed in _ADAPTERS.items():
            adapter = f"{ours}adapters.{name}."
            rules += under(f"{block}{listed}.{use}.", adapter, {"0": "down", "1": "up"})
    return Tensors(tuple(rules))


_OLDER = {"mamba": LINEAR}
_BIAS = "add_bias_linear"
BLOCK = {
    "input_layernorm": "block_norm",
    "pre_ff_layernorm": "feed_forward_norm",
    **{f"self_attn.{name}_proj": f"{name}_proj" for name in "qkvo"},
    "feed_forward.down_proj": "feed_forward.down_proj",
}
_ADAPTERS = {
    "feed_forward": "feed_forward.gate_up_proj_adapter_list",
    **{f"{each}_proj": f"self_attn.linear_{each}_adapter_list" for each in "qkv"},
}
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "layers_block_type": None,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "n_mamba_heads": 8,
    "time_step_min": 0.001,
    "add_bias_linear": False,
    "intermediate_size": None,
    "hidden_act": "gelu",
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "attention_dropout": 0.0,
    "num_mem_blocks": 1,
    "use_shared_attention_adapter": False,
    "adapter_rank": 128,
    "use_mem_rope": False,
    "use_long_context": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = (
    Family(
        "zamba2",
        "Zamba2",
        read,
        tensors,
        defaults=DEFAULTS,
        write=write,
        harmless=frozenset(
            (
                "chunk_size",
                "hybrid_layer_ids",
                "kv_channels",
                "num_logits_to_keep",
                "num_query_groups",
                "time_step_floor",
                "time_step_max",
                "use_conv_bias",  # transformers' layers have that bias whatever it says
                "use_mamba_kernels",
                "use_mem_eff_path",
            )
        ),
    ),
)
