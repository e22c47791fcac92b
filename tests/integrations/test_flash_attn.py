"""polyhead's flash_attn functions against NumPy float64 loops written from its documentation."""

import inspect
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead import UnsupportedError
from polyhead.integrations import flash_attn as fa

EXACT = {"rtol": 1e-9, "atol": 1e-12}


def oracle(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """One sequence, ``[T, H, D]`` and ``[S, G, D]``: every score by itself.

    Query i stands at key i + S − T; it sees keys from there − left to there + right; with
    ``causal`` right is 0.
    """
    (T, H, D), (S, G, V) = q.shape, v.shape
    scale = 1 / math.sqrt(D) if scale is None else scale
    left, right = window
    right = 0 if causal else right
    out, lse = np.zeros((T, H, V)), np.full((H, T), -np.inf)
    for h in range(H):
        g = h // (H // G)
        for i in range(T):
            here = i + S - T
            low = 0 if left < 0 else max(0, here - left)
            high = S - 1 if right < 0 else min(S - 1, here + right)
            seen = range(low, high + 1)
            scores = []
            for j in seen:
                score = sum(q[i, h, d] * k[j, g, d] for d in range(D)) * scale
                if softcap:
                    score = softcap * math.tanh(score / softcap)
                if slopes is not None:
                    score -= slopes[h] * abs(here - j)
                scores.append(score)
            if not scores:
                continue
            lse[h, i] = np.logaddexp.reduce(scores)
            for j, score in zip(seen, scores, strict=True):
                out[i, h] += math.exp(score - lse[h, i]) * v[j, g]
    return out, lse


def batch_oracle(q, k, v, slopes=None, **options):
    rows = [
        oracle(
            q[b], k[b], v[b],
            slopes=slopes if slopes is None or slopes.ndim == 1 else slopes[b], **options,
        )
        for b in range(len(q))
    ]  # fmt: skip
    return np.stack([out for out, _ in rows]), np.stack([lse for _, lse in rows])


def equal(got, want):
    torch.testing.assert_close(got, torch.as_tensor(want), **EXACT)


def draw_tensor(*shape):
    return torch.randn(*shape, dtype=torch.float64)


windows = st.sampled_from([(-1, -1), (0, 0), (2, -1), (-1, 1), (1, 2), (3, 0), (0, 3), (50, 50)])
meanings = st.fixed_dictionaries(
    {
        "softmax_scale": st.sampled_from([None, 0.3]),
        "causal": st.booleans(),
        "window_size": windows,
        "softcap": st.sampled_from([0.0, 1.5]),
        "alibi_slopes": st.sampled_from([None, 1, 2]),
    }
)


def slopes_for(meaning, batch, heads):
    shape = {None: None, 1: (heads,), 2: (batch, heads)}[meaning["alibi_slopes"]]
    return None if shape is None else torch.rand(shape, dtype=torch.float64)


def of_row(slopes, row):
    if slopes is None:
        return None
    return (slopes if slopes.ndim == 1 else slopes[row]).numpy()


def oracle_options(meaning):
    return {
        "scale": meaning["softmax_scale"],
        "causal": meaning["causal"],
        "window": meaning["window_size"],
        "softcap": meaning["softcap"],
    }


@settings(max_examples=100, deadline=None)
@given(
    meanings, st.integers(1, 2), st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2, 4]),
    st.integers(0, 99),
)  # fmt: skip
def test_flash_attn_func(meaning, B, T, S, G, seed):
    torch.manual_seed(seed)
    q, k, v = draw_tensor(B, T, 4, 3), draw_tensor(B, S, G, 3), draw_tensor(B, S, G, 3)
    slopes = slopes_for(meaning, B, 4)
    given_meaning = {**meaning, "alibi_slopes": slopes}
    want, want_lse = batch_oracle(
        q.numpy(), k.numpy(), v.numpy(), slopes=None if slopes is None else slopes.numpy(),
        **oracle_options(meaning),
    )  # fmt: skip
    out, lse, pattern = fa.flash_attn_func(q, k, v, return_attn_probs=True, **given_meaning)
    equal(out, want)
    equal(lse, want_lse)
    assert pattern is None
    assert out.is_contiguous()
    equal(fa.flash_attn_func(q, k, v, **given_meaning), want)
    equal(fa.flash_attn_func(q, k, v, deterministic=True, **given_meaning), want)
    equal(fa.flash_attn_kvpacked_func(q, torch.stack([k, v], dim=2), **given_meaning), want)
    if T == S and G == 4:
        equal(fa.flash_attn_qkvpacked_func(torch.stack([q, k, v], dim=2), **given_meaning), want)


lengths = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(meanings, lengths, st.booleans(), st.booleans(), st.integers(0, 2), st.integers(0, 99))
def test_flash_attn_varlen_func(meaning, sizes, same, is_paged, rest, seed):
    torch.manual_seed(seed)
    counts_q = [a for a, _ in sizes]
    counts_k = counts_q if same else [b for _, b in sizes]
    cu_q, cu_k = (torch.tensor([0, *np.cumsum(x)], dtype=torch.int32) for x in (counts_q, counts_k))
    q = draw_tensor(sum(counts_q) + rest, 4, 3)
    k, v = (draw_tensor(sum(counts_k) + rest, 2, 3) for _ in range(2))
    slopes = slopes_for(meaning, len(sizes), 4)
    given_meaning = {**meaning, "alibi_slopes": slopes}
    given_keys, table = (k, v), None
    if is_paged:
        *given_keys, table = paged(k, v, cu_k, size=2)
    out, lse, _ = fa.flash_attn_varlen_func(
        q, *given_keys, cu_q, cu_k, max(counts_q), max(counts_k), block_table=table,
        return_attn_probs=True, **given_meaning,
    )  # fmt: skip
    assert out.shape == q.shape
    assert lse.shape == (4, len(q))
    for row in range(len(sizes)):
        a, b = slice(*cu_q[row : row + 2].tolist()), slice(*cu_k[row : row + 2].tolist())
        want, want_lse = oracle(
            q[a].numpy(),
            k[b].numpy(),
            v[b].numpy(),
            slopes=of_row(slopes, row),
            **oracle_options(meaning),
        )
        equal(out[a], want)
        equal(lse[:, a], want_lse)
    assert (out[sum(counts_q) :] == 0).all()
    if same and not is_paged:
        packed = torch.stack([q, *(x.repeat_interleave(2, dim=1) for x in (k, v))], dim=1)
        got = fa.flash_attn_varlen_qkvpacked_func(packed, cu_q, max(counts_q), **given_meaning)
        equal(got, out)
    if not is_paged:
        got = fa.flash_attn_varlen_kvpacked_func(
            q, torch.stack([k, v], dim=1), cu_q, cu_k, max(counts_q), max(counts_k), **given_meaning
        )
        equal(got, out)


def paged(k, v, cu, size):
    """The sequences in shuffled pages of ``size`` tokens, and the table that finds them."""
    counts = cu.diff().tolist()
    pages = max(1, max(-(-n // size) for n in counts))
    order = torch.randperm(len(counts) * pages)
    table = order.reshape(len(counts), pages).to(torch.int32)
    stores = []
    for x in (k, v):
        store = torch.full((len(order), size, *x.shape[1:]), torch.nan, dtype=x.dtype)
        for row, n in enumerate(counts):
            for j in range(n):
                store[table[row, j // size], j % size] = x[int(cu[row]) + j]
        stores.append(store)
    return *stores, table


def turned(x, position, cos, sin, interleaved):
    """``[heads, D]`` at one position, pair by pair."""
    x, R = x.copy(), 2 * cos.shape[1]
    for pair in range(R // 2):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + R // 2)
        first, second = x[:, a].copy(), x[:, b].copy()
        x[:, a] = first * cos[position, pair] - second * sin[position, pair]
        x[:, b] = first * sin[position, pair] + second * cos[position, pair]
    return x


cache_options = st.fixed_dictionaries(
    {
        "new": st.integers(0, 3),
        "rotary": st.sampled_from([None, True, False]),
        "kind": st.sampled_from(["plain", "rows", "pages", "leftpad"]),
        "lengths": st.sampled_from(["number", "each", "full"]),
    }
)


@settings(max_examples=150, deadline=None)
@given(meanings, cache_options, st.integers(1, 3), st.integers(0, 99))
def test_flash_attn_with_kvcache(meaning, options, T, seed):
    torch.manual_seed(seed)
    B, G, D, slots, new, kind = 3, 2, 6, 8, options["new"], options["kind"]
    rotary = options["rotary"] if new and kind != "leftpad" else None
    full = options["lengths"] == "full" and not new
    before = torch.full((B,), 4) if options["lengths"] == "number" else torch.randint(1, 6, (B,))
    before = torch.full((B,), slots) if full else before
    q = draw_tensor(B, T, 4, D)
    slopes = slopes_for(meaning, B, 4)
    k_rows, v_rows = draw_tensor(B, slots, G, D), draw_tensor(B, slots, G, D)
    for row, n in enumerate(before):  # what is not filled must never be read
        k_rows[row, n:] = v_rows[row, n:] = torch.nan
    k = v = cos = sin = leftpad = None
    if new:
        k, v = draw_tensor(B, new, G, D), draw_tensor(B, new, G, D)
    if rotary is not None:
        cos, sin = draw_tensor(20, 2), draw_tensor(20, 2)
    keywords = {}
    k_cache, v_cache = k_rows.clone(), v_rows.clone()
    if kind == "rows":
        rows = torch.tensor([3, 0, 4], dtype=torch.int32)
        k_cache, v_cache = draw_tensor(5, slots, G, D), draw_tensor(5, slots, G, D)
        k_cache[rows], v_cache[rows] = k_rows, v_rows
        keywords["cache_batch_idx"] = rows
    elif kind == "pages":
        flat = (x.flatten(0, 1) for x in (k_rows, v_rows))
        cu = torch.arange(0, B * slots + 1, slots)
        k_cache, v_cache, keywords["block_table"] = paged(*flat, cu, size=2)
    elif kind == "leftpad":
        leftpad = torch.tensor([0, 1, 1])
        keywords["cache_leftpad"] = leftpad.to(torch.int32)
    untouched = k_cache.clone()
    given_lengths = before.to(torch.int32)
    if options["lengths"] == "number":
        given_lengths = 4
    out, lse = fa.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, None if full else given_lengths,
        rotary_interleaved=bool(rotary), return_softmax_lse=True,
        **{**meaning, "alibi_slopes": slopes}, **keywords,
    )  # fmt: skip

    local = meaning["causal"] or meaning["window_size"] != (-1, -1)
    written = 0
    for row in range(B):
        n = int(before[row])
        keys, values = k_rows[row, :n].numpy(), v_rows[row, :n].numpy()
        queries = q[row].numpy()
        if new:
            added = k[row].numpy()
            if rotary is not None:
                tables = cos.numpy(), sin.numpy(), rotary
                added = np.stack([turned(x, n + j, *tables) for j, x in enumerate(added)])
                queries = np.stack(
                    [turned(x, n + (i if local else 0), *tables) for i, x in enumerate(queries)]
                )
            keys = np.concatenate([keys, added])
            values = np.concatenate([values, v[row].numpy()])
        start = 0 if leftpad is None else int(leftpad[row])
        want, want_lse = oracle(
            queries,
            keys[start:],
            values[start:],
            slopes=of_row(slopes, row),
            **oracle_options(meaning),
        )
        equal(out[row], want)
        equal(lse[row], want_lse)
        if new:
            if kind == "pages":
                table = keywords["block_table"][row].long()
                in_place = k_cache[table].flatten(0, 1)
            else:
                in_place = k_cache[row if kind != "rows" else int(rows[row])]
            equal(in_place[n : n + new], keys[n:])
            written += new
    changed = (k_cache != untouched) & ~(k_cache.isnan() & untouched.isnan())
    assert int(changed.any(dim=-1).any(dim=-1).sum()) == written


def test_gradients_equal_those_of_the_formula():
    torch.manual_seed(0)
    q, k, v = (draw_tensor(2, 5, heads, 4).requires_grad_() for heads in (4, 2, 2))
    out = fa.flash_attn_func(q, k, v, causal=True, window_size=(2, 0), softcap=2.0)
    pull = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), pull)
    q_, k_, v_ = (
        x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))
    )
    scores = 2.0 * torch.tanh(q_ @ k_.mT / math.sqrt(4) / 2.0)
    apart = torch.arange(5)[:, None] - torch.arange(5)
    scores = scores.masked_fill((apart < 0) | (apart > 2), -torch.inf)
    want = (scores.softmax(-1) @ v_).transpose(1, 2)
    equal(out, want)
    for g, w in zip(got, torch.autograd.grad(want, (q, k, v), pull), strict=True):
        equal(g, w)


def test_no_gradient_through_a_cache():
    q = torch.randn(1, 1, 2, 4, requires_grad=True)
    cache = torch.randn(1, 3, 2, 4)
    assert not fa.flash_attn_with_kvcache(q, cache, cache.clone()).requires_grad


def test_dropout_drops_and_is_drawn_from_torchs_generator():
    q = torch.randn(1, 16, 2, 8)
    torch.manual_seed(0)
    first = fa.flash_attn_func(q, q, q, 0.5)
    torch.manual_seed(0)
    assert torch.equal(fa.flash_attn_func(q, q, q, 0.5), first)
    assert not torch.allclose(fa.flash_attn_func(q, q, q), first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_half_precision_out_lse_in_single(dtype):
    q = torch.randn(1, 4, 2, 8, dtype=dtype)
    out, lse, _ = fa.flash_attn_func(q, q, q, causal=True, return_attn_probs=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)


def test_what_cannot_be_done_is_refused_by_name():
    q = torch.randn(2, 4, 2, 8)
    cos = torch.ones(9, 2)
    with pytest.raises(UnsupportedError, match="return_attn_probs with dropout_p > 0"):
        fa.flash_attn_func(q, q, q, 0.1, return_attn_probs=True)
    with pytest.raises(UnsupportedError, match="cache_leftpad together with rotary_cos"):
        fa.flash_attn_with_kvcache(
            q, q, q, q, q, cos, cos, cache_seqlens=0, cache_leftpad=torch.zeros(2)
        )
    with pytest.raises(ValueError, match="given together, and with k and v"):
        fa.flash_attn_with_kvcache(q, q, q, rotary_cos=cos, rotary_sin=cos)
    with pytest.raises(ValueError, match="holds 4 tokens a row: 5 do not fit"):
        fa.flash_attn_with_kvcache(q, q.clone(), q.clone(), q[:, :1], q[:, :1], cache_seqlens=4)
    with pytest.raises(ValueError, match="softcap must be positive"):
        fa.flash_attn_func(q, q, q, softcap=-1.0)
    with pytest.raises(ValueError, match="window_size must be"):
        fa.flash_attn_func(q, q, q, window_size=(-2, 0))
    with pytest.raises(ValueError, match="max_seqlen_k is 3, but a sequence has 4"):
        fa.flash_attn_varlen_func(q[0], q[0], q[0], *[torch.tensor([0, 4])] * 2, 4, 3)
    with pytest.raises(ValueError, match="ends at 5: q has 4 tokens"):
        fa.flash_attn_varlen_func(q[0], q[0], q[0], *[torch.tensor([0, 5])] * 2, 5, 5)


def test_argument_names_and_order_are_flash_attns():
    start = ["q", "k", "v"]
    middle = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    end = [
        "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes",
        "deterministic", "return_attn_probs",
    ]  # fmt: skip
    cache = [
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens",
        "cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale", "causal",
        "window_size", "softcap", "rotary_interleaved", "alibi_slopes", "num_splits",
        "return_softmax_lse",
    ]  # fmt: skip
    assert list(inspect.signature(fa.flash_attn_func).parameters) == start + end
    varlen = [*start, *middle, *end, "block_table"]
    assert list(inspect.signature(fa.flash_attn_varlen_func).parameters) == varlen
    assert list(inspect.signature(fa.flash_attn_with_kvcache).parameters) == cache


def test_install_makes_import_flash_attn_work(monkeypatch):
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = fa.install()
    assert fa.install() is module
    scope = {}
    exec(
        "from flash_attn import flash_attn_func\n"
        "from flash_attn.flash_attn_interface import flash_attn_varlen_func",
        scope,
    )
    assert scope["flash_attn_func"] is fa.flash_attn_func
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name)
    fake = type(sys)("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    with pytest.raises(RuntimeError, match="flash_attn is installed"):
        fa.install()


_DEFAULTS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
    "softcap": 0.0, "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
_OF_A_CACHE = {"rotary_interleaved": True, "num_splits": 0, "return_softmax_lse": False}
_ARRAYS = [
    *("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"),
    *("cache_batch_idx", "cache_leftpad", "block_table"),
]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("flash_attn_func", _DEFAULTS),
        ("flash_attn_varlen_func", _DEFAULTS | {"block_table": None}),
        (
            "flash_attn_with_kvcache",
            dict.fromkeys(_ARRAYS)
            | {name: _DEFAULTS[name] for name in list(_DEFAULTS)[1:6]}
            | _OF_A_CACHE,
        ),
    ],
)
def test_defaults_are_those_of_flash_attn_2(name, wanted):
    """As its interface has them, version 2.8."""
    taken = inspect.signature(getattr(fa, name)).parameters
    found = {key: p.default for key, p in taken.items() if p.default is not p.empty}
    assert found == wanted
