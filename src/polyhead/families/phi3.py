"""Phi-3 and Phi-4 (2024): Llama with fused projections and longrope."""

from __future__ import annotations

from typing import Any

from polyhead.config import LayerConfig, TransformerConfig
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_network, read_rms_norm, read_sizes
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import QKVRows
from polyhead.families.common.steps import Rows as CutRows
from polyhead.families.common.tables import AROUND_LAYERS, FREQUENCIES, NORMS
from polyhead.families.common.tensors import Rule, Tensors

_TRAINED = 4096
QKV = tuple(f"layers.{{i}}.attention.{name}_proj" for name in "qkv")
GATE_UP = tuple(f"layers.{{i}}.feed_forward.{name}_proj" for name in ("gate", "up"))


def read(keys: Keys) -> TransformerConfig:
    sizes, norm = read_sizes(keys), read_rms_norm(keys)
    rope = read_rope(
        keys, sizes.head_dim, sizes.max_positions, partial_rotary_factor=1.0, states_trained=True
    )
    attention = sizes.attention(
        rope=rope,
        window=keys.whole("sliding_window", None),
        dropout=keys.number("attention_dropout"),
    )
    dropout = keys.number("resid_pdrop")
    layer = LayerConfig(attention, read_network(keys), norm, dropout=dropout)
    return read_decoder(
        keys,
        [layer] * sizes.num_layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=norm,
    )


def write(config: TransformerConfig) -> dict[str, Any]:
    rope = config.layers[0].attention.rope
    trained = None if rope is None else rope.original_max_positions
    return {
        "original_max_position_embeddings": trained or _TRAINED,
        "resid_pdrop": config.layers[0].dropout,
    }


FAMILIES = (
    Family(
        "phi3",
        "Phi3",
        read,
        Tensors(
            (
                *AROUND_LAYERS,
                *NORMS,
                Rule("layers.{i}.self_attn.qkv_proj", QKV, QKVRows()),
                Rule("layers.{i}.self_attn.o_proj", "layers.{i}.attention.o_proj"),
                Rule("layers.{i}.mlp.gate_up_proj", GATE_UP, CutRows()),
                Rule("layers.{i}.mlp.down_proj", "layers.{i}.feed_forward.down_proj"),
            ),
            dropped=FREQUENCIES,
        ),
        defaults={
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": _TRAINED,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "attention_dropout": 0.0,
            "resid_pdrop": 0.0,
            "sliding_window": None,
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "pad_token_id": 32000,
        },
        write=write,
        harmless=frozenset(("embd_pdrop",)),
        gguf=Gguf(
            "phi3",
            # 0 stands for no window
            values=lambda values: {"sliding_window": values.get("sliding_window") or None},
        ),
    ),
)
