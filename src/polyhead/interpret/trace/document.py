"""A user's own small attention layer, from JSON, for ``polyhead trace --input FILE``.

    {"X":   [[1, 0, 1, 0], ...],              a row per token                      [T, E]
     "W_Q": [[[1, 0], ...], [[0, 1], ...]],   one matrix per head                  [H, E, D]
     "W_K": ..., "W_V": ...,                  as many, or a divisor of H (GQA)     [G, E, D]
     "W_O": [[1, 0, 1, 0], ...],              rows: the heads' outputs in order    [H·Dv, E_out]
     "tokens": ["the", "cat"],                optional names of the rows
     "causal": true}                          optional; or "mask": [[true, false], ...]  [T, T]

The projections may also be whole matrices ``[E, H·D]`` with ``"num_heads"`` (and, for fewer
key/value heads, ``"num_kv_heads"``): head i then owns the i-th block of columns. In ``"mask"``,
true means that the row's token may look at the column's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import InputError
from polyhead.interpret.trace.steps import AttentionInput

_REQUIRED = ("X", "W_Q", "W_K", "W_V", "W_O")
_OPTIONAL = ("num_heads", "num_kv_heads", "causal", "mask", "tokens")


def parse_trace_json(content: bytes | str, source: str = "the input") -> AttentionInput:
    """Reads and checks a JSON document; ``source`` names it in messages.

    Raises:
        InputError: not UTF-8, not JSON, or a key that is missing, unknown or of the wrong shape.
    """
    try:
        data = json.loads(content.decode("utf-8-sig") if isinstance(content, bytes) else content)
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 text: byte {error.start} is wrong") from error
    except json.JSONDecodeError as error:
        raise InputError(
            f"{source} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except RecursionError as error:
        raise InputError(f"{source} is nested too deeply to be matrices") from error
    return parse_trace_input(data)


def parse_trace_input(data: Any) -> AttentionInput:
    """Checks the decoded JSON; every message names the key, what came and what is wanted."""
    if not isinstance(data, Mapping):
        raise InputError(f"the input must be an object with the keys {', '.join(_REQUIRED)}")
    for key in _REQUIRED:
        if key not in data:
            raise InputError(f"{key} is missing; the input needs {', '.join(_REQUIRED)}")
    for key in data:
        if key not in _REQUIRED + _OPTIONAL:
            raise InputError(
                f"unknown key {key!r}; keys are {', '.join(_REQUIRED)} and, optional, "
                f"{', '.join(_OPTIONAL)}"
            )
    x = _numbers("X", data["X"])
    if x.ndim != 2:
        raise InputError(f"X must have shape [T, E], a row per token: got {list(x.shape)}")
    w_q = _heads("W_Q", data, x, "num_heads")
    kv_count = "num_kv_heads" if "num_kv_heads" in data else "num_heads"
    w_k = _heads("W_K", data, x, kv_count)
    w_v = _heads("W_V", data, x, kv_count)
    if len(w_q) % len(w_k):
        raise InputError(
            f"W_K must have a number of heads that divides W_Q's {len(w_q)}: got {len(w_k)}"
        )
    if len(w_v) != len(w_k):
        raise InputError(f"W_V must have as many heads as W_K, {len(w_k)}: got {len(w_v)}")
    if w_k[0].shape != w_q[0].shape:
        raise InputError(
            f"W_K must have heads of W_Q's shape {list(w_q[0].shape)}: got {list(w_k[0].shape)}"
        )
    w_o = _numbers("W_O", data["W_O"])
    rows = len(w_q) * w_v[0].shape[1]
    if w_o.ndim != 2 or w_o.shape[0] != rows:
        raise InputError(
            f"W_O must have shape [{rows}, E_out] ({len(w_q)} heads of {w_v[0].shape[1]}): "
            f"got {list(w_o.shape)}"
        )
    return AttentionInput(x, w_q, w_k, w_v, w_o, _visible(data, len(x)), _tokens(data, len(x)))


def _numbers(key: str, value: Any) -> Tensor:
    """A nested list of finite numbers as a float64 tensor; rows must have equal lengths above 0."""
    try:
        matrix = torch.tensor(value, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{key} must be nested lists of numbers with rows of equal length: {error}"
        ) from error
    if matrix.ndim == 0 or matrix.numel() == 0:
        raise InputError(f"{key} must hold at least one number in each row: got {value!r}")
    if not matrix.isfinite().all():
        raise InputError(f"{key} must hold finite numbers: got NaN or infinity")
    return matrix


def _heads(key: str, data: Mapping[str, Any], x: Tensor, count_key: str) -> tuple[Tensor, ...]:
    """The per-head matrices of ``key``, given apart or as one whole."""
    matrix, embed = _numbers(key, data[key]), x.shape[1]
    if matrix.ndim == 3:
        if matrix.shape[1] != embed:
            raise InputError(
                f"{key} must have shape [heads, {embed}, D] to follow X {list(x.shape)}: "
                f"got {list(matrix.shape)}"
            )
        count = data.get(count_key)
        if count is not None and count != len(matrix):
            raise InputError(f"{key} must have {count_key} = {count!r} heads: got {len(matrix)}")
        return tuple(matrix)
    if matrix.ndim != 2 or matrix.shape[0] != embed:
        raise InputError(
            f"{key} must have shape [heads, {embed}, D] or, whole, [{embed}, heads · D] to follow "
            f"X {list(x.shape)}: got {list(matrix.shape)}"
        )
    count = data.get(count_key)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InputError(
            f"{key} is one whole matrix {list(matrix.shape)}, so {count_key} must be a whole "
            f"number of at least 1: got {count!r}"
        )
    if matrix.shape[1] % count:
        raise InputError(
            f"{key} has {matrix.shape[1]} columns, which {count_key} = {count} does not divide"
        )
    return torch.chunk(matrix, count, dim=1)


def _visible(data: Mapping[str, Any], length: int) -> Tensor | None:
    causal, mask = data.get("causal", False), data.get("mask")
    if not isinstance(causal, bool):
        raise InputError(f"causal must be true or false: got {causal!r}")
    visible = torch.ones(length, length, dtype=torch.bool, device="cpu")
    if mask is not None:
        shape_ok = (
            isinstance(mask, list)
            and len(mask) == length
            and all(isinstance(row, list) and len(row) == length for row in mask)
        )
        if not shape_ok or not all(isinstance(cell, bool) for row in mask for cell in row):
            raise InputError(
                f"mask must be [{length}, {length}] of true (may look) and false: got {mask!r}"
            )
        visible = torch.tensor(mask, dtype=torch.bool, device="cpu")
    if causal:
        visible = visible.tril()
    return visible if causal or mask is not None else None


def _tokens(data: Mapping[str, Any], length: int) -> tuple[str, ...]:
    tokens = data.get("tokens")
    if tokens is None:
        return ()
    if not isinstance(tokens, list) or len(tokens) != length:
        raise InputError(f"tokens must be {length} names, one per row of X: got {tokens!r}")
    return tuple(str(token) for token in tokens)
