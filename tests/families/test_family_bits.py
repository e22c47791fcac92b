"""``ph.batch_invariant()`` holds for every family, with each of its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Case, all_cases

import polyhead as ph
from families_page import _read
from polyhead import native
from polyhead.errors import UnsupportedError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.unavailable() is not None, reason="no native code here"),
]
CASES = all_cases()


REFUSED = (
    "'longrope' beyond",
    "'dynamic' beyond",
    "capacity=3",
    "RelativeContentBias",
    "SoftPromptBias",
    "an explicit mask or bias over the keys of a ring",
)
"""What an option may ask for and cannot keep its bits."""
ALWAYS = ("cpmant", "inkling_text", "xlnet")
"""Families whose every option asks for that."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_rows_of_a_family_have_the_bits_that_they_have_alone(case: Case) -> None:
    options: list[tuple[Any, ...]] = [()]
    options += [(option,) for axis in case.axes for option in axis if option]
    kept = 0
    for chosen in options:
        try:
            check(case, chosen)
            kept += 1
        except UnsupportedError as error:
            if not any(reason in str(error) for reason in REFUSED):
                raise
    assert bool(kept) == (case.model_type not in ALWAYS)


def check(case: Case, chosen: tuple[Any, ...]) -> None:
    """A row alone and beside another; a decoder's also in chunks and one by one."""
    config = _read(case, *chosen)
    torch.manual_seed(0)
    model = ph.Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    with torch.no_grad(), ph.batch_invariant():
        ids, row = case.ids(), slice(1, 2)
        two_stacks = config.kind == "encoder-decoder"
        both = {"encoder_ids": case.source()} if two_stacks else {}
        one = {name: source[row] for name, source in both.items()}
        together, alone = model(ids, **both), model(ids[row], **one)
        assert torch.equal(together[row], alone), chosen
        no_cache = any(layer.attention.one_pass for layer in config.layers)
        if config.kind == "encoder" or config.task is not None or no_cache:
            return
        cache, found = model.new_cache(), []
        for first, last in ((0, 7), (7, 15), *((i, i + 1) for i in range(15, ids.shape[1]))):
            found.append(model(ids[row, first:last], cache=cache, **(one if not first else {})))
        assert torch.equal(torch.cat(found, dim=1), alone), chosen
