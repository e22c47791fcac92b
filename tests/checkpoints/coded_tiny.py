"""Tiny directories whose weights are codes, and the numbers that they mean, by arithmetic."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hf_tiny import Tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

PROJECTION = re.compile(r".*_(proj|proj_with_mqa)\.weight")
LLAMA = Tiny(
    "Llama",
    {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "attention_bias": True},
)
DEEPSEEK = Tiny(
    "DeepseekV3",
    {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
    },
    tokens=20,
)

Made = tuple[dict[str, Tensor], Tensor]
"""What takes a weight's place (by the ends of names), and the numbers that it means."""


def blocks_of(weight: Tensor, rows: int, numbers: int, most: float) -> tuple[Tensor, Tensor]:
    """Scales ``[groups of rows, groups of numbers]``, and the same for every number."""
    rows, numbers = (min(*each) for each in zip((rows, numbers), weight.shape, strict=True))
    more = [-size % each for size, each in zip(weight.shape, (rows, numbers), strict=True)]
    whole = torch.nn.functional.pad(weight.abs(), (0, more[1], 0, more[0]))
    blocks = whole.view(whole.shape[0] // rows, rows, whole.shape[1] // numbers, numbers)
    scales = blocks.amax(dim=(1, 3)) / most
    each = scales.repeat_interleave(rows, 0).repeat_interleave(numbers, 1)
    return scales, each[: weight.shape[0], : weight.shape[1]]


def float8(rows: int, numbers: int, end: str) -> Callable[[Tensor], Made]:
    def made(weight: Tensor) -> Made:
        scales, each = blocks_of(weight, rows, numbers, 448)
        codes = (weight / each).to(torch.float8_e4m3fn)
        return {"weight": codes, end: scales}, codes.float() * each

    return made


def whole(weight: Tensor, numbers: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Codes from 0, zeros and scales of groups, zeros and scales of numbers."""
    top = 2**bits - 1
    scales, _ = blocks_of(weight, 1, numbers, top / 2)
    scales = scales.to(dtype)
    generator = torch.Generator().manual_seed(weight.numel())
    zeros = torch.randint(top // 2 - 2, top // 2 + 3, scales.shape, generator=generator)
    columns = torch.arange(weight.shape[1]) // numbers
    zero, scale = zeros[:, columns], scales.float()[:, columns]
    codes = ((weight / scale).round() + zero).clamp(0, top).long()
    return codes, zeros, scales, (codes - zero) * scale


def words(codes: Tensor, bits: int, places: list[int] | None = None) -> Tensor:
    """``[rows, n]`` codes as whole numbers of 32 bits, the first in the lowest bits."""
    per = 32 // bits
    order = places or [*range(per)]
    found = torch.zeros(codes.shape[0], codes.shape[1] // per, dtype=torch.int64)
    for i in range(per):
        found |= codes[:, order[i] :: per] << bits * i
    return (found - (found >> 31 << 32)).to(torch.int32)


def gptq(bits: int, numbers: int, *, shuffled: bool = False) -> Callable[[Tensor], Made]:
    def made(weight: Tensor) -> Made:
        order = torch.arange(weight.shape[1])
        if shuffled:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(1))
        codes, zeros, scales, meant = whole(weight[:, order], numbers, bits, torch.float16)
        back = order.argsort()
        parts = {
            "qweight": words(codes[:, back], bits).mT,
            "qzeros": words(zeros.mT - 1, bits),
            "scales": scales.mT,
            "g_idx": (back // numbers).to(torch.int32),
        }
        return parts, meant[:, back]

    return made


def awq(numbers: int) -> Callable[[Tensor], Made]:
    places = [0, 2, 4, 6, 1, 3, 5, 7]

    def made(weight: Tensor) -> Made:
        codes, zeros, scales, meant = whole(weight, numbers, 4, torch.float16)
        parts = {
            "qweight": words(codes.mT, 4, places),
            "qzeros": words(zeros.mT, 4, places),
            "scales": scales.mT,
        }
        return parts, meant

    return made


def packed(bits: int, numbers: int, *, with_zeros: bool) -> Callable[[Tensor], Made]:
    def made(weight: Tensor) -> Made:
        codes, zeros, scales, meant = whole(weight, numbers, bits, torch.bfloat16)
        parts = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if with_zeros:
            return parts | {"weight_zero_point": words(zeros.mT, bits).mT}, meant
        columns = torch.arange(weight.shape[1]) // numbers
        return parts, (codes - 2 ** (bits - 1)) * scales.float()[:, columns]

    return made


def int8(numbers: int, *, with_zeros: bool) -> Callable[[Tensor], Made]:
    def made(weight: Tensor) -> Made:
        codes, zeros, scales, meant = whole(weight, numbers, 8, torch.bfloat16)
        parts = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        if with_zeros:
            return parts | {"weight_zero_point": (zeros - 128).to(torch.int8)}, meant
        columns = torch.arange(weight.shape[1]) // numbers
        return parts, (codes - 128) * scales.float()[:, columns]

    return made


def of_tensor(weight: Tensor) -> Made:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale[None]}, codes.float() * scale


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    """A config.json's ``quantization_config``."""
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, "observer": "minmax", **weights},
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
INT, FLOAT = {"type": "int"}, {"type": "float", "num_bits": 8}
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Made]]] = {
    "fp8": (FP8 | {"weight_block_size": [64, 32]}, float8(64, 32, "weight_scale_inv")),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}, gptq(4, 32)),
    "gptq 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False},
        gptq(8, 1 << 20),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        awq(32),
    ),
    "packed": (
        compressed("pack-quantized", **INT, num_bits=4, group_size=32, strategy="group"),
        packed(4, 32, with_zeros=False),
    ),
    "packed, zeros": (
        compressed("pack-quantized", **INT, num_bits=4, group_size=32, symmetric=False),
        packed(4, 32, with_zeros=True),
    ),
    "packed, 8 bits": (
        compressed("pack-quantized", **INT, num_bits=8, strategy="channel"),
        packed(8, 1 << 20, with_zeros=False),
    ),
    "int8": (
        compressed("int-quantized", **INT, num_bits=8, strategy="channel"),
        int8(1 << 20, with_zeros=False),
    ),
    "int8, zeros": (
        compressed("int-quantized", **INT, num_bits=8, group_size=32, strategy="group"),
        int8(32, with_zeros=True),
    ),
    "float8 of a channel": (
        compressed("float-quantized", **FLOAT, strategy="channel"),
        float8(1, 1 << 20, "weight_scale"),
    ),
    "float8 of a tensor": (compressed("float-quantized", **FLOAT, strategy="tensor"), of_tensor),
}
ORDERED = LAYOUTS["gptq"][0] | {"desc_act": True}, gptq(4, 32, shuffled=True)
"""GPTQ whose groups do not lie next to each other."""


def write_coded(
    directory: Path, tiny: Tiny, scheme: dict[str, Any], made: Callable[[Tensor], Made]
) -> dict[str, Tensor]:
    """Saves a model with all its projections in codes.

    Returns:
        The numbers that they mean, by the file's names of weights.
    """
    tiny.build().bfloat16().save_pretrained(directory)
    path, config = directory / "model.safetensors", directory / "config.json"
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        if PROJECTION.fullmatch(name) is None:
            stored[name] = tensor
            continue
        parts, meant[name] = made(tensor.float())
        stem = name.removesuffix("weight")
        stored |= {stem + end: part.contiguous() for end, part in parts.items()}
    save_file(stored, path)
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"quantization_config": scheme}))
    return meant
