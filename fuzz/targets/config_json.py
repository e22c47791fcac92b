"""config.json of model directories, as the loader and as the planner read it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch

from fuzz import mutation
from polyhead.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from polyhead.families import read_config
from polyhead.models import Transformer
from polyhead.planning import plan

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "torch_dtype": "float32",
}


def without(*names: str) -> dict[str, Any]:
    """``SIZES`` but for keys that a family does not have."""
    return {key: value for key, value in SIZES.items() if key not in names}


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False} | SIZES,
    {"model_type": "llama", "rope_scaling": YARN} | SIZES,
    {"model_type": "mistral", "sliding_window": 8, "head_dim": 8, "rope_scaling": LONGROPE} | SIZES,
    {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1} | SIZES,
    {"model_type": "qwen3", "head_dim": 8, "layer_types": ["full_attention"] * 2} | SIZES,
    {"model_type": "gemma3_text", "query_pre_attn_scalar": 8, "sliding_window": 8}
    | without("hidden_act")
    | {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 8},
    {"model_type": "deepseek_v3", "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    | {"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
    | SIZES
    | {"num_key_value_heads": 4},
    {"model_type": "bert", "type_vocab_size": 2, "layer_norm_eps": 1e-12}
    | without("num_key_value_heads", "rms_norm_eps", "rope_theta", "attention_dropout"),
)
OTHERS: dict[str, tuple[Any, ...]] = {
    "rope_scaling": (YARN, LONGROPE, None, {"type": "linear", "factor": 2.0}, {"type": "dynamic"}),
    "rope_parameters": (YARN, {"rope_type": "default", "rope_theta": 500.0}, {}),
    "rope_theta": (1e6, 500, 2.0),
    "hidden_act": ("gelu", "relu", "gelu_pytorch_tanh", "silu"),
    "max_position_embeddings": (8, 128, 1 << 20),
    "original_max_position_embeddings": (8, 16, 64),
    "partial_rotary_factor": (0.5, 1.0),
    "sliding_window": (1, 4, 8, None),
    "use_sliding_window": (True, False),
    "layer_types": (["full_attention"] * 2, ["sliding_attention", "full_attention"]),
    "tie_word_embeddings": (True, False),
    "attention_bias": (True, False),
    "attention_dropout": (0.0, 0.1),
    "rms_norm_eps": (1e-5, 1e-12, 0.1),
    "eos_token_id": (0, [1, 2], None),
    "final_logit_softcapping": (None, 30.0),
    "attn_logit_softcapping": (None, 50.0),
    "position_embedding_type": ("absolute", None),
    "torch_dtype": ("bfloat16", "float16", None),
    "dtype": ("float32", "bfloat16"),
    "architectures": (["LlamaForCausalLM"], ["BertModel"], None),
    "use_cache": (True, False),
}
"""What files of some family say, so that damage comes beside what is read."""
directory = Path()
FOLDERS = [str(number) for number in range(len(CONFIGS))]


def prepare() -> None:
    global directory
    directory = Path(tempfile.mkdtemp())
    for folder, values in zip(FOLDERS, CONFIGS, strict=True):
        family = str(values["model_type"])
        torch.manual_seed(0)
        config = read_config(values, "config.json")
        made = Checkpoint(config, Transformer(config), None, "here", family=family)
        save_checkpoint(made, directory / folder)


def case(random: Random) -> None:
    number = random.choice((0, random.randrange(len(CONFIGS))))
    folder, source = directory / FOLDERS[number], dict(CONFIGS[number])
    kind = random.random()
    for _ in range(random.randrange(4) if kind < 0.6 else 0):
        key = random.choice(list(OTHERS))
        source[key] = random.choice(OTHERS[key])
    text = json.dumps(source).encode() if kind < 0.3 else mutation.json_text(random, source)
    (folder / "config.json").write_bytes(text)
    if random.random() < 0.3:
        str(plan(str(folder / "config.json"), tokens=32))
        return
    loaded = load_checkpoint(folder)
    ids = torch.tensor([[0, 3, 5, 7, 2, 1, 9, 9, 4]])[:, : loaded.config.max_positions]
    with torch.no_grad():
        out = loaded.model(ids)
        assert out.shape[:2] == ids.shape
        if loaded.config.kind == "decoder":
            cache = loaded.model.new_cache()
            steps = [loaded.model(part, cache=cache) for part in (ids[:, :4], ids[:, 4:])]
            assert torch.cat(steps, dim=1).shape == out.shape
