"""The gradients of the native code of every instruction set, against the oracle's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from native_problems import problems

import polyhead as ph
from polyhead import native
from polyhead.caches import DenseCache, PagedCache, RingCache
from polyhead.native.code import Extras, Piece

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
CODES = native.all_codes()
APART = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Most that a gradient may differ from the oracle's, as a share of the greatest that there is."""


def gradients(tensors, dtype, kernel, weights, **arguments):
    """Of q, k, v (and sinks), of a sum over out and lse with given weights."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    q, k, v, *sinks = leaves
    if sinks:
        arguments["sinks"] = sinks[0]
    out, lse = ph.attention(q, k, v, kernel=kernel, return_lse=True, **arguments)
    seen = lse.isfinite()
    of_out, of_lse = (w.to(x.dtype) for w, x in zip(weights, (out, lse), strict=True))
    torch.autograd.backward([out, lse], [of_out, torch.where(seen, of_lse, 0.0)])
    return [leaf.grad for leaf in leaves]


def check(q, k, v, sinks=None, **arguments):
    torch.manual_seed(1)
    weights = torch.randn(*q.shape[:3], v.shape[3]).to(q.dtype), torch.randn(q.shape[:3])
    tensors = [q, k, v] if sinks is None else [q, k, v, sinks.to(q.dtype)]
    found = gradients(tensors, q.dtype, "native", weights, **arguments)
    wanted = gradients(tensors, torch.float64, "reference", weights, **arguments)
    most = max(theirs.abs().max() for theirs in wanted).item()
    for mine, theirs, leaf in zip(found, wanted, tensors, strict=True):
        assert mine.shape == leaf.shape
        assert mine.dtype == q.dtype
        apart = APART[q.dtype] * (most + 1)
        torch.testing.assert_close(mine.double(), theirs, atol=apart, rtol=APART[q.dtype])


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@settings(max_examples=50, deadline=None)
@given(problem=problems())
def test_any_problem_equals_the_oracle(code, problem):
    q, k, v, arguments = problem
    with native.using(code):
        check(q, k, v, **arguments)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("H", "G", "T", "S", "D", "V"),
    [
        (1, 1, 400, 400, 64, 64),  # one head, whose keys are shared out among threads
        (9, 3, 130, 300, 64, 48),
        (8, 1, 50, 500, 32, 32),  # blocks of rows of several heads
        (300, 1, 1, 200, 16, 16),
        (2, 2, 97, 129, 192, 128),
    ],
)
def test_shapes_of_training(code, threads, H, G, T, S, D, V):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, H, T, D), torch.randn(1, G, S, D), torch.randn(1, G, S, V)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with native.using(code):
            for dtype in APART:
                check(q.to(dtype), k.to(dtype), v.to(dtype), mask=ph.Causal())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("content", [float("nan"), float("inf"), -float("inf")])
def test_what_is_masked_gives_and_takes_nothing(content):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 9, 32), torch.randn(2, 2, 140, 32), torch.randn(2, 2, 140, 32)
    weights = torch.randn(2, 4, 9, 32), torch.randn(2, 4, 9)
    mask = ph.KeyLengths([70, 0])
    clean = gradients([q, k, v], torch.float32, "native", weights, mask=mask)
    k[:, :, 70:], v[:, :, 70:] = content, content
    spoiled = gradients([q, k, v], torch.float32, "native", weights, mask=mask)
    for before, after in zip(clean, spoiled, strict=True):
        assert torch.equal(before, after)
        assert (after[1] == 0).all()
    assert (spoiled[1][:, :, 70:] == 0).all()


@pytest.mark.parametrize("H", [1, 3])
def test_any_run_is_bit_identical_with_any_number_of_threads(H):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, H, 700, 64), torch.randn(1, 1, 700, 64), torch.randn(1, 1, 700, 64)
    piece, extras = Piece(k, v), Extras()
    result = native.code().attend(q, [piece], 0.125, extras, lse=True)
    grads = torch.randn(1, H, 700, 64), torch.randn(1, H, 700)
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 2, 2, 3, 7):
            torch.set_num_threads(threads)
            runs.append(native.code().gradients(q, piece, 0.125, extras, result, grads))
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_gradients_that_nobody_asked_for_or_that_lie_strangely():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 20, 2, 16).transpose(1, 2).requires_grad_() for _ in range(3))
    out, lse = ph.attention(q, k, v, kernel="native", return_lse=True)
    out.sum().backward(retain_graph=True)  # an expanded gradient
    once = q.grad.clone()
    q.grad = None
    ph.attention(q, k, v, kernel="reference").sum().backward()
    torch.testing.assert_close(once, q.grad, atol=1e-6, rtol=1e-5)
    v.grad = None
    lse.sum().backward()
    assert (v.grad == 0).all()


@pytest.mark.parametrize("kernel", ["native", "tiled"])
def test_a_second_derivative_is_an_error_and_not_zero(kernel):
    q, k, v = (torch.randn(1, 2, 5, 16, requires_grad=True) for _ in range(3))
    out = ph.attention(q, k, v, kernel=kernel)
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no autograd formula|cannot differentiate twice"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("make", "kernel"),
    [(DenseCache, "native"), (lambda: RingCache(8), "tiled"), (lambda: PagedCache(4), "tiled")],
    ids=["dense", "ring", "pages"],
)
def test_a_cache_in_training_goes_another_way_unless_it_is_one_tensor(make, kernel):
    cache, kv = make(), torch.randn(1, 2, 13, 16)
    with torch.no_grad():
        cache.append(kv[:, :, :12], kv[:, :, :12])
    source = cache.append(kv[:, :, 12:], kv[:, :, 12:])
    mask = ph.Causal() & ph.Window(8)
    q = torch.randn(1, 2, 1, 16, requires_grad=True)
    assert ph.explain(q.detach(), source, mask=mask).kernel == "native"
    assert ph.explain(q, source, mask=mask).kernel == kernel
    results = (
        ph.attention(q, source, mask=mask),
        ph.attention(q, kv, kv, mask=mask, kernel="reference"),
    )
    got, want = (torch.autograd.grad(out.square().sum(), q)[0] for out in results)
    torch.testing.assert_close(got, want)
