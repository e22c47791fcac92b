"""Mixtures of experts in a layer's step: the bits of the module, only chosen experts looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import polyhead as ph
from polyhead import native
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MixtureConfig,
    RopeConfig,
)
from polyhead.layers import decode_plan, transformer_layer
from polyhead.layers.decode_plan import LayerArgs
from polyhead.layers.experts import Experts
from polyhead.layers.native_layer import ATTENTION, CROSS_ATTENTION, NETWORK
from polyhead.layers.quantized import QuantizedLinear
from polyhead.layers.transformer_layer import TransformerLayer
from polyhead.quantization import block_type
from random_blocks import random_blocks

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
E = 32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXPERT, SHARED = FeedForwardConfig(24), FeedForwardConfig(40)
MIXTURES = {
    "mixtral": MixtureConfig(EXPERT, 8, 2, normalize=True),
    "deepseek 2": MixtureConfig(EXPERT, 12, 3, SHARED, scale=1.5, groups=4, groups_per_token=2),
    "deepseek 3": MixtureConfig(
        EXPERT, 12, 4, SHARED, scoring="sigmoid", choice_bias=True, normalize=True, scale=2.5,
        groups=3, groups_per_token=2, group_score="best two",
    ),
    "qwen 2": MixtureConfig(EXPERT, 6, 3, SHARED, shared_gate=True),
    "gpt-oss": MixtureConfig(
        FeedForwardConfig(24, "quick_gelu", bias=True, clamp=0.3, up_offset=1.0), 6, 2,
        normalize=True, router_bias=True,
    ),
    "phi": MixtureConfig(EXPERT, 7, 2, scoring="sparsemixer", jitter=0.3),
    "llama 4": MixtureConfig(EXPERT, 5, 1, SHARED, scoring="sigmoid", weighs="input"),
    "switch": MixtureConfig(FeedForwardConfig(24, "relu", gated=False), 5, 1, capacity=1),
}  # fmt: skip
ATTENTION_OF_ALL = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=16, rope=RopeConfig())


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _layer(mixture: MixtureConfig, dtype: torch.dtype = torch.float32) -> TransformerLayer:
    torch.manual_seed(0)
    layer = TransformerLayer.from_config(E, LayerConfig(ATTENTION_OF_ALL, mixture)).eval()
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.add_(torch.randn_like(tensor) * 0.2)
    return layer.to(dtype)


def _prompted(layer: TransformerLayer, batch: int = 1) -> ph.DenseCache:
    cache = ph.DenseCache(capacity=64)
    dtype = layer.attention_norm.weight.dtype
    layer(torch.randn(batch, 5, E).to(dtype), mask=ph.Causal(), cache=cache)
    return cache


def _token(batch: int = 1, seed: int = 1) -> Tensor:
    return torch.randn(batch, 1, E, generator=torch.Generator().manual_seed(seed))


def _step(layer: TransformerLayer, x: Tensor, cache: ph.DenseCache) -> tuple[Tensor, int]:
    found = decode_plan.step(layer, x, LayerArgs(ph.Causal(), None, cache))
    assert found is not None
    return found


def _by_modules(layer: TransformerLayer, x: Tensor, cache: ph.DenseCache) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_layer, "step", lambda *arguments: None)
        return layer(x, mask=ph.Causal(), cache=cache)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=code.name, marks=[pytest.mark.slow] if number else [])
        for number, code in enumerate(native.all_codes())
    ],
)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_step_through_a_mixture_has_the_bits_of_its_module(name: str, code: native.Code) -> None:
    with native.using(code):
        for dtype in DTYPES:
            layer = _layer(MIXTURES[name], dtype)
            for batch in (1, 5):
                cache = _prompted(layer, batch)
                other = cache.fork()
                for seed in range(2):
                    x = _token(batch, seed).to(dtype)
                    y, done = _step(layer, x, cache)
                    assert done == NETWORK
                    assert torch.equal(y, _by_modules(layer, x, other)), (dtype, batch, seed)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_few_tokens_choose_as_torch_lets_them_choose(name: str) -> None:
    layer = _layer(MIXTURES[name])
    mixture = layer.feed_forward
    assert isinstance(mixture, Experts)
    for rows in (1, 8):
        x = torch.randn(rows, E)
        weights, chosen = mixture.route(x)
        wanted, places = mixture._scored(x)
        assert torch.equal(chosen, places)
        torch.testing.assert_close(weights, wanted)
    bias = mixture.choice_bias
    if bias is not None:  # the dtype that a file may keep it in
        layer.bfloat16()
        mixture.choice_bias = bias.float()
        chosen = mixture.route(x.bfloat16())[1]
        assert torch.equal(chosen, mixture._scored(x.bfloat16())[1])
        assert _step(layer, _token().bfloat16(), _prompted(layer))[1] == NETWORK


def test_of_equal_scores_the_first_expert_is_chosen_and_nan_harms_nobody() -> None:
    mixture = _layer(MIXTURES["mixtral"]).feed_forward
    assert isinstance(mixture, Experts)
    mixture.router.weight.zero_()
    weights, chosen = mixture.route(torch.randn(2, E))
    assert chosen.tolist() == [[0, 1], [0, 1]]
    assert torch.equal(weights, torch.full((2, 2), 0.5))
    x = torch.randn(2, E)
    x[0, 3] = torch.nan
    y = mixture(x)
    assert y[0].isnan().all()
    assert torch.equal(y[1], mixture(x[1:])[0])


def test_experts_in_blocks_of_a_file_are_read_in_place() -> None:
    mixture = MixtureConfig(FeedForwardConfig(32), 5, 2, FeedForwardConfig(64), normalize=True)
    layer = _layer(mixture)
    kind = block_type("Q8_0")
    for network in (*layer.feed_forward.experts, layer.feed_forward.shared):
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(network, name)
            blocks = random_blocks(kind, linear.out_features, linear.in_features, 3)
            setattr(network, name, QuantizedLinear(blocks, kind))
    for batch in (1, 4):
        cache = _prompted(layer, batch)
        other = cache.fork()
        y, done = _step(layer, _token(batch), cache)
        assert done == NETWORK
        assert torch.equal(y, _by_modules(layer, _token(batch), other))


def _hooked(expert: nn.Module) -> None:
    expert.down_proj.register_forward_hook(lambda module, given, made: made * 2)


def _converted(expert: nn.Module) -> None:
    expert.up_proj.weight.data = torch.randn(24, E)


def _of_another_class(expert: nn.Module) -> None:
    expert.__class__ = type("Other", (type(expert),), {"forward": lambda self, x: x * 3})


@pytest.mark.parametrize("change", [_hooked, _converted, _of_another_class])
def test_a_change_of_an_expert_counts_where_it_is_visited(change) -> None:  # type: ignore[no-untyped-def]
    layer = _layer(MIXTURES["mixtral"])
    cache = _prompted(layer).fork()  # the first copy notes __slotnames__ in the class of caches
    experts: list[nn.Module] = [*layer.feed_forward.experts]
    y, _ = _step(layer, _token(), cache)
    seen: list[int] = []
    handles = [
        expert.register_forward_hook(lambda *call, number=number: seen.append(number))
        for number, expert in enumerate(experts)
    ]
    _by_modules(layer, _token(), cache.fork())
    for handle in handles:
        handle.remove()
    visited, free = seen, next(n for n in range(8) if n not in seen)
    cache.rollback(1)
    change(experts[free])
    found, done = _step(layer, _token(), cache)
    assert done == NETWORK
    assert torch.equal(found, y)
    cache.rollback(1)
    change(experts[visited[1]])
    found, done = _step(layer, _token(), cache)
    assert done == ATTENTION
    cache.rollback(1)
    one, other = cache.fork(), cache.fork()
    wanted = _by_modules(layer, _token(), other)
    assert not torch.equal(wanted, y)
    assert torch.equal(layer(_token(), mask=ph.Causal(), cache=one), wanted)
    assert one.lengths == other.lengths == [6]
    _, done = _step(layer, _token(), one)
    assert done == (NETWORK if change is _converted else ATTENTION)  # described again


def test_what_spreads_experts_or_calls_all_takes_the_module() -> None:
    layer = _layer(MIXTURES["mixtral"])
    cache = _prompted(layer)
    assert _step(layer, _token(), cache.fork())[1] == NETWORK
    for name, value in (("calls_all", True), ("_visited", lambda *call: call[0])):
        before = layer.feed_forward.__dict__.get(name)
        setattr(layer.feed_forward, name, value)
        assert _step(layer, _token(), cache.fork())[1] == ATTENTION
        if before is None:
            delattr(layer.feed_forward, name)
        else:
            setattr(layer.feed_forward, name, before)
    layer.feed_forward.router.register_forward_hook(lambda *call: None)
    assert _step(layer, _token(), cache.fork())[1] == ATTENTION


def test_a_mixture_behind_a_context_stops_before_it() -> None:
    across = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=16)
    config = LayerConfig(ATTENTION_OF_ALL, MIXTURES["switch"], cross_attention=across)
    torch.manual_seed(0)
    layer = TransformerLayer.from_config(E, config).eval()
    context, cache, memory = torch.randn(1, 7, E), ph.DenseCache(capacity=9), ph.DenseCache()
    layer(_token(), context, cache=cache, context_cache=memory)
    given = LayerArgs(None, None, cache.fork(), context, None, memory)
    found = decode_plan.step(layer, _token(), given)
    assert found is not None
    assert found[1] == NETWORK
    for expert in layer.feed_forward.experts:
        _hooked(expert)
    found = decode_plan.step(layer, _token(), replace_cache(given, cache))
    assert found is not None
    assert found[1] == CROSS_ATTENTION


def replace_cache(given: LayerArgs, cache: ph.DenseCache) -> LayerArgs:
    return given._replace(cache=cache.fork())


def test_a_parallel_layer_with_a_mixture_takes_its_modules() -> None:
    config = replace(LayerConfig(ATTENTION_OF_ALL, MIXTURES["mixtral"]), parallel="one norm")
    layer = TransformerLayer.from_config(E, config).eval()
    cache = _prompted(layer)
    assert decode_plan.step(layer, _token(), LayerArgs(None, None, cache)) is None
