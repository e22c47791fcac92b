"""``polyhead compare`` and ``compare heads``: short forms, and what they refuse."""

import json
from pathlib import Path

import pytest
from process import Run

from polyhead.cli import main

SMALL = (
    "--width", "32", "--layers", "1", "--hidden", "48", "--vocabulary", "300", "--context", "32",
    "--batch", "4", "--seeds", "2",
)  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {n} of a text with {n * n} words\n" for n in range(600)))
    return file


def test_compare_trains_reports_and_resumes(run: Run, text: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    begin = ("compare", "--data", str(text), "--out", out, "--variants", "mqa,window:8", *SMALL)
    first = run(*begin, "--tokens", "256", "--stage", "train")
    assert first.code == 0
    assert "below 1,000,000, short runs invert the order" in first.err
    for words in ("mqa, seed 1: ", "less mha", "mqa: ", "nats a token (95 %, 2 pairs)"):
        assert words in first.out
    runs = sorted(path.name for path in (tmp_path / "out" / "runs").iterdir())
    assert len(runs) == 6
    assert runs[0] == "mha.seed-0.json"
    run(*begin, "--tokens", "256").refused(2, "holds a comparison already", "--resume")

    again = run("compare", "--resume", "--out", out, "--variants", "gqa:2", "--seeds", "2",
                "--stage", "train", "--json")  # fmt: skip
    assert again.code == 0
    made = json.loads(again.out)
    assert [row["variant"] for row in made["variants"]] == ["mha", "gqa:2"]
    assert [row["speed"] for row in made["variants"]] == [None, None]  # of the stage "measure"
    assert len([*(tmp_path / "out" / "runs").iterdir()]) == 8  # two more
    assert made == json.loads((tmp_path / "out" / "report.json").read_text())
    for name in ("report.html", "plot.svg"):
        assert (tmp_path / "out" / name).stat().st_size > 500


def test_compare_heads_shows_the_task_and_what_heads_are_worth(
    run: Run, text: Path, tmp_path: Path
) -> None:
    result = run("compare", "heads", "--heads", "1,2", "--seeds", "2", "--steps", "2", "--json")
    assert result.code == 0
    assert [row["heads"] for row in json.loads(result.out)["heads"]] == [1, 2]
    out = str(tmp_path / "heads")
    shown = run(
        "compare", "heads", "--text", "--heads", "1,8", "--data", str(text), "--out", out,
        "--budget", "1s", *SMALL,
    )  # fmt: skip
    assert shown.code == 0
    for words in (
        "heads:1",
        "idle heads",
        "half pruned",
        "Idle heads: the fraction whose ablation",
    ):
        assert words in shown.out


def test_a_comparison_that_is_stopped_says_how_it_goes_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("polyhead.lab.comparison.runs.run", stopped)
    out = str(tmp_path / "out")
    assert main(["compare", "--data", str(text), "--out", out, "--tokens", "9", *SMALL]) == 130
    assert f"stopped: {out} keeps the finished runs; --resume continues" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--seeds", "1"), "--seeds must be at least 2, an interval needs pairs: got 1"),
        (("--variants", "gqa:3"), "num_kv_heads must divide num_heads"),
        (("--variants", "flash"), "no variant 'flash'"),
        (("--variants", "window:0"), "must be at least 1: got 'window:0'"),
        (("--heads", "7"), "heads must divide embed_dim=128"),
        ((), "give either --tokens or --budget"),
        (("--tokens", "9", "--budget", "3m"), "give either --tokens or --budget"),
        (("--budget", "soon"), "--budget must be a time such as 90s, 30m or 2h: got 'soon'"),
        (("--budget", "0m"), "--budget must be a time"),
        (("--tokens", "9", "--data", "absent.txt"), "cannot read 'absent.txt'"),
        (("--tokens", "9", "--data", "empty.txt"), "empty.txt is empty"),
        (("--tokens", "9", "--data", "short.txt"), "the training part of the text has"),
        (("--tokens", "9", "--dtype", "int8"), "dtype must be one of 'float32', 'bfloat16'"),
        (("--stage", "sleep"), "--stage must be one of"),
        (("--resume",), "holds no comparison"),
        (("--resume", "--tokens", "9"), "--tokens is fixed"),
    ],
)
def test_compare_refuses_with_a_sentence(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("a line of text\n" * 12)
    run("compare", *arguments).refused(2, words)
    assert not (tmp_path / "comparison").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--heads", "3"), "heads must divide 64 features"),
        (("--heads", "two"), "--heads must be whole numbers"),
        (("--seeds", "0"), "--seeds must be at least 2"),
        (("--text",), "give either --tokens or --budget"),
    ],
)
def test_compare_heads_refuses_with_a_sentence(
    run: Run, arguments: tuple[str, ...], words: str
) -> None:
    run("compare", "heads", *arguments).refused(2, words)
