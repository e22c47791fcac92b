"""The public function: what it refuses and how it says so, what it chooses, its shapes."""

import itertools
import re
import sys

import beartype
import jaxtyping
import pytest
import torch

import polyhead as ph
from polyhead.caches import PagedCache, QuantizedCache, RingCache
from polyhead.kernels import KERNELS, dispatch
from polyhead.semantics import DenseSource, draw_mask, state


def qkv(B=2, H=4, G=2, T=5, S=7, D=8, V=None, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(B, H, T, D), (B, G, S, D), (B, G, S, V or D)]
    return [torch.randn(*shape, dtype=dtype) for shape in shapes]


Q, K, V = qkv()
BOOL = torch.ones(5, 7, dtype=torch.bool)

WRONG = [
    (TypeError, "polyhead.Keep.*polyhead.Drop", lambda: ph.attention(Q, K, V, mask=BOOL)),
    (
        TypeError,
        "mask must be a mask expression.*str",
        lambda: ph.attention(Q, K, V, mask="causal"),
    ),
    (TypeError, "Keep.*Drop", lambda: ph.Causal() & BOOL),
    (TypeError, r"& \| ~", lambda: ph.Causal() and ph.Window(3)),
    (TypeError, "is a bias", lambda: ph.Keep(BOOL.float())),
    (TypeError, "polyhead.Keep", lambda: ph.attention(Q, K, V, bias=BOOL)),
    (TypeError, "bias must be", lambda: ph.attention(Q, K, V, bias="alibi")),
    (TypeError, "q must be a tensor", lambda: ph.attention(None, K, V)),
    (TypeError, "k and v must be tensors", lambda: ph.attention(Q, K)),
    (TypeError, "leave out v", lambda: ph.attention(Q, DenseSource(K, V), V)),
    (TypeError, "whole numbers", lambda: ph.attention(Q, K, V, q_positions=torch.ones(5))),
    (ValueError, r"q must be \[B, H, T, D\]", lambda: ph.attention(Q[0], K, V)),
    (ValueError, "same B, G, S", lambda: ph.attention(Q, K, V[:, :, 1:])),
    (ValueError, "share the batch", lambda: ph.attention(Q[:1], K, V)),
    (ValueError, "head size", lambda: ph.attention(Q[..., 1:], K, V)),
    (ValueError, "H = 3.*G = 2", lambda: ph.attention(Q[:, :3], K, V)),
    (ValueError, "share dtype", lambda: ph.attention(Q.half(), K, V)),
    (ValueError, "share dtype", lambda: ph.attention(Q, K, V.half())),
    (ValueError, "float64, float32", lambda: ph.attention(Q.long(), K, V)),
    (ValueError, r"broadcast.*\[2, 4, 5, 7\]", lambda: ph.attention(Q, K, V, mask=ph.Keep(BOOL.T))),
    (ValueError, "broadcast", lambda: ph.attention(Q, K, V, bias=torch.ones(3, 7))),
    (ValueError, "slope per head", lambda: ph.attention(Q, K, V, bias=ph.ALiBi(3))),
    (ValueError, "table", lambda: ph.attention(Q, K, V, bias=ph.RelativeBias(torch.ones(32, 3)))),
    (ValueError, "None for off", lambda: ph.attention(Q, K, V, softcap=0.0)),
    (ValueError, "scale must be a finite", lambda: ph.attention(Q, K, V, scale=float("nan"))),
    (ValueError, r"sinks must be \[H\]", lambda: ph.attention(Q, K, V, sinks=torch.ones(2))),
    (ValueError, "below 1", lambda: ph.attention(Q, K, V, dropout_p=1.0)),
    (ValueError, "q_positions must be", lambda: ph.attention(Q, K, V, q_positions=torch.arange(6))),
    (
        ValueError,
        "q_positions is needed",
        lambda: ph.attention(Q, K[:, :, :3], V[:, :, :3], kv_positions=torch.arange(3)),
    ),
    (ValueError, "batch 2", lambda: ph.attention(Q, K, V, mask=ph.KeyLengths([1, 2, 3]))),
    (ValueError, "adds up to 5", lambda: ph.attention(Q, K, V, mask=ph.Documents([2, 3]))),
    (ValueError, "Window size", lambda: ph.Window(0)),
    (ValueError, "auto.*tiled", lambda: ph.attention(Q, K, V, kernel="fastest")),
]


@pytest.mark.parametrize(("kind", "words", "call"), WRONG, ids=[words for _, words, _ in WRONG])
def test_a_wrong_argument_is_named(kind, words, call):
    with pytest.raises(kind, match=words):
        call()


def test_a_kernel_that_is_named_refuses_and_says_who_can():
    with pytest.raises(ph.UnsupportedError, match=r"'sdpa' cannot do softcap=5.0; can: .*tiled"):
        ph.attention(Q, K, V, softcap=5.0, kernel="sdpa")


@pytest.mark.parametrize(
    ("arguments", "native", "otherwise"),
    [
        ({}, "native", "sdpa"),
        ({"mask": ph.Window(99) & ph.KeyLengths(7)}, "native", "sdpa"),
        ({"mask": ph.Causal()}, "native", "tiled"),
        ({"mask": ~ph.Causal()}, "tiled", "tiled"),
        ({"softcap": 3.0}, "native", "tiled"),
        ({"bias": ph.ALiBi(4)}, "native", "tiled"),
        ({"dropout_p": 0.1}, "native", "tiled"),
        ({"sinks": torch.ones(4)}, "native", "sdpa"),
    ],
)
def test_explain_says_which_kernel_runs_and_why_not_the_others(arguments, native, otherwise):
    kernel = otherwise if KERNELS["native"].unavailable() else native
    found = ph.explain(Q, K, V, **arguments)
    assert found.kernel == kernel
    assert set(found.refusals) == set(KERNELS) - {kernel}
    assert f"{kernel} " in str(found)
    # What explain names is what runs: a kernel that it says cannot do it refuses.
    for other, why in found.refusals.items():
        if why.startswith("cannot do "):
            with pytest.raises(ph.UnsupportedError, match=re.escape(why)):
                ph.attention(Q, K, V, kernel=other, **arguments)


def test_square_causal_calls_take_the_fused_kernel_even_with_a_window_that_hides_nothing():
    q, k, v = (x.double().requires_grad_() for x in qkv(T=7))  # native has no float64
    assert ph.explain(q, k, v, mask=ph.Causal() & ph.Window(7)).kernel == "sdpa"
    assert ph.explain(q, k, v, mask=ph.Causal() & ph.Window(6)).kernel == "tiled"


@pytest.mark.parametrize(
    ("cache", "window"),
    [(PagedCache(4), None), (RingCache(9), 9), (QuantizedCache(group=4, recent=4), None)],
    ids=["paged", "ring", "quantized"],
)
@torch.no_grad()
def test_a_decode_step_copies_no_past_and_explain_tells_what_a_copy_would_take(cache, window):
    q, k, v = qkv(T=20, S=20)
    cache.append(k, v)
    source = cache.append(k[:, :, :1], v[:, :, :1])
    mask = ph.Causal() if window is None else ph.Causal() & ph.Window(window)
    found = ph.explain(q[:, :, :1], source, mask=mask)
    assert source.gather_bytes == sum(x.numel() * x.element_size() for x in source.gather())
    assert found.kernel in ("native", "tiled")
    assert found.gather_bytes == 0
    assert f"would copy {source.gather_bytes:,} bytes" in found.refusals["sdpa"]
    asked = ph.explain(q[:, :, :1], source, mask=mask, kernel="sdpa")
    assert asked.gather_bytes == source.gather_bytes
    assert str(asked).endswith(f"copies {source.gather_bytes:,} first")
    dense = ph.explain(q[:, :, :1], k, v)
    assert (dense.kernel in ("native", "sdpa"), dense.gather_bytes) == (True, 0)
    assert "would copy" not in str(dense)


def test_the_last_query_lines_up_with_the_last_key():
    q, k, v = qkv(T=3)
    whole = torch.cat([torch.randn(2, 4, 4, 8), q], dim=2)
    full = ph.attention(whole, k, v, mask=ph.Causal(), kernel="reference")
    assert torch.allclose(ph.attention(q, k, v, mask=ph.Causal()), full[:, :, 4:], atol=1e-6)


@pytest.mark.parametrize("kernel", ["reference", "tiled"])
@pytest.mark.parametrize(("T", "S"), [(0, 4), (4, 0), (0, 0)])
def test_no_queries_or_no_keys(kernel, T, S):
    q, k, v = (x.requires_grad_() for x in qkv(T=T, S=S))
    out, lse = ph.attention(q, k, v, mask=ph.Causal(), kernel=kernel, return_lse=True)
    assert out.shape == (2, 4, T, 8)
    assert (out == 0).all()
    assert lse.isneginf().all()
    grads = torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True)
    assert all(g is None or (g == 0).all() for g in grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kernel",
    [name for name, kernel in KERNELS.items() if name != "flex" and not kernel.unavailable()],
)  # flex has no lse
def test_out_has_the_dtype_of_q_and_lse_is_at_least_single(dtype, kernel):
    if dtype == torch.float64 and kernel == "native":
        with pytest.raises(ph.UnsupportedError, match="cannot do float64"):
            ph.attention(*qkv(dtype=dtype), kernel=kernel)
        return
    out, lse = ph.attention(*qkv(dtype=dtype), return_lse=True, kernel=kernel)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_bfloat16_slopes_do_not_round_distances():
    q, k, v = qkv(B=1, T=1, S=3000, dtype=torch.bfloat16)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    wide = ph.attention(q, k, v, bias=ph.ALiBi(slopes), return_lse=True)
    narrow = ph.attention(q, k, v, bias=ph.ALiBi(slopes.bfloat16()), return_lse=True)
    assert torch.equal(wide[1], narrow[1])
    apart = ph.ALiBi(slopes.bfloat16()).tile(
        ph.semantics.Tokens.of(1, shift=2999), ph.semantics.Tokens.of(3000), torch.ones(1)
    )
    assert apart[0, 0, 0, 0] == -2999 * 0.5


def _shapes_checked(monkeypatch, module, function):
    """The function with its jaxtyping shapes checked; users pay nothing for them."""
    for name in ("Float", "Int"):
        monkeypatch.setattr(module, name, getattr(jaxtyping, name), raising=False)
    return jaxtyping.jaxtyped(typechecker=beartype.beartype)(function)


def test_the_shapes_in_the_signatures_are_true(monkeypatch):
    attention = _shapes_checked(monkeypatch, dispatch, dispatch.attention)
    positions = {"q_positions": torch.arange(5), "kv_positions": torch.arange(7).expand(2, 7)}
    out, lse = attention(Q, K, V, sinks=torch.ones(4), return_lse=True, **positions)
    attention(Q, K, V, sinks=torch.ones(1, 4, 5), **positions)
    merge = _shapes_checked(monkeypatch, state, state.merge_states)
    merge([out, out], [lse, lse])
    with pytest.raises(jaxtyping.TypeCheckError):
        attention(Q, K, V, sinks=torch.ones(3))
    with pytest.raises(jaxtyping.TypeCheckError):
        merge([out], [lse[:, :1]])


def test_importing_imports_nothing_before_it_is_used():
    import subprocess

    code = """
import sys
import polyhead
print({"torch", "numpy", "typer"} & set(sys.modules))
polyhead.attention
print({"jaxtyping", "beartype", "triton", "polyhead.generation"} & set(sys.modules))
print(polyhead.semantics.__name__, polyhead.__version__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == [
        "set()", "set()", f"polyhead.semantics {ph.__version__}"
    ]  # fmt: skip


def test_every_public_name_has_a_home():
    for name in ph.__all__:
        assert name in dir(ph)
        assert getattr(ph, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'atention'"):
        _ = ph.atention


def test_a_mask_draws_itself():
    assert draw_mask(ph.Causal(), 3).split() == ["█··", "██·", "███"]
    assert draw_mask(ph.Causal() & ph.Window(2), 2, 4).split() == ["·██·", "··██"]
    assert draw_mask(None, 1, 3) == "███"
    two = draw_mask(ph.KeyLengths([1, 2]), 1, 2)
    assert two.split("\n\n") == ["█·", "██"]
    assert draw_mask(ph.Causal(), 500).count("\n") == 63
    image = draw_mask(ph.Causal(), 3, svg=True)
    assert image.startswith("<svg")
    assert image.count("z") == 6  # the squares of visible pairs
    assert "<title>Causal()</title>" in image
    with pytest.raises(ValueError, match="at least one"):
        draw_mask(ph.Causal(), 0)


def test_explain_counts_bytes_names_the_layout_and_draws_no_number():
    before = torch.get_rng_state()
    found = ph.explain(Q, K, V, dropout_p=0.1)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.bytes_read == 4 * (Q.numel() + K.numel() + V.numel())
    assert found.bytes_written == 4 * Q.numel()
    assert found.call.startswith("GQA 4 query / 2 kv heads × 8;")
    assert ph.explain(Q, K[:, :1], V[:, :1]).call.startswith("MQA 4 query")


def test_explain_names_each_part_of_a_call_that_is_there_and_no_other():
    parts = {
        "mask": (ph.Causal(), "mask Causal() (some visible)"),
        "bias": (ph.ALiBi(4), f"bias {ph.ALiBi(4)!r}"),
        "softcap": (3.0, "softcap 3.0"),
        "dropout_p": (0.1, "dropout_p 0.1"),
        "sinks": (torch.zeros(4), "sinks"),
    }
    for chosen in itertools.product((False, True), repeat=len(parts)):
        given = dict(itertools.compress(parts.items(), chosen))
        said = ph.explain(Q, K, V, **{name: value for name, (value, _) in given.items()}).call
        assert said.split("; ")[3:] == [words for _, words in given.values()]
        assert said.split("; ")[:3] == [
            "GQA 4 query / 2 kv heads × 8",
            "batch 2, 5 queries, 7 keys",
            "float32 on cpu",
        ]


def test_sinks_take_their_share_of_every_row():
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out, lse = ph.attention(Q, K, V, return_lse=True)
    share = (lse - sinks[:, None]).sigmoid()[..., None]
    torch.testing.assert_close(ph.attention(Q, K, V, sinks=sinks), out * share)


@pytest.mark.parametrize("rows", [1, 2])
def test_sinks_of_each_query_are_those_of_a_call_with_that_query_alone(rows):
    drawn = torch.Generator().manual_seed(1)
    sinks = torch.randn(rows, 4, 5, generator=drawn).requires_grad_()
    q = Q.detach().requires_grad_()
    out, lse = ph.attention(q, K, V, sinks=sinks, mask=ph.Causal(), return_lse=True)
    parts = [
        [
            ph.attention(
                q[b : b + 1, :, t : t + 1], K[b : b + 1], V[b : b + 1], return_lse=True,
                sinks=sinks[b % rows, :, t], mask=ph.Causal(), q_positions=torch.tensor([2 + t]),
            )
            for t in range(5)
        ]
        for b in range(2)
    ]  # fmt: skip
    wanted = [
        torch.cat([torch.cat([each[i] for each in row], dim=2) for row in parts]) for i in (0, 1)
    ]
    torch.testing.assert_close([out, lse], wanted)
    found, alone = (torch.autograd.grad(made.sin().sum(), (q, sinks)) for made in (out, wanted[0]))
    torch.testing.assert_close(found, alone)
    with pytest.raises(ValueError, match=r"\[H\] = \[4\] or \[1 or B, H, T\] with B = 2, T = 5"):
        ph.attention(q, K, V, sinks=sinks[:, :, 1:])


@torch.no_grad()
def test_without_native_code_a_kernel_that_copies_no_past_comes_before_those_that_do(monkeypatch):
    monkeypatch.setattr(type(KERNELS["native"]), "unavailable", lambda self: "not compiled")
    q, k, v = qkv(T=20, S=20)
    cache = PagedCache(4)
    cache.append(k, v)
    source = cache.append(k[:, :, :1], v[:, :, :1])
    assert ph.explain(q[:, :, :1], source, mask=ph.Causal()).kernel == "tiled"
    assert ph.explain(q[:, :, :1], k, v).kernel == "sdpa"


@pytest.mark.parametrize(
    ("old", "new"), [("draw", "draw_mask"), ("reproducible", "batch_invariant")]
)
def test_names_of_the_version_before_work_with_a_warning(old, new):
    with pytest.warns(DeprecationWarning, match=f"ph.{old} is deprecated: use ph.{new}"):
        assert getattr(ph, old) is getattr(ph, new)
    assert old not in ph.__all__
