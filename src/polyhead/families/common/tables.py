"""Tables of tensor names that several families share."""

from __future__ import annotations

from polyhead.families.common.steps import QKVOfStates, RotaryPairs, Shaped
from polyhead.families.common.tensors import Rule, Tensors, under

AROUND_LAYERS = (
    Rule("embed_tokens", "embedding.tokens"),
    Rule("norm", "final_norm"),
)

NORMS = under(
    "layers.{i}.",
    "layers.{i}.",
    {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "feed_forward_norm",
    },
)

ATTENTION = under(
    "layers.{i}.self_attn.",
    "layers.{i}.attention.",
    {name: name for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
)

SINKS = Rule("layers.{i}.self_attn.sinks", "layers.{i}.attention.sinks")

NETWORK = under(
    "layers.{i}.mlp.",
    "layers.{i}.feed_forward.",
    {name: name for name in ("gate_proj", "up_proj", "down_proj")},
)

FREQUENCIES = {
    r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "follows from the configuration; "
    "transformers before 4.32 wrote it"
}

DECODER = Tensors((*AROUND_LAYERS, *NORMS, *ATTENTION, *NETWORK), dropped=FREQUENCIES)
"""Llama's names, which most decoders have."""

SANDWICH = Tensors(
    (
        *AROUND_LAYERS,
        *under(
            "layers.{i}.",
            "layers.{i}.",
            {
                "input_layernorm": "attention_norm",
                "post_attention_layernorm": "attention_out_norm",
                "pre_feedforward_layernorm": "feed_forward_norm",
                "post_feedforward_layernorm": "feed_forward_out_norm",
            },
        ),
        *ATTENTION,
        *NETWORK,
    ),
    dropped=FREQUENCIES,
)
"""Norms before and after attention and network."""

AFTER = Tensors(
    (
        *AROUND_LAYERS,
        *under(
            "layers.{i}.",
            "layers.{i}.",
            {
                "post_attention_layernorm": "attention_out_norm",
                "post_feedforward_layernorm": "feed_forward_out_norm",
            },
        ),
        *ATTENTION,
        *NETWORK,
    ),
    dropped=FREQUENCIES,
)
"""Norms after attention and network alone."""

PAIRED = DECODER.extended(
    *(
        Rule(f"layers.{{i}}.self_attn.{name}", f"layers.{{i}}.attention.{name}", RotaryPairs())
        for name in ("q_proj", "k_proj")
    )
)
"""Llama's names, with rotary pairs side by side."""


def joined_convolution(theirs: str, ours: str) -> Rule:
    """Three convolutions, of queries, keys and values, which are one here."""
    return Rule(
        theirs + "{part}_conv1d.weight",
        ours + "conv_weight",
        Shaped((1,)),
        parts="qkv",
        cut=QKVOfStates(),
    )
