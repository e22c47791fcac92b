"""A tiny model and a client of it, for each file of tests that has none of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    import polyhead as ph


# Imported where they are used: without the packages that serve, files are skipped one by one.
@pytest.fixture(scope="module")
def model() -> ph.LanguageModel:
    from served_tiny import tiny_decoder

    return tiny_decoder()


@pytest.fixture(scope="module")
def client(model: ph.LanguageModel) -> Iterator[TestClient]:
    from served_tiny import asking, models_of

    with asking(models_of(model)) as found:
        yield found
