"""Files mapped into memory to be read."""

from __future__ import annotations

import mmap
from pathlib import Path

from polyhead._utils.paths import size_of
from polyhead.errors import CheckpointError


def mapped(path: Path, what: str, least: int, *, private: bool = False) -> mmap.mmap:
    """A file's bytes, read from the disk as they are touched.

    Args:
        path: file to map into memory.
        what: the format's name for messages, ``"a GGUF file"``.
        least: bytes that every file of the format has.
        private: may be written to: what is written is seen here alone, the file stays.

    Raises:
        CheckpointError: the file cannot be read, or has fewer bytes.
    """
    if size_of(path) < least:
        raise CheckpointError(f"{path} is empty or too short to be {what}")
    access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=access)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
