"""A probe's views in one safetensors file (never a pickle).

The tensors are the file's tensors; everything else (which mask, which scale, whose heads) is JSON
in its header, in which a tensor stands as ``{"tensor": name}`` and a mask, a bias or another part
of the specification as ``{"kind": class, "of": [arguments]}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from polyhead._utils.atomic_write import write_tensors
from polyhead._utils.checks import check_int, shown
from polyhead._utils.extensions import extensions
from polyhead._utils.paths import size_of
from polyhead.errors import CheckpointError, UnsupportedError
from polyhead.interpret.kept import KeptCall, TokenIds
from polyhead.semantics import Documents, Specification, Tokens
from polyhead.semantics.biases import Bias
from polyhead.semantics.component import kinds
from polyhead.semantics.masks import Mask
from polyhead.semantics.masks.counts import PerRow

KEY = "polyhead.probe"
_VERSION = 1
MOST = 1 << 48
"""Tokens of a sequence: more than any has, and few enough to count on with 64 bits."""

Types = dict[str, Any]


def _tokens(length: int, shift: int, positions: Tensor | None) -> Tokens:
    """All queries or all keys of a call, which start at index 0."""
    check_int("length", length, least=0, most=MOST)
    check_int("shift", shift, least=-MOST, most=MOST)
    if positions is not None and (
        positions.dtype != torch.int64
        or positions.ndim not in (1, 2)
        or positions.shape[-1] != length
    ):
        raise ValueError(
            f"positions must be int64, [{length}] or [B, {length}]: got {positions.dtype} "
            f"{list(positions.shape)}"
        )
    return Tokens.of(length, shift=shift, positions=positions)


_KINDS: dict[str, tuple[Callable[..., Any], Types]] = {
    "KeptCall": (
        KeptCall,
        {
            "q": Tensor,
            "k": Tensor,
            "lse": Tensor,
            "spec": Specification,
            "q_tokens": Tokens,
            "k_tokens": Tokens,
            "kv_heads": list,
            "ids": TokenIds | None,
            "documents": Documents | None,
        },
    ),
    "Specification": (
        Specification,
        {
            "scale": float | int,
            "mask": Mask | None,
            "bias": Bias | None,
            "softcap": float | int | None,
            "sinks": Tensor | None,
        },
    ),
    "TokenIds": (TokenIds, {"queries": Tensor, "keys": Tensor, "preceding": Tensor}),
    "Tokens": (_tokens, {"length": int, "shift": int, "positions": Tensor | None}),
}
"""How each part is made again: its maker, and the attributes that are its arguments with types."""


@cache
def _kinds() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """``_KINDS``, with masks and biases; those of extensions by their full names."""
    extensions()
    rules = {
        _name_of(cls): (cls, dict(cls.arguments or {}))
        for base in (Mask, Bias)
        for cls in kinds(base)
    }
    return _KINDS | rules


def _name_of(cls: type) -> str:
    own = cls.__module__.startswith("polyhead.")
    return cls.__name__ if own else f"{cls.__module__}.{cls.__qualname__}"


def write(path: str | os.PathLike[str], content: Any) -> None:
    """Writes lists, dicts, numbers, tensors, masks and biases to a file, whole or not at all.

    Raises:
        UnsupportedError: A mask or bias of a class that is not polyhead's.
        OSError: The file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    header = json.dumps({"version": _VERSION, "content": _packed(content, tensors)})
    write_tensors(path, tensors, {KEY: header})


def read(path: str | os.PathLike[str]) -> Any:
    """Reads what ``write`` wrote; arguments of masks and biases must have the right types.

    Raises:
        CheckpointError: Not a file of a probe, truncated or of another version.
    """
    size_of(Path(path))
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
    if text is None:
        raise CheckpointError(f"{path} is not the file of a probe: it has no {KEY}")
    try:
        header = json.loads(text)
        version = header["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its {KEY} is no object with a version") from error
    if version != _VERSION:
        raise CheckpointError(f"{path}: version must be {_VERSION}: got {shown(version)}")
    named: set[str] = set()
    try:
        content = _unpacked(header.get("content"), tensors, named)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: its tensors do not fit its header: {error}") from error
    if extra := sorted(tensors.keys() - named):
        raise CheckpointError(f"{path}: its header does not name the tensors {shown(extra)}")
    return content


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON; its tensors go to ``tensors``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().clone().contiguous()  # the file takes no shared memory
        return {"tensor": name}
    if isinstance(value, PerRow):
        return _packed(value.values, tensors)
    if isinstance(value, dict):
        return {"dict": {str(key): _packed(entry, tensors) for key, entry in value.items()}}
    kind = _name_of(type(value))
    if kind in _kinds():
        parts = [_packed(getattr(value, name), tensors) for name in _kinds()[kind][1]]
        return {"kind": kind, "of": parts}
    if isinstance(value, list | tuple):
        return [_packed(entry, tensors) for entry in value]
    raise UnsupportedError(
        f"a {kind} cannot be saved: masks and biases of polyhead and of installed extensions can"
    )


def _unpacked(value: Any, tensors: dict[str, Tensor], named: set[str]) -> Any:
    """What ``_packed`` was given; the names of its tensors go to ``named``."""
    if isinstance(value, list):
        return [_unpacked(entry, tensors, named) for entry in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        name = value["tensor"]
        if not isinstance(name, str) or name not in tensors:
            raise ValueError(f"there is no tensor {shown(name)}")
        named.add(name)
        return tensors[name]
    if isinstance(entries := value.get("dict"), dict):
        return {key: _unpacked(entry, tensors, named) for key, entry in entries.items()}
    kind, given = value.get("kind"), value.get("of")
    if not isinstance(kind, str) or kind not in _kinds():
        raise ValueError(f"there is no part of kind {shown(kind)}")
    make, types = _kinds()[kind]
    if not isinstance(given, list) or len(given) != len(types):
        raise ValueError(f"{kind} must have {len(types)} arguments: got {shown(given)}")
    arguments = [_unpacked(entry, tensors, named) for entry in given]
    for argument, (name, wanted) in zip(arguments, types.items(), strict=True):
        # In Python bool is a subclass of int.
        if not isinstance(argument, wanted) or (isinstance(argument, bool) and wanted is not bool):
            raise TypeError(f"{name} of {kind} cannot be {_short(argument)}")
    return make(**dict(zip(types, arguments, strict=True)))


def _short(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, Tensor) else shown(value)
