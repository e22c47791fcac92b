"""Layers that convolve keys, values and what their parts give: transformers' modules, caches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import InklingTextConfig
from transformers.models.inkling.modeling_inkling import (
    InklingAttention,
    InklingDecoderLayer,
    InklingMoE,
    InklingShortConvolution,
)

import polyhead as ph
from polyhead.caches import LayerCache, ModelCache
from polyhead.caches.layer_cache import Packing
from polyhead.checkpoints.tokenizers.no_tokenizer import NoTokenizer
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    QueryTemperatureConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.generation import GenerationOptions
from polyhead.generation.decoding.batch import continued
from polyhead.layers import (
    DistanceProfilesAttention,
    DistanceProfilesAttentionConfig,
    ShortConvolutionConfig,
    TransformerLayer,
    WeighedSharedConfig,
    WeighedSharedExperts,
)
from polyhead.layers.causal_convolution import CausalConvolution
from polyhead.models import Transformer
from polyhead.training import loss

E, T = 24, 31
NORM = NormConfig(eps=1e-6)
FULL = DistanceProfilesAttentionConfig(
    4, 2, 8, qk_norm=QKNormConfig(NORM), scale=1 / 8, profiles=5, extent=9,
    query_temperature=QueryTemperatureConfig(0.4, 6, offset=1, steps=False),
)  # fmt: skip
NEAR = replace(FULL, query_temperature=None, window=7, extent=7, num_kv_heads=1, conv_kernel=3)
NETWORK = FeedForwardConfig(20)
MIXTURE = WeighedSharedConfig(
    FeedForwardConfig(12), 6, 2, scoring="sigmoid", choice_bias=True, normalize=True, scale=1.7,
    num_shared=3,
)  # fmt: skip
ATTENTIONS = {"full": FULL, "window": NEAR}
each_attention = pytest.mark.parametrize("kind", ATTENTIONS)


def theirs(kind: str, **changed: Any) -> InklingTextConfig:
    own = ATTENTIONS[kind]
    return InklingTextConfig(
        hidden_size=E, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=1, swa_head_dim=8,
        sliding_window_size=7, d_rel=5, rel_extent=9, log_scaling_n_floor=6,
        log_scaling_alpha=0.4, conv_kernel_size=own.conv_kernel, intermediate_size=20,
        moe_intermediate_size=12, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=3,
        route_scale=1.7, attn_implementation="eager", mlp_layer_types=["dense"],
        layer_types=["hybrid" if kind == "full" else "hybrid_sliding"], **changed,
    )  # fmt: skip


def randomised(module: nn.Module) -> Any:
    torch.manual_seed(3)
    for parameter in (*module.parameters(), *module.buffers()):
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return module.eval()


def attention_state(other: nn.Module) -> dict[str, Tensor]:
    names = {
        "r_proj.": "profile_proj.",
        "rel_logits_proj.proj": "profiles",
        "k_sconv.conv1d.": "k_convolution.",
        "v_sconv.conv1d.": "v_convolution.",
    }
    state = {}
    for name, tensor in other.state_dict().items():
        for before, after in names.items():
            name = name.replace(before, after)
        state[name] = tensor.squeeze(1) if "convolution" in name else tensor
    return state


def tokens(B: int = 2, length: int = T) -> Tensor:
    return torch.randn(B, length, E, generator=torch.Generator().manual_seed(length))


def mask_of(kind: str) -> Tensor:
    at = torch.arange(T)
    back = at[:, None] - at
    hidden = (back < 0) | (back >= (ATTENTIONS[kind].window or T))
    return torch.zeros(T, T).masked_fill(hidden, -torch.inf)[None, None]


def test_a_convolution_is_that_of_transformers() -> None:
    config = SimpleNamespace(width=6, tokens=4)
    other = randomised(InklingShortConvolution(config.width, config.tokens, 0, 0))
    mine = CausalConvolution(config.width, config.tokens, "inputs")
    mine.load_state_dict({"weight": other.conv1d.weight.squeeze(1)})
    x = torch.randn(2, 9, config.width)
    torch.testing.assert_close(mine(x, Packing(None)), other(x))
    bound = config.tokens**-0.5
    mine.reset_parameters()
    assert 0.5 * bound < mine.weight.abs().max() <= bound


@each_attention
def test_attention_is_that_of_transformers(kind: str) -> None:
    other = randomised(InklingAttention(theirs(kind), 0))
    mine = DistanceProfilesAttention.from_config(E, ATTENTIONS[kind]).eval()
    mine.load_state_dict(attention_state(other))
    x = tokens()
    wanted = other(x, attention_mask=mask_of(kind))[0]
    torch.testing.assert_close(mine(x, mask=ph.Causal()), wanted)


def test_experts_and_the_shares_of_those_that_are_shared_are_transformers() -> None:
    other = randomised(InklingMoE(theirs("full")))
    mine = WeighedSharedExperts(E, MIXTURE).eval()
    state = other.state_dict()
    named = {
        "router.weight": state["gate.weight"],
        "choice_bias": state["gate.e_score_correction_bias"],
    }
    for j in range(MIXTURE.num_experts):
        gate, up = state["experts.gate_up_proj"][j].chunk(2)
        named |= {f"experts.{j}.gate_proj.weight": gate, f"experts.{j}.up_proj.weight": up}
        named[f"experts.{j}.down_proj.weight"] = state["experts.down_proj"][j]
    for j in range(MIXTURE.num_shared):
        for name in ("gate_proj", "up_proj", "down_proj"):
            named[f"experts.{6 + j}.{name}.weight"] = state[f"shared_experts.{name}"][j]
    mine.load_state_dict(named)
    x, scale = tokens(), state["gate.global_scale"]
    wanted = other(x)
    torch.testing.assert_close(mine(x) * scale, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine(x[:1, :1]) * scale, wanted[:1, :1], atol=1e-5, rtol=1e-5)
    mine.calls_all = True
    torch.testing.assert_close(mine(x) * scale, wanted, atol=1e-5, rtol=1e-5)
    weights, chosen = mine.route(x.flatten(0, 1))
    torch.testing.assert_close(weights.sum(-1) / 1.7, torch.ones(2 * T))
    assert (chosen[:, 2:] == torch.tensor([6, 7, 8])).all()
    assert int(chosen[:, :2].max()) < 6


def layer_config(kind: str, network: Any = NETWORK) -> LayerConfig:
    own = ATTENTIONS[kind]
    return LayerConfig(own, network, NORM, out_convolution=own.conv_kernel, feed_forward_scale=True)


def layer(kind: str, dtype: torch.dtype = torch.float64) -> TransformerLayer:
    made = TransformerLayer.from_config(E, layer_config(kind))
    return randomised(made).to(dtype)


@each_attention
def test_a_layer_and_its_gradients_are_transformers(kind: str) -> None:
    other, mine = randomised(InklingDecoderLayer(theirs(kind), 0)), layer(kind, torch.float32)
    names = {
        "input_layernorm.weight": "attention_norm.weight",
        "post_attention_layernorm.weight": "feed_forward_norm.weight",
        "attn_sconv.conv1d.weight": "attention_convolution.weight",
        "mlp_sconv.conv1d.weight": "feed_forward_convolution.weight",
        "mlp.global_scale": "feed_forward_scale",
    }

    def named(found: dict[str, Tensor]) -> dict[str, Tensor]:
        inside = {n[10:]: x for n, x in found.items() if n.startswith("self_attn.")}
        holder = SimpleNamespace(state_dict=lambda: inside)
        made = {f"attention.{n}": x for n, x in attention_state(holder).items()}  # type: ignore[arg-type]
        for name, x in found.items():
            if not name.startswith("self_attn."):
                ours = names.get(name, name.replace("mlp.", "feed_forward."))
                made[ours] = x.squeeze(1) if "convolution" in ours else x
        return made

    mine.load_state_dict(named(other.state_dict()))
    x = tokens()
    wanted, got = other(x, attention_mask=mask_of(kind)), mine(x, mask=ph.Causal())
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    for made in (wanted, got):
        made.square().mean().backward()
    gradients = named({n: x.grad for n, x in other.named_parameters()})
    for name, parameter in mine.named_parameters():
        most = 1e-4 * float(gradients[name].abs().max())
        torch.testing.assert_close(parameter.grad, gradients[name], atol=most, rtol=1e-3)


@each_attention
@torch.no_grad()
def test_chunks_through_a_cache_equal_one_pass(kind: str) -> None:
    mine, x = layer(kind), tokens().double()
    whole = mine(x, mask=ph.Causal())
    config = mine.config
    kept = (*config.attention.memories, *config.out_memories(E))
    cache = LayerCache(kept, spare=3)
    parts = x.split([11, 1, 1, 5, 13], dim=1)
    found = [mine(part, mask=ph.Causal(), cache=cache) for part in parts]
    torch.testing.assert_close(torch.cat(found, dim=1), whole)
    fork = cache.fork()
    cache.rollback(3)
    again = mine(x[:, T - 3 :], mask=ph.Causal(), cache=cache)
    torch.testing.assert_close(again, whole[:, T - 3 :])
    assert fork.length == T
    fork.reorder([1, 1])
    more = tokens(2, 2).double()
    alone = mine(torch.cat((x[1:].expand(2, T, E), more), dim=1), mask=ph.Causal())[:, T:]
    torch.testing.assert_close(mine(more, mask=ph.Causal(), cache=fork), alone)


@each_attention
@torch.no_grad()
def test_rows_with_padding_equal_rows_alone(kind: str) -> None:
    mine, x = layer(kind), tokens(2, 12).double()
    right = mine(x, mask=ph.Causal() & ph.KeyLengths([7, 12]))
    torch.testing.assert_close(right[:1, :7], mine(x[:1, :7], mask=ph.Causal()))
    positions = torch.arange(12).expand(2, 12).clone()
    positions[0] = torch.where(positions[0] < 5, -1, positions[0] - 5)
    memories = (*mine.config.attention.memories, *mine.config.out_memories(E))
    cache = LayerCache(memories)
    left = mine(x, mask=ph.Causal(), positions=positions, cache=cache)
    torch.testing.assert_close(left[:1, 5:], mine(x[:1, 5:], mask=ph.Causal()))
    torch.testing.assert_close(left[1:], mine(x[1:], mask=ph.Causal()))
    uncached = mine(x, mask=ph.Causal(), positions=positions)
    torch.testing.assert_close(uncached[0, 5:], left[0, 5:])
    torch.testing.assert_close(uncached[1], left[1])
    assert cache.lengths == [7, 12]
    more = tokens(2, 1).double()
    last = mine(more, mask=ph.Causal(), cache=cache)
    for row, first in ((0, 5), (1, 0)):
        alone = torch.cat((x[row : row + 1, first:], more[row : row + 1]), dim=1)
        torch.testing.assert_close(last[row], mine(alone, mask=ph.Causal())[0, -1:])


@torch.no_grad()
def test_padding_before_a_text_is_no_input_of_a_convolution() -> None:
    mine, x = CausalConvolution(E, 4, "inputs"), tokens(2, 9)
    padding = torch.arange(9) < torch.tensor([[3], [0]])
    found = mine(x, Packing(padding))
    torch.testing.assert_close(found[0, 3:], mine(x[:1, 3:], Packing(None))[0])
    torch.testing.assert_close(found[1], mine(x[1:], Packing(None))[0])


@torch.no_grad()
def test_a_layer_that_fails_leaves_all_that_it_remembers_as_it_was() -> None:
    mine, x = layer("full"), tokens().double()
    cache = LayerCache((*FULL.memories, *mine.config.out_memories(E)))
    mine(x[:, :20], mask=ph.Causal(), cache=cache)

    def fail(*_: Any) -> None:
        raise RuntimeError("interrupted")

    with mine.feed_forward.register_forward_hook(fail), pytest.raises(RuntimeError):  # type: ignore[union-attr]
        mine(x[:, 20:25], mask=ph.Causal(), cache=cache)
    assert cache.lengths == [20, 20]
    found = mine(x[:, 20:], mask=ph.Causal(), cache=cache)
    torch.testing.assert_close(found, mine(x, mask=ph.Causal())[:, 20:])
    with pytest.raises(ValueError, match="'attention_out' has not had all tokens"):
        mine.attention(x[:, :1], mask=ph.Causal(), cache=cache)
    assert cache.lengths == [T, T]


def config() -> TransformerConfig:
    layers = (
        layer_config("full"),
        layer_config("window", MIXTURE),
        LayerConfig(AttentionConfig(4, 2, 8), NETWORK, feed_forward_scale=True),
        LayerConfig(
            ShortConvolutionConfig(width=E), NETWORK, norm_placement="sandwich", out_convolution=2
        ),
    )
    return TransformerConfig("decoder", 50, E, 64, layers, head="untied", unused_ids=6)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["auto", "paged"])
def test_planned_bytes_and_parameters_are_those_held(kind: Any, tmp_path: Any) -> None:
    made = TransformerConfig.from_json(config().to_json())
    assert made == config()
    model = randomised(Transformer(made))
    page = 4 if kind == "paged" else None
    plan = ph.plan(made, tokens=40, batch_size=2, dtype="float32", page_size=page)
    assert plan.parameters.total == model.parameter_counts().total
    cache = model.new_cache(capacity=40, kind=kind, page_size=page or 16)
    ids = torch.randint(50, (2, 40))
    whole = model(ids)
    parts = [model(part, cache=cache) for part in ids.split([30, 1, 9], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)
    assert cache.bytes == plan.cache_bytes
    cache.save(tmp_path / "cache.safetensors")
    other = model.new_cache(kind=kind, page_size=page or 16)
    other.load(tmp_path / "cache.safetensors")
    assert torch.equal(model(ids[:, :1], cache=other), model(ids[:, :1], cache=cache))
    assert isinstance(ModelCache.for_config(made).layers[0], LayerCache)
    assert "modules" in model.decode_plan(cache).explain()


@torch.no_grad()
def test_rows_of_different_lengths_decode_together() -> None:
    model = randomised(Transformer(config()))
    ids = torch.randint(50, (2, 12))
    cache = model.new_cache(spare=4)
    model(ids[:, :9], cache=cache)
    cache.rollback([4, 0])
    found = model(ids[:, 9:10], cache=cache)
    for row, length in ((0, 5), (1, 9)):
        alone = torch.cat((ids[row, :length], ids[row, 9:10]))[None]
        torch.testing.assert_close(found[row], model(alone)[0, -1:], atol=1e-4, rtol=1e-4)


def test_ids_without_logits_take_no_part() -> None:
    model = randomised(Transformer(config()))
    ids = torch.randint(44, (2, 12))
    logits = model(ids)
    assert logits.shape == (2, 12, 44)
    assert len(model.unembedding) == 44
    for options in ({}, {"label_smoothing": 0.1}):
        wanted = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), **options
        )
        found = loss(model, ids, ids, **options)
        torch.testing.assert_close(found, wanted)
    for wrong, words in (
        ({"num_beams": 45}, "num_beams must be at most 44"),
        ({"suppress_tokens": [47]}, "0 to 43: got 47"),
    ):
        with pytest.raises(ValueError, match=words):
            continued(
                model, NoTokenizer("a test"), [[1]], GenerationOptions(**wrong), frozenset(), (), {}
            )
    with pytest.raises(ValueError, match="tokens from 0 to 43: got 47"):
        loss(model, ids, torch.full_like(ids, 47))
    for changed in ({"head": None}, {"unused_ids": 50}, {"head_bias": True}):
        with pytest.raises(ConfigError, match="unused_ids need a head that is one matrix"):
            replace(config(), **changed)


def test_what_convolved_layers_cannot_do_is_refused_by_name() -> None:
    mine, x, causal = layer("full"), tokens().double(), ph.Causal()
    attention = mine.attention
    with pytest.raises(UnsupportedError, match="convolved keys cannot hide single tokens: got Win"):
        attention(x, mask=causal & ph.Window(2))
    with pytest.raises(UnsupportedError, match="its parts give cannot hide single tokens"):
        mine(x, mask=causal & ph.Documents([5, T - 5]))
    with pytest.raises(ValueError, match="over its own input: got a context"):
        attention(x, x)
    with pytest.raises(ValueError, match="a bias of its own"):
        attention(x, bias=ph.ALiBi(4))
    with pytest.raises(TypeError, match=r"must be a LayerCache.*got DenseCache"):
        attention(x, cache=ph.DenseCache())
    plain = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "profiles": 5, "extent": 9}
    for changed, words in (
        ({"alibi": ALiBiConfig()}, "profiles are the only bias"),
        ({"conv_kernel": 1}, "conv_kernel must be"),
        ({"profiles": 0}, "profiles must be"),
        ({"extent": 0}, "extent must be"),
    ):
        with pytest.raises(ConfigError, match=words):
            DistanceProfilesAttentionConfig(**plain | changed)
    good = layer_config("full")
    assert not good.only_adds
    assert not replace(good, out_convolution=None).only_adds
    for changed, words in (
        ({"attention": AttentionConfig(4, 2, 8)}, "more than keys and values: got GQA-2"),
        ({"out_convolution": 1}, "out_convolution must be"),
        ({"feed_forward": None}, "need a feed_forward network"),
        ({"parallel": "one norm"}, "parallel='one norm'"),
    ):
        with pytest.raises(ConfigError, match=words):
            replace(good, **changed)
    for changed, words in (
        ({"num_shared": 0}, "num_shared must be"),
        ({"groups": 2}, "in no groups"),
        ({"router_bias": True}, "without a bias of the router"),
        ({"scoring": "sparsemixer"}, "scoring='sparsemixer'"),
        ({"experts_per_token": 7}, "1 to the 6 experts"),
    ):
        with pytest.raises(ConfigError, match=words):
            replace(MIXTURE, **changed)
    assert isinstance(MIXTURE, MixtureConfig)
    with pytest.raises(ConfigError, match="power or steps=False: got both"):
        QueryTemperatureConfig(0.1, 4, power=True, steps=False)
