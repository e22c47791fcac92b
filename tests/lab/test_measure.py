"""What a benchmark says is computed from what was measured, and only of equal results."""

from __future__ import annotations

import weakref
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from polyhead.errors import DisagreementError
from polyhead.lab.benchmarks import Case, Contestant, Limit, Settings, limits, measure
from polyhead.lab.benchmarks.case import close
from polyhead.lab.benchmarks.peers import PACKAGES, Package, contestants, installed, missing
from polyhead.lab.benchmarks.plot import plot
from polyhead.lab.benchmarks.problem import Problem
from polyhead.lab.benchmarks.results import document, geometric_mean
from polyhead.lab.benchmarks.section import section
from polyhead.native import rates

ONES = torch.ones(4)
VARIANTS = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": 5},
    "documents": {"causal": True, "documents": (7, 3, 14)},
    "alibi": {"causal": True, "alibi": True},
    "latent": {"causal": True, "latent": 4, "kv_heads": 1},
}


def by_script(times: dict[str, list[float]], length: int = 8) -> Case:
    """A case of which every turn takes what the script says, whatever the clock."""
    left: dict[str, Iterator[float]] = {name: iter(values) for name, values in times.items()}
    asked: list[str] = []

    def way(name: str) -> object:
        asked.append(name)
        return ONES

    def gauge(run: object) -> float:
        run()  # type: ignore[operator]
        return next(left[asked[-1]])

    return Case(
        "made up", length, torch.float32, lambda: way("ours"),
        {"peer": Contestant(lambda: way("peer"), close(torch.float32))},
        (Limit("bytes", "best", lambda: way("limit"), 2.0),), work=6.0, gauge=gauge,
    )  # fmt: skip


def test_a_result_does_not_keep_what_the_case_computed_with() -> None:
    model = torch.nn.Linear(2, 2)
    gone = weakref.ref(model)
    peer = Contestant(lambda model=model: model.weight.detach(), close(torch.float32))
    case = Case(
        "made up", 1, torch.float32, lambda model=model: model.weight.detach(), {"peer": peer},
        (Limit("bytes", "best", lambda model=model: model.weight, 1.0),),
    )  # fmt: skip
    result = measure(case, Settings(rounds=1))
    del model, case, peer
    assert gone() is None
    assert list(result.ratios) == ["peer"]


def test_ratios_are_of_medians_and_means_are_geometric() -> None:
    times = {"ours": [2.0, 1.0, 90.0], "peer": [8.0, 0.1, 4.0], "limit": [0.7, 0.5, 0.1]}
    result = measure(by_script(times), Settings(rounds=3))
    assert result.ours.median == 2.0
    assert result.ratios == {"peer": 2.0}
    assert result.of_limit == 0.5
    assert result.rate(result.ours) == 3.0
    assert result.ours.quartiles == (1.5, 46.0)
    other = measure(by_script({**times, "peer": [16.0] * 3}), Settings(rounds=3))
    (against_peer, against_limit) = document({"made": [result, other]})["geometric_means"]
    assert against_peer["ratio"] == pytest.approx(4.0)
    assert against_limit["ratio"] == pytest.approx(0.5)
    assert geometric_mean([1.0, 4.0, 16.0]) == pytest.approx(4.0)


def test_means_of_bytes_and_of_seconds_stand_apart() -> None:
    times = {"ours": [1.0], "peer": [4.0], "limit": [0.5]}
    timed = measure(by_script(times), Settings(rounds=1))
    more = measure(by_script({**times, "peer": [9.0]}), Settings(rounds=1))
    held = replace(more, case=replace(more.case, unit=""))
    found = {
        (mean["routine"], mean["against"]): mean["ratio"]
        for mean in document({"made": [timed, held]})["geometric_means"]
    }
    assert found["made", "peer"] == pytest.approx(4.0)
    assert found["made, memory", "peer"] == pytest.approx(9.0)


def test_bytes_are_measured_in_two_turns() -> None:
    times = {name: [1.0, 2.0] for name in ("ours", "peer", "limit")}
    assert measure(by_script(times), Settings()).ours.values == (1.0, 2.0)
    case = replace(by_script(times), turns=1)  # or in as many as the case says
    assert measure(case, Settings()).ours.values == (1.0,)


@pytest.mark.parametrize("wrong", [ONES + 1e-3, torch.full((4,), torch.nan), torch.ones(3)])
def test_a_wrong_result_stops_before_anything_is_timed(wrong: torch.Tensor) -> None:
    def gauge(run: object) -> float:
        raise AssertionError("timed")

    peers = {"peer": Contestant(lambda: wrong, close(torch.float32))}
    case = Case("made up", 8, torch.float32, lambda: ONES, peers, gauge=gauge)
    with pytest.raises(DisagreementError, match="peer and polyhead disagree"):
        measure(case, Settings(rounds=1))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("queries", [24, 3])
def test_torch_and_polyhead_are_given_the_same_problem(name: str, queries: int) -> None:
    options = {"kv_heads": 2, **VARIANTS[name]}
    problem = Problem(4, queries=queries, keys=24, head_dim=8, dtype=torch.float32, **options)
    q, k, v = problem.draw()
    exact = problem.ours(q, k, v, kernel="reference")
    torch.testing.assert_close(problem.ours(q, k, v), exact, atol=1e-5, rtol=1e-5)
    (peer,) = contestants(problem, (q, k, v), ["torch SDPA"]).values()
    torch.testing.assert_close(peer.run(), exact, atol=1e-5, rtol=1e-5)
    assert int(problem.keep.sum()) * 4 * 2 * (8 + v.shape[-1]) == problem.operations


@pytest.mark.parametrize("name", ["x-transformers", "onnxruntime"])
def test_installed_peers_agree_with_the_formula(name: str) -> None:
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    problem = Problem(4, 4, 1, 24, 8, torch.float32, causal=True)
    tensors = problem.draw()
    (peer,) = contestants(problem, tensors, [name]).values()
    exact = problem.ours(*tensors, kernel="reference")
    torch.testing.assert_close(peer.run(), exact, atol=1e-5, rtol=1e-5)


def test_a_peer_that_is_not_here_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = Package(("no_such_module",), "pip install no-such-module")
    monkeypatch.setitem(PACKAGES, "x-transformers", absent)
    names = ["torch SDPA", "x-transformers"]
    assert missing(names) == {"x-transformers": "pip install no-such-module"}
    problem = Problem(2, 2, 4, 4, 8, torch.float32, causal=True)
    assert [*contestants(problem, problem.draw(), names)] == ["torch SDPA"]


def test_plot_is_well_formed_and_has_a_line_for_each_way() -> None:
    times = {"ours": [2.0], "peer": [4.0], "limit": [0.5]}
    results = [measure(by_script(times, length), Settings(rounds=1)) for length in (8, 16, 32)]
    root = ElementTree.fromstring(plot({"made": results, "one length": results[:1]}))
    titles = [e.text for e in root.iter() if e.tag.endswith("title")]
    assert titles == ["polyhead", "peer", "limit"]
    text = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert {"made, float32", "made up · FLOP/s"} <= set(text)
    assert not any("one length" in (each or "") for each in text)


def test_a_section_has_a_row_for_each_group_of_long_cases() -> None:
    results = [
        measure(
            by_script({"ours": [2.0], "peer": [peer], "limit": [0.5]}, length), Settings(rounds=1)
        )
        for length, peer in ((1024, 99.0), (4096, 4.0), (8192, 16.0))
    ]
    report = {
        "device": "cpu",
        "machine": {"processor": "Some (family 6, model 7)", "threads": 2, "native_code": "avx2"},
        "rates": {"fma_256": 3.2e11, "reads of 16 MiB": 4.1e10},
    }
    text = section(
        {"decode": results, "window": results[:1]}, report,
        command="polyhead bench decode window", day="2026-11-29",
    )  # fmt: skip
    assert (
        text
        == """## Some (family 6, model 7)

`polyhead bench decode window`, threads: 2, native code `avx2`, 2026-11-29.
At most: fma_256 320 G operations/s, reads of 16 MiB 41 GB/s.
Each cell: time of a peer ÷ ours · of the limit; geometric means.

| work | rows | float32 |
|---|--:|---|
| decode, made up, 4,096 to 8,192 | 2 | peer 4.00 · 50% of bytes |
| window, made up, 1,024 | 1 | peer 49.50 · 50% of bytes |
"""
    )


def test_a_section_about_a_gpu_has_its_name_and_each_dtype_its_own_bound() -> None:
    times = {"ours": [2.0], "peer": [4.0], "limit": [0.5]}
    wide = measure(by_script(times), Settings(rounds=1))
    faster = measure(by_script({**times, "peer": [8.0]}), Settings(rounds=1))
    assert faster.bound is not None
    narrow = replace(
        faster,
        case=replace(faster.case, dtype=torch.bfloat16),
        bound=replace(faster.bound, kind="operations"),
    )
    machine = {"processor": "Some", "threads": 2, "native_code": None, "accelerators": ["A", "B"]}
    report = {"device": "cuda", "machine": machine, "rates": {}}
    command = "polyhead bench decode --device cuda"
    lines = section({"decode": [wide, narrow]}, report, command=command, day="2026-11-29")
    heading, _, about, *_, last = lines.splitlines()
    assert heading == "## A, B"
    assert about == f"`{command}`, threads: 2, native code `none`, 2026-11-29."
    assert "At most" not in lines
    row = "| decode, made up, 8 | 1 | peer 2.00 · 50% of bytes | peer 4.00 · 50% of operations |"
    assert last == row


def test_the_hardware_is_measured_by_its_instructions_and_by_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "_timed", lambda run: 0.5)
    monkeypatch.setattr(limits, "_rate_of", lambda name: 3.0)
    monkeypatch.setattr(rates, "instructions", lambda dtype: ["fma", f"{dtype}"])
    monkeypatch.setattr(rates, "reader", lambda size: lambda: None)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
    assert limits.hardware() == {
        **dict.fromkeys(["fma", *map(str, dtypes)], 3.0),
        **{f"reads of {size} MiB": size * 2**21 for size in (1, 16, 256)},
    }


def test_the_limit_that_takes_longest_binds() -> None:
    slow, quick = (Limit(kind, kind, lambda: ONES, 1.0) for kind in ("operations", "bytes"))
    times = iter([1.0, 0.5, 0.25] * 3)
    case = Case(
        "made up", 8, torch.float32, lambda: ONES, {}, (slow, quick.times(3.0)), 1.0,
        gauge=lambda run: next(times),
    )  # fmt: skip
    result = measure(case, Settings(rounds=3))
    assert result.bound is not None
    assert (result.bound.kind, result.of_limit) == ("bytes", 0.75)


@pytest.mark.parametrize(("narrow", "chosen"), [(1.0, torch.bfloat16), (9.0, torch.float32)])
def test_a_limit_is_in_float32_where_a_narrow_dtype_is_slower(
    monkeypatch: pytest.MonkeyPatch, narrow: float, chosen: torch.dtype
) -> None:
    monkeypatch.setattr(rates, "instructions", lambda dtype: [])
    monkeypatch.setattr(limits, "_seconds", {torch.bfloat16: narrow, torch.float32: 2.0}.get)
    limit = limits.matrix_rate(torch.bfloat16, 1e6)
    assert limit.run().dtype == chosen
    assert limit.name.endswith("in float32") == (chosen == torch.float32)


@pytest.mark.parametrize("fastest", ["fma_512", "bf16_pairs"])
def test_a_limit_is_the_fastest_instruction_that_runs_here(
    monkeypatch: pytest.MonkeyPatch, fastest: str
) -> None:
    done: list[str] = []

    def compute(instruction: str, operations: float) -> float:
        done.append(instruction)
        return 2.0 * operations

    monkeypatch.setattr(rates, "instructions", lambda dtype: ["fma_512", "bf16_pairs"])
    monkeypatch.setattr(rates, "compute", compute)
    monkeypatch.setattr(limits, "_rate_of", {"fma_512": 1.0, "bf16_pairs": 1.0, fastest: 2.0}.get)
    limit = limits.matrix_rate(torch.bfloat16, 6e9)
    limit.run()
    assert (limit.name, limit.share, set(done)) == (fastest, 6e9 / 8e9, {fastest})
