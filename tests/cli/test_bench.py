"""``polyhead bench``: what it prints, and what stops it. No test depends on a clock."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from process import Run

from polyhead.cli import bench, main
from polyhead.lab.benchmarks import ROUTINES, Settings, peers
from polyhead.lab.benchmarks.peers import Package

SMALL = ("overhead", "--rounds", "1", "--dtypes", "float32")
FOLDER = "takes a file in a folder that exists"


def test_help_names_every_routine(run: Run) -> None:
    words = " ".join(run("bench", "--help", COLUMNS="200").out.replace("│", " ").split())
    for name in ROUTINES:
        assert f"{name}," in words or f"{name};" in words


def test_json_is_all_there_is(run: Run) -> None:
    done = run("bench", *SMALL, "--json")
    assert done.code == 0, done
    report = json.loads(done.out)
    assert report["machine"]["threads"] >= 1
    assert report["machine"]["native_code"] is None or report["machine"]["native_code"]
    assert report["versions"]["torch"] == torch.__version__
    for row in report["rows"]:
        assert row["routine"] == "overhead"
        ours = row["samples"]["polyhead"]["median"]
        for name, ratio in row["ratios"].items():
            assert ratio == row["samples"][name]["median"] / ours
    assert {mean["against"] for mean in report["geometric_means"]} >= {"torch SDPA"}


def test_tables_then_one_line_of_json(run: Run, tmp_path: Path) -> None:
    done = run("bench", *SMALL, "--plot", "rates.svg", "--section", "section.md")
    assert done.code == 0, done
    *tables, last = done.out.splitlines()
    assert json.loads(last)["rows"]
    assert any("geometric means" in line for line in tables)
    assert (tmp_path / "rates.svg").read_text(encoding="utf-8").startswith("<svg")
    heading, _, about, *_ = (tmp_path / "section.md").read_text(encoding="utf-8").splitlines()
    assert heading == f"## {json.loads(last)['machine']['processor']}"
    assert about.startswith("`polyhead bench overhead --dtypes float32 --rounds 1`, ")


def test_a_section_names_only_options_that_are_not_the_default() -> None:
    command = bench._command([], bench._DTYPES, Settings())
    assert command == "polyhead bench"
    command = bench._command(["decode"], bench._DTYPES, Settings(quick=True, device="cuda"))
    assert command == "polyhead bench decode --quick --device cuda"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("prefil",), ("unknown routine 'prefil' (did you mean 'prefill'?)", "prefill, decode")),
        (("decode", "--dtypes", "int8"), ("--dtypes", "bfloat16", "'int8'")),
        (("decode", "--rounds", "0"), ("--rounds",)),
        (("decode", "--device", "tpu"), ("--device", "cpu or cuda", "'tpu'")),
        (("overhead", "--plot", "none/x.svg"), (f"--plot {FOLDER}", "'none/x.svg'")),
        (("overhead", "--section", "none/x.md"), (f"--section {FOLDER}", "'none/x.md'")),
        (("overhead", "--section", "."), (f"--section {FOLDER}", "'.'")),
    ],
)
def test_refusals(run: Run, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    run("bench", *arguments).refused(2, *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_one_sentence_says_so(run: Run) -> None:
    words = "--device cuda needs a CUDA device: torch finds none here"
    run("bench", "model", "--device", "cuda").refused(2, words)


def test_a_missing_peer_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        peers.PACKAGES, "onnxruntime", Package(("no_such_module",), "pip install onnxruntime onnx")
    )
    meets = replace(ROUTINES["overhead"], peers=("onnxruntime",))
    monkeypatch.setitem(ROUTINES, "overhead", meets)
    assert main(["bench", *SMALL]) == 0
    out = capfd.readouterr().out
    assert "missing: onnxruntime: pip install onnxruntime onnx" in out
    absent = {"peer": "onnxruntime", "install": "pip install onnxruntime onnx"}
    assert json.loads(out.splitlines()[-1])["missing"] == [absent]


def test_a_wrong_peer_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    right = peers.ATTENTION["torch SDPA"]

    def wrong(*arguments: object) -> object:
        run = right(*arguments)  # type: ignore[arg-type]
        return lambda: run() * 1.01

    monkeypatch.setitem(peers.ATTENTION, "torch SDPA", wrong)
    assert main(["bench", "chunk", "--quick", "--dtypes", "float32", "--json"]) == 1
    captured = capfd.readouterr()
    assert "torch SDPA and polyhead disagree: greatest difference" in captured.err
    assert captured.out == ""
