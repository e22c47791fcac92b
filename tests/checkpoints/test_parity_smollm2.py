"""SmolLM2 out of its GGUF file equals transformers' eager float32 of the same file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from polyhead.checkpoints import Checkpoint, load_checkpoint

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


def _ids(checkpoint: Checkpoint, text: str, count: int) -> torch.Tensor:
    ids = checkpoint.tokenizer.encode(text)[:count]
    assert len(ids) == count
    return torch.tensor([ids])


@dataclass
class Read:
    """What both models make of 256 tokens of Hamlet: logits ``[1, 256, vocab]``."""

    ids: torch.Tensor
    ours: torch.Tensor
    theirs: torch.Tensor


@pytest.fixture(scope="module")
def read(smollm2: Checkpoint, smollm2_oracle: Any, hamlet: str) -> Read:
    ids = _ids(smollm2, hamlet, 256)
    with torch.no_grad():
        return Read(ids, smollm2.model(ids), smollm2_oracle(ids).logits)


def test_logits_equal_on_256_tokens_of_hamlet(read: Read) -> None:
    assert (read.ours - read.theirs).abs().max() < 2e-4


@pytest.mark.slow
@torch.no_grad()
def test_logits_equal_on_3000_tokens_of_documentation(
    smollm2: Checkpoint, smollm2_oracle: Any
) -> None:
    ids = _ids(smollm2, "\n\n".join(topics.values())[:20_000], 3000)
    assert (smollm2.model(ids) - smollm2_oracle(ids).logits).abs().max() < 2e-4


def test_perplexity_on_hamlet_is_equal(read: Read) -> None:
    def perplexity(logits: torch.Tensor) -> float:
        return math.exp(torch.nn.functional.cross_entropy(logits[0, :-1], read.ids[0, 1:]))

    wanted = perplexity(read.theirs)
    assert perplexity(read.ours) == pytest.approx(wanted, rel=1e-3)
    assert 2 < wanted < 100


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
@torch.no_grad()
def test_greedy_tokens_are_equal(smollm2: Checkpoint, smollm2_oracle: Any, count: int) -> None:
    ids = torch.tensor([smollm2.tokenizer.encode("The animal didn't cross the street because")])

    def ours(cache: Any) -> Any:
        chunk = ids
        while True:
            chunk = smollm2.model(chunk, cache=cache, last=1)[:, -1].argmax(-1, keepdim=True)
            yield int(chunk)

    def theirs() -> Any:
        chunk, past = ids, None
        while True:
            out = smollm2_oracle(chunk, past_key_values=past, use_cache=True)
            past = out.past_key_values
            chunk = out.logits[:, -1].argmax(-1, keepdim=True)
            yield int(chunk)

    pairs = zip(ours(smollm2.model.new_cache()), theirs(), range(count), strict=False)
    got, wanted, _ = zip(*pairs, strict=True)
    assert got == wanted


@torch.no_grad()
def test_bfloat16_predicts_like_float32(read: Read) -> None:
    half = load_checkpoint("smollm2", dtype=torch.bfloat16).model
    assert {tensor.dtype for tensor in half.parameters()} == {torch.bfloat16}
    same = half(read.ids).argmax(-1) == read.ours.argmax(-1)
    assert same.float().mean() > 0.9
