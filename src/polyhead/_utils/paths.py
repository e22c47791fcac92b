"""Checks a path before it is opened: reading a pipe or a device may never end."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Literal

from polyhead.errors import CheckpointError, PolyheadError


def kind_of(path: Path) -> Literal["file", "folder", "other"] | None:
    """The kind of thing that a path leads to, links followed; None if there is nothing.

    Raises:
        CheckpointError: It is forbidden to look.
    """
    try:
        mode = path.stat().st_mode
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (OSError, ValueError):  # a loop of links, or an invalid file name
        return None
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "other"


def size_of(path: Path, *, error: type[PolyheadError] = CheckpointError) -> int:
    """Bytes of a file that can be read to its end.

    Raises:
        PolyheadError: Of the class ``error``: it is not there, or a directory, pipe or device.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as cause:
        reason = getattr(cause, "strerror", None) or cause
        raise error(f"{path} cannot be read: {reason}") from cause
    if stat.S_ISDIR(found.st_mode):
        raise error(f"{path} cannot be read: it is a directory")
    if not stat.S_ISREG(found.st_mode):
        raise error(f"{path} cannot be read: it is a pipe or a device, not a regular file")
    return found.st_size
