"""One layer, judged by torch's encoder and decoder layers and by its own formulas."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch import nn

from polyhead import Causal, DenseCache, KeyLengths, Transformer, TransformerConfig
from polyhead.config import AdapterConfig
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers import (
    AttentionConfig,
    FeedForwardConfig,
    IdentityMixtureConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    NormGateConfig,
    RoPE,
    TransformerLayer,
)
from polyhead.layers.handed import SHORTCUT, Handed
from polyhead.parallel.classes import check_classes

PARTS = {
    "self_attn": "attention",
    "multihead_attn": "cross_attention",
    "linear1": "feed_forward.up_proj",
    "linear2": "feed_forward.down_proj",
}


def of_torch(theirs: nn.Module, cross: bool = False) -> dict[str, torch.Tensor]:
    """Our state dict from that of torch's encoder or decoder layer."""
    norms = ["attention_norm", *(["cross_attention_norm"] if cross else []), "feed_forward_norm"]
    state = {}
    for name, tensor in theirs.state_dict().items():
        part, _, rest = name.partition(".")
        if part.startswith("norm"):
            state[f"{norms[int(part[4:]) - 1]}.{rest}"] = tensor
        elif rest.startswith("in_proj"):
            for proj, rows in zip("qkv", tensor.chunk(3), strict=True):
                state[f"{PARTS[part]}.{proj}_proj.{rest.removeprefix('in_proj_')}"] = rows
        else:
            state[f"{PARTS[part]}.{rest.replace('out_proj', 'o_proj')}"] = tensor
    return state


def loaded(theirs: nn.Module, **fields) -> TransformerLayer:
    ours = TransformerLayer(24, 4, 40, **fields).eval()
    ours.load_state_dict(of_torch(theirs, fields.get("cross_attention", False)))
    return ours


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3)
    return module.eval()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_equals_torchs_encoder_layer(placement, activation, grad):
    theirs = randomised(
        nn.TransformerEncoderLayer(
            24, 4, 40, activation=activation, batch_first=True, norm_first=placement == "pre"
        )
    )
    ours, x = loaded(theirs, norm_placement=placement, activation=activation), torch.randn(2, 6, 24)
    padding = torch.tensor([[0] * 6, [0] * 4 + [1] * 2]).bool()
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(ours(x), theirs(x))
        have = ours(x, mask=KeyLengths([6, 4]))
        want = theirs(x, src_key_padding_mask=padding)
        torch.testing.assert_close(have[0], want[0])
        torch.testing.assert_close(have[1, :4], want[1, :4])


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_equals_torchs_decoder_layer(placement):
    theirs = randomised(
        nn.TransformerDecoderLayer(24, 4, 40, batch_first=True, norm_first=placement == "pre")
    )
    ours = loaded(theirs, norm_placement=placement, cross_attention=True)
    x, context = torch.randn(2, 6, 24), torch.randn(2, 5, 24)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    want = theirs(x, context, tgt_mask=hidden)
    torch.testing.assert_close(ours(x, context, mask=Causal()), want)

    cache, context_cache = DenseCache(), DenseCache()
    parts = [
        ours(part, context, mask=Causal(), cache=cache, context_cache=context_cache)
        for part in x.split([2, 1, 3], dim=1)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), want)


def test_sandwich_normalises_before_and_after():
    layer = randomised(TransformerLayer(24, 4, norm="rmsnorm", norm_placement="sandwich"))
    x = torch.randn(1, 5, 24)
    h = x + layer.attention_out_norm(layer.attention(layer.attention_norm(x)))
    want = h + layer.feed_forward_out_norm(layer.feed_forward(layer.feed_forward_norm(h)))
    torch.testing.assert_close(layer(x), want)


def test_parameter_names_are_the_contract():
    def names(**fields):
        return {name for name, _ in TransformerLayer(8, 2, **fields).named_parameters()}

    plain = {
        *(f"attention.{p}_proj.weight" for p in "qkvo"),
        "attention_norm.weight",
        "feed_forward_norm.weight",
        *(f"feed_forward.{p}_proj.weight" for p in ("gate", "up", "down")),
    }
    fields = {"norm": "rmsnorm", "gated": True, "activation": "silu", "bias": False}
    assert names(**fields) == plain
    assert names(**fields, norm_placement="sandwich") == plain | {
        "attention_out_norm.weight",
        "feed_forward_out_norm.weight",
    }
    assert names(**fields, cross_attention=True) == plain | {
        *(f"cross_attention.{p}_proj.weight" for p in "qkvo"),
        "cross_attention_norm.weight",
    }
    biased = {name.replace("weight", "bias") for name in plain}
    assert names(gated=True) == plain | biased


def test_dropout_acts_in_training_only():
    layer, x = TransformerLayer(24, 4, dropout=0.3), torch.randn(1, 5, 24)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_residual_dropout_alone_acts():
    attention, feed_forward = AttentionConfig(4, 4, 6), FeedForwardConfig(40)
    layer = TransformerLayer.from_config(24, LayerConfig(attention, feed_forward, dropout=0.5))
    x = torch.randn(1, 5, 24)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_the_constructor_says_the_same_as_the_configuration():
    rope = RoPE(50.0)
    layer = TransformerLayer(24, 4, num_kv_heads=2, rope=rope, norm=NormConfig(eps=1e-6))
    assert layer.attention.rope is rope
    other = TransformerLayer.from_config(24, layer.config)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(1, 5, 24)
    assert torch.equal(layer(x, mask=Causal()), other(x, mask=Causal()))
    assert LayerConfig.from_json(layer.config.to_json()) == layer.config
    assert len(inspect.signature(TransformerLayer).parameters) <= 12


def test_what_does_not_go_together_is_refused():
    layer, x = TransformerLayer(24, 4), torch.randn(1, 5, 24)
    with pytest.raises(ValueError, match="no cross-attention: got a context"):
        layer(x, x)
    with pytest.raises(ValueError, match="needs a context"):
        TransformerLayer(24, 4, cross_attention=True)(x)
    with pytest.raises(ConfigError, match="num_heads must divide embed_dim"):
        TransformerLayer(24, 5)
    with pytest.raises(ConfigError, match="norm_placement must be one of 'pre'"):
        TransformerLayer(24, 4, norm_placement="around")
    roped = AttentionConfig(4, 4, 6, rope=RoPE().config)
    with pytest.raises(ConfigError, match="cross_attention takes no rope"):
        TransformerLayer.from_config(
            24, LayerConfig(roped, FeedForwardConfig(40), cross_attention=roped)
        )


LATENT = LatentAttentionConfig(4, 16, 8, 4, 8)
MIXTURE = MixtureConfig(FeedForwardConfig(24), 4, 2, shared=FeedForwardConfig(12))


@pytest.mark.parametrize("attention", [AttentionConfig(4, 2, 8), LATENT], ids=["heads", "latent"])
@pytest.mark.parametrize("network", [FeedForwardConfig(24), MIXTURE], ids=["plain", "mixture"])
def test_a_layer_of_any_attention_and_network_survives_json_and_decodes(attention, network):
    config = LayerConfig(attention, network)
    assert LayerConfig.from_json(config.to_json()) == config
    torch.manual_seed(0)
    layer = TransformerLayer.from_config(32, config).eval()
    x = torch.randn(2, 9, 32)
    cache = DenseCache()
    with torch.no_grad():
        whole = layer(x, mask=Causal())
        steps = [layer(part, mask=Causal(), cache=cache) for part in x.split([5, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("attention", {"kv_lora": 3}, "LatentAttentionConfig: unknown key 'kv_lora'"),
        ("attention", {"kv_lora_rank": None}, "kv_lora_rank must be a whole number"),
        ("feed_forward", {"expert_count": 3}, "MixtureConfig: unknown key 'expert_count'"),
    ],
)
def test_a_wrong_key_is_named_with_the_part_that_was_meant(part, change, words):
    data = LayerConfig(LATENT, MIXTURE).to_dict()
    data[part] |= change
    with pytest.raises(ConfigError, match=words):
        LayerConfig.from_dict(data)
    del data[part]
    with pytest.raises(ConfigError, match=f"missing .*'{part}'"):
        LayerConfig.from_dict(data)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "after"])
def test_a_layer_may_be_its_attention_alone(placement):
    config = LayerConfig(AttentionConfig(4, 2, 8), None, norm_placement=placement)
    assert LayerConfig.from_json(config.to_json()) == config
    layer = TransformerLayer.from_config(32, config).eval()
    names = {name.split(".")[0] for name, _ in layer.named_parameters()}
    assert not any(name.startswith("feed_forward") for name in names)
    held = sum(parameter.numel() for parameter in layer.parameters())
    assert held == sum(group.count for group in config.parameter_groups(32))
    x, norm = torch.randn(2, 9, 32), layer.attention_norm
    if placement == "pre":
        want = x + layer.attention(norm(x), mask=Causal())
    elif placement == "post":
        want = norm(x + layer.attention(x, mask=Causal()))
    else:
        out_norm = layer.attention_out_norm
        inner = x if norm is None else norm(x)
        want = x + out_norm(layer.attention(inner, mask=Causal()))
    torch.testing.assert_close(layer(x, mask=Causal()), want)
    with torch.no_grad():
        cache = DenseCache()
        steps = [layer(part, mask=Causal(), cache=cache) for part in x.split([5, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), want, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="need feed_forward: got None"):
        LayerConfig(AttentionConfig(4, 2, 8), None, parallel="one norm")


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_the_residual_path_and_what_joins_it_are_weighed(placement):
    config = LayerConfig(
        AttentionConfig(4, 2, 8),
        FeedForwardConfig(24),
        norm_placement=placement,
        residual_scale=0.5,
        attention_mix=(0.7, 1.5),
        feed_forward_mix=(2.0, 0.6),
    )
    assert LayerConfig.from_json(config.to_json()) == config
    layer = TransformerLayer.from_config(32, config).eval()
    x = torch.randn(2, 9, 32)
    want, network = x, layer.feed_forward
    if placement == "pre":
        want = 0.7 * want + 0.75 * layer.attention(layer.attention_norm(want), mask=Causal())
        want = 2.0 * want + 0.3 * network(layer.feed_forward_norm(want))
    else:
        want = layer.attention_norm(0.7 * want + 0.75 * layer.attention(want, mask=Causal()))
        want = layer.feed_forward_norm(2.0 * want + 0.3 * network(want))
    torch.testing.assert_close(layer(x, mask=Causal()), want)
    with torch.no_grad():
        cache = DenseCache()
        steps = [layer(part, mask=Causal(), cache=cache) for part in x.split([5, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), want, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="attention_mix must be 2 factors"):
        LayerConfig(AttentionConfig(4, 2, 8), None, attention_mix=(1.0,))
    with pytest.raises(ConfigError, match="are added without factors"):
        LayerConfig(
            AttentionConfig(4, 2, 8),
            FeedForwardConfig(24),
            parallel="one norm",
            feed_forward_mix=(2.0, 1.0),
        )


def test_a_shortcut_joins_the_stream_behind_the_next_layer():
    """Its experts read what the first network reads; one of them gives back its input."""
    heads, plain = AttentionConfig(4, 2, 8), FeedForwardConfig(24)
    mixture = IdentityMixtureConfig(plain, 3, 2, identities=2)
    pair = (
        LayerConfig(heads, plain, shortcut=mixture),
        LayerConfig(heads, plain, joins_shortcut=True),
    )
    model = randomised(Transformer(TransformerConfig("decoder", 40, 32, 64, pair)))
    first, second = model.layers
    x, handed = torch.randn(2, 9, 32), Handed(0)
    after = x + first.attention(first.attention_norm(x), mask=Causal())
    read = first.feed_forward_norm(after)
    weights, chosen = first.shortcut.route(read.flatten(0, 1))
    assert (chosen >= 3).any()
    assert (chosen < 3).any()
    given = torch.zeros(18, 32)
    for row in range(18):
        for weight, number in zip(weights[row], chosen[row].tolist(), strict=True):
            own = read.flatten(0, 1)[row]
            given[row] += weight * (first.shortcut.experts[number](own) if number < 3 else own)
    want = second(first(x, mask=Causal()), mask=Causal(), handed=_holding(torch.zeros(1)))
    with torch.no_grad():
        h = first(x, mask=Causal(), handed=handed)
        torch.testing.assert_close(handed.values[0, SHORTCUT], given.view(2, 9, 32))
        torch.testing.assert_close(
            second(h, mask=Causal(), handed=handed.at(1)), want + given.view(2, 9, 32)
        )
    assert not handed.values, "without gradients it is read once"
    found, ids = [], torch.randint(40, (1, 9))
    for model.recompute in (False, True):
        model.zero_grad()
        model(ids).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="reads the shortcut of"):
        second(x)
    for broken in (pair[:1], pair[1:], (*pair, pair[1])):
        with pytest.raises(ConfigError, match="joins the stream behind the next layer"):
            TransformerConfig("decoder", 40, 32, 64, broken)
    with pytest.raises(ConfigError, match="shortcut and joins_shortcut need"):
        LayerConfig(heads, plain, shortcut=mixture, parallel="one norm")
    assert not any(layer.only_adds for layer in pair)


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", [None, "own", "shared"])
@pytest.mark.parametrize("keeps_normed", [True, False])
def test_an_adapter_changes_the_sum_behind_the_network(placement, norm, keeps_normed):
    torch.manual_seed(0)
    heads, network = AttentionConfig(4, 2, 8), FeedForwardConfig(24)
    plain = LayerConfig(heads, network, norm_placement=placement)
    adapter = AdapterConfig(6, "silu", norm=norm, keeps_normed=keeps_normed)
    layer = TransformerLayer.from_config(32, replace(plain, adapter=adapter)).eval()
    own, x = layer.adapter, torch.randn(1, 5, 32)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    read = layer.feed_forward_norm if norm == "shared" else own.norm or torch.nn.Identity()
    with torch.no_grad():
        a = layer.attention(layer.attention_norm(x) if placement == "pre" else x, mask=Causal())
        h = x + a if placement == "pre" else layer.attention_norm(x + a)
        normed = layer.feed_forward_norm(h) if placement == "pre" else h
        total = h + layer.feed_forward(normed)
        n = read(total)
        made = own.down_proj(torch.nn.functional.silu(own.up_proj(n)))
        want = (n if keeps_normed else total) + made
        want = want if placement == "pre" else layer.feed_forward_norm(want)
        torch.testing.assert_close(layer(x, mask=Causal()), want)
        cache = DenseCache()
        steps = [layer(part, mask=Causal(), cache=cache) for part in x.split([3, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(steps, dim=1), want)
    assert not layer.config.only_adds
    with pytest.raises(ConfigError, match="an adapter is behind a feed_forward network with a"):
        LayerConfig(heads, network, norm_placement="after", adapter=adapter)


@pytest.mark.parametrize("placement", ["pre", "sandwich"])
@pytest.mark.parametrize("both", [True, False])
def test_what_norms_before_the_parts_give_may_be_gated(placement, both):
    torch.manual_seed(0)
    heads, network = AttentionConfig(4, 2, 8), FeedForwardConfig(24)
    plain = LayerConfig(heads, network, norm_placement=placement)
    gate = NormGateConfig(6, feed_forward=both)
    layer = TransformerLayer.from_config(32, replace(plain, norm_gate=gate)).eval()
    bare, x = TransformerLayer.from_config(32, plain).eval(), torch.randn(1, 5, 32)
    assert bare.load_state_dict(layer.state_dict(), strict=False).missing_keys == []

    def gated(module, _, y):
        own = layer.attention_norm_gate if module is bare.attention_norm else None
        own = layer.feed_forward_norm_gate if own is None and both else own
        if own is None:
            return y
        low = torch.nn.functional.silu(y @ own.down_proj.weight.T)
        return y * torch.sigmoid(low @ own.up_proj.weight.T)

    bare.attention_norm.register_forward_hook(gated)
    bare.feed_forward_norm.register_forward_hook(gated)
    with torch.no_grad():
        want = bare(x, mask=Causal())
        torch.testing.assert_close(layer(x, mask=Causal()), want)
        cache = DenseCache()
        steps = [layer(part, mask=Causal(), cache=cache) for part in x.split([3, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(steps, dim=1), want)
    assert "NormGate" in str(layer)
    with pytest.raises(UnsupportedError, match="NormGate"):
        check_classes(layer, "context")
    counted = sum(group.count for group in layer.config.parameter_groups(32))
    assert counted == sum(each.numel() for each in layer.parameters())


@pytest.mark.parametrize(
    "around", [{"norm_placement": "post"}, {"parallel": "two norms"}, {"attention_norm": False}]
)
def test_gates_of_norms_need_norms_before_the_parts(around):
    heads, network = AttentionConfig(4, 2, 8), FeedForwardConfig(24)
    with pytest.raises(ConfigError, match="norm_gate needs norms before attention and"):
        LayerConfig(heads, network, norm_gate=NormGateConfig(6), **around)
    with pytest.raises(ConfigError, match="norm_gate rank must be a whole number"):
        NormGateConfig(0)


def _holding(given: torch.Tensor) -> Handed:
    return Handed(1, {(0, SHORTCUT): given})
