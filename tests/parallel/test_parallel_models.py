"""Models of real families on a mesh compute what one process computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cases_of_models import FAMILIES, MESHES
from worlds import World


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with World(2) as world:
        yield world


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_logits_and_gradients_equal_one_process(two: World, family: str) -> None:
    two.run("cases_of_models:equal_all", [family], ["tensor", "context", "shard"], "float64")


def test_copies_over_data_equal_one_process(two: World) -> None:
    two.run("cases_of_models:equal_all", ["Llama"], ["data"], "float64")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_families_times_meshes_equal_one_process(ranks: int, dtype: str) -> None:
    meshes = [name for name, (names, _) in MESHES.items() if 2 ** len(names) <= ranks]
    if ranks == 8:  # 4 heads and a batch of 2 rows leave these
        meshes = [name for name in meshes if name not in ("tensor", "data", "shard")]
    with World(ranks, timeout=280) as world:
        for family in FAMILIES:
            world.run("cases_of_models:equal_all", [family], meshes, dtype)


@pytest.mark.slow
def test_a_model_by_other_exchanges_and_orders_equals_one_process() -> None:
    with World(2, timeout=280) as world:
        for exchange, order in (("gather", "striped"), ("heads", "contiguous")):
            for family in FAMILIES:
                if exchange == "heads" and family == "DeepSeek":
                    continue
                world.run(
                    "cases_of_models:equal_all", [family], ["context"], "float64",
                    {"exchange": exchange, "order": order},
                )  # fmt: skip
