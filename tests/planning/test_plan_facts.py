"""Published arithmetic, reproduced: cache bytes, parameter counts, the saving of MLA."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from plan_facts import GEMMA_3_27B, GPT_OSS_120B, QWEN3_0_6B

from polyhead.planning import cache_saving, plan, presets

GIB = 2**30

BYTES_PER_TOKEN = {
    "llama-2-7b": 524_288,
    "llama-3-8b": 131_072,
    "llama-3-70b": 327_680,
    "qwen2.5-7b": 57_344,
    "gpt3": 4_718_592,
    "falcon-40b": 122_880,
    "palm-540b": 120_832,
    "deepseek-67b": 389_120,
    "deepseek-v2": 69_120,
    "deepseek-v3": 70_272,
    "deepseek-r1": 70_272,
}


@pytest.mark.parametrize(("name", "expected"), BYTES_PER_TOKEN.items())
def test_cache_bytes_per_token(name: str, expected: int) -> None:
    made = plan(name, tokens=1024)
    assert made.cache_token_bytes == expected
    assert made.cache_bytes == 1024 * expected


def test_latent_cache_is_whole_on_every_rank() -> None:
    for ranks in (1, 2, 8, 64):
        assert plan("deepseek-v3", tokens=64, tensor_parallel=ranks).cache_token_bytes == (
            61 * 576 * 2
        )
    assert plan("llama-3-8b", tokens=64, tensor_parallel=8).cache_token_bytes == 131_072 / 8
    # Beyond 8 ranks every rank keeps a copy of one of the 8 kv heads.
    assert plan("llama-3-8b", tokens=64, tensor_parallel=16).cache_token_bytes == 131_072 / 8


@pytest.mark.parametrize(
    ("config", "tokens", "gib", "layers"),
    [
        (GEMMA_3_27B, 131_072, 10.41, {10: 131_072, 52: 1024}),
        (QWEN3_0_6B, 40_960, 4.375, {28: 40_960}),
        (GPT_OSS_120B, 131_072, 4.504, {18: 131_072}),
    ],
    ids=["gemma-3-27b", "qwen3-0.6b", "gpt-oss-120b"],
)
def test_cache_of_mixed_windows(
    config: dict[str, Any], tokens: int, gib: float, layers: dict[int, int]
) -> None:
    made = plan(config, tokens=tokens)
    digits = len(str(gib).split(".")[1])
    assert round(made.cache_bytes / GIB, digits) == gib
    for count, held in layers.items():
        assert any(
            len(row.layers) == count and row.bytes == held * row.token_bytes
            for row in made.cache_layers
        )


def test_gemma_3_keeps_everything_in_every_sixth_layer() -> None:
    full = next(
        row for row in plan(GEMMA_3_27B, tokens=2048).cache_layers if "window" not in row.attention
    )
    assert full.layers == tuple(range(5, 62, 6))


UNPUBLISHED = {
    "transformer-base": 63_082_496,  # 65 M is rounded, its vocabulary is about 37,000
    "gemma-4-e2b": 4_628_569_379,  # published with its encoders
}


@pytest.mark.parametrize("name", sorted(presets()))
def test_parameters_are_the_public_count(name: str) -> None:
    preset = presets()[name]
    total = plan(name, tokens=1).parameters.total
    if preset.parameters is None:
        assert total == UNPUBLISHED[name]
        return
    assert abs(total / preset.parameters - 1) < 0.01
    if "tensors of" in preset.parameters_source:
        assert total == preset.parameters


@pytest.mark.parametrize(
    ("name", "billions"), [("mixtral-8x7b", 12.9), ("deepseek-v2", 21.4), ("deepseek-v3", 37.6)]
)
def test_parameters_that_a_token_meets(name: str, billions: float) -> None:
    assert round(plan(name, tokens=1).active_parameters / 1e9, 1) == billions


def test_public_sizes_of_other_families() -> None:
    assert round(plan(QWEN3_0_6B, tokens=1).parameters.total / 1e6) == 596
    assert plan(GPT_OSS_120B, tokens=1).parameters.total == 116_829_156_672
    assert round(plan(GPT_OSS_120B, tokens=1).active_parameters / 1e9, 1) == 5.7


def test_saving_of_deepseek_v2_with_its_baselines() -> None:
    v2, dense = presets()["deepseek-v2"].model, presets()["deepseek-67b"].model
    # The published 93.3 %: another model, and 6 bits against 16.
    assert round(cache_saving(v2, dense, bits=6), 3) == 0.933
    assert cache_saving(v2, dense, bits=6) == pytest.approx(
        1 - 576 * 60 * 6 / (2048 * 95 * 16), rel=1e-12
    )
    # Like for like.
    assert round(cache_saving(v2, dense), 3) == 0.822
    told = [str(saving) for saving in plan("deepseek-v2", tokens=1).savings]
    assert told[0].startswith("93.3% less cache per token than DeepSeek-67B")
    assert "6 bits" in told[0]
    assert told[1] == "82.2% less cache per token than DeepSeek-67B (GQA), both in bf16"
    assert told[2] == "98.2% less cache per token than MHA of the same heads, like for like"
    assert round(1 - 576 / (2 * 128 * 128), 3) == 0.982


def test_layout_table_has_the_formulas_of_the_source() -> None:
    """2 h d for MHA, 2 g d for GQA, 2 d for MQA, the latent for MLA."""
    rows = {row.name: row for row in plan("llama-3-8b", tokens=8192).layouts}
    assert list(rows) == ["MHA", "GQA-8", "MQA", "MLA"]
    assert [row.elements for row in rows.values()] == [
        2 * 32 * 128,
        2 * 8 * 128,
        2 * 128,
        4 * 128 + 64,
    ]
    assert [row.cache_bytes for row in rows.values()] == [
        8192 * 32 * 2 * row.elements for row in rows.values()
    ]
    assert [row.ratio for row in rows.values()] == [1, 1 / 4, 1 / 32, 576 / 8192]
    assert [row.current for row in rows.values()] == [False, True, False, False]
    assert rows["GQA-8"].parameters == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    latent = {row.name: row for row in plan("deepseek-v2", tokens=64).layouts}
    assert latent["MHA"].elements == 32_768
    assert latent["MLA"].current
    assert latent["MLA"].elements == 576
    windowed = {row.name: row for row in plan("gemma-2-9b", tokens=8192).layouts}
    assert windowed["MQA"].cache_bytes == 21 * (8192 + 4096) * 2 * 256 * 2


def test_text_of_a_preset_is_named_after_its_source() -> None:
    for preset in presets().values():
        assert preset.source
        assert preset.parameters_source
        assert preset.checked or preset.unchecked == "everything"
        assert math.isfinite(plan(preset.name, tokens=8).prefill.model)


def test_contexts_and_rope_bases_are_the_published_ones() -> None:
    """Numbers that neither parameters nor cache bytes show."""
    expected = {
        "qwen2-7b": (131_072, 1e6),
        "qwen2.5-7b": (131_072, 1e6),
        "glm-4.5": (131_072, 1e6),
        "kimi-k2": (131_072, 5e4),
        "mixtral-8x7b": (32_768, 1e6),
        "gpt-oss-20b": (131_072, 1.5e5),
        "gpt-oss-120b": (131_072, 1.5e5),
        "olmo-3-7b": (65_536, 5e5),
        "mistral-nemo": (128_000, 1e6),
        "minimax-m2": (196_608, 5e6),
        "glm-5": (202_752, 1e6),
    }
    for name, (positions, theta) in expected.items():
        model = presets()[name].model
        ropes = [layer.attention.rope for layer in model.layers]
        assert (model.max_positions, {rope.theta for rope in ropes}) == (positions, {theta}), name
    assert presets()["nemotron-h-8b"].model.max_positions == 8192


def test_shared_keys_are_cached_once() -> None:
    """Of 35 layers 15 keep keys: 12 of 512 tokens with 256 channels, 3 of all with 512."""
    made = plan("gemma-4-e2b", tokens=8192)
    assert made.cache_bytes == 2 * 2 * (12 * 512 * 256 + 3 * 8192 * 512)


def test_the_page_says_how_many_presets_were_checked() -> None:
    known = presets().values()
    whole = sum(bool(p.checked) and not p.unchecked for p in known)
    part = sum(bool(p.checked) and bool(p.unchecked) for p in known)
    docs = Path(__file__).parents[2] / "docs"
    english = (docs / "caches.md").read_text(encoding="utf-8")
    chinese = (docs / "caches.zh.md").read_text(encoding="utf-8")
    words = f"Of the {len(known)} presets, {whole} are confirmed"
    assert words in english
    assert f"{part} are confirmed in part" in english
    assert f"{len(known)} 个预设中，{whole} 个" in chinese
    assert f"{part} 个只" in chinese
    for preset in known:
        if not preset.checked:
            assert f"`{preset.name}`" in english
            assert f"`{preset.name}`" in chinese
