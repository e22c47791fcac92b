"""Planned activations against what a prefill allocates, as torch's memory profiler sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from plan_facts import TINY
from torch.profiler import ProfilerActivity, profile

from polyhead.layers import (
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    QKNormConfig,
    RopeConfig,
)
from polyhead.models import Transformer, TransformerConfig
from polyhead.planning import plan

TOKENS = 512
MIB = 1 << 20


def peak(run: Callable[[], Any]) -> int:
    """The most bytes that were allocated at a time while ``run`` ran, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, torch.no_grad():
        run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def heads(H: int = 8, G: int = 2, D: int = 32, **options: Any) -> AttentionConfig:
    return AttentionConfig(H, G, D, **{"rope": RopeConfig(), **options})


GATED, NARROW = FeedForwardConfig(1024), FeedForwardConfig(64)
LATENT = LatentAttentionConfig(32, 96, 64, 16, 64)
TILES = 12 * MIB
"""Float32 copies of a tile's keys, values and scores, in the kernel that works in tiles."""

# The layer; the least share of the plan that is allocated; the kernel's workspace at most.
LAYERS: dict[str, tuple[LayerConfig, float, int]] = {
    "gated network": (LayerConfig(heads(), GATED), 1.0, MIB // 8),
    "plain network": (LayerConfig(heads(), FeedForwardConfig(1024, gated=False)), 1.0, MIB // 8),
    "sandwich": (LayerConfig(heads(), GATED, norm_placement="sandwich"), 1.0, MIB // 8),
    "norms after": (LayerConfig(heads(), GATED, norm_placement="post"), 0.9, MIB // 8),
    "wide heads": (LayerConfig(heads(16, 16, 64), NARROW), 0.95, MIB // 8),
    "normed heads": (LayerConfig(heads(16, 16, 64, qk_norm=QKNormConfig()), NARROW), 0.75, MIB),
    "no rotation": (LayerConfig(heads(16, 16, 64, rope=None), NARROW), 0.8, MIB // 8),
    "window": (LayerConfig(heads(32, 32, 64, window=33), NARROW), 0.75, TILES),
    "latent": (LayerConfig(LATENT, NARROW), 0.9, TILES),
    "latent queries": (LayerConfig(replace(LATENT, q_lora_rank=96), NARROW), 0.9, TILES),
    "absorbed latent": (LayerConfig(replace(LATENT, kv_lora_rank=48), NARROW), 0.9, TILES),
    "mixture": (LayerConfig(heads(), MixtureConfig(GATED, 4, 2)), 0.4, MIB // 8),
    "shared expert": (
        LayerConfig(heads(), MixtureConfig(NARROW, 4, 2, shared=GATED)), 0.9, MIB // 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_planned_activations_are_those_that_are_allocated(name: str, dtype: str) -> None:
    layer, share, workspace = LAYERS[name]
    config = TransformerConfig("decoder", 500, 256, 4096, (layer,) * 2)
    torch.manual_seed(0)
    model = Transformer(config).eval().to(getattr(torch, dtype))
    ids = torch.randint(0, 500, (2, TOKENS // 2))
    with torch.no_grad():
        model(ids, last=1)  # makes rotary tables and packed weights
    measured = peak(lambda: model(ids, last=1))
    planned = plan(config, tokens=TOKENS // 2, batch=2, dtype=dtype).activation_bytes
    assert share * planned <= measured <= planned + workspace


def test_activations_grow_with_tokens_and_are_shared_by_ranks() -> None:
    one, four = (plan(TINY, tokens=tokens).activation_bytes for tokens in (64, 256))
    assert four == 4 * one
    E, F = 32, 48
    assert one == 64 * 2 * max(3 * F + 4 * E, 8 * E)
    wide = TINY | {"intermediate_size": 4800}
    whole, half = (
        plan(wide, tokens=64, tensor_parallel=n, dtype="float32").activation_bytes for n in (1, 2)
    )
    assert (whole, half) == (64 * 4 * (3 * 4800 + 4 * E), 64 * 4 * (3 * 2400 + 4 * E))
    assert "prompt in one piece, at most" in str(plan(TINY, tokens=64))


def test_logits_of_the_last_tokens_are_counted_where_they_are_most() -> None:
    made = plan(TINY | {"vocab_size": 100_000}, tokens=2, batch=3, dtype="float32")
    assert made.activation_bytes == 3 * 4 * (2 * 2 * 32 + 100_000)
