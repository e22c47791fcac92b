"""Hyper-connections: the formula, decoding, what is refused, what a plan counts."""

from __future__ import annotations

import pytest
import torch

import polyhead as ph
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    HyperConnectionsConfig,
    LayerConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers.hyper_connections import HyperConnectionEnds, HyperConnections
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes

E, n = 16, 3
CONFIG = HyperConnectionsConfig(n, magnitude=1.5, eps=0.01)
LAYER = LayerConfig(AttentionConfig(4, 2, 8), FeedForwardConfig(24), streams=CONFIG)


def model() -> Transformer:
    torch.manual_seed(0)
    made = Transformer(TransformerConfig("decoder", 50, E, 64, (LAYER,) * 2)).double().eval()
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made


@torch.no_grad()
def test_parts_read_a_weighted_sum_and_are_added_with_weights():
    torch.manual_seed(0)
    mixer, s, made = HyperConnections(E, CONFIG).double(), torch.randn(2, 5, n, E), torch.randn(E)
    s, made = s.double(), made.double().expand(2, 5, E)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter)
    flat = s.flatten(2)
    r = flat @ mixer.weight.T / (flat.square().mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt()
    read = torch.sigmoid(mixer.factors[0] * r[..., :n] + mixer.bias[:n]) + 0.01
    write = 1.5 * torch.sigmoid(mixer.factors[1] * r[..., n:] + mixer.bias[n:]) + 0.01
    x, kept = mixer.read(s)
    torch.testing.assert_close(x, torch.einsum("bti,btie->bte", read, s))
    torch.testing.assert_close(mixer.write(kept, made), s + write[..., None] * made[:, :, None])


@torch.no_grad()
def test_at_first_streams_are_copies_and_their_average_is_read():
    config = HyperConnectionsConfig(n, eps=0.0)
    ends, mixer, x = (
        HyperConnectionEnds(E, config),
        HyperConnections(E, config),
        torch.randn(2, 5, E),
    )
    streams = ends.enter(x)
    assert streams.shape == (2, 5, n, E)
    assert torch.equal(streams[:, :, 1], x)
    torch.nn.init.zeros_(mixer.weight)
    torch.nn.init.zeros_(ends.weight)
    torch.testing.assert_close(mixer.read(streams)[0], x)
    torch.testing.assert_close(ends.leave(streams), x)
    torch.testing.assert_close(mixer.write(mixer.read(streams)[1], x), 2 * streams)


@torch.no_grad()
def test_decoding_is_one_pass_and_a_plan_counts_what_is_held():
    mine, ids = model(), torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))
    assert TransformerConfig.from_json(mine.config.to_json()) == mine.config
    whole, cache = mine(ids), mine.new_cache()
    steps = [mine(part, cache=cache) for part in ids.split([5, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole)
    assert "streams=HyperConnectionsConfig" in mine.decode_plan(mine.new_cache()).explain()
    assert ph.plan(mine.config, tokens=8).parameters == mine.parameter_counts()


def test_what_does_not_go_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="HyperConnection"):
        check_classes(model(), "tensor")
    with pytest.raises(ConfigError, match="streams count must be a whole number"):
        HyperConnectionsConfig(1)
    with pytest.raises(ConfigError, match="magnitude"):
        HyperConnectionsConfig(2, magnitude=0.0)
    with pytest.raises(ConfigError, match="HyperConnectionsConfig is around each part"):
        LayerConfig(AttentionConfig(4, 2, 8), None, norm_placement="post", streams=CONFIG)
