"""How often the host waits for a device while texts are written by ordinary steps."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import byte_tokenizer, decoder

import far
from polyhead.generation import LanguageModel

PROMPTS = ["Hello", "Other"]


@pytest.mark.parametrize(
    ("asked", "most"),
    [({}, 1), ({"num_beams": 2}, 4 * len(PROMPTS))],
    ids=["greedy", "beams"],
)
def test_a_step_of_several_texts_waits_once_and_beams_four_times_a_sentence(
    asked: dict[str, Any], most: int
) -> None:
    def waits(count: int) -> tuple[int, list[tuple[int, ...]]]:
        with far.Away() as away:
            model = LanguageModel(decoder(), byte_tokenizer(), "tiny").eval().to(far.DEVICE)
            found = model.generate(PROMPTS, max_new_tokens=count, eos_token_ids=(258,), **asked)
            return sum(away.waits.values()), [each.ids for each in found]

    (few, _), (many, ids) = waits(8), waits(18)
    assert many - few == 10 * most
    model = LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()
    plain = model.generate(PROMPTS, max_new_tokens=18, eos_token_ids=(258,), **asked)
    assert ids == [each.ids for each in plain]
