"""Options of every verb: each has its help, and means by default what the function does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process import Run

import polyhead as ph
from polyhead.cli.app import VERBS, command


def _verbs(group: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, verb in getattr(group, "commands", {}).items():
        yield " ".join((*names, name)), verb
        yield from _verbs(verb, (*names, name))


COMMANDS = dict(_verbs(command()))


def test_every_option_and_argument_of_every_verb_has_its_help() -> None:
    assert set(VERBS) < set(COMMANDS)
    for name, verb in COMMANDS.items():
        assert verb.params
        for parameter in verb.params:
            assert parameter.help, (name, parameter.name)


@pytest.mark.parametrize(
    ("verb", "function", "shared"),
    [
        ("plan", ph.plan, {"tokens", "batch_size", "kv_dtype", "page_size", "memory"}),
        ("convert", ph.convert, {"num_kv_heads", "latent", "cache"}),
        ("perplexity", ph.perplexity, {"window", "stride", "batch_size"}),
    ],
)
def test_an_option_means_by_default_what_the_function_does(
    verb: str, function: Callable[..., object], shared: set[str]
) -> None:
    taken = inspect.signature(function).parameters
    options = {parameter.name: parameter.default for parameter in COMMANDS[verb].params}
    for name in shared:
        assert options[name] == taken[name].default, name


def test_both_comparisons_take_as_many_seeds_and_the_same_rate() -> None:
    both = [
        {parameter.name: parameter.default for parameter in COMMANDS[name].params}
        for name in ("compare", "compare heads")
    ]
    for name in ("seeds", "rate", "dtype", "layers", "budget", "tokens"):
        assert both[0][name] == both[1][name], name


def test_a_preset_is_completed_from_its_beginning() -> None:
    (config,) = (each for each in COMMANDS["plan"].params if each.name == "config")
    complete = lambda begin: [each.value for each in config.shell_complete(None, begin)]  # noqa: E731
    every = complete("")
    assert len(every) > 5
    for begin in (every[0][:5], every[-1], "no-such"):
        assert complete(begin) == [name for name in every if name.startswith(begin)]


RUNNING = {
    "look", "trace", "generate", "chat", "translate", "summarize", "transcribe", "perplexity",
    "serve", "batch",
}  # fmt: skip


@pytest.mark.parametrize("verb", sorted(RUNNING))
def test_every_verb_that_runs_a_model_takes_a_device(verb: str) -> None:
    (device,) = (each for each in COMMANDS[verb].params if each.name == "device")
    assert device.default == "cpu"


@pytest.mark.parametrize("device", ["cuda:99", "mps", "nowhere"])
@pytest.mark.parametrize(
    "line",
    [
        ("look", "a b", "--no-page", "-m"),
        ("trace", "a b", "-m"),
        ("perplexity",),
        ("translate", "a b", "-m"),
    ],
)
def test_a_device_that_is_not_there_is_one_sentence(
    run: Run, tiny: str, tmp_path: Path, device: str, line: tuple[str, ...]
) -> None:
    (tmp_path / "text.txt").write_text("a text")
    rest = ["text.txt"] if line == ("perplexity",) else []
    run(*line, tiny, *rest, "--device", device).refused(2, f"device {device!r} is unavailable")


def test_a_model_runs_on_the_device_that_is_named(run: Run, tiny: str) -> None:
    result = run("look", "a b c", "-m", tiny, "--no-page", "-n", "0", "--device", "cpu")
    assert result.code == 0, result.err


def test_translate_without_a_model_says_how_to_get_one(run: Run) -> None:
    run("translate", "a").refused(2, "--model google-t5/t5-small", "polyhead[train]")
