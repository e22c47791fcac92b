"""Texts drawn from logits that the caller computes, as those of ``generate`` are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyhead as ph
from generation.tiny import byte_tokenizer, decoder
from polyhead.errors import InputError


@pytest.fixture(scope="module")
def model() -> ph.LanguageModel:
    return ph.LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()


ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.9, "top_k": 9, "repetition_penalty": 1.3, "seed": 1, "max_new_tokens": 9},
    {"no_repeat_ngram_size": 2, "max_new_tokens": 30},
)


def drive(model: ph.LanguageModel, sampler: ph.TextSampler) -> list[str]:
    cache, ids, pieces = model.new_cache(), sampler.prompt, list[str]()
    while sampler.finish_reason is None:
        logits = model.transformer(torch.tensor([ids]), cache=cache, last=1)[0]
        pieces.append(sampler.take(logits).text)
        ids = sampler.ids[-1:]
    return pieces


@pytest.mark.parametrize("asked", ASKED)
def test_a_driven_text_is_that_of_generate(model: ph.LanguageModel, asked: dict[str, Any]) -> None:
    """Without stop texts, with one that appears, and with one that only begins at the end."""
    asked = {"max_new_tokens": 40, **asked}
    with ph.batch_invariant():
        text = model.generate("One of several", **asked).text
        for stop, reason in (
            (None, "length"),
            (["never", text[3:5]], "stop"),
            (text[-1] + "never", "length"),
        ):
            sampler = ph.TextSampler(model, "One of several", stop=stop, **asked)
            pieces = drive(model, sampler)
            made = model.generate("One of several", stop=stop, **asked)
            assert (tuple(sampler.ids), sampler.text) == (made.ids, made.text)
            assert "".join(pieces) == made.text
            assert sampler.finish_reason == reason


def test_log_probabilities_are_those_of_the_logits(model: ph.LanguageModel) -> None:
    sampler = ph.TextSampler(model, "abc", max_new_tokens=6, temperature=1.5, seed=2, logprobs=3)
    drive(model, sampler)
    ids = torch.tensor([[*sampler.prompt, *sampler.ids]])
    with torch.no_grad():
        logits = model.transformer(ids)[0]
    wanted = logits.double().log_softmax(-1)[len(sampler.prompt) - 1 : -1]
    assert sampler.logprobs is not None
    for token, told, row in zip(sampler.ids, sampler.logprobs, wanted, strict=True):
        best = row.topk(3)
        assert told.token == token
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [each for each, _ in told.top] == best.indices.tolist()
        assert [value for _, value in told.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_what_cannot_be_drawn_is_refused_by_name(model: ph.LanguageModel) -> None:
    sampler = ph.TextSampler(model, "a", max_new_tokens=1)
    drive(model, sampler)
    with pytest.raises(ValueError, match=r"the text has ended \(length\)"):
        sampler.take(torch.zeros(1, model.config.num_logits))
    assert ph.TextSampler(model, "a", max_new_tokens=0).finish_reason == "length"
    with pytest.raises(InputError, match="empty"):
        ph.TextSampler(model, "")
    with pytest.raises(ValueError, match="logprobs must be"):
        ph.TextSampler(model, "a", logprobs=-1)
    with pytest.raises(TypeError, match="beans"):
        ph.TextSampler(model, "a", beans=3)
