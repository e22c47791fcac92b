"""RecurrentGemma (Google, 2024, arXiv 2404.07839): RG-LRU, and windows of attention in every third
layer, which rotate half of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from polyhead.config import (
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    RgLruConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import (
    UNLIMITED,
    read_activation,
    read_decoder,
    read_sizes,
)
from polyhead.families.common.rope import read_rope
from polyhead.families.common.steps import Shaped
from polyhead.families.common.tables import FREQUENCIES
from polyhead.families.common.tensors import Rule, Tensors, under
from polyhead.families.common.writing import write_activation

_RECURRENT, _ATTENTION = "recurrent", "attention"
_KINDS = (_RECURRENT, _RECURRENT, _ATTENTION)


def read(keys: Keys) -> TransformerConfig:
    sizes = read_sizes(keys, own_head_dim=False, max_positions=UNLIMITED)
    keys.expect("head_dim", sizes.head_dim, None)
    norm = NormConfig("rmsnorm", eps=keys.number("rms_norm_eps"), weight_offset=1.0)
    activation = read_activation(keys, "hidden_activation")
    windows = sizes.attention(
        qkv_bias=keys.flag("attention_bias"),
        out_bias=True,
        rope=read_rope(keys, sizes.head_dim, UNLIMITED, partial_rotary_factor=0.5),
        window=keys.size("attention_window_size"),
        dropout=keys.number("attention_dropout"),
    )
    width = keys.size("lru_width", sizes.embed_dim)
    state = RgLruConfig(
        sizes.num_heads,
        width=width,
        conv_kernel=keys.whole("conv1d_width"),
        activation=activation,
    )
    hidden = keys.size("intermediate_size")
    if hidden % 2:
        raise keys.refused("intermediate_size", hidden, "an even number")
    network = FeedForwardConfig(hidden // 2, activation=activation, gated=True, bias=True)
    kinds = keys.take("block_types")
    if not isinstance(kinds, list | tuple) or not kinds or any(k not in _KINDS for k in kinds):
        raise keys.refused("block_types", kinds, f"a list of {_RECURRENT} and {_ATTENTION}")
    of_kind = {_RECURRENT: state, _ATTENTION: windows}
    layers = [
        LayerConfig(of_kind[kinds[i % len(kinds)]], network, norm) for i in range(sizes.num_layers)
    ]
    # transformers keeps this factor in bfloat16.
    scale = torch.tensor(math.sqrt(sizes.embed_dim), dtype=torch.bfloat16).item()
    return read_decoder(
        keys,
        layers,
        max_positions=UNLIMITED,
        norm=norm,
        embedding=EmbeddingConfig(scale=scale),
        logit_softcap=keys.positive("logits_soft_cap"),
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    found: list[Any] = [layer.attention for layer in config.layers]
    network: Any = config.layers[0].feed_forward
    state = next((each for each in found if each.kind == "rg_lru"), None)
    windows = next((each for each in found if each.kind == "heads"), None)
    if state is None or windows is None:
        raise ConfigError("this family needs layers of RG-LRU and of attention")
    return {
        "block_types": [_RECURRENT if each == state else _ATTENTION for each in found],
        "lru_width": state.width,
        "conv1d_width": state.conv_kernel,
        "attention_window_size": windows.window,
        "intermediate_size": 2 * network.hidden_dim,
        "hidden_activation": write_activation(network.activation),
        "logits_soft_cap": config.logit_softcap,
    }


_LAYER = "layers.{i}."
_MIXER, _OURS = _LAYER + "temporal_block.", _LAYER + "attention."
TENSORS = Tensors(
    (
        Rule("embed_tokens", "embedding.tokens"),
        Rule("final_norm", "final_norm"),
        *under(
            _LAYER,
            _LAYER,
            {"temporal_pre_norm": "attention_norm", "channel_pre_norm": "feed_forward_norm"},
        ),
        *under(_MIXER, _OURS, {name: name for name in ("q_proj", "k_proj", "v_proj")}),
        *under(_MIXER, _OURS, {"linear_x": "x_proj", "linear_y": "gate_proj"}),
        Rule(_MIXER + "conv_1d.weight", _OURS + "conv_weight", Shaped((1,))),
        Rule(_MIXER + "conv_1d.bias", _OURS + "conv_bias"),
        *under(
            _MIXER + "rg_lru.",
            _OURS,
            {
                "recurrent_param": "decay",
                **{
                    f"{theirs}_gate_{kind}": f"{ours}_{kind}"
                    for theirs, ours in (("input", "write"), ("recurrent", "decay"))
                    for kind in ("weight", "bias")
                },
            },
        ),
        *under(
            _LAYER + "mlp_block.",
            _LAYER + "feed_forward.",
            {name: name for name in ("gate_proj", "up_proj", "down_proj")},
        ),
    ),
    dropped=FREQUENCIES,
)


def tensors(values: Mapping[str, Any]) -> Tensors:
    """An output projection's name depends on what the layer is."""
    kinds = values.get("block_types", _KINDS)
    names = {_RECURRENT: "linear_out", _ATTENTION: "o_proj"}
    return TENSORS.extended(
        *(
            Rule(
                f"layers.{i}.temporal_block.{names[kinds[i % len(kinds)]]}",
                f"layers.{i}.attention.o_proj",
            )
            for i in range(values["num_hidden_layers"])
        )
    )


FAMILIES = (
    Family(
        "recurrent_gemma",
        "RecurrentGemma",
        read,
        tensors,
        defaults={
            "vocab_size": 256_000,
            "num_attention_heads": 10,
            "num_key_value_heads": None,
            "lru_width": None,
            "attention_window_size": 2048,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
            "block_types": _KINDS,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
            "tie_word_embeddings": True,
        },
        write=write,
        # Of drawing new weights.
        harmless=frozenset(("w_init_variance_scale", "final_w_init_variance_scale")),
    ),
)
