"""Layers that remember a state: transformers' layers, caches, models beside attention."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import polyhead as ph
from polyhead.caches import LayerCache, ModelCache
from polyhead.config import (
    FeedForwardConfig,
    HeadLayout,
    LayerConfig,
    NormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers import (
    GatedAttentionConfig,
    GatedDeltaNet,
    GatedDeltaNetConfig,
    HybridHeads,
    HybridHeadsConfig,
    KimiDeltaAttention,
    KimiDeltaAttentionConfig,
    LightningAttention,
    LightningAttentionConfig,
    Mamba,
    Mamba2,
    Mamba2Config,
    MambaConfig,
    MultiHeadAttention,
    RgLru,
    RgLruConfig,
    ShortConvolution,
    ShortConvolutionConfig,
)
from polyhead.layers.recurrent import RecurrentLayer
from polyhead.layers.registry import build_attention
from polyhead.models import Transformer

E = 24
CONFIG = GatedDeltaNetConfig(4, 2, head_k_dim=8, head_v_dim=6)


KINDS: dict[str, HeadLayout] = {
    "gated DeltaNet": CONFIG,
    "Kimi delta attention": KimiDeltaAttentionConfig(3, 3, 8, 8, gate_rank=5),
    "Mamba-2": Mamba2Config(4, 2, 8, 6),
    "Mamba-2, scaled": Mamba2Config(
        4, 2, 8, 6, norm_place="before", out_bias=True, in_scales=(0.5, 2.0, 0.7, 3.0, 0.9)
    ),
    "Mamba-2 without norm": Mamba2Config(4, 1, 8, 6, norm_place=None, bias=True, out_bias=False),
    "Mamba": MambaConfig(10, 4, 3),
    "Mamba with norms": MambaConfig(10, 4, 3, bias=True, norm=NormConfig()),
    "Mamba in groups": MambaConfig(10, 4, 3, num_groups=2),
    "Lightning attention": LightningAttentionConfig(4, 6, slope_scale=0.8),
    "RG-LRU": RgLruConfig(4, width=20, conv_kernel=3),
    "short convolution": ShortConvolutionConfig(width=20, conv_kernel=4, bias=True),
}
BESIDE = HybridHeadsConfig(
    4, 2, 8, rope=RopeConfig(), mamba=Mamba2Config(4, 2, 8, 6, norm_place=None),
    attention_scales=(0.9, 1.5), mamba_scales=(1.25, 0.7),
)  # fmt: skip
each_kind = pytest.mark.parametrize("kind", KINDS)


def layer(kind: str, dtype: torch.dtype = torch.float32) -> RecurrentLayer:
    torch.manual_seed(0)
    made = build_attention(E, KINDS[kind]).to(dtype).eval()
    assert isinstance(made, RecurrentLayer)
    return made


def delta_net(dtype: torch.dtype = torch.float32) -> GatedDeltaNet:
    torch.manual_seed(0)
    return GatedDeltaNet.from_config(E, CONFIG).to(dtype).eval()


def tokens(B: int, T: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, T, E, generator=torch.Generator().manual_seed(T)).to(dtype)


def theirs(mine: GatedDeltaNet) -> torch.nn.Module:
    """transformers' layer with the weights of ours, whose rows it groups by key head."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    c = mine.config
    config = SimpleNamespace(
        hidden_size=E, linear_num_value_heads=c.num_heads, linear_num_key_heads=c.num_key_heads,
        linear_key_head_dim=c.head_k_dim, linear_value_head_dim=c.head_v_dim,
        linear_conv_kernel_dim=c.conv_kernel, hidden_act="silu", rms_norm_eps=c.norm_eps,
        layer_types=["linear_attention"], dtype=torch.float32,
    )  # fmt: skip
    other = qwen3_next.Qwen3NextGatedDeltaNet(config, 0)
    G = c.num_key_heads

    def grouped(*names: str) -> Tensor:
        parts = [mine.get_submodule(name).weight.view(G, -1, E) for name in names]
        return torch.cat(parts, dim=1).flatten(0, 1)

    other.load_state_dict(
        {
            "in_proj_qkvz.weight": grouped("q_proj", "k_proj", "v_proj", "gate_proj"),
            "in_proj_ba.weight": grouped("beta_proj", "decay_proj"),
            "conv1d.weight": mine.conv_weight[:, None],
            "dt_bias": mine.dt_bias,
            "A_log": mine.A_log,
            "norm.weight": mine.norm.weight,
            "out_proj.weight": mine.o_proj.weight,
        }
    )
    return other.eval()


def test_it_equals_transformers_and_so_do_its_gradients():
    mine = delta_net()
    torch.nn.init.uniform_(mine.norm.weight, 0.5, 1.5)
    torch.nn.init.uniform_(mine.dt_bias, -1.0, 1.0)
    other, x = theirs(mine), tokens(2, 150)  # more than a chunk of 64
    found, wanted = mine(x, mask=ph.Causal()), other(x)
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=2e-5)
    exact = delta_net(torch.float64)
    exact.load_state_dict(mine.state_dict())
    best = exact(x.double(), mask=ph.Causal())
    for name in ("A_log", "dt_bias", "conv_weight"):
        theirs_name = {"conv_weight": "conv1d.weight"}.get(name, name)
        truth, ours, others = (
            torch.autograd.grad(y.square().sum(), weight, retain_graph=True)[0].flatten().double()
            for y, weight in (
                (best, exact.get_parameter(name)),
                (found, mine.get_parameter(name)),
                (wanted, other.get_parameter(theirs_name)),
            )
        )
        error = (others - truth).norm()
        assert error < 5e-3 * truth.norm()
        assert (ours - truth).norm() <= 2 * error + 1e-5 * truth.norm()
    with torch.no_grad():
        torch.testing.assert_close(mine(x, mask=ph.Causal()), wanted, atol=2e-6, rtol=2e-5)


@each_kind
@torch.no_grad()
def test_chunks_through_a_cache_equal_one_pass(kind):
    mine, x = layer(kind, torch.float64), tokens(2, 90, torch.float64)
    whole = mine(x, mask=ph.Causal())
    cache, done, found = LayerCache(mine.config.memories, spare=2), 0, []
    for count in (70, 1, 3, 1, 15):
        found.append(mine(x[:, done : done + count], mask=ph.Causal(), cache=cache))
        done += count
    torch.testing.assert_close(torch.cat(found, dim=1), whole, atol=1e-6, rtol=1e-6)
    fork = cache.fork()
    cache.rollback(2)
    again = mine(x[:, 88:], mask=ph.Causal(), cache=cache)
    torch.testing.assert_close(again, whole[:, 88:], atol=1e-6, rtol=1e-6)
    assert fork.length == 90
    fork.reorder([1])
    more = tokens(1, 1, torch.float64)
    alone = mine(torch.cat((x[1:], more), dim=1), mask=ph.Causal())[:, -1:]
    torch.testing.assert_close(
        mine(more, mask=ph.Causal(), cache=fork), alone, atol=1e-6, rtol=1e-6
    )


@each_kind
@torch.no_grad()
def test_rows_with_padding_equal_rows_alone(kind):
    mine, x = layer(kind), tokens(3, 12)
    x[0, 7:] = x[1, :5] = torch.nan
    lengths = torch.tensor([7, 12, 12])
    right = mine(x[::2], mask=ph.Causal() & ph.KeyLengths(lengths[::2]))
    alone = mine(x[:1, :7], mask=ph.Causal())
    torch.testing.assert_close(right[:1, :7], alone)
    assert right.isfinite().all()
    positions = torch.arange(12).expand(2, 12).clone()
    positions[0] = torch.where(positions[0] < 5, -1, positions[0] - 5)
    left = mine(x[1:], mask=ph.Causal(), positions=positions)
    alone = mine(x[1:2, 5:], mask=ph.Causal())
    torch.testing.assert_close(left[:1, 5:], alone)
    cache = LayerCache(mine.config.memories)
    cached = mine(x[1:], mask=ph.Causal(), positions=positions, cache=cache)
    torch.testing.assert_close(cached, left)
    assert cache.lengths == [7, 12]
    last = mine(tokens(2, 1), mask=ph.Causal(), cache=cache)
    row = mine(torch.cat((x[1:2, 5:], tokens(2, 1)[:1]), dim=1), mask=ph.Causal())[:, -1:]
    torch.testing.assert_close(last[:1], row)


def hybrid() -> TransformerConfig:
    """Qwen3-Next's pattern: attention after every third state."""
    full = GatedAttentionConfig(4, 2, 8, rope=RopeConfig(dim=4))
    network = FeedForwardConfig(40, "silu", gated=True, bias=False)
    kinds = *KINDS.values(), full
    layers = [LayerConfig(attention, network) for attention in kinds]
    layers += [
        LayerConfig(BESIDE, network),
        LayerConfig(KINDS["Mamba-2"], None),
        LayerConfig(full, None, norm_placement="after"),
    ]
    return TransformerConfig("decoder", 50, E, 256, tuple(layers))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["auto", "paged"])
def test_a_model_of_states_and_attention_decodes_as_in_one_pass(kind):
    config = TransformerConfig.from_json(hybrid().to_json())
    assert config == hybrid()
    torch.manual_seed(0)
    model = Transformer(config).eval()
    ids = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(0))
    whole, cache = model(ids), model.new_cache(kind=kind, spare=1)
    parts = [model(part, cache=cache) for part in ids.split([30, 1, 1, 8], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
    cache.rollback(1)
    torch.testing.assert_close(model(ids[:, -1:], cache=cache), whole[:, -1:], atol=1e-5, rtol=1e-5)
    assert "modules" in model.decode_plan(cache).explain()


@torch.no_grad()
def test_planned_bytes_and_parameters_are_those_held(tmp_path):
    config = hybrid()
    model = Transformer(config).eval()
    plan = ph.plan(config, tokens=40, batch_size=2, dtype="float32")
    assert plan.parameters.total == sum(p.numel() for p in model.parameters())
    cache = model.new_cache(capacity=40)
    ids = torch.randint(50, (2, 40))
    model(ids, cache=cache)
    assert cache.bytes == plan.cache_bytes
    cache.save(tmp_path / "cache.safetensors")
    other = model.new_cache()
    other.load(tmp_path / "cache.safetensors")
    assert torch.equal(model(ids[:, :1], cache=other), model(ids[:, :1], cache=cache))


def test_what_a_state_cannot_do_is_refused_by_name():
    mine, x, causal = delta_net(), tokens(1, 3), ph.Causal()
    with pytest.raises(ValueError, match="is causal: got mask=None; pass mask=Causal"):
        mine(x)
    with pytest.raises(UnsupportedError, match=r"cannot hide single tokens: got Window"):
        mine(x, mask=causal & ph.Window(2))
    with pytest.raises(UnsupportedError, match="takes no context: got a context"):
        mine(x, x, mask=causal)
    with pytest.raises(TypeError, match=r"must be a LayerCache.*got DenseCache"):
        mine(x, mask=causal, cache=ph.DenseCache())
    with (
        mine.register_attention_hook(lambda record: None),
        pytest.raises(UnsupportedError, match="recurrence_rows"),
    ):
        mine(x, mask=causal)
    with pytest.raises(ConfigError, match="num_key_heads must divide num_heads"):
        dataclasses.replace(CONFIG, num_key_heads=3)
    with pytest.raises(ConfigError, match="no rotary positions"):
        dataclasses.replace(CONFIG, rope=RopeConfig())
    with pytest.raises(ConfigError, match="a short convolution has one head and no rope"):
        ShortConvolutionConfig(2, width=4)
    with pytest.raises(ConfigError, match="conv_kernel must be a whole number"):
        ShortConvolution(E, conv_kernel=1)
    with pytest.raises(ConfigError, match="a key for each state: got num_key_heads=2"):
        KimiDeltaAttentionConfig(4, 2, 8, 8)
    with pytest.raises(ConfigError, match="num_groups must divide num_heads"):
        Mamba2(E, 4, 8, 8, num_groups=3)
    with pytest.raises(ConfigError, match=r"dt_max must be at least dt_min=0.5"):
        Mamba2Config(4, 2, 8, 6, dt_min=0.5, dt_max=0.25)
    with pytest.raises(ConfigError, match="in_scales must be 5 factors"):
        Mamba2Config(4, 2, 8, 6, in_scales=(1.0,))
    with pytest.raises(ConfigError, match="Lightning attention has no rotary positions"):
        LightningAttentionConfig(4, 6, rope=RopeConfig())
    with pytest.raises(ConfigError, match="Mamba has no rotary positions"):
        MambaConfig(10, 4, 3, rope=RopeConfig())
    with pytest.raises(ConfigError, match="num_groups must divide 10 features: got 3"):
        MambaConfig(10, 4, 3, num_groups=3)
    with pytest.raises(ConfigError, match="no norms beside groups: got num_groups=2"):
        MambaConfig(10, 4, 3, norm=NormConfig(), num_groups=2)
    with pytest.raises(ConfigError, match="num_heads must divide width: got num_heads=3, width=20"):
        RgLruConfig(3, width=20)
    with pytest.raises(ConfigError, match="RG-LRU has no rotary positions"):
        RgLruConfig(4, width=20, rope=RopeConfig())
    assert RgLru(E, 4).config == RgLruConfig(4, width=E)
    assert Mamba(E, 10).config == MambaConfig(10, 16, 2)
    assert KimiDeltaAttention(E, 2, 8).config.rank == 8
    assert isinstance(ModelCache.for_config(hybrid()).layers[0], LayerCache)
    assert issubclass(GatedDeltaNetConfig, HeadLayout)


@each_kind
@torch.no_grad()
def test_edits_of_heads_reach_the_output(kind):
    mine, x = layer(kind), tokens(1, 5)
    nothing = mine.o_proj.bias
    with mine.register_head_edit(torch.zeros_like):
        found = mine(x, mask=ph.Causal())
    assert torch.equal(found, torch.zeros_like(x) if nothing is None else nothing.expand_as(x))


@each_kind
@torch.no_grad()
def test_bits_do_not_depend_on_chunks_or_neighbours_in_batch_invariant_mode(kind):
    mine, x = layer(kind), tokens(2, 70)
    with ph.batch_invariant():
        whole = mine(x, mask=ph.Causal())
        assert torch.equal(mine(x[1:], mask=ph.Causal()), whole[1:])


def test_a_short_convolution_is_that_of_torch():
    mine, x = (
        ShortConvolution(E, width=20, conv_kernel=4, bias=True).double(),
        tokens(2, 9).double(),
    )
    b, c, h = mine.in_proj(x).chunk(3, dim=-1)
    padded = torch.nn.functional.pad(b * h, (0, 0, 3, 0))
    mixed = torch.nn.functional.conv1d(
        padded.mT, mine.conv_weight[:, None], mine.conv_bias, groups=20
    )
    torch.testing.assert_close(mine(x, mask=ph.Causal()), mine.o_proj(c * mixed.mT))
    loss = mine(x, mask=ph.Causal()).square().sum()
    assert all(grad.any() for grad in torch.autograd.grad(loss, [*mine.parameters()]))


@each_kind
def test_new_convolutions_and_decays_are_drawn_as_documented(kind):
    mine = layer(kind)
    if not hasattr(mine, "conv_weight"):
        return
    bound = mine.config.conv_kernel**-0.5
    assert 0.95 * bound < mine.conv_weight.abs().max() <= bound
    if kind.startswith("Mamba"):
        assert (mine.D == 1).all()
    if kind.startswith("Mamba-2"):
        torch.testing.assert_close(mine.A_log.exp(), torch.arange(1.0, 5.0))
    elif kind.startswith("Mamba"):
        torch.testing.assert_close(mine.A_log.exp(), torch.arange(1.0, 5.0).expand(10, 4))
    elif hasattr(mine, "A_log"):
        assert (mine.A_log.exp() <= 16).all()
    if hasattr(mine, "dt_bias"):
        assert (mine.dt_bias == 1).all()


@torch.no_grad()
def test_lightning_attention_is_that_of_minimax():
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    H, D = 4, 6
    torch.manual_seed(0)
    config = MiniMaxConfig(
        hidden_size=E, num_attention_heads=H, head_dim=D, num_hidden_layers=3, block_size=16,
        layer_types=["linear_attention"] * 3,
    )  # fmt: skip
    other = MiniMaxLightningAttention(config, 1).eval()
    mine = LightningAttention(E, H, D, slope_scale=1 - 1 / (2 + 1e-5) + 1e-5).eval()
    rows = other.qkv_proj.weight.view(H, 3, D, E)
    for i, name in enumerate("qkv"):
        mine.get_submodule(f"{name}_proj").weight.copy_(rows[:, i].flatten(0, 1))
    mine.gate_proj.weight.copy_(other.output_gate.weight)
    mine.o_proj.weight.copy_(other.out_proj.weight)
    x = tokens(2, 50)
    wanted = other(x, None, None)[0]
    torch.testing.assert_close(mine(x, mask=ph.Causal()), wanted, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_heads_beside_a_mixer_are_both_scaled_and_added():
    torch.manual_seed(0)
    mine = build_attention(E, BESIDE).double().eval()
    assert isinstance(mine, HybridHeads)
    x, causal = tokens(2, 30, torch.float64), ph.Causal()
    plain = MultiHeadAttention(E, 4, 2, head_dim=8, rope=RopeConfig(), bias=False).double()
    own = {name: each for name, each in mine.state_dict().items() if "mamba" not in name}
    plain.load_state_dict(own)
    want = 1.5 * plain(0.9 * x, mask=causal) + 0.7 * mine.mamba(1.25 * x, mask=causal)
    torch.testing.assert_close(mine(x, mask=causal), want)
    cache = LayerCache(BESIDE.memories, spare=1)
    parts = [mine(part, mask=causal, cache=cache) for part in x.split([20, 1, 3, 6], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), want, atol=1e-6, rtol=1e-6)
    cache.rollback(1)
    again = mine(x[:, -1:], mask=causal, cache=cache)
    torch.testing.assert_close(again, want[:, -1:], atol=1e-6, rtol=1e-6)
    alone = mine(x[:1, :7], mask=causal)
    short = mine(x, mask=causal & ph.KeyLengths(torch.tensor([7, 30])))
    torch.testing.assert_close(short[:1, :7], alone)
    with pytest.raises(TypeError, match=r"must be a LayerCache.*got DenseCache"):
        mine(x, mask=causal, cache=ph.DenseCache())
    with pytest.raises(UnsupportedError, match="takes no context"):
        mine(x, x, mask=causal)
    with pytest.raises(ConfigError, match="mamba_scales must be 2 factors"):
        dataclasses.replace(BESIDE, mamba_scales=(1.0,))
