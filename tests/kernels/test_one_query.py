"""A decoding loop's plain call takes few checks, and gives what the call with all of them gives."""

import math

import pytest
import torch

import polyhead as ph
from polyhead import native
from polyhead.kernels.native import one_query

pytestmark = pytest.mark.skipif(native.code() is None, reason="needs native code")


def tensors(dtype=torch.float32, B=2, H=6, G=3, S=70, D=32, V=48, T=1):
    random = torch.Generator().manual_seed(S)
    shapes = (B, H, T, D), (B, G, S, D), (B, G, S, V)
    return [torch.randn(*shape, generator=random).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [{}, {"G": 1}, {"G": 6, "S": 1}, {"B": 1, "S": 3000}])
@pytest.mark.parametrize("options", [{}, {"mask": ph.Causal()}, {"scale": 0.3}])
@torch.no_grad()
def test_it_has_the_bits_of_the_call_with_all_checks(dtype, shape, options):
    q, k, v = tensors(dtype, **shape)
    expected = ph.attention(q, k, v, kernel="native", **options)
    assert torch.equal(one_query(q, k, v, options.get("scale")), expected)
    assert torch.equal(ph.attention(q, k, v, **options), expected)


@torch.no_grad()
def test_keys_are_read_where_a_projection_left_them():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors())
    assert torch.equal(one_query(q, k, v, None), ph.attention(q, k, v, kernel="native"))


OTHERS = {
    "two queries": lambda q, k, v: (torch.cat([q, q], dim=2), k, v, None),
    "heads that kv heads do not divide": lambda q, k, v: (q[:, :5], k, v, None),
    "another batch": lambda q, k, v: (q, k[:1], v, None),
    "another head size": lambda q, k, v: (q[..., :16], k, v, None),
    "other values": lambda q, k, v: (q, k, v[:, :, :-1], None),
    "no keys": lambda q, k, v: (q, k[:, :, :0], v[:, :, :0], None),
    "no kv heads": lambda q, k, v: (q, k[:, :0], v[:, :0], None),
    "another dtype": lambda q, k, v: (q, k.bfloat16(), v.bfloat16(), None),
    "another dtype of values": lambda q, k, v: (q, k, v.half(), None),
    "float64": lambda q, k, v: (q.double(), k.double(), v.double(), None),
    "a source of keys": lambda q, k, v: (q, object(), None, None),
    "three dimensions": lambda q, k, v: (q[0], k[0], v[0], None),
    "no tensor": lambda q, k, v: (None, k, v, None),
    "a scale that is not finite": lambda q, k, v: (q, k, v, math.nan),
    "a scale that is a tensor": lambda q, k, v: (q, k, v, torch.ones(())),
    "gaps between features": lambda q, k, v: (q, k[..., ::2], v, None),
    "a parameter": lambda q, k, v: (torch.nn.Parameter(q), k, v, None),
    "conjugate values": lambda q, k, v: (q, k, torch._neg_view(v), None),
    "another device": lambda q, k, v: (q.to("meta"), k, v, None),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=[*OTHERS])
@torch.no_grad()
def test_what_it_does_not_know_is_left_to_all_checks(change):
    assert one_query(*change(*tensors())) is None


def test_gradients_modes_and_determinism_are_left_to_all_checks():
    q, k, v = tensors()
    assert one_query(q, k, v, None) is None  # gradients are recorded
    with torch.no_grad(), ph.batch_invariant():
        assert one_query(q, k, v, None) is None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert one_query(q, k, v, None) is None
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            assert one_query(q, k, v, None) is None
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": ph.Window(3)},
        {"bias": ph.ALiBi(6)},
        {"softcap": 5.0},
        {"sinks": torch.zeros(6)},
        {"q_positions": torch.tensor([5])},
        {"kv_positions": torch.arange(70)},
        {"dropout_p": 0.5},
        {"return_lse": True},
        {"kernel": "tiled"},
    ],
)
@torch.no_grad()
def test_calls_with_more_than_keys_are_not_taken(options, monkeypatch):
    monkeypatch.setattr("polyhead.kernels.dispatch.one_query", lambda *_: pytest.fail("taken"))
    q, k, v = tensors()
    ph.attention(q, k, v, **options)
