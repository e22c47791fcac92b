"""Whatever is done to a model between two tokens, decoding has the bits of its modules."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import polyhead as ph
from polyhead import native
from polyhead.caches import ModelCache, Quantized, Ring
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.layers import MultiHeadAttention, fused_layers, transformer_layer
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.native_layer import export_layer
from polyhead.layers.norms import RMSNorm
from polyhead.layers.transformer_layer import TransformerLayer
from polyhead.models import Transformer, stack

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
E, W, S = 32, 40, 8
HEADS = LayerConfig(
    AttentionConfig(4, 2, 16, rope=RopeConfig()), FeedForwardConfig(40), NormConfig("rmsnorm")
)
LATENT = replace(HEADS, attention=LatentAttentionConfig(4, 16, 8, 8, 8))
MIXED = replace(HEADS, feed_forward=MixtureConfig(FeedForwardConfig(24), 4, 2))


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _model(layer: LayerConfig = HEADS, count: int = 3) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(TransformerConfig("decoder", W, E, 256, (layer,) * count)).eval()
    for parameter in model.parameters():
        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


def _ids(count: int, seed: int) -> Tensor:
    return torch.randint(0, W, (1, count), generator=torch.Generator().manual_seed(seed))


def _by_modules(model: nn.Module, ids: Tensor, cache: ModelCache) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_layer, "step", lambda *call: None)
        patch.setattr(stack, "steps", lambda parts, x, *_, **__: (x, 0, 0))
        found: Tensor = model(ids, cache=cache)
        return found


def _replaced(owner: object, name: str, value: object) -> Callable[[], None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return partial(setattr, owner, name, before)


def _doubled_method(kind: type, name: str) -> Callable[[], None]:
    """Replaces a method on its class by one whose result is twice as large."""
    own, before = getattr(kind, name), name in vars(kind)

    def doubled(self: object, *arguments: Any, **named: Any) -> Any:
        found = own(self, *arguments, **named)
        return tuple(x * 2 for x in found) if isinstance(found, tuple) else found * 2

    setattr(kind, name, doubled)
    return partial(setattr, kind, name, own) if before else partial(delattr, kind, name)


class _Doubled(nn.Module):
    """Hands out everything of the module inside, and doubles what it returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        found: Tensor = self.inner(*arguments, **named)
        return found * 2


def _wrapped(owner: nn.Module, name: str) -> None:
    setattr(owner, name, _Doubled(getattr(owner, name)))


def _copied(model: Transformer, change: Callable[[nn.Module], None]) -> None:
    """A layer becomes a shallow copy of itself, which is changed: the original is not."""
    layer = copy.copy(model.layers[1])
    layer.__dict__["_modules"] = {**layer._modules}
    layer.attention = copy.copy(layer.attention)
    layer.attention.__dict__["_modules"] = {**layer.attention._modules}
    change(layer.attention)
    model.layers[1] = layer


def _scaled_down(module: nn.Module) -> None:
    projection = copy.deepcopy(module.o_proj)
    projection.weight.mul_(0.5)
    module.o_proj = projection


Change = Callable[[Transformer], Any]
CHANGES: dict[str, Change] = {
    "the window": lambda m: [
        setattr(m.layers[1].attention, name, value)
        for name, value in (
            ("_window", ph.Window(2)),
            ("_causal_window", ph.Causal() & ph.Window(2)),
        )
    ],
    "attention.scale": lambda m: setattr(m.layers[1].attention, "scale", 0.9),
    "attention.softcap": lambda m: setattr(m.layers[1].attention, "softcap", 0.5),
    "attention._clip": lambda m: setattr(m.layers[1].attention, "_clip", 0.1),
    "attention._alibi": lambda m: setattr(
        m.layers[1].attention, "_alibi", ph.ALiBi(torch.tensor([0.5, 0.25, 0.1, 0.05]))
    ),
    "norm placement": lambda m: [
        setattr(m.layers[1], name, value)
        for name, value in (("_norms_in", False), ("_post", True))
    ],
    "residual scale": lambda m: setattr(m.layers[1], "_attention_mix", (1.0, 0.5)),
    "activation": lambda m: setattr(m.layers[1].feed_forward, "activation", "relu"),
    "eps": lambda m: setattr(m.layers[1].attention_norm, "eps", 0.5),
    "a parameter's data": lambda m: setattr(
        m.layers[1].attention.q_proj.weight, "data", torch.randn(64, E)
    ),
    "a parameter": lambda m: setattr(
        m.layers[1].attention.k_proj, "weight", nn.Parameter(torch.randn(32, E))
    ),
    "a parameter in its dict": lambda m: m.layers[1].attention.v_proj._parameters.update(
        weight=nn.Parameter(torch.randn(32, E))
    ),
    "a weight in place": lambda m: m.layers[1].feed_forward.down_proj.weight.mul_(2),
    "a weight's strides": lambda m: setattr(
        m.layers[1].attention.o_proj.weight,
        "data",
        m.layers[1].attention.o_proj.weight.data.as_strided((E, 64), (1, E)),
    ),
    "a weight negated lazily": lambda m: setattr(
        m.layers[1].attention.q_proj.weight,
        "data",
        torch._neg_view(m.layers[1].attention.q_proj.weight.data),
    ),
    "state dict, assigned": lambda m: m.load_state_dict(
        {name: x * 0.9 for name, x in m.state_dict().items()}, assign=True
    ),
    "a part": lambda m: setattr(m.layers[1], "attention_norm", RMSNorm(E, 0.5)),
    "a part that is gone": lambda m: setattr(m.layers[1], "attention_norm", None),
    "a hook": lambda m: m.layers[1].attention.o_proj.register_forward_hook(
        lambda *call: call[2] * 2
    ),
    "a hook on a layer": lambda m: m.layers[1].register_forward_hook(lambda *call: call[2] * 2),
    "a hook on all modules": lambda m: nn.modules.module.register_module_forward_hook(
        lambda module, _, out: out * 2 if isinstance(module, RMSNorm) else None
    ).remove,
    "a head edit": lambda m: m.layers[1].attention.register_head_edit(lambda out: out * 2),
    "forward of one module": lambda m: setattr(
        m.layers[1].feed_forward, "forward", lambda x: x * 2
    ),
    "_attend of one module": lambda m: setattr(
        m.layers[1].attention,
        "_attend",
        types.MethodType(lambda self, q, source, **call: q * 2, m.layers[1].attention),
    ),
    "_attend of a class": lambda m: _doubled_method(MultiHeadAttention, "_attend"),
    "_project of a class": lambda m: _doubled_method(MultiHeadAttention, "_project"),
    "__call__ of a class": lambda m: _doubled_method(FeedForward, "__call__"),
    "_call_impl of a class": lambda m: _doubled_method(RMSNorm, "_call_impl"),
    "_joined of a class": lambda m: _doubled_method(TransformerLayer, "_joined"),
    "__call__ of nn.Module": lambda m: _replaced(
        nn.Module,
        "__call__",
        lambda self, *a, own=nn.Module.__call__, **n: own(self, *a, **n)
        * (2 if type(self) is RMSNorm else 1),
    ),
    "a copy of a layer": lambda m: _copied(m, _scaled_down),
    "a copy of the attention": lambda m: _copied(m, lambda a: setattr(a, "scale", 0.9)),
    "a wrapped layer": lambda m: m.layers.__setitem__(1, _Doubled(m.layers[1])),
    "a wrapped attention": lambda m: _wrapped(m.layers[1], "attention"),
    "a wrapped projection": lambda m: _wrapped(m.layers[1].attention, "q_proj"),
    "a subclass": lambda m: setattr(
        m.layers[1].feed_forward,
        "__class__",
        type("Twice", (FeedForward,), {"forward": lambda f, x: FeedForward.forward(f, x) * 2}),
    ),
    "layers in another order": lambda m: setattr(m, "layers", m.layers[::-1]),
    "a layer less": lambda m: None,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_tokens_counts_at_once(name: str) -> None:
    model = _model()
    cache = model.new_cache(64)
    model(_ids(S, 0), cache=cache)
    for seed in (0, 1):  # the second as the first
        model(_ids(1, seed), cache=cache)
    unchanged = model(_ids(1, 2), cache=cache.fork())
    assert model.decode_plan(cache).explain() == "layers 0 to 2: native"
    other = cache.fork()
    undo = CHANGES[name](model)
    try:
        for seed in (2, 3):  # also with what the first of them found out
            found = model(_ids(1, seed), cache=cache)
            wanted = _by_modules(model, _ids(1, seed), other)
            torch.testing.assert_close(found, wanted, atol=0, rtol=0)
            if seed == 2 and name != "a layer less":
                assert not torch.equal(found, unchanged)
    finally:
        if callable(undo):
            undo()


LATENT_CHANGES: dict[str, Change] = {
    "scale": lambda m: setattr(m.layers[1].attention, "scale", 0.9),
    "preferred": lambda m: setattr(m.layers[1].attention, "preferred", "expanded"),
    "kv_b_proj": lambda m: m.layers[1].attention.kv_b_proj.weight.mul_(2),
    "kv_a_norm": lambda m: setattr(m.layers[1].attention, "kv_a_norm", RMSNorm(16, 0.5)),
    "a wrapped projection": lambda m: _wrapped(m.layers[1].attention, "o_proj"),
}


@pytest.mark.parametrize("name", LATENT_CHANGES)
def test_a_change_of_latent_attention_counts_at_once(name: str) -> None:
    model = _model(LATENT)
    cache = model.new_cache(64)
    model(_ids(S, 0), cache=cache)
    model(_ids(1, 1), cache=cache)
    assert model.decode_plan(cache).explain() == "layers 0 to 2: native"
    other = cache.fork()
    LATENT_CHANGES[name](model)
    found = model(_ids(1, 2), cache=cache)
    torch.testing.assert_close(found, _by_modules(model, _ids(1, 2), other), atol=0, rtol=0)


def test_a_copy_of_a_model_decodes_by_itself() -> None:
    """Shallow, as ``nn.parallel.replicate`` copies modules, with the parameters of another."""
    model = _model()
    cache = model.new_cache(64)
    model(_ids(S, 0), cache=cache)
    model(_ids(1, 1), cache=cache)
    for replica in (copy.deepcopy(model), _replica(model)):
        for parameter in _parameters(replica):
            parameter.mul_(1.1)
        mine, other = cache.fork(), cache.fork()
        found = replica(_ids(1, 2), cache=mine)
        assert torch.equal(found, _by_modules(replica, _ids(1, 2), other))
        assert not torch.equal(found, model(_ids(1, 2), cache=cache.fork()))


def _replica(module: Any) -> Any:
    """A copy whose parameters are plain tensors in ``__dict__``, as data parallelism makes them."""
    copied = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        copied._modules[name] = None if child is None else _replica(child)
    for name, parameter in module._parameters.items():
        copied._parameters[name] = None if parameter is None else parameter.detach().clone()
    return copied


def _parameters(module: nn.Module) -> Iterator[Tensor]:
    for each in module.modules():
        yield from (x for x in each._parameters.values() if x is not None)


class _Doubling(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, kinds: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        found = function(*arguments, **(named or {}))
        return found * 2 if function is torch.nn.functional.silu else found


@pytest.mark.parametrize(
    ("mode", "is_native"),
    [(_Doubling, False), (lambda: torch.device("cpu"), True), (nullcontext, True)],
    ids=["a mode that changes functions", "a device", "none"],
)
def test_modes_that_see_functions_take_the_modules(
    mode: Callable[[], AbstractContextManager[Any]], is_native: bool
) -> None:
    model = _model()
    cache = model.new_cache(64)
    model(_ids(S, 0), cache=cache)
    plain = model(_ids(1, 1), cache=cache.fork())
    other = cache.fork()
    with mode():
        found = model(_ids(1, 1), cache=cache)
        assert torch.equal(found, _by_modules(model, _ids(1, 1), other))
    assert torch.equal(found, plain) is is_native


def test_a_model_is_freed_without_the_collector_while_its_cache_lives() -> None:
    for layer in (HEADS, LATENT, MIXED):
        model = _model(layer)
        cache = model.new_cache(64)
        model(_ids(S, 0), cache=cache)
        model(_ids(1, 1), cache=cache)
        plan = model.decode_plan(cache)
        assert plan.explain() == "layers 0 to 2: native"
        storages = [weakref.ref(x.untyped_storage()) for x in model.parameters()]
        gc.collect()
        gc.disable()
        try:
            del model
            assert [alive for each in storages if (alive := each()) is not None] == []
        finally:
            gc.enable()
        assert cache.length == S + 1


def test_weights_that_are_assigned_free_the_old_ones_at_once() -> None:
    model = _model()
    cache = model.new_cache(64)
    model(_ids(S, 0), cache=cache)
    model(_ids(1, 1), cache=cache)
    old = weakref.ref(model.layers[1].attention.q_proj.weight.untyped_storage())
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    assert old() is None


def test_a_plan_goes_with_its_cache() -> None:
    model = _model()
    cache = model.new_cache(64)
    model(_ids(S, 0), cache=cache)
    model(_ids(1, 1), cache=cache)
    plan = weakref.ref(model.decode_plan(cache))
    assert plan() is not None
    del cache
    assert plan() is None


def test_a_plan_begins_with_what_another_knew_while_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, described = _model(), []

    def counted(code: Any, layer: nn.Module, *rest: Any) -> Any:
        described.append([*model.layers].index(layer))
        return export_layer(code, layer, *rest)

    monkeypatch.setattr(fused_layers, "export_layer", counted)

    def decoded(kernel: str) -> Tensor:
        cache = model.new_cache(64)
        model(_ids(S, 0), cache=cache)
        found: Tensor = model(_ids(1, 1), cache=cache, kernel=kernel)
        return found

    def doubled(norm: RMSNorm, x: Tensor) -> Tensor:
        return own(norm, x) * 2

    decoded("auto")
    assert described == [0, 1, 2]
    decoded("auto")
    assert described == [0, 1, 2]
    weight = model.layers[1].feed_forward.down_proj.weight
    model.layers[1].feed_forward.down_proj.weight = nn.Parameter(weight * 2)
    torch.testing.assert_close(decoded("auto"), decoded("reference"))
    assert described == [0, 1, 2, 1]
    own = RMSNorm.forward
    with monkeypatch.context() as patch:
        patch.setattr(RMSNorm, "forward", doubled)
        torch.testing.assert_close(decoded("auto"), decoded("reference"))
    torch.testing.assert_close(decoded("auto"), decoded("reference"))


def test_a_layer_is_described_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    attention = model.layers[1].attention
    _wrapped(model.layers[1], "attention")  # which is refused
    native_layer: list[int] = []

    def described_now(code: Any, layer: nn.Module, *rest: Any) -> Any:
        native_layer.append([*model.layers].index(layer))
        return export_layer(code, layer, *rest)

    monkeypatch.setattr(fused_layers, "export_layer", described_now)
    cache = model.new_cache(64).fork()
    model(_ids(S, 0), cache=cache)
    # In the model's plan, and the one that is refused in its own.
    assert sorted(native_layer) == [0, 1, 1, 2]
    native_layer.clear()
    for change, anew in (
        (lambda: None, []),
        (lambda: model.layers[1].attention.register_forward_hook(lambda *call: None), [1, 1]),
        (
            lambda: setattr(
                model.layers[2].attention.q_proj, "weight", nn.Parameter(torch.ones(64, E))
            ),
            [2],
        ),
        (lambda: setattr(model.layers[1], "attention", attention), [1]),
    ):
        change()
        for _ in range(3):
            model(_ids(1, 1), cache=cache)
        assert sorted(native_layer) == anew
        native_layer.clear()
    assert model.decode_plan(cache).explain() == "layers 0 to 2: native"


def test_a_plan_says_what_is_native_and_why_the_rest_is_not() -> None:
    model = _model(count=6)
    cache = model.new_cache(64)
    plan = model.decode_plan(cache)
    assert plan.explain() == "layers 0 to 5: modules; no token has been decoded yet"
    model.layers[1].attention.o_proj.register_forward_hook(lambda *call: None)
    model.layers[2].feed_forward.activation = "relu"
    model.layers[3].register_forward_hook(lambda *call: None)
    model.layers[4].attention.q_proj = nn.Linear(E, 64, bias=False, dtype=torch.float64)
    _wrapped(model.layers[5], "attention")
    with pytest.raises(RuntimeError, match=r"dtype|mat1"):
        _decoded(model, cache)
    model.layers[4].attention.q_proj = nn.Linear(E, 64, bias=False)
    _decoded(model, cache)
    assert plan.explain().splitlines() == [
        "layer 0: native",
        "layer 1: modules; attention.o_proj: it has forward hooks",
        "layer 2: native up to its self-attention; then modules: feed_forward: activation is relu "
        "where its configuration says silu",
        "layer 3: native, in a call of its own, which hooks or compilation see",
        "layer 4: native",
        "layer 5: modules; attention: it is a _Doubled, not exactly a MultiHeadAttention",
    ]


def _uneven(cache: ModelCache, model: Transformer) -> ModelCache:
    """Two rows, of which the first is three tokens behind."""
    positions = torch.arange(S)[None] - torch.tensor([[3], [0]])
    model(_ids(2 * S, 0).view(2, S), cache=cache, positions=positions)
    return cache


def test_rows_of_a_ring_that_differ_in_length_are_native() -> None:
    attention = AttentionConfig(4, 2, 16, rope=RopeConfig(), window=12)
    model = _model(replace(HEADS, attention=attention))
    cache = _uneven(model.new_cache(64, spare=5), model)
    assert [type(each.layout) for each in cache.layers] == [Ring] * 3  # type: ignore[attr-defined]
    for length in range(S + 1, 40):
        ids, other = _ids(2, length).view(2, 1), cache.fork()
        wanted = _by_modules(model, ids, other)
        torch.testing.assert_close(model(ids, cache=cache), wanted, atol=0, rtol=0)
        assert model.decode_plan(cache).is_native
        assert model.decode_plan(cache).explain() == "layers 0 to 2: native"


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_codes_that_differ_in_length_are_native(bits: int, window: int | None) -> None:
    model = _model(
        replace(HEADS, attention=AttentionConfig(4, 2, 16, rope=RopeConfig(), window=window))
    )
    codes = Quantized(bits, bits, group=4, recent=4, sink_tokens=2 if window is None else 0)
    cache = _uneven(model.new_cache(64, quantized=codes, spare=5), model)
    counts = [1, 1, 1, 1, 3, 1, 5, *[1] * 20]
    for seed, count in enumerate(counts):
        ids, other = _ids(2 * count, seed).view(2, count), cache.fork()
        wanted = _by_modules(model, ids, other)
        torch.testing.assert_close(model(ids, cache=cache), wanted, atol=0, rtol=0)
        assert model.decode_plan(cache).is_native is (count <= codes.recent)
        assert cache.max_rollback == other.max_rollback
        if seed == 9:
            cache.rollback([2, 1])
        elif seed == 15:
            cache.reorder([1, 0])


def test_a_plan_says_when_a_cache_must_do_more_than_write() -> None:
    model = _model()
    codes = Quantized(8, 8, group=8, recent=8)
    cache = _uneven(model.new_cache(64, kind="paged", quantized=codes), model)
    model(_ids(2, 1).view(2, 1), cache=cache)
    assert model.decode_plan(cache).explain() == "layers 0 to 2: native"
    cache.rollback(1)
    with ph.batch_invariant():
        model(_ids(2, 1).view(2, 1), cache=cache)
    alone = "rows of its quantized cache differ in length, each with its bits alone"
    assert model.decode_plan(cache).explain() == f"layers 0 to 2: modules; {alone}"
    assert not model.decode_plan(cache).is_native
    said = list[str]()
    for seed in range(70):
        model(_ids(2, seed).view(2, 1), cache=cache)
        said.append(model.decode_plan(cache).explain())
    assert {*said} == {
        "layers 0 to 2: native",
        "layers 0 to 2: modules; its cache had to make room, or to move or encode tokens",
    }
    assert said.count("layers 0 to 2: native") > 30


def _decoded(model: Transformer, cache: ModelCache) -> None:
    model(_ids(S, 0), cache=cache)
    for seed in (1, 2):
        model(_ids(1, seed), cache=cache)
