"""``polyhead chat``, and what shells ask to complete a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from process import Run


def test_a_conversation_with_its_commands(run: Run, tiny: str, tmp_path: Path) -> None:
    lines = [
        "Hi",
        "/stats",
        "two \\",
        "lines",
        "/undo",
        "/system Be.",
        "/save talk.json",
        "/nothing",
    ]
    stdin = "\n".join(lines).encode() + b"\n/quit\nnever read\n"
    done = run("chat", "--model", tiny, "-n", "4", stdin=stdin)
    assert done.code == 0
    assert len(done.out.splitlines()) == 2
    for words in (
        "4 written",
        "taken back",
        "the system prompt is changed",
        "2 messages are in talk.json",
    ):
        assert words in done.err
    assert "there is no command /nothing: /help lists them" in done.err
    said = json.loads((tmp_path / "talk.json").read_text())
    assert [each["role"] for each in said] == ["system", "user", "assistant"]
    assert said[2]["content"] in done.out
    alone = run("generate", "Hi", "--model", tiny, "-n", "4", "--chat", "--temperature", "0")
    assert done.out.startswith(alone.out)


def test_a_conversation_that_cannot_be(run: Run, tiny: str) -> None:
    done = run(
        "chat", "--model", tiny, stdin=b"/save\n/save /no/such/folder/file\n/undo\n/system\n"
    )
    assert done.code == 0
    for words in (
        "/save needs a FILE",
        "cannot write",
        "nothing has been said yet",
        "there is no system prompt",
    ):
        assert words in done.err
    run("chat", "--model", tiny, stdin=b"\xff\n").refused(2, "standard input is not UTF-8")
    run("chat", "--model", tiny, "-n", "-1").refused(2, "max_new_tokens")


def test_generation_as_json(run: Run, tiny: str) -> None:
    done = run("generate", "Hi", "--model", tiny, "-n", "5", "--json")
    made = json.loads(done.out)
    assert (made["prompt"], len(made["ids"]), made["new_tokens"]) == ("Hi", 5, 5)
    assert made["stop_reason"] == "max_new_tokens"
    assert made["text"] == run("generate", "Hi", "--model", tiny, "-n", "5").out[:-1]


@pytest.mark.parametrize(
    ("shell", "line", "found"),
    [
        ("bash", "polyhead gen", "generate"),
        ("bash", "polyhead chat --model sm", "smollm2"),
        ("bash", "polyhead plan llama-3-", "llama-3-8b"),
        ("zsh", "polyhead gen", "generate"),
        ("fish", "polyhead gen", "generate"),
    ],
)
def test_shells_complete_verbs_and_names(run: Run, shell: str, line: str, found: str) -> None:
    words = {
        "_POLYHEAD_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = run(**words)
    assert done.code == 0
    assert found in done.out
