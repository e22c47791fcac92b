"""The loss of indexers against the formula, and what it trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import polyhead as ph
from polyhead.config import (
    FeedForwardConfig,
    IndexerConfig,
    LayerConfig,
    SparseLatentAttentionConfig,
    TransformerConfig,
)
from polyhead.errors import InputError
from polyhead.layers import SparseLatentAttention
from polyhead.semantics import index_scores
from polyhead.training import indexer, indexer_loss

E, TOP = 32, 6


def layer() -> SparseLatentAttention:
    torch.manual_seed(0)
    return SparseLatentAttention(
        E, 4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=6, indexer=IndexerConfig(16, 8, TOP), bias=False,
    ).double()  # fmt: skip


@pytest.mark.parametrize("top_k", [TOP, 1 << 40], ids=["sparse", "dense"])
@pytest.mark.parametrize("rows", [1 << 22, 2000], ids=["at once", "in parts"])
def test_it_is_the_divergence_of_the_indexer_from_the_heads(top_k, rows, monkeypatch):
    monkeypatch.setattr(indexer, "_ROWS", rows)
    mine, x = layer(), torch.randn(2, 15, E, dtype=torch.float64)
    mine.top_k = top_k
    with ph.probe(mine) as seen, torch.no_grad():
        mine(x, mask=ph.Causal())
    heads = seen[0].weights().mean(dim=1)
    latent = mine.q_a_norm(mine.q_a_proj(x)).detach()
    q, w, k = mine.indexer(x, latent, mine.rope, 0)
    scores = index_scores(q, w, k[:, 0]).masked_fill(heads == 0, -torch.inf)
    logs = scores.log_softmax(dim=-1)
    wanted = (
        sum(
            nn.functional.kl_div(logs[b, t, keep], heads[b, t, keep], reduction="sum")
            for b in range(2)
            for t in range(15)
            for keep in [heads[b, t] > 0]
        )
        / 30
    )
    with indexer_loss(mine) as found:
        out = mine(x.requires_grad_(), mask=ph.Causal())
    torch.testing.assert_close(found.total, wanted)
    names = [name for name, _ in mine.indexer.named_parameters()]
    ours, theirs = (
        torch.autograd.grad(loss, [*mine.indexer.parameters()]) for loss in (found.total, wanted)
    )
    for name, got, want in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(got, want, msg=name)
    assert torch.autograd.grad(out.sum(), mine.indexer.q_proj.weight, allow_unused=True) == (None,)


def test_it_trains_indexers_alone_and_the_loss_falls():
    attention = SparseLatentAttentionConfig(
        4, 16, 8, 4, 6, q_lora_rank=24, indexer=IndexerConfig(16, 8, TOP)
    )
    shared = SparseLatentAttentionConfig(
        4, 16, 8, 4, 6, q_lora_rank=24, indexer=IndexerConfig(16, 8, TOP), selection_of=0
    )
    layers = tuple(LayerConfig(each, FeedForwardConfig(40)) for each in (attention, shared))
    torch.manual_seed(0)
    model = ph.Transformer(TransformerConfig("decoder", 50, E, 64, layers))
    ids = torch.randint(50, (4, 20))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        with indexer_loss(model) as found:
            model(ids)
        assert [*found.by_layer] == ["layers.0.attention"]
        optimizer.zero_grad()
        found.total.backward()
        trained = {name for name, p in model.named_parameters() if p.grad is not None}
        assert trained == {name for name, _ in model.named_parameters() if "indexer" in name}
        optimizer.step()
        losses.append(found.total.item())
    assert losses[-1] < 0.7 * losses[0]


def test_what_has_no_indexer_or_no_call_is_said():
    with (
        pytest.raises(InputError, match="Linear has no layer with an indexer"),
        indexer_loss(nn.Linear(2, 2)),
    ):
        pass
    with indexer_loss(layer()) as found, torch.no_grad():
        layer()(torch.randn(1, 9, E, dtype=torch.float64), mask=ph.Causal())
    with pytest.raises(InputError, match=r"no layer .* was called"):
        _ = found.total
