"""Choices of attention, norms, networks and layers, each against its formula in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import Causal, DenseCache, Keep
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    QueryTemperatureConfig,
    RopeConfig,
)
from polyhead.errors import ConfigError
from polyhead.layers import MultiHeadAttention, TransformerLayer, build_norm
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.norms import HeadNorm
from polyhead.semantics import Chunk, Tokens, alibi_slopes

E, H, G, D, T = 24, 6, 2, 8, 13
BASE = AttentionConfig(H, G, D)
LAYER_NORM = NormConfig("layernorm", bias=True)


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.5)
    return module.double().eval()


def some_x(*shape: int) -> Tensor:
    made = torch.randn(*(shape or (2, T, E)), generator=torch.Generator().manual_seed(1))
    return made.double()


def by_formula(layer: MultiHeadAttention, x: Tensor, causal: bool = True) -> Tensor:
    """Attention of ``x`` from the parameters, in the order that the families compute it."""
    c = layer.config
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    norm = c.qk_norm
    if norm is not None and norm.place == "full_width":
        q, k = layer.q_norm(q), layer.k_norm(k)
    if c.qkv_clip is not None:
        q, k, v = (t.clamp(-c.qkv_clip, c.qkv_clip) for t in (q, k, v))
    v = v * c.value_scale
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (q, k, v))
    if norm is not None and norm.place == "before_rope":
        q, k = (
            n(t.transpose(1, 2)).transpose(1, 2) for n, t in ((layer.q_norm, q), (layer.k_norm, k))
        )
    if layer.rope is not None:
        q, k = layer.rope.apply(q), layer.rope.apply(k)
    if norm is not None and norm.place == "after_rope":
        q, k = layer.q_norm(q), layer.k_norm(k)
    at = torch.arange(x.shape[1]).double()
    if (t := c.query_temperature) is not None:
        grown = 1 + torch.floor((at + t.offset) / t.every)
        if not t.steps:
            grown = ((at + t.offset) / t.every).clamp(min=1)
        factor = 1 + t.scale * torch.log(grown)
        q = q * factor[:, None]
    k, v = (t.repeat_interleave(H // G, dim=1) for t in (k, v))
    scores = q @ k.mT / D**0.5
    back = at[:, None] - at
    if c.alibi is not None:
        slopes = [2 ** (-c.alibi.max_bias * (i + 1) / 4) for i in range(4)]
        slopes += [2 ** (-c.alibi.max_bias * (2 * i + 1) / 8) for i in range(2)]  # H = 6
        scores = scores - c.alibi.scale * torch.tensor(slopes)[:, None, None] * back.abs()
    hidden = back < 0 if causal else torch.zeros_like(back, dtype=torch.bool)
    if c.window is not None:
        hidden |= back >= c.window
        if c.window_ahead is not None:
            hidden |= -back > c.window_ahead
    if c.chunk is not None:
        hidden |= (at // c.chunk)[:, None] != at // c.chunk
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return layer.o_proj(out.transpose(1, 2).flatten(-2))


def same_gradients(module: nn.Module, got: Tensor, expected: Tensor) -> None:
    parameters = [*module.parameters()]
    weight = some_x(*got.shape)
    torch.testing.assert_close(
        torch.autograd.grad((got * weight).sum(), parameters),
        torch.autograd.grad((expected * weight).sum(), parameters),
    )


PER_HEAD = QKNormConfig(NormConfig("layernorm"), per_head=True)
L2 = QKNormConfig(NormConfig(weight=False), "after_rope")
WIDE = QKNormConfig(place="full_width")
CHOICES = {
    "keys without bias": {"qkv_bias": True, "k_bias": False},
    "clipped": {"qkv_clip": 0.7, "qk_norm": WIDE, "rope": RopeConfig()},
    "clipped, one rotation": {"qkv_clip": 0.7, "rope": RopeConfig()},
    "scaled values": {"value_scale": 0.7, "qkv_clip": 0.7, "rope": RopeConfig()},
    "alibi": {"alibi": ALiBiConfig(max_bias=6.0, scale=0.5)},
    "chunk": {"chunk": 5, "rope": RopeConfig(dim=4)},
    "query temperature": {"query_temperature": QueryTemperatureConfig(0.3, 4, 1)},
    "temperature of every token": {
        "query_temperature": QueryTemperatureConfig(0.3, 4, 1, steps=False)
    },
    "temperature and rope": {
        "query_temperature": QueryTemperatureConfig(0.3, 4),
        "rope": RopeConfig(),
    },
    "a norm for each head": {"qk_norm": PER_HEAD, "rope": RopeConfig()},
    "norms without weight": {"qk_norm": L2, "rope": RopeConfig()},
}


@pytest.mark.parametrize("choice", CHOICES)
def test_an_attention_equals_its_formula_and_decodes(choice: str) -> None:
    layer = randomised(MultiHeadAttention.from_config(E, replace(BASE, **CHOICES[choice])))
    x = some_x()
    got, expected = layer(x, mask=Causal()), by_formula(layer, x)
    torch.testing.assert_close(got, expected)
    same_gradients(layer, got, expected)
    cache = DenseCache()
    with torch.no_grad():
        parts = [layer(part, mask=Causal(), cache=cache) for part in x.split([5, 1, 1, 6], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)
        # Explicit positions are the same positions.
        torch.testing.assert_close(layer(x, mask=Causal(), positions=torch.arange(T)), expected)


def test_float32_decodes_by_native_code_with_the_same_numbers() -> None:
    """Rows of the few-rows path: biases that some projections have, clipping, one rotation."""
    for fields in CHOICES.values():
        layer = randomised(MultiHeadAttention.from_config(E, replace(BASE, **fields)))
        expected = by_formula(layer, some_x())
        layer, cache, x = layer.float(), DenseCache(), some_x().float()
        with torch.no_grad():
            parts = [layer(part, mask=Causal(), cache=cache) for part in x.split(3, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1).double(), expected, atol=2e-5, rtol=2e-5)


def test_a_window_of_two_sides_in_an_encoder() -> None:
    layer = randomised(MultiHeadAttention.from_config(E, replace(BASE, window=3, window_ahead=2)))
    got, expected = layer(some_x()), by_formula(layer, some_x(), causal=False)
    torch.testing.assert_close(got, expected)
    same_gradients(layer, got, expected)


def test_rounded_alibi_is_falcons() -> None:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    long = 700
    config = replace(BASE, alibi=ALiBiConfig(scale=D**-0.5, rounded=True))
    layer = randomised(MultiHeadAttention.from_config(E, config))
    theirs = build_alibi_tensor(torch.ones(1, long).long(), H, torch.float64).view(1, H, 1, long)
    x = some_x(1, long, E)
    plain = randomised(MultiHeadAttention.from_config(E, BASE))
    expected = plain(x, mask=Causal(), bias=theirs * D**-0.5)
    torch.testing.assert_close(layer(x, mask=Causal()), expected)
    with pytest.raises(ValueError, match="bias of its own"):
        layer(x, mask=Causal(), bias=theirs)


@pytest.mark.parametrize("heads", [1, 4, 6, 16, 20])
def test_alibi_slopes_are_mpts(heads: int) -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    theirs = build_mpt_alibi_tensor(heads, 9, alibi_bias_max=6).view(heads, 9)
    torch.testing.assert_close(theirs, alibi_slopes(heads, 6.0)[:, None] * torch.arange(-8.0, 1))


@pytest.mark.parametrize("grad", [True, False])
def test_chunks_are_a_range_that_kernels_agree_on(grad: bool) -> None:
    q, k = Tokens.of(4, shift=9), Tokens.of(13)
    at = torch.arange(13)
    seen = Chunk(5).visible(q, k, at.device).expand(1, 1, 4, 13)
    assert torch.equal(seen[0, 0], (at[9:, None] // 5) == at // 5)
    low, high, *_ = Chunk(5).range(q, k, at.device)
    assert torch.equal((at >= low[0, :, None]) & (at < high[0, :, None]), seen[0, 0])
    layer = randomised(MultiHeadAttention.from_config(E, replace(BASE, chunk=5))).float()
    other = randomised(MultiHeadAttention.from_config(E, BASE)).float()
    x, whole = some_x().float(), Tokens.of(T)
    keep = Keep((Causal() & Chunk(5)).visible(whole, whole, at.device))
    with torch.set_grad_enabled(grad):
        for kernel in ("auto", "native", "tiled"):
            torch.testing.assert_close(
                layer(x, mask=Causal(), kernel=kernel), other(x, mask=keep, kernel="tiled")
            )


def test_norms_by_their_formulas() -> None:
    x = some_x(3, H, D)
    bare = build_norm(D, NormConfig("layernorm", weight=False)).double()
    assert not [*bare.parameters()]
    torch.testing.assert_close(bare(x), F.layer_norm(x, (D,)))
    assert not [*build_norm(D, NormConfig(weight=False)).parameters()]
    shifted = build_norm(D, NormConfig("layernorm", bias=True, weight_offset=1.0)).double()
    torch.testing.assert_close(shifted(x), F.layer_norm(x, (D,)))  # as it is made
    randomised(shifted)
    expected = F.layer_norm(x, (D,), shifted.weight + 1.0, shifted.bias)
    torch.testing.assert_close(shifted(x), expected)
    for config in (LAYER_NORM, NormConfig(weight_offset=1.0)):
        per_head = randomised(HeadNorm(H, D, config))
        for head in range(H):
            one = build_norm(D, config).double()
            one.load_state_dict({name: p[head] for name, p in per_head.named_parameters()})
            torch.testing.assert_close(per_head(x)[:, head], one(x[:, head]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [LAYER_NORM, NormConfig(), NormConfig(weight_offset=1.0)])
def test_a_norm_for_each_head_is_that_norm_on_its_features(
    config: NormConfig, dtype: torch.dtype
) -> None:
    per_head = randomised(HeadNorm(H, D, config)).to(dtype)
    x = torch.randn(2, 5, 2 * H, D).to(dtype)[:, :, ::2]
    for head in range(H):
        one = build_norm(D, config).to(dtype)
        one.load_state_dict({name: p[head] for name, p in per_head.named_parameters()})
        with torch.no_grad():
            assert torch.equal(per_head(x)[:, :, head], one(x[:, :, head]))
        torch.testing.assert_close(per_head(x)[:, :, head], one(x[:, :, head]))


@pytest.mark.parametrize("name", ["relu2", "quick_gelu", "mish", "tanh", "xielu", "gelu_tanh"])
def test_activations_are_transformers(name: str) -> None:
    from transformers.activations import ACT2FN

    theirs = ACT2FN["gelu_new" if name == "gelu_tanh" else name]
    ours = randomised(FeedForward.from_config(E, FeedForwardConfig(40, name)))
    if name == "xielu":
        theirs = theirs.double()
        theirs.alpha_p.data, theirs.alpha_n.data = ours.xielu.alpha_p.data, ours.xielu.alpha_n.data
    x = some_x()
    expected = ours.down_proj(theirs(ours.gate_proj(x)) * ours.up_proj(x))
    torch.testing.assert_close(ours(x), expected)
    torch.testing.assert_close(
        randomised(FeedForward(E, 40, name, gated=False)).float()(x.float()[:, :2]).double(),
        (lambda n: n.double().down_proj(theirs(n.up_proj(x[:, :2]))))(
            randomised(FeedForward(E, 40, name, gated=False))
        )
        if name != "xielu"
        else randomised(FeedForward(E, 40, name, gated=False))(x[:, :2]),
        atol=1e-5,
        rtol=1e-5,
    )


def formula_of(layer: TransformerLayer, x: Tensor) -> Tensor:
    c = layer.config
    s, parts = c.residual_scale, layer._modules

    def a(y: Tensor) -> Tensor:
        return layer.attention(y, mask=Causal())

    f = layer.feed_forward
    if c.parallel == "one norm":
        n = parts["attention_norm"](x)
        return x + s * (a(n) + f(n))
    if c.parallel == "two norms":
        return x + s * (a(parts["attention_norm"](x)) + f(parts["feed_forward_norm"](x)))
    if c.norm_placement == "after":
        x = x + s * parts["attention_out_norm"](a(x))
        return x + s * parts["feed_forward_out_norm"](f(x))
    x = x + s * a(parts["attention_norm"](x) if c.attention_norm else x)
    made = f(parts["feed_forward_norm"](x))
    return x + s * (parts["feed_forward_out_norm"](made) if c.feed_forward_out_norm else made)


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_placement": "after"},
        {"parallel": "one norm"},
        {"parallel": "two norms", "residual_scale": 0.3},
        {"residual_scale": 0.22},
        {"attention_norm": False},
        {"feed_forward_out_norm": True, "residual_scale": 0.3},
    ],
    ids=str,
)
def test_a_layer_equals_its_formula_and_decodes(fields: dict) -> None:
    config = LayerConfig(replace(BASE, rope=RopeConfig()), FeedForwardConfig(40), **fields)
    layer = randomised(TransformerLayer.from_config(E, config))
    assert LayerConfig.from_json(config.to_json()) == config
    norms = [name for name, part in layer.named_children() if name.endswith("norm")]
    assert len(norms) == config.norms
    x = some_x()
    got, expected = layer(x, mask=Causal()), formula_of(layer, x)
    torch.testing.assert_close(got, expected)
    same_gradients(layer, got, expected)
    layer, x, cache = layer.float(), x.float(), DenseCache()
    with torch.no_grad():  # float32, where decoding has a native step
        parts = [layer(part, mask=Causal(), cache=cache) for part in x.split([6, 1, 1, 5], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1).double(), expected, atol=1e-4, rtol=1e-4)


def test_what_does_not_go_together_is_refused() -> None:
    network = FeedForwardConfig(40)
    for make, words in (
        (lambda: replace(BASE, window_ahead=2), "window_ahead needs a window"),
        (lambda: replace(BASE, window=2, chunk=3), "a window or a chunk"),
        (lambda: replace(BASE, chunk=0), "chunk must be a whole number of at least 1"),
        (lambda: replace(BASE, qkv_clip=0.0), "qkv_clip must be a finite number, above 0"),
        (lambda: QKNormConfig(place="full_width", per_head=True), "per_head"),
        (lambda: NormConfig(weight=False, weight_offset=1.0), "without weight"),
        (lambda: LayerConfig(BASE, network, parallel="one"), "parallel must be one of"),
        (
            lambda: LayerConfig(BASE, network, norm_placement="post", parallel="one norm"),
            "need norm_placement 'pre'",
        ),
        (lambda: FeedForwardConfig(40, "swish"), "activation must be one of"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()


def test_an_activation_with_parameters_is_not_assigned():
    network = FeedForward(8, 12, "silu")
    network.activation = "xielu"
    with pytest.raises(ValueError, match=r"'xielu' has parameters of its own.*built with 'silu'"):
        network(torch.randn(1, 2, 8))
