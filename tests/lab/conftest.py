"""A small text, and a comparison of it that trains in a second."""

import random

import pytest

from polyhead.lab.comparison.corpus import corpus, read
from polyhead.lab.comparison.experiment import Experiment
from polyhead.lab.comparison.runs import Schedule
from polyhead.lab.comparison.variants import Sizes


@pytest.fixture(scope="session")
def text_files(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    words = ["heads", "look", "back", "at", "every", "token", "that", "they", "have", "seen"]
    for number in range(12):
        said = [" ".join(draw.choices(words, k=8)) for _ in range(40)]
        (folder / f"{number}.txt").write_text("\n".join(said))
    return sorted(folder.iterdir())


@pytest.fixture(scope="session")
def tokens(text_files):
    return corpus(read(text_files), 300)


@pytest.fixture
def experiment(tmp_path, tokens):
    sizes, schedule = Sizes(32, 1, 4, 48, 300, 2048), Schedule(512, 32, 4)
    return Experiment.create(tmp_path / "compared", sizes, schedule, tokens)
