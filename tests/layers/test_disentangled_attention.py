"""Scores by content and distance in a layer: the formula, what hooks see, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import polyhead as ph
from polyhead.config import (
    AttentionConfig,
    ConvolutionConfig,
    DisentangledAttentionConfig,
    EmbeddingConfig,
    EmbeddingProjectionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    RelativeEmbeddingConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers.registry import build_attention
from polyhead.models import Transformer
from polyhead.models.embedding import Embedding

E, H, G, D, T, N = 24, 4, 2, 6, 11, 8
HEADS = DisentangledAttentionConfig(H, G, D, qkv_bias=True, k_bias=False, num_distances=N)

DISTANCES = RelativeEmbeddingConfig(N, 5, NormConfig())


def model(
    attention: DisentangledAttentionConfig = HEADS,
    distances: RelativeEmbeddingConfig | None = DISTANCES,
    kind: str = "encoder",
    convolution: ConvolutionConfig | None = None,
) -> Transformer:
    torch.manual_seed(0)
    layer = LayerConfig(
        attention, FeedForwardConfig(16, "gelu", gated=False), convolution=convolution
    )
    config = TransformerConfig(
        kind,  # type: ignore[arg-type]
        30,
        E,
        64,
        (layer, layer),
        embedding=EmbeddingConfig(),
        relative_embedding=distances,
        head=None,
    )
    made = Transformer(config).eval()
    for x in made.parameters():
        torch.nn.init.normal_(x, std=0.3)
    return made


@pytest.mark.parametrize(
    "changed",
    [{}, {"own_projections": True}, {"key_term": False}, {"query_term": False, "scale": 0.2}],
    ids=str,
)
def test_grouped_heads_score_distances_as_the_formula_says(changed: dict[str, object]) -> None:
    made = model(replace(HEADS, **changed))  # type: ignore[arg-type]
    ids, positions = torch.randint(30, (2, T)), torch.randperm(40)[:T]
    layer, seen = made.layers[1].attention, []
    with torch.no_grad(), layer.register_attention_hook(seen.append):
        made(ids, positions=positions, mask=ph.KeyLengths([T, 5]))
        (record,) = seen
        vectors = made.relative_embedding().vectors
        own = layer.config.own_projections
        by_query = layer.distance_k_proj if own else layer.k_proj
        by_key = layer.distance_q_proj if own else layer.q_proj
        k, v = (x.repeat_interleave(H // G, dim=1) for x in (record.k, record.v))
        columns = ph.RelativeContentBias(torch.ones(1, 1, T, N), max_distance=5).by_distance("cpu")
        column = columns[(positions[:, None] - positions).clamp(-5, 5) + 5]
        scores = record.q @ k.mT
        if layer.config.query_term:
            K = by_query(vectors).view(N, G, D).repeat_interleave(H // G, dim=1)
            scores += torch.einsum("bhid,ijhd->bhij", record.q, K[column])
        if layer.config.key_term:
            Q = by_key(vectors).view(N, H, D)
            scores += torch.einsum("bhjd,ijhd->bhij", k, Q[column])
        scores = scores * layer.scale
        hidden = torch.arange(T) >= torch.tensor([T, 5])[:, None]
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(dim=-1)
    torch.testing.assert_close(record.out, weights @ v)


def test_a_probe_draws_the_rows_that_the_layer_computed() -> None:
    made = model()
    with ph.probe(made) as seen, torch.no_grad():
        made(torch.randint(30, (1, T)))
    view = seen[1]
    torch.testing.assert_close(view.rows().sum(dim=-1), torch.ones(1, H, T))
    assert "RelativeContentBias" in repr(view.call.spec.bias)


def test_distances_are_dropped_in_training_alone() -> None:
    made = model(distances=RelativeEmbeddingConfig(N, dropout=0.5))
    ids = torch.randint(30, (1, T))
    assert torch.equal(made(ids), made(ids))
    made.train()
    assert not torch.equal(made(ids), made(ids))


def test_what_it_cannot_do_is_named() -> None:
    layer, x = build_attention(E, HEADS), torch.randn(1, T, E)
    with pytest.raises(ValueError, match="reads the relative_embedding of the embedding"):
        layer(x)
    for name, given in (
        ("context", x), ("cache", ph.DenseCache()), ("bias", torch.ones(T, T)),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=f"bias of its own: got {name}"):
            layer(x, **{name: given})


def test_a_raw_sum_is_projected_before_its_norm() -> None:
    config = EmbeddingConfig(
        "learned",
        num_segments=2,
        norm=NormConfig("layernorm", bias=True),
        projection=EmbeddingProjectionConfig(D, "raw_sum", bias=False),
    )
    made: Any = Embedding(30, E, 64, config)
    ids = torch.randint(30, (2, T))
    summed = made.tokens(ids) + made.positions.weight[:T] + made.segments.weight[0]
    torch.testing.assert_close(made(ids), made.norm(summed @ made.projection.weight.mT))
    counted = sum(x.numel() for x in made.parameters())
    assert sum(x.count for x in config.parameter_groups(30, E, 64, read_whole=True)) == counted


def test_a_convolution_hides_padding_and_knows_no_other_mask() -> None:
    made = model(convolution=ConvolutionConfig(3))
    ids = torch.randint(30, (1, T))
    with torch.no_grad():
        padded = made(ids, mask=ph.KeyLengths([6]))[:, :6]
        torch.testing.assert_close(padded, made(ids[:, :6]))
    with pytest.raises(UnsupportedError, match=r"no mask but KeyLengths: got Causal\(\)"):
        made(ids, mask=ph.Causal())


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("query_term, key_term or both", lambda: replace(HEADS, query_term=False, key_term=False)),
        ("go without rope", lambda: replace(HEADS, rope=RopeConfig())),
        ("belong to kind 'encoder': got kind='decoder'", lambda: model(kind="decoder")),
        ("layer 0 scores 8 distances.*: got None", lambda: model(distances=None)),
        ("got RelativeEmbeddingConfig.num_distances=4", lambda: model(
            distances=RelativeEmbeddingConfig(4))),
        ("num_distances=6, max_distance=9", lambda: RelativeEmbeddingConfig(6, 9)),
        ("convolution beside a layer sees tokens ahead.*'decoder'", lambda: model(
            AttentionConfig(H, G, D), None, "decoder", ConvolutionConfig(3))),
        ("width must be odd: got 4", lambda: ConvolutionConfig(4)),
        ("groups must divide embed_dim=24: got 5", lambda: model(
            convolution=ConvolutionConfig(3, 5))),
        ("num_distances=8, max_distance=3", lambda: RelativeEmbeddingConfig(8, 3)),
    ],
)  # fmt: skip
def test_sizes_that_do_not_go_together_are_named(words: str, make: object) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]
