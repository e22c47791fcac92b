"""FlexAttention: its mask, score and block functions equal ours; compiled, so does its result.

The functions are judged without the compiler, which takes seconds per cell: FlexAttention's
uncompiled form computes with the same functions. The compiled kernel is judged on a few calls, and
on more where ``-m slow`` is asked for.
"""

import random
from collections import Counter

import pytest
import torch

import axes
import matrix
import polyhead as ph
from polyhead.kernels import KERNELS, flex, flex_blocks
from polyhead.semantics import Tokens

needs_compiler = pytest.mark.skipif(
    KERNELS["flex"].unavailable() is not None,
    reason="FlexAttention needs AVX-512 and a C++ compiler",
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
    monkeypatch.setattr(flex_blocks, "BLOCK", 16)
    by_content = [x | {"bias": "content, logarithmic"} for x in possible_cells(2)[:6]]
    cells = [*axes.covering_cells(), *possible_cells(1), *by_content]
    verdicts = [matrix.judge(cell, kernels=["flex"])["flex"].partition(":")[0] for cell in cells]
    counts = Counter(verdicts)
    with capsys.disabled():
        print(f"\nflex, uncompiled: {dict(counts)}")
    assert set(counts) == {"forward only", "refused"}
    assert counts["forward only"] >= len(possible_cells(1)) + len(by_content)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("dropout_p", {"dropout_p": 0.1}),
        ("return_lse on the CPU", {"return_lse": True}),
        ("return_lse on the CPU", {"sinks": torch.zeros(4)}),
        ("is no function of one pair", {"mask": ~type("Own", (ph.Causal,), {"visible": None})()}),
        ("is no function of one pair", {"bias": type("Own", (ph.ALiBi,), {"tile": None})(4)}),
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


def test_on_a_cpu_it_runs_only_where_it_is_named_and_never_without_its_compiler(monkeypatch):
    monkeypatch.setattr(flex, "_compiles_for_cpu", lambda: True)
    said = ph.explain(*qkv(), bias=ph.ALiBi(4), softcap=9.0, mask=MASK)
    assert said.kernel == "tiled"
    assert "only when named explicitly: it compiles for seconds" in said.refusals["flex"]
    monkeypatch.setattr(flex, "_compiles_for_cpu", lambda: False)
    if not torch.cuda.is_available():
        with pytest.raises(ph.UnsupportedError, match="apt-get install"):
            ph.attention(*qkv(), kernel="flex")
        assert "not available" in ph.explain(*qkv()).refusals["flex"]


@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2"])
def test_what_torch_compiles_for_other_processors_is_not_used(capability, monkeypatch):
    """Of 24 keys of 16 features torch 2.13 returns wrong numbers there."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    flex._compiles_for_cpu.cache_clear()
    assert not flex._compiles_for_cpu()
    flex._compiles_for_cpu.cache_clear()


BLOCKED = [
    MASK,
    ph.Causal() & ph.Window(40, ahead=3),
    ph.KeyLengths([0, 60]),
    ph.Chunk(16),
    ~ph.Documents([20, 70]),
    ph.Documents([[20, 70], [35, 55]]) & ph.Causal(),
    ph.Causal() & ph.Drop(torch.eye(90, dtype=torch.bool)[20:]),
    ph.BlockSparse(torch.eye(6, dtype=torch.bool), 16),
]


@pytest.mark.parametrize("mask", BLOCKED, ids=repr)
@pytest.mark.parametrize("size", [16, 15])
def test_blocks_are_empty_mixed_or_full_as_the_mask_draws_them(monkeypatch, mask, size):
    monkeypatch.setattr(flex_blocks, "BLOCK", size)
    cpu, q, k = torch.device("cpu"), Tokens.of(70, shift=20), Tokens.of(90)
    drawn = mask.visible(q, k, cpu).expand(2, -1, 70, 90)
    found = flex_blocks.blocks_of(mask, q, k, cpu)
    skipped = False
    for row in range(2):
        some, some_first, full, full_first = (x[row % len(x), 0] for x in found)
        for i in range(some.shape[0]):
            mixed = set(some_first[i, : some[i]].tolist())
            whole = set(full_first[i, : full[i]].tolist())
            assert not mixed & whole
            for j in range(some_first.shape[1]):
                block = drawn[row, :, size * i : size * (i + 1), size * j : size * (j + 1)]
                assert block.all() or j not in whole
                assert block.shape[1:] == (size, size) or j not in whole
                assert not block.any() or j in mixed | whole
                skipped |= j not in mixed | whole
    assert skipped or isinstance(mask, ph.Chunk)


def test_block_masks_are_kept_by_the_value_of_a_mask_and_the_version_of_its_tensors():
    cpu, tokens = torch.device("cpu"), (Tokens.of(70, shift=20), Tokens.of(90))
    table, other = torch.eye(6, dtype=torch.bool), torch.eye(6, dtype=torch.bool)

    def blocks(mask, q=tokens[0], k=tokens[1]):
        return flex_blocks.blocks_of(mask, q, k, cpu)

    def window(size):
        return ph.Causal() & ph.Window(size)

    assert blocks(window(8)) is blocks(window(8))
    assert blocks(window(8)) is not blocks(window(9))
    assert blocks(window(8)) is not blocks(ph.Causal() | ph.Window(8))
    assert blocks(window(8)) is not blocks(window(8), q=Tokens.of(71, shift=19))
    assert blocks(ph.Prefix([3, 4])) is blocks(ph.Prefix([3, 4]))
    assert blocks(ph.Prefix([3, 4])) is not blocks(ph.Prefix([3, 5]))
    first = blocks(ph.BlockSparse(table, 16))
    assert blocks(ph.BlockSparse(table, 16)) is first
    assert blocks(ph.BlockSparse(table, 15)) is not first
    assert blocks(ph.BlockSparse(other, 16)) is not first
    table[0, 3] = True
    assert blocks(ph.BlockSparse(table, 16)) is not first
    positions = torch.arange(70)
    shuffled = Tokens.of(70, positions=positions)
    first = blocks(ph.Causal(), q=shuffled)
    assert blocks(ph.Causal(), q=Tokens.of(70, positions=positions)) is first
    positions += 1
    assert blocks(ph.Causal(), q=Tokens.of(70, positions=positions)) is not first
    own = type("Own", (ph.Window,), {})  # of a class that does not tell its arguments
    assert blocks(own(3)) is not blocks(own(3))
    for size in range(100, 100 + 2 * flex_blocks.KEPT):
        blocks(ph.Window(size))
    assert len(flex_blocks._kept) == flex_blocks.KEPT


@pytest.mark.slow
def test_two_hundred_lengths_are_a_handful_of_compilations(monkeypatch):
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return graph.forward

    open_lengths = {"fullgraph": True, "dynamic": None, "backend": compiler}
    monkeypatch.setattr(flex, "_options", lambda device_type: open_lengths)
    monkeypatch.setattr(flex, "_compiles_for_cpu", lambda: True)
    flex._flex.cache_clear()
    dice = random.Random(0)
    for number in range(200):
        T = dice.randint(1, 600)
        S = T + dice.choice([0, dice.randint(1, 300)])
        q, k = torch.randn(1, 2, T, 16), torch.randn(1, 2, S, 16)
        mask = ph.Causal() & ph.Window(dice.randint(3, 300))
        out = ph.attention(q, k, k, mask=mask, bias=ph.ALiBi(2), kernel="flex")
        if number % 20 == 0:
            want = ph.attention(q, k, k, mask=mask, bias=ph.ALiBi(2), kernel="tiled")
            torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    flex._flex.cache_clear()
    assert 1 < len(graphs) <= 8


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
