"""Hugging Face directories whose weights are codes: used as they are, and unpacked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_tiny import DEEPSEEK, FP8, LAYOUTS, LLAMA, ORDERED, float8, write_coded
from hf_tiny import Tiny, greedy
from safetensors.torch import load_file, save_file
from torch import Tensor

import polyhead as ph
from allocations import measured
from polyhead import native
from polyhead.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from polyhead.errors import CheckpointError, ConfigError
from polyhead.layers import quantized
from polyhead.layers.quantized import QuantizedLinear, QuantizedMatrix
from polyhead.models import Transformer
from polyhead.models.int8_activations import round_activations

needs_native = pytest.mark.skipif(native.code() is None, reason="no native code here")
NAMES = {"q_proj": "attention", "o_proj": "attention", "down_proj": "feed_forward"}


def decoded(model: Transformer, ids: Tensor) -> Tensor:
    """Logits of the tokens behind the third, one by one."""
    cache = model.new_cache()
    model(ids[:, :3], cache=cache)
    steps = [model(ids[:, i : i + 1], cache=cache) for i in range(3, ids.shape[1])]
    return torch.cat(steps, dim=1)


def matrices(model: Transformer) -> dict[str, QuantizedMatrix]:
    return {n: part for n, part in model.named_modules() if isinstance(part, QuantizedMatrix)}


@torch.no_grad()
@pytest.mark.parametrize("layout", [*LAYOUTS])
def test_numbers_are_those_that_codes_mean(layout: str, tmp_path: Path) -> None:
    """Unpacked to float32 exactly; in place with the same bits in decoding."""
    meant = write_coded(tmp_path, LLAMA, *LAYOUTS[layout])
    unpacked, kept = load_checkpoint(tmp_path).model, load_checkpoint(tmp_path, None).model
    assert matrices(unpacked) == {}
    layer: Any
    for i, layer in enumerate(unpacked.layers):
        for name, part in NAMES.items():
            theirs = "self_attn" if part == "attention" else "mlp"
            wanted = meant[f"model.layers.{i}.{theirs}.{name}.weight"]
            assert torch.equal(getattr(getattr(layer, part), name).weight, wanted), name
    ids = LLAMA.ids()
    if native.code() is not None:
        parts = matrices(kept)
        assert len(parts) == 2 * 7 + 2  # the table and the head, of 16 bits
        assert parts["embedding.tokens"].kind.name == "BF16"
        assert kept.parameter_counts() == unpacked.parameter_counts()
    assert torch.equal(decoded(kept, ids), decoded(unpacked, ids))
    assert (kept(ids) - unpacked(ids)).abs().max() < 2e-4
    assert torch.equal(greedy(kept, ids[:, :5], 8), greedy(unpacked, ids[:, :5], 8))
    half = load_checkpoint(tmp_path, torch.bfloat16).model
    assert torch.equal(
        half.layers[0].attention.q_proj.weight,
        meant["model.layers.0.self_attn.q_proj.weight"].bfloat16(),
    )


@needs_native
@torch.no_grad()
@pytest.mark.parametrize("layout", ["packed, zeros", "int8", "gptq", "awq"])
def test_whole_numbers_take_activations_in_8_bits(layout: str, tmp_path: Path) -> None:
    """A table and a head of 16 bits compute as before; a prompt has the bits of steps."""
    write_coded(tmp_path, LLAMA, *LAYOUTS[layout])
    plain, rounded = load_checkpoint(tmp_path, None).model, load_checkpoint(tmp_path, None).model
    round_activations(rounded)
    parts = {name: part.int8_activations for name, part in matrices(rounded).items()}
    assert sum(parts.values()) == 2 * 7
    assert not parts["embedding.tokens"]
    ids = LLAMA.ids()
    with ph.batch_invariant():
        logits = rounded(ids)
        assert torch.equal(decoded(rounded, ids), logits[:, 3:])
    error = (logits - plain(ids)).abs().max()
    assert 0 < error < 0.05 * logits.abs().max()


@needs_native
@torch.no_grad()
def test_a_deepseek_model_stays_in_8_bits(tmp_path: Path) -> None:
    """Latent attention, whose rotary rows move, and experts, each with its own scales."""
    write_coded(tmp_path, DEEPSEEK, *LAYOUTS["fp8"])
    kept, unpacked = load_checkpoint(tmp_path, None).model, load_checkpoint(tmp_path).model
    parts = {name: part.kind.name for name, part in matrices(kept).items()}
    assert parts["layers.1.feed_forward.experts.7.down_proj"] == "F8_E4M3"
    assert parts["layers.0.attention.q_b_proj"] == "F8_E4M3"
    assert "layers.0.attention.kv_b_proj" not in parts  # read as numbers
    assert len([kind for kind in parts.values() if kind == "F8_E4M3"]) == 2 * 4 + 3 + 3 * 9
    ids = DEEPSEEK.ids()
    with ph.batch_invariant():  # elsewhere torch multiplies a prompt by numbers
        assert torch.equal(decoded(kept, ids), decoded(unpacked, ids))
    assert (kept(ids) - unpacked(ids)).abs().max() < 2e-4
    layer: Any = kept.layers[0]
    down, moved = layer.feed_forward.down_proj, layer.attention.q_b_proj
    # In the mapped file: as far from each other as there.
    stored = load_file(tmp_path / "model.safetensors")
    other: Any = kept.layers[1]
    up = other.feed_forward.experts[0].up_proj
    theirs = stored["model.layers.1.mlp.experts.0.up_proj.weight"]
    assert up.blocks.data_ptr() - down.blocks.data_ptr() == (
        theirs.data_ptr() - stored["model.layers.0.mlp.down_proj.weight"].data_ptr()
    )
    moved = layer.attention.q_b_proj
    assert moved.scales.shape == (moved.out_features, 2)
    assert down.scales.shape == (2, 5)


@needs_native
@torch.no_grad()
@pytest.mark.parametrize("layout", ["fp8", "packed, zeros", "int8", "gptq", "awq"])
def test_weights_take_the_memory_of_their_codes(layout: str, tmp_path: Path) -> None:
    """Mapped ones none of this process; those that are put in the order of rows their own size."""
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 1}
    tiny = Tiny("Llama", sizes | {"num_attention_heads": 8})
    meant = write_coded(tmp_path, tiny, *LAYOUTS[layout])
    codes = sum(weight.numel() for weight in meant.values()) // (2 if layout != "fp8" else 1)

    def used() -> Tensor:
        # Few tokens: their hidden features are not what is measured.
        model, ids = load_checkpoint(tmp_path, None).model, tiny.ids()[:, :10]
        return torch.cat((model(ids)[:, -1:], decoded(model, ids[:, :5])), dim=1)

    used()  # what is imported and tested at first use
    most, _ = measured(used)
    file = (tmp_path / "model.safetensors").stat().st_size  # torch counts what is mapped
    own = 1.2 * codes + 5 * 2**20 if layout in ("gptq", "awq") else 2**21
    assert most < file + own < sum(4 * weight.numel() for weight in meant.values()) / 2


@needs_native
@torch.no_grad()
@pytest.mark.parametrize("layout", ["fp8", "gptq", "int8, zeros"])
def test_rows_of_fused_weights_have_their_scales(layout: str, tmp_path: Path) -> None:
    """Queries, keys and values of one matrix; of 96 rows the last 32 share scales with others."""
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}
    tiny = Tiny("Phi3", sizes | {"tie_word_embeddings": True})
    write_coded(tmp_path, tiny, *LAYOUTS[layout])
    kept, unpacked = load_checkpoint(tmp_path, None).model, load_checkpoint(tmp_path).model
    assert len(matrices(kept)) == 2 * 7 + 1  # the table is also the head
    ids = tiny.ids()
    assert torch.equal(decoded(kept, ids), decoded(unpacked, ids))
    assert (kept(ids) - unpacked(ids)).abs().max() < 2e-4


@torch.no_grad()
def test_what_cannot_stay_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups in another order, rows of no whole blocks, or no native code."""
    ids = LLAMA.ids()
    for tiny, layout in (
        (LLAMA, ORDERED),
        (Tiny("Llama"), LAYOUTS["fp8"]),
        (LLAMA, (FP8 | {"weight_block_size": [8, 24]}, float8(8, 24, "weight_scale_inv"))),
    ):
        meant = write_coded(tmp_path, tiny, *layout)
        kept, unpacked = load_checkpoint(tmp_path, None).model, load_checkpoint(tmp_path).model
        assert not any(part.kind.name != "BF16" for part in matrices(kept).values())
        found: Any = kept.layers[1]
        wanted = meant["model.layers.1.mlp.up_proj.weight"]
        assert torch.equal(found.feed_forward.up_proj.weight, wanted)
        assert torch.equal(kept(ids), unpacked(ids))
    write_coded(tmp_path, LLAMA, *LAYOUTS["packed"])
    wanted = load_checkpoint(tmp_path).model(ids)
    monkeypatch.setattr("polyhead.checkpoints.formats.hugging_face.code", lambda: None)
    model = load_checkpoint(tmp_path, None).model
    assert matrices(model) == {}
    assert torch.equal(model(ids), wanted)


@needs_native
@pytest.mark.parametrize(
    ("tiny", "layout"),
    [(DEEPSEEK, "fp8"), (LLAMA, "packed, zeros"), (LLAMA, "gptq"), (LLAMA, "awq")],
)
def test_a_plan_counts_what_is_held(tiny: Tiny, layout: str, tmp_path: Path) -> None:
    write_coded(tmp_path, tiny, *LAYOUTS[layout])
    model = load_checkpoint(tmp_path, None).model
    held = {id(x): x.nbytes for x in (*model.parameters(), *model.buffers())}
    plan = ph.plan(str(tmp_path), dtype="file")
    assert plan.weight_bytes == pytest.approx(sum(held.values()), rel=0.01)
    assert plan.kv_dtype == "float32"
    with pytest.raises(ConfigError, match="dtype='file' is of one rank"):
        ph.plan(str(tmp_path), dtype="file", tensor_parallel=2)
    with pytest.raises(ConfigError, match=r"dtype='file' needs a config.json with quantiz"):
        ph.plan(json.loads(Tiny("Llama").build().config.to_json_string()), dtype="file")


@needs_native
@torch.no_grad()
def test_other_parts_take_codes_as_they_take_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meant = write_coded(tmp_path / "a", LLAMA, *LAYOUTS["fp8"])
    kept, ids = load_checkpoint(tmp_path / "a", None), LLAMA.ids()
    logits = kept.model(ids)
    layer: Any = kept.model.layers[0]
    assert isinstance(layer.attention.q_proj, QuantizedLinear)
    half = load_checkpoint(tmp_path / "a", None).model.bfloat16()
    assert half(ids).dtype is torch.bfloat16
    assert (half(ids).float() - logits).norm() < 0.05 * logits.norm()
    assert torch.equal(half.float()(ids), logits)  # scales were not rounded
    half.load_state_dict(kept.model.state_dict())
    monkeypatch.setattr(quantized, "_PANEL", 7 * 160)  # what native code does not multiply
    down, x = layer.feed_forward.down_proj, torch.randn(3, 160, dtype=torch.float64)
    wanted = x @ meant["model.layers.0.mlp.down_proj.weight"].double().mT
    assert torch.allclose(down(x), wanted, rtol=1e-12, atol=1e-12)
    heads = {0: [0, 1, 2]}
    pruned = [
        ph.prune(load_checkpoint(tmp_path / "a", dtype).model, heads)
        for dtype in (None, torch.float32)
    ]
    assert torch.equal(pruned[0](ids), pruned[1](ids))
    checkpoint = Checkpoint(kept.config, kept.model, None, "here", family=kept.family)
    with pytest.warns(UserWarning, match="in blocks of a few bits are saved unpacked"):
        save_checkpoint(checkpoint, tmp_path / "b")
    assert (load_checkpoint(tmp_path / "b").model(ids) - logits).abs().max() < 2e-4
    with pytest.raises(ph.UnsupportedError, match=r"activations='int8' takes blocks .* is F8_E4M3"):
        ph.load(tmp_path / "a", activations="int8")


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("fp8", {"weight_scale_inv": None}, "q_proj.weight_scale_inv' is missing: the weight has 8"),
    ("fp8", {"weight_scale_inv": torch.ones(2, 2)}, r"must have shape \[2, 3\]"),
    (
        "fp8",
        {"weight_scale_inv": torch.full((2, 3), torch.nan)},
        "must hold finite scales: got nan",
    ),
    ("fp8", {"weight_scale_inv": torch.full((2, 3), 1e35)}, "must hold finite scales: got 1"),
    (
        "fp8",
        {"weight_scale_inv": torch.ones(2, 3).long()},
        "must be float32 or bfloat16",
    ),
    (
        "gptq",
        {"scales": torch.ones(3, 95)},
        r"scales' must have shape \[3, 96\], a number for each",
    ),
    ("gptq", {"qzeros": None}, "qzeros' is missing"),
    (
        "gptq",
        {"qzeros": torch.zeros(3, 11, dtype=torch.int32)},
        r"qzeros' must have shape \[3, 12\]",
    ),
    ("gptq", {"g_idx": torch.full((96,), 3)}, "g_idx' must hold numbers of groups below 3: got 3"),
    ("gptq", {"g_idx": torch.zeros(96)}, "g_idx' must be int32 or int64: got torch.float32"),
    ("gptq", {"qzeros": torch.zeros(3, 12)}, "qzeros' must be int32: got torch.float32"),
    ("awq", {"qzeros": torch.zeros(3, 12).bool()}, "qzeros' must be int32: got torch.bool"),
    ("packed", {"weight_shape": torch.ones(3)}, r"weight_shape' must have shape \[2\]"),
    ("packed", {"weight_shape": torch.ones(2)}, "weight_shape' must be int32 or int64"),
    (
        "packed, zeros",
        {"weight_zero_point": torch.zeros(12, 3)},
        "zero_point' must be int32",
    ),
    ("gptq 8 bits", {"qzeros": torch.full((1, 24), -1, dtype=torch.int32)}, "up to 255: got 256"),
    ("awq", {"scales": torch.full((3, 96), torch.inf)}, "q_proj.scales' must hold finite scales"),
    ("awq", {"qweight": torch.zeros(95, 12, dtype=torch.int32)}, "an even number of rows: got 95"),
    ("packed", {"weight_shape": torch.tensor([96, 200])}, "must be the shape of the weight: got"),
    ("packed, zeros", {"weight_zero_point": torch.zeros(3, 3).int()}, "8 zeros in each number"),
    ("int8, zeros", {"weight_zero_point": torch.zeros(96, 3)}, "weight_zero_point' must be int8"),
    ("float8 of a tensor", {"weight_scale": torch.ones(2)}, r"must have shape \[1, 1\]"),
]


@pytest.mark.parametrize(("layout", "change", "words"), CASES)
def test_damaged_tensors_are_one_clear_error(
    layout: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_coded(tmp_path, LLAMA, *LAYOUTS[layout])
    path, stem = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj."
    damaged = load_file(path) | {stem + end: tensor for end, tensor in change.items()}
    save_file({name: t for name, t in damaged.items() if t is not None}, path)
    for dtype in (None, torch.float32):
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(tmp_path, dtype)


@pytest.mark.parametrize(
    ("layout", "path", "value", "words"),
    [
        ("gptq", "bits", 3, "quantization_config: bits is 3; supported is 4 or 8"),
        ("gptq", "group_size", 0, "group_size is 0; supported is a whole number from 1, or -1"),
        ("gptq", "checkpoint_format", "marlin", "checkpoint_format is 'marlin'; supported is gptq"),
        ("awq", "version", "gemv", "version is 'gemv'; supported is 'gemm'"),
        ("packed", "format", "mxfp4-pack-quantized", "format is 'mxfp4.*supported is 'pack-"),
        ("packed", "config_groups", {}, "config_groups is {}; supported is an object of one group"),
        ("packed", "config_groups.group_0.weights.num_bits", 2, "group_0: weights: num_bits is 2"),
        ("packed", "config_groups.group_0.weights.strategy", "token", "strategy is 'token'"),
        ("packed", "config_groups.group_0.weights.strategy", [[]], "strategy must be a text: got"),
        (
            "int8",
            "config_groups.group_0.weights.type",
            "float",
            "type is 'float'; supported is 'int'",
        ),
        ("int8", "config_groups.group_0.weights.sparse", 1, "key 'sparse' .*is not understood"),
    ],
)
def test_other_schemes_are_refused_by_name(
    layout: str, path: str, value: Any, words: str, tmp_path: Path
) -> None:
    write_coded(tmp_path, LLAMA, *LAYOUTS[layout])
    config = json.loads((tmp_path / "config.json").read_text())
    *above, last = path.split(".")
    at = config["quantization_config"]
    for key in above:
        at = at[key]
    at[last] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        load_checkpoint(tmp_path)
