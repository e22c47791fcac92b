"""The list of mutations in tests/mutation.py, which takes too long to run here, is up to date."""

import pytest

import mutation


@pytest.mark.parametrize("mutant", mutation.MUTATIONS, ids=lambda m: f"{m.file}: {m.feature}")
def test_what_a_mutation_removes_is_there_once(mutant):
    text = (mutation.ROOT / mutant.path).read_text(encoding="utf-8")
    assert text.count(mutant.line) == 1
    assert mutant.line != mutant.instead
