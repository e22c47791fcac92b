"""Every family equals transformers' eager float32: logits, cache, gradients, and saved back."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from harness import Case, all_cases, check, check_gguf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from polyhead.families import families

CASES = all_cases()
_COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def _options(case: Case) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(*(st.sampled_from(list(axis)) for axis in case.axes))


@each_case
def test_family_equals_transformers(case: Case, tmp_path: Path) -> None:
    drawn = random.Random(case.model_type)  # the same options each time
    check(case, tmp_path, *(drawn.choice(list(axis)) for axis in case.axes))


@pytest.mark.slow
@each_case
def test_every_option_equals_transformers(
    case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @settings(**_COMMON, max_examples=60, phases=[Phase.generate])
    @given(_options(case))
    def holds(options: tuple[Any, ...]) -> None:
        check(case, tmp_path_factory.mktemp(case.model_type), *options)

    holds()


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
