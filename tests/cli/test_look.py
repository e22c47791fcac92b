"""``polyhead look`` beyond a single text: labels, ablation, pictures, and the page it serves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from process import Run, environment

import polyhead as ph

DEMO = "The animal didn't cross the street because it was too tired"
QUIET = ("-n", "0", "--no-page")


def test_find_labels_heads_over_the_lines_of_a_file(run: Run, tiny: str, tmp_path: Path) -> None:
    lines = ["The animal slept: it was tired", "no such words", "An animal, and it ran"]
    (tmp_path / "texts.txt").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    options = ("--find", "--texts", "texts.txt", "--pair", "it", "animal", "-m", tiny, *QUIET)
    labels = json.loads(run("look", *options, "--json").out)["labels"]
    wanted = ph.find_heads(ph.load(tiny), lines, pair=("it", "animal"))
    assert [(e["label"], e["layer"], e["head"]) for e in labels] == [
        (e.label, e.layer, e.head) for e in wanted
    ]
    for found, entry in zip(labels, wanted, strict=True):
        assert found["score"] == pytest.approx(entry.score, abs=1e-5)
        assert found["spread"] == pytest.approx(entry.spread, abs=1e-5)
        assert found["source"]
    shown = run("look", *options).out
    assert "over 3 texts" in shown
    assert "pair ≥ 0.3" in shown
    assert "±" in shown


def test_texts_need_find_and_a_line(run: Run, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("\n \n\n")
    run("look", DEMO, "--texts", "none.txt", "-m", tiny).refused(2, "--texts needs --find")
    (tmp_path / "none.txt").write_text("﻿\n")
    run("look", "--find", "--texts", "none.txt", "-m", tiny).refused(2, "none.txt")


def test_pair_is_the_short_form_of_query_and_key(run: Run, tiny: str) -> None:
    options = ("look", DEMO, "-m", tiny, *QUIET, "--json")
    pair = json.loads(run(*options, "--pair", "tired", "street").out)
    assert pair == json.loads(run(*options, "--query", "tired", "--key", "street").out)
    assert pair["pair"]["key_word"] == "street"
    run(*options, "--pair", "it", "animal", "--query", "a", "--key", "b").refused(2, "got both")


def test_ablate_shows_the_next_tokens_without_the_heads(run: Run, tiny: str) -> None:
    options = ("look", DEMO, "-m", tiny, *QUIET, "--ablate", "0.1,1.2")
    found = dict(json.loads(run(*options, "--json").out)["next_tokens"]["ablated"])
    model = ph.load(tiny)
    with ph.ablate(model, {0: [1], 1: [2]}), torch.no_grad():
        shares = model(torch.tensor([model.tokenizer.encode(DEMO)]), last=1)[0, -1].softmax(-1)
    assert max(found.values()) == pytest.approx(float(shares.max()), abs=1e-5)
    assert "ablated" in run(*options).out
    run("look", DEMO, "-m", tiny, "--ablate", "3").refused(2, "3.1,7.4", "'3'")
    run("look", DEMO, "-m", tiny, "--ablate", "9.1").refused(2, "0 to 1: got 9")


def test_draw_writes_a_picture_of_the_heads_that_are_named(
    run: Run, tiny: str, tmp_path: Path
) -> None:
    result = run("look", "a b c", "-m", tiny, "-n", "0", "--draw", "0.1,1.3", "-o", "heads.svg")
    assert result.code == 0, result.err
    assert str(tmp_path / "heads.svg") in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["heads.svg"]
    picture = ElementTree.parse(tmp_path / "heads.svg").getroot()
    words = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert words[0] == "head 0.1"
    assert "head 1.3" in words
    assert words.count("a") == 4  # a row and a column of each map
    run("look", "a b c", "-m", tiny, "-n", "0", "--draw", "5.0").refused(2, "5")


def test_what_is_known_of_the_tokens_is_said_before_the_model_runs(
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from polyhead.cli.look import look
    from polyhead.viewer import packing

    def ran(*arguments: object, **options: object) -> None:
        raise AssertionError("the model ran")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ph.Transformer, "forward", ran)
    for options, words in (
        ({"draw": "99.1"}, "0 to 1: got 99"),
        ({"draw": "0.9"}, "0 to 3: got 9"),
        ({"draw": "9" * 5_000 + ".1"}, "must look like"),
        ({"ablate": "0.4"}, "0 to 3: got 4"),
        ({"layers": "2"}, "0 to 1: got 2"),
        ({"pair": ("nobody", "a")}, "nobody"),
        ({"text": "word " * 99}, "the model's context holds 96"),
    ):
        with pytest.raises(ph.PolyheadError, match=words):
            look(**{"text": "a b c", "models": [tiny]} | options)
    monkeypatch.setattr(packing, "FLOAT16_BYTES", 10)
    with pytest.raises(AssertionError, match="the model ran"):
        look("a b c", [tiny])
    said = capsys.readouterr().out
    assert "No page is written: 5 tokens and 8 heads in 2 layers are too many" in said
    assert "--serve opens one" in said


def test_one_model_at_a_time_unless_served(run: Run, tiny: str) -> None:
    run("look", DEMO, "-m", tiny, "-m", "smollm2").refused(2, "--serve", "smollm2")
    run("look", DEMO, "--serve", "-m", tiny, "-m", "no-such").refused(2, "no model 'no-such'")


def test_serve_prints_an_address_that_answers_and_ends_on_ctrl_c(tiny: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyhead.cli", "look", DEMO, "--serve", "-m", tiny]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(PYTHONUNBUFFERED="1"), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", line)
        assert address is not None, line
        with urllib.request.urlopen(address.group(), timeout=60) as answer:
            page = answer.read().decode()
        begin = json.loads(page.split('id="page-data">')[1].split("</script>")[0])
        assert begin["text"] == DEMO
        assert begin["models"][0] == tiny
        asked = urllib.request.Request(f"{address.group()}look", json.dumps(begin).encode())
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert len(json.load(answer)["tokens"]) == len(DEMO)
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert "Traceback" not in err
