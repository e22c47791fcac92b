"""Our Triton kernels equal the oracle, interpreted on a CPU or compiled on a GPU.

    TRITON_INTERPRET=1 pytest tests/kernels/test_triton.py [-m "not slow"]

Without Triton, and without either a GPU or that variable, nothing here can run. Interpreting takes
a good half second per cell, forward and backward.
"""

import warnings
from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

import axes
import matrix
import polyhead as ph
from polyhead.caches import Latent, Paged, Ring
from polyhead.kernels import KERNELS
from polyhead.kernels.triton import blocks, kernel, self_test
from polyhead.semantics import RoundedALiBi

if (_why := KERNELS["triton"].unavailable()) is not None:
    pytest.skip(_why, allow_module_level=True)

from polyhead.kernels.triton import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POSSIBLE = {"dtype": [torch.float32, torch.float16, torch.bfloat16]}
OF_PLACES = {"documents", "causal & documents", "key lengths"}
OF_POSITIONS = set(axes.AXES["mask"]) - OF_PLACES - {"not", "all of them"}
CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def cells(seed):
    """Cells without what the kernels refuse."""
    return [
        *axes.covering_cells(seed, POSSIBLE | {"mask": OF_POSITIONS}),
        *axes.covering_cells(seed + 1, POSSIBLE | {"mask": OF_PLACES, "positions": ["default"]}),
    ]


def judged(chosen):
    return Counter(
        matrix.judge(cell, kernels=["triton"], device=DEVICE)["triton"].partition(":")[0]
        for cell in chosen
    )


def heads(H, G, T, S, D, V=None, dtype=torch.float32, B=1):
    torch.manual_seed(0)
    shapes = (B, H, T, D), (B, G, S, D), (B, G, S, V or D)
    return [torch.randn(shape).to(DEVICE, dtype) for shape in shapes]


def both(q, k, v, other="reference", **asked):
    """Out and lse of our kernel and of another."""
    return [
        ph.attention(q, k, v, return_lse=True, kernel=name, **asked) for name in ("triton", other)
    ]


_MHA, _GQA, _, _OTHER_VALUES, _SLICE = axes.AXES["heads"]
FEATURES = [
    {"heads": _GQA, "mask": "causal & window", "bias": "ALiBi", "softcap": 4.0, "lse": True,
     "sizes": (33, 17), "memory": "strided"},
    {"heads": _MHA, "mask": "keep", "bias": "T5", "dropout": 0.3, "sinks": True,
     "positions": "per row", "sizes": (9, 41), "dtype": torch.float16},
    {"heads": _OTHER_VALUES, "mask": "drop", "bias": "tensor per key", "scale": 0.3,
     "dtype": torch.bfloat16},
    {"heads": _SLICE, "mask": "documents", "bias": "tensor", "dropout": 0.3, "sizes": (9, 41)},
    {"heads": _OTHER_VALUES, "mask": "window", "bias": "T5 one-sided", "positions": "shared",
     "lse": True, "sizes": (24, 24)},
    {"mask": "key lengths", "sizes": (1, 29), "memory": "expanded", "dtype": torch.bfloat16},
]  # fmt: skip
PLAIN = {axis: values[0] for axis, values in axes.AXES.items()}


@pytest.mark.parametrize("features", FEATURES, ids=lambda x: x["mask"])
def test_features_match_the_oracle_forward_and_backward(features):
    assert judged([PLAIN | features]) == {"match": 1}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
def test_every_pair_of_features_matches_the_oracle_forward_and_backward(part, capsys):
    chosen = cells(6 + 2 * part)
    counts = judged(chosen)
    with capsys.disabled():
        print(f"\ntriton on {DEVICE}: {dict(counts)}")
    assert counts == {"match": len(chosen)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_cell_matches_the_oracle_or_is_refused_by_name():
    chosen = [*axes.covering_cells(3), *axes.single_cells()[::3]]
    counts = judged(chosen)
    assert set(counts) == {"match", "refused"}


@pytest.mark.parametrize(
    ("D", "V"),
    [(16, 16), (33, 33), (80, 80), (256, 256)]
    + [pytest.param(*x, marks=pytest.mark.slow) for x in ((40, 40), (64, 64), (96, 96), (128, 128))]
    + [pytest.param(*x, marks=pytest.mark.slow) for x in ((192, 128), (160, 512), (576, 512))],
)
def test_head_sizes_that_are_no_power_of_two_are_two_parts(D, V):
    parts = blocks.parts_of(D, V)
    assert parts.head + parts.tail >= D
    assert parts.head + parts.tail < 2 * D or D == 16
    learns = max(D, V) <= blocks.LARGEST_LEARNT
    results = []
    for name in ("triton", "reference"):
        leaves = [x.requires_grad_(learns) for x in heads(4, 2, 19, 35, D, V)]
        out = ph.attention(*leaves, mask=ph.Causal() & ph.Window(9), kernel=name)
        grads = torch.autograd.grad(out.sin().sum(), leaves) if learns else ()
        results.append((out.detach(), *grads))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_query_over_many_splits_of_the_keys(dtype, monkeypatch):
    monkeypatch.setattr(launch, "_processors", lambda device: 8)
    q, k, v = heads(6, 2, 1, 700, 32, 16, dtype=dtype)
    table, parts = launch._table(q.device), blocks.parts_of(32, 16)
    tiles = blocks.forward_tiles(table, parts, q.itemsize, 3, busy=False)
    assert blocks.splits_of(2, 700, tiles.keys, 8)[0] > 1
    mask = ph.Window(500) & ph.Keep(torch.rand(2, 1, 700).repeat_interleave(3, 0).to(DEVICE) < 0.5)
    for mine, theirs in zip(*both(q, k, v, mask=mask, softcap=9.0), strict=True):
        torch.testing.assert_close(mine, theirs, atol=CLOSE[dtype], rtol=CLOSE[dtype])
    out, lse = ph.attention(
        q, k, v, mask=ph.KeyLengths([0]), return_lse=True, kernel="triton"
    )  # no split sees anything
    assert (out == 0).all()
    assert lse.isneginf().all()


def test_splits_share_the_keys_that_are_seen_whatever_room_there_is(monkeypatch):
    monkeypatch.setattr(launch, "_processors", lambda device: 8)
    q, k, v = heads(6, 2, 1, 700, 32, 16)
    own, states = launch.launch_kernel, []

    def watched(kernel, grid, like, /, *arguments, **named):
        own(kernel, grid, like, *arguments, **named)
        if kernel is launch.merging.merge:
            states.append(arguments[1][0])

    monkeypatch.setattr(launch, "launch_kernel", watched)
    for mask in (ph.KeyLengths([300]), ph.Window(300)):  # the first and the last of the keys
        for mine, theirs in zip(*both(q, k, v, mask=mask), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        (lses,) = states
        assert len(lses) == 5
        assert not lses.isneginf().any()
        states.clear()


def test_latent_attention_reads_the_value_as_a_part_of_the_key(monkeypatch):
    seen = []
    attend = launch.forward.attend

    class Watched:
        def __getitem__(self, grid):
            return lambda **names: (seen.append(names["SHARED"]), attend[grid](**names))

    monkeypatch.setattr(launch.forward, "attend", Watched())
    q, k, _ = heads(4, 1, 2, 70, 576)
    results = both(q, k, k[..., :512], mask=ph.Causal())
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)
    both(q, k, k[..., 64:], mask=ph.Causal())
    assert seen == [True, False]


CACHES = {
    "dense": ph.DenseCache,
    "paged": lambda: ph.PagedCache(16),
    "ring": lambda: ph.RingCache(30),
    "latent": None,
}


@pytest.mark.parametrize("cache", ["dense", "paged", "ring"])
def test_keys_of_a_cache_are_read_where_they_lie(cache, monkeypatch):
    q, k, v = heads(4, 2, 3, 75, 16, B=2)
    store = CACHES[cache]()
    for part in (slice(0, 41), slice(41, 60), slice(60, 75)):
        source = store.append(k[:, :, part], v[:, :, part])
    monkeypatch.setattr(type(source), "gather", None)
    for asked in ({"mask": ph.Causal() & ph.Window(20), "bias": ph.ALiBi(4)}, {"softcap": 5.0}):
        mine = ph.attention(q, source, kernel="triton", return_lse=True, **asked)
        theirs = ph.attention(q, source, kernel="tiled", return_lse=True, **asked)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def test_rows_of_different_lengths_are_read_by_their_positions():
    q, k, v = heads(4, 2, 1, 50, 16, B=2)
    cache = ph.DenseCache()
    positions = torch.arange(50, device=DEVICE).expand(2, -1).clone()
    positions[1, 30:] = -1
    source = cache.append(k, v, positions=positions)
    asked = {"mask": ph.Causal(), "q_positions": torch.tensor([[49], [29]], device=DEVICE)}
    mine = ph.attention(q, source, kernel="triton", **asked)
    torch.testing.assert_close(mine, ph.attention(q, source, kernel="tiled", **asked))


@pytest.mark.parametrize("where", ["a border tile", "a whole tile"])
def test_a_poisoned_key_spoils_the_rows_that_see_it_and_no_other(where):
    q, k, v = heads(4, 2, 40, 160, 16)
    at = 140 if where == "a border tile" else 3
    mask = ph.Causal() & ph.Drop(torch.zeros(160, dtype=torch.bool, device=DEVICE))
    mask = mask if where == "a border tile" else ph.Causal()
    k[:, 0, at, 2], v[:, 1, at, 5] = torch.inf, -torch.inf
    k[:, 1, 150], v[:, 0, 155] = torch.nan, torch.nan
    results = []
    for name in ("triton", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = ph.attention(*leaves, mask=mask, kernel=name)
        seen = out.masked_fill(out.isnan(), 0.0).square().sum()
        results.append((out.detach(), *torch.autograd.grad(seen, leaves)))
    (mine, *_), (theirs, *_) = results
    assert 0 < theirs.isnan().sum() < theirs.numel() or where == "a whole tile"
    assert torch.equal(mine.isnan(), theirs.isnan())
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5, equal_nan=True)


def test_a_query_that_sees_nothing_gives_nothing_whatever_it_holds():
    q, k, v = heads(2, 1, 9, 20, 16)
    upstream = torch.ones_like(q)
    q[:, :, 4], upstream[:, :, 4] = torch.nan, torch.nan
    places = torch.arange(9, device=DEVICE)
    places[4] = -1
    results = []
    for name in ("triton", "tiled"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = ph.attention(*leaves, mask=ph.Causal(), q_positions=places, kernel=name)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, upstream)))
    assert (results[0][0][:, :, 4] == 0).all()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


_BLOCKS = torch.eye(6, dtype=torch.bool).repeat(4, 1, 1) | (
    torch.rand(4, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.2
)
DRAWN = {
    "complement": {"mask": ~(ph.Causal() & ph.Window(7))},
    "blocks": {"mask": ph.BlockSparse(_BLOCKS, 8) & ph.Causal(), "softcap": 5.0},
    "rounded ALiBi": {"mask": ~ph.KeyLengths([3, 30]), "bias": RoundedALiBi(4)},
}


@pytest.mark.parametrize("case", DRAWN)
def test_masks_and_biases_without_ranges_are_drawn_where_they_are_small(case):
    results = []
    for name in ("triton", "reference"):
        leaves = [x.requires_grad_() for x in heads(4, 2, 40, 45, 16, B=2)]
        out, lse = ph.attention(*leaves, **DRAWN[case], return_lse=True, kernel=name)
        total = out.sin().sum() + lse.clamp(min=-9).sum()
        results.append((out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=5e-5, rtol=1e-4)


def test_a_drawn_mask_bounds_the_tiles_that_are_read():
    blocks = torch.eye(4, dtype=torch.bool)
    q, k, v = heads(2, 2, 64, 64, 16)
    call_of = []
    plan = type(KERNELS["triton"]).plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(KERNELS["triton"]),
            "plan",
            lambda self, call: call_of.append(plan(self, call)) or call_of[-1],
        )
        ph.attention(q, k, v, mask=ph.BlockSparse(blocks, 16), kernel="triton")
    low, high = call_of[0].bounds
    wanted = torch.arange(64, device=DEVICE)[None] // 16 * 16
    assert torch.equal(low, wanted)
    assert torch.equal(high, wanted + 16)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("float64", {"dtype": torch.float64}),
        ("mask=~.* a T×S tensor", {"mask": ~ph.Causal(), "T": 41, "drawn": 41 * 41 - 1}),
        ("mask=~.* a T×S tensor", {"mask": ~ph.KeyLengths([9] * 3), "B": 3, "drawn": 9 * 41}),
        ("bias=.* a T×S tensor", {"bias": RoundedALiBi(4), "drawn": 4 * 4 * 41}),
        ("a head size of 1200", {"D": 1200}),
        ("no batch rows", {"T": 0}),
        ("gradients of a head size of 300", {"D": 300, "learns": True}),
    ],
)
def test_what_it_cannot_do_is_named(words, asked, monkeypatch):
    asked = {"T": 9, "D": 16, "dtype": torch.float32, "learns": False, "B": 1} | asked
    T, D, dtype, learns, B = (asked.pop(name) for name in ("T", "D", "dtype", "learns", "B"))
    monkeypatch.setattr(kernel, "_DRAWN", asked.pop("drawn", kernel._DRAWN))
    q, k, v = heads(4, 2, T, 41, D, dtype=dtype, B=B)
    q.requires_grad_(learns)
    with pytest.raises(ph.UnsupportedError, match=rf"'triton' cannot do .*{words}.*can: .*tiled"):
        ph.attention(q, k, v, kernel="triton", **asked)


CODED = {
    "8 bits, dense": (2, 32, 16, {"k_bits": 8, "v_bits": 8, "group": 8}),
    "4 bits, pages": (2, 32, 16, {"k_bits": 4, "v_bits": 4, "group": 8, "layout": Paged(16)}),
    "8 and 4 bits, ring": (1, 20, 20, {"v_bits": 4, "group": 6, "layout": Ring(40)}),
    "4 and 8 bits, odd sizes": (2, 33, 9, {"k_bits": 4, "group": 10}),
    "latent": (1, 36, 32, {"k_bits": 4, "group": 8, "latent": Latent(32, 4)}),
    "latent, an odd rank": (1, 24, 20, {"k_bits": 8, "group": 8, "latent": Latent(20, 4)}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache", CODED)
def test_codes_of_a_quantised_cache_are_read_where_they_lie(cache, dtype, monkeypatch):
    G, D, V, options = CODED[cache]
    q, k, v = heads(4, G, 2, 75, D, V, dtype=dtype, B=2)
    v = k[..., :V] if "latent" in cache else v
    store = ph.QuantizedCache(**options, recent=8)
    for part in (slice(0, 41), slice(41, 60), slice(60, 75)):
        source = store.append(k[:, :, part], v[:, :, part])
    assert any(strip.coding is not None for strip in source.segments())
    asked = {"mask": ph.Causal() & ph.Window(50), "bias": ph.ALiBi(4), "return_lse": True}
    theirs = ph.attention(q, source, kernel="reference", **asked)
    monkeypatch.setattr(type(source), "gather", None)
    mine = ph.attention(q, source, kernel="triton", **asked)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def test_a_group_of_codes_that_is_not_finite_spoils_the_rows_that_see_it():
    q, k, v = heads(4, 2, 2, 64, 16)
    k[:, 0, 20, 3], v[:, 1, 44, 5] = torch.inf, torch.nan
    source = ph.QuantizedCache(group=8, recent=8, sink_tokens=0).append(k, v)
    results = [
        ph.attention(q, source, mask=ph.Causal() & ph.Window(40), kernel=kernel)
        for kernel in ("triton", "tiled")
    ]
    assert 0 < results[1].isnan().sum() < results[1].numel()
    torch.testing.assert_close(*results, equal_nan=True, atol=2e-5, rtol=2e-5)


def test_a_bias_that_learns_is_not_promised_bit_for_bit():
    q, k, v = heads(4, 2, 9, 9, 16)
    bias = ph.ALiBi(torch.rand(4, device=DEVICE).requires_grad_())
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ph.UnsupportedError, match="deterministic gradients of a bias"):
            ph.attention(q, k, v, bias=bias, kernel="triton")
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_test_at_first_use_passes_and_notices_what_is_wrong(monkeypatch):
    device, parts = torch.device(DEVICE), blocks.parts_of(16, 16)
    assert self_test.disagreement(device, torch.float32, parts) is None
    backward = launch.gradients

    def wrong(*arguments, **options):
        d_q, d_k, *rest = backward(*arguments, **options)
        return [d_q, d_k * 1.01, *rest]

    monkeypatch.setattr(launch, "gradients", wrong)
    said = self_test.disagreement(device, torch.float32, parts)
    assert said == "a gradient in torch.float32 differs from float64"
    attend = launch.attend
    monkeypatch.setattr(launch, "attend", lambda *a, **o: [x * 1.001 for x in attend(*a, **o)])
    assert "attention in" in self_test.disagreement(device, torch.float32, parts)


def test_the_test_at_first_use_of_codes_passes_and_notices_what_is_wrong(monkeypatch):
    device, parts = torch.device(DEVICE), blocks.parts_of(36, 32)
    for bits in ((8, 4), (4, 0)):
        assert self_test._tried(device, torch.float16, parts, bits) is None
    attend = launch.attend
    monkeypatch.setattr(launch, "attend", lambda *a, **o: (attend(*a, **o)[0] * 1.02, None))
    assert "over codes differs" in self_test._tried(device, torch.float16, parts, (8, 8))


_SIZES = (64, 64), (80, 80), (576, 512)
_TAKEN = [
    (dtype, size)
    for dtype in POSSIBLE["dtype"]
    for size in _SIZES
    if blocks.fits(blocks.parts_of(*size), dtype.itemsize)
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("dtype", "size"), _TAKEN)
def test_the_test_at_first_use_passes(dtype, size):
    assert self_test.disagreement(torch.device(DEVICE), dtype, blocks.parts_of(*size)) is None


def test_compiled_models_see_one_operator():
    q, k, v = heads(4, 2, 9, 20, 16)

    def attend(q, k, v):
        return ph.attention(q, k, v, mask=ph.Causal(), softcap=3.0, kernel="triton").sin()

    leaves = [x.requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    results = []
    for function in (attend, compiled):
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_exported_programs_hold_one_operator():
    q, k, v = heads(4, 2, 9, 20, 16)

    class Attends(torch.nn.Module):
        def forward(self, q, k, v):
            mask = ph.Causal() & ph.Window(7)
            return ph.attention(q, k, v, mask=mask, bias=ph.ALiBi(4), kernel="triton")

    program = torch.export.export(Attends(), (q, k, v))
    called = [str(node.target) for node in program.graph.nodes if "polyhead" in str(node.target)]
    assert called == ["polyhead.triton_attention.default"]
    torch.testing.assert_close(program.module()(q, k, v), Attends()(q, k, v))


@pytest.mark.skipif(DEVICE == "cuda", reason="auto may take it on a GPU")
def test_interpreted_it_runs_only_where_it_is_named():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = ph.explain(*heads(4, 2, 9, 20, 16), bias=ph.ALiBi(4))
    assert said.kernel != "triton"
    assert "only when named explicitly: on a CPU it is interpreted" in said.refusals["triton"]
    assert kernel.interpreting()
