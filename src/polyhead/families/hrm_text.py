"""HRM-Text (Sapient 2026): two stacks of Llama's layers take turns over two states, with gates
of the heads and norms without weights. Its keys of config.json.

The layers of a model are those of all cycles, in order. transformers trains only the last cycles
(``L_bp_cycles``), this package all. Instructions that see themselves in both directions
(``prefix_lm``) are named by a call of transformers; without that, as here, every token sees those
before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.config import (
    CyclesConfig,
    EmbeddingConfig,
    GatedAttentionConfig,
    LayerConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_decoder, read_mha_sizes, read_network
from polyhead.families.common.rope import reach, read_rope
from polyhead.families.common.steps import Rows
from polyhead.families.common.tables import FREQUENCIES
from polyhead.families.common.tensors import Rule, Tensors, under

_SLOW, _FAST = 0, 1


def read(keys: Keys) -> TransformerConfig:
    sizes, head_dim = read_mha_sizes(keys), keys.size("head_dim")
    stack, slow, fast = _cycles(keys, sizes.num_layers)
    norm = NormConfig("rmsnorm", eps=keys.number("rms_norm_eps"), weight=False)
    rope, biased = read_rope(keys, head_dim, sizes.max_positions), keys.flag("attention_bias")
    heads = sizes.num_heads
    attention = GatedAttentionConfig(
        heads,
        heads,
        head_dim,
        qkv_bias=biased,
        out_bias=biased,
        rope=rope,
        dropout=keys.number("attention_dropout"),
    )
    network = read_network(keys, bias=keys.flag("mlp_bias"))
    layers, weights_of = [], []
    for state in ([_FAST] * fast + [_SLOW]) * slow:
        for i in range(stack):
            cycles = CyclesConfig(2, state, starts=i == 0, ends=i == stack - 1, norm=norm)
            layers.append(LayerConfig(attention, network, norm, streams=cycles))
            weights_of.append(i + (fast * stack if state == _SLOW else 0))
    scale = keys.number("embedding_scale", None)
    return read_decoder(
        keys,
        layers,
        max_positions=reach(rope, sizes.max_positions),
        norm=None,
        embedding=EmbeddingConfig(
            scale=1.0 / keys.positive("initializer_range") if scale is None else scale
        ),
        weights_of=tuple(weights_of),
    )


def _cycles(keys: Keys, num_layers: int) -> tuple[int, int, int]:
    """Layers of a stack, cycles of the slow one, and cycles of the fast one before each.

    Files before transformers counted the layers of all cycles state those of one stack.
    """
    slow, fast = keys.size("H_cycles"), keys.size("L_cycles")
    stack = keys.size("num_layers_per_stack", None)
    wanted = (num_layers if stack is None else stack) * slow * (fast + 1)
    if stack is not None and wanted != num_layers:
        raise keys.refused("num_hidden_layers", num_layers, f"{wanted}, the layers of all cycles")
    if wanted > _MOST:
        raise keys.refused("H_cycles", slow, f"so many that all cycles have {_MOST} layers at most")
    return stack or num_layers, slow, fast


def write(config: TransformerConfig) -> dict[str, Any]:
    found = [layer.streams for layer in config.layers]
    cycles = [each for each in found if isinstance(each, CyclesConfig)]
    slow = sum(each.computes == _SLOW and each.starts for each in cycles)
    if not slow or len(cycles) != len(found):
        raise ConfigError("in this family two stacks of layers take turns over two states")
    return {
        "H_cycles": slow,
        "L_cycles": sum(each.computes == _FAST and each.starts for each in cycles) // slow,
        "num_layers_per_stack": sum(each.computes == _SLOW for each in cycles) // slow,
        "embedding_scale": config.embedding.scale,
    }


def tensors(values: Mapping[str, Any]) -> Tensors:
    """The table of names: a stack's layers are those of its first turn."""
    values = {**DEFAULTS, **values}
    count = values.get("num_layers_per_stack") or values["num_hidden_layers"]
    rules = [Rule("embed_tokens", "embedding.tokens"), Rule("z_L_init", "streams.fast")]
    for name, first in (("L_module", 0), ("H_module", values["L_cycles"] * count)):
        for i in range(count):
            rules += _layer(f"{name}.layers.{i}.", f"layers.{first + i}.")
    return Tensors(tuple(rules), dropped=FREQUENCIES)


def _layer(theirs: str, ours: str) -> tuple[Rule, ...]:
    """Rules of a layer: its matrices are fused in files, its biases are not."""
    heads, network = f"{ours}attention.", f"{ours}feed_forward."
    fused = [f"{heads}{name}.weight" for name in _FUSED]
    both = [f"{network}{name}.weight" for name in ("gate_proj", "up_proj")]
    return (
        Rule(f"{theirs}attn.gqkv_proj.weight", fused, Rows(len(fused))),
        Rule(f"{theirs}mlp.gate_up_proj.weight", both, Rows()),
        Rule(f"{theirs}attn.o_proj", f"{heads}o_proj"),
        *under(f"{theirs}self_attn.", heads, {name: name for name in (*_FUSED, "o_proj")}),
        *under(f"{theirs}mlp.", network, {name: name for name in _NETWORK}),
    )


_FUSED = ("gate_proj", "q_proj", "k_proj", "v_proj")
_NETWORK = ("gate_proj", "up_proj", "down_proj")
_MOST = 500

DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "head_dim": 128,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "H_cycles": 2,
    "L_cycles": 3,
}

FAMILIES = (
    Family(
        "hrm_text",
        "HrmText",
        read,
        tensors,
        defaults=DEFAULTS,
        write=write,
        harmless=frozenset(("L_bp_cycles", "prefix_lm")),
    ),
)
