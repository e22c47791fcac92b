"""``polyhead train``: what it prints, that it resumes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from process import Run

import polyhead as ph
from polyhead.cli import main
from polyhead.cli.train import _progress_line as progress_line
from polyhead.training.recipe import Recipe

RECIPE = """
[model]
model_type = "marian"
d_model = 16
encoder_layers = 1
decoder_layers = 1
encoder_attention_heads = 2
decoder_attention_heads = 2
encoder_ffn_dim = 32
decoder_ffn_dim = 32
max_position_embeddings = 32
scale_embedding = true
dropout = 0.1

[vocabulary]
kind = "characters"
size = 40

[data]
pairs = "pairs.tsv"
held_out = 4
batch_tokens = 64

[schedule]
steps = 6
lr = 1e-2
shape = "constant"
warmup = 2
validate_every = 3
save_every = 2

[report]
metric = "exact"
samples = ["abc"]
align = "abc"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [f"{a}{b}c\t{b}{a}" for a in "abcdefg" for b in "abcdefg"]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return tmp_path


def _losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "history.jsonl").read_text().splitlines()
    return [(each["step"], each["loss"]) for each in map(json.loads, lines) if "loss" in each]


def test_a_recipe_is_trained_saved_and_resumed_with_the_same_losses(run: Run, folder: Path) -> None:
    whole = run("train", "tiny.toml")
    assert whole.code == 0, whole.err
    for words in ("of 4 held out", "6 steps", "polyhead translate 'abc' --model tiny"):
        assert words in whole.out
    for words in ("tiny: ", "45 pairs, 4 held out, 6 steps", "step 3  loss", "held out"):
        assert words in whole.err
    further = "polyhead train tiny.toml --out tiny --resume --set schedule.steps=12"
    assert f"to train it further: {further}" in whole.out
    model = ph.load(folder / "tiny", expect=ph.TextToText)
    assert model.config.layers[0].norm_placement == "post"
    ElementTree.parse(folder / "tiny" / "curves.svg")
    part = run("train", "tiny.toml", "--out", "part", "--set", "schedule.steps=4")
    assert part.code == 0, part.err
    run("train", "tiny.toml", "--out", "part", "--resume", "--set", "schedule.lr=0.1").refused(
        2, "state of another recipe: schedule.lr was 0.01 and is 0.1"
    )
    run("train", "tiny.toml", "--out", "part").refused(2, "part holds the state", "--resume")
    on = run("train", "tiny.toml", "--out", "part", "--resume")
    assert on.code == 0, on.err
    assert "6 steps, going on after step 4" in on.err
    assert [step for step, _ in _losses(folder / "part")] == [1, 2, 3, 4, 5, 6]
    assert _losses(folder / "part") == _losses(folder / "tiny")


def test_a_line_says_how_far_a_run_is_and_how_long_it_still_takes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("polyhead.cli.train._FIRST_SECONDS", 0)
    monkeypatch.setattr("polyhead.cli.train._LINE_SECONDS", 0)
    monkeypatch.setattr(
        "polyhead.cli.train._progress_line", lambda job, step, *rest: f"at {step.number}"
    )
    monkeypatch.chdir(folder)
    assert main(["train", "tiny.toml", "--set", "report.align="]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("at ")]
    assert lines == [f"at {number}" for number in range(1, 6)]
    run = SimpleNamespace(seconds=30.0)
    for steps, progress, said in (
        (1000, 0.25, "step 7 of 1,000  loss 1.500  2,000 tokens/s  about 1 min 30 s left"),
        (None, 0.5, "step 7  loss 1.500  2,000 tokens/s  about 30 s left"),
        (None, 0.005, "step 7  loss 1.500  2,000 tokens/s  about 1 h 39 min left"),
    ):
        recipe = SimpleNamespace(schedule=SimpleNamespace(steps=steps))
        job: Any = SimpleNamespace(run=run, recipe=recipe)
        step: Any = SimpleNamespace(number=7, progress=progress)
        assert progress_line(job, step, 1.5, 2000) == said


def test_the_recipe_for_numbers_ends_by_steps_alone() -> None:
    schedule = Recipe.read("translate-numbers").schedule
    assert schedule.steps
    assert (schedule.minutes, schedule.tokens) == (None, None)


def test_what_a_recipe_cannot_say_is_refused(run: Run, folder: Path) -> None:
    for change, *wanted in (
        ("schedule.step=3", "unknown key 'step' (did you mean 'steps'?)"),
        ("shedule.steps=3", "unknown key 'shedule' (did you mean 'schedule'?)"),
        ("schedule.steps=no", "steps must be a whole number", "no"),
        ("data.corpus=numbers", "one of corpus, pairs, source", "got corpus and pairs"),
        ("data.pairs=absent.tsv", "cannot read", "absent.tsv"),
        ("model.d_modell=8", "d_modell"),
        ("model.max_position_embeddings=3", "pairs.tsv, line", "source has 4 tokens, the model"),
        ("model.begin=copying", "copying needs an encoder-decoder with norms first"),
        ("model.model_type=llama", "hidden_size"),
        ("report.metric=beauty", "metric must be one of 'loss', 'exact', 'bleu'"),
        ("steps", "--set takes table.key=value"),
    ):  # fmt: skip
        result = run("train", "tiny.toml", "--out", "x", "--set", change)
        result.refused(2, *wanted)
        assert not (folder / "x" / "config.json").exists()
    run("train", "absent").refused(
        2, "unknown recipe 'absent': give text, translate-bible, translate-numbers"
    )
    run("train", "tiny.toml", "--resume").refused(2, "nothing was saved to resume from")
    (folder / "bad.toml").write_text("[model\n")
    run("train", "bad.toml").refused(2, "bad.toml is not TOML")


def test_a_decoder_learns_text_files_and_goes_on_with_a_sample(run: Run, folder: Path) -> None:
    (folder / "book.txt").write_text("the cat sat on the mat. " * 80)
    result = run(
        "train", "text", "--out", "lm",
        *(word for change in (
            'data.text=["book.txt"]', "data.length=16", "data.batch_tokens=64",
            "vocabulary.kind=characters", "model.hidden_size=16", "model.num_hidden_layers=1",
            "model.num_attention_heads=2", "model.num_key_value_heads=1",
            "model.intermediate_size=16", "schedule.steps=4", "report.samples=['the']",
        ) for word in ("--set", change)),
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "packed rows" in result.err
    assert "    the" in result.err
    assert isinstance(ph.load(folder / "lm"), ph.LanguageModel)
