"""Routers that go on from each other: transformers' blocks, models, plans, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import ZayaConfig
from transformers.models.zaya.modeling_zaya import ZayaSparseMoeBlock
from whole_models import check_decoding

import polyhead as ph
from polyhead.config import (
    AttentionConfig,
    DepthAveragedMixtureConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers import DepthAveragedExperts
from polyhead.layers.handed import Handed
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes

E, F, X, R = 24, 16, 4, 6
FIRST = DepthAveragedMixtureConfig(
    FeedForwardConfig(F), X, 1, choice_bias=True, router_dim=R, router_norm=NormConfig(eps=0.01)
)
LATER = dataclasses.replace(FIRST, reads_state=True)
HEADS = AttentionConfig(4, 2, 8)
CLOSE = {"atol": 1e-5, "rtol": 1e-4}
"""transformers norms the state in float32."""


def pair(index: int) -> tuple[ZayaSparseMoeBlock, DepthAveragedExperts]:
    """transformers' block of a layer and ours with the same weights, in float64."""
    config = ZayaConfig(
        hidden_size=E, num_hidden_layers=2, moe_intermediate_size=F, num_experts=X,
        router_hidden_size=R, rms_norm_eps=0.01, num_attention_heads=4,
    )  # fmt: skip
    config._experts_implementation = "eager"
    theirs = ZayaSparseMoeBlock(config, index).eval().double()
    torch.manual_seed(index)
    for tensor in theirs.parameters():
        nn.init.normal_(tensor, std=0.6)
    nn.init.normal_(theirs.gate.balancing_biases, std=0.05)
    theirs.gate.balancing_biases[-1] = 0.4  # some tokens skip the network, and some do not
    ours = DepthAveragedExperts(E, LATER if index else FIRST).eval().double()
    gate = theirs.gate
    state: dict[str, Tensor] = {
        "state_proj.weight": gate.down_proj.weight,
        "state_proj.bias": gate.down_proj.bias,
        "router_norm.weight": gate.router_mlp.norm.weight,
        "router.weight": gate.router_mlp.out_proj.weight,
        "choice_bias": gate.balancing_biases,
    }
    for i, layer in enumerate((gate.router_mlp.fc1, gate.router_mlp.fc2)):
        state |= {f"router_layers.{i}.{name}": each for name, each in layer.state_dict().items()}
    if index:
        state["state_scale"] = gate.router_states_scale
    for i in range(X):
        into, out = theirs.experts.gate_up_proj[i].chunk(2), theirs.experts.down_proj[i]
        for name, each in zip(("gate", "up", "down"), (*into, out), strict=True):
            state[f"experts.{i}.{name}_proj.weight"] = each
    ours.load_state_dict(state)
    return theirs, ours


def test_two_layers_are_transformers_blocks_forward_and_backward():
    (theirs, ours), (their_next, our_next) = pair(0), pair(1)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 20, E, generator=generator, dtype=torch.float64).requires_grad_()
    wanted, state = theirs(x)
    wanted_next, _ = their_next(x, state)
    handed = Handed(0)
    found, found_next = ours(x, handed), our_next(x, handed.at(1))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found_next, wanted_next)
    for made, same in ((found, wanted), (found_next, wanted_next)):
        (one,) = torch.autograd.grad(made.square().sum(), x, retain_graph=True)
        (other,) = torch.autograd.grad(same.square().sum(), x, retain_graph=True)
        torch.testing.assert_close(one, other, **CLOSE)
    (one,) = torch.autograd.grad(found_next.square().sum(), ours.state_proj.weight)
    (other,) = torch.autograd.grad(wanted_next.square().sum(), theirs.gate.down_proj.weight)
    torch.testing.assert_close(one, other, **CLOSE)
    assert one.abs().sum() > 0
    skipped = (found_next == 0.0).all(dim=-1)
    assert 0 < skipped.sum() < skipped.numel()
    with torch.no_grad():
        for t in range(20):
            token = x[:1, t : t + 1]
            ours(token, handed)
            torch.testing.assert_close(our_next(token, handed.at(1)), found_next[:1, t : t + 1])


def model(**options: Any) -> Transformer:
    networks = [dataclasses.replace(each, **options) for each in (FIRST, LATER, LATER)]
    layers = tuple(LayerConfig(HEADS, network) for network in networks)
    config = TransformerConfig("decoder", 50, E, 256, layers)
    assert TransformerConfig.from_json(config.to_json()) == config
    torch.manual_seed(0)
    made = Transformer(config).eval()
    assert made.layers[1].feed_forward.state_scale.tolist() == [1.0] * R
    for name, parameter in made.named_parameters():
        if "router" in name or "state" in name:
            nn.init.normal_(parameter)  # choices are no near ties
    return made


def ids(batch: int, tokens: int) -> Tensor:
    return torch.randint(50, (batch, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["auto", "paged"])
def test_a_model_decodes_as_in_one_pass_and_holds_what_is_planned(kind, tmp_path):
    check_decoding(model(choice_bias=False), kind, tmp_path)
    mine = model(skips=2, router_bias=True)
    assert mine.layers[0].feed_forward.router.weight.shape == (X + 2, R)
    assert ph.plan(mine.config, tokens=8).parameters == mine.parameter_counts()
    apart = dataclasses.replace(mine.config, layers=mine.config.layers[:1] * 3)
    held = [ph.plan(each, tokens=50, dtype="float32") for each in (mine.config, apart)]
    assert held[0].activation_bytes - held[1].activation_bytes == 50 * R * 4  # the state before


def test_the_state_before_is_not_scaled_at_first():
    network = model().layers[1].feed_forward
    assert not (network.state_scale == 1.0).any()
    network.reset_parameters()
    assert (network.state_scale == 1.0).all()


@torch.no_grad()
def test_a_layer_reads_the_state_of_the_one_before_packed_or_not():
    mine, text = model(), ids(2, 12)
    whole, cache = mine(text), mine.new_cache()
    mine(text, cache=cache)
    cache.rollback([2, 4])
    packed = torch.cat((text[0, 10:], text[1, 8:]))[None]
    found = mine(packed, cache=cache, counts=[2, 4])
    wanted = torch.cat((whole[0, 10:], whole[1, 8:]))[None]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    mine.layers[2].feed_forward.state_scale.zero_()
    assert not torch.allclose(mine(text), whole)


def test_recomputed_gradients_are_the_same_and_states_are_forgotten_without():
    mine, found = model(), []
    for mine.recompute in (False, True):
        mine.zero_grad()
        mine(ids(1, 9)).square().sum().backward()
        found.append([each.grad for each in mine.parameters() if each.grad is not None])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
    handed, x = Handed(0), torch.randn(1, 3, E)
    with torch.no_grad():
        for i, layer in enumerate(mine.layers):
            x = layer(x, mask=ph.Causal(), handed=handed.at(i))
    assert [layer for layer, _ in handed.values] == [2]


def test_what_does_not_go_is_refused_by_name():
    x = torch.randn(1, 3, E)
    with pytest.raises(ValueError, match=r"router_state of layer .*call it within its model"):
        DepthAveragedExperts(E, LATER)(x)
    first = DepthAveragedExperts(E, FIRST)
    assert first(x).shape == x.shape
    with pytest.raises(UnsupportedError, match="state of the layer before: got vectors alone"):
        first.route(x[0])
    for wrong in ({"groups": 2}, {"capacity": 4}, {"scoring": "sparsemixer"}):
        with pytest.raises(ConfigError, match="are in no groups and have no capacity"):
            dataclasses.replace(FIRST, **wrong)
    with pytest.raises(ConfigError, match="router_dim must be a whole number"):
        dataclasses.replace(FIRST, router_dim=0)
    with pytest.raises(ConfigError, match="skips must be a whole number"):
        dataclasses.replace(FIRST, skips=-1)
    with pytest.raises(ConfigError, match="reads what layers hand on as the feed_forward"):
        LayerConfig(HEADS, FIRST, parallel="one norm")
    plain = FeedForwardConfig(F)
    for before, said in ((), "none"), ((FIRST, plain), "none"), ((replaced(4),), "4"):
        layers = tuple(LayerConfig(HEADS, each) for each in (*before, LATER))
        words = f"layer {len(before)} reads a state of 6 features.*hands on {said}"
        with pytest.raises(ConfigError, match=words):
            TransformerConfig("decoder", 50, E, 64, layers)
    with pytest.raises(UnsupportedError, match="DepthAveragedExperts"):
        check_classes(model(), "expert")


def replaced(router_dim: int) -> DepthAveragedMixtureConfig:
    return dataclasses.replace(FIRST, router_dim=router_dim)
