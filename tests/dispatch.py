"""Which kernel ``auto`` takes on CUDA, asked of fake tensors: it needs no GPU to decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import polyhead as ph
from polyhead.kernels import flex
from polyhead.kernels.score_mods import score_mods_of
from polyhead.kernels.triton import kernel, self_test
from polyhead.semantics import Call

LENGTH = 4096
WINDOW = ph.Causal() & ph.Window(1024)


def _made(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16)


CASES: dict[str, dict[str, Any]] = {
    "nothing beside q, k, v": {},
    "causal, T = S": {"mask": ph.Causal()},
    "one query, all keys visible": {"T": 1, "mask": ph.Causal()},
    "causal, a chunk behind a cache": {"T": 512, "mask": ph.Causal()},
    "window": {"mask": WINDOW},
    "one query, window": {"T": 1, "mask": WINDOW},
    "chunks": {"mask": ph.Causal() & ph.Chunk(512)},
    "prefix": {"mask": ph.Causal() | ph.Prefix(100)},
    "documents": {"mask": ph.Causal() & ph.Documents([1000, 3096])},
    "key lengths": {"mask": ph.KeyLengths([4000, 96])},
    "complement": {"mask": ~ph.KeyLengths([4000, 96])},
    "an explicit tensor": {"mask": lambda: ph.Keep(torch.ones(LENGTH, LENGTH) > 0)},
    "block-sparse": {"mask": lambda: ph.BlockSparse(torch.eye(32, dtype=torch.bool), 128)},
    "chosen keys": {"T": 1, "mask": lambda: ph.Chosen(torch.arange(64), 16)},
    "softcap": {"mask": ph.Causal(), "softcap": 50.0},
    "ALiBi": {"mask": ph.Causal(), "bias": lambda: ph.ALiBi(_made(8))},
    "T5 bias": {"bias": lambda: ph.RelativeBias(_made(32, 8))},
    "T5 bias that learns": {"bias": lambda: ph.RelativeBias(_made(32, 8).requires_grad_())},
    "a bias tensor": {"bias": lambda: torch.ones(LENGTH, LENGTH)},
    "FIRE": {
        "bias": lambda: ph.FIRE(_made(32, 1), _made(32), _made(8, 32), _made(8), _made(), _made())
    },
    "bias by content": {"bias": lambda: ph.RelativeContentBias(_made(2, 8, LENGTH, 512))},
    "lse": {"mask": ph.Causal(), "return_lse": True},
    "sinks": {"mask": ph.Causal(), "sinks": lambda: _made(8)},
    "dropout": {"mask": ph.Causal(), "dropout_p": 0.1},
    "float32, window": {"mask": WINDOW, "dtype": torch.float32},
    "float64, window": {"mask": WINDOW, "dtype": torch.float64},
    "head size 80, window": {"mask": WINDOW, "D": 80},
    "latent attention, 576 and 512": {"mask": ph.Causal(), "G": 1, "D": 576, "V": 512},
    "6 kv heads of 18, window": {"mask": WINDOW, "H": 18, "G": 6},
    "100 keys, window": {"mask": ph.Causal() & ph.Window(10), "T": 100, "S": 100},
}


def decisions(patch: Callable[[object, str, Any], None]) -> dict[str, tuple[str, ...]]:
    """What `auto` takes for each case: without gradients, and with those of q, k and v.

    Both twice: where our Triton kernels passed their test at first use, and where they are off.
    """
    patch(flex, "_has_triton", lambda: True)
    patch(flex, "_compiles_for_cpu", lambda: True)
    patch(kernel, "_has_triton", lambda: True)
    patch(kernel, "_has_gpu", lambda: True)
    patch(kernel, "score_mods_of", _extras_on_cpu)
    found: dict[str, tuple[str, ...]] = dict.fromkeys(CASES, ())
    for unsupported_reason in (None, "switched off: in this table"):
        patch(self_test, "unsupported_reason", lambda *_, said=unsupported_reason: said)
        with FakeTensorMode():
            for name, case in CASES.items():
                found[name] += tuple(explained(case, learns).kernel for learns in (False, True))
    return found


def _extras_on_cpu(call: Call, drawn: int) -> Any:
    """`score_mods_of` with all tensors on the CPU, since torch cannot cut fake CUDA tensors."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device="cpu").requires_grad_(x.requires_grad)

    bias = call.spec.bias
    if bias is not None:
        bias = bias.with_tensors([moved(x) for x in bias.tensors])
    return score_mods_of(replace(call, q=moved(call.q), spec=replace(call.spec, bias=bias)), drawn)


def explained(case: dict[str, Any], learns: bool) -> ph.Explanation:
    """What `explain` says of a case, within ``FakeTensorMode``."""
    rest = {name: made() if callable(made) else made for name, made in case.items()}
    sizes = {"H": 8, "G": 8, "T": LENGTH, "S": LENGTH, "D": 128}
    H, G, T, S, D = (rest.pop(name, size) for name, size in sizes.items())
    dtype, V = rest.pop("dtype", torch.bfloat16), rest.pop("V", D)
    q, k, v = (
        torch.empty(2, n, x, size, device="cuda", dtype=dtype).requires_grad_(learns)
        for n, x, size in ((H, T, D), (G, S, D), (G, S, V))
    )
    return ph.explain(q, k, v, **rest)


def table(found: dict[str, tuple[str, ...]]) -> list[str]:
    """The decisions as lines of Markdown."""
    lines = [
        "| on CUDA | forward | with gradients | forward, ours off | with gradients, ours off |",
        "|---|---|---|---|---|",
    ]
    return lines + [f"| {name} | {' | '.join(kernels)} |" for name, kernels in found.items()]
