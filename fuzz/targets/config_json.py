"""config.json of model directories, as the loader and as the planner read it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from fuzz import mutation
from polyhead.checkpoints import load_checkpoint
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    RopeConfig,
    TransformerConfig,
)
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
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False} | SIZES,
    {"model_type": "llama", "rope_scaling": YARN} | SIZES,
    {"model_type": "mistral", "sliding_window": 8, "head_dim": 8, "rope_scaling": LONGROPE} | SIZES,
    {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1} | SIZES,
    {"model_type": "qwen3", "head_dim": 8, "layer_types": ["full_attention"] * 2} | SIZES,
    {"model_type": "gemma3_text", "query_pre_attn_scalar": 8, "sliding_window": 8}
    | SIZES
    | {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 8},
    {"model_type": "deepseek_v3", "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
    | {"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
    | SIZES,
    {"model_type": "bert", "type_vocab_size": 2, "layer_norm_eps": 1e-12} | SIZES,
)
directory = Path()


def prepare() -> None:
    global directory
    directory = Path(tempfile.mkdtemp())
    layer = LayerConfig(
        AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig()),
        FeedForwardConfig(64),
        NormConfig("rmsnorm", eps=1e-6),
    )
    config = TransformerConfig(
        kind="decoder",
        vocab_size=64,
        embed_dim=32,
        max_positions=64,
        layers=(layer, layer),
        final_norm=NormConfig("rmsnorm", eps=1e-6),
        head="untied",
    )
    CONFIGS[0].update(model_type="llama")
    names = {"attention.": "self_attn.", "attention_norm": "input_layernorm", "head.": "lm_head."}
    names |= {"feed_forward_norm": "post_attention_layernorm", "feed_forward.": "mlp."}
    names |= {"embedding.tokens": "embed_tokens", "final_norm": "norm"}
    tensors = {}
    for name, tensor in Transformer(config).state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        full = name if name.startswith("lm_head") else f"model.{name}"
        tensors[full] = tensor.detach().contiguous()
    save_file(tensors, directory / "model.safetensors")


def case(random: Random) -> None:
    source = random.choice((CONFIGS[0], random.choice(CONFIGS)))
    (directory / "config.json").write_bytes(mutation.json_text(random, source))
    if random.random() < 0.3:
        str(plan(str(directory / "config.json"), tokens=32))
        return
    loaded = load_checkpoint(directory)
    with torch.no_grad():
        out = loaded.model(torch.tensor([[0, 3, 5]]))
    assert out.shape == (1, 3, loaded.config.vocab_size)
