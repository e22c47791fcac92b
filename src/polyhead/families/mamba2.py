"""Mamba-2 (Dao & Gu, 2024, arXiv 2405.21060): layers that are a state-space mixer alone."""

from __future__ import annotations

from typing import Any

from polyhead.config import InitialConfig, LayerConfig, Mamba2Config, NormConfig, TransformerConfig
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.gguf_states import (
    ALONE,
    MAMBA2,
    NOTHING_ELSE,
    mamba2_alone,
    mamba2_names,
    mamba2_size,
    mamba2_steps,
)
from polyhead.families.common.keys import Keys
from polyhead.families.common.mamba2 import DEFAULTS, mamba2_rules, read_mamba2, write_mamba2
from polyhead.families.common.reading import UNLIMITED, read_decoder
from polyhead.families.common.tensors import Rule, Tensors

_NAMES = {
    "mamba_n_heads": "num_heads",
    "mamba_d_head": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}


def read(keys: Keys) -> TransformerConfig:
    norm = NormConfig("rmsnorm", eps=keys.number("layer_norm_epsilon"))
    keys.flag("residual_in_fp32")  # the stream has the dtype of weights, which here is no less
    state = read_mamba2(keys, keys.size("hidden_size"), norm.eps)
    layer = LayerConfig(state, None, norm)
    layers = [layer] * keys.num_layers("num_hidden_layers")
    return read_decoder(keys, layers, max_positions=UNLIMITED, norm=norm)


def write(config: TransformerConfig) -> dict[str, Any]:
    state = config.layers[0].attention
    if type(state) is not Mamba2Config:
        raise ConfigError("this family needs layers of Mamba-2")
    return {
        "layer_norm_epsilon": config.layers[0].norm.eps,
        **write_mamba2(state, config.embed_dim, _NAMES),
    }


TENSORS = Tensors(
    (
        Rule("embeddings", "embedding.tokens"),
        Rule("embedding", "embedding.tokens"),
        Rule("norm_f", "final_norm"),
        Rule("layers.{i}.norm", "layers.{i}.attention_norm"),
        *mamba2_rules("layers.{i}.mixer.", "layers.{i}.attention."),
    ),
    prefix="backbone.",
)

FAMILIES = (
    Family(
        "mamba2",
        "Mamba2",
        read,
        TENSORS,
        defaults={
            **DEFAULTS,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "layer_norm_epsilon": 1e-5,
            "hidden_act": "silu",
            "residual_in_fp32": True,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "pad_token_id": 1,
        },
        aliases=_NAMES,
        write=write,
        harmless=frozenset(
            (
                "chunk_size",
                "rescale_prenorm_residual",
                "time_step_floor",
                "time_step_max",
                "time_step_min",
                "time_step_rank",
            )
        ),
        initial=InitialConfig(scale=0.1),
        gguf=Gguf(
            "mamba2",
            settings={**ALONE, **MAMBA2},
            names=mamba2_names("layers.{i}.mixer."),
            steps=mamba2_steps("layers.{i}.mixer."),
            values=mamba2_alone,
            settings_of=lambda config: {**NOTHING_ELSE, **mamba2_size(config)},
        ),
    ),
)
