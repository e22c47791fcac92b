"""Makes the oracle and the tiny models importable; loads the trained one once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "generation"))


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M, where its package is installed."""
    import polyhead as ph

    try:
        return ph.load("smollm2")
    except ph.ModelNotFoundError as error:
        pytest.skip(str(error))
