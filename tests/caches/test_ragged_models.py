"""Whole models on batches of uneven prompts: each row is its solo run, whatever layers remember."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import polyhead as ph
from polyhead.caches import Quantized
from polyhead.config import TransformerConfig
from polyhead.layers import (
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    QKNormConfig,
    RopeConfig,
)

WINDOW, VOCABULARY = 6, 40
NETWORK = FeedForwardConfig(32)
LOCAL = LayerConfig(
    AttentionConfig(4, 1, 8, rope=RopeConfig(), qk_norm=QKNormConfig(), window=WINDOW), NETWORK
)
GLOBAL = LayerConfig(replace(LOCAL.attention, rope=RopeConfig(theta=1e6), window=None), NETWORK)
LATENT = LayerConfig(LatentAttentionConfig(4, 12, 8, 4, 8, q_lora_rank=10), NETWORK)
LAYERS = {
    "local and global": (LOCAL, LOCAL, GLOBAL),
    "latent, experts": (LATENT, replace(LATENT, feed_forward=MixtureConfig(NETWORK, 4, 2))),
}
CACHES: dict[str, dict[str, Any]] = {
    "as the layers are": {},
    "pages": {"kind": "paged", "page_size": 4},
    "8 bits": {"quantized": Quantized(group=2, sink_tokens=2, recent=2)},
}
PROMPTS, TURN = (11, 3, 8), (2, 5, 1)


def model(name: str) -> ph.Transformer:
    torch.manual_seed(0)
    return ph.Transformer(TransformerConfig("decoder", VOCABULARY, 24, 64, LAYERS[name])).eval()


def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and which of them are real."""
    width = max(map(len, rows)) + 1
    ids, real = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        part = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, part], real[i, part] = row, 1
    return ids, real.bool()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES.keys())
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_prompts_turns_and_steps_of_a_padded_batch_equal_solo_runs(
    name: str, options: dict[str, Any], side: str
) -> None:
    net, generator = model(name), torch.Generator().manual_seed(1)
    cache = net.new_cache(**options)
    alone = [net.new_cache(**options) for _ in PROMPTS]
    for lengths in (PROMPTS, TURN, *[(1, 1, 1)] * 8):
        rows = [torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths]
        ids, real = padded(rows, side)
        got = net(ids, positions=cache.next_positions(real), cache=cache)
        for i, row in enumerate(rows):
            wanted = net(row[None], cache=alone[i])[0]
            torch.testing.assert_close(got[i][real[i]], wanted, atol=1e-5, rtol=1e-5)
    assert cache.lengths == [solo.length for solo in alone]


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES.keys())
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_first_call_of_padding_alone_changes_nothing(name: str, options: dict[str, Any]) -> None:
    net, ids = model(name), torch.arange(8)[None]
    cache, other = net.new_cache(**options), net.new_cache(**options)
    net(ids, positions=cache.next_positions(torch.zeros(1, 8, dtype=torch.bool)), cache=cache)
    assert cache.lengths == [0]
    found = net(
        ids, positions=cache.next_positions(torch.ones(1, 8, dtype=torch.bool)), cache=cache
    )
    torch.testing.assert_close(found, net(ids, cache=other))


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_packed_prompts_equal_solo_runs(name: str) -> None:
    net, generator = model(name), torch.Generator().manual_seed(1)
    rows = [torch.randint(VOCABULARY, (n,), generator=generator) for n in PROMPTS]
    documents = ph.Documents(PROMPTS)
    packed = net(torch.cat(rows)[None], mask=documents, positions=documents.positions())[0]
    for row, got in zip(rows, packed.split(PROMPTS), strict=True):
        torch.testing.assert_close(got, net(row[None])[0], atol=1e-5, rtol=1e-5)
