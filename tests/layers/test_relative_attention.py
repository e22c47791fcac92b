"""Distances and segments in XLNet's scores: positions, clamped distances, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import polyhead as ph
from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    RelativeAttentionConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.generation.pipelines.text_batches import padded
from polyhead.layers.registry import build_attention
from polyhead.models import Transformer

E, H, G, D, T = 24, 4, 2, 6, 11
HEADS = RelativeAttentionConfig(H, G, D)


def model(attention: AttentionConfig = HEADS, kind: Any = "encoder") -> Transformer:
    torch.manual_seed(0)
    layer = LayerConfig(attention, FeedForwardConfig(16, "gelu", gated=False))
    made = Transformer(
        TransformerConfig(kind, 30, E, 64, (layer, layer), embedding=EmbeddingConfig(), head=None)
    ).eval()
    for x in made.parameters():
        torch.nn.init.normal_(x, std=0.3)
    return made


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("typed", [False, True])
def test_grouped_heads_score_distances_and_segments_as_the_formula_says(
    most: int | None, typed: bool
) -> None:
    made: Any = model(replace(HEADS, max_distance=most))
    ids, seen = torch.randint(30, (2, T)), []
    segments = torch.randint(3, (2, T)) if typed else None
    positions = None if typed else torch.randperm(40)[:T]
    layer = made.layers[0].attention
    inputs: list[torch.Tensor] = []
    hook = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad(), layer.register_attention_hook(seen.append):
        made(ids, positions=positions, segments=segments, mask=ph.KeyLengths([T, 5]))
        hook.remove()
        q = layer.q_proj(inputs[0]).view(2, T, H, D)
        k, v = (x.repeat_interleave(H // G, dim=1) for x in (seen[0].k, seen[0].v))
        at = torch.arange(T) if positions is None else positions
        apart = (at[:, None] - at).float()
        if most is not None:
            apart = apart.clamp(-most, most)
        angles = apart[..., None] / 10_000 ** (torch.arange(0, E, 2) / E)
        distances = torch.cat((angles.sin(), angles.cos()), dim=-1)
        keys = layer.distance_proj(distances).view(T, T, H, D)
        scores = torch.einsum("bihd,bhjd->bhij", q + layer.content_bias, k)
        scores += torch.einsum("bihd,ijhd->bhij", q + layer.distance_bias, keys)
        if segments is not None:
            differ = (segments[:, :, None] != segments[:, None]).long()
            kinds = layer.segments[differ]
            scores += torch.einsum("bihd,bijhd->bhij", q + layer.segment_bias, kinds)
        hidden = torch.arange(T) >= torch.tensor([T, 5])[:, None]
        scores = (scores * D**-0.5).masked_fill(hidden[:, None, None], -torch.inf)
    torch.testing.assert_close(seen[0].out, scores.softmax(dim=-1) @ v)


def test_one_segment_is_as_none_and_distances_are_dropped_in_training_alone() -> None:
    made = model(replace(HEADS, dropout=0.5))
    ids = torch.randint(30, (1, T))
    torch.testing.assert_close(made(ids), made(ids, segments=torch.full((1, T), 2)))
    assert torch.equal(made(ids), made(ids))
    assert not torch.equal(made(ids), made(ids, segments=torch.arange(T)[None]))
    assert not torch.equal(made.train()(ids), made(ids))


def test_texts_of_a_tokenizer_with_types_give_segments() -> None:
    given = padded(model(), [SimpleNamespace(ids=[4, 5, 6], type_ids=[0, 0, 2])])
    assert given["segments"].tolist() == [[0, 0, 2]]


def test_what_it_cannot_do_is_named() -> None:
    layer, made, ids = build_attention(E, HEADS), model(), torch.randint(30, (1, T))
    with pytest.raises(ValueError, match="reads the segments of the embedding"):
        layer(torch.randn(1, T, E))
    with pytest.raises(UnsupportedError, match="got segments and positions"):
        made(ids, segments=ids, positions=torch.arange(T))
    with pytest.raises(ValueError, match=r"segments must be \[B, T\] = \[1, 11\]"):
        made(ids, segments=ids[:, :3])
    for words, make in (
        ("belong to kind 'encoder': got kind='decoder'", lambda: model(kind="decoder")),
        ("go without rope", lambda: replace(HEADS, rope=RopeConfig())),
        ("go without window and softcap: got window=None, softcap=2.0", lambda: replace(
            HEADS, softcap=2.0)),
        ("max_distance", lambda: replace(HEADS, max_distance=0)),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            make()
