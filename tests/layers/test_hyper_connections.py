"""Hyper-connections: the formula, decoding, what is refused, what a plan counts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

import polyhead as ph
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    HyperConnectionsConfig,
    LayerConfig,
    MixedConnectionsConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers.hyper_connections import (
    HyperConnectionEnds,
    HyperConnections,
    MeanEnds,
    MixedConnections,
)
from polyhead.layers.streams import build_ends
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes

E, n = 16, 3
CONFIG = HyperConnectionsConfig(n, magnitude=1.5, eps=0.01)
LAYER = LayerConfig(AttentionConfig(4, 2, 8), FeedForwardConfig(24), streams=CONFIG)


MIXED = MixedConnectionsConfig(n, eps=0.01, iterations=3)
MEAN = dataclasses.replace(MIXED, at_end="mean")
both = pytest.mark.parametrize("streams", [CONFIG, MIXED, MEAN], ids=["added", "mixed", "mean"])


def model(streams: HyperConnectionsConfig = CONFIG) -> Transformer:
    torch.manual_seed(0)
    layer = dataclasses.replace(LAYER, streams=streams)
    made = Transformer(TransformerConfig("decoder", 50, E, 64, (layer,) * 2)).double().eval()
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


def test_mixed_streams_are_those_of_transformers_module_with_gradients():
    torch.manual_seed(0)
    mixer = MixedConnections(E, MIXED).double()
    theirs = DeepseekV4HyperConnection(
        DeepseekV4Config(
            hidden_size=E, num_hidden_layers=1, hc_mult=n, hc_eps=0.01, hc_sinkhorn_iters=3,
            rms_norm_eps=MIXED.norm_eps,
        )
    ).double()  # fmt: skip
    pairs = [(mixer.weight, theirs.fn), (mixer.bias, theirs.base), (mixer.factors, theirs.scale)]
    for mine, other in pairs:
        torch.nn.init.normal_(mine)
        other.data.copy_(mine.data)
    streams, made = torch.randn(2, 5, n, E).double(), torch.randn(2, 5, E).double()
    x, kept = mixer.read(streams)
    post, comb, wanted = theirs(streams)
    close = {"atol": 1e-5, "rtol": 1e-5}  # they work in float32
    torch.testing.assert_close(x, wanted, **close)
    mixed = torch.einsum("btji,btje->btie", comb.double(), streams)
    after = mixed + post[..., None] * made[:, :, None]
    found = mixer.write(kept, made)
    torch.testing.assert_close(found, after, **close)
    for mine, other in pairs:
        (one,) = torch.autograd.grad((found * found + x[:, :, None]).sum(), mine, retain_graph=True)
        (two,) = torch.autograd.grad(
            (after * after + wanted[:, :, None]).sum(), other, retain_graph=True
        )
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-4)
    matrix = kept[2]
    torch.testing.assert_close(matrix.sum(-2), torch.ones_like(matrix[..., 0]), atol=0.02, rtol=0)


@torch.no_grad()
def test_at_first_mixed_streams_stay_and_their_average_is_read():
    config = MixedConnectionsConfig(n, eps=1e-6)
    mixer, x = MixedConnections(E, config), torch.randn(2, 5, E)
    torch.nn.init.zeros_(mixer.weight)
    streams = torch.randn(2, 5, n, E)
    read, kept = mixer.read(streams)
    torch.testing.assert_close(read, streams.mean(dim=2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mixer.write(kept, x), streams + x[:, :, None], atol=1e-2, rtol=1e-2)


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
    mean = build_ends(E, MEAN)
    assert isinstance(mean, MeanEnds)
    assert torch.equal(mean.enter(x), streams)
    apart = torch.randn(2, 5, n, E)
    torch.testing.assert_close(mean.leave(apart), apart.mean(dim=2))


@torch.no_grad()
@both
def test_decoding_is_one_pass_and_a_plan_counts_what_is_held(streams):
    mine, ids = (
        model(streams),
        torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1)),
    )
    assert TransformerConfig.from_json(mine.config.to_json()) == mine.config
    whole, cache = mine(ids), mine.new_cache()
    steps = [mine(part, cache=cache) for part in ids.split([5, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole)
    assert f"streams={type(streams).__name__}" in mine.decode_plan(mine.new_cache()).explain()
    assert ph.plan(mine.config, tokens=8).parameters == mine.parameter_counts()


def test_what_does_not_go_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="HyperConnection"):
        check_classes(model(), "tensor")
    with pytest.raises(ConfigError, match="streams count must be a whole number"):
        HyperConnectionsConfig(1)
    with pytest.raises(ConfigError, match="iterations must be a whole number"):
        MixedConnectionsConfig(2, iterations=0)
    with pytest.raises(ConfigError, match="at_end must be"):
        MixedConnectionsConfig(2, at_end="first")
    with pytest.raises(ConfigError, match="magnitude"):
        HyperConnectionsConfig(2, magnitude=0.0)
    with pytest.raises(ConfigError, match="HyperConnectionsConfig is around each part"):
        LayerConfig(AttentionConfig(4, 2, 8), None, norm_placement="post", streams=CONFIG)
