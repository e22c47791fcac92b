"""Compares the arguments that Python passes to the compiled module with csrc/module/interface.h."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from polyhead.native import arguments, coding, dropout
from polyhead.native.arguments import ACTIVATIONS, DTYPES, MOST_PIECES, MOST_ROWS, MOST_WEIGHTS

_GROUPS: tuple[type[Any], ...] = (
    arguments.Piece,
    coding.Coding,
    arguments.Extras,
    dropout.Dropout,
    arguments.Heads,
    arguments.Scales,
    arguments.Weight,
    arguments.NormWeight,
    arguments.Latent,
    arguments.Network,
    arguments.Routing,
    arguments.Experts,
    arguments.LayerWeights,
    arguments.Cross,
    arguments.LayerForm,
    arguments.Held,
    arguments.LayerCall,
    arguments.TileSums,
)
_FUNCTIONS = {
    "codes": "",
    "best": "",
    "stranger": "",
    "grids": "",
    "guard": "",
    "holds": "",
    "layer": "weights form watched",
    "product": "code threads x weights by_row y",
    "unpack": "code threads blocks y",
    "feed_forward": "code threads x network by_row y",
    "route": "code threads x routing weights chosen",
    "sink": "code threads x lse sinks",
    "norm": "code threads x norm y",
    "rotate": "code threads x cos sin y",
    "attend": "code threads q pieces scale extras out lse",
    "gradients": "code threads q pieces scale extras out lse grad_out grad_lse grad_q grad_k "
    "grad_v grad_bias",
    "tile_sums": "code threads logs first sums",
    "head_product": "code threads x weight summed y",
    "step": "code threads x guard calls starts y",
    "gated": "code threads gate up activation y",
    "gated_gradients": "code threads gate up activation grad grad_gate grad_up",
    "dropped": "code threads x plus dropout y",
    "norm_gradients": "code threads x norm grad grad_x grad_weight",
}
"""Arguments in the order in which ``Code`` gives them; those that name none take any objects."""


def differences(module: ModuleType) -> list[str]:
    """Where a compiled module and these files disagree; empty if they match."""
    missing = [f"{name}: there is none" for name in _FUNCTIONS if not hasattr(module, name)]
    theirs: Any = module.interface() if hasattr(module, "interface") else None
    if missing or not isinstance(theirs, dict):
        return missing or ["interface: there is none"]
    ours: dict[str, Any] = {group.__name__: _fields(group) for group in _GROUPS}
    ours["dtypes"] = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    ours["activations"] = [*ACTIVATIONS]
    ours["limits"] = {"rows": MOST_ROWS, "weights": MOST_WEIGHTS, "pieces": MOST_PIECES}
    read = {name: " ".join(theirs.get(name, ())) for name in _FUNCTIONS}
    return [
        f"{name}: {read[name]!r} where {want!r} is given"
        for name, want in _FUNCTIONS.items()
        if read[name] != want
    ] + [
        f"{name}: {theirs.get(name)} where {want} is given"
        for name, want in ours.items()
        if _in_order(theirs.get(name)) != _in_order(want)
    ]


def _fields(group: type[Any]) -> dict[str, str]:
    """Names and types as written in the class, in order."""
    kinds = group.__annotations__.items()
    return {name: str(getattr(kind, "__forward_arg__", kind)) for name, kind in kinds}


def _in_order(table: Any) -> Any:
    return [*table.items()] if isinstance(table, dict) else table
