"""Zamba (Glorioso et al., Zyphra 2024, arXiv 2405.16712): Mamba in groups of channels, and before
some of its layers one block of attention without positions and network, whose weights all share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from polyhead.config import (
    FeedForwardConfig,
    HeadLayout,
    MambaConfig,
    SharedBlockConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    LINEAR,
    divided,
    read_activation,
    read_decoder,
    read_rms_norm,
)
from polyhead.families.common.steps import At, OneToOne, Shaped
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.common.writing import write_activation
from polyhead.families.jamba import MIXER_NAMES
from polyhead.families.mamba import read_mamba, write_mamba
from polyhead.families.zamba2 import BLOCK, HYBRID, TYPES, kinds_of, layers_of, read_kinds


def read(keys: Keys) -> TransformerConfig:
    embed_dim, norm = keys.size("hidden_size"), read_rms_norm(keys)
    heads, positions = keys.size("num_attention_heads"), keys.whole("max_position_embeddings")
    keys.expect("tie_word_embeddings", True)  # else transformers ties no blocks either
    head_dim = divided(keys, 2 * embed_dim, heads)
    keys.expect("attention_head_dim", head_dim, None)
    keys.expect("attention_hidden_size", 2 * embed_dim, None)
    period, offset = keys.size("attn_layer_period"), keys.whole("attn_layer_offset")
    kinds = read_kinds(keys, _kinds(keys.num_layers("num_hidden_layers"), period, offset))
    width, groups = keys.size("expand") * embed_dim, keys.size("n_mamba_heads")
    if width % groups:
        raise keys.refused("n_mamba_heads", groups, f"a divisor of {width} features")
    block = SharedBlockConfig(
        heads,
        keys.size("num_key_value_heads", heads),
        head_dim,
        rope=None,
        scale=(head_dim / 2) ** -0.5,
        dropout=keys.number("attention_dropout"),
        mixer=read_mamba(keys, width, None, num_groups=groups, activation=_ACTIVATION),
        network=FeedForwardConfig(
            keys.whole("intermediate_size"), read_activation(keys), bias=False
        ),
        norm=norm,
    )
    return read_decoder(keys, layers_of(kinds, block, 1), max_positions=positions, norm=norm)


def _kinds(count: int, period: int, offset: int) -> list[str]:
    """Where the file does not say: a block in the third layer, and then in one of each period."""
    later = [HYBRID if i % period == offset else LINEAR for i in range(count - 3)]
    return [LINEAR, LINEAR, HYBRID, *later]


def write(config: TransformerConfig) -> dict[str, Any]:
    found: list[HeadLayout] = [layer.attention for layer in config.layers]
    block = next((each for each in found if isinstance(each, SharedBlockConfig)), None)
    if block is None or not isinstance(block.mixer, MambaConfig):
        raise ConfigError("this family needs Mamba, and a block before it in some layers")
    mixer = write_mamba(block.mixer, config.embed_dim)
    return {
        TYPES: [HYBRID if each.kind == block.kind else LINEAR for each in found],
        "intermediate_size": block.network.hidden_dim,
        "hidden_act": write_activation(block.network.activation),
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "rms_norm_eps": block.norm.eps,
        "attention_dropout": block.dropout,
        "n_mamba_heads": block.mixer.num_groups,
        **{MIXER_NAMES[key]: value for key, value in mixer.items()},
    }


@dataclass(frozen=True)
class ByGroup(OneToOne):
    """The file's first two dimensions, groups and what each has, are one here."""

    moves_rows: ClassVar[bool] = True

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return tensor.flatten(0, 1)

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        mixer = getattr(at.attention, "mixer", at.attention)
        return tensor.reshape(mixer.num_groups, -1, *tensor.shape[1:])


@dataclass(frozen=True)
class TakingTurns(OneToOne):
    """Rows of channels and of gates take turns; here all channels stand before all gates."""

    moves_rows: ClassVar[bool] = True

    def changed(self, tensor: Tensor, at: At) -> Tensor:
        return tensor.reshape(-1, 2, *tensor.shape[1:]).transpose(0, 1).flatten(0, 1)

    def restored(self, tensor: Tensor, at: At) -> Tensor:
        return tensor.reshape(2, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 1)


def tensors(values: Mapping[str, Any]) -> Tensors:
    """The table of names: files may hold the block in every layer that uses it."""
    values = {**DEFAULTS, **values}
    default = _kinds(values["num_hidden_layers"], *(values[key] for key in _PERIOD))
    rules = [Rule("embed_tokens", "embedding.tokens"), Rule("final_layernorm", "final_norm")]
    owner: str | None = None
    for i, kind in enumerate(kinds_of(values.get(TYPES) or default)):
        theirs, ours = f"layers.{i}.", f"layers.{i}.attention."
        if kind == LINEAR:
            rules += _mixer(theirs, ours, f"layers.{i}.attention_norm")
            continue
        owner = owner or ours
        rules += under(theirs + "shared_transf.", owner, {**BLOCK, **_NETWORK})
        rules += _mixer(theirs + "mamba_decoder.", ours + "mixer.", ours + "mixer_norm")
        rules.append(Rule(theirs + "linear", ours + "out_proj"))
    return Tensors(tuple(rules))


def _mixer(theirs: str, ours: str, norm: str) -> list[Rule]:
    mixer = theirs + "mamba."
    return [
        Rule(theirs + "input_layernorm", norm),
        Rule(mixer + "in_proj", ours + "in_proj", TakingTurns()),
        Rule(mixer + "out_proj", ours + "o_proj"),
        Rule(mixer + "conv1d.weight", ours + "conv_weight", Shaped((1,))),
        Rule(mixer + "conv1d.bias", ours + "conv_bias"),
        *(Rule(mixer + left, ours + right, ByGroup()) for left, right in _BY_GROUP.items()),
    ]


_ACTIVATION = "hidden_mamba_act"
_PERIOD = ("attn_layer_period", "attn_layer_offset")
_NETWORK = {f"feed_forward.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up")}
_BY_GROUP = {
    "A_log": "A_log",
    "D": "D",
    "x_proj_weight": "x_proj.weight",
    "dt_proj_weight": "dt_proj.weight",
    "dt_proj_bias": "dt_proj.bias",
}
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "layers_block_type": None,
    "attn_layer_period": 6,
    "attn_layer_offset": 4,
    "expand": 2,
    "state_size": 16,
    "time_step_rank": "auto",
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "n_mamba_heads": 2,
    "hidden_mamba_act": "silu",
    "hidden_act": "gelu",
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "attention_dropout": 0.0,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = (
    Family(
        "zamba",
        "Zamba",
        read,
        tensors,
        defaults=DEFAULTS,
        aliases=MIXER_NAMES,
        write=write,
        harmless=frozenset(
            (
                "num_logits_to_keep",
                "time_step_floor",
                "time_step_max",
                "time_step_min",
                "use_associative_scan",
                "use_mamba_kernels",
            )
        ),
    ),
)
