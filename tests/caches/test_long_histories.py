"""One history of 1,000 random steps for every kind of cache, each step checked."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from test_state_machine import KINDS, History

SOONER = "ring × quantized"


@pytest.mark.parametrize(
    "kind",
    [kind if kind == SOONER else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_a_thousand_steps_equal_recomputation_from_the_tokens(kind: str) -> None:
    """Too long for hypothesis to hold as one example, so the steps are drawn here."""

    class Of(History):
        pass

    Of.layout, Of.storage = KINDS[kind]
    history, draw = Of(), random.Random(kind)
    appended = resets = 0
    for _ in range(1000):
        which = draw.randrange(3)
        step = draw.choice(["append"] * 4 + ["rollback", "crop", "fork", "reorder", "too far"])
        if step == "append":
            history.append(which, draw.randint(1, 13), draw.choice([0, 0, 0, 1]))
            appended += 1
        elif step == "rollback":
            history.rollback(which, draw.random(), draw.random() < 0.5)
        elif step == "crop":
            history.crop(which, draw.randint(0, 6))
        elif step == "fork":
            history.fork(which)
        elif step == "reorder":
            history.reorder(which, [draw.randrange(3) for _ in range(draw.randint(1, 3))])
        else:
            history.roll_back_too_far(which)
        history.check_invariants(settings(), print, {})
        longest = max(len(row.keys) for _, rows in history.family for row in rows)
        if longest > 80:
            for i in range(len(history.family)):
                history.reset(i)
            resets += 1
    assert Of.steps >= 1000
    assert appended > 350
    assert resets, "no history grew far beyond its window"
