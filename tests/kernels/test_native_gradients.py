"""The gradients of the native code of every instruction set, against the oracle's."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from native_problems import problems

import matrix
import polyhead as ph
from polyhead import native
from polyhead.caches import DenseCache, PagedCache, RingCache
from polyhead.native.arguments import KVSegment, ScoreMods
from polyhead.semantics import TensorBias, Tokens

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
CODES = native.all_codes()
APART = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Most that a gradient may differ from the oracle's, as a share of the greatest that there is."""


def gradients(tensors, dtype, kernel, weights, sinks=None, bias=None, **arguments):
    """Of q, k, v (and sinks, and the bias), of a sum over out and lse with given weights."""

    def leaf(x):
        leaves.append(x.detach().to(dtype).requires_grad_())
        return leaves[-1]

    leaves = []
    q, k, v = map(leaf, tensors)
    if sinks is not None:
        sinks = leaf(sinks)
    if bias is not None:
        bias = bias.with_tensors([leaf(x) for x in bias.tensors])
    arguments["generator"] = torch.Generator().manual_seed(7)  # dropout is the same everywhere
    out, lse = ph.attention(
        q, k, v, kernel=kernel, return_lse=True, sinks=sinks, bias=bias, **arguments
    )
    seen = lse.isfinite()
    of_out, of_lse = (w.to(x.dtype) for w, x in zip(weights, (out, lse), strict=True))
    torch.autograd.backward([out, lse], [of_out, torch.where(seen, of_lse, 0.0)])
    return [leaf.grad for leaf in leaves]


def check(q, k, v, sinks=None, bias=None, threads=(), **arguments):
    """Every code's gradients, with each number of threads (default: as many as there are)."""
    torch.manual_seed(1)
    weights = torch.randn(*q.shape[:3], v.shape[3]).to(q.dtype), torch.randn(q.shape[:3])
    if sinks is not None:
        arguments["sinks"] = sinks.to(q.dtype)
    if bias is not None:
        bias = bias if isinstance(bias, ph.Bias) else TensorBias(bias)
        arguments["bias"] = bias.with_tensors([x.to(q.dtype) for x in bias.tensors])
    wanted = gradients([q, k, v], torch.float64, "reference", weights, **arguments)
    most = max(theirs.abs().max() for theirs in wanted[:3]).item()
    apart = [APART[q.dtype] * (most + 1)] * len(wanted)
    if bias is not None:
        apart[-1] += matrix.band("bias", terms_of_bias([q, k, v], weights, **arguments), q.dtype)
    before = torch.get_num_threads()
    for code, count in itertools.product(CODES, threads or [before]):
        torch.set_num_threads(count)
        try:
            with native.using(code):
                found = gradients([q, k, v], q.dtype, "native", weights, **arguments)
        finally:
            torch.set_num_threads(before)
        for i, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
            where = f"{code.name}, {count} threads, gradient {i}"
            assert mine.shape == theirs.shape, where
            assert mine.dtype == q.dtype, where
            torch.testing.assert_close(
                mine.double(),
                theirs,
                atol=apart[i],
                rtol=APART[q.dtype],
                msg=lambda words, where=where: f"{where}: {words}",
            )


def terms_of_bias(tensors, weights, bias, **arguments):
    """The sums of absolute terms behind the bias's gradient."""
    (B, H, T, _), S = tensors[0].shape, tensors[1].shape[2]
    q_tokens = Tokens.of(T, shift=S - T, positions=arguments.get("q_positions"))
    k_tokens = Tokens.of(S, positions=arguments.get("kv_positions"))
    learned = bias.tensors[0].detach().double().requires_grad_()
    drawn = bias.with_tensors([learned]).tile(q_tokens, k_tokens, learned).expand(B, H, T, S)
    *_, of_scores = gradients(
        tensors, torch.float64, "reference", weights, bias=TensorBias(drawn), **arguments
    )
    (sums,) = torch.autograd.grad(drawn, learned, of_scores.abs())
    return sums.abs().numpy()


@settings(max_examples=50, deadline=None)
@given(problem=problems())
def test_any_problem_equals_the_oracle(problem):
    q, k, v, arguments = problem
    check(q, k, v, **arguments)


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
def test_shapes_of_training(H, G, T, S, D, V):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, H, T, D), torch.randn(1, G, S, D), torch.randn(1, G, S, V)
    for dtype, p in zip(APART, (0.0, 0.1, 0.5), strict=True):
        arguments = {"mask": ph.Causal(), "dropout_p": p}
        check(q.to(dtype), k.to(dtype), v.to(dtype), threads=(1, 2, 5), **arguments)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1.0, 3.0])
def test_a_scale_may_be_any_number(scale):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 40, 32), torch.randn(1, 2, 300, 32), torch.randn(1, 2, 300, 32)
    check(q, k, v, scale=scale, mask=ph.Causal())


BIAS_SHAPES = list(itertools.product((1, 2), (1, 4), (1, 130), (1, 300)))


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_a_bias_of_any_shape_gets_the_sum_over_what_it_was_broadcast_to(shape):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 130, 32), torch.randn(2, 2, 300, 32), torch.randn(2, 2, 300, 16)
    bias, sinks = torch.randn(shape), torch.randn(4)
    for dtype in APART:
        call = q.to(dtype), k.to(dtype), v.to(dtype), sinks, bias
        check(*call, mask=ph.Causal() & ph.KeyLengths([0, 210]), softcap=3.0, dropout_p=0.1)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda H: ph.RelativeBias(torch.randn(32, H)),
        lambda H: ph.RelativeBias(torch.randn(12, H), bidirectional=False, max_distance=20),
        lambda H: ph.RelativeBias(torch.randn(12, H), max_distance=2000),
        ph.ALiBi,
    ],
    ids=["T5", "one-sided", "farther than any key", "ALiBi"],
)
def test_a_bias_by_position_gets_the_sum_over_all_pairs(make, positions):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 130, 16), torch.randn(2, 2, 300, 16), torch.randn(2, 2, 300, 16)
    arguments = {"mask": ph.Window(170, ahead=150), "softcap": 3.0}
    if positions:
        arguments["q_positions"] = torch.randint(0, 500, (2, 130))
        arguments["kv_positions"] = torch.stack([torch.randperm(500)[:300] for _ in range(2)])
    bias = make(6)
    for dtype in APART:
        check(q.to(dtype), k.to(dtype), v.to(dtype), bias=bias, **arguments)


@pytest.mark.parametrize("how", ["transposed", "sliced", "expanded"])
def test_a_bias_may_lie_in_memory_as_it_likes(how):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 40, 16), torch.randn(2, 2, 150, 16), torch.randn(2, 2, 150, 16)
    room = torch.randn(4, 300, 40, requires_grad=True)
    views = {
        "transposed": lambda x: x[:, :150].mT,
        "sliced": lambda x: x[:, ::2].mT[:, :, :150],
        "expanded": lambda x: x[0, 0].expand(2, 4, 150, 40).mT,
    }
    found = []
    for kernel in ("native", "reference"):
        out = ph.attention(q, k, v, bias=views[how](room), kernel=kernel)
        found += torch.autograd.grad(out.sin().sum(), room)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("content", [float("nan"), float("inf"), -float("inf")])
def test_what_is_masked_gives_and_takes_nothing(content):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 9, 32), torch.randn(2, 2, 140, 32), torch.randn(2, 2, 140, 32)
    weights = torch.randn(2, 4, 9, 32), torch.randn(2, 4, 9)
    bias = TensorBias(torch.randn(2, 1, 9, 140))
    arguments = {"mask": ph.KeyLengths([70, 0]), "bias": bias}
    clean = gradients([q, k, v], torch.float32, "native", weights, **arguments)
    k[:, :, 70:], v[:, :, 70:], bias.tensor[..., 70:] = content, content, content
    spoiled = gradients([q, k, v], torch.float32, "native", weights, **arguments)
    for before, after in zip(clean, spoiled, strict=True):
        assert torch.equal(before, after)
        assert (after[1] == 0).all()
    assert (spoiled[1][:, :, 70:] == 0).all()
    assert (spoiled[3][..., 70:] == 0).all()
    table = ph.RelativeBias(torch.randn(12, 4))
    spoiled = gradients([q, k, v], torch.float32, "native", weights, **arguments | {"bias": table})
    assert spoiled[3].isfinite().all()


def assert_same_bits_for_any_number_of_threads(q, k, v, mods):
    piece, (B, H, T, _) = KVSegment(k, v), q.shape
    result = native.code().attend(q, [piece], 0.125, mods, lse=True)
    grads = torch.randn(B, H, T, v.shape[3]), torch.randn(B, H, T)
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 2, 2, 3, 7):
            torch.set_num_threads(threads)
            runs.append(native.code().gradients(q, piece, 0.125, mods, result, grads, of_bias=True))
    finally:
        torch.set_num_threads(before)
    assert len(runs[0]) == (3 if mods.learned is None else 4)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("H", [1, 3])
def test_any_run_is_bit_identical_with_any_number_of_threads(H):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, H, 700, 64), torch.randn(1, 1, 700, 64), torch.randn(1, 1, 700, 64)
    assert_same_bits_for_any_number_of_threads(q, k, v, ScoreMods())


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 400, 400), (1, 8, 400, 400), (4, 1, 400, 400), (4, 8, 400, 400), (1, 8, 1, 400),
     (4, 1, 400, 1), "by distance", "slopes"],
    ids=str,
)  # fmt: skip
def test_the_gradient_of_a_bias_is_bit_identical_too(shape):
    torch.manual_seed(0)
    # Tasks that added to one place side by side would last long enough to meet.
    q, k, v = torch.randn(4, 8, 400, 16), torch.randn(4, 4, 400, 16), torch.randn(4, 4, 400, 16)
    at = torch.arange(400)[None]
    if shape == "by distance":
        mods = ScoreMods(q_positions=at, by_distance=torch.randn(8, 41))
    elif shape == "slopes":
        mods = ScoreMods(q_positions=at, slopes=torch.rand(8))
    else:
        mods = ScoreMods(bias=torch.randn(shape))
    assert_same_bits_for_any_number_of_threads(q, k, v, mods)


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
