"""Errors of keys without rotation, and of a part of the heads, in the metric of calibration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small import small

from polyhead.conversion.algebra import LayerRows
from polyhead.conversion.calibration import Moments
from polyhead.conversion.draft import Draft


def _rows(family: str, **options: object) -> LayerRows:
    """A layer's functions in a random metric."""
    draft = Draft.of(small(family, **options))
    config = draft.heads(0, "a test")
    G, D, E = config.num_kv_heads, config.head_dim, draft.config.embed_dim
    drawn = torch.Generator().manual_seed(4)
    parts = (
        torch.randn(size, 2 * size, dtype=torch.float64, generator=drawn)
        for size in (E + 1, 3 * G * D)
    )
    return LayerRows.of(draft, 0, config, Moments(*(part @ part.T for part in parts)))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_unrotated_pairs_are_priced_as_their_queries_are_turned(share: float):
    """Against the same error with its pairs multiplied as complex numbers."""
    rows = _rows("stablelm", partial_rotary_factor=share)
    G, D, n, V = rows.G, rows.D, rows.n, rows.v.shape[1]
    K = G * D
    drawn = torch.Generator().manual_seed(5)
    phase = torch.polar(torch.ones(n), 6 * torch.rand(n, generator=drawn)).to(torch.complex128)
    keys, values = (
        torch.randn(G, size, 5, dtype=torch.float64, generator=drawn) for size in (D, V)
    )
    turned = rows.unpaired(rows.pairs(keys) * phase.conj()[:, None, None], keys)
    rotated = torch.arange(D) < 2 * n
    as_rotated = torch.where(rotated[:, None], 0.0, keys).flatten(0, 1)
    as_still = torch.where(rotated[:, None], turned, 0.0).flatten(0, 1)
    whole = torch.cat((as_rotated, as_still, values.flatten(0, 1)))
    given = torch.cat((keys.flatten(0, 1), values.flatten(0, 1)))
    assert len(rows.metric) == 2 * K + G * V
    torch.testing.assert_close(
        given.T @ rows.still_metric(phase) @ given, whole.T @ rows.metric @ whole
    )


def test_the_price_of_all_heads_is_that_of_parts_that_are_lost_alone():
    rows = _rows("qwen2")
    G, D = rows.G, rows.D
    lost = rows.rows.clone()
    lost[D : 2 * D], lost[(G + 1) * D :] = 0, 0  # the second head's keys and values
    second = rows.part(range(1, 2))
    assert second.price(torch.zeros_like(second.rows)) == pytest.approx(rows.price(lost))
    both = replace(second, inputs=2 * second.inputs)
    assert both.price(torch.zeros_like(both.rows)) == pytest.approx(2 * rows.price(lost))
    assert rows.price(rows.rows) == 0


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_keys_and_values_are_regressed_at_the_least_price(family: str):
    rows = _rows(family)
    up = rows.merged()
    down = rows.regressed(up)
    least = rows.price(up @ down)
    drawn = torch.Generator().manual_seed(6)
    for scale in (1e-3, 1e-1):
        noise = torch.randn(down.shape, dtype=torch.float64, generator=drawn)
        assert rows.price(up @ (down + scale * noise)) > least > 0
