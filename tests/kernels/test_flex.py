"""FlexAttention: its mask, score and block functions equal ours; compiled, so does its result.

The functions are judged without the compiler, which takes seconds per cell: FlexAttention's
uncompiled form computes with the same functions. The compiled kernel is judged on a few calls, and
on more where ``-m slow`` is asked for.
"""

from collections import Counter

import pytest
import torch

import axes
import matrix
import polyhead as ph
from polyhead.kernels import KERNELS, flex
from polyhead.semantics import Tokens

needs_compiler = pytest.mark.skipif(
    KERNELS["flex"].unavailable() is not None, reason="FlexAttention needs a C++ compiler"
)
POSSIBLE = {"dropout": 0.0, "sinks": False, "lse": False}
MASK = ph.Causal() & ph.Window(40) | ph.Prefix(3)


@pytest.fixture
def uncompiled(monkeypatch):
    matrix.uncompile_flex(monkeypatch.setattr)


def qkv(T=70, S=90, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(2, h, n, 16).to(dtype) for h, n in ((4, T), (2, S), (2, S))]


def possible_cells(seed):
    cells = (cell | POSSIBLE for cell in axes.covering_cells(seed))
    return [cell for cell in cells if cell["dtype"] != torch.float64]


def test_its_functions_match_the_oracle_or_it_refuses_by_name(uncompiled, monkeypatch, capsys):
    monkeypatch.setattr(flex, "BLOCK", 16)
    cells = [*axes.covering_cells(), *possible_cells(1)]
    verdicts = [matrix.judge(cell, kernels=["flex"])["flex"].partition(":")[0] for cell in cells]
    counts = Counter(verdicts)
    with capsys.disabled():
        print(f"\nflex, uncompiled: {dict(counts)}")
    assert set(counts) == {"forward only", "refused"}
    assert counts["forward only"] >= len(possible_cells(1))


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("dropout_p", {"dropout_p": 0.1}),
        ("return_lse on the CPU", {"return_lse": True}),
        ("return_lse on the CPU", {"sinks": torch.zeros(4)}),
        ("no function of one pair", {"mask": ~type("Own", (ph.Causal,), {"visible": None})()}),
        ("no function of one pair", {"bias": type("Own", (ph.ALiBi,), {"tile": None})(4)}),
    ],
)
def test_what_it_cannot_do_is_named(uncompiled, words, arguments):
    with pytest.raises(ph.UnsupportedError, match=rf"'flex' cannot do .*{words}.*can: .*tiled"):
        ph.attention(*qkv(), kernel="flex", **arguments)


def test_gradients_on_a_cpu_float64_and_tracing_are_named(uncompiled):
    q, k, v = qkv()
    with pytest.raises(ph.UnsupportedError, match="a gradient on the CPU"):
        ph.attention(q.requires_grad_(), k, v, kernel="flex")
    with pytest.raises(ph.UnsupportedError, match="float64"):
        ph.attention(*qkv(dtype=torch.float64), kernel="flex")
    with pytest.raises(ph.UnsupportedError, match="transformed"):
        torch.func.vmap(lambda x: ph.attention(x, x, x, kernel="flex"))(torch.ones(2, 1, 1, 3, 4))


def test_it_runs_only_where_it_is_named_and_never_without_its_compiler(monkeypatch):
    assert list(KERNELS).index("flex") > list(KERNELS).index("tiled")
    monkeypatch.setattr(flex, "_has_compiler", lambda: False)
    if not torch.cuda.is_available():
        with pytest.raises(ph.UnsupportedError, match="apt-get install"):
            ph.attention(*qkv(), kernel="flex")
        assert "not available" in ph.explain(*qkv()).refusals["flex"]


@pytest.mark.parametrize("mask", [MASK, ph.KeyLengths([0, 60]), ~ph.Documents([20, 70])])
def test_blocks_are_empty_mixed_or_full_as_the_mask_draws_them(monkeypatch, mask):
    monkeypatch.setattr(flex, "BLOCK", 16)
    q, k = Tokens.of(70, shift=20), Tokens.of(90)
    drawn = mask.visible(q, k, torch.device("cpu")).expand(2, 1, 70, 90)
    some, some_first, full, full_first = flex._blocks(mask, q, k, torch.device("cpu"))
    for i in range(5):
        mixed = set(some_first[0, 0, i, : some[0, 0, i]].tolist())
        whole = set(full_first[0, 0, i, : full[0, 0, i]].tolist())
        for j in range(6):
            block = drawn[..., 16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
            assert block.all() or j not in whole
            assert not block.any() or j in mixed | whole


def test_a_poisoned_key_spoils_the_rows_that_see_it_and_no_other(uncompiled):
    q, k, v = qkv()
    k[:, 0, 30], v[:, 1, 60] = torch.nan, torch.inf
    want = ph.attention(q, k, v, mask=MASK, kernel="reference")
    found = ph.attention(q, k, v, mask=MASK, kernel="flex")
    assert want.isnan().any()
    assert torch.equal(found.isnan(), want.isnan())
    assert torch.allclose(found, want, atol=1e-5, equal_nan=True)


@pytest.mark.slow
@needs_compiler
@pytest.mark.timeout(3600)
def test_compiled_it_matches_the_oracle(capsys):
    cells = possible_cells(3)
    verdicts = Counter(
        matrix.judge(cell, kernels=["flex"])["flex"].partition(":")[0] for cell in cells
    )
    with capsys.disabled():
        print(f"\nflex, compiled: {dict(verdicts)}")
    assert verdicts == {"forward only": len(cells)}


@pytest.mark.slow
@needs_compiler
def test_another_window_or_other_lengths_compile_nothing():
    q, k, v = qkv()
    ph.attention(q, k, v, mask=ph.Window(5) & ph.KeyLengths([3, 80]), kernel="flex")
    before = torch._dynamo.utils.counters["frames"].copy()
    for size in range(6, 12):
        mask = ph.Window(size) & ph.KeyLengths([size, 70])
        found = ph.attention(q, k, v, mask=mask, kernel="flex")
        assert torch.allclose(found, ph.attention(q, k, v, mask=mask, kernel="tiled"), atol=1e-5)
    assert torch._dynamo.utils.counters["frames"] == before
