"""What the lesson stores: numbers of a real model and a training, answers of its exercises."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import polyhead as ph
from polyhead.interpret.trace.steps import TRACE_EXAMPLE
from polyhead.viewer.lesson import real, training
from polyhead.viewer.lesson.numbers import lesson_numbers
from polyhead.viewer.lesson.page import SCENES


def stored(module: Any) -> Any:
    path = module.__file__.replace(".py", ".json")
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def assert_like(found: Any, wanted: Any, tolerance: float) -> None:
    """The same data, numbers within a tolerance."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_like(found[key], wanted[key], tolerance)
    elif isinstance(wanted, list) and wanted and isinstance(wanted[0], dict):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_like(one, other, tolerance)
    elif isinstance(wanted, list) and not isinstance(wanted[0], str):
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(wanted), atol=tolerance, rtol=tolerance
        )
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=tolerance)
    else:
        assert found == wanted


@pytest.mark.model
def test_the_real_numbers_are_the_models() -> None:
    try:
        model = ph.load("smollm2")
    except ph.ModelNotFoundError as error:
        pytest.skip(str(error))
    assert_like(stored(real), real.measure(model), 0.01)


def test_the_real_scores_and_weights_belong_together() -> None:
    found = stored(real)
    weights = torch.tensor(found["scores"]).softmax(-1)
    torch.testing.assert_close(torch.tensor(found["weights"]), weights, atol=2e-3, rtol=0)
    maps = torch.tensor(found["maps"])
    assert maps.shape == (found["heads"], len(found["words"]), len(found["words"]))
    torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:2]), atol=6e-3, rtol=0)
    assert float(maps.triu(1).max()) == 0
    # The head reads the word before more than half, heads 4 and 6 themselves: the page says so.
    assert float(maps[found["head"]].diagonal(-1).mean()) > 0.5
    assert float(maps[[4, 6]].diagonal(dim1=1, dim2=2)[:, 1:].mean(-1).min()) > 0.5


def test_each_pair_has_the_map_of_its_head() -> None:
    found = stored(real)
    words = found["words"]
    named = [(f" {words[each['query']]}", f" {words[each['key']]}") for each in found["pairs"]]
    assert tuple(named) == real.PAIRS
    for each in found["pairs"]:
        assert each["map"][each["query"]][each["key"]] == each["weight"] > each["expected"]
        assert each["key"] < each["query"]
    it, tired, _ = found["pairs"]
    assert [each["stands_out"] for each in found["pairs"]] == [True, False, False]
    # The page says of the first head that it follows the subject.
    assert (it["layer"], it["head"]) == (tired["layer"], tired["head"]) == (13, 8)
    subject = [row[it["key"]] for row in it["map"]]
    assert min(subject[2:5]) > subject[it["query"]]  # from "didn", "'t" and "cross"


def test_heads_look_evenly_before_training_and_choose_places_by_it() -> None:
    found = stored(training)
    assert [each["step"] for each in found] == list(training.AFTER)
    losses = [each["loss"] for each in found]
    assert losses == sorted(losses, reverse=True)
    first, last = (torch.tensor(found[at]["maps"]) for at in (0, -1))
    even = 1 / torch.arange(1, 17)[None, :, None]
    assert float((first - even).tril().abs().max()) < 0.05
    assert float(last[:, 8:].amax(-1).mean()) > 0.5
    assert found[0]["w_q"] != found[-1]["w_q"]


@pytest.mark.slow
def test_the_training_is_repeated_by_its_command() -> None:
    assert_like(stored(training), training.measure(), 0.05)


def test_every_scene_has_three_exercises_with_the_answers_of_polyhead() -> None:
    answers = lesson_numbers()["exercises"]
    assert tuple(answers) == SCENES
    assert {len(each) for each in answers.values()} == {3}
    one, three = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0]])
    assert answers["qkv"][0] == (one @ torch.tensor([[1.0, 0.0], [3.0, 1.0]]))[0, 0]
    assert answers["scores"][0] == pytest.approx(float(one @ three.T) / 2**0.5, abs=1e-3)
    weights = torch.tensor([2.0, 0.0]).softmax(0)
    assert answers["scores"][2] == pytest.approx(float(weights[0]), abs=1e-3)
    assert answers["example"] == [0.673, 1.232, len(TRACE_EXAMPLE.x) * 4]
    assert answers["masks"][0] == int(torch.ones(6, 6).triu(1).sum())
    rope = ph.RoPE()
    q = torch.tensor([1.0, 0.0])[None, None, None]
    assert answers["positions"][2] == pytest.approx(
        float((rope.apply(q, 7) * rope.apply(q, 5)).sum()), abs=1e-3
    )
    assert answers["cache"][2] == ph.plan("smollm2-135m", tokens=1024).cache_bytes // 1024
    assert answers["table"][:2] == [576, 2 * 128 * 128]
