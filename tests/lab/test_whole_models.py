"""Whole models beside other programs: results agree before anything is timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyhead.generation import LanguageModel, load
from polyhead.lab.benchmarks import Settings, measure, sentences, serving, speech
from polyhead.lab.benchmarks.model import MODEL, theirs
from polyhead.lab.benchmarks.peers import MINILM, SMOLLM2, WHISPER, installed

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_whisper_writes_the_tokens_of_the_others() -> None:
    if not installed(WHISPER):
        pytest.skip(f"{WHISPER} is not installed")
    settings = Settings(quick=True, rounds=1)
    with torch.no_grad():  # as the command calls it
        found = [measure(case, settings) for case in speech.cases(settings)]
    assert [result.case.unit for result in found] == ["windows/s", "tokens/s"] * 2
    assert all({speech.CTRANSLATE2, speech.INT8} <= {*result.ratios} for result in found)


def test_minilm_computes_what_the_others_do() -> None:
    if not installed(MINILM):
        pytest.skip(f"{MINILM} is not installed")
    settings = Settings(quick=True, rounds=1)
    with torch.no_grad():
        found = [measure(case, settings) for case in sentences.cases(settings)]
    assert [result.case.unit for result in found] == ["sentences/s"] * 2
    assert all("transformers" in result.ratios for result in found)


def test_many_callers_get_the_texts_that_each_gets_alone() -> None:
    if not installed(SMOLLM2):
        pytest.skip(f"{SMOLLM2} is not installed")
    settings = Settings(quick=True, dtypes=(torch.float32,), rounds=1)
    with torch.no_grad():
        found = [measure(case, settings) for case in serving.cases(settings)]
    assert [result.case.length for result in found] == [8, 8, 256, 1024]
    asked, _, shared, _ = found
    assert asked.ratios.keys() >= {serving.INT8, serving.OVER_HTTP}
    assert asked.processor_ratios.keys() == asked.ratios.keys()
    assert shared.ratios[serving.UNSHARED] > 1


def test_transformers_writes_its_texts_in_the_room_of_the_load() -> None:
    if not (installed(SMOLLM2) and installed("transformers")):
        pytest.skip(f"{SMOLLM2} or transformers is not installed")
    library = theirs()
    asked: list[Any] = []
    batch = library.generate_batch

    def seen(*arguments: Any, **options: Any) -> Any:
        asked.append(options["continuous_batching_config"])
        return batch(*arguments, **options)

    library.generate_batch = seen
    model = load(MODEL, expect=LanguageModel)
    prompts = [model.tokenizer.encode(text) for text in ("The capital of France is", "1, 2, 3, 4,")]
    beside = serving.in_transformers(library, serving.Load(prompts, 6))()
    assert [" Paris" in beside.texts[0], " 5" in beside.texts[1]] == [True, True]
    (room,) = asked
    assert room.page_size * room.num_blocks <= 2 * 2 * 32  # not the memory of the machine
