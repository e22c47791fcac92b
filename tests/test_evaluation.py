"""Perplexity: every token predicted once, as the model's own logits say."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import byte_tokenizer, decoder, encoder
from torch.nn import functional as F

import polyhead as ph
from polyhead.errors import InputError
from polyhead.generation import LanguageModel
from polyhead.training.evaluation import spans

TEXT = "Wer A sagt, muß auch B sagen. " * 4


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(decoder(), byte_tokenizer()).eval()


def _by_hand(model: LanguageModel, ids: list[int], window: int, stride: int) -> float:
    """Every token from the latest window that begins early enough, one token at a time."""
    nats = 0.0
    for t in range(1, len(ids)):
        start = max(0, math.ceil((t + 1 - window) / stride)) * stride
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:t]]))[0, -1]
        nats -= float(F.log_softmax(logits, dim=-1)[ids[t]])
    return nats


@pytest.mark.parametrize(("window", "stride", "batch"), [(16, 15, 1), (20, 7, 3), (90, 45, 2)])
def test_every_token_is_predicted_once_from_its_window(model, window, stride, batch):
    ids = model.tokenizer.encode(TEXT)
    seen = []
    found = ph.perplexity(
        model,
        [TEXT],
        window=window,
        stride=stride,
        batch_size=batch,
        progress=lambda *a: seen.append(a),
    )
    assert found.tokens == len(ids) - 1
    assert found.bytes == len(TEXT.encode()) - 1
    assert found.nats == pytest.approx(_by_hand(model, ids, window, stride), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.nats / found.tokens))
    assert found.bits_per_byte == pytest.approx(found.nats / math.log(2) / found.bytes)
    assert seen[-1] == ("perplexity", found.windows, found.windows)
    assert f"{found.tokens:,} tokens" in str(found)
    assert "bits per byte" in str(found)


def test_texts_do_not_see_each_other_and_may_be_tokens(model):
    ids = torch.tensor(model.tokenizer.encode(TEXT))
    apart = [ph.perplexity(model, text).nats for text in (TEXT[:40], TEXT[40:90])]
    assert ph.perplexity(model, [TEXT[:40], TEXT[40:90]]).nats == pytest.approx(sum(apart))
    found = ph.perplexity(model.transformer, [ids])
    assert found.nats == pytest.approx(ph.perplexity(model, TEXT).nats)
    assert found.bytes is None
    assert found.bits_per_byte is None


def test_a_model_in_training_is_evaluated_without_dropout_and_stays_in_training(model):
    model.train()
    try:
        ph.perplexity(model, TEXT)
        assert model.transformer.training
    finally:
        model.eval()


def test_windows_cover_every_token_once():
    for length in (1, 2, 15, 16, 17, 40):
        counted = [t for span in spans(length, 16, 5) for t in range(span.counted, span.stop)]
        assert counted == list(range(1, length))


def test_what_cannot_be_evaluated_is_refused(model):
    with pytest.raises(ValueError, match=r"stride must be a whole number from 1 to 15: got 16"):
        ph.perplexity(model, TEXT, window=16, stride=16)
    with pytest.raises(ValueError, match=r"window must be a whole number from 2 to 96: got 97"):
        ph.perplexity(model, TEXT, window=97)
    with pytest.raises(InputError, match="at least two tokens"):
        ph.perplexity(model, ["a"])
    with pytest.raises(InputError, match="at least one text"):
        ph.perplexity(model, [])
    with pytest.raises(InputError, match="Transformer has no tokenizer"):
        ph.perplexity(model.transformer, TEXT)
    with pytest.raises(TypeError, match="texts must be a string, or a list of strings"):
        ph.perplexity(model, torch.tensor([1, 2, 3]))
    with pytest.raises(TypeError, match="whole numbers"):
        ph.perplexity(model, [torch.rand(4)])
    with pytest.raises(ValueError, match="must be a decoder with a head"):
        ph.perplexity(encoder(), [torch.tensor([1, 2, 3])])
