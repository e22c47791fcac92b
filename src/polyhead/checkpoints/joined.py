"""A file that packages carry in parts, joined once in the user's cache directory."""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from polyhead._utils.atomic_write import replacing
from polyhead._utils.cache_directory import cache_directory
from polyhead.errors import CheckpointError


def join(parts: Sequence[Path]) -> Path:
    """The whole file; made if it is not there yet, under a hidden name until it is whole.

    A warning says where it lies and how large it is when it is made.

    Args:
        parts: in order, named "name.suffix.part00" and so on. Another size or time of change of
            any makes another file.

    Raises:
        CheckpointError: the cache directory cannot be written to, or is full.
    """
    states = [(path, path.stat()) for path in parts]
    identity = "\0".join(f"{path}\0{s.st_size}\0{s.st_mtime_ns}" for path, s in states)
    digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    name = Path(parts[0].stem)  # without ".part00"
    target = cache_directory() / "joined" / f"{name.stem}-{digest}{name.suffix}"
    if target.is_file():
        with suppress(OSError):
            os.utime(target)  # its last use, which `polyhead cache` shows
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as partial, partial.open("xb") as whole:
            for path in parts:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
    except OSError as error:
        raise CheckpointError(
            f"the parts of {parts[0].name} cannot be joined in {target.parent}: "
            f"{error.strerror or error}; POLYHEAD_CACHE names another directory"
        ) from error
    size = sum(state.st_size for _, state in states) / 1e6
    warnings.warn(
        f"the {len(parts)} parts of {name} are joined in {target}, {size:,.1f} MB of disk: "
        "polyhead cache lists and clears it",
        stacklevel=2,
    )
    return target
