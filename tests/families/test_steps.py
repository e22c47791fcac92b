"""Steps between the file's tensors and polyhead's: their inverses, and which of them move rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyhead.families import read_config
from polyhead.families.common.steps import (
    Alternating,
    AsRow,
    At,
    Each,
    PerExpert,
    Plus,
    QKVPerGroup,
    QKVRows,
    RotaryPairs,
    Rows,
    Shaped,
    Step,
    Transposed,
    backward,
    forward,
)

CONFIG = read_config(
    {
        "model_type": "mixtral",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_local_experts": 4,
    },
    Path("config.json"),
)
AT = At(CONFIG, "layers.0.attention.q_proj.weight")
ROWS = 64
"""Of queries, keys and values: (4 + 2 · 2) heads of 8."""
MOVES: tuple[Step | Each, ...] = (
    RotaryPairs(),
    RotaryPairs(last=True),
    Rows(),
    Rows(4),
    QKVRows(),
    QKVPerGroup(),
    Alternating(),
    Alternating(4),
    Each((RotaryPairs(), RotaryPairs())),
)
CHANGES: tuple[Step | Each, ...] = (
    Transposed(),
    Plus(1.0),
    Shaped((1,)),
    AsRow(),
    Each((RotaryPairs(), Plus(1.0))),
)


@pytest.mark.parametrize("step", MOVES, ids=str)
def test_rows_that_move_keep_what_they_hold(step: Step | Each) -> None:
    """Bytes of a code take the same way as numbers, so such a step says that it moves rows."""
    assert step.moves_rows
    held = torch.randint(256, (ROWS, 34), dtype=torch.uint8)
    found = forward((step,), held, AT)
    places = forward((step,), torch.arange(ROWS)[:, None], AT)
    for part, place in zip(found, places, strict=True):
        assert torch.equal(part, held[place[:, 0]])
    assert torch.cat(places).flatten().sort().values.tolist() == list(range(ROWS))
    assert torch.equal(backward((step,), found, AT), held)


def test_experts_are_cut_with_their_rows() -> None:
    held = torch.randint(256, (4, 6, 34), dtype=torch.uint8)
    found = forward((PerExpert(), Rows()), held, AT)
    assert PerExpert().moves_rows
    assert [part.tolist() for part in found] == [
        rows.tolist() for expert in held for rows in (expert[:3], expert[3:])
    ]
    assert torch.equal(backward((PerExpert(), Rows()), found, AT), held)


@pytest.mark.parametrize("step", CHANGES, ids=str)
def test_steps_that_work_on_numbers_say_so(step: Step | Each) -> None:
    assert not step.moves_rows
    for shape in ((7,), (1, 7), (7, 1)):
        if isinstance(step, Shaped) and shape != (7, 1):
            continue
        given = torch.randn(shape)
        back = backward((step,), forward((step,), given, AT), AT)
        torch.testing.assert_close(back.view(shape), given)
