"""Several residual streams: AltUp and cycles by formula, what works with them, what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import polyhead as ph
from polyhead.config import (
    AltUpConfig,
    AttentionConfig,
    CyclesConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    PerLayerEmbeddingConfig,
    PerLayerInputConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.interpret.circuits import HeadCircuits
from polyhead.interpret.contributions import Contributions
from polyhead.interpret.stream import Stream
from polyhead.layers import FeedForward
from polyhead.layers.streams import AltUp, AltUpEnds
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes

E, n = 32, 3
HEADS = AttentionConfig(4, 2, 8, rope=RopeConfig())
LAYER = LayerConfig(
    HEADS,
    FeedForwardConfig(40),
    norm_placement="sandwich",
    laurel_rank=4,
    streams=AltUpConfig(n, 1),
    per_layer_input=PerLayerInputConfig(6, input_scale=True),
)


def model(*layers: LayerConfig) -> Transformer:
    torch.manual_seed(0)
    chosen = layers or (LAYER,) * 3
    vectors = PerLayerEmbeddingConfig(50, 6) if chosen[0].per_layer_input else None
    made = Transformer(
        TransformerConfig("decoder", 50, E, 256, chosen, per_layer_embedding=vectors)
    ).eval()
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made


def ids(batch: int, count: int) -> Tensor:
    return torch.randint(50, (batch, count), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_altup_predicts_all_streams_and_corrects_them_by_what_one_changed():
    torch.manual_seed(0)
    mixer, s = AltUp(E, AltUpConfig(n, 1, norm=NormConfig(weight=False))), torch.randn(2, 5, n, E)

    def routed(x: Tensor) -> Tensor:
        normed = x / (x.square().mean(-1, keepdim=True) + mixer.config.norm.eps).sqrt()
        return torch.tanh(normed / E @ mixer.router.weight.T)

    P = (routed(s[:, :, 1]) @ mixer.predict.weight.T).view(2, 5, n, n)
    predicted = s + torch.einsum("btij,btje->btie", P, s)
    x, kept = mixer.read(s)
    torch.testing.assert_close(x, predicted[:, :, 1])
    made = torch.randn(2, 5, E)
    c = routed(made) @ mixer.correct.weight.T
    wanted = predicted + (1 + c)[..., None] * (made - predicted[:, :, 1])[:, :, None]
    torch.testing.assert_close(mixer.write(kept, made), wanted)
    beside = mixer.beside(s, lambda x: 2 * x)
    torch.testing.assert_close(beside[:, :, 0], s[:, :, 0])
    torch.testing.assert_close(beside[:, :, 2], s[:, :, 2] + 2 * s[:, :, 1])


@torch.no_grad()
def test_coefficients_are_clipped_when_training_alone():
    mixer, s = AltUp(E, AltUpConfig(n, clip=0.5)), torch.randn(1, 2, n, E)
    mixer.predict.weight.fill_(7.0)
    clipped = copy.deepcopy(mixer).train()
    mixer.eval()
    before = mixer.read(s)[0]
    mixer.predict.weight.fill_(0.5)
    torch.testing.assert_close(clipped.read(s)[0], mixer.read(s)[0])
    assert not torch.allclose(before, mixer.read(s)[0])


@torch.no_grad()
def test_streams_have_the_size_of_the_embedding_and_are_averaged():
    torch.manual_seed(0)
    ends, x = AltUpEnds(E, AltUpConfig(n)), torch.randn(2, 5, E)
    streams = ends.enter(x)
    assert streams.shape == (2, 5, n, E)
    sizes = streams.square().mean(-1)
    torch.testing.assert_close(sizes, sizes[..., :1].expand_as(sizes))
    assert torch.equal(streams[:, :, 0], x)
    back = [streams[:, :, 0]]
    for i, module in enumerate(ends.leave_projs, start=1):
        y = streams[:, :, i] @ module.weight.T
        back.append(y * x.norm(dim=-1, keepdim=True) / y.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(ends.leave(streams), torch.stack(back).mean(0))


@torch.no_grad()
def test_laurel_joins_the_input_of_attention():
    mine = model(LayerConfig(HEADS, None, laurel_rank=4))
    layer, x = mine.layers[0], torch.randn(1, 6, E)
    normed = layer.attention_norm(x)
    low = layer.laurel.norm(normed @ layer.laurel.in_proj.weight.T @ layer.laurel.out_proj.weight.T)
    wanted = (x + layer.attention(normed) + normed + low) / 2**0.5
    torch.testing.assert_close(layer(x), wanted)


@torch.no_grad()
def test_a_sparse_network_keeps_what_is_above_its_cutoff():
    torch.manual_seed(0)
    network = FeedForward.from_config(E, FeedForwardConfig(400, "relu", sparsity=0.9))
    x = torch.randn(3, 1, E)
    gate = network.gate_proj(x)
    cutoff = gate.mean(-1, keepdim=True) + 1.2815516 * gate.std(-1, correction=0, keepdim=True)
    kept = (gate - cutoff).relu()
    assert 0.05 < (kept > 0).float().mean() < 0.15
    torch.testing.assert_close(network(x), network.down_proj(kept * network.up_proj(x)))


@torch.no_grad()
def test_decoding_is_one_pass_and_layers_see_streams(tmp_path):
    mine, tokens = model(), ids(2, 20)
    assert TransformerConfig.from_json(mine.config.to_json()) == mine.config
    with mine.observe() as seen:
        whole = mine(tokens)
    assert seen[0].shape == (2, 20, n, E)
    cache = mine.new_cache(spare=4)
    steps = [mine(part, cache=cache) for part in tokens.split([5, 1, 1, 9, 4], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-5, rtol=1e-5)
    cache.rollback(3)
    again = mine(tokens[:, -3:], cache=cache, last=1)
    torch.testing.assert_close(again, whole[:, -1:], atol=1e-5, rtol=1e-5)
    said = mine.decode_plan(mine.new_cache()).explain()
    assert "native code does not compute LayerConfig with" in said
    assert "streams=AltUpConfig" in said
    stream = Stream(mine)
    with stream.watching():
        mine(tokens[:1])
    assert stream.sizes["stream"].shape == (3, 20)
    torch.testing.assert_close(stream.guesses(19)[-1], mine(tokens[:1])[0, 19], atol=1e-5, rtol=0)


def test_recomputed_gradients_are_the_same():
    mine, tokens, found = model(), ids(1, 9), []
    for recompute in (False, True):
        mine.recompute = recompute
        mine.zero_grad()
        mine(tokens).square().sum().backward()
        found.append([parameter.grad for parameter in mine.parameters()])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_what_does_not_go_is_refused_by_name():
    mine = model()
    plain = replace(LAYER, per_layer_input=None)
    for dimension in ("context", "tensor"):
        with pytest.raises(UnsupportedError, match=r"AltUp|PerLayerEmbedding"):
            check_classes(mine, dimension)
        with pytest.raises(UnsupportedError, match="AltUp"):
            check_classes(model(plain), dimension)
    with pytest.raises(UnsupportedError, match="several streams"):
        Contributions(mine, ids(1, 4))
    with pytest.raises(UnsupportedError, match="one residual stream that heads read and write"):
        HeadCircuits(mine, 0)
    with pytest.raises(ConfigError, match="layers must have the same streams"):
        model(plain, replace(plain, streams=None))
    with pytest.raises(ConfigError, match="active must be one of 3 streams: got 3"):
        AltUpConfig(3, 3)
    with pytest.raises(ConfigError, match="laurel_rank belongs to norm_placement"):
        LayerConfig(HEADS, None, norm_placement="post", laurel_rank=2)
    assert ph.plan(mine.config, tokens=8).parameters == mine.parameter_counts()


def test_two_stacks_take_turns_over_two_states():
    """L, L, H and again: a turn reads the sum of both states, and is normed at its end."""
    norm = NormConfig(eps=0.1, weight=False)
    plain = LayerConfig(HEADS, FeedForwardConfig(40))
    first, last = (
        [
            replace(plain, streams=CyclesConfig(2, state, starts, not starts, norm=norm))
            for starts in (True, False)
        ]
        for state in (1, 0)
    )
    layers = (*first, *first, *last) * 2
    weights_of = (0, 1, 0, 1, 4, 5) * 2
    torch.manual_seed(0)
    config = TransformerConfig(
        "decoder", 50, E, 256, layers, final_norm=None, weights_of=weights_of
    )
    mine = Transformer(config).eval()
    mine.streams.fast.normal_()
    assert TransformerConfig.from_json(config.to_json()) == config
    assert ph.plan(config, tokens=8).parameters == mine.parameter_counts()
    tokens = ids(2, 12)
    with torch.no_grad():
        slow = mine.embedding(tokens, 0)
        fast = mine.streams.fast.expand_as(slow)

        def turn(x: Tensor, at: int) -> Tensor:
            for layer in mine.layers[at : at + 2]:
                x = x + layer.attention(layer.attention_norm(x), mask=ph.Causal())
                x = x + layer.feed_forward(layer.feed_forward_norm(x))
            return x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()

        for _ in range(2):
            for _ in range(2):
                fast = turn(fast + slow, 0)
            slow = turn(slow + fast, 4)
        torch.testing.assert_close(mine(tokens), mine.logits(slow))
        cache = mine.new_cache()
        steps = [mine(part, cache=cache) for part in tokens.split([5, 1, 6], dim=1)]
        torch.testing.assert_close(torch.cat(steps, dim=1), mine(tokens), atol=1e-5, rtol=1e-5)
    with pytest.raises(UnsupportedError, match="Cycles"):
        check_classes(mine, "context")
    with pytest.raises(ConfigError, match="cycles are over 2 states"):
        CyclesConfig(3)
    with pytest.raises(ConfigError, match="layers must have the same streams"):
        model(first[0], replace(first[1], streams=CyclesConfig(norm=replace(norm, eps=0.2))))
