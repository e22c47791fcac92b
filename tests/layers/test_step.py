"""A layer's step in one native call: the bits of its modules, or the modules themselves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from step_layers import E, drawn_layer
from torch import Tensor, nn

import polyhead as ph
from polyhead import native
from polyhead.caches import KeyValueCache, Ring, RingCache, StoredCache
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    QueryTemperatureConfig,
    RopeConfig,
)
from polyhead.layers import (
    MultiHeadAttention,
    RoPE,
    as_built,
    decode_plan,
    native_export,
    native_layer,
    transformer_layer,
)
from polyhead.layers.decode_plan import LayerArgs
from polyhead.layers.exact import SupportedFields
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.native_layer import ATTENTION, CROSS_ATTENTION, NETWORK
from polyhead.layers.norms import RMSNorm
from polyhead.layers.transformer_layer import TransformerLayer

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LLAMA = LayerConfig(
    AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=32, rope=RopeConfig()),
    FeedForwardConfig(hidden_dim=80),
)
LAYERS = {
    "llama": LLAMA,
    "qwen": replace(
        LLAMA,
        attention=replace(LLAMA.attention, qkv_bias=True, qk_norm=QKNormConfig()),
    ),
    "gemma": replace(
        LLAMA,
        attention=replace(
            LLAMA.attention, head_dim=40, softcap=5.0, scale=0.2,
            qk_norm=QKNormConfig(NormConfig(weight_offset=1.0)),
        ),
        feed_forward=FeedForwardConfig(hidden_dim=80, activation="gelu_tanh"),
        norm=NormConfig(weight_offset=1.0),
        norm_placement="sandwich",
    ),
    "all biases, no positions, values of another size": replace(
        LLAMA,
        attention=AttentionConfig(
            num_heads=4, num_kv_heads=1, head_dim=24, v_head_dim=17, qkv_bias=True, out_bias=True
        ),
        feed_forward=FeedForwardConfig(hidden_dim=33, activation="relu", gated=False, bias=True),
    ),
    "wide values of narrow heads": replace(
        LLAMA,
        attention=AttentionConfig(num_heads=16, num_kv_heads=1, head_dim=4, v_head_dim=64),
    ),
    "window": replace(LLAMA, attention=replace(LLAMA.attention, window=9)),
    "gpt2": LayerConfig(
        AttentionConfig(num_heads=3, num_kv_heads=3, head_dim=16, qkv_bias=True, out_bias=True),
        FeedForwardConfig(hidden_dim=80, activation="gelu_tanh", gated=False, bias=True),
        norm=NormConfig("layernorm", bias=True),
    ),
    "the paper of 2017, keys without bias": LayerConfig(
        AttentionConfig(num_heads=3, num_kv_heads=3, head_dim=16, qkv_bias=True, k_bias=False),
        FeedForwardConfig(hidden_dim=80, activation="relu", gated=False, bias=True),
        norm=NormConfig("layernorm", bias=True),
        norm_placement="post",
    ),
    "gptj": replace(
        LLAMA,
        attention=replace(LLAMA.attention, rope=RopeConfig(dim=16)),
        norm=NormConfig("layernorm", weight_offset=1.0),
        parallel="one norm",
    ),
    "neox": replace(
        LLAMA, norm=NormConfig("layernorm", bias=True), parallel="two norms", residual_scale=0.3
    ),
    "olmo2": replace(
        LLAMA,
        attention=replace(LLAMA.attention, qk_norm=QKNormConfig(place="full_width")),
        norm_placement="after",
        residual_scale=0.7,
    ),
    "bloom": replace(
        LLAMA, attention=replace(LLAMA.attention, rope=None, alibi=ALiBiConfig(scale=0.5))
    ),
    "olmo": replace(
        LLAMA,
        attention=replace(LLAMA.attention, qkv_clip=0.4),
        norm=NormConfig("layernorm", weight=False),
    ),
    "gpt-oss": replace(
        LLAMA,
        attention=replace(LLAMA.attention, sinks=True, window=4),
        feed_forward=FeedForwardConfig(80, "quick_gelu", clamp=0.5, up_offset=1.0),
    ),
    "clipped between norms": replace(
        LLAMA,
        attention=replace(
            LLAMA.attention, qkv_clip=0.9, qk_norm=QKNormConfig(NormConfig(weight=False))
        ),
    ),
    "cohere": replace(
        LLAMA,
        attention=replace(
            LLAMA.attention, qk_norm=QKNormConfig(NormConfig("layernorm"), per_head=True)
        ),
        norm=NormConfig("layernorm"),
        parallel="one norm",
    ),
    "a norm for each head, with biases, behind the rotation": replace(
        LLAMA,
        attention=replace(
            LLAMA.attention,
            qk_norm=QKNormConfig(NormConfig("layernorm", bias=True), "after_rope", per_head=True),
        ),
    ),
    "an RMS norm for each head": replace(
        LLAMA, attention=replace(LLAMA.attention, qk_norm=QKNormConfig(per_head=True))
    ),
    "llama4, chunks": replace(LLAMA, attention=replace(LLAMA.attention, chunk=3)),
    "llama4, temperatures": replace(
        LLAMA,
        attention=replace(
            LLAMA.attention, rope=None, query_temperature=QueryTemperatureConfig(0.4, 3, 1)
        ),
    ),
    "apertus": replace(
        LLAMA,
        attention=replace(LLAMA.attention, qk_norm=QKNormConfig()),
        feed_forward=FeedForwardConfig(80, "xielu", gated=False),
    ),
    "xielu with a gate": replace(LLAMA, feed_forward=FeedForwardConfig(33, "xielu")),
    "falcon-rw": replace(
        LLAMA,
        attention=replace(LLAMA.attention, rope=None, alibi=ALiBiConfig(scale=0.3, rounded=True)),
        norm=NormConfig("layernorm", bias=True),
    ),
    "a bias of the last projection alone": replace(
        LLAMA, feed_forward=FeedForwardConfig(33, "gelu", down_bias=True)
    ),
    "a bias of all but the last projection": replace(
        LLAMA, feed_forward=FeedForwardConfig(80, gated=False, bias=True, down_bias=False)
    ),
    "norms behind the rotation, none before attention": replace(
        LLAMA,
        attention=replace(LLAMA.attention, qk_norm=QKNormConfig(place="after_rope")),
        attention_norm=False,
    ),
    "a norm behind the network alone": replace(LLAMA, feed_forward_out_norm=True),
}  # fmt: skip
LATENT = LatentAttentionConfig(
    num_heads=5, kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=12,
    q_lora_rank=20,
)  # fmt: skip
LATENTS = {
    "deepseek": LATENT,
    "biases, queries straight from x": replace(LATENT, q_lora_rank=None, q_bias=True, bias=True),
    "converted": replace(
        LATENT,
        q_lora_rank=None,
        norm=None,
        scale=0.2,
        rope=RopeConfig(type="explicit", frequencies=tuple(0.9**i for i in range(8))),
    ),
    "all of a key rotated": replace(
        LATENT, qk_nope_head_dim=0, kv_lora_rank=64, qk_rope_head_dim=32, norm=None
    ),
    "no positions, odd sizes": replace(
        LATENT, rope=None, kv_lora_rank=23, qk_nope_head_dim=7, qk_rope_head_dim=2, v_head_dim=5
    ),
    "norms without weights": replace(LATENT, norm=NormConfig(weight=False)),
    "20 heads": replace(LATENT, num_heads=20, qk_nope_head_dim=0),
    "wide latents of queries": replace(LATENT, num_heads=1, q_lora_rank=200, norm=None),
}
LAYERS |= {f"latent: {name}": replace(LLAMA, attention=own) for name, own in LATENTS.items()}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _layer(config: LayerConfig = LLAMA, dtype: torch.dtype = torch.float32) -> TransformerLayer:
    return drawn_layer(config, dtype)


def _prompted(
    layer: TransformerLayer, batch: int = 1, cache: KeyValueCache | None = None
) -> KeyValueCache:
    """A cache that holds five tokens and has room for more."""
    if cache is None:
        own = layer.config.attention
        cache = ph.DenseCache(capacity=64)
        if isinstance(own, LatentAttentionConfig):
            cache = ph.LatentCache(own.kv_lora_rank, own.qk_rope_head_dim, capacity=64)
    dtype = next(layer.parameters()).dtype
    layer(torch.randn(batch, 5, E).to(dtype), mask=ph.Causal(), cache=cache)
    return cache


def _token(batch: int = 1, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 1, E, generator=generator).to(dtype)


def step(
    layer: TransformerLayer, x: Tensor, mask: ph.Mask | None, cache: KeyValueCache
) -> Tensor | None:
    """The step through a whole layer that has no context; None where modules must go on."""
    found = decode_plan.step(layer, x, LayerArgs(mask, None, cache))
    if found is None:
        return None
    if found[1] == NETWORK:
        return found[0]
    cache.rollback(1)
    return None


def _without(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Tensor]) -> Tensor:
    """What the modules give one after the other."""
    with monkeypatch.context() as patch:
        patch.setattr(transformer_layer, "step", lambda *arguments: None)
        return run()


@pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_has_the_bits_of_the_modules(
    monkeypatch: pytest.MonkeyPatch,
    code: native.Code,
    name: str,
    batch: int,
    dtype: torch.dtype,
) -> None:
    with native.using(code):
        layer = _layer(LAYERS[name], dtype)
        cache = _prompted(layer, batch)
        other = cache.fork()
        for seed in range(3):
            x = _token(batch, dtype, seed)
            found = step(layer, x, ph.Causal(), cache)
            assert found is not None
            wanted = _without(monkeypatch, lambda x=x: layer(x, mask=ph.Causal(), cache=other))
            assert torch.equal(found, wanted)
            for mine, theirs in zip(cache.source().gather(), other.source().gather(), strict=True):
                assert torch.equal(mine, theirs)
        assert cache.lengths == other.lengths == [8] * batch


def test_a_layer_takes_steps_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def counted(*arguments: object) -> tuple[Tensor, int] | None:
        taken.append(decode_plan.step(*arguments))  # type: ignore[arg-type]  # whatever it gives
        return taken[-1]

    monkeypatch.setattr(transformer_layer, "step", counted)
    layer = _layer()
    cache = _prompted(layer)
    out = layer(_token(), mask=ph.Causal(), cache=cache)
    assert taken[-1] is not None
    assert out is taken[-1][0]


def _hooked(*path: str) -> Callable[[TransformerLayer], object]:
    return lambda layer: layer.get_submodule(".".join(path)).register_forward_hook(
        lambda module, arguments, out: out * 2
    )


def _own_forward(layer: TransformerLayer) -> None:
    layer.feed_forward.forward = lambda x: x * 2  # type: ignore[method-assign]  # as users do


def _another_norm(layer: TransformerLayer) -> None:
    layer.attention_norm = nn.LayerNorm(E)


def _another_linear(layer: TransformerLayer) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    layer.attention.o_proj = Doubled(6 * 32, E, bias=False)


def _another_size(layer: TransformerLayer) -> None:
    layer.feed_forward.up_proj = nn.Linear(E, 40, bias=False)
    layer.feed_forward.gate_proj = nn.Linear(E, 40, bias=False)
    layer.feed_forward.down_proj = nn.Linear(40, E, bias=False)


WATCHED: dict[str, Callable[[TransformerLayer], object]] = {
    **{
        path: _hooked(path)
        for path in (
            "attention", "feed_forward", "attention_norm", "feed_forward_norm",
            "attention.q_proj", "attention.o_proj", "feed_forward.gate_proj",
            "feed_forward.down_proj",
        )
    },
    "a pre-hook": lambda layer: layer.attention.v_proj.register_forward_pre_hook(
        lambda module, arguments: (arguments[0] * 2,)
    ),
    "an attention hook": lambda layer: layer.attention.register_attention_hook(lambda record: None),
    "a head edit": lambda layer: layer.attention.register_head_edit(lambda out: out * 2),
    "its own forward": _own_forward,
    "another norm": _another_norm,
    "another linear": _another_linear,
    "another size": _another_size,
    "training": lambda layer: layer.train(),
}  # fmt: skip


def _another_dtype(layer: TransformerLayer) -> None:
    layer.attention.o_proj.bfloat16()


def _another_dtype_of_a_norm(layer: TransformerLayer) -> None:
    layer.feed_forward_norm.bfloat16()


def _columns(layer: TransformerLayer) -> None:
    layer.feed_forward.up_proj.weight = nn.Parameter(torch.randn(E, 80).T)


def _data_of_another_dtype(layer: TransformerLayer) -> None:
    layer.attention.k_proj.weight.data = layer.attention.k_proj.weight.data.double()


def _data_in_columns(layer: TransformerLayer) -> None:
    square = layer.attention.q_proj.weight.data
    layer.attention.q_proj.weight.data = square.T.contiguous().T


def _the_same_memory_turned(layer: TransformerLayer) -> None:
    weight = layer.attention.q_proj.weight
    weight.data = weight.data.T


def _the_same_memory_cut(layer: TransformerLayer) -> None:
    layer.feed_forward.up_proj.weight.data = layer.feed_forward.up_proj.weight.data[:40]


def _the_same_memory_negated(layer: TransformerLayer) -> None:
    weight = layer.attention.o_proj.weight
    weight.data = torch._neg_view(weight.data)


def _a_weight_of_a_subclass(layer: TransformerLayer) -> None:
    class Strange(nn.Parameter):
        pass

    layer.attention.o_proj.weight.__class__ = Strange


def _dropout_of_the_attention(layer: TransformerLayer) -> None:
    layer.attention.dropout = 0.5
    layer.attention.train()


def _dropout_of_the_network(layer: TransformerLayer) -> None:
    layer.feed_forward.dropout = 0.5
    layer.feed_forward.train()


@pytest.mark.parametrize(
    "change",
    [
        _another_dtype, _another_dtype_of_a_norm, _columns, _data_of_another_dtype,
        _data_in_columns, _the_same_memory_turned, _the_same_memory_cut,
        _the_same_memory_negated, _a_weight_of_a_subclass, _dropout_of_the_attention,
        _dropout_of_the_network,
    ],
)  # fmt: skip
def test_what_native_code_cannot_read_or_do_is_left_to_the_modules(
    change: Callable[[TransformerLayer], None],
) -> None:
    square = replace(
        LLAMA, attention=replace(LLAMA.attention, num_heads=3, num_kv_heads=3, head_dim=16)
    )
    layer = _layer(square)
    cache = _prompted(layer)
    # What was found out about the layer in a step must not outlive the change.
    assert step(layer, _token(), ph.Causal(), cache.fork()) is not None
    change(layer)
    for _ in range(2):
        assert step(layer, _token(), ph.Causal(), cache) is None
        assert cache.lengths == [5]


@pytest.mark.parametrize("name", WATCHED)
def test_modules_that_somebody_watches_or_replaced_are_called(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    layer = _layer()
    cache = _prompted(layer)
    assert step(layer, _token(), ph.Causal(), cache.fork()) is not None
    WATCHED[name](layer)
    other = cache.fork()
    if name != "training":
        assert step(layer, _token(), ph.Causal(), cache) is None
    assert cache.lengths == [5]
    found = layer(_token(), mask=ph.Causal(), cache=cache)
    wanted = _without(monkeypatch, lambda: layer(_token(), mask=ph.Causal(), cache=other))
    assert torch.equal(found, wanted)


def test_a_hook_on_all_modules_is_called() -> None:
    layer = _layer()
    cache = _prompted(layer)
    seen = []
    with nn.modules.module.register_module_forward_hook(
        lambda module, arguments, out: seen.append(type(module).__name__)
    ):
        layer(_token(), mask=ph.Causal(), cache=cache)
    assert {"MultiHeadAttention", "RMSNorm", "FeedForward", "Linear"} <= {*seen}


class _Layer(TransformerLayer):
    """Overrides how a part joins the residual path."""

    def _joined(self, x: Tensor, h: Tensor, part: str) -> Tensor:
        return super()._joined(x, h * 2, part)


class _Attention(MultiHeadAttention):
    def _placed(self, *arguments: Any) -> Tensor:
        return super()._placed(*arguments) * 2


class _FeedForward(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class _Norm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class _Rotation(RoPE):
    def apply(self, *arguments: Any, **options: Any) -> Tensor:
        return super().apply(*arguments, **options) * 2


def _doubled(thing: object, method: str) -> None:
    """Replaces a method on one object, as tools do."""
    own = getattr(thing, method)
    setattr(thing, method, lambda *arguments, **options: own(*arguments, **options) * 2)


def _of(kind: type, *path: str) -> Callable[[TransformerLayer], None]:
    def change(layer: TransformerLayer) -> None:
        found: Any = layer
        for name in path:
            found = getattr(found, name)
        found.__class__ = kind

    return change


CHANGED: dict[str, Callable[[TransformerLayer], object]] = {
    "a layer of a subclass": _of(_Layer),
    "attention of a subclass": _of(_Attention, "attention"),
    "a network of a subclass": _of(_FeedForward, "feed_forward"),
    "a norm of a subclass": _of(_Norm, "attention_norm"),
    "rotation of a subclass": _of(_Rotation, "attention", "rope"),
    "the layer's own method": lambda layer: _doubled(layer, "_joined"),
    "the attention's own method": lambda layer: _doubled(layer.attention, "_placed"),
    "the attention's own calls": lambda layer: _doubled(layer.attention, "_attend"),
    "the network's own call": lambda layer: _doubled(layer.feed_forward, "_call_impl"),
    "a norm's own forward": lambda layer: _doubled(layer.feed_forward_norm, "forward"),
    "a projection's own forward": lambda layer: _doubled(layer.attention.k_proj, "forward"),
    "the rotation's own method": lambda layer: _doubled(layer.attention.rope, "apply"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_overrides_a_method_decodes_as_it_reads_a_prompt(name: str) -> None:
    layer = _layer()
    CHANGED[name](layer)
    tokens = torch.randn(1, 12, E)
    whole = layer(tokens, mask=ph.Causal())
    assert (whole - _layer()(tokens, mask=ph.Causal())).abs().max() > 1e-2
    cache = ph.DenseCache(capacity=64)
    layer(tokens[:, :9], mask=ph.Causal(), cache=cache)
    for i in range(9, 12):
        step_by_step = layer(tokens[:, i : i + 1], mask=ph.Causal(), cache=cache)
        torch.testing.assert_close(step_by_step, whole[:, i : i + 1])


def test_a_method_that_is_replaced_on_the_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer()
    cache = _prompted(layer)
    for kind in (nn.Linear, RMSNorm, FeedForward, MultiHeadAttention):
        with monkeypatch.context() as patch:
            own = kind.forward
            called = []

            def forward(*arguments: Any, own: Any = own, called: Any = called, **options: Any):  # type: ignore[no-untyped-def]
                called.append(1)
                return own(*arguments, **options)

            patch.setattr(kind, "forward", forward)
            layer(_token(), mask=ph.Causal(), cache=cache)
        assert called, kind


@dataclass(frozen=True)
class _WithMore(AttentionConfig):
    """As if a field had been added that the step was not written for."""

    more: float = 1.0
    made: tuple[int, ...] = field(default_factory=tuple)


def test_a_field_that_the_step_does_not_know_takes_the_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
    fields = SupportedFields(
        {
            LayerConfig: {"attention": None, "feed_forward": None, "norm": None},
            _WithMore: dict.fromkeys(("num_heads", "num_kv_heads", "head_dim")),
            FeedForwardConfig: {"hidden_dim": None, "activation": ("silu",)},
            NormConfig: {},
        }
    )
    wider = _WithMore(num_heads=2, num_kv_heads=2, head_dim=8)
    layer = LayerConfig(wider, FeedForwardConfig(8))
    assert fields.accepts(layer)
    assert fields.accepts(layer)  # the second answer is remembered
    for other in (
        replace(layer, attention=replace(wider, more=2.0)),
        replace(layer, attention=replace(wider, made=(1,))),
        replace(layer, attention=replace(wider, softcap=5.0)),
        replace(layer, attention=known),
        replace(layer, norm_placement="post"),
        replace(layer, feed_forward=FeedForwardConfig(8, "relu")),
        replace(layer, norm=NormConfig(eps=1e-6)),
    ):
        assert not fields.accepts(other)
        built = _layer()
        cache = _prompted(built)
        vars(built)["config"] = other
        monkeypatch.setattr(native_export, "KNOWN", fields)
        monkeypatch.setattr(native_layer, "_KNOWN_AROUND", fields)
        assert step(built, _token(), ph.Causal(), cache) is None
        monkeypatch.undo()


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seen", ["window", "chunk"])
def test_a_step_goes_around_a_ring(
    monkeypatch: pytest.MonkeyPatch, seen: str, dtype: torch.dtype, spare: int
) -> None:
    config = replace(LLAMA, attention=replace(LLAMA.attention, **{seen: 9}))
    layer = _layer(config, dtype)
    cache = _prompted(layer, 2, RingCache(9, spare=spare))
    other, taken = cache.fork(), 0
    for seed in range(25):
        if seed in (7, 14):  # once before it is full and once behind
            cache.rollback(1)
            other.rollback(1)
        x = _token(2, dtype, seed)
        found = step(layer, x, ph.Causal(), cache)
        taken += found is not None
        if found is None:  # the ring grows
            found = layer(x, mask=ph.Causal(), cache=cache)
        wanted = _without(monkeypatch, lambda x=x: layer(x, mask=ph.Causal(), cache=other))
        assert torch.equal(found, wanted), seed
        assert cache.lengths == other.lengths
        assert cache.max_rollback == other.max_rollback
        for mine, theirs in zip(cache.source().gather(), other.source().gather(), strict=True):
            assert torch.equal(mine, theirs)
    assert taken > 20


class _Counting(StoredCache):
    """A cache of somebody's own."""

    appended = 0

    def append(self, *arguments: Tensor) -> object:  # type: ignore[override]  # takes all
        self.appended += 1
        return super().append(*arguments)


OTHER_CACHES: dict[str, Callable[[], KeyValueCache]] = {
    "full": lambda: ph.DenseCache(),
    "somebody's own": _Counting,
}


@pytest.mark.parametrize("name", OTHER_CACHES)
def test_other_caches_are_appended_to(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    layer = _layer()
    cache = _prompted(layer, cache=OTHER_CACHES[name]())
    if name == "full":
        spare = cache.capacity - cache.length
        layer(torch.randn(1, spare, E), mask=ph.Causal(), cache=cache)
    before, other = cache.lengths, cache.fork()
    assert step(layer, _token(), ph.Causal(), cache) is None
    assert cache.lengths == before
    found = layer(_token(), mask=ph.Causal(), cache=cache)
    wanted = _without(monkeypatch, lambda: layer(_token(), mask=ph.Causal(), cache=other))
    assert torch.equal(found, wanted)
    if isinstance(cache, _Counting):
        assert cache.appended == 2


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("mish", replace(LLAMA, feed_forward=FeedForwardConfig(80, "mish"))),
    ],
)
def test_layers_of_another_kind_take_their_modules(name: str, config: LayerConfig) -> None:
    layer = _layer(config)
    cache = _prompted(layer)
    assert step(layer, _token(), ph.Causal(), cache) is None, name
    assert cache.lengths == [5]


def test_what_is_not_a_few_tokens_of_a_decoder_takes_the_modules() -> None:
    layer = _layer()
    cache = _prompted(layer)
    assert step(layer, torch.randn(1, 9, E), ph.Causal(), cache) is None  # a token too many
    assert step(layer, torch.randn(1, 2, E), None, cache) is None  # they see each other
    assert step(layer, _token(), ph.KeyLengths([6]), cache) is None
    assert step(layer, torch.randn(1, E, 1).mT[..., ::1].expand(9, 1, E), None, cache) is None
    with torch.enable_grad():
        assert step(layer, _token(), None, cache) is None
    assert step(layer, _token(2), ph.Causal(), cache) is None
    step(layer, _token(), ph.Causal(), cache)  # from here on the layer is known
    for dtype in (torch.float64, torch.bfloat16):
        assert step(layer, _token(dtype=dtype), ph.Causal(), cache) is None
    assert cache.lengths == [6]
    with pytest.raises(ValueError, match="batch"):
        layer(_token(2), mask=ph.Causal(), cache=cache)


def test_a_description_owns_no_memory_and_goes_with_its_layer() -> None:
    layer = _layer()
    cache = _prompted(layer)
    assert step(layer, _token(), ph.Causal(), cache) is not None
    storage = weakref.ref(layer.attention.q_proj.weight.untyped_storage())
    layer.bfloat16()
    assert storage() is None
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None


def test_a_storage_that_shrank_is_an_error() -> None:
    layer = _layer()
    cache = _prompted(layer)
    step(layer, _token(), ph.Causal(), cache)
    storage = layer.feed_forward.up_proj.weight.untyped_storage()
    storage.resize_(storage.nbytes() // 2)
    with pytest.raises(ValueError, match=r"storage of \w+ holds|was it resized"):
        layer(_token(), mask=ph.Causal(), cache=cache)
    assert cache.lengths == [6]


@pytest.mark.parametrize("name", ["deepseek", "converted"])
def test_changed_weights_of_latent_attention_count_at_once(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    layer = _layer(LAYERS[f"latent: {name}"])
    cache = _prompted(layer)
    step(layer, _token(), ph.Causal(), cache)
    layer.attention.kv_b_proj.weight.data = torch.randn_like(layer.attention.kv_b_proj.weight)
    layer.attention.kv_a_proj_with_mqa.weight.mul_(2.0)
    other = cache.fork()
    found = step(layer, _token(seed=2), ph.Causal(), cache)
    wanted = _without(monkeypatch, lambda: layer(_token(seed=2), mask=ph.Causal(), cache=other))
    assert found is not None
    assert torch.equal(found, wanted)
    for watch in (
        lambda: layer.attention.register_attention_hook(lambda record: None),
        lambda: layer.attention.kv_a_proj_with_mqa.register_forward_hook(lambda *call: None),
        lambda: setattr(layer.attention, "kv_a_norm", nn.LayerNorm(LATENT.kv_lora_rank)),
    ):
        watch()
        assert step(layer, _token(), ph.Causal(), cache) is None
        assert cache.lengths == [7]


def test_latents_of_few_keys_take_the_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = replace(LATENT, kv_lora_rank=64, qk_nope_head_dim=1, v_head_dim=2)
    layer = _layer(replace(LLAMA, attention=small))
    short = ph.LatentCache(64, 16, capacity=8)
    assert step(layer, _token(), ph.Causal(), short) is None  # it holds nothing yet
    layer(_token(), mask=ph.Causal(), cache=short)
    assert small.absorbed_from == 3
    assert step(layer, _token(), ph.Causal(), short) is None
    layer(_token(), mask=ph.Causal(), cache=short)
    assert step(layer, _token(), ph.Causal(), short) is not None
    layer = _layer(LAYERS["latent: deepseek"])
    # A ring without a window: all that it holds is seen.
    ring = ph.LatentCache(32, 16, layout=Ring(8))
    _prompted(layer, cache=ring)
    other = ring.fork()
    for seed in range(12):
        x = _token(seed=seed)
        found = layer(x, mask=ph.Causal(), cache=ring)
        wanted = _without(monkeypatch, lambda x=x: layer(x, mask=ph.Causal(), cache=other))
        torch.testing.assert_close(found, wanted, atol=0, rtol=0)


def test_a_changed_parameter_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer()
    cache = _prompted(layer)
    step(layer, _token(), ph.Causal(), cache)
    layer.attention.q_proj.weight.data = torch.randn(6 * 32, E)
    layer.feed_forward.down_proj.weight.mul_(3.0)
    layer.feed_forward_norm.weight = nn.Parameter(torch.randn(E))
    other = cache.fork()
    found = step(layer, _token(seed=2), ph.Causal(), cache)
    wanted = _without(monkeypatch, lambda: layer(_token(seed=2), mask=ph.Causal(), cache=other))
    assert found is not None
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("name", "path"), [("cohere", "attention.q_norm"), ("apertus", "feed_forward.xielu")]
)
def test_numbers_of_heads_and_activations_count_at_once(
    monkeypatch: pytest.MonkeyPatch, name: str, path: str
) -> None:
    layer = _layer(LAYERS[name])
    module, cache = layer.get_submodule(path), _prompted(layer)
    step(layer, _token(), ph.Causal(), cache)
    first = next(module.parameters())

    def replaced() -> None:
        first.data = first + 0.3

    for seed, change in enumerate((lambda: first.add_(0.5), replaced)):
        before = step(layer, _token(seed=seed), ph.Causal(), cache.fork())
        change()
        other = cache.fork()
        found = step(layer, _token(seed=seed), ph.Causal(), cache)
        x = _token(seed=seed)
        wanted = _without(
            monkeypatch, lambda x=x, other=other: layer(x, mask=ph.Causal(), cache=other)
        )
        assert found is not None
        assert before is not None
        assert torch.equal(found, wanted)
        assert not torch.equal(found, before)
    hook = module.register_forward_hook(lambda module, arguments, out: out * 2)
    assert step(layer, _token(), ph.Causal(), cache) is None
    hook.remove()
    assert step(layer, _token(), ph.Causal(), cache.fork()) is not None
    first.data = first.double()
    assert step(layer, _token(), ph.Causal(), cache) is None


@pytest.mark.parametrize("held", [lambda: {"gain": 1.0}, lambda: {"gain": (1.0, None)}])
def test_an_entry_of_a_dict_that_changes_takes_the_modules(
    monkeypatch: pytest.MonkeyPatch, held: Callable[[], dict[str, Any]]
) -> None:
    """A dict that a class of polyhead's may come to have, which the hooks are not."""
    layer = _with_attribute(monkeypatch, held)
    cache = _prompted(layer)
    assert step(layer, _token(), ph.Causal(), cache.fork()) is not None
    for change in ({"gain": 2.0}, {"gain": 1.0, "offset": 0.0}, {}):
        layer.attention.held.clear()
        layer.attention.held.update(change)
        for _ in range(2):
            assert step(layer, _token(), ph.Causal(), cache.fork()) is None
    layer.attention.held.update(held())
    assert step(layer, _token(), ph.Causal(), cache.fork()) is not None
    layer.attention.held = held()
    assert step(layer, _token(), ph.Causal(), cache.fork()) is not None


@pytest.mark.parametrize(
    "held", [lambda: [1.0], lambda: {1.0}, lambda: {"gains": [1.0]}, lambda: ([1.0],)]
)
def test_a_container_whose_changes_guards_miss_takes_the_modules(
    monkeypatch: pytest.MonkeyPatch, held: Callable[[], Any]
) -> None:
    layer = _with_attribute(monkeypatch, held)
    cache = _prompted(layer)
    assert step(layer, _token(), ph.Causal(), cache) is None
    assert cache.lengths == [5]


def _with_attribute(monkeypatch: pytest.MonkeyPatch, held: Callable[[], Any]) -> TransformerLayer:
    """A layer whose attention has the attribute ``held``, as every new one has."""
    build = MultiHeadAttention._build

    def _build(self: MultiHeadAttention, *arguments: Any) -> None:
        build(self, *arguments)
        self.held = held()

    monkeypatch.setattr(MultiHeadAttention, "_build", _build)
    monkeypatch.setattr(as_built, "_built", as_built._built.__wrapped__)
    return _layer()


def test_steps_go_on_from_what_was_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = _layer()
    cache = _prompted(layer, batch=2)
    for seed in range(4):
        step(layer, _token(2, seed=seed), ph.Causal(), cache)
    cache.rollback(3)
    cache.reorder([1, 0])
    other = cache.fork()
    found = step(layer, _token(2), ph.Causal(), cache)
    wanted = _without(monkeypatch, lambda: layer(_token(2), mask=ph.Causal(), cache=other))
    assert found is not None
    assert torch.equal(found, wanted)
    cache.rollback([2, 0])  # rows of different lengths
    assert step(layer, _token(2), None, cache) is None


CROSS = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=24, v_head_dim=16, qkv_bias=True)
ENCODER_DECODERS = {
    "bart": replace(LAYERS["the paper of 2017, keys without bias"], cross_attention=CROSS),
    "t5": replace(LLAMA, attention=replace(LLAMA.attention, rope=None, scale=1.0),
                  cross_attention=replace(CROSS, qkv_bias=False, scale=1.0)),
    "t5gemma": replace(LAYERS["gemma"], cross_attention=replace(CROSS, softcap=4.0)),
    "wide": replace(LLAMA, cross_attention=replace(CROSS, num_heads=16, v_head_dim=48)),
    "wide values, narrow else": replace(
        LLAMA,
        attention=replace(LLAMA.attention, num_heads=1, num_kv_heads=1, head_dim=8),
        cross_attention=replace(CROSS, num_heads=16, head_dim=4, v_head_dim=48),
    ),
    "norms of queries": replace(LLAMA, cross_attention=replace(
        CROSS, qk_norm=QKNormConfig(place="full_width"))),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [1, 3], ids=["alone", "beams"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_a_step_with_a_context_has_the_bits_of_the_modules(
    monkeypatch: pytest.MonkeyPatch, name: str, shared: int, dtype: torch.dtype
) -> None:
    layer = _layer(ENCODER_DECODERS[name], dtype)
    context = torch.randn(2, 11, E).to(dtype)
    bias = None
    if name == "t5":
        table = torch.randn(32, LLAMA.attention.num_heads)
        bias = ph.RelativeBias(table, bidirectional=False).prepared()
    caches, across = [], []
    for _ in range(2):
        held, memory = ph.DenseCache(capacity=64), ph.DenseCache()
        call = {"mask": ph.Causal(), "bias": bias, "cache": held, "context_cache": memory}
        torch.manual_seed(3)
        layer(torch.randn(2, 5, E).to(dtype), context, **call)
        held.reorder([row for row in range(2) for _ in range(shared)])
        caches.append(held)
        across.append(memory)
    rows = context.repeat_interleave(shared, dim=0)
    for seed in range(3):
        x = _token(2 * shared, dtype, seed)
        given = LayerArgs(ph.Causal(), bias, caches[0], rows, None, across[0])
        found = decode_plan.step(layer, x, given)
        assert found is not None
        assert found[1] == NETWORK
        call = {"mask": ph.Causal(), "bias": bias, "cache": caches[1], "context_cache": across[1]}
        wanted = _without(monkeypatch, lambda x=x, call=call: layer(x, rows, **call))
        assert torch.equal(found[0], wanted)
    assert caches[0].lengths == caches[1].lengths == [8] * (2 * shared)


def _hooked_across(layer: TransformerLayer) -> None:
    _hooked("cross_attention", "q_proj")(layer)


def _hooked_behind(layer: TransformerLayer) -> None:
    _hooked("feed_forward")(layer)


@pytest.mark.parametrize(
    "own", [{"window": 3}, {"query_temperature": QueryTemperatureConfig(0.3, 2, 9)}]
)
def test_a_step_ends_before_attention_to_a_context_that_it_does_not_know(
    own: dict[str, Any],
) -> None:
    layer = _layer(replace(ENCODER_DECODERS["bart"], cross_attention=replace(CROSS, **own)))
    context, held, memory = torch.randn(2, 11, E), ph.DenseCache(capacity=64), ph.DenseCache()
    layer(torch.randn(2, 5, E), context, mask=ph.Causal(), cache=held, context_cache=memory)
    given = LayerArgs(ph.Causal(), None, held, context, None, memory)
    found = decode_plan.step(layer, _token(2), given)
    assert found is not None
    assert found[1] == ATTENTION


@pytest.mark.parametrize(
    ("part", "change", "more"),
    [
        (ATTENTION, None, {"context_mask": ph.KeyLengths([7, 11])}),
        (ATTENTION, None, {"context_cache": None}),
        (ATTENTION, None, {"context_cache": ph.DenseCache()}),
        (ATTENTION, _hooked_across, {}),
        (CROSS_ATTENTION, _hooked_behind, {}),
    ],
    ids=["a mask", "no cache", "an empty cache", "a hook on queries", "a hook on the network"],
)
def test_modules_go_on_where_a_step_ends(
    monkeypatch: pytest.MonkeyPatch,
    part: int,
    change: Callable[[TransformerLayer], None] | None,
    more: dict[str, Any],
) -> None:
    layer, context = _layer(ENCODER_DECODERS["bart"]), torch.randn(2, 11, E)
    held, memory = ph.DenseCache(capacity=64), ph.DenseCache()
    layer(torch.randn(2, 5, E), context, mask=ph.Causal(), cache=held, context_cache=memory)
    if change is not None:
        change(layer)
    call: dict[str, Any] = {"mask": ph.Causal(), "context_cache": memory} | more
    given = LayerArgs(call["mask"], None, held.fork(), context, call.get("context_mask"),
                         call["context_cache"])  # fmt: skip
    found = decode_plan.step(layer, _token(2), given)
    assert found is not None
    assert found[1] == part
    other = held.fork()
    found_y = layer(_token(2), context, cache=held, **call)
    if isinstance(more.get("context_cache"), ph.DenseCache):
        more["context_cache"].reset()
    wanted = _without(monkeypatch, lambda: layer(_token(2), context, cache=other, **call))
    assert torch.equal(found_y, wanted)


def test_a_context_remembered_in_another_dtype_is_refused_by_the_module() -> None:
    memories = {}
    for dtype in (torch.bfloat16, torch.float32):
        layer, memory = _layer(ENCODER_DECODERS["bart"], dtype), ph.DenseCache()
        held, context = ph.DenseCache(capacity=64), torch.randn(2, 11, E).to(dtype)
        prompt = torch.randn(2, 5, E).to(dtype)
        layer(prompt, context, mask=ph.Causal(), cache=held, context_cache=memory)
        memories[dtype] = memory
    call = {"cache": held, "context_cache": memories[torch.bfloat16]}
    with pytest.raises(ValueError, match="dtype"):
        layer(_token(2), context, mask=ph.Causal(), **call)


def test_a_context_of_another_length_is_refused_by_the_module() -> None:
    layer, context = _layer(ENCODER_DECODERS["bart"]), torch.randn(2, 11, E)
    caches = {"cache": ph.DenseCache(capacity=64), "context_cache": ph.DenseCache()}
    layer(torch.randn(2, 5, E), context, mask=ph.Causal(), **caches)
    with pytest.raises(ValueError, match="a context of 11 tokens: got one of 9"):
        layer(_token(2), context[:, :9], mask=ph.Causal(), **caches)


def test_a_bias_that_a_step_cannot_read_takes_the_modules() -> None:
    layer = _layer(ENCODER_DECODERS["t5"].__class__(**{
        **vars(ENCODER_DECODERS["t5"]), "cross_attention": None}))  # fmt: skip
    cache = _prompted(layer)
    heads = LLAMA.attention.num_heads
    good = ph.RelativeBias(torch.randn(32, heads), bidirectional=False)
    for bias in (
        ph.ALiBi(heads),
        ph.RelativeBias(torch.randn(32, heads), bidirectional=False, max_distance=10**6),
        ph.RelativeBias(torch.randn(32, heads + 1), bidirectional=False),
        torch.zeros(1, heads, 1, 6),
    ):
        assert decode_plan.step(layer, _token(), LayerArgs(None, bias, cache)) is None
        assert cache.lengths == [5]
    assert decode_plan.step(layer, _token(), LayerArgs(None, good, cache)) is not None
    layer = _layer(LAYERS["bloom"])
    assert decode_plan.step(layer, _token(), LayerArgs(None, good, _prompted(layer))) is None
