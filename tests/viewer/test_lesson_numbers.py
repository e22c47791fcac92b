"""The numbers of the lesson are those of the text it follows, of polyhead, and of the documents."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import polyhead as ph
from polyhead.planning import presets
from polyhead.viewer.lesson.numbers import (
    caches,
    cross,
    example,
    layers,
    lesson_numbers,
    savings,
    table,
)

DOCS = Path(__file__).parents[2] / "docs"

# Section 4 of the text as it is printed, each step from the rounded numbers of the last one.
PRINTED = {
    "head1.Q": [[2, 0], [0, 2], [1, 1]],
    "head1.K": [[1, 1], [1, 0], [1, 0]],
    "head1.QK": [[2, 2, 2], [2, 0, 0], [2, 1, 1]],
    "head1.scaled": [[1.414, 1.414, 1.414], [1.414, 0, 0], [1.414, 0.707, 0.707]],
    "head1.A": [[0.333, 0.333, 0.333], [0.673, 0.164, 0.164], [0.503, 0.248, 0.248]],
    "head1.out": [[1, 0.667], [1, 0.327], [1, 0.497]],
    "head2.V": [[0, 1], [1, 1], [1, 1]],
    "head2.A": [[0.768, 0.045, 0.187], [0.045, 0.768, 0.187], [0.333, 0.333, 0.333]],
    "output": [[1.232, 0.899, 2, 1.667], [1.955, 1.282, 2, 1.327], [1.667, 1.164, 2, 1.497]],
}


@cache
def numbers() -> dict[str, Any]:
    return lesson_numbers()


def test_the_example_has_the_numbers_of_the_text() -> None:
    steps = {step["key"]: step["values"] for step in example()["steps"]}
    for key, printed in PRINTED.items():
        torch.testing.assert_close(
            torch.tensor(steps[key]), torch.tensor(printed, dtype=torch.float32), atol=1e-3, rtol=0
        )


def again(kind: str, how: str | None, sides: list[torch.Tensor]) -> torch.Tensor:
    """What a step says that it is made of, computed."""
    if kind == "product":
        return sides[0] @ sides[1]
    if kind == "cell":
        return sides[0] / 2**0.5 if how == "x / √2" else sides[0].exp()
    if kind == "row":
        return sides[0].sum(-1, keepdim=True)
    return sides[0] / sides[1] if kind == "share" else torch.cat(sides, -1)


def test_every_number_is_made_of_the_numbers_that_it_points_at() -> None:
    for step in example()["steps"]:
        values = torch.tensor(step["values"], dtype=torch.float64)
        made = step["made"]
        sides = [torch.tensor(made[side]["values"], dtype=torch.float64)
                 for side in ("left", "right") if side in made]  # fmt: skip
        if sides:
            torch.testing.assert_close(again(made["kind"], made.get("how"), sides), values)
    assert {step["made"]["kind"] for step in example()["steps"]} == {
        "given", "product", "cell", "row", "share", "part"
    }  # fmt: skip


def test_steps_have_the_names_of_the_formulas() -> None:
    for step in example()["steps"]:
        formula = step["formulas"]["en"].replace(" · ", "")
        assert step["name"], step["key"]
        assert formula.startswith(step["name"]), step["key"]


def test_the_lesson_shows_the_cache_of_every_model_that_has_one() -> None:
    models = [p for p in presets().values() if p.model.kind != "encoder" and p.keeps_keys]
    assert numbers()["caches"] == [caches(preset) for preset in models]
    assert len(models) < len(presets())


def test_titles_are_in_both_languages() -> None:
    for step in example()["steps"]:
        assert step["titles"]["en"] != step["titles"]["zh"]
    assert example()["words"]["zh"] == ["词1", "词2", "词3"]


def test_shares_of_heads_are_those_of_the_document() -> None:
    text = (DOCS / "comparing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| \d+ \| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) % – ", text, re.M)
    found = numbers()["heads"]
    assert len(rows) == len(found["rows"]) == 6
    for row, printed in zip(found["rows"], rows, strict=True):
        shown = [row["heads"], *(100 * row[key] for key in ("each", "all", "least"))]
        assert shown == pytest.approx([float(number) for number in printed])


def test_maps_show_one_head_that_mixes_and_four_that_choose() -> None:
    maps = {heads: torch.tensor(rows) for heads, rows in numbers()["heads"]["maps"].items()}
    assert {heads: tuple(each.shape) for heads, each in maps.items()} == {
        "1": (1, 16, 16), "4": (4, 16, 16)
    }  # fmt: skip
    places = torch.arange(8, 16)
    back = torch.stack([maps["4"][:, places, places - by].mean(-1) for by in (1, 2, 3, 4)])
    assert sorted(back.argmax(0).tolist()) == [0, 1, 2, 3]  # each reads a place of its own
    assert float(back.amax(0).min()) > 0.5
    mixed = torch.stack([maps["1"][0, places, places - by].mean() for by in (1, 2, 3, 4)])
    assert float(mixed.max()) < 0.5
    assert float(mixed.min()) > 0.1


@pytest.mark.parametrize("name", ["llama-2-70b", "deepseek-v2"])
def test_caches_are_those_of_plan(name: str) -> None:
    found = caches(presets()[name])
    for place, tokens in enumerate(found["tokens"]):
        (own,) = [row for row in found["rows"] if row["current"]]
        assert own["bytes"][place] == ph.plan(name, tokens=tokens).cache_bytes
        assert own["bytes"][place] * 4 == ph.plan(name, tokens=tokens, batch_size=4).cache_bytes


def test_every_decoder_that_is_known_has_its_cache() -> None:
    shown = {each["name"] for each in numbers()["caches"]}
    assert shown == {
        p.name for p in presets().values() if p.model.kind != "encoder" and p.keeps_keys
    }


def test_the_layers_add_up_and_keep_their_shape() -> None:
    found = layers()
    for layer in found["layers"]:
        values = torch.tensor(layer["values"])
        assert values.shape == (10, 64)
        assert layer["mean"] == pytest.approx(float(values.mean()), abs=1e-3)
        assert layer["path"][3] == pytest.approx(float(values[3].norm()), abs=1e-2)
        assert min(layer["attention"]) > 0.1
        assert min(layer["network"]) > 0.1
    # W_Q, W_K, W_V, W_O and the network with their biases, two norms.
    assert found["parameters"]["each"] == 4 * (64 * 64 + 64) + 2 * 64 * 256 + 256 + 64 + 4 * 64
    assert layers() == found


def test_savings_and_the_table_are_the_texts() -> None:
    assert savings() == {"public": "93.3%", "alike": "82.2%", "mha": "98.2%"}
    held = {row["name"]: row["llama"] for row in table()}
    assert held["MHA"] == 2 * 64 * 128
    assert held["GQA"] == 2 * 8 * 128
    assert held["MQA"] == 2 * 128
    assert len(cross()["source"]) == 4
