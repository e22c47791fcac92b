"""Compares the arguments that Python passes to the compiled module with csrc/module/interface.h."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from polyhead.native import arguments
from polyhead.native.arguments import (
    ACTIVATIONS,
    DTYPES,
    MAX_GEMV_ROWS,
    MAX_SEGMENTS,
    MAX_STEP_ROWS,
    MAX_WEIGHTS,
)

_FUNCTIONS = {
    "codes": "",
    "best": "",
    "unsupported_tensor_kind": "",
    "grids": "",
    "rates": "",
    "at_rate": "",
    "read_all": "",
    "end_team": "",
    "guard": "",
    "holds": "",
    "layer": "weights, form, watched",
    "product": "code, threads, x, weights, batch_invariant, y",
    "matmul": "code, threads, a, b, add, y",
    "unpack": "code, threads, blocks, y",
    "feed_forward": "code, threads, x, network, batch_invariant, y",
    "route": "code, threads, x, routing, weights, chosen",
    "sink": "code, threads, x, lse, sinks",
    "choose_blocks": "code, threads, q, entries, own, chosen",
    "choose_keys": "code, threads, q, weights, segments, mods, chosen",
    "recur": "code, threads, q, k, v, scale, decay, beta, real, delta, state, out",
    "norm": "code, threads, x, weight, y",
    "rotate": "code, threads, x, cos, sin, y",
    "attend": "code, threads, q, segments, scale, mods, out, lse",
    "gradients": "code, threads, q, segments, scale, mods, out, lse, grad_out, grad_lse, grad_q, "
    "grad_k, grad_v, grad_bias",
    "tile_sums": "code, threads, logs, first, sums",
    "head_product": "code, threads, x, weight, summed, y",
    "run": "",
    "step": "code, threads, x, guard, calls, starts, counts, run, y",
    "again": "code, threads, x, guard, run, start, rotations, y",
    "gated": "code, threads, gate, up, activation, y",
    "gated_gradients": "code, threads, gate, up, activation, grad, grad_gate, grad_up",
    "dropped": "code, threads, x, plus, dropout, y",
    "norm_gradients": "code, threads, x, norm, grad, grad_x, grad_weight",
}
"""Arguments in the order in which ``Code`` gives them; those that name none take any objects."""


def differences(module: ModuleType) -> list[str]:
    """Where a compiled module and these files disagree; empty if they match."""
    missing = [f"{name}: there is none" for name in _FUNCTIONS if not hasattr(module, name)]
    theirs: Any = module.interface() if hasattr(module, "interface") else None
    if missing or not isinstance(theirs, dict):
        return missing or ["interface: there is none"]
    ours: dict[str, Any] = {name: given for name, given in _FUNCTIONS.items() if given}
    for name, kind in vars(arguments).items():
        if isinstance(kind, type) and hasattr(kind, "_fields"):  # a named tuple
            ours[name] = ", ".join(kind._fields)
    ours["dtypes"] = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    ours["activations"] = ", ".join(ACTIVATIONS)
    ours["limits"] = {
        "rows": MAX_GEMV_ROWS,
        "step_rows": MAX_STEP_ROWS,
        "weights": MAX_WEIGHTS,
        "segments": MAX_SEGMENTS,
    }
    return [
        f"{name}: {theirs.get(name)!r} where {want!r} is given"
        for name, want in ours.items()
        if theirs.get(name) != want
    ]
