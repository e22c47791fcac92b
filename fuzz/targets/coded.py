"""Directories whose weights are codes: GPTQ, AWQ, compressed-tensors and 8-bit floats."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from fuzz import mutation
from fuzz.targets.config_json import SIZES
from polyhead.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from polyhead.families import read_config
from polyhead.models import Transformer

CONFIG: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | SIZES
GROUP = 16  # features that share a scale; 32 and more stay codes, fewer become numbers
DTYPES = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint32, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
)

Made = dict[str, Tensor]


def words(*shape: int) -> Tensor:
    return torch.full(shape, 0x12345678, dtype=torch.int32)


def scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, 0.01, dtype=dtype)


def float8(rows: int, columns: int) -> Made:
    codes = torch.ones(rows, columns).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales(-(-rows // 16), columns // 32).float()}


def gptq(rows: int, columns: int) -> Made:
    groups = columns // GROUP
    return {
        "qweight": words(columns // 8, rows),
        "qzeros": words(groups, rows // 8),
        "scales": scales(groups, rows, dtype=torch.float16),
        "g_idx": (torch.arange(columns) // GROUP).int(),
    }


def awq(rows: int, columns: int) -> Made:
    groups = columns // GROUP
    return {
        "qweight": words(columns, rows // 8),
        "qzeros": words(groups, rows // 8),
        "scales": scales(groups, rows, dtype=torch.float16),
    }


def packed(rows: int, columns: int) -> Made:
    groups = columns // GROUP
    return {
        "weight_packed": words(rows, columns // 8),
        "weight_scale": scales(rows, groups),
        "weight_zero_point": words(rows // 8, groups),
        "weight_shape": torch.tensor([rows, columns]),
    }


def int8(rows: int, columns: int) -> Made:
    codes = torch.ones(rows, columns, dtype=torch.int8)
    zeros = torch.zeros(rows, 1, dtype=torch.int8)
    return {"weight": codes, "weight_scale": scales(rows, 1), "weight_zero_point": zeros}


def of_tensor(rows: int, columns: int) -> Made:
    return {
        "weight": torch.ones(rows, columns).to(torch.float8_e4m3fn),
        "weight_scale": scales(1),
        "input_scale": scales(1),
    }


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INT: dict[str, Any] = {"type": "int", "symmetric": False}
LAYOUTS: tuple[tuple[dict[str, Any], Callable[[int, int], Made]], ...] = (
    ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]}, float8),
    ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, gptq),
    ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    (compressed("pack-quantized", **INT, num_bits=4, group_size=GROUP, strategy="group"), packed),
    (compressed("int-quantized", **INT, num_bits=8, strategy="channel"), int8),
    (compressed("float-quantized", type="float", num_bits=8, strategy="tensor"), of_tensor),
)
directory = Path()
stored: list[dict[str, Tensor]] = []


def prepare() -> None:
    global directory
    directory = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    config = read_config(CONFIG, "config.json")
    made = Checkpoint(config, Transformer(config), None, "here", family="llama")
    save_checkpoint(made, directory)
    plain = load_file(directory / "model.safetensors")
    for _, coded in LAYOUTS:
        tensors: dict[str, Tensor] = {}
        for name, tensor in plain.items():
            if name.endswith("_proj.weight"):
                parts = coded(tensor.shape[0], tensor.shape[1])
                stem = name.removesuffix("weight")
                tensors |= {stem + end: part for end, part in parts.items()}
            else:
                tensors[name] = tensor.clone()
        stored.append(tensors)


def changed(random: Random, tensor: Tensor) -> Tensor:
    """Another dtype, shape or content."""
    kind = random.randrange(5)
    if kind == 0:
        return torch.zeros(tensor.shape, dtype=torch.uint8).to(random.choice(DTYPES))
    if kind == 1:
        return tensor.flatten()[: random.choice((0, 1, 8))]
    if kind == 2:
        shape = [max(0, size + random.choice((-1, 0, 1))) for size in tensor.shape]
        return torch.zeros(shape, dtype=torch.uint8).to(tensor.dtype)
    if kind == 3:
        return random.choice((tensor[None], tensor.mT if tensor.ndim > 1 else tensor[:0]))
    octets = torch.tensor([*random.randbytes(tensor.nbytes)], dtype=torch.uint8)
    return octets.view(tensor.dtype).view(tensor.shape)


def case(random: Random) -> None:
    number = random.randrange(len(LAYOUTS))
    scheme, tensors = LAYOUTS[number][0], dict(stored[number])
    kind = random.random()
    if kind < 0.5:
        config = CONFIG | {"quantization_config": mutation.json_object(random, scheme)}
    else:
        other = random.choice(LAYOUTS)[0] if kind > 0.9 else scheme
        config = CONFIG | {"quantization_config": other}
        names = [name for name in tensors if "_proj." in name]
        for _ in range(random.choice((1, 1, 2, 8))):
            name = random.choice(names)
            if name not in tensors or random.random() < 0.1:
                tensors.pop(name, None)
            elif random.random() < 0.1:
                tensors[random.choice((name + "x" * 5_000, name * 400, "x" + name))] = tensors[name]
            else:
                tensors[name] = changed(random, tensors[name])
    (directory / "config.json").write_text(json.dumps(config))
    content = save({name: tensor.contiguous().clone() for name, tensor in tensors.items()})
    if random.random() < 0.1:
        content = mutation.data(random, content, start=random.choice((0, 8)))
    (directory / "model.safetensors").write_bytes(content)
    loaded = load_checkpoint(directory)
    with torch.no_grad():
        loaded.model(torch.tensor([[0, 3, 5]]))
