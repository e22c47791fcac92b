"""CTranslate2's names of tensors and polyhead's: one table, whatever the family.

Dots stand here for the file's slashes; a norm's ``gamma`` and ``beta`` are its weight and bias.
"""

from __future__ import annotations

from polyhead.config import TransformerConfig
from polyhead.families.common.steps import Each, QKVRows, RotaryPairs, Rows
from polyhead.families.common.tensors import Rule, Tensors


def table(config: TransformerConfig, *, interleaved: bool) -> Tensors:
    """The table for a file.

    Args:
        config: what the file's options mean.
        interleaved: whether rotated features stand in pairs.
    """
    rules: list[Rule] = []
    turned = ((RotaryPairs(),), (RotaryPairs(),), ()) if interleaved else ((), (), ())
    for side, ours in (("encoder", "encoder_"), ("decoder", "")):
        layer, into = f"{side}.layer_{{i}}.", f"{ours}layers.{{i}}."
        gated = any(
            getattr(each.feed_forward, "gated", False)
            for each in (config.encoder_layers if ours else config.layers)
        )
        bias = config.encoder.relative_bias if ours else config.relative_bias
        apart = bias is not None and bias.per_layer
        queries = tuple(f"{into}attention.{each}_proj" for each in "qkv")
        rules += [
            Rule(f"{side}.position_encodings", f"{ours}embedding.positions"),
            Rule(f"{side}.layernorm_embedding", f"{ours}embedding.norm"),
            Rule(f"{side}.layer_norm", f"{ours}final_norm"),
            Rule(
                f"{side}.layer_{{i}}.self_attention.relative_attention_bias",
                f"{ours}relative_bias{'.{i}' if apart else ''}.weight",
            ),
            Rule(f"{layer}self_attention.linear_0", queries, QKVRows(), Each(*turned)),
            Rule(f"{layer}self_attention.linear_1", f"{into}attention.o_proj"),
            Rule(f"{layer}self_attention.layer_norm", f"{into}attention_norm"),
            Rule(f"{layer}self_attention.q_norm", f"{into}attention.q_norm"),
            Rule(f"{layer}self_attention.k_norm", f"{into}attention.k_norm"),
            Rule(f"{layer}shared_layer_norm", f"{into}attention_norm"),
            Rule(f"{layer}input_layer_norm", f"{into}attention_norm"),
            Rule(f"{layer}post_attention_layer_norm", f"{into}feed_forward_norm"),
            Rule(f"{layer}ffn.layer_norm", f"{into}feed_forward_norm"),
            Rule(
                f"{layer}ffn.linear_0",
                f"{into}feed_forward.{'gate' if gated else 'up'}_proj",
            ),
            Rule(f"{layer}ffn.linear_0_noact", f"{into}feed_forward.up_proj"),
            Rule(f"{layer}ffn.linear_1", f"{into}feed_forward.down_proj"),
        ]
    cross = "layers.{i}.cross_attention"
    keys_values = (f"{cross}.k_proj", f"{cross}.v_proj")
    rules += [
        Rule("decoder.layer_{i}.attention.linear_0", f"{cross}.q_proj"),
        Rule("decoder.layer_{i}.attention.linear_1", keys_values, Rows(2)),
        Rule("decoder.layer_{i}.attention.linear_2", f"{cross}.o_proj"),
        Rule("decoder.layer_{i}.attention.layer_norm", f"{cross}_norm"),
        Rule("decoder.embeddings", "embedding.tokens"),
        Rule("encoder.embeddings_0", "encoder_embedding.tokens"),
        Rule("encoder.embeddings", "encoder_embedding.tokens"),
        Rule("encoder.conv1", "encoder_embedding.frontend.conv1"),
        Rule("encoder.conv2", "encoder_embedding.frontend.conv2"),
        Rule("decoder.projection", "head"),
    ]
    return Tensors(
        tuple(rules),
        prefix="",
        outside=(),
        leaves={"gamma": "weight", "beta": "bias", "encodings": "weight"},
    )
