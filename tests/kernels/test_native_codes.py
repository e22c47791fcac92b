"""The native code over keys and values in 8 or 4 bits, read where they lie, against the oracle."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_problems import CLOSE

import polyhead as ph
from polyhead import native
from polyhead.caches import Dense, Latent, Paged, Ring
from polyhead.caches.codecs import Codes
from polyhead.native.arguments import KVSegment
from polyhead.native.samples import samples

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
CODES = native.all_codes()
every_code = pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def unrounded(source):
    """Keys and values, what codes stand for not rounded to the dtype of the cache."""
    pairs = []
    for run in getattr(source, "spans", ()):
        if isinstance(getattr(run, "codec", None), Codes):
            codec = copy.copy(run.codec)
            codec.dtype = torch.float64
            run = replace(run, codec=codec)
        pairs.append(run.read(0, run.length))
    return [torch.cat(each, dim=2) for each in zip(*pairs, strict=True)] or source.gather()


def check(q, source, **arguments):
    """Native code gives what the oracle gives of the numbers that the codes stand for.

    Few rows read them without rounding, many may round them to the dtype of the cache: what that
    changes is allowed.
    """
    out, lse = ph.attention(q, source, kernel="native", return_lse=True, **arguments)
    if "sinks" in arguments:
        arguments["sinks"] = arguments["sinks"].double()
    positions = source.tokens.position_tensor(q.device)

    def oracle(k, v):
        return ph.attention(
            q.double(), k.double(), v.double(), kernel="reference", return_lse=True,
            **{"kv_positions": positions} | arguments,
        )  # fmt: skip

    rounded = oracle(*source.gather())
    exact = oracle(*unrounded(source))
    close = CLOSE[q.dtype]
    lse_close = 2e-5 if q.dtype == torch.float32 else close
    for found, wanted, other, atol, rtol in (
        (out, exact[0], rounded[0], close, close),
        (lse, exact[1], rounded[1], lse_close, 1e-5),
    ):
        real = wanted.isfinite()
        assert torch.equal(found.double()[~real].nan_to_num(0.5), wanted[~real].nan_to_num(0.5))
        error = (found - wanted).abs()[real]
        allowed = (atol + rtol * wanted.abs() + (other - wanted).abs())[real]
        assert (error <= allowed).all(), (error - allowed).max()


@st.composite
def coded_problems(draw):
    G = draw(st.integers(1, 3))
    H = G * draw(st.sampled_from([1, 2, 4, 7]))
    B, T = draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 2, 9, 40]))
    S = T + draw(st.integers(0, 260))
    D = draw(st.sampled_from([5, 16, 32, 48, 64, 128]))
    V = draw(st.sampled_from([7, 16, 32, 64, 80, 96, 128]))
    dtype = draw(st.sampled_from(list(CLOSE)))
    group = draw(st.sampled_from([2, 10, 16, 32, 96]))
    window = draw(st.integers(1, 80))
    layout = draw(st.sampled_from([Dense(), Ring(window, spare=40), Paged(2 * group)]))
    cache = ph.QuantizedCache(
        draw(st.sampled_from([8, 4])),
        draw(st.sampled_from([8, 4])),
        group=group,
        sink_tokens=None if isinstance(layout, Ring) else draw(st.sampled_from([0, 3])),
        recent=draw(st.sampled_from([0, 5, 32])),
        layout=layout,
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    q = torch.randn(B, H, T, D, generator=generator).to(dtype)
    # Channels of different sizes, away from 0.
    k = torch.randn(B, G, S, D, generator=generator) * torch.linspace(0.1, 2, D) + 0.5
    v = torch.randn(B, G, S, V, generator=generator) - 0.5
    if S > T:
        cache.append(k[:, :, :-T].to(dtype), v[:, :, :-T].to(dtype))
    source = cache.append(k[:, :, -T:].to(dtype), v[:, :, -T:].to(dtype))
    masks = [ph.Causal() & ph.Window(window)]
    if not isinstance(layout, Ring):
        tensor = torch.rand(B, 1, T, S, generator=generator) < 0.4
        masks += [None, ph.Causal(), ph.Keep(tensor) & ph.Causal()]
    arguments = {
        "mask": draw(st.sampled_from(masks)),
        "softcap": draw(st.sampled_from([None, 3.0])),
        "bias": draw(st.sampled_from([None, ph.ALiBi(H)])),
        "scale": draw(st.sampled_from([None, 0.3])),
        "q_positions": torch.arange(S - T, S),
    }
    if draw(st.booleans()):
        arguments["sinks"] = torch.randn(H, generator=generator)
    return q, source, arguments


@every_code
@settings(max_examples=50, deadline=None)
@given(problem=coded_problems())
def test_any_problem_over_codes_equals_the_oracle(code, problem):
    q, source, arguments = problem
    with native.using(code):
        check(q, source, **arguments)


@every_code
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("H", "G", "T", "D", "V"),
    [
        (8, 2, 1, 128, 128),
        (7, 1, 1, 64, 32),
        (15, 1, 1, 192, 256),
        (4, 4, 1, 80, 96),  # three shares of a value, and chunks that end inside a row
        (4, 1, 3, 48, 80),  # one share
        (32, 2, 24, 128, 128),
    ],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_shapes_of_decoding_over_codes(code, bits, H, G, T, D, V, threads):
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in CLOSE:
            q, k, v = (torch.randn(1, n, 700, d) for n, d in ((H, D), (G, D), (G, V)))
            source = ph.QuantizedCache(bits, bits).append(k.to(dtype), v.to(dtype))
            with native.using(code):
                check(q[:, :, -T:].to(dtype), source, mask=ph.Causal())
    finally:
        torch.set_num_threads(before)


@every_code
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_queries_lose_nothing_that_codes_say(code, dtype):
    """What is computed in whole numbers is as good as the numbers that the codes stand for."""
    torch.manual_seed(0)
    k, v = (torch.randn(2, 1, 2, 500, 128) * torch.logspace(-1, 1, 128)).to(dtype)
    exact = ph.QuantizedCache(sink_tokens=0, recent=0).append(k.float(), v.float()).gather()
    source = ph.QuantizedCache(sink_tokens=0, recent=0).append(k, v)
    q = torch.randn(1, 8, 1, 128).to(dtype)
    with native.using(code):
        _, lse = ph.attention(q, source, kernel="native", return_lse=True)
    k, v = (x.double() for x in exact)
    # The last tokens, which fill no group, are the only ones that are not coded.
    assert k.shape[2] == 500
    _, wanted = ph.attention(q.double(), k, v, kernel="reference", return_lse=True)
    torch.testing.assert_close(lse.double(), wanted, atol=5e-4, rtol=1e-5)


@pytest.mark.parametrize("layout", [Dense(), Ring(48, spare=3), Paged(32)], ids=repr)
def test_codes_are_read_where_they_lie(layout, monkeypatch):
    torch.manual_seed(0)
    cache = ph.QuantizedCache(group=16, recent=8, layout=layout)
    mask = ph.Causal() & ph.Window(48)
    k, v = torch.randn(2, 1, 2, 120, 32)
    for at in range(0, 120, 3):
        source = cache.append(k[:, :, at : at + 3], v[:, :, at : at + 3])
        q = torch.randn(1, 6, 3, 32)
        monkeypatch.setattr(type(source), "gather", lambda self: pytest.fail("gathered"))
        monkeypatch.setattr(type(source), "read", lambda self, tile: pytest.fail("copied"))
        assert ph.explain(q, source, mask=mask).kernel == "native"
        out = ph.attention(q, source, mask=mask)
        monkeypatch.undo()
        tiled = ph.attention(q, source, mask=mask, kernel="tiled")
        torch.testing.assert_close(out, tiled, atol=1e-5, rtol=1e-5)


@every_code
@pytest.mark.parametrize("bits", [8, 4])
def test_coded_pages_lie_anywhere_and_rows_have_their_own(code, bits):
    torch.manual_seed(0)
    cache = ph.QuantizedCache(bits, bits, group=8, sink_tokens=3, recent=4, layout=Paged(16))
    k, v = torch.randn(2, 3, 2, 150, 64)
    cache.append(k, v)
    cache.reorder([2, 0, 1, 0])
    more = torch.randn(2, 4, 2, 90, 64)
    real = torch.arange(90) < torch.tensor([90, 31, 0, 64])[:, None]
    positions = cache.next_positions(real)
    source = cache.append(*more, positions)
    q = torch.randn(4, 4, 90, 64)
    arguments = {"mask": ph.Causal(), "q_positions": positions}
    with native.using(code):
        for part in (slice(0, 90), slice(0, 2)):
            arguments["q_positions"] = positions[:, part]
            out = ph.attention(q[:, :, part], source, kernel="native", **arguments)
            tiled = ph.attention(q[:, :, part], source, kernel="tiled", **arguments)
            torch.testing.assert_close(out, tiled, atol=1e-5, rtol=1e-5)


def spoil_unwritten_units(cache, content):
    """Something in the scale and zero of every unit that no row, or not this row, has written."""
    memory = cache._contents.memories["codes"]
    for field, tensor in zip(memory.store.fields, memory.tensors, strict=True):
        for row, stop in enumerate(memory.stops):
            if field.dtype == torch.bfloat16:
                tensor[row, :, stop:] = content


@every_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 20])
@pytest.mark.parametrize("content", [torch.nan, 1e38])
def test_unwritten_codes_do_not_leak(code, dtype, T, content):
    torch.manual_seed(0)
    cache = ph.QuantizedCache(group=32, sink_tokens=2, recent=4, capacity=300)
    real = torch.arange(200) < torch.tensor([200, 50])[:, None]
    k, v = torch.randn(2, 2, 2, 200, 64).to(dtype)
    cache.append(k, v, cache.next_positions(real))
    spoil_unwritten_units(cache, content)
    source = cache.source()
    q = torch.randn(2, 4, T, 64).to(dtype)
    positions = torch.tensor([[199], [49]]) - torch.arange(T).flip(0)
    with native.using(code):
        out = ph.attention(q, source, mask=ph.Causal(), q_positions=positions, kernel="native")
    assert out.isfinite().all()
    tiled = ph.attention(q, source, mask=ph.Causal(), q_positions=positions, kernel="tiled")
    torch.testing.assert_close(out, tiled, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@every_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 20])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_coded_nan_does_not_leak_and_shows_where_it_is_seen(code, dtype, T, which):
    torch.manual_seed(0)
    tensors = {"k": torch.randn(1, 2, 100, 64), "v": torch.randn(1, 2, 100, 64)}
    tensors[which][:, :, 70] = torch.nan
    k, v = (x.to(dtype) for x in tensors.values())
    source = ph.QuantizedCache(group=8, sink_tokens=0, recent=4).append(k, v)
    q = torch.randn(1, 4, T, 64).to(dtype)
    seen, hidden = torch.arange(100 - T, 100), torch.arange(45 - T, 45)
    with native.using(code):
        for mask in (ph.Causal(), None):
            shown = ph.attention(q, source, mask=mask, q_positions=seen, kernel="native")
            assert shown.isnan().all()
        kept = ph.attention(q, source, mask=ph.Causal(), q_positions=hidden, kernel="native")
    assert kept.isfinite().all()


@every_code
@pytest.mark.parametrize("layout", [Dense(), Paged(64)], ids=repr)
@pytest.mark.parametrize("bits", [8, 4])
def test_coded_latents_are_both_key_and_value(code, layout, bits):
    torch.manual_seed(0)
    cache = ph.QuantizedCache(bits, latent=Latent(48, 16), layout=layout)
    rows = torch.randn(1, 1, 200, 64)
    source = cache.append(rows, rows[..., :48])
    with native.using(code):
        for T in (1, 9):
            check(torch.randn(1, 8, T, 64), source, mask=ph.Causal())


PAIR = ("scale", "zero")


def test_gradients_over_codes_are_refused_by_name():
    k = torch.randn(1, 2, 80, 16)
    source = ph.QuantizedCache().append(k, k)
    q = torch.randn(1, 2, 4, 16, requires_grad=True)
    with torch.enable_grad(), pytest.raises(ph.UnsupportedError, match="gradients beside keys"):
        ph.attention(q, source, kernel="native")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 31}, "group must be even"),
        ({"value_group": 48}, "value_group divide V=64"),
        ({"k_bits": 3}, "codes of 8 or 4 bits"),
        ({"k_bits": 4}, "k must be uint8"),
        ({"key_dim": 64}, "k must be uint8"),
        ({"value_dim": 128}, "v must be uint8"),
        ({"value_group": 64}, "scale and zero of v"),
        ({"k_zero": None}, "scale and zero of k"),
        ({"v_scale": None}, "v needs scales"),
    ],
)
def test_sizes_of_codes_are_checked_before_they_are_read(change, message):
    sample = next(iter(samples(torch.float32)))
    if change == {"k_zero": None}:
        change = {"k_zero": sample.coding.k_zero[:, :, 1:]}
    piece = KVSegment(sample.k, sample.v, coding=sample.coding._replace(**change))
    with pytest.raises(ValueError, match=message):
        CODES[0].attend(sample.q, [piece], 1.0)
    short = KVSegment(sample.k, sample.v[:, :, 1:], coding=sample.coding)
    with pytest.raises(ValueError, match="scale and zero of v"):
        CODES[0].attend(sample.q, [short], 1.0)
    scales = {f"v_{name}": getattr(sample.coding, f"v_{name}")[:, :, 1:] for name in PAIR}
    with pytest.raises(ValueError, match="k and v must have as many units"):
        CODES[0].attend(sample.q, [short._replace(coding=sample.coding._replace(**scales))], 1.0)
    scattered = {}
    for name in PAIR:
        scale = getattr(sample.coding, f"k_{name}")
        scattered[f"k_{name}"] = scale.repeat_interleave(2, dim=3)[..., ::2]
    apart = KVSegment(sample.k, sample.v, coding=sample.coding._replace(**scattered))
    with pytest.raises(ValueError, match="dense and alike"):
        CODES[0].attend(sample.q, [apart], 1.0)
