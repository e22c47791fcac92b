"""Tensors that are not what they seem: what has no memory of its own, or other values in it."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import polyhead as ph
from polyhead import native
from polyhead.caches import PagedCache, QuantizedCache
from polyhead.errors import UnsupportedError
from polyhead.layers import linear as linear_layer
from polyhead.layers.norms import RMSNorm, normalize
from polyhead.layers.positions import RoPE
from polyhead.semantics import DenseSource

FLATTENS = Version(torch.__version__) >= Version("2.12")
"""Whether torch flattens a DTensor whose heads are sharded."""
needs_native = pytest.mark.skipif(native.unavailable() is not None, reason="no native code here")


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def problem():
    return draw(2, 4, 5, 16), draw(2, 2, 7, 16), draw(2, 2, 7, 16)


class Wrapped(Tensor):
    """A tensor without memory around one that has some."""

    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, function(*args, **kwargs))


ARGUMENTS = {
    "plain": {},
    "causal": {"mask": ph.Causal()},
    "window": {"mask": ph.Causal() & ph.Window(3), "softcap": 4.0},
    "alibi and sinks": {"bias": ph.ALiBi(4), "sinks": torch.zeros(4)},
}


@pytest.mark.parametrize("kernel", ["auto", "tiled", "reference"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_fake_tensors_tell_the_shape_inside_and_outside_their_mode(name, kernel):
    mode, arguments = FakeTensorMode(allow_non_fake_inputs=True), ARGUMENTS[name]
    q, k, v = map(mode.from_tensor, problem())
    with torch.no_grad():
        found = [ph.attention(q, k, v, kernel=kernel, **arguments)]
        with mode:
            found.append(ph.attention(q, k, v, kernel=kernel, **arguments))
    for out in found:
        assert isinstance(out, FakeTensor)
        assert out.shape == q.shape


CACHES = {
    "dense": ph.DenseCache,
    "ring": lambda: ph.RingCache(8),
    "pages": lambda: PagedCache(4),
    "quantised": lambda: QuantizedCache(sink_tokens=0, recent=0, group=2),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_of_fake_tensors_tells_the_shape_without_native_code(name):
    """Addresses of its runs would be those of nothing."""
    with torch.no_grad(), FakeTensorMode():
        held = CACHES[name]()
        for _ in range(3):
            source = held.append(torch.randn(1, 2, 4, 32), torch.randn(1, 2, 4, 32))
        q = torch.randn(1, 4, 1, 32)
        mask = ph.Causal() & ph.Window(8)
        assert ph.attention(q, source, mask=mask).shape == q.shape
        if type(source) is not DenseSource:
            refusal = ph.explain(q, source, mask=mask).refusals["native"]
            assert refusal.startswith("cannot do tensors of a cache without values")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_meta_tensors_tell_the_shape(name):
    q, k, v = (x.to("meta") for x in problem())
    arguments = dict(ARGUMENTS[name])
    if "sinks" in arguments:
        arguments["sinks"] = arguments["sinks"].to("meta")
    assert ph.attention(q, k, v, **arguments).shape == q.shape


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_subclass_without_memory_is_computed_by_torchs_operators(name):
    tensors = problem()
    with torch.no_grad():
        out = ph.attention(*map(Wrapped, tensors), **ARGUMENTS[name])
        torch.testing.assert_close(out.inner, ph.attention(*tensors, **ARGUMENTS[name]))


@pytest.fixture(scope="module")
def mesh():
    import torch.distributed as dist
    from torch.distributed.tensor import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kernel", ["auto", "tiled", "reference"])
@pytest.mark.parametrize("name", ["plain", "causal", "window"])
def test_a_dtensor_keeps_its_sharding_of_heads(mesh, name, kernel, grad):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    local = problem()
    if grad and kernel == "reference" and name != "plain":
        pytest.skip("refused by name")
    expected = ph.attention(*local, **ARGUMENTS[name])
    for placement in (Shard(1), Replicate()):
        q, k, v = (
            DTensor.from_local(x, mesh, [placement], run_check=False).requires_grad_(grad)
            for x in local
        )
        if placement == Shard(1) and not FLATTENS:
            with pytest.raises(UnsupportedError, match=r"heads are sharded need torch 2\.12"):
                ph.attention(q, k, v, kernel=kernel, **ARGUMENTS[name])
            continue
        out = ph.attention(q, k, v, kernel=kernel, **ARGUMENTS[name])
        assert out.placements == (placement,)
        torch.testing.assert_close(out.to_local(), expected, atol=1e-5, rtol=1e-5)
        if grad:
            out.sum().backward()
            assert q.grad.shape == q.shape


@needs_native
@pytest.mark.parametrize("name", ARGUMENTS)
def test_negated_views_keep_their_sign(name):
    q, k, v = problem()
    arguments = dict(ARGUMENTS[name])
    expected = ph.attention(q, k, v, **arguments)
    if "sinks" in arguments:
        arguments["bias"] = ph.ALiBi(torch._neg_view(-arguments["bias"].slopes))
    for i in range(3):
        tensors = [q, k, v]
        tensors[i] = torch._neg_view(-tensors[i])
        torch.testing.assert_close(ph.attention(*tensors, **arguments), expected)
    imaginary = torch.complex(v, -v).conj().imag  # torch makes such views by itself
    assert imaginary.is_neg()
    torch.testing.assert_close(ph.attention(q, k, imaginary, **arguments), expected)


@needs_native
def test_modules_see_the_sign_of_negated_views():
    x, weight = draw(2, 1, 16), draw(16)
    norm, linear, rope = RMSNorm(16), nn.Linear(16, 8), RoPE()
    q = x.view(2, 1, 1, 16)
    negated = torch._neg_view(-q)
    with torch.no_grad():
        expected = norm(x), linear_layer.linear(x, linear), rope.apply(q, head_axis=2)
        torch.testing.assert_close(norm(torch._neg_view(-x)), expected[0])
        found = linear_layer.linear(torch._neg_view(-x), linear)
        torch.testing.assert_close(found, expected[1])
        torch.testing.assert_close(rope.apply(negated, head_axis=2), expected[2])
        norm.weight = nn.Parameter(torch._neg_view(-weight))
        found = norm(x)
        norm.weight = nn.Parameter(weight)
        torch.testing.assert_close(found, norm(x))


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@needs_native
def test_a_mode_that_watches_operators_sees_one():
    with torch.no_grad(), Watching() as watching:
        ph.attention(*problem(), kernel="native")
    assert torch.ops.polyhead.attention.default in watching.seen


@pytest.mark.parametrize("kernel", ["auto", "tiled", "reference"])
@pytest.mark.parametrize("grad", [False, True])
def test_an_empty_batch_gives_an_empty_result_and_empty_gradients(kernel, grad):
    tensors = [x[:0].requires_grad_(grad) for x in problem()]
    out = ph.attention(*tensors, mask=ph.Causal(), kernel=kernel)
    assert out.shape == (0, 4, 5, 16)
    if grad:
        out.sum().backward()
        assert [x.grad.shape for x in tensors] == [x.shape for x in tensors]


def test_an_empty_dtensor_is_refused_because_torch_would_not_return(mesh):
    from torch.distributed.tensor import DTensor, Replicate

    q, k, v = (DTensor.from_local(x[:0], mesh, [Replicate()], run_check=False) for x in problem())
    with pytest.raises(ph.UnsupportedError, match="DTensor without elements"):
        ph.attention(q, k, v)


def test_no_keys_may_have_positions():
    q, k, v = problem()
    none = torch.zeros(0, dtype=torch.int64)
    for kernel in ("tiled", "reference"):
        out = ph.attention(
            q, k[:, :, :0], v[:, :, :0], mask=ph.Causal(), kernel=kernel,
            q_positions=torch.arange(5), kv_positions=none,
        )  # fmt: skip
        assert (out == 0).all()


def test_sinks_lie_on_the_device_of_q():
    q, k, v = problem()
    with pytest.raises(ValueError, match="sinks must be on the device of q"):
        ph.attention(q.to("meta"), k.to("meta"), v.to("meta"), sinks=torch.zeros(4))


def test_nothing_that_a_mode_made_is_kept_for_later():
    norm, rope, x, q = RMSNorm(13), RoPE(), draw(2, 13), draw(1, 5, 2, 8)
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(norm(x), FakeTensor)
            assert isinstance(rope.apply(q, head_axis=2), FakeTensor)
        for eps in (1e-5, 1e-6):
            assert type(normalize(x, eps)) is Tensor
        assert type(rope.apply(q, head_axis=2)) is Tensor
