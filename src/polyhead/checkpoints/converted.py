"""A converted copy of a slow file, kept in the user's cache directory.

Dequantizing a GGUF file takes seconds; mapping float tensors that are already there does not. A
copy is a directory of its own, written under another name and renamed when it is whole, so that it
is either absent or complete, even if two processes write it at once. Its name holds the identity of
the source (path, size, time of change), so a changed source has no copy; the checksum of every
tensor is checked on each load, which costs a tenth of a second and touches pages that the first
forward pass needs anyway.

Any failure here is harmless: the caller continues without a copy.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhead._utils.atomic_write import write_tensors
from polyhead.checkpoints.formats.parts import Parts
from polyhead.checkpoints.formats.safetensors_files import WEIGHTS, read_tensor_file
from polyhead.checkpoints.generation_config import GenerationConfig
from polyhead.checkpoints.json_file import read_json, write_json
from polyhead.checkpoints.tokenizers.tokenizer import Tokenizer
from polyhead.config import TransformerConfig
from polyhead.errors import CheckpointError, ConfigError

# Increased whenever the result of a conversion or its file format changes.
FORMAT = 4

_MANIFEST = "polyhead.json"
_PARTIAL = ".partial-"
_ABANDONED_SECONDS = 24 * 3600


def cache_directory() -> Path:
    """``POLYHEAD_CACHE``, or the platform's place for caches (``XDG_CACHE_HOME`` is honoured)."""
    named = os.environ.get("POLYHEAD_CACHE")
    if named:
        return Path(named).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("polyhead", appauthor=False))


def read_copy(source: Path) -> Parts | None:
    """The copy of a source file, or None if there is no usable one.

    A corrupt copy is removed, with a warning.
    """
    entry = _entry(source)
    if not entry.is_dir():
        return None
    try:
        return _read(entry)
    except (CheckpointError, ConfigError, KeyError, TypeError, ValueError, OSError) as error:
        warnings.warn(
            f"the converted copy {entry} is corrupt and is made again: {error}", stacklevel=2
        )
        shutil.rmtree(entry, ignore_errors=True)
        return None


def write_copy(source: Path, parts: Parts) -> None:
    """Keeps a copy. A cache directory that cannot be written to, or is full, is a warning."""
    entry = _entry(source)
    partial: Path | None = None
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=entry.parent))
        _write(partial, parts)
        _publish(partial, entry)
        _tidy(entry)
    except Exception as error:  # safetensors and tokenizers raise types of their own on I/O errors
        warnings.warn(
            f"no converted copy is kept in {entry.parent}, so loading stays slow: {error}",
            stacklevel=2,
        )
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _entry(source: Path) -> Path:
    """Where the copy of a source belongs: ``<stem>-<its path>-<its identity>``."""
    path = source.resolve()
    status = path.stat()
    identity = f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{FORMAT}"
    return cache_directory() / "converted" / f"{_family(path)}-{_hash(identity)}"


def _family(path: Path) -> str:
    """The prefix of all copies of one path."""
    return f"{path.stem[:60]}-{_hash(str(path))}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _write(folder: Path, parts: Parts) -> None:
    state = {name: tensor.contiguous() for name, tensor in parts.state.items()}
    write_tensors(folder / WEIGHTS, state, {"format": "pt"})
    if parts.tokenizer is not None:
        parts.tokenizer.save(folder)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "config": parts.config.to_dict(),
        "tokenizer": parts.tokenizer is not None,
        "ignored": list(parts.ignored),
        "family": parts.family,
        "pooling": parts.pooling,
        "decoder_start_token_id": parts.generation.start,
        "checksums": {name: _checksum(tensor) for name, tensor in state.items()},
    }
    write_json(folder / _MANIFEST, manifest)


def _read(entry: Path) -> Parts:
    manifest = read_json(entry / _MANIFEST)
    state = read_tensor_file(entry / WEIGHTS)
    checksums = {name: _checksum(tensor) for name, tensor in state.items()}
    if checksums != manifest["checksums"]:
        raise CheckpointError(f"{entry / WEIGHTS} is not what was written")
    return Parts(
        TransformerConfig.from_dict(manifest["config"]),
        state,
        Tokenizer.from_directory(entry) if manifest["tokenizer"] else None,
        ignored=tuple(manifest["ignored"]),
        family=manifest["family"],
        pooling=manifest["pooling"],
        generation=GenerationConfig(start=manifest["decoder_start_token_id"]),
    )


def _checksum(tensor: Tensor) -> int:
    """The sum of a tensor's 64-bit words: as fast as memory, and any flipped bit shows."""
    octets = tensor.reshape(-1).view(torch.uint8).numpy()
    whole = len(octets) // 8 * 8
    return int(octets[:whole].view(np.int64).sum()) + int(octets[whole:].sum())


def _publish(partial: Path, entry: Path) -> None:
    try:
        os.replace(partial, entry)
    except OSError:
        if not entry.is_dir():  # otherwise another process has written the same content
            raise


def _tidy(entry: Path) -> None:
    """Removes copies of earlier versions of the same source, and files left by killed processes."""
    family = entry.name.rpartition("-")[0]
    for other in entry.parent.iterdir():
        outdated = other.name.rpartition("-")[0] == family and other != entry
        if outdated or (other.name.startswith(_PARTIAL) and _abandoned(other)):
            shutil.rmtree(other, ignore_errors=True)


def _abandoned(partial: Path) -> bool:
    try:
        return time.time() - partial.stat().st_mtime > _ABANDONED_SECONDS
    except FileNotFoundError:  # published or given up by its writer meanwhile
        return False
