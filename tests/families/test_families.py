"""Every family equals transformers' eager float32: logits, cache, gradients, and saved back."""

from __future__ import annotations

import inspect
import itertools
import random
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from harness import Case, all_cases, check, check_gguf

from polyhead.families import families

CASES = all_cases()
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def _every_pair(axes: Sequence[Collection[Any]]) -> list[tuple[Any, ...]]:
    """Options in which every two values of two axes meet: a covering array, by a greedy search."""
    sizes = [range(len(axis)) for axis in axes]
    pairs = list(itertools.combinations(range(len(axes)), 2))
    missing = {(i, a, j, b) for i, j in pairs for a in sizes[i] for b in sizes[j]}
    drawn = random.Random(0)
    rows = []
    while missing:
        i, a, j, b = min(missing)
        best: tuple[set[tuple[int, ...]], list[int]] = (set(), [])
        for _ in range(30):
            row = [drawn.choice(size) for size in sizes]
            row[i], row[j] = a, b
            met = missing & {(i, row[i], j, row[j]) for i, j in pairs}
            best = max(best, (met, row), key=lambda one: len(one[0]))
        missing -= best[0]
        rows.append(best[1])
    values = [list(axis) for axis in axes]
    return [tuple(axis[at] for axis, at in zip(values, row, strict=True)) for row in rows]


def test_every_pair_of_options_is_drawn() -> None:
    axes = ("abcde", (0, 1, 2), "xyz", (True, False))
    rows = _every_pair(axes)
    for (i, first), (j, second) in itertools.combinations(enumerate(axes), 2):
        met = {(row[i], row[j]) for row in rows}
        assert met == set(itertools.product(first, second))
    assert len(rows) < 25  # 90 combinations; 15 at the least


@each_case
def test_family_equals_transformers(case: Case, tmp_path: Path) -> None:
    drawn = random.Random(case.model_type)  # the same options each time
    check(case, tmp_path, *(drawn.choice(list(axis)) for axis in case.axes))


@pytest.mark.slow
@each_case
def test_every_pair_of_options_equals_transformers(case: Case, tmp_path: Path) -> None:
    for number, options in enumerate(_every_pair(case.axes)):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(case, folder, *options)
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.gguf])
def test_gguf_files_equal_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert case.gguf is not None
    for number, form in enumerate((case.gguf, *case.more_gguf)):
        (tmp_path / str(number)).mkdir()
        check_gguf(case, form, tmp_path / str(number))


def test_every_family_has_its_case() -> None:
    assert set(CASES) == set(families())


@pytest.mark.parametrize("model_type", families())
def test_absent_keys_mean_what_transformers_means(model_type: str) -> None:
    """Of the class's defaults, before its constructor works on them."""
    family = families()[model_type]
    kind = transformers.CONFIG_MAPPING[model_type]
    known = inspect.signature(kind.__init__).parameters
    for key, value in family.defaults.items():
        theirs = family.aliases.get(key, key)
        if hasattr(kind, theirs):
            wanted = getattr(kind, theirs)
        elif theirs in known:
            wanted = known[theirs].default
        else:
            wanted = getattr(kind(), theirs, value)
        assert value == wanted, f"{model_type}.{key}"
