"""Vectors in front of a text equal tokens in front of it, but for the numbers between both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import polyhead as ph
from polyhead.config import (
    AttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerConfig,
    LshAttentionConfig,
    PerLayerEmbeddingConfig,
    RelativeBiasConfig,
    RopeConfig,
    SoftPromptConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.models import Transformer

P, W = 5, 20
PROMPT = SoftPromptConfig(P, num_prompts=3, chosen=1, num_segments=4, segments=(3, 1))


def config(rope: RopeConfig | None = None, **fields) -> TransformerConfig:
    layer = LayerConfig(AttentionConfig(4, 2, 8, rope=rope), FeedForwardConfig(40))
    given = {"embedding": EmbeddingConfig(soft_prompt=PROMPT)} | fields
    return TransformerConfig("encoder", W, 24, 64, (layer, layer), **given)


def model(*rope: RopeConfig, **fields) -> Transformer:
    torch.manual_seed(0)
    built = Transformer(config(*rope, **fields)).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return built


def test_it_is_a_text_that_begins_with_tokens_of_these_vectors():
    rope = RopeConfig(theta=100.0)
    ours = model(rope, head="untied")
    plain = Transformer(replace(ours.config, vocab_size=W + P, embedding=EmbeddingConfig()))
    prompt = ours.embedding.soft_prompt
    state = {name: x for name, x in ours.state_dict().items() if "soft_prompt" not in name}
    tokens = ours.embedding.tokens.weight + prompt.segments.weight[1]
    vectors = prompt.vectors.weight[P : 2 * P] + prompt.segments.weight[3]
    state["embedding.tokens.weight"] = torch.cat((tokens, vectors))
    head = state["head.weight"]
    state["head.weight"] = torch.cat((head, torch.zeros(P, 24)))
    plain.load_state_dict(state)
    ids = torch.randint(0, W, (2, 9))
    longer = torch.cat((torch.arange(W, W + P).expand(2, P), ids), dim=1)
    wanted = plain.eval()(longer)[:, P:, :W]
    torch.testing.assert_close(ours(ids), wanted)
    torch.testing.assert_close(ours(ids, last=3), wanted[:, -3:])
    assert not torch.allclose(plain(ids)[..., :W], wanted, atol=1e-3)
    padded = ours(ids, mask=ph.KeyLengths([9, 4]))
    torch.testing.assert_close(padded[1:, :4], ours(ids[1:, :4]))


def test_every_layer_may_have_a_table_of_its_own():
    shared = model(relative_bias=RelativeBiasConfig(8, 6))
    own = Transformer(replace(shared.config, relative_bias=RelativeBiasConfig(8, 6, True)))
    state = shared.state_dict()
    table = state.pop("relative_bias.weight")
    assert table.shape == (8 + 4**2, 4)
    own.load_state_dict({**state, **{f"relative_bias.{i}.weight": table for i in (0, 1)}})
    ids = torch.randint(0, W, (2, 9))
    torch.testing.assert_close(own.eval()(ids), shared(ids))


def test_what_a_text_behind_it_cannot_have_is_named():
    built, ids = model(), torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"follow on from it: got positions \[6\]"):
        built(ids, positions=torch.arange(6))
    with pytest.raises(UnsupportedError, match="a soft prompt understands no mask but KeyLengths"):
        built(ids, mask=ph.Window(2))
    with pytest.raises(ValueError, match="an encoder sees all tokens at once: it takes no cache"):
        built.new_cache()


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "decoder"},
        {"per_layer_embedding": PerLayerEmbeddingConfig(W, 3)},
        {"layers": (LayerConfig(LshAttentionConfig(4, 4, 8), FeedForwardConfig(40)),)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_it_belongs_to_an_encoder_with_plain_layers(fields):
    with pytest.raises(ConfigError, match="a soft prompt belongs to kind 'encoder' with attention"):
        replace(config(), **fields)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("length must be", {"length": 0}),
        ("segments must be 2 different numbers: got", {"segments": (1, 1)}),
        ("num_prompts must be", {"chosen": 3}),
        ("num_segments must be", {"segments": (0, 4)}),
        ("chosen and segments must be", {"segments": (-1, 0)}),
    ],
)
def test_numbers_that_do_not_go_together_are_named(words, fields):
    with pytest.raises(ConfigError, match=f"soft prompt {words}"):
        replace(PROMPT, **fields)
