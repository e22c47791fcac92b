"""What a probe measures on a device stays there: statistics are copied, never maps, q or k."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import far
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.interpret import measuring
from polyhead.interpret.measuring import measure
from polyhead.interpret.probe import probe
from polyhead.interpret.statistics import TABLE
from polyhead.models import Transformer

HEADS, TOKENS = 4, 40


def _model() -> Transformer:
    attention = AttentionConfig(
        HEADS, num_kv_heads=2, head_dim=8, sinks=True, softcap=5.0, rope=RopeConfig()
    )
    layer = LayerConfig(attention, FeedForwardConfig(32))
    torch.manual_seed(2)
    config = TransformerConfig(
        kind="decoder", layers=(layer, layer), vocab_size=31, embed_dim=32, max_positions=64
    )
    return Transformer(config).eval().requires_grad_(False)


def _measured(model: Transformer, ids: Tensor) -> dict[str, Tensor]:
    with torch.no_grad(), probe(model, statistics=tuple(TABLE), documents=[15, 25]) as seen:
        model(ids, kernel="tiled")
    return {f"{name} of layer {i}": seen[i].measure()[name] for i in (0, 1) for name in TABLE}


def test_statistics_are_measured_on_the_device_and_wait_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = _model(), torch.randint(0, 31, (2, TOKENS))
    wanted = _measured(model, ids)
    waited = []
    own = measure

    def counted(*arguments: object, **named: object) -> dict[str, Tensor]:
        before = away.bytes, dict(away.waits)
        found = own(*arguments, **named)
        waited.append((away.bytes, dict(away.waits)) == before)
        return found

    monkeypatch.setattr("polyhead.interpret.view.measure", counted)
    monkeypatch.setattr(measuring, "DEVICE_ROWS", 16)
    monkeypatch.setattr(measuring, "DEVICE_KEYS", 32)
    with far.Away() as away:
        found = _measured(model.to(far.DEVICE), ids)
        assert waited == [True, True]
        before = away.bytes
        for name, values in found.items():
            assert isinstance(values, far.Far), name
            torch.testing.assert_close(
                values.cpu(), wanted[name], atol=2e-5, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert away.bytes - before == sum(values.nbytes for values in wanted.values())
    # The run itself may ask for the ends of ids and positions, and no more.
    assert before <= 64, away.waits


def test_maps_and_rows_are_computed_on_the_device() -> None:
    model, ids = _model(), torch.randint(0, 31, (1, TOKENS))
    with far.Away() as away:
        with torch.no_grad(), probe(model.to(far.DEVICE)) as seen:
            model(ids, kernel="tiled")
        before = away.bytes
        view = seen[1]
        pictures = [view.map(1, 8), view.map(2, 8, reduce="mean")]
        rows = view.rows([3], slice(5, 6))
        summary = view.summary()
        assert away.bytes == before, away.waits
        assert all(isinstance(x, far.Far) for x in (*pictures, rows, *summary.means.values()))


def test_a_count_on_the_device_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_is_near", lambda call: True)
    model, ids = _model(), torch.randint(0, 31, (1, TOKENS))
    with far.Away() as away:
        _measured(model.to(far.DEVICE), ids)
    assert away.waits["aten::nonzero"] > 0
