"""Gated, differential and normed attention as transformers' modules, in caches, probe and plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import BitNetConfig, DiffLlamaConfig, LagunaConfig, Qwen3NextConfig
from transformers.models.bitnet.modeling_bitnet import (
    BitNetAttention,
    BitNetRotaryEmbedding,
)
from transformers.models.diffllama.modeling_diffllama import (
    DiffLlamaAttention,
    DiffLlamaRotaryEmbedding,
)
from transformers.models.laguna.modeling_laguna import LagunaAttention, LagunaRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextAttention,
    Qwen3NextRotaryEmbedding,
)

import polyhead as ph
from polyhead import native
from polyhead.caches import DenseCache, LatentCache, ModelCache
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    Memory,
    MixtureConfig,
    NormConfig,
    PerToken,
    QKNormConfig,
    RopeConfig,
    State,
    Tail,
    TransformerConfig,
    first_lambda,
)
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.interpret.pruning import prune
from polyhead.layers import (
    DifferentialAttention,
    DifferentialAttentionConfig,
    GatedAttention,
    GatedAttentionConfig,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    SubNormAttention,
    SubNormAttentionConfig,
    SubNormFeedForward,
    SubNormFeedForwardConfig,
)
from polyhead.models import Transformer

E, D, T = 48, 16, 13
KINDS: dict[str, Callable[[], nn.Module]] = {
    "heads": lambda: MultiHeadAttention(E, 4),
    "latent": lambda: MultiHeadLatentAttention(
        E, 4, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    ),
    "gated": lambda: GatedAttention(E, 4),
    "differential": lambda: DifferentialAttention(E, 4, 2),
    "sub-norm": lambda: SubNormAttention(E, 4, 2),
    "layer": lambda: ph.TransformerLayer(E, 4),
    "layer in evaluation": lambda: ph.TransformerLayer(E, 4).eval(),
}
"""What takes the cache of one layer."""


class Pair(NamedTuple):
    """A layer of ours, and theirs with the same weights as a function of x."""

    ours: MultiHeadAttention
    theirs: nn.Module
    run: Callable[[Tensor], Tensor]


def run(module: nn.Module, rotary: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        tokens = x.shape[1]
        hidden = torch.full((tokens, tokens), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        tables = rotary(x, torch.arange(tokens)[None])
        out: Tensor = module(x, position_embeddings=tables, attention_mask=hidden)[0]
        return out

    return call


def differential(H: int = 4, G: int = 2, bias: bool = False, layer: int = 3) -> Pair:
    config = DiffLlamaConfig(
        hidden_size=E, num_attention_heads=H, num_key_value_heads=G, head_dim=D,
        attention_bias=bias, attn_implementation="eager",
    )  # fmt: skip
    theirs = DiffLlamaAttention(config, layer)
    ours = DifferentialAttention.from_config(
        E,
        DifferentialAttentionConfig(
            H, G, D, qkv_bias=bias, out_bias=bias, rope=RopeConfig(),
            lambda_init=first_lambda(layer),
        ),
    )  # fmt: skip
    ours.load_state_dict(theirs.state_dict())
    return Pair(ours, theirs, run(theirs, DiffLlamaRotaryEmbedding(config)))


def gated(H: int = 4, G: int = 2, bias: bool = False) -> Pair:
    config = Qwen3NextConfig(
        hidden_size=E, num_attention_heads=H, num_key_value_heads=G, head_dim=D,
        attention_bias=bias, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    theirs = Qwen3NextAttention(config, 0)
    for norm in (theirs.q_norm, theirs.k_norm):
        nn.init.normal_(norm.weight, std=0.3)
    norm = NormConfig(eps=config.rms_norm_eps, weight_offset=1.0)
    ours = GatedAttention.from_config(
        E,
        GatedAttentionConfig(
            H, G, D, qkv_bias=bias, out_bias=bias, rope=RopeConfig(dim=D // 4),
            qk_norm=QKNormConfig(norm),
        ),
    )  # fmt: skip
    state = theirs.state_dict()
    for leaf in ("weight", "bias") if bias else ("weight",):
        both = state[f"q_proj.{leaf}"].view(H, 2, D, -1)
        shape = (H * D, E) if leaf == "weight" else (H * D,)
        state[f"q_proj.{leaf}"] = both[:, 0].reshape(shape)
        state[f"gate_proj.{leaf}"] = both[:, 1].reshape(shape)
    ours.load_state_dict(state)
    return Pair(ours, theirs, run(theirs, Qwen3NextRotaryEmbedding(config)))


def sub_norm(H: int = 4, G: int = 2, bias: bool = False) -> Pair:
    config = BitNetConfig(
        hidden_size=E, num_attention_heads=H, num_key_value_heads=G, head_dim=D,
        attention_bias=bias, attn_implementation="eager", rope_parameters={"rope_theta": 1e4},
    )  # fmt: skip
    theirs = BitNetAttention(config, 0)
    # Over all heads, also where they are not E features together; transformers' own norm computes
    # in float32, whatever it is given.
    theirs.attn_sub_norm = nn.RMSNorm(H * D, config.rms_norm_eps)
    nn.init.normal_(theirs.attn_sub_norm.weight)
    ours = SubNormAttention.from_config(
        E,
        SubNormAttentionConfig(
            H, G, D, qkv_bias=bias, out_bias=bias, rope=RopeConfig(),
            out_norm=NormConfig(eps=config.rms_norm_eps),
        ),
    )  # fmt: skip
    state = theirs.state_dict()
    state["out_norm.weight"] = state.pop("attn_sub_norm.weight")
    ours.load_state_dict(state)
    return Pair(ours, theirs, run(theirs, BitNetRotaryEmbedding(config)))


def gated_by_head(H: int = 4, G: int = 2, bias: bool = False) -> Pair:
    config = LagunaConfig(
        hidden_size=E, num_attention_heads=H, num_key_value_heads=G, head_dim=D,
        num_hidden_layers=1, attention_bias=bias, attn_implementation="eager",
    )  # fmt: skip
    theirs = LagunaAttention(config, 0, H)
    norm = NormConfig(eps=config.rms_norm_eps)
    ours = GatedAttention.from_config(
        E,
        GatedAttentionConfig(
            H, G, D, qkv_bias=bias, out_bias=bias, rope=RopeConfig(500_000.0, dim=D // 2),
            qk_norm=QKNormConfig(norm), gate="softplus", gate_per="head", gate_bias=False,
        ),
    )  # fmt: skip
    state = theirs.state_dict()
    state["gate_proj.weight"] = state.pop("g_proj.weight")
    ours.load_state_dict(state)
    rotary = LagunaRotaryEmbedding(config)
    return Pair(ours, theirs, run(theirs, partial(rotary, layer_type="full_attention")))


PAIRS: dict[str, Callable[..., Pair]] = {
    "differential": differential,
    "gated": gated,
    "sub-norm": sub_norm,
    "gated by head": gated_by_head,
}
pairs = pytest.mark.parametrize("name", PAIRS)


def tokens(length: int = T, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, length, E, dtype=dtype)


@pairs
@settings(max_examples=12, deadline=None)
@given(
    heads=st.sampled_from([(2, 2), (4, 2), (4, 4), (8, 2), (12, 4)]),
    bias=st.booleans(),
    chunks=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_outputs_are_those_of_transformers_in_one_pass_and_through_a_cache(
    name: str, heads: tuple[int, int], bias: bool, chunks: list[int]
) -> None:
    torch.manual_seed(sum(chunks))
    pair = PAIRS[name](*heads, bias)
    x = tokens(sum(chunks))
    with torch.no_grad():
        expected = pair.run(x)
        bound = 5e-5 * float(expected.std())
        torch.testing.assert_close(pair.ours(x, mask=ph.Causal()), expected, atol=bound, rtol=0)
        cache = ph.DenseCache()
        parts = [pair.ours(part, mask=ph.Causal(), cache=cache) for part in x.split(chunks, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), expected, atol=bound, rtol=0)
    assert cache.used_bytes == 2 * len(x[0]) * heads[1] * 2 * D * 4  # k and v once


@pairs
def test_gradients_are_those_of_transformers(name: str) -> None:
    torch.manual_seed(0)
    pair = PAIRS[name](bias=True)
    ours, theirs, call = pair.ours.double(), pair.theirs.double(), pair.run
    x = tokens(dtype=torch.float64).requires_grad_()
    expected = torch.autograd.grad(call(x).sin().sum(), [x, *theirs.parameters()])
    out = ours(x, mask=ph.Causal())
    named = dict(ours.named_parameters())
    found = torch.autograd.grad(out.sin().sum(), [x, *named.values()])
    by_name = dict(zip(named, found[1:], strict=True))
    torch.testing.assert_close(found[0], expected[0])
    for (key, _), gradient in zip(theirs.named_parameters(), expected[1:], strict=True):
        renamed = key.replace("attn_sub_norm", "out_norm").replace("g_proj", "gate_proj")
        made = by_name[renamed]
        if name == "gated" and key.startswith("q_proj"):
            gate = by_name[key.replace("q_proj", "gate_proj")]
            both = torch.stack((made.view(4, D, -1), gate.view(4, D, -1)), dim=1)
            made = both.reshape(gradient.shape)
        torch.testing.assert_close(made, gradient, atol=1e-6, rtol=1e-4)


@pairs
def test_they_run_in_native_code_and_paged_quantised_and_ring_caches(name: str) -> None:
    torch.manual_seed(0)
    layer = PAIRS[name]().ours
    x = tokens(40)
    with torch.no_grad():
        expected = layer(x, mask=ph.Causal(), kernel="reference")
        if native.code() is not None:
            found = layer(x, mask=ph.Causal(), kernel="native")
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        for cache in (ph.PagedCache(page_size=4), ph.RingCache(64)):
            parts = [layer(part, mask=ph.Causal(), cache=cache) for part in x.split([30, 9, 1], 1)]
            torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-4)


def model(name: str, layers: int = 2) -> Transformer:
    attention: AttentionConfig
    if name.startswith("gated"):
        per = "head" if name == "gated by head" else "feature"
        attention = GatedAttentionConfig(4, 2, D, rope=RopeConfig(), gate_per=per)
    elif name == "sub-norm":
        attention = SubNormAttentionConfig(4, 2, D, rope=RopeConfig())
    else:
        attention = DifferentialAttentionConfig(4, 2, D, rope=RopeConfig())
    layer = LayerConfig(attention, FeedForwardConfig(64))
    torch.manual_seed(0)
    return Transformer(TransformerConfig("decoder", 50, E, 64, (layer,) * layers)).eval()


@pairs
def test_a_model_decodes_with_a_cache_survives_json_and_is_seen_by_the_probe(name: str) -> None:
    made = model(name)
    config = TransformerConfig.from_json(made.config.to_json())
    assert config == made.config
    ids = torch.randint(0, 50, (2, 12))
    with torch.no_grad():
        whole = made(ids)
        cache = made.new_cache()
        parts = [made(part, cache=cache) for part in ids.split([7, 4, 1], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-4)
        with ph.probe(made) as seen:
            made(ids)
    rows = seen[1].rows()
    assert rows.shape == (2, 4, 12, 12)
    torch.testing.assert_close(rows.sum(-1), torch.ones(2, 4, 12))
    with pytest.raises(UnsupportedError, match="needs a MultiHeadAttention"):
        prune(made, {0: [1]})


def test_the_probe_sees_the_two_softmaxes_of_a_pair() -> None:
    torch.manual_seed(0)
    layer = differential(4, 2).ours
    seen: list[Any] = []
    x = tokens()
    with torch.no_grad(), layer.register_attention_hook(seen.append):
        layer(x, mask=ph.Causal())
    assert seen[0].q.shape == (2, 4, T, 2 * D)
    # One group: its first heads, then its second ones, each of them with zeros in its other half.
    assert not seen[0].q[:, :2, :, D:].any()
    assert not seen[0].q[:, 2:, :, :D].any()


@pairs
def test_planned_parameters_and_cache_are_those_of_the_model(name: str) -> None:
    made = model(name)
    planned = ph.plan(made.config, tokens=30, kv_dtype="float32")
    assert planned.parameters == made.parameter_counts()
    cache = made.new_cache()
    with torch.no_grad():
        made(torch.randint(0, 50, (1, 30)), cache=cache)
    assert planned.cache_bytes == cache.bytes
    assert name.split()[0] in planned.cache_layers[0].attention


def test_a_network_normalizes_its_hidden_features() -> None:
    torch.manual_seed(0)
    network = SubNormFeedForward(E, 24, "relu2")
    nn.init.normal_(network.norm.weight)
    x = tokens()
    hidden = torch.relu(network.gate_proj(x)).square() * network.up_proj(x)
    expected = network.down_proj(network.norm(hidden))
    torch.testing.assert_close(network(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(network(x), expected)
        torch.testing.assert_close(network(x[:1, :1]), expected[:1, :1])
    config = SubNormFeedForwardConfig(24)
    assert SubNormFeedForwardConfig.from_json(config.to_json()) == config
    with pytest.raises(ConfigError, match="experts are plain networks: got a SubNormFeedForward"):
        MixtureConfig(config, 4, 2)


def test_heads_that_make_no_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_kv_heads must be even.*got 1"):
        DifferentialAttentionConfig(4, 1, D)
    with pytest.raises(ConfigError, match=r"no dropout of weights.*dropout=0\.1"):
        DifferentialAttentionConfig(4, 2, D, dropout=0.1)
    layer = DifferentialAttention(E, 4, 2)
    with pytest.raises(ValueError, match="self-attention: got a context"):
        layer(tokens(), tokens())


@dataclasses.dataclass(frozen=True)
class KeepsConfig(AttentionConfig):
    """A layout whose memories a test chooses."""

    kept: tuple[Any, ...] = ()

    @property
    def memories(self) -> tuple[Memory, ...]:
        return self.kept


@pytest.mark.parametrize(
    "kept",
    [
        (PerToken(0, 0, 0),),
        (PerToken(2, 16, 0),),
        (State("s", (4, 0)),),
        (Tail("c", 4, 3), State("c", (4,))),
        (),
    ],
)
@pytest.mark.parametrize("kind", ["auto", "dense", "paged"])
def test_memories_that_cannot_be_are_refused_by_name(kept: tuple[Any, ...], kind: Any) -> None:
    config = model("gated").config
    other = dataclasses.replace(config.layers[0], attention=KeepsConfig(4, 2, 16, kept=kept))
    config = dataclasses.replace(config, layers=(config.layers[0], other))
    with pytest.raises(ConfigError, match=r"layer 1, KeepsConfig: a cache needs memories"):
        ModelCache.for_config(config, kind=kind)


def test_a_layout_without_keys_of_each_token_says_what_it_keeps() -> None:
    state = KeepsConfig(4, 2, 16, kept=(State("sum", (4, 8)),))
    with pytest.raises(ConfigError, match=r"KeepsConfig keeps no keys.*State\(name='sum'"):
        _ = state.kv


@pytest.mark.parametrize(
    "cache", [DenseCache, LatentCache, ModelCache, ModelCache([DenseCache()]), 3]
)
@pytest.mark.parametrize("kind", [*KINDS])
def test_what_is_no_cache_of_one_layer_is_refused_by_name(kind: str, cache: Any) -> None:
    layer, x = KINDS[kind](), torch.zeros(1, 2, E)
    given = f"the class {cache.__name__}" if isinstance(cache, type) else type(cache).__name__
    with pytest.raises(TypeError, match=f"cache must be a cache of one layer.*got {given}"):
        layer(x, cache=cache)
