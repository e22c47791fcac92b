"""``polyhead plan``: tables of 60 columns, JSON, and errors as sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyhead.cli import main
from polyhead.planning import plan, presets

LLAMA = ("plan", "llama-3-8b", "--tokens", "8192")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_tables_say_what_the_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, *LLAMA, "--memory", "24GiB", "--bandwidth", "1TB/s", "--flops", "100TFLOP/s"
    )
    made = plan("llama-3-8b", tokens=8192, memory="24GiB", bandwidth=1e12, flops=1e14)
    assert (code, err) == (0, "")
    assert "8,030,261,248" in out
    assert "32 × GQA-8" in out
    assert "1.00 GiB" in out
    assert f"{made.rank_bytes:,}" in out
    assert made.fit is not None
    assert f"{made.fit.longest_context:,}" in out
    assert "bound by memory" in out
    assert "GQA-8←" in out
    assert "75.0% less cache per token than MHA" in out


UNDIVIDED = (
    "bamba-9b", "diff-13b", "falcon-7b", "gemma-4-e2b", "gpt2-xl", "jamba-v0.1",
    "kimi-linear-48b-a3b", "lfm2-1.2b", "mamba-2.8b", "mamba2-2.7b", "minimax-text-01",
    "nemotron-h-8b", "phi-4", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "qwen3.5-397b-a17b",
    "smollm2-135m",
)  # fmt: skip
"""Heads that 4 does not divide, or of a layout that is not divided among ranks."""


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_is_readable_at_60_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    arguments = ("--tokens", "512", "--memory", "4TiB", "--batch", "64")
    divided = () if name in UNDIVIDED else ("--tensor-parallel", "4")
    code, out, _ = run(capsys, "plan", name, *arguments, *divided)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 60
    assert "…" not in out
    assert name in UNDIVIDED or "4 ranks" in " ".join(out.split())


def test_printing_a_plan_shows_the_same_tables(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *LLAMA)
    shown = [line.rstrip() for line in out.splitlines()]
    assert str(plan("llama-3-8b", tokens=8192)).splitlines() == shown


def test_json_is_the_whole_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, *LLAMA, "--batch", "2", "--dtype", "int4", "--kv-dtype", "int8", "--page", "64",
        "--tensor-parallel", "2", "--memory", "8GiB", "--json",
    )  # fmt: skip
    made = plan(
        "llama-3-8b", tokens=8192, batch_size=2, dtype="int4", kv_dtype="int8", page_size=64,
        tensor_parallel=2, memory="8GiB",
    )  # fmt: skip
    assert code == 0
    said = json.loads(out)
    assert said == json.loads(json.dumps(made.to_dict()))
    assert said["parameters"]["total"] == 8_030_261_248
    assert said["rank_weight_bytes"] < said["weight_bytes"] == 8_030_261_248 // 2
    assert said["decode"]["model"] == made.decode.model if made.decode else False


def test_tokens_default_to_what_the_model_was_made_for(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "gpt2", "--json")
    assert json.loads(out)["tokens"] == 1024


@pytest.mark.parametrize(
    ("written", "count"),
    [("4096", 4096), ("4,096", 4096), ("4_096", 4096), ("128k", 131_072), (" 64K ", 65_536),
     ("1m", 1_048_576), ("2M", 2_097_152)],
)  # fmt: skip
def test_tokens_are_counted_in_1024_and_its_square(
    written: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    config = dict(presets()["llama-7b"].config) | {"max_position_embeddings": 1 << 21}
    file.write_text(json.dumps(config), encoding="utf-8")
    code, out, err = run(capsys, "plan", str(file), "--tokens", written, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["tokens"] == count


@pytest.mark.parametrize("written", ["many", "12.5k", "128kk", "1g", "-5", "k", "", "8,", "128KiB"])
def test_tokens_that_are_no_count_are_refused(
    written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "plan", "gpt2", f"--tokens={written}")
    assert (code, out) == (2, "")
    assert "--tokens must be a whole number of tokens, such as 8192 or 128k" in err
    assert f"got {written!r}" in err
    assert len(err.splitlines()) == 1


def test_an_encoder_has_no_cache_and_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "bert-base")
    assert code == 0
    assert "forward pass" in out
    assert "cache" not in out
    assert "decode" not in out


def test_a_file_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dict(presets()["gemma-2-9b"].config)), encoding="utf-8")
    code, out, _ = run(capsys, "plan", str(file), "--tokens", "8192")
    assert code == 0
    assert "21 × GQA-8, window 4,096" in out
    code, out, err = run(capsys, "plan", str(file), "--tokens", "10000")
    assert (code, out) == (2, "")
    assert "tokens must be at most max_position_embeddings=8,192" in err


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "--presets")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(presets())
    assert "llama-3-8b           32 layers × 4,096, GQA-8 32 query / 8 kv heads × 128" in out
    assert "deepseek-v2          60 layers × 5,120, MLA 128 heads, latent 512 + 64" in out
    assert max(map(len, out.splitlines())) <= 80
    _, out, _ = run(capsys, "plan", "--presets", "--json")
    assert list(json.loads(out)) == list(presets())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan",), "no model: give a config.json or a preset"),
        (("plan", "llama-9"), "no configuration 'llama-9'"),
        ((*LLAMA, "--page", "0"), "page_size must be a whole number of at least 1: got 0"),
        ((*LLAMA, "--memory", "1GiB"), "memory must hold the weights"),
        ((*LLAMA, "--memory", "much"), "memory must be a number of B"),
        ((*LLAMA, "--kv-dtype", "int2"), "kv_dtype must be one of"),
        (("plan", "gpt2", "--tokens", "2048"), "max_position_embeddings=1,024"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert words in err
    assert out == ""
    assert len(err.splitlines()) == 1
