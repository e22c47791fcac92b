"""What a file says of a probe, checked against its tensors before any of it is used.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from polyhead._utils.checks import check_int, check_number, shown
from polyhead.errors import CheckpointError
from polyhead.interpret import files
from polyhead.interpret.kept import KeptCall
from polyhead.interpret.statistics import TABLE
from polyhead.semantics import Tokens

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_PARTS = ("heads", "top_k", "kv_heads", "lse", "_q_tokens", "_measured", "_call")


def read(path: str | os.PathLike[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The modules of a saved probe, and the state of each view by its module.

    Raises:
        CheckpointError: Not such a file, or a damaged one; says what contradicts what.
    """
    content = files.read(path)
    modules, views = (
        (content.get("modules"), content.get("views"))
        if isinstance(content, dict)
        else (None, None)
    )
    if not isinstance(modules, list) or not isinstance(views, dict):
        raise CheckpointError(f"{path}: must hold modules and their views: got {shown(content)}")
    if not all(isinstance(name, str) for name in modules) or len({*modules}) < len(modules):
        raise CheckpointError(f"{path}: modules must be names, each once: got {shown(modules)}")
    for name, state in views.items():
        try:
            if not isinstance(state, dict) or set(state) != {*_PARTS}:
                raise ValueError(f"a view must have {', '.join(_PARTS)}")
            _check_view(state)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise CheckpointError(f"{path}: view {shown(name)}: {error}") from error
    return modules, views


def _check_view(state: dict[str, Any]) -> None:
    call, lse = state["_call"], state["lse"]
    if call is not None:
        if not isinstance(call, KeptCall):
            raise TypeError("_call must be a KeptCall or nothing")
        _check_call(call)
        _check("lse", lse, call.lse.shape, (call.lse.dtype,))
    _check("lse", lse, (None, None, None), _DTYPES)
    B, H, T = lse.shape
    for name in ("heads", "kv_heads"):
        _check_numbers(name, state[name], H)
    check_int("top_k", state["top_k"], least=1, most=files.MOST)
    _check_tokens("_q_tokens", state["_q_tokens"], B, T)
    sizes = {"B": B, "H": H, "T": T, "S": None if call is None else call.k_tokens.length}
    measured = state["_measured"]
    if not isinstance(measured, dict):
        raise TypeError(f"_measured must be statistics by name: got {shown(measured)}")
    for name, values in measured.items():
        if name not in TABLE:
            raise ValueError(f"there is no statistic {shown(name)}")
        shape = tuple(sizes.get(letter) for letter in TABLE[name].shape)
        _check(name, values, shape, (torch.int64,) if TABLE[name].unit == "key" else _DTYPES)


def _check_call(call: KeptCall) -> None:
    _check("q", call.q, (None,) * 4, _DTYPES)
    B, H, T, D = call.q.shape
    _check("k", call.k, (B, None, None, D), (call.q.dtype,))
    G, S = call.k.shape[1:3]
    _check("lse", call.lse, (B, H, T), _DTYPES)
    _check_numbers("kv_heads", call.kv_heads, H, most=G - 1)
    _check_tokens("q_tokens", call.q_tokens, B, T)
    _check_tokens("k_tokens", call.k_tokens, B, S)
    spec = call.spec
    check_number("scale", spec.scale)
    if spec.softcap is not None:
        check_number("softcap", spec.softcap, above=0)
    if spec.mask is not None:
        spec.mask.check(B, H, T, S)
    if spec.bias is not None:
        for tensor in spec.bias.tensors:
            _check("bias", tensor, (None,) * tensor.ndim, _DTYPES)
        spec.bias.check(B, H, T, S)
    if spec.sinks is not None:
        per_query = spec.sinks.ndim == 3
        _check("sinks", spec.sinks, (None, H, T) if per_query else (H,), _DTYPES)
        if per_query and len(spec.sinks) not in (1, B):
            raise ValueError(f"sinks must be of 1 or {B} rows: got {len(spec.sinks)}")
    if call.documents is not None:
        lengths = call.documents.lengths
        if len(lengths) not in (1, B) or max(map(sum, lengths)) > files.MOST:
            raise ValueError(f"documents must be of {B} rows: got {shown(lengths)}")
    if call.ids is not None:
        for name, ids, length in zip(call.ids._fields, call.ids, (T, S, S), strict=True):
            _check(f"ids of {name}", ids, (None, length), (torch.int64, torch.int32))
            if len(ids) not in (1, B):
                raise ValueError(f"ids of {name} must be of 1 or {B} rows: got {len(ids)}")


def _check_tokens(name: str, tokens: Any, batch: int, length: int) -> None:
    if not isinstance(tokens, Tokens) or tokens.length != length:
        raise ValueError(f"{name} must be {length} Tokens: got {shown(tokens)}")
    positions = tokens.positions
    if positions is not None and positions.ndim == 2 and len(positions) not in (1, batch):
        raise ValueError(f"positions of {name} must be of {batch} rows: got {len(positions)}")
    if tokens.span is not None and max(map(abs, tokens.span)) > 2 * files.MOST:
        raise ValueError(f"positions of {name} must be at most {files.MOST}: got {tokens.span}")


def _check_numbers(name: str, values: Any, count: int, most: int | None = None) -> None:
    if not isinstance(values, list | tuple) or len(values) != count:
        raise ValueError(f"{name} must be {count} numbers, one per query head: got {shown(values)}")
    for value in values:
        check_int(name, value, least=0, most=files.MOST if most is None else most)


def _check(
    name: str, tensor: Any, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raises unless a tensor has one of these dtypes and this shape, None standing for any size."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
        got = tensor.dtype if isinstance(tensor, Tensor) else shown(tensor)
        raise TypeError(f"{name} must be a tensor of {', '.join(map(str, dtypes))}: got {got}")
    if tensor.ndim != len(shape) or any(
        want is not None and have != want for have, want in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be of shape [{wanted}]: got {list(tensor.shape)}")
