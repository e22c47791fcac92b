"""A trained model: exact to 1e-11, and lossy within bounds of what was measured."""

from __future__ import annotations

import pytest

import polyhead as ph
from polyhead.checkpoints import available
from polyhead.errors import UnsupportedError
from polyhead.generation import LanguageModel

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1800)]


def _installed(name: str) -> LanguageModel:
    state = next(state for state in available() if state.model.name == name)
    if not state.found:
        pytest.skip(f"{name} is not installed: {state.model.install}")
    return ph.load(name, dtype="float32", expect=LanguageModel)


def _topics() -> tuple[str, str]:
    """Python's own documentation, and other pages of it."""
    from pydoc_data import topics

    seen: set[str] = set()
    paragraphs = []
    for name in sorted(topics.topics):
        for paragraph in topics.topics[name].split("\n\n"):
            key = " ".join(paragraph.split())
            if len(key) >= 60 and key not in seen:
                seen.add(key)
                paragraphs.append(paragraph)
    half = len(paragraphs) // 2
    return "\n\n".join(paragraphs[:half]), "\n\n".join(paragraphs[half:])


def test_smollm2_keeps_most_in_half_its_cache_and_all_in_the_whole():
    model = _installed("smollm2")
    calibration, evaluation = _topics()
    same, report = ph.convert(model, latent=(192, 192))
    assert [step.error < 1e-11 for step in report.steps] == [True]
    assert report.steps[0].control > 1e-3
    assert report.domains[0].kl < 1e-6
    assert same.config.layers[0].attention.kv.elements == 384
    half, report = ph.convert(
        model,
        latent=(64, 128),
        calibration=calibration,
        calibration_tokens=2048,
        evaluation={"documentation": evaluation},
        evaluation_tokens=1024,
        alone=False,
    )
    assert report.elements_after * 2 == report.elements_before
    assert report.domains[0].ratio < 1.5
    assert half.generate("The capital of France is", max_new_tokens=8).text


def test_gemma3_is_refused_by_name():
    model = _installed("gemma3-270m")
    with pytest.raises(UnsupportedError, match="normalizes queries and keys"):
        ph.convert(model, latent=(64, 128), calibration="text " * 2000)
