"""Every kernel on every combination of features equals the oracle or refuses by name."""

from collections import Counter

import numpy as np
import pytest
import torch

import axes
import matrix
from polyhead import native
from polyhead.kernels import KERNELS, flex_blocks


def _count(cells, capsys, label, kernels=matrix.SWIFT, device="cpu"):
    counts = Counter()
    for cell in cells:
        for name, verdict in matrix.judge(cell, kernels=kernels, device=device).items():
            counts[name, verdict.partition(":")[0]] += 1
    with capsys.disabled():
        print(f"\n{label}: {len(cells)} cells")
        for name in kernels:
            words = [f"{n} {verdict}" for (k, verdict), n in sorted(counts.items()) if k == name]
            print(f"  {name:10} {', '.join(words)}")
    return counts


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 8), marks=pytest.mark.slow)])
def test_covering_cells_match_the_oracle_or_are_refused_by_name(seeds, small_tiles, capsys):
    cells = [cell for seed in seeds for cell in axes.covering_cells(seed)]
    counts = _count(cells, capsys, f"every pair of values, {len(seeds)} times over")
    assert counts["reference", "match"] == len(cells)
    assert counts["tiled", "match"] == len(cells)
    assert sum(n for (name, _), n in counts.items() if name == "sdpa") == len(cells)


def test_every_feature_alone_matches_the_oracle_or_is_refused_by_name(capsys):
    cells = [c for c in axes.single_cells() if c["dtype"] in (torch.float32, torch.bfloat16)]
    counts = _count(cells, capsys, "every feature alone")
    assert counts["tiled", "match"] == counts["reference", "match"] == len(cells)
    assert counts["sdpa", "match"] > 0


def test_biases_by_content_match_the_oracle_or_are_refused_by_name(small_tiles, capsys):
    cells = [
        cell | {"bias": ("content of queries", "content, logarithmic")[i % 2]}
        for i, cell in enumerate(axes.covering_cells(seed=4)[:16])
    ]
    counts = _count(cells, capsys, "biases by content")
    assert counts["reference", "match"] == counts["tiled", "match"] == len(cells)
    assert {name for (name, verdict), n in counts.items() if verdict == "refused" and n} >= {
        "native", "sdpa",
    }  # fmt: skip


def test_cells_that_sdpa_can_do_match_the_oracle(capsys):
    plain = {"bias": "none", "softcap": None, "dropout": 0.0, "mask": "none"}
    causal = plain | {"mask": "causal", "sizes": (24, 24), "positions": "default"}
    same_sizes = [heads for heads in axes.AXES["heads"] if heads[3] == heads[4]]
    cells = [
        cell | {"heads": same_sizes[i % 3], "memory": memory, "lse": lse, "sinks": sinks} | rest
        for i, cell in enumerate(axes.covering_cells(seed=1)[:8])
        for rest in (plain, causal)
        for memory in ("contiguous", "permuted", "expanded", "sliced", "offset")
        for lse, sinks in ((False, False), (True, False), (False, True))
    ]
    counts = _count(cells, capsys, "what sdpa can do")
    assert counts["sdpa", "match"] == len(cells) / 3
    assert counts["sdpa", "forward only"] == 2 * len(cells) / 3


def _native_cells():
    """Cells without what native code refuses."""
    possible = {"dtype": [torch.float32, torch.bfloat16, torch.float16]}
    of_places = {"documents", "causal & documents", "key lengths"}
    of_positions = set(axes.AXES["mask"]) - of_places - {"not", "all of them"}
    return [
        *axes.covering_cells(6, possible | {"mask": of_positions}),
        *axes.covering_cells(7, possible | {"mask": of_places, "positions": ["default"]}),
    ]


@pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
def test_cells_that_native_can_do_match_the_oracle(code, capsys):
    label = f"what native can do, {code.name}"
    with native.using(code):
        cells = _native_cells()
        counts = _count(cells, capsys, label, ["native"])
        assert counts == {("native", "match"): len(cells)}


def test_one_large_tile_matches_the_oracle(capsys):
    cells = axes.covering_cells(seed=2)[:40]
    counts = _count(cells, capsys, "tiles larger than the call")
    assert counts["tiled", "match"] == len(cells)


@pytest.mark.parametrize("kernel", ["reference", "tiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once_at_the_end(kernel, dtype, small_tiles):
    for cell in axes.covering_cells(seed=3)[:40]:
        cell = cell | {"dtype": dtype, "lse": True}
        built = matrix.build(cell)
        exact, sizes = matrix.expected(built, lse=True)
        found = matrix.run(built, kernel, grads=True, lse=True)
        half, single = torch.finfo(dtype).eps / 2, 32 * torch.finfo(torch.float32).eps
        for part in ("out", "d_q", "d_k", "d_v", "lse"):
            # Sinks are an epilogue on an output that was rounded once already.
            ulp = half * (1 + cell["sinks"]) if part != "lse" else 0.0
            error = np.abs(np.nan_to_num(found[part].double().numpy() - exact[part], nan=0.0))
            once = ulp * np.abs(np.nan_to_num(exact[part], neginf=0.0)) + single * sizes[part].max()
            if part.startswith("d_"):
                # The backward pass starts from an output that was rounded once already.
                once = once + half * sizes[part].max()
            smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
            assert (error <= once + smallest).all(), f"{part}: {axes.show(cell)}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU at hand")
def test_covering_cells_match_the_oracle_on_a_gpu(capsys):
    cells = axes.covering_cells(seed=0)
    kernels = ["sdpa", "tiled", "reference"]
    counts = _count(cells, capsys, "every pair of values, on a GPU", kernels, "cuda")
    assert counts["reference", "match"] == counts["tiled", "match"] == len(cells)
    # flex compiles for seconds per cell.
    counts = _count(axes.single_cells()[:40:4], capsys, "flex, on a GPU", ["flex"], "cuda")
    assert counts["flex", "match"] + counts["flex", "forward only"] > 0


def test_a_view_that_moves_to_another_device_keeps_its_layout():
    for memory in axes.AXES["memory"]:
        x = matrix.build(axes.single_cells()[0] | {"memory": memory}).tensors["k"]
        there = matrix.moved(x, "cpu")
        assert torch.equal(there, x)
        assert (there.stride(), there.storage_offset()) == (x.stride(), x.storage_offset())


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_cell_matches_the_oracle_or_is_refused_by_name(
    part, small_tiles, monkeypatch, capsys
):
    matrix.uncompile_flex(monkeypatch.setattr)
    monkeypatch.setattr(flex_blocks, "BLOCK", 16)
    cells = [cell for i, cell in enumerate(axes.every_cell()) if i % 8 == part]
    counts = _count(cells, capsys, f"all cells, part {part + 1} of 8", list(KERNELS))
    assert counts["reference", "match"] == counts["tiled", "match"] == len(cells)
