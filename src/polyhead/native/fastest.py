"""Which of several compiled codes is the fastest for what, measured once for each processor.

An instruction that one processor has at full rate another has at half: pairs of bfloat16 are twice
as fast as products of float32 on a Zen 4, and half as fast on some Xeons, where widening to float32
is the faster way; and matrix tiles multiply prompts, while a step waits for memory. So where more
than one vector code was compiled they are timed at first use, for some milliseconds, and the result
is kept in the cache directory. Steps and prompts of a dtype may have different codes.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyhead._utils.cache_directory import cache_directory
from polyhead.native.arguments import DTYPES, KVSegment, Weight
from polyhead.native.code import Code
from polyhead.native.threads import threads

Times = Mapping[str, Mapping[str, float]]
"""Seconds of each kind of work by each code, and of ``"gemm"`` by ``TORCH``."""

TORCH = "torch"
FIRST_UNLESS = 0.9
"""Another code takes the place of the first where it takes less than this part of its time."""
_TURNS = 10
_STEPS, _PROMPTS = ("decode", "chunk", "gemv"), ("prefill", "gemm")


class Choice(NamedTuple):
    """What was chosen for a dtype.

    Attributes:
        steps: The name of the fastest for steps: decoding of one and of four tokens, and products
            of a few rows.
        prompts: The same for prompts: attention of many queries, and products of many rows.
        gemm: Whether the products of ``prompts`` are as fast as torch's.
        times: What that was chosen by.
    """

    steps: str
    prompts: str
    gemm: bool
    times: Times


def choose(times: Times) -> Choice:
    """The first code, unless another is faster by a tenth at steps, or at prompts.

    Args:
        times: By code, in the order of preference; the work of torch's product last.
    """
    names = [name for name in times if name != TORCH]

    def best_at(works: Sequence[str]) -> str:
        def product(name: str) -> float:
            of_works = dict(times[name])
            of_works["gemm"] = min(of_works["gemm"], times[TORCH]["gemm"])
            return math.prod(of_works[work] for work in works)

        best = min(names, key=product)
        least = FIRST_UNLESS ** len(works) * product(names[0])
        return best if product(best) < least else names[0]

    prompts = best_at(_PROMPTS)
    gemm = times[prompts]["gemm"] <= times[TORCH]["gemm"]
    return Choice(best_at(_STEPS), prompts, gemm, times)


def fastest(codes: Sequence[Code]) -> dict[torch.dtype, Choice]:
    """The fastest of several codes for each dtype, from the cache directory or measured now."""
    place = cache_directory() / "native" / "fastest.json"
    key = _key([code.name for code in codes])
    stored = _read(place)
    times = stored.get(key)
    if times is None:
        times = {_name(dtype): measure(codes, dtype) for dtype in DTYPES}
        _write(place, stored | {key: times})
    names = [*(code.name for code in codes), TORCH]
    in_order = {d: {name: times[_name(d)][name] for name in names} for d in DTYPES}
    return {dtype: choose(in_order[dtype]) for dtype in DTYPES}


def measure(codes: Sequence[Code], dtype: torch.dtype) -> Times:
    """The shortest of some turns of each kind of work: attention and products."""
    runs: dict[str, dict[str, Callable[[], object]]] = {}
    random = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float32, device="cpu").to(dtype)

    q, k, v = numbers(1, 8, 128, 64), numbers(1, 2, 2048, 64), numbers(1, 2, 2048, 64)
    x, weight = numbers(192, 512), numbers(512, 512)
    panel, whole = KVSegment(k[:, :, :512], v[:, :, :512]), KVSegment(k, v)
    for code in codes:
        runs[code.name] = {
            "prefill": partial(code.attend, q, [panel], 0.1),
            "decode": partial(code.attend, q[:, :, :1], [whole], 0.1),
            "chunk": partial(code.attend, q[:, :, :4], [whole], 0.1),  # 16 rows of a kv head
            "gemv": partial(code.product, x[:1], [Weight(weight, None)]),
            "gemm": partial(code.product, x, [Weight(weight, None)], batch_invariant=False),
        }
    runs[TORCH] = {"gemm": partial(torch.nn.functional.linear, x, weight)}
    found = {name: dict.fromkeys(works, math.inf) for name, works in runs.items()}
    for _ in range(_TURNS):
        for name, works in runs.items():
            for work, run in works.items():
                run()  # what ran before has left other data and code in the caches
                begin = time.perf_counter()
                run()
                found[name][work] = min(found[name][work], time.perf_counter() - begin)
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _key(codes: Sequence[str]) -> str:
    """What a measurement holds for: processor, threads, version and codes."""
    from polyhead import __version__

    model = platform.processor() or platform.machine()
    with suppress(OSError, UnicodeDecodeError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        known = ("model name", "cpu family", "model", "stepping")
        fields = (line.partition(":") for line in lines)
        model = " ".join(value.strip() for name, _, value in fields if name.strip() in known)
    return f"{model}; {threads()} threads; polyhead {__version__}; {', '.join(codes)}"


def _read(place: Path) -> dict[str, dict[str, Times]]:
    """What was stored, less what does not read as times."""
    try:
        stored = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {key: times for key, times in stored.items() if _is_complete(times, key)}


def _is_complete(of_dtypes: Any, key: str) -> bool:
    """Whether something stored has seconds for each dtype, code and kind of work."""
    names = key.rpartition("; ")[2].split(", ")
    try:
        return all(
            0.0 < float(of_dtypes[_name(dtype)][name][work]) < math.inf
            for dtype in DTYPES
            for name, works in [*((each, _STEPS + _PROMPTS) for each in names), (TORCH, ("gemm",))]
            for work in works
        )
    except (TypeError, KeyError, ValueError, IndexError):
        return False


def _write(place: Path, stored: Mapping[str, Mapping[str, Times]]) -> None:
    """Where nothing can be written, the next process measures again."""
    from polyhead._utils.atomic_write import write_file

    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_file(place, json.dumps(stored, indent=1) + "\n")
