"""config.json of every family: zeros, ends of numbers and odd types under keys that it reads."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from fuzz import mutation
from polyhead.errors import ConfigError
from polyhead.families import families, read_config
from polyhead.planning import plan

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "num_mel_bins": 8,
    "max_source_positions": 32,
    "rotary_dim": 8,
    "v_head_dim": 8,
    "mamba_n_heads": 8,
    "src_vocab_size": 64,
    "tgt_vocab_size": 64,
    "n_routed_experts": 64,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 500.0}
        for kind in ("sliding_attention", "full_attention")
    },
    "attention_types": [[["global", "local"], 1]],
}
"""Instead of a family's own, which are those of a large model."""
OF_FAMILY: dict[str, dict[str, Any]] = {
    "convbert": {"embedding_size": 32},
    "deepseek_v4": {"num_key_value_heads": 1, "o_groups": 2},
    "esm": {"pad_token_id": 1},
    "squeezebert": {"embedding_size": 32},
    "funnel": {"block_sizes": [1, 1], "d_head": 8},
    "gemma3n_text": {"num_kv_shared_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mobilebert": {"embedding_size": 16},
    "neomme": {"embedding_rank": 16, "head_dim": 16, "hidden_act": "relu2"},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "hash_seed": 0,
        "num_buckets": 4,
    },
    "zaya": {"rope_parameters": None, "num_experts_per_tok": 1},
    "zamba": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
        "layers_block_type": ["linear_attention", "hybrid"],
    },
    "zamba2": {"tie_word_embeddings": True, "layers_block_type": ["linear_attention", "hybrid"]},
}
"""What goes with these sizes in a family."""
ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
OTHERS: dict[str, Any] = {
    "rope_parameters": ROPE | {"original_max_position_embeddings": 16},
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "partial_rotary_factor": 0.5,
    "architectures": ["LlamaForCausalLM"],
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 8,
    "head_dim": 8,
    "initializer_range": 0.02,
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32},
}
"""What many families read, if it is there."""
ODD: tuple[Any, ...] = (
    0,
    0.0,
    -1,
    -1.5,
    1e-320,
    1e308,
    float("nan"),
    float("inf"),
    2**40,
    10**400,
    [],
    {},
    "",
    [[]],
)
_STACKS = {"t5gemma": "gemma2", "t5gemma2": "gemma3_text"}
path = Path()


def prepare() -> None:
    global path
    path = Path(tempfile.mkdtemp()) / "config.json"
    for name in families():
        complete(name)


@functools.cache
def complete(name: str) -> dict[str, Any]:
    """A config.json that the family reads, with every key that it has a default for.

    Raises:
        ConfigError: The family needs a key that ``SIZES`` does not have.
    """
    if (of_stack := _STACKS.get(name)) is not None:
        stack = {key: value for key, value in complete(of_stack).items() if key != "model_type"}
        inner = stack if name == "t5gemma" else {"text_config": stack}
        return {"model_type": name, "vocab_size": 64, "encoder": inner, "decoder": stack}
    family = families()[name]
    called = {theirs: ours for ours, theirs in family.aliases.items()}
    values: dict[str, Any] = {"model_type": name}
    for key, default in family.defaults.items():
        values[family.aliases.get(key, key)] = SIZES.get(key, default)
    values |= OF_FAMILY.get(name, {})
    while True:
        try:
            read_config(values, path)
            return values
        except ConfigError as error:
            missing = re.search("key '([a-z_]+)' is missing", str(error))
            if missing is None or missing[1] in values:
                raise
            values[missing[1]] = SIZES[called.get(missing[1], missing[1])]


def case(random: Random) -> None:
    values = dict(complete(random.choice([*families()])))
    for _ in range(random.choice((0, 0, 1, 2))):
        key = random.choice([*OTHERS])
        values[key] = OTHERS[key]
    for _ in range(random.choice((1, 1, 1, 2))):
        values[random.choice([*values][1:])] = random.choice(ODD)
    if random.random() < 0.3:
        values = mutation.json_object(random, values)
    path.write_text(json.dumps(values))
    if random.random() < 0.7:
        read_config(json.loads(path.read_text()), path)
    else:
        str(plan(str(path), tokens=32))
