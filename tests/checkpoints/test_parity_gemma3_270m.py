"""Gemma 3 270M out of its GGUF file equals transformers' eager float32, past its window of 512."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from hf_tiny import greedy, their_greedy

from polyhead.caches import StoredCache
from polyhead.checkpoints import Checkpoint

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]


def _ids(checkpoint: Checkpoint, count: int) -> torch.Tensor:
    ids = checkpoint.tokenizer.encode("\n\n".join(topics.values())[:20_000])[:count]
    assert len(ids) == count
    return torch.tensor([ids])


@pytest.mark.slow
@torch.no_grad()
def test_chunks_through_the_rings_equal_one_pass(gemma: Checkpoint) -> None:
    windows = [layer.attention.window for layer in gemma.config.layers]
    assert [i for i, window in enumerate(windows) if window is None] == [5, 11, 17]
    assert set(windows) == {512, None}
    ids = _ids(gemma, 560)
    wanted = gemma.model(ids, last=40)
    cache = gemma.model.new_cache()
    for chunk in ids[:, :521].split([500, 21], dim=1):
        gemma.model(chunk, cache=cache, last=1)
    steps = [gemma.model(chunk, cache=cache) for chunk in ids[:, 521:].split(13, dim=1)]
    assert (torch.cat(steps, dim=1) - wanted[:, 1:]).abs().max() < 2e-4
    local, full = cache.layers[0], cache.layers[5]
    assert isinstance(local, StoredCache)
    assert (local.used_bytes, full.used_bytes) == (512 * 2 * 256 * 4, 560 * 2 * 256 * 4)
    asked = torch.tensor([gemma.tokenizer.encode("Roses are red, violets are")])
    best = gemma.model(asked, last=1)[0, -1].argmax()
    assert gemma.tokenizer.decode([int(best)]) == " blue"


@pytest.mark.slow
@pytest.mark.parametrize("count", [700, 1500])
@torch.no_grad()
def test_logits_past_the_window_equal_transformers(
    gemma: Checkpoint, gemma_oracle: Any, count: int
) -> None:
    ids = _ids(gemma, count)
    assert (gemma.model(ids) - gemma_oracle(ids).logits).abs().max() < 2e-4


@pytest.mark.slow
def test_200_greedy_tokens_across_the_window_are_equal(
    gemma: Checkpoint, gemma_oracle: Any
) -> None:
    ids = _ids(gemma, 450)
    assert torch.equal(greedy(gemma.model, ids, 200), their_greedy(gemma_oracle, ids, 200))


@pytest.mark.slow
def test_prose_gets_the_ids_of_transformers(
    gemma: Checkpoint, gemma_file: Any, hamlet: str
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(gemma_file.parent, gguf_file=gemma_file.name)
    assert gemma.tokenizer.encode(hamlet) == theirs(hamlet).input_ids
