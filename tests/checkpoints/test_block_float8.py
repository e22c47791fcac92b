"""DeepSeek-V3 as it is published: weights in 8-bit floats, a scale for every block."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tiny import DEEPSEEKS
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyhead.checkpoints import load_checkpoint
from polyhead.errors import CheckpointError, ConfigError
from polyhead.families import read_config
from polyhead.families.common.quantization import read_scheme

ROWS, COLUMNS = 16, 32
SCHEME = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [ROWS, COLUMNS],
}
PROJECTION = re.compile(r".*_(proj|proj_with_mqa)\.weight")


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the numbers that both mean, block by block."""
    rows, columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // ROWS), -(-columns // COLUMNS))
    meant = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * ROWS, (i + 1) * ROWS), slice(j * COLUMNS, (j + 1) * COLUMNS)
            scales[i, j] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scales[i, j]).to(codes.dtype)
            meant[block] = codes[block].float() * scales[i, j]
    return codes, scales, meant


def test_a_plan_counts_the_bits_of_codes_and_scales() -> None:
    codes, scales, _ = in_blocks(torch.randn(4 * ROWS, 2 * COLUMNS))
    scheme = read_scheme({"quantization_config": SCHEME}, "config.json")
    assert scheme is not None
    assert scheme.held_bits * codes.numel() == 8 * (codes.nbytes + scales.nbytes)


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Any]:
    """A tiny V3 in 8 bits, and transformers' model with the numbers that they mean."""
    theirs = DEEPSEEKS["deepseek v3"].save(tmp_path)
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        stored[name] = tensor
        if PROJECTION.fullmatch(name):
            stored[name], stored[f"{name}_scale_inv"], stored[f"meant {name}"] = in_blocks(tensor)
    meant = {name: stored.pop(f"meant {name}") for name in [*stored] if f"meant {name}" in stored}
    assert len(meant) > 60
    save_file({**load_file(path), **meant}, path)
    theirs = type(theirs).from_pretrained(tmp_path, dtype=torch.float32).eval()
    save_file(stored, path)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": SCHEME}))
    return tmp_path, theirs


@torch.no_grad()
def test_logits_equal_those_of_the_numbers_that_the_blocks_mean(published: Any) -> None:
    directory, theirs = published
    ours = load_checkpoint(directory)
    ids = DEEPSEEKS["deepseek v3"].ids()
    assert (ours.model(ids) - theirs(ids).logits).abs().max() < 1e-4
    assert ours.ignored == ()


def test_scales_that_are_missing_misshapen_or_left_over_are_named(published: Any) -> None:
    directory, _ = published
    path = directory / "model.safetensors"
    whole = load_file(path)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    scale = whole[f"{name}_scale_inv"]
    for change, words in (
        ({f"{name}_scale_inv": None}, "kv_b_proj.weight_scale_inv' is missing"),
        ({f"{name}_scale_inv": scale[1:].clone()}, rf"must have shape \[{scale.shape[0]}, 1\]"),
        ({name: whole[name].float()}, "kv_b_proj.weight_scale_inv.* no place for"),
    ):
        changed = {n: t for n, t in (whole | change).items() if t is not None}
        save_file(changed, path)
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(directory)


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ({**SCHEME, "quant_method": "eetq"}, "quantization_config: quant_method is 'eetq'"),
        ({**SCHEME, "fmt": "e5m2"}, "quantization_config: fmt is 'e5m2'; supported is 'e4m3'"),
        ({"quant_method": "fp8"}, "quantization_config: key 'weight_block_size' is missing"),
        ({**SCHEME, "weight_block_size": [0, 1]}, r"weight_block_size is \[0, 1\]; supported is"),
        ({**SCHEME, "zero_point": True}, "quantization_config: key 'zero_point' .*not understood"),
        ({"bits": 4}, "quantization_config: key 'quant_method' is missing"),
        (8, "quantization_config must be an object: got 8"),
    ],
)
def test_other_quantisations_are_refused_by_name(scheme: Any, words: str) -> None:
    values = json.loads(DEEPSEEKS["deepseek v3"].build().config.to_json_string())
    with pytest.raises(ConfigError, match=words):
        read_config(values | {"quantization_config": scheme}, "config.json")
