"""What a probe has seen, in and out of one safetensors file (never a pickle).

The tensors are the file's tensors; everything else (which mask, which scale, whose heads) is JSON
in its header, in which a tensor stands as ``{"tensor": name}`` and a mask, a bias or another part
of the meaning as ``{"kind": class, "of": [arguments]}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from polyhead.caches.source import Held
from polyhead.errors import CheckpointError, UnsupportedError
from polyhead.inspection.kept import KeptCall, TokenIds
from polyhead.semantics import (
    ALiBi,
    Causal,
    Chunk,
    Documents,
    Drop,
    Keep,
    KeyLengths,
    Prefix,
    RelativeBias,
    RoundedALiBi,
    Specification,
    TensorBias,
    Tokens,
    Window,
)
from polyhead.semantics.masks import And, Not, Or
from polyhead.semantics.masks.counts import PerRow
from polyhead.writing import write_tensors

KEY = "polyhead.probe"
_VERSION = 1

_KINDS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "ALiBi": (ALiBi, ("slopes",)),
    "And": (And, ("left", "right")),
    "Causal": (Causal, ()),
    "Chunk": (Chunk, ("size",)),
    "Documents": (Documents, ("lengths",)),
    "Drop": (Drop, ("allowed",)),
    "Keep": (Keep, ("allowed",)),
    "Held": (Held, ()),
    "KeptCall": (
        KeptCall,
        ("q", "k", "lse", "spec", "q_tokens", "k_tokens", "kv_heads", "ids", "documents"),
    ),
    "KeyLengths": (KeyLengths, ("length",)),
    "Not": (Not, ("inner",)),
    "Or": (Or, ("left", "right")),
    "Prefix": (Prefix, ("length",)),
    "RelativeBias": (
        lambda table, both, most: RelativeBias(table, bidirectional=both, max_distance=most),
        ("table", "bidirectional", "max_distance"),
    ),
    "RoundedALiBi": (RoundedALiBi, ("slopes", "scale")),
    "Specification": (Specification, ("scale", "mask", "bias", "softcap", "sinks")),
    "TensorBias": (TensorBias, ("tensor",)),
    "TokenIds": (TokenIds, ("queries", "keys", "preceding")),
    "Tokens": (
        lambda length, shift, positions: Tokens.of(length, shift=shift, positions=positions),
        ("length", "shift", "positions"),  # all queries or all keys of a call start at index 0
    ),
    "Window": (Window, ("size", "ahead")),
}
"""How each part is made again: its maker and the attributes that are the maker's arguments."""


def write(path: str | os.PathLike[str], content: Any) -> None:
    """Writes lists, dicts, numbers, tensors and parts of an attention's meaning, whole or not.

    Raises:
        UnsupportedError: A mask or bias of a class that is not polyhead's.
        OSError: The file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    header = json.dumps({"version": _VERSION, "content": _packed(content, tensors)})
    write_tensors(path, tensors, {KEY: header})


def read(path: str | os.PathLike[str]) -> Any:
    """What ``write`` was given.

    Raises:
        CheckpointError: Not a file of a probe, truncated or of another version.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except KeyError as error:
        raise CheckpointError(f"{path} is not the file of a probe: it has no {KEY}") from error
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
    if header.get("version") != _VERSION:
        raise CheckpointError(f"{path}: version must be {_VERSION}: got {header.get('version')}")
    try:
        return _unpacked(header["content"], tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its tensors do not fit its header: {error}") from error


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
    kind = type(value).__name__
    if kind in _KINDS:
        parts = [_packed(getattr(value, name), tensors) for name in _KINDS[kind][1]]
        return {"kind": kind, "of": parts}
    if isinstance(value, list | tuple):
        return [_packed(entry, tensors) for entry in value]
    raise UnsupportedError(f"a {kind} cannot be saved: only polyhead's own masks and biases can")


def _unpacked(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "dict" in value:
        return {key: _unpacked(entry, tensors) for key, entry in value["dict"].items()}
    make, _ = _KINDS[value["kind"]]
    return make(*(_unpacked(entry, tensors) for entry in value["of"]))
