"""What the benchmarks state of their cases is so: bytes, operations, dropout, routines."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch

from polyhead.config import AttentionConfig, FeedForwardConfig, LayerConfig
from polyhead.lab.benchmarks.problem import Problem
from polyhead.lab.benchmarks.routines import ROUTINES, Routine
from polyhead.lab.benchmarks.training import DROPOUT, _with_dropout
from polyhead.lab.benchmarks.watched import of_heads
from polyhead.lab.comparison.page import plot


@pytest.mark.parametrize("latent", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_problem_are_those_of_its_keys_and_values(
    latent: int | None, dtype: torch.dtype
) -> None:
    problem = Problem(6, 3, 4, 24, 8, dtype, batch=2, latent=latent)
    _, k, v = problem.draw()
    held = {x.data_ptr(): x.untyped_storage().nbytes() for x in (k, v)}
    assert problem.bytes == sum(held.values())


def test_a_routine_is_a_function_of_settings_and_names_of_peers() -> None:
    for name, routine in ROUTINES.items():
        assert isinstance(routine, Routine)
        assert callable(routine.cases), name
        assert all(isinstance(peer, str) for peer in routine.peers), name
        assert routine.summary, name


def test_operations_of_a_watched_layer_are_those_of_two_products_of_visible_pairs() -> None:
    case = of_heads(*torch.randn(3, 1, 2, 7, 8))
    assert case.work == 2 * 2 * 2 * (7 * 8 / 2) * 8


@pytest.mark.parametrize("cross", [False, True])
def test_dropout_is_in_weights_and_hidden_features(cross: bool) -> None:
    attention = AttentionConfig(2, 2, 8)
    layer = LayerConfig(
        attention, FeedForwardConfig(32), cross_attention=attention if cross else None
    )
    made = _with_dropout(layer)
    assert made.attention.dropout == made.feed_forward.dropout == DROPOUT
    assert (made.cross_attention is None) == (not cross)
    assert made.cross_attention is None or made.cross_attention.dropout == DROPOUT


def _row(name: str, loss: float, cache: int, half: float) -> dict[str, object]:
    return {
        "variant": name, "runs": [1], "loss": loss, "speed": {"cache": {"64": 64 * cache}},
        "difference": {"half_width": half} if half else None,
    }  # fmt: skip


@pytest.mark.parametrize("spread", [1.0, 1e-3])
def test_points_stand_between_the_ends_of_the_axes_with_room_around_them(spread: float) -> None:
    rows = [_row("mla:512+64", 3.0, 1024, 0.0), _row("mqa", 3.0 + spread, 130, 0.1 * spread)]
    drawn = ElementTree.fromstring(plot({"variants": rows}))
    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    tags = lambda name: [each for each in drawn.iter() if each.tag.endswith(name)]  # noqa: E731
    grid = [re.match(r"M([\d.]+) ([\d.]+)h([\d.]+)", p.attrib["d"]) for p in tags("path")]
    left, across = next((float(m[1]), float(m[3])) for m in grid if m)
    heights = sorted(float(m[2]) for m in grid if m)
    assert left + across < width
    for circle in tags("circle"):
        assert left <= float(circle.attrib["cx"]) <= left + across
        share = (float(circle.attrib["cy"]) - heights[0]) / (heights[-1] - heights[0])
        assert 0.05 < share < 0.95
    # A tenth of what is shown is free above and below.
    shares = [float(each.attrib["cy"]) for each in tags("circle")]
    assert abs(shares[0] - shares[1]) > 0.7 * (heights[-1] - heights[0])
    for text in tags("text"):
        room = 6 * len(text.text or "") if "text-anchor" not in text.attrib else 0
        assert 0 <= float(text.attrib["x"]) <= width - room
        assert 0 <= float(text.attrib["y"]) <= height
