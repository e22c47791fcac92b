"""What ``polyhead bench --device cuda`` would measure, seen without a GPU."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import polyhead as ph
from polyhead.errors import InputError
from polyhead.lab.benchmarks import ROUTINES, Settings, chosen, gpu_peers, measure, peers, watched
from polyhead.lab.benchmarks.case import close, device_seconds
from polyhead.lab.benchmarks.problem import Problem

# The meta device stands for a GPU: nothing is computed there.
ON = Settings(quick=True, dtypes=(torch.bfloat16,), device="meta")


@pytest.mark.parametrize("name", ["decode", "mla", "window"])
def test_cases_lie_on_the_device_and_name_a_limit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    for peer in gpu_peers.NAMES:
        monkeypatch.setitem(peers.ATTENTION, peer, lambda *_, peer=peer: asked.append(peer))
    here = {*gpu_peers.NAMES, "torch SDPA", "onnxruntime"}
    monkeypatch.setattr(peers, "installed", here.__contains__)
    for case in ROUTINES[name].drawn(ON):
        assert case.limits
        assert all(limit.run().is_meta for limit in case.limits)
        assert case.ours().is_meta
        assert not {"onnxruntime"} & set(case.peers)
    assert set(asked) == set(gpu_peers.NAMES)
    assert {"SDPA flash", "SDPA cuDNN", "flash-attn"} <= set(ROUTINES[name].meets(ON))
    assert torch.get_default_device().type == "cpu"


def test_a_gpus_limits_are_large_enough_to_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyhead.lab.benchmarks import limits

    monkeypatch.setattr(limits, "_on", "cuda".__eq__)
    with torch.device("meta"):
        assert limits.matrix_rate(torch.bfloat16, 1e6).name == "8192³ matrix product"
        assert limits.read_rate(1e6).name == "sum over 1,073,741,824 bytes"


def test_time_on_a_gpu_is_that_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("event")

        def synchronize(self) -> None:
            calls.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 20.0  # milliseconds

    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert device_seconds(lambda: calls.append("run"), 4) == 0.005
    assert calls == ["event", *["run"] * 4, "event", "wait"]


def test_what_is_measured_on_a_cpu_only_is_refused_by_name() -> None:
    assert set(chosen([], "cuda")) < set(ROUTINES)
    assert set(chosen([])) == set(ROUTINES)
    with pytest.raises(InputError, match="routine 'beams' is measured on a CPU only: on cuda give"):
        chosen(["decode", "beams"], "cuda")


def _flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int], softcap: float,
    alibi_slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    mask: ph.Mask | None = ph.Causal() if causal else None
    if window_size[0] >= 0:
        window = ph.Window(window_size[0] + 1)
        mask = window if mask is None else mask & window
    out = ph.attention(
        *(x.transpose(1, 2) for x in (q, k, v)), mask=mask, softcap=softcap or None,
        bias=None if alibi_slopes is None else ph.ALiBi(alibi_slopes),
    )  # fmt: skip
    return out.transpose(1, 2)


def _single(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, **options: Any) -> Tensor:
    mask: ph.Mask | None = ph.Causal() if causal else None
    if (left := options.get("window_left", -1)) >= 0 and mask is not None:
        mask = mask & ph.Window(left + 1)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = ph.attention(q, k, v, mask=mask, softcap=options["logits_soft_cap"])
    return out[0].transpose(0, 1)


def _libraries() -> dict[str, ModuleType]:
    """Modules with the functions that are called, by their documentation."""
    flash, infer, xformers = (ModuleType(n) for n in ("flash_attn", "flashinfer", "xformers.ops"))
    flash.flash_attn_func = _flash_attn_func  # type: ignore[attr-defined]
    infer.single_prefill_with_kv_cache = _single  # type: ignore[attr-defined]
    infer.single_decode_with_kv_cache = (  # type: ignore[attr-defined]
        lambda q, k, v, **options: _single(q[None], k, v, **options)[0]
    )
    xformers.LowerTriangularMask = ph.Causal  # type: ignore[attr-defined]
    xformers.memory_efficient_attention = (  # type: ignore[attr-defined]
        lambda q, k, v, attn_bias: ph.attention(
            *(x.transpose(1, 2) for x in (q, k, v)), mask=attn_bias
        ).transpose(1, 2)
    )
    return {module.__name__: module for module in (flash, infer, xformers)}


@pytest.mark.parametrize(
    ("changes", "able"),
    [
        ({}, {"flash-attn", "FlashInfer", "xformers"}),
        ({"queries": 1, "kv_heads": 2}, {"flash-attn", "FlashInfer"}),
        ({"window": 9, "softcap": 5.0}, {"flash-attn", "FlashInfer"}),
        ({"alibi": True, "batch": 2}, {"flash-attn"}),
        ({"sinks": True}, set()),
        ({"dtype": torch.float32}, {"xformers"}),
    ],
)
def test_other_libraries_are_called_as_their_documentation_says(
    changes: dict[str, Any], able: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in _libraries().items():
        monkeypatch.setitem(sys.modules, name, module)
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 4, "queries": 40, "keys": 40, "head_dim": 16}
    problem = Problem(**({"dtype": torch.bfloat16, "causal": True} | sizes | changes))
    tensors = problem.draw()
    found = {name: prepare(problem, *tensors) for name, prepare in gpu_peers.LIBRARIES.items()}
    assert {name for name, run in found.items() if run is not None} == able
    for run in found.values():
        if run is not None:
            assert close(problem.dtype)(problem.ours(*tensors), run()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_those_of_whole_weights_in_the_dtypes_of_a_gpu(dtype: torch.dtype) -> None:
    assert "statistics" in chosen([], "cuda")
    with torch.no_grad():  # as the command calls it
        case = watched.of_heads(*torch.randn(3, 1, 2, 256, 64).to(dtype))
        result = measure(case, Settings(rounds=1))
    assert set(result.ratios) == {"unwatched", "torch, T × T weights"}
