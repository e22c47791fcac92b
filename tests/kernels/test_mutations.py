"""The list of mutations in tests/mutation.py, which takes too long to run here, is up to date."""

import pytest

import mutation


@pytest.mark.parametrize(
    "mutant",
    [*mutation.MUTATIONS, *mutation.MUTATIONS_OF_ROOMS],
    ids=lambda m: f"{m.file}: {m.feature}",
)
def test_what_a_mutation_removes_is_there_once(mutant):
    text = (mutation.ROOT / mutant.path).read_text(encoding="utf-8")
    assert text.count(mutant.line) == 1
    assert mutant.line != mutant.instead
    assert all((mutation.ROOT / file).exists() for file in mutant.tests.split())


def test_every_room_has_at_least_ten_mutations():
    rooms = {path.name for path in (mutation.ROOT / "src/polyhead").iterdir() if path.is_dir()}
    without = {"__pycache__", "benchmarks", "config", "kernels"}
    counts = {room: sum(map(len, groups.values())) for room, groups in mutation.ROOMS.items()}
    assert rooms - without <= set(counts)
    assert min(counts.values()) >= 10
