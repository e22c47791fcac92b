"""Tiny random Hugging Face models of each family, as their own library builds and saves them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from polyhead.models import Transformer

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@torch.no_grad()
def greedy(model: Transformer, ids: torch.Tensor, count: int) -> torch.Tensor:
    """``ids`` and the ``count`` tokens that polyhead's model adds, through its cache."""
    cache = model.new_cache()
    for _ in range(count):
        logits = model(ids[:, cache.length :], cache=cache, last=1)
        ids = torch.cat((ids, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return ids


@torch.no_grad()
def their_greedy(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """The same of transformers' model and cache. (``generate`` imports for 15 seconds.)"""
    chunk, past = ids, None
    for _ in range(count):
        out = model(chunk, past_key_values=past, use_cache=True)
        past, chunk = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat((ids, chunk), dim=1)
    return ids


@dataclass(frozen=True)
class Tiny:
    """One model: its family, what differs from ``SIZES``, and how many tokens it is tried on."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    tokens: int = 40

    def build(self) -> transformers.PreTrainedModel:
        torch.manual_seed(len(str(self)))
        config_class = getattr(transformers, f"{self.family}Config")
        sizes = dict(SIZES)
        if self.family == "Bert":
            del sizes["num_key_value_heads"]
        config = config_class(**{**sizes, **self.options}, attn_implementation="eager")
        suffix = "Model" if self.family == "Bert" else "ForCausalLM"
        name = self.family.removesuffix("Text") + suffix
        model = getattr(transformers, name)(config).eval()
        for name, tensor in model.named_parameters():
            # Biases start at 0 and norms at 1, where nothing would notice their loss.
            spread = 0.3 if tensor.ndim == 2 else 0.5
            offset = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            torch.nn.init.normal_(tensor, mean=offset, std=spread if tensor.ndim < 2 else 0.15)
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(tensor, std=0.3)
        return model

    def save(self, directory: Path) -> transformers.PreTrainedModel:
        model = self.build()
        model.save_pretrained(directory)
        return model

    def ids(self, batch: int = 2) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        return torch.randint(3, SIZES["vocab_size"], (batch, self.tokens), generator=generator)


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **options}}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
LONGROPE = rope(
    "longrope",
    short_factor=[1.0, 1.1, 1.2, 1.3],
    long_factor=[1.5, 2.0, 3.0, 4.0],
    original_max_position_embeddings=32,
    factor=2.0,
)
SOME_WINDOWS = ["full_attention", "sliding_attention", "full_attention"]

DECODERS = {
    "llama, GQA": Tiny("Llama"),
    "llama, MHA": Tiny("Llama", {"num_key_value_heads": 6}),
    "llama, MQA": Tiny("Llama", {"num_key_value_heads": 1}),
    "llama, tied": Tiny("Llama", {"tie_word_embeddings": True}),
    "llama, explicit head_dim": Tiny("Llama", {"head_dim": 20}),
    "llama, biases": Tiny("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, gelu": Tiny("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, linear rope": Tiny("Llama", rope("linear", factor=4.0), tokens=150),
    "llama, dynamic rope": Tiny("Llama", rope("dynamic", factor=4.0), tokens=150),
    "llama, dynamic rope, short": Tiny("Llama", rope("dynamic", factor=4.0), tokens=60),
    "llama, llama3 rope": Tiny("Llama", LLAMA3, tokens=64),
    "llama, yarn rope": Tiny("Llama", YARN, tokens=64),
    "llama, yarn rope, truncate off": Tiny(
        "Llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
        tokens=64,
    ),
    "llama, yarn rope, mscale": Tiny(
        "Llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=0.7,
            mscale_all_dim=1.3,
            beta_fast=16.0,
            beta_slow=2.0,
        ),
        tokens=64,
    ),
    "llama, longrope, long": Tiny("Llama", LONGROPE, tokens=64),
    "llama, longrope, short": Tiny("Llama", LONGROPE, tokens=30),
    "mistral, window": Tiny("Mistral", {"sliding_window": 9}, tokens=60),
    "mistral, no window": Tiny("Mistral", {"sliding_window": None}, tokens=60),
    "qwen2": Tiny("Qwen2"),
    "qwen2, yarn rope": Tiny("Qwen2", YARN, tokens=64),
    "qwen2, some windows": Tiny(
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": SOME_WINDOWS},
        tokens=60,
    ),
    "qwen3": Tiny("Qwen3", {"head_dim": 16}),
    "qwen3, biases": Tiny("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3, late windows": Tiny(
        "Qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        tokens=60,
    ),
}

GEMMA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ],
}
GEMMA_SCALED = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
    }
}

GEMMAS = {
    "gemma3": Tiny("Gemma3Text", GEMMA, tokens=60),
    "gemma3, MQA": Tiny("Gemma3Text", GEMMA | {"num_key_value_heads": 1}, tokens=60),
    "gemma3, scaled global rope": Tiny("Gemma3Text", GEMMA | GEMMA_SCALED, tokens=60),
    "gemma3, softcapped logits, untied, biases": Tiny(
        "Gemma3Text",
        GEMMA
        | {"final_logit_softcapping": 5.0, "tie_word_embeddings": False, "attention_bias": True},
    ),
    "gemma3, no windows": Tiny("Gemma3Text", GEMMA | {"layer_types": ["full_attention"] * 4}),
}

LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 128,
}
LATENT_YARN = rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=32,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=0.707,
)
GROUPS = {"topk_method": "group_limited_greedy"}

DEEPSEEKS = {
    "deepseek v2": Tiny("DeepseekV2", LATENT | LATENT_YARN | GROUPS, tokens=90),
    "deepseek v2, no q latent": Tiny(
        "DeepseekV2", LATENT | LATENT_YARN | {"q_lora_rank": None}, tokens=90
    ),
    "deepseek v2, default rope": Tiny("DeepseekV2", LATENT | {"routed_scaling_factor": 1.5}),
    "deepseek v2, biases": Tiny(
        "DeepseekV2", LATENT | GROUPS | {"attention_bias": True, "mlp_bias": True}
    ),
    "deepseek v2, dense": Tiny("DeepseekV2", LATENT | {"first_k_dense_replace": 3}),
    "deepseek v3": Tiny("DeepseekV3", LATENT | LATENT_YARN, tokens=90),
    "deepseek v3, no q latent": Tiny(
        "DeepseekV3",
        LATENT | LATENT_YARN | {"q_lora_rank": None, "attention_bias": True},
        tokens=90,
    ),
    "deepseek v3, half-split rows": Tiny("DeepseekV3", LATENT | {"rope_interleave": False}),
    "deepseek v3, mixtures only": Tiny(
        "DeepseekV3", LATENT | {"first_k_dense_replace": 0, "norm_topk_prob": False}
    ),
}

BERTS = {
    "bert": Tiny("Bert"),
    "bert, relu": Tiny("Bert", {"hidden_act": "relu"}),
    "bert, one segment": Tiny("Bert", {"type_vocab_size": 1}),
}
