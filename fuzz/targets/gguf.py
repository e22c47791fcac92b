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
TOKENS = ["<s>", "</s>", *map(chr, range(40, 100)), "ab", "d"]
SHAPES = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)} | {
    "ffn_gate": (64, 32),
    "ffn_up": (64, 32),
    "ffn_down": (32, 64),
    "attn_norm": (32,),
    "ffn_norm": (32,),
}
path = Path()


def prepare() -> None:
    global path
    path = Path(tempfile.mkdtemp()) / "tiny.gguf"
    for architecture in ("llama", "qwen2", "qwen3", "gemma3"):
        written(architecture)


@functools.cache
def written(architecture: str) -> bytes:
    """A file as it should be."""
    return write(architecture, SETTINGS)


def write(architecture: str, settings: dict[str, Any]) -> bytes:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in settings.items():
        writer.add_key_value(f"{architecture}.{name}", value, kind_of(value))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * 62)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
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


def case(random: Random) -> None:
    architecture = random.choice(("llama", "qwen2", "qwen3", "gemma3"))
    kind = random.randrange(3)
    if kind == 0:
        content = mutation.data(random, written(architecture))
    elif kind == 1:  # the header's first part, where nothing else is read if it is wrong
        content = mutation.data(random, written(architecture)[:3000]) + written(architecture)[3000:]
    else:
        settings = dict(SETTINGS)
        for _ in range(random.choice((1, 1, 2, 4))):
            name = random.choice(list(settings))
            value = random.choice((mutation.value(random), 2**31, 10**8, [4, 4], [2**31] * 2))
            if type(value) is list and not (value and all(type(x) is int for x in value)):
                value = [2, 2]
            if (
                (type(value) is int and not -(2**63) <= value < 2**64)
                or value is None
                or isinstance(value, dict)
            ):
                value = random.randrange(70)
            if isinstance(value, str):
                value = value.encode("utf-8", "ignore").decode()
            if type(value) is list and not all(-(2**31) <= x < 2**31 for x in value):
                value = [2**31 - 1] * 2
            settings[name] = value
        content = write(architecture, settings)
    path.write_bytes(content)
    loaded = load_checkpoint(path, cache=False)
    with torch.no_grad():
        loaded.model(torch.tensor([[0, 3, 5]]))
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("ab")) == "ab"
