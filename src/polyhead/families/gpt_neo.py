"""GPT-Neo (EleutherAI, 2021): GPT-2 with windows in every other layer and unscaled scores."""

from __future__ import annotations

from typing import Any

from polyhead.config import TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_mha_sizes
from polyhead.families.common.tensors import Rule, under
from polyhead.families.gpt2 import DEFAULTS, SUMMARY, gpt_tensors, read_gpt, write_gpt

_ATTENTION = ("q_proj", "k_proj", "v_proj")


def read(keys: Keys) -> TransformerConfig:
    sizes, dropout = read_mha_sizes(keys), keys.number("attention_dropout")
    window = keys.whole("window_size")
    attentions = [
        sizes.attention(
            out_bias=True,
            scale=1.0,
            window=window if kind == "local" else None,
            dropout=dropout,
        )
        for kind in _read_kinds(keys, sizes.num_layers)
    ]
    return read_gpt(keys, sizes, attentions)


def _read_kinds(keys: Keys, num_layers: int) -> list[str]:
    """``"global"`` or ``"local"`` for every layer, from ``[[kinds], times]`` or one by one."""
    groups = keys.take("attention_types") or [[["global", "local"], 12]]
    kinds = keys.take("attention_layers", None)
    try:
        most = num_layers + 1  # numbers of times may be larger than any memory
        listed = [kind for names, times in groups for kind in list(names) * min(times, most)]
    except (TypeError, ValueError) as error:
        raise keys.refused("attention_types", groups, "a list of [[kinds], times]") from error
    if kinds not in (None, listed):
        raise keys.refused("attention_layers", kinds, "what attention_types says")
    if len(listed) != num_layers or not {*listed} <= {"global", "local"}:
        raise keys.refused("attention_types", groups, f"{num_layers} of 'global' and 'local'")
    return listed


def write(config: TransformerConfig) -> dict[str, Any]:
    windows = [getattr(layer.attention, "window", None) for layer in config.layers]
    kinds = ["global" if window is None else "local" for window in windows]
    return {
        **write_gpt(config),
        "embed_dropout": config.embedding.dropout,
        "attention_types": [[kinds, 1]],
        "attention_layers": kinds,
        "window_size": next((window for window in windows if window is not None), 256),
    }


FAMILIES = (
    Family(
        "gpt_neo",
        "GPTNeo",
        read,
        gpt_tensors(
            (
                *under(
                    "h.{i}.attn.attention.",
                    "layers.{i}.attention.",
                    {name: name for name in _ATTENTION} | {"out_proj": "o_proj"},
                ),
                Rule("h.{i}.mlp.c_fc", "layers.{i}.feed_forward.up_proj"),
                Rule("h.{i}.mlp.c_proj", "layers.{i}.feed_forward.down_proj"),
            )
        ),
        defaults=DEFAULTS
        | {
            "attention_types": None,
            "window_size": 256,
            "attention_dropout": 0.0,
            "hidden_dropout_prob": 0.0,
            "embd_pdrop": 0.0,
        },
        write=write,
        aliases={
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
            "hidden_act": "activation_function",
            "layer_norm_eps": "layer_norm_epsilon",
            "hidden_dropout_prob": "resid_dropout",
            "embd_pdrop": "embed_dropout",
        },
        harmless=SUMMARY,
    ),
)
