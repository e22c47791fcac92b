"""The native code of every instruction set that this processor has, against the oracle."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from hypothesis import given, settings
from native_problems import CLOSE, problems
from torch import Tensor

import polyhead as ph
from polyhead import native
from polyhead.caches import DenseCache, PagedCache, RingCache
from polyhead.cli import main
from polyhead.errors import UnsupportedError
from polyhead.kernels import KERNELS
from polyhead.native import tensor_check
from polyhead.native.arguments import KVSegment, ScoreMods
from polyhead.semantics import RoundedALiBi

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
CODES = native.all_codes()
module = importlib.import_module("polyhead.native.selection")


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class CosineBias(ph.Bias):
    """A bias that native code has never heard of."""

    def __init__(self, waves):
        self.tensors = (waves,)

    def tile(self, q, k, like):
        apart = (q.place_tensor(like.device)[:, None] - k.place_tensor(like.device)).to(like)
        return torch.cos(self.tensors[0].to(like)[:, None, None] * apart)[None]

    def check(self, batch, heads, queries, keys):
        pass

    with_tensors = of_heads = tensors = None


def exact(q, k, v, **arguments):
    sinks = arguments.pop("sinks", None)
    sinks = None if sinks is None else sinks.double()
    return ph.attention(
        q.double(), k.double(), v.double(), kernel="reference", return_lse=True, sinks=sinks,
        generator=dice(), **arguments,
    )  # fmt: skip


def dice():
    """Where the seed of dropout comes from: the same for all kernels."""
    return torch.Generator().manual_seed(7)


def check(q, k, v, **arguments):
    out, lse = ph.attention(
        q, k, v, kernel="native", return_lse=True, generator=dice(), **arguments
    )
    wanted, wanted_lse = exact(q, k, v, **arguments)
    close = CLOSE[q.dtype]
    # Of a row whose scores are large (far from all its keys, with ALiBi) float32 keeps less.
    scores = wanted_lse.abs().where(wanted_lse.isfinite(), 0.0)[..., None]
    error = (out - wanted).abs()
    real = wanted.isfinite()
    assert torch.equal(out.double()[~real].nan_to_num(0.5), wanted[~real].nan_to_num(0.5))
    allowed = close * (1 + wanted.abs()) + 2**-23 * scores * v.abs().max()
    assert (error <= allowed)[real].all(), (error - allowed)[real].max()
    # Scores are added up in float32 whatever the dtype, so lse is as exact as that.
    torch.testing.assert_close(lse.double(), wanted_lse, atol=2e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_any_problem_equals_the_oracle(code, problem):
    q, k, v, arguments = problem
    with native.using(code):
        check(q, k, v, **arguments)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize(
    ("H", "G", "T", "S", "D", "V"),
    [
        (9, 3, 1, 1000, 64, 64),  # keys of three heads shared out among threads
        (8, 1, 1, 3000, 64, 64),
        (32, 1, 1, 700, 128, 128),
        (16, 1, 1, 700, 576, 512),  # absorbed latent attention
        (12, 1, 1, 299, 96, 32),  # fewer rows than lanes
        (4, 2, 2, 500, 64, 64),
        (4, 4, 130, 130, 64, 80),
        (200, 1, 2, 64, 16, 16),  # more heads than a block has rows
    ],
)
def test_shapes_of_decoding_and_prompts(code, threads, H, G, T, S, D, V):
    torch.manual_seed(0)
    q, k = torch.randn(1, H, T, D), torch.randn(1, G, S, D)
    v = k[..., :V] if D > V else torch.randn(1, G, S, V)
    with native.using(code):
        for dtype in CLOSE:
            check(q.to(dtype), k.to(dtype), v.to(dtype), mask=ph.Causal())


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_rounded_alibi_is_read_as_slopes_where_no_gradient_is_asked_for(code):
    torch.manual_seed(0)
    bias, at = RoundedALiBi(4, 0.3), torch.arange(0, 3900, 13)
    with native.using(code):
        for dtype in CLOSE:
            for T, places in (
                (1, {}), (5, {}), (90, {}), (7, {"q_positions": at[-7:], "kv_positions": at}),
            ):  # fmt: skip
                q, k, v = (torch.randn(2, n, s, 16).to(dtype) for n, s in ((4, T), *[(2, 300)] * 2))
                check(q, k, v, mask=ph.Causal(), bias=bias, softcap=9.0, **places)
    with torch.enable_grad(), pytest.raises(UnsupportedError, match="bias=RoundedALiBi"):
        ph.attention(q.requires_grad_(), k, v, bias=bias, kernel="native")


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_queries_have_the_same_bits_for_any_threads_and_neighbours(code, dtype):
    before = torch.get_num_threads()
    with native.using(code):
        for H, G, T, S, D in ((9, 3, 1, 700, 64), (8, 1, 2, 5000, 32), (16, 16, 1, 530, 16)):
            q, k, v = (
                torch.randn(shape).to(dtype) for shape in ((5, H, T, D), (5, G, S, D), (5, G, S, D))
            )
            wanted = None
            try:
                for count in (1, 2, 5):
                    torch.set_num_threads(count)
                    for rows in ([0, 1, 2, 3, 4], [3], [4, 0, 2]):
                        out, lse = ph.attention(
                            q[rows], k[rows], v[rows], kernel="native", return_lse=True
                        )
                        wanted = (out, lse) if wanted is None else wanted
                        assert torch.equal(out, wanted[0][rows])
                        assert torch.equal(lse, wanted[1][rows])
            finally:
                torch.set_num_threads(before)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize(
    ("H", "G", "D", "V", "dtype", "window"),
    [
        (9, 3, 64, 64, torch.bfloat16, None),
        (8, 4, 32, 48, torch.float32, 290),
        (12, 1, 48, 32, torch.float32, 200),  # rows in lanes, and bfloat16's by pairs
        (10, 1, 64, 64, torch.bfloat16, None),
        (32, 1, 64, 64, torch.float16, None),  # more heads than few rows are
        (5, 5, 72, 40, torch.float32, None),  # no whole vectors
    ],
)
def test_by_row_a_prompt_has_the_bits_of_decoding(code, H, G, D, V, dtype, window):
    """However a prompt is cut, whatever follows a query and for any number of threads."""
    before, S = torch.get_num_threads(), 640
    q, k, v = torch.randn(2, H, S, D), torch.randn(2, G, S, D), torch.randn(2, G, S, V)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    high = torch.arange(1, S + 1)[None]
    low = torch.zeros_like(high) if window is None else (high - window).clamp(min=0)

    def attend(rows: slice, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        bounds = low[:, first:last].contiguous(), high[:, first:last].contiguous()
        keys = KVSegment(k[rows, :, :last], v[rows, :, :last])
        mods = ScoreMods(bounds=bounds, batch_invariant=True)
        return code.attend(q[rows, :, first:last], [keys], 0.3, mods, lse=True)

    try:
        torch.set_num_threads(1)
        wanted = attend(slice(0, 2), 0, S)
        for threads, rows, first, last in (
            (2, slice(1, 2), 0, 300), (3, slice(0, 2), 100, 117), (5, slice(0, 1), 300, S),
            *((i % 3 + 1, slice(0, 1), i, i + 1) for i in (0, 63, 64, 255, 256, 257, 511, 639)),
        ):  # fmt: skip
            torch.set_num_threads(threads)
            for found, known in zip(attend(rows, first, last), wanted, strict=True):
                assert torch.equal(found, known[rows, :, first:last]), (threads, rows, first)
        if window is None:  # decoding sees all, and asks for nothing
            keys = KVSegment(k[:, :, :512], v[:, :, :512])
            alone, _ = code.attend(q[:, :, 511:512], [keys], 0.3)
            assert torch.equal(alone, wanted[0][:, :, 511:512])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("scale", [-0.7, 0.0, 1.0, 3.0])
def test_a_scale_may_be_any_number(code, T, scale):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, T, 32), torch.randn(1, 2, 300, 32), torch.randn(1, 2, 300, 32)
    with native.using(code):
        for mask in (None, ph.Causal()):
            check(q, k, v, scale=scale, mask=mask)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("T", [1, 20])
@pytest.mark.parametrize("content", [float("nan"), float("inf"), -float("inf")])
def test_what_is_masked_does_not_leak_and_what_is_not_does(code, T, content):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 6, T, 64), torch.randn(1, 2, 90, 64), torch.randn(1, 2, 90, 64)
    for name, tensor in (("k", k), ("v", v)):
        spoiled = tensor.clone()
        spoiled[:, 0, 70:] = content
        with native.using(code):
            seen = {"k": k, "v": v} | {name: spoiled}
            arguments = {"mask": ph.KeyLengths(70), "kernel": "native"}
            clean = ph.attention(q, k, v, **arguments)
            assert torch.equal(ph.attention(q, seen["k"], seen["v"], **arguments), clean)
            if T > 1:
                causal = ph.attention(q, seen["k"], seen["v"], mask=ph.Causal(), kernel="native")
                assert causal[:, :3].isnan().all()
                assert causal[:, 3:].isfinite().all()


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("content", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_in_its_column(code, dtype, content):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 60, 64).to(dtype) for _ in "qkv")
    spoiled = v.to(dtype, copy=True)
    spoiled[..., 50, 7] = content
    with native.using(code):
        clean = ph.attention(q, k, v, kernel="native")
        found = ph.attention(q, k, spoiled, kernel="native")
    assert not found[..., 7].isfinite().any()
    clean[..., 7] = found[..., 7] = 0
    assert torch.equal(found, clean)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize(("T", "p"), [(1, 0.1), (3, 1e-9), (150, 0.5), (20, 1 - 1e-9)])
def test_dropout_keeps_the_weights_that_the_reference_keeps(code, threads, T, p):
    H, G, S = 6, 2, 272
    q = torch.zeros(2, H, T, 16)  # all weights are alike
    k, v = torch.zeros(2, G, S, 16), torch.eye(S).expand(2, G, S, S)

    def kept(kernel, dtype, *source, mask):
        return ph.attention(
            q.to(dtype), *source, mask=mask, dropout_p=p, generator=dice(), kernel=kernel
        ).ne(0)

    causal, window = ph.Causal(), ph.Causal() & ph.Window(S - 30)
    with native.using(code):
        for dtype in CLOSE:
            pair = k.to(dtype), v.to(dtype)
            wanted = kept("reference", dtype, *pair, mask=causal)
            assert torch.equal(kept("native", dtype, *pair, mask=causal), wanted)
            caches = PagedCache(40), ph.QuantizedCache(8, 8, recent=5), RingCache(S - 30, spare=T)
            for cache in caches:
                source = cache.append(*(x[:, :, :-T] for x in pair))
                source = cache.append(*(x[:, :, -T:] for x in pair))
                mask = window if isinstance(cache, RingCache) else causal
                found = kept("native", dtype, source, mask=mask)
                assert torch.equal(found, kept("reference", dtype, source, mask=mask))
                assert mask is window or torch.equal(found, wanted)


def test_a_row_that_sees_nothing_is_zero():
    q, k = torch.randn(2, 2, 5, 16), torch.randn(2, 2, 9, 16)
    out, lse = ph.attention(q, k, k, mask=ph.KeyLengths([0, 9]), kernel="native", return_lse=True)
    assert (out[0] == 0).all()
    assert lse[0].isneginf().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize(
    "make", [lambda: RingCache(24, spare=3), DenseCache, lambda: PagedCache(8)]
)
def test_caches_are_read_where_they_lie(make, monkeypatch):
    torch.manual_seed(0)
    cache = make()
    mask = ph.Causal() & ph.Window(24)
    k, v = torch.randn(2, 1, 2, 80, 32)
    for at in range(80):
        source = cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
        q = torch.randn(1, 6, 1, 32)
        assert source.in_place
        monkeypatch.setattr(type(source), "gather", lambda self: pytest.fail("gathered"))
        monkeypatch.setattr(type(source), "read", lambda self, tile: pytest.fail("copied"))
        out = ph.attention(q, source, mask=mask, kernel="native")
        monkeypatch.undo()
        wanted, _ = exact(q, k[:, :, : at + 1], v[:, :, : at + 1], mask=mask)
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
@pytest.mark.parametrize("page", [1, 5, 64, 200])
def test_pages_lie_anywhere_and_rows_have_their_own(code, page):
    torch.manual_seed(0)
    cache = PagedCache(page)
    k, v = torch.randn(2, 3, 2, 150, 48)
    cache.append(k[:, :, :90], v[:, :, :90])
    cache.reorder([1, 2, 0, 1])  # two rows share pages
    k, v = (x[[1, 2, 0, 1]] for x in (k, v))
    cache.rollback([0, 7, 0, 30])
    late_k, late_v = torch.randn(2, 4, 2, 20, 48)
    q, lengths = torch.randn(4, 6, 20, 48), [90, 83, 90, 60]
    positions = torch.tensor(lengths)[:, None] + torch.arange(20)
    source = cache.append(late_k, late_v, positions)
    with native.using(code):
        out = ph.attention(q, source, mask=ph.Causal(), kernel="native", q_positions=positions)
    for row, n in enumerate(lengths):
        keys = torch.cat((k[row : row + 1, :, :n], late_k[row : row + 1]), dim=2)
        values = torch.cat((v[row : row + 1, :, :n], late_v[row : row + 1]), dim=2)
        wanted, _ = exact(q[row : row + 1], keys, values, mask=ph.Causal())
        torch.testing.assert_close(out[row : row + 1].double(), wanted, atol=1e-5, rtol=1e-5)


def test_two_tensors_of_a_mask_both_hide():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 32), torch.randn(2, 2, 50, 32), torch.randn(2, 2, 50, 32)
    kept, dropped = torch.rand(3, 50) < 0.7, torch.rand(2, 1, 1, 50) < 0.3
    check(q, k, v, mask=ph.Keep(kept) & ph.Drop(dropped) & ph.Causal())


def test_explicit_positions_are_compared_key_by_key():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 32), torch.randn(2, 2, 50, 32), torch.randn(2, 2, 50, 32)
    shuffled = torch.stack([torch.randperm(50), torch.randperm(50)])
    arguments = {
        "mask": ph.Causal() & ph.Window(20),
        "q_positions": torch.tensor([[30, 10, 49], [5, 6, 7]]),
        "kv_positions": shuffled,
        "bias": ph.ALiBi(4),
    }
    check(q, k, v, **arguments)


@pytest.mark.parametrize(
    ("feature", "change"),
    [
        ("float64", lambda q: {"q": q.double()}),
        ("CosineBias", lambda q: {"q": q, "bias": CosineBias(torch.zeros(2))}),
        (
            "max_distance=20000",
            lambda q: {"q": q, "bias": ph.RelativeBias(torch.zeros(32, 2), max_distance=20000)},
        ),
        ("mask=~", lambda q: {"q": q, "mask": ~ph.Causal()}),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(feature, change):
    arguments = change(torch.randn(1, 2, 4, 8))
    q = arguments.pop("q")
    k = q.detach()
    with torch.enable_grad(), pytest.raises(ph.UnsupportedError, match=feature):
        ph.attention(q, k, k, kernel="native", **arguments)


def test_code_that_computes_wrongly_is_switched_off(monkeypatch, capsys):
    monkeypatch.setattr(module, "disagreement", lambda c: "a test" if c is CODES[0] else None)
    forget = module._chosen.cache_clear, module._is_right.cache_clear, module._wrong.clear
    for each in forget:
        each()
    try:
        with pytest.warns(UserWarning, match=f"{CODES[0].name} is switched off: a test"):
            chosen = module._chosen()
        assert chosen is (CODES[1] if len(CODES) > 1 else None)
        assert native.switched_off() == {CODES[0].name: "a test"}
        assert main(["doctor"]) == 0
        assert f"{CODES[0].name}: a test" in capsys.readouterr().out
    finally:
        monkeypatch.undo()
        for each in forget:
            each()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.code() is CODES[0]
    assert native.switched_off() == {}


def test_code_that_is_named_is_used_within_its_block():
    for code in CODES:
        with native.using(code):
            assert native.code() is code
    assert native.code() is CODES[0]


def test_the_first_use_may_be_inside_a_transform():
    q = torch.randn(3, 1, 2, 5, 16)
    module._chosen.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the native code")
        grads = torch.func.vmap(torch.func.grad(lambda q: ph.attention(q, q, q).sum()))(q)
        with torch.autocast("cpu", torch.bfloat16):
            module._chosen.cache_clear()
            assert native.code() is CODES[0]
    assert grads.shape == q.shape


def test_the_test_at_first_use_finds_a_wrong_result():

    class Wrong:
        def __init__(self, code):
            self.product, self.attend, self.gradients = code.product, code.attend, code.gradients

    def a_tenth_more(compute, which=0):
        def wrong(*arguments, **options):
            found = list(compute(*arguments, **options))
            found[which] = found[which] * 1.1
            return found

        return wrong

    assert module.disagreement(CODES[0]) is None
    wrong = Wrong(CODES[0])
    for which in range(4):
        wrong.gradients = a_tenth_more(CODES[0].gradients, which)
        assert "a gradient in torch.float32" in module.disagreement(wrong)
    wrong.gradients = CODES[0].gradients

    wrong.recur = lambda *given, **options: CODES[0].recur(*given, **options) * 1.1
    assert "a recurrence in torch.float32" in module.disagreement(wrong)
    wrong.recur = CODES[0].recur

    def over_codes(q, pieces, *rest, **options):
        attend = a_tenth_more(CODES[0].attend) if pieces[0].coding else CODES[0].attend
        return attend(q, pieces, *rest, **options)

    wrong.attend = over_codes
    assert "attention over codes in torch.float32" in module.disagreement(wrong)
    wrong.attend = a_tenth_more(CODES[0].attend)
    assert "attention in torch.float32" in module.disagreement(wrong)
    wrong.product = lambda *arguments: CODES[0].product(*arguments) * 1.1
    assert "a product in torch.float32" in module.disagreement(wrong)


def test_without_native_code_everything_else_works(monkeypatch):
    monkeypatch.setattr(module, "_chosen", lambda: None)
    monkeypatch.setattr(tensor_check, "MODULE", None)
    monkeypatch.setattr(tensor_check, "DIFFERENCES", ["unsupported_tensor_kind: there is none"])
    said = "compiled from other sources (unsupported_tensor_kind: there is none); build again"
    assert said in KERNELS["native"].unavailable()
    monkeypatch.setattr(tensor_check, "DIFFERENCES", [])
    assert "install g++ 12 or newer" in KERNELS["native"].unavailable()
    q = torch.randn(1, 2, 1, 8)
    assert ph.explain(q, q, q).kernel == "sdpa"
    layer = ph.MultiHeadAttention(16, 2).eval()
    assert layer(torch.randn(1, 1, 16)).shape == (1, 1, 16)
    with pytest.raises(ph.UnsupportedError, match="not compiled"):
        ph.attention(q, q, q, kernel="native")
