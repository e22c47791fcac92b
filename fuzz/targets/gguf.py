"""GGUF files: the header's bytes, and settings that are well formed and impossible."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import torch

from fuzz import mutation
from polyhead.checkpoints import load_checkpoint

SETTINGS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "attention.value_length": 8,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10_000.0,
    "rope.dimension_count": 8,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 2.0,
    "vocab_size": 64,
}
TOKENS: list[Any] = ["<s>", "</s>", *map(chr, range(40, 100)), "ab", "d"]
SHAPES = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)} | {
    "ffn_gate": (64, 32),
    "ffn_up": (64, 32),
    "ffn_down": (32, 64),
    "attn_norm": (32,),
    "ffn_norm": (32,),
}
WORDS: dict[str, Any] = {
    "model": "gpt2",
    "pre": "smollm",
    "tokens": TOKENS,
    "token_type": [3, 3] + [1] * 62,
    "merges": ["a b"],
    "eos_token_id": 1,
}
OTHERS: dict[str, Any] = {
    "llama.pooling_type": 1,
    "llama.decoder_start_token_id": 1,
    "llama.expert_count": 0,
    "general.alignment": 32,
    "tokenizer.chat_template": "{{ messages[0].content }}",
    "tokenizer.ggml.token_type_count": 2,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.bos_token_id": 0,
}
"""Beside the settings and the vocabulary, where a file has them."""
path = Path()


def prepare() -> None:
    global path
    path = Path(tempfile.mkdtemp()) / "tiny.gguf"
    for architecture in ("llama", "qwen2", "qwen3", "gemma3"):
        written(architecture)


@functools.cache
def written(architecture: str) -> bytes:
    """A file as it should be."""
    return write(architecture, keys_of(architecture))


def keys_of(architecture: str) -> dict[str, Any]:
    """A file's metadata."""
    settings = {f"{architecture}.{name}": value for name, value in SETTINGS.items()}
    return settings | {f"tokenizer.ggml.{name}": value for name, value in WORDS.items()}


def write(architecture: str, metadata: dict[str, Any]) -> bytes:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        writer.add_key_value(name, value, kind_of(value))
    shapes = {"token_embd": (64, 32), "output_norm": (32,)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in SHAPES.items()}
        if architecture in ("qwen3", "gemma3"):
            shapes |= {f"blk.{layer}.attn_{side}_norm": (8,) for side in "qk"}
        if architecture == "gemma3":
            shapes |= {f"blk.{layer}.post_{side}_norm": (32,) for side in ("attention", "ffw")}
        if architecture == "qwen2":
            shapes |= {
                f"blk.{layer}.attn_{s}.bias": (n,) for s, n in zip("qkv", (32, 16, 16), strict=True)
            }
    for name, shape in shapes.items():
        stored = gguf.GGMLQuantizationType.Q8_0 if "ffn_up" in name else None
        data = np.ones(shape, np.float32)
        full = name if name.endswith("bias") else f"{name}.weight"
        if stored is None:
            writer.add_tensor(full, data)
        else:
            writer.add_tensor(full, gguf.quants.quantize(data, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def kind_of(value: Any) -> gguf.GGUFValueType:
    kinds = gguf.GGUFValueType
    if isinstance(value, int) and not isinstance(value, bool):
        return kinds.INT64 if value < 0 else kinds.UINT64
    return {bool: kinds.BOOL, float: kinds.FLOAT64, str: kinds.STRING, list: kinds.ARRAY}[
        type(value)
    ]


def storable(random: Random, value: Any) -> Any:
    """A value that the format can hold, often the given one."""
    if random.random() < 0.2 or value is None or isinstance(value, dict):
        return random.choice((2**31, 10**8, [4, 4], [2**31 - 1] * 2, [1.5, 2.5], ["a"], [True]))
    if isinstance(value, str):
        return value.encode("utf-8", "ignore").decode()
    if isinstance(value, list):
        return random.choice(([2, 2], ["a", "b"], [0.0] * 64, ["a"] * 64, [[1], [2]]))
    if type(value) is int and not -(2**63) <= value < 2**64:
        return random.randrange(70)
    return value


def case(random: Random) -> None:
    architecture = random.choice(("llama", "qwen2", "qwen3", "gemma3"))
    kind = random.randrange(3)
    if kind == 0:
        content = mutation.data(random, written(architecture))
    elif kind == 1:  # the header's first part, where nothing else is read if it is wrong
        content = mutation.data(random, written(architecture)[:3000]) + written(architecture)[3000:]
    else:
        metadata = keys_of(architecture)
        if random.random() < 0.3:
            key = random.choice([*OTHERS])
            metadata[key.replace("llama", architecture)] = OTHERS[key]
        for _ in range(random.choice((1, 1, 2, 4))):
            metadata[random.choice([*metadata])] = storable(random, mutation.value(random))
        content = write(architecture, metadata)
    path.write_bytes(content)
    loaded = load_checkpoint(path)
    with torch.no_grad():
        loaded.model(torch.tensor([[0, 3, 5]]))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("ab")) == "ab"
