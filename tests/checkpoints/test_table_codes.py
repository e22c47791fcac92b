"""Directories whose codes of 4 bits name numbers of a table: MXFP4, NVFP4, bitsandbytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_coded import LLAMA, decoded, matrices, needs_native
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import polyhead as ph
from polyhead.checkpoints import load_checkpoint
from polyhead.errors import CheckpointError, ConfigError

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
PROJECTION = re.compile(r".*_proj\.weight")
Written = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


def _rewrite(folder: Path, quantization: dict[str, Any], made: dict[str, Tensor]) -> None:
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def _coded(folder: Path, quantization: dict[str, Any], each: Written) -> dict[str, Tensor]:
    """A tiny Llama whose projections are codes, and the numbers that they mean."""
    LLAMA.save(folder)
    tensors = load_file(folder / "model.safetensors")
    meant = {}
    for name in [name for name in tensors if PROJECTION.fullmatch(name)]:
        more, meant[name] = each(name, tensors.pop(name))
        tensors |= more
    _rewrite(folder, quantization, tensors)
    return meant


def _bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


def _codes(octets: Tensor, high_first: bool) -> Tensor:
    halves = (octets >> 4, octets & 15) if high_first else (octets & 15, octets >> 4)
    return torch.stack(halves, dim=-1).flatten(-2).int()


def _nvfp4(end: str, whole: str, divides: bool) -> Written:
    def each(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, features = weight.shape
        codes, by = _bytes(rows, features // 2), torch.tensor([0.7 if divides else 0.003])
        scales = (torch.rand(rows, features // 16) * 0.1).to(torch.float8_e4m3fn)
        if not divides:
            scales = (scales.float() * 300).to(torch.float8_e4m3fn)
        scale = scales.float() / by if divides else scales.float() * by
        stem = name.removesuffix(".weight")
        tensors = {stem + end: codes, f"{stem}.weight_scale": scales, stem + whole: by}
        tensors[f"{stem}.input_scale"] = torch.ones(())
        if not divides:
            tensors[stem + whole] = by[0]
        return tensors, E2M1[_codes(codes, False)] * scale.repeat_interleave(16, 1)

    return each


def _nf4(nested: bool, kind: str) -> Written:
    def each(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.numel() // 64
        table, codes = torch.linspace(-1, 1, 16).pow(3), _bytes(weight.numel() // 2, 1)
        said = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": [*weight.shape]}
        tensors = {name: codes, f"{name}.quant_map": table}
        scales = torch.rand(groups) * 0.1
        if nested:
            of, outer = torch.linspace(-1, 1, 256), torch.rand(-(-groups // 256)) * 0.1
            small = _bytes(groups)
            scales = of[small.int()] * outer.repeat_interleave(256)[:groups] + 0.05
            said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.05}
            tensors |= {f"{name}.nested_absmax": outer, f"{name}.nested_quant_map": of}
        tensors[f"{name}.absmax"] = small if nested else scales
        state = torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)
        tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = state
        flat = table[_codes(codes.flatten(), True)] * scales.repeat_interleave(64)
        return tensors, flat.view(weight.shape)

    return each


def _int8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
    scales = torch.rand(len(weight)) * 0.2
    made = {name: codes, name.replace("weight", "SCB"): scales}
    made |= {f"{name}_format": torch.tensor(0, dtype=torch.uint8)}
    return made, codes.float() * (scales / 127)[:, None]


def _compressed(**weights: Any) -> dict[str, Any]:
    fields = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    group = {"targets": ["Linear"], "weights": fields | {"symmetric": True} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group},
    }


def _torchao(name: str, kind: str, **sizes: int) -> dict[str, Any]:
    granularity = {"_type": kind, "_version": 1, "_data": {"dim": -1, **sizes}}
    data = {"granularity": granularity, "group_size": None, "set_inductor_config": True}
    if name.startswith("Float8"):
        data["weight_dtype"] = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
    return {
        "quant_method": "torchao",
        "include_input_output_embeddings": False,
        "modules_to_not_convert": None,
        "untie_embedding_weights": False,
        "quant_type": {"default": {"_type": name, "_version": 2, "_data": data}},
    }


def _of_torchao(rows: int | None, numbers: int | None, float8: bool = False) -> Written:
    def each(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes = torch.randint(-100, 100, weight.shape, dtype=torch.int8)
        groups = weight.shape[1] // (numbers or weight.shape[1])
        scales = torch.rand(len(weight) if rows else 1, groups) * 0.01
        stem = name.replace("weight", "_weight")
        made = {f"{stem}_qdata": codes, f"{stem}_scale": scales}
        if float8:
            made[f"{stem}_qdata"] = codes.to(torch.float8_e4m3fn)
        else:
            made[f"{stem}_zero_point"] = torch.zeros(scales.shape, dtype=torch.int8)
        by = scales.repeat_interleave(weight.shape[1] // groups, 1)
        return made, made[f"{stem}_qdata"].float() * by

    return each


def _hqq_config(bits: int, **more: Any) -> dict[str, Any]:
    weights = {"nbits": bits, "group_size": 32, "axis": 1, "channel_wise": True, "optimize": True}
    weights |= {"round_zero": True, "view_as_float": False, **more}
    stated = {"weight_quant_params": weights, "scale_quant_params": None}
    stated |= {"zero_quant_params": None, "offload_meta": False}
    return {"quant_method": "hqq", "quant_config": stated, "skip_modules": ["lm_head"]}


def _hqq(bits: int, axis: int) -> Written:
    """As HQQ's own ``state_dict`` has it: metadata are tensors too."""

    def each(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        shape = (32, -1) if axis == 0 else (-1, 32)
        codes = torch.randint(1 << bits, weight.shape).view(shape)
        scales = torch.rand(codes.shape[0] if axis else 1, 1 if axis else codes.shape[1]) * 0.01
        zeros = torch.rand(scales.shape) * (1 << bits)
        packed = torch.zeros(len(codes) * bits // 8, codes.shape[1], dtype=torch.uint8)
        for part in codes.to(torch.uint8).chunk(8 // bits):
            packed = packed << bits | part
        said = {"nbits": bits, "group_size": 32, "axis": axis, "view_as_float": 0, "quant_scale": 0}
        stem = name.removesuffix("weight")
        made = {f"{stem}{key}": torch.tensor(value) for key, value in said.items()}
        made |= {f"{stem}W_q": packed, f"{stem}scale": scales, f"{stem}zero": zeros}
        made[f"{stem}shape"] = torch.tensor([*weight.shape])
        made[f"{stem}packing"] = torch.tensor([*b"4bit_u8"], dtype=torch.uint8)
        return made, ((codes - zeros) * scales).view(weight.shape)

    return each


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}}
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True}
KINDS: dict[str, tuple[dict[str, Any], Written]] = {
    "nvfp4": (_compressed(), _nvfp4(".weight_packed", ".weight_global_scale", True)),
    "modelopt": (MODELOPT, _nvfp4(".weight", ".weight_scale_2", False)),
    "nf4": (FOUR | {"bnb_4bit_quant_type": "nf4"}, _nf4(False, "nf4")),
    "nf4, nested": (FOUR | {"bnb_4bit_use_double_quant": True}, _nf4(True, "nf4")),
    "fp4, nested": (FOUR | {"bnb_4bit_quant_type": "fp4"}, _nf4(True, "fp4")),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _int8),
    "torchao, rows": (_torchao("Int8WeightOnlyConfig", "PerRow"), _of_torchao(1, None)),
    "torchao, groups": (
        _torchao("Int8DynamicActivationInt8WeightConfig", "PerGroup", group_size=32),
        _of_torchao(1, 32),
    ),
    "torchao, float8": (
        _torchao("Float8WeightOnlyConfig", "PerTensor"),
        _of_torchao(None, None, float8=True),
    ),
    "hqq, 4 bits": (_hqq_config(4), _hqq(4, 1)),
    "hqq, 2 bits": (_hqq_config(2, axis=0), _hqq(2, 0)),
    "hqq, 8 bits": (_hqq_config(8, group_size=None), _hqq(8, 1)),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", [*KINDS])
def test_numbers_are_those_that_codes_mean(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    meant = _coded(tmp_path, *KINDS[kind])
    model = load_checkpoint(tmp_path).model
    for i, layer in enumerate(model.layers):
        for part, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down"))):
            for name in names:
                wanted = meant[f"model.layers.{i}.{part}.{name}_proj.weight"]
                ours: Any = layer.attention if part == "self_attn" else layer.feed_forward
                assert torch.equal(getattr(ours, f"{name}_proj").weight, wanted), (part, name)
    kept = load_checkpoint(tmp_path, None).model
    assert {each.kind.name for each in matrices(kept).values()} - {"BF16"} <= {"I8", "F8_E4M3"}
    assert torch.equal(decoded(kept, LLAMA.ids()), decoded(model, LLAMA.ids()))
    half = load_checkpoint(tmp_path, torch.bfloat16).model
    wanted = meant["model.layers.1.mlp.up_proj.weight"].bfloat16()
    assert torch.equal(half.layers[1].feed_forward.up_proj.weight, wanted)


def _gpt_oss(folder: Path) -> Any:
    """transformers' model with random MXFP4 experts, whose numbers its own code unpacks."""
    torch.manual_seed(5)
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
        vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    theirs = transformers.GptOssForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, features, rows = tensors.pop(name).shape
        blocks = _bytes(experts, rows, features // 32, 16)
        scales = torch.randint(112, 126, blocks.shape[:-1], dtype=torch.uint8)
        scales[0, 0, 0] = 0
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        dict(theirs.named_parameters())[name].data = meant
    _rewrite(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, tensors)
    return theirs


@torch.no_grad()
def test_mxfp4_experts_are_transformers_numbers(tmp_path: Path) -> None:
    theirs = _gpt_oss(tmp_path)
    unpacked, kept = load_checkpoint(tmp_path).model, load_checkpoint(tmp_path, None).model
    for layer, other in zip(unpacked.layers, theirs.model.layers, strict=True):
        for j, expert in enumerate(layer.feed_forward.experts):
            gate_up = other.mlp.experts.gate_up_proj[j].mT
            assert torch.equal(expert.gate_proj.weight, gate_up[::2])
            assert torch.equal(expert.up_proj.weight, gate_up[1::2])
            assert torch.equal(expert.down_proj.weight, other.mlp.experts.down_proj[j].mT)
    ids = torch.randint(64, (1, 12))
    wanted = theirs(ids).logits
    for model in (unpacked, kept):
        assert (model(ids) - wanted).abs().max() < 5e-5 * wanted.std()
    assert torch.equal(decoded(kept, ids), decoded(unpacked, ids))


@needs_native
def test_mxfp4_experts_stay_in_the_bits_of_the_file(tmp_path: Path) -> None:
    _gpt_oss(tmp_path)
    parts = matrices(load_checkpoint(tmp_path, None).model)
    assert [each.kind.name for each in parts.values()].count("MXFP4") == 2 * 4 * 3
    assert parts["layers.1.feed_forward.experts.3.up_proj"].blocks.shape == (96, 2 * 17)


@pytest.mark.parametrize(
    ("kind", "end", "changed", "message"),
    [
        ("nvfp4", "up_proj.weight_global_scale", None, "is missing: the weight has 4 bits"),
        ("nvfp4", "up_proj.weight_scale", lambda x: x[:, 1:], "a number for 16 codes"),
        ("nf4", "up_proj.weight.absmax", lambda x: x * torch.inf, "must hold finite scales"),
        ("nf4", "up_proj.weight.quant_map", lambda x: x[1:], "a number for each code"),
        ("nf4", "up_proj.weight.quant_state.bitsandbytes__nf4", None, "nf4.*is missing"),
        ("nf4", "__nf4", lambda x: x[:-1], "must hold JSON"),
        ("nf4, nested", "nested_absmax", lambda x: x[1:], "a number for codes"),
        ("int8", "up_proj.SCB", lambda x: x[1:], "a number for a row"),
        ("torchao, rows", "up_proj._weight_scale", None, "_weight_scale.*is missing"),
        ("torchao, groups", "up_proj._weight_scale", lambda x: x[1:], "block of 1 × 32"),
        ("hqq, 4 bits", "up_proj.zero", lambda x: x[1:], "a number for each group"),
        ("hqq, 4 bits", "up_proj.scale", lambda x: x / 0, "must hold finite scales"),
        ("hqq, 4 bits", "up_proj.shape", lambda x: x + 1, "for 15360 codes"),
        ("hqq, 4 bits", "up_proj.nbits", lambda x: x * 2, "must be 4, as config.json says"),
        ("hqq, 2 bits", "up_proj.quant_scale", lambda x: x + 1, "scales that are codes"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(
    kind: str, end: str, changed: Any, message: str, tmp_path: Path
) -> None:
    _coded(tmp_path, *KINDS[kind])
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(end)]:
        found = tensors.pop(name)
        if changed is not None:
            tensors[name] = changed(found).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_an_exponent_that_is_no_number_is_refused(tmp_path: Path) -> None:
    _gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_scales"][0, 0, 0] = 255
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj_scales.*255 is no number"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "eetq"}, r"quant_method.*'torchao' \(else load the model with"),
        (_torchao("Int4WeightOnlyConfig", "PerRow"), "_type is 'Int4W.*save its weights unpacked"),
        (_torchao("Int8WeightOnlyConfig", "PerBlock"), "granularity: _type is 'PerBlock'"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "quant_type.*unpacked"),
        (_hqq_config(3), "weight_quant_params: nbits is 3; supported is 8 or 4 or 2 or 1"),
        (_hqq_config(4, view_as_float=True), "view_as_float is True"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo"),
        (_compressed(group_size=32), "group_size"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit.*but not both"),
        (FOUR | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
    ],
)
def test_other_schemes_are_refused_by_the_field(
    quantization: dict[str, Any], message: str, tmp_path: Path
) -> None:
    LLAMA.save(tmp_path)
    _rewrite(tmp_path, quantization, load_file(tmp_path / "model.safetensors"))
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(tmp_path)


def test_the_plan_counts_what_stays_in_codes(tmp_path: Path) -> None:
    _gpt_oss(tmp_path)
    made = ph.plan(tmp_path, dtype="file")
    assert made.weight_bytes < ph.plan(tmp_path, dtype="float32").weight_bytes / 3
