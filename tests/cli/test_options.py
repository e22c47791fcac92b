"""Options of every verb: each has its help, and means by default what the function does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

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
