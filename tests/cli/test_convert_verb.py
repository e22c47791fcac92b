"""``polyhead convert``: a directory that loads again, a report, and refusals before any work."""

from __future__ import annotations

import json
import random
from pathlib import Path

from process import Run

import polyhead as ph
from polyhead.generation import LanguageModel


def _write(folder: Path, name: str, seed: int, words: int = 400) -> str:
    drawn = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    text = " ".join("".join(drawn.choices(letters, k=5)) for _ in range(words))
    (folder / name).write_text(text)
    return name


def test_a_model_is_converted_healed_saved_and_loads_again(
    run: Run, tiny: str, tmp_path: Path
) -> None:
    files = [_write(tmp_path, f"{name}.txt", i) for i, name in enumerate("abcd")]
    result = run(
        *("convert", tiny, "--latent", "8,12", "--calibration", files[0], "--out", "new"),
        *("--evaluation", files[1], "--unseen", files[2], "--heal", "1s", "--healing", files[3]),
        "--json",
    )
    assert (result.code, result.err) == (0, "")
    shown = json.loads(result.out)
    assert shown["elements_after"] < shown["elements_before"]
    assert [each["name"] for each in shown["domains"]] == ["b.txt", "c.txt"]
    assert shown["healing"]["after"] <= shown["healing"]["before"]
    assert len(shown["healing"]["domains"]) == 2
    loaded = ph.load(tmp_path / "new", expect=LanguageModel)
    assert loaded.config.layers[0].attention.described == "MLA 4 heads, latent 12 + 8"
    exact = run(
        *("convert", tiny, "--kv-heads", "4", "--out", "more", "--heal", "1s"),
        *("--healing", files[3]),
    )
    assert exact.code == 0
    (healed,) = (line for line in exact.out.splitlines() if line.startswith("healed for"))
    assert healed.endswith("parameters")  # in one line, however wide
    assert "exact steps" in exact.out
    assert "saved in more (hugging-face form)" in exact.out


def test_refusals_come_before_any_work(run: Run, tiny: str, tmp_path: Path) -> None:
    text = _write(tmp_path, "a.txt", 0)
    for options, words in (
        (("--latent", "8"), "--latent must be two numbers such as 64,128"),
        (
            ("--cache", "0.5", "--heal", "10"),
            "--heal must be a time such as 90s, 30m or 2h: got '10'",
        ),
        (("--kv-heads", "3"), "kv_heads must be a divisor of 2 below it"),
        ((), "give one target"),
        (("--kv-heads", "4", "--form", "gguf"), "--form must be one of 'auto'"),
        (("--kv-heads", "1"), "give calibration texts"),
    ):
        result = run("convert", tiny, *options, "--out", "new")
        assert result.code == 2
        assert words in result.err
        assert not (tmp_path / "new").exists()
    result = run("convert", tiny, "--kv-heads", "4", "--out", text)
    assert result.code == 2
    assert "exists already" in result.err
