"""Heads get the labels that their weights earn."""

from __future__ import annotations

import re

import pytest
import torch
from tiny import byte_tokenizer, decoder

import polyhead as ph
from polyhead.errors import InputError
from polyhead.interpret.finding import CRITERIA, repeated_tokens, score_heads
from polyhead.interpret.probe import probe

TEXTS = ["The animal slept: it was tired", "no such words", "An animal, and it ran"]


@pytest.fixture(scope="module")
def model() -> ph.LanguageModel:
    return ph.LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()


@pytest.fixture(scope="module")
def smollm2() -> ph.LanguageModel:
    try:
        return ph.load("smollm2")
    except ph.ModelNotFoundError as error:
        pytest.skip(str(error))


def _weights(model: ph.LanguageModel, ids: torch.Tensor) -> torch.Tensor:
    """``[layers, B, H, T, T]``."""
    with probe(model) as seen, torch.no_grad():
        model(ids)
    return torch.stack([view.rows() for view in seen])


def test_criteria_say_what_is_measured_and_who_set_the_threshold() -> None:
    for label, criterion in CRITERIA.items():
        assert re.search(r"\d{4}|^as for", criterion.source), label
        assert re.search(r"^(1 − )?(mean|fraction|weight)", criterion.score), label


def test_scores_of_texts_are_means_over_their_rows(model: ph.LanguageModel) -> None:
    scores = score_heads(model, TEXTS, pair=("it", "animal"))
    for i, text in enumerate(TEXTS):
        weights = _weights(model, torch.tensor([model.tokenizer.encode(text)]))[:, 0]
        rows = weights[:, :, 1:]
        wanted = {
            "sink": rows[..., 0].mean(-1),
            "previous-token": weights.diagonal(-1, -2, -1).mean(-1),
            "broad": 1.0 - rows.amax(-1).mean(-1),
        }
        for label, values in wanted.items():
            torch.testing.assert_close(scores.by_text[label][i], values, atol=1e-5, rtol=1e-5)
    assert scores.by_text["pair"].shape[0] == 2  # one text has no such words
    torch.testing.assert_close(scores.spread("sink"), scores.by_text["sink"].std(0, correction=0))


def test_repetition_is_scored_on_random_tokens_of_the_second_half(
    model: ph.LanguageModel,
) -> None:
    ids = repeated_tokens(model.config.vocab_size, 48)
    weights = _weights(model, ids)
    query = torch.arange(48, 96)
    scores = score_heads(model, TEXTS[:1])
    for label, offset in (("induction", 47), ("duplicate", 48)):
        wanted = weights[..., query, query - offset].mean((1, 3))
        torch.testing.assert_close(scores.mean(label), wanted, atol=1e-5, rtol=1e-5)


def test_positional_head_keeps_its_distance(model: ph.LanguageModel) -> None:
    (text,) = TEXTS[:1]
    weights = _weights(model, torch.tensor([model.tokenizer.encode(text)]))[:, 0]
    best = weights.argmax(-1)[..., 2:]
    apart = torch.arange(2, weights.shape[-1]) - best
    scores = score_heads(model, [text]).mean("positional")
    for layer in range(2):
        for head in range(4):
            kept = apart[layer, head][best[layer, head] > 0].tolist()
            most = max((kept.count(x) for x in kept), default=0)
            assert scores[layer, head] == pytest.approx(most / apart.shape[-1])


def test_labels_come_by_threshold_and_in_order(model: ph.LanguageModel) -> None:
    labels = ph.find_heads(model, TEXTS, thresholds=dict.fromkeys(CRITERIA, 0.0))
    assert len(labels) == 8 * 6
    for label in set(CRITERIA) - {"pair"}:
        scores = [entry.score for entry in labels if entry.label == label]
        assert scores == sorted(scores, reverse=True)
    assert ph.find_heads(model, TEXTS, thresholds=dict.fromkeys(CRITERIA, 1.1)) == []


def test_what_cannot_be_looked_for_is_said(model: ph.LanguageModel) -> None:
    with pytest.raises(InputError, match="at least one text"):
        ph.find_heads(model, [])
    with pytest.raises(InputError, match="'dog' does not occur"):
        ph.find_heads(model, TEXTS, pair=("it", "dog"))
    with pytest.raises(InputError, match=r"labels are induction.*got 'indution'"):
        ph.find_heads(model, TEXTS, thresholds={"indution": 0.5})


@pytest.mark.model
def test_smollm2_has_induction_heads(smollm2: ph.LanguageModel) -> None:
    labels = ph.find_heads(smollm2, [TEXTS[0]], pair=("it", "animal"))
    induction = {(e.layer, e.head): e.score for e in labels if e.label == "induction"}
    assert max(induction, key=induction.__getitem__) == (18, 6)
    assert induction[18, 6] > 0.8
    assert {(17, 3), (17, 4), (18, 7)} <= set(induction)
    # Olsson et al. 2022: they need heads of earlier layers that look at the token before.
    first = min(layer for layer, _ in induction)
    assert any(e.label == "previous-token" and e.layer < first for e in labels)
