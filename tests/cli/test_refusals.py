"""Bad input: one sentence that names it, an exit code, no traceback, nothing half-written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from process import Run

from polyhead.cli import main
from polyhead.errors import InputError

VERBS = ("look", "generate")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--wrong"], ["No such option", "--wrong", "polyhead --help"]),
        (["dance"], ["No such command", "dance"]),
        (["lok"], ["No such command 'lok' (did you mean 'look'?); see polyhead --help"]),
        (["train", "translate-number"], ["(did you mean 'translate-numbers'?)"]),
        (["generate", "--top-k", "many", "x"], ["--top-k", "polyhead generate --help"]),
        (["generate"], ["no text", "standard input"]),
        (["look"], ["no text"]),
        (["generate", "a", "--file", "b"], ["TEXT or --file, not both"]),
        (["look", "x", "--query", "it"], ["--query and --key together"]),
        (["look", "x", "--layers", "1-x"], ["--layers must look like 0-3,7", "'1-x'"]),
        (["look", "x", "--layers", "x-1"], ["--layers must look like 0-3,7", "'x-1'"]),
        (["look", "x", "--layers", f"0-{'9' * 12}"], ["--layers must look like 0-3,7"]),
        (["trace", "some text"], ["a text needs a model", "--model"]),
        (["trace", "--input", "a.json", "--model", "m"], ["--input or --model, not both"]),
        (["trace", "--input", "no-such-file.json"], ["cannot read", "no-such-file.json"]),
        (["generate", "@no-such-file.txt"], ["cannot read", "no-such-file.txt"]),
    ],
)
def test_wrong_arguments_are_named(run: Run, arguments: list[str], words: list[str]) -> None:
    run(*arguments).refused(2, *words)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("text", ["", " \n"])
def test_empty_text_is_refused(run: Run, verb: str, text: str) -> None:
    run(verb, text).refused(2, "TEXT is empty")


@pytest.mark.parametrize("verb", VERBS)
def test_empty_file_is_refused_by_name(run: Run, verb: str, tmp_path: Path) -> None:
    (tmp_path / "nothing.txt").write_text("\n")
    run(verb, "@nothing.txt").refused(2, "nothing.txt is empty")
    run(verb, "-").refused(2, "standard input is empty")


@pytest.mark.parametrize("verb", VERBS)
def test_file_that_is_not_utf8_is_refused_with_the_byte(
    run: Run, verb: str, tmp_path: Path
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf" + b"\xe9")
    run(verb, "--file", "latin.txt").refused(2, "latin.txt", "not UTF-8", "byte 3 is 0xe9")
    run(verb, "-", stdin=b"\xff").refused(2, "standard input", "not UTF-8", "byte 0")
    run(verb, b"caf\xe9").refused(2, "TEXT", "not UTF-8", "byte 3 is 0xe9")


def test_directory_in_place_of_a_file_is_refused(run: Run, tmp_path: Path) -> None:
    run("generate", f"@{tmp_path}").refused(2, "cannot read", str(tmp_path), "directory")


@pytest.mark.parametrize("verb", VERBS)
def test_unknown_model_says_what_there_is(run: Run, verb: str) -> None:
    run(verb, "some text", "--model", "gpt-17").refused(2, "no model 'gpt-17'", "smollm2")


@pytest.mark.parametrize("verb", VERBS)
def test_text_beyond_the_context_is_refused_with_both_numbers(
    run: Run, verb: str, tiny: str, tmp_path: Path
) -> None:
    result = run(verb, "x" * 97, "--model", tiny)
    result.refused(2, "97", "96")
    assert result.out == ""
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--temperature", "-1"],
            ["at least 0 (0: greedy)", "-1"],
        ),
        (["--top-k", "0"], ["top_k must be a whole number of at least 1"]),
        (["--top-p", "1.5"], ["top_p must be a finite number, above 0 and at most 1"]),
        (["--seed", "-3"], ["seed must be a whole number of at least 0"]),
        (["--max-new-tokens", "-1"], ["max_new_tokens must be a whole number of at least 0"]),
        (["--dtype", "int8"], ["dtype must be one of float32, bfloat16, float16", "int8"]),
        (["--stop", ""], ["stop must be a text of at least one character"]),
    ],
)
def test_bad_generation_value_is_named(
    run: Run, tiny: str, options: list[str], words: list[str]
) -> None:
    run("generate", "Hello", "--model", tiny, *options).refused(2, *words)


def test_truncated_weights_are_refused(run: Run, tiny: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in Path(tiny).iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(
            content[: len(content) // 2] if file.suffix == ".safetensors" else content
        )
    run("generate", "Hello", "--model", str(broken)).refused(2, "model.safetensors")


def test_file_that_is_no_model_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\0" * 20)
    run("generate", "Hello", "--model", "model.gguf").refused(2, "model.gguf")


@pytest.mark.parametrize(
    ("layer", "head", "words"),
    [(2, 0, "layer must be from 0 to 1: got 2"), (0, 4, "head must be from 0 to 3: got 4")],
)
def test_layer_or_head_that_is_not_there_is_named(
    run: Run, tiny: str, layer: int, head: int, words: str
) -> None:
    options = ("--layer", str(layer), "--head", str(head))
    run("trace", "Hello", "--model", tiny, *options).refused(2, words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--query", "dog", "--key", "cat"), "'dog' does not occur in the text"),
        (("--query", "one", "--key", "two"), "'two' does not occur before 'one'"),
        (("--layers", "0,5"), "the model's layers are 0 to 1: got 5"),
    ],
)
def test_look_at_what_is_not_there_is_refused_without_a_page(
    run: Run, tiny: str, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = run("look", "one two", "--model", tiny, "-n", "0", *arguments)
    result.refused(2, words)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("folder", ["folder", "is a directory"]),
        ("file.txt/page.html", ["file.txt", "not a directory"]),
        ("missing/page.html", ["missing", "no such directory"]),
        ("/proc/page.html", ["/proc"]),
    ],
)
def test_page_that_cannot_be_written_is_named_with_its_path(
    run: Run, tiny: str, tmp_path: Path, out: str, words: list[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").write_text("mine")
    result = run("look", "one two", "--model", tiny, "-n", "0", "--out", out)
    assert result.code == 1
    assert "Traceback" not in result.err
    last = result.err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    for word in words:
        assert word in last
    assert sorted(os.listdir(tmp_path)) == ["file.txt", "folder"]
    assert os.listdir(tmp_path / "folder") == []
    assert (tmp_path / "file.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff", ["mine.json", "not UTF-8"]),
        (b"{", ["mine.json", "not JSON"]),
        (json.dumps({"X": [[1]]}).encode(), ["W_Q is missing"]),
    ],
)
def test_bad_trace_input_is_named(
    run: Run, tmp_path: Path, content: bytes, words: list[str]
) -> None:
    (tmp_path / "mine.json").write_bytes(content)
    run("trace", "--input", "mine.json").refused(2, *words)


@pytest.mark.parametrize("how", ["option", "variable"])
def test_debug_shows_the_traceback(run: Run, how: str) -> None:
    options = ["--debug"] if how == "option" else []
    changes = {} if how == "option" else {"POLYHEAD_DEBUG": "1"}
    result = run("generate", "", *options, **changes)
    assert result.code == 2
    assert "Traceback" in result.err
    assert result.err.strip().splitlines()[-1].startswith("error: TEXT is empty")


def test_debug_after_two_dashes_is_text(run: Run) -> None:
    result = run("trace", "--", "--debug")
    result.refused(2, "a text needs a model")


def test_a_long_error_wraps_in_a_terminal_and_an_install_command_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    command = "pip install --no-deps a-model-of-this-name==1.0.0"
    message = f"this model is not here, nor is it one that is known; install it with {command}"

    def refuse(line: list[str]) -> int:
        raise InputError(message)

    monkeypatch.setattr("polyhead.cli._run", refuse)
    assert main(["generate"]) == 2
    *lines, last = capsys.readouterr().err.splitlines()
    assert last == command
    assert len(lines) > 1
    assert max(map(len, lines)) <= 40
    assert " ".join([*lines, last]) == f"error: {message}"
