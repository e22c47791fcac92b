"""Small GGUF files, written with the ``gguf`` package from transformers' tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_TENSORS = TENSORS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Half-split rows to rotary pairs, as llama.cpp's converter writes q and k."""
    rows = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return rows.swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tensors: dict[str, torch.Tensor] | None = None,
    replaced: dict[str, torch.Tensor] | None = None,
    **metadata: Any,
) -> Path:
    """Writes a model.

    Args:
        path: of the file.
        model: a Llama, Qwen2, Qwen3 or Gemma 3.
        kind: how matrices are stored.
        tensors: further tensors.
        replaced: by name in the file, what is written instead.
        **metadata: settings under the architecture's prefix, with ``__`` for a dot; None leaves
            one out. ``architecture`` renames it.
    """
    config = model.config
    gemma = config.model_type == "gemma3_text"
    name = metadata.pop("architecture", "gemma3" if gemma else config.model_type)
    rope = config.rope_parameters["full_attention"] if gemma else config.rope_parameters
    writer = gguf.GGUFWriter(path, name)
    settings = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
        "vocab_size": config.vocab_size,
    }
    if getattr(config, "head_dim", None):
        settings["attention.key_length"] = settings["attention.value_length"] = config.head_dim
    settings |= {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in settings.items():
        if isinstance(value, list):
            writer.add_array(f"{name}.{key}", value)
        elif value is not None:
            add = {bool: "bool", int: "uint32", float: "float32", str: "string"}[type(value)]
            getattr(writer, f"add_{add}")(f"{name}.{key}", value)
    _write_tokenizer(writer, config.vocab_size)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type == "llama" and ("q_proj" in key or "k_proj" in key):
            q = "q_proj" in key
            heads = config.num_attention_heads if q else config.num_key_value_heads
            tensor = interleaved(tensor, heads)
        if gemma and key.endswith("norm.weight"):
            tensor = tensor + 1
        called = _name(key, GEMMA_TENSORS if gemma else TENSORS)
        tensor = (replaced or {}).get(called, tensor)
        stored = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(tensor.float().numpy(), stored)
        writer.add_tensor(called, data, raw_dtype=stored)
    for key, tensor in (tensors or {}).items():
        writer.add_tensor(key, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Half of ASCII, one merge, and the rest filled up."""
    tokens = ["<|endoftext|>", *map(chr, range(33, 120)), "ab"]
    tokens += [f"[PAD{i}]" for i in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (vocab_size - 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)


def _name(key: str, tensors: dict[str, str]) -> str:
    module, _, leaf = key.rpartition(".")
    if module.startswith("model.layers."):
        layer, _, rest = module.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{tensors[rest]}.{leaf}"
    return f"{tensors[module]}.{leaf}"


def damaged(path: Path, source: Path, *, at: int, value: bytes) -> Path:
    """A copy of a file with some bytes replaced."""
    data = bytearray(source.read_bytes())
    data[at : at + len(value)] = value
    path.write_bytes(data)
    return path


def float16_is_exact(model: transformers.PreTrainedModel) -> None:
    """Rounds a model's weights to what float16 and bfloat16 both hold."""
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(tensor.to(torch.bfloat16).to(torch.float16).float())
            assert np.isfinite(tensor.numpy()).all()
