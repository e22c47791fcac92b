"""A tiny random decoder and encoder with a byte tokenizer, in memory and as a directory."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

from polyhead.checkpoints.tokenizers.tokenizer import Tokenizer
from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.models import Transformer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTEXT = 96
VOCABULARY = 256 + len(SPECIAL)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_LLAMA = {
    "final_norm": "norm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention_norm": "input_layernorm",
    "feed_forward": "mlp",
    "attention": "self_attn",
}


def byte_tokenizer() -> Tokenizer:
    """One token per byte of UTF-8, so that most characters beyond ASCII are several tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(
        backend, special_tokens={"eos_token": "<|im_end|>"}, chat_template=CHAT_TEMPLATE
    )


def decoder(*, context: int = CONTEXT) -> Transformer:
    """Two layers of grouped-query attention."""
    torch.manual_seed(0)
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig())
    layer = LayerConfig(attention, FeedForwardConfig(hidden_dim=48))
    model = Transformer(
        TransformerConfig(
            kind="decoder",
            vocab_size=VOCABULARY,
            embed_dim=32,
            max_positions=context,
            layers=(layer, layer),
        )
    )
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # large enough weights for logits that differ clearly
            torch.nn.init.normal_(parameter, std=1.0 if "embedding" in name else 0.3)
    with torch.no_grad():
        model.embedding.tokens.weight[256:] = 0.0  # no special token is ever the likeliest
    return model.eval()


def lora(folder: Path, model: Transformer, parts: str, *, seed: int = 0, rank: int = 4) -> Path:
    """A directory of the PEFT library with random changes of the named projections of a decoder."""
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for number, layer in enumerate(model.layers):
        for name, module in layer.named_modules():
            owner, _, leaf = name.rpartition(".")
            if leaf in parts.split():
                key = f"base_model.model.model.layers.{number}.{_LLAMA[owner]}.{leaf}.lora_"
                down = torch.randn(rank, module.in_features, generator=draw)
                up = torch.randn(module.out_features, rank, generator=draw) / 4
                tensors |= {f"{key}A.weight": down, f"{key}B.weight": up}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2, "target_modules": parts.split()}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def encoder() -> Transformer:
    """Two layers that see everything, with learned positions and post-norm, as BERT."""
    torch.manual_seed(1)
    attention = AttentionConfig(
        num_heads=4, num_kv_heads=4, head_dim=8, qkv_bias=True, out_bias=True
    )
    norm = NormConfig(type="layernorm", bias=True)
    feed_forward = FeedForwardConfig(hidden_dim=48, activation="gelu", gated=False, bias=True)
    layer = LayerConfig(attention, feed_forward, norm, "post")
    model = Transformer(
        TransformerConfig(
            kind="encoder",
            vocab_size=VOCABULARY,
            embed_dim=32,
            max_positions=CONTEXT,
            layers=(layer, layer),
            embedding=EmbeddingConfig(positions="learned", norm=norm),
            final_norm=None,
            head=None,
        )
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def write_decoder(folder: Path, *, context: int = CONTEXT) -> Path:
    """The decoder as a Hugging Face directory of the Llama family."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in decoder(context=context).state_dict().items():
        renamed = ".".join(_LLAMA.get(part, part) for part in name.split("."))
        renamed = renamed.replace("embedding.tokens", "embed_tokens")
        tensors[f"model.{renamed}"] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": VOCABULARY - 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    byte_tokenizer().save(folder)
    return folder
