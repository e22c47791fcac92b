"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[Path]:
    """A hidden file beside ``path`` that takes its place when the block ends well.

    A reader never sees half a file, and a failure leaves what was there before.

    Raises:
        OSError: The folder is missing, may not be written or is full; or the path is that of a
            pipe or a device, which no file may replace.
        ValueError: No file can have that name.
    """
    target = Path(path)
    _check_replaceable(target)
    draft = target.parent / f".partial-{secrets.token_hex(8)}"
    try:
        yield draft
        replace(draft, target)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError) and str(error.filename) == str(draft):
            raise OSError(error.errno, error.strerror, os.fspath(target)) from error
        raise


def replace(source: Path, target: Path) -> None:
    """``os.replace``, which Windows refuses while anything has the target open or mapped.

    Raises:
        OSError: As ``os.replace``; of such a target a PermissionError that says so.
    """
    try:
        os.replace(source, target)
    except PermissionError as error:
        if getattr(error, "winerror", None) is None or not target.is_file():
            raise
        reason = (
            f"{error.strerror}: Windows replaces no file that is read-only, open or mapped, as "
            "the weights of a loaded model are; choose another place"
        )
        raise PermissionError(error.errno, reason, os.fspath(target)) from error


def _check_replaceable(target: Path) -> None:
    try:
        mode = target.stat().st_mode
    except ValueError as error:
        raise ValueError(f"no file can be called {os.fspath(target)!r}: {error}") from error
    except OSError:  # does not exist yet; other problems are reported when it is written
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        reason = "cannot replace a pipe or a device by a file"
        raise FileExistsError(errno.EEXIST, reason, os.fspath(target))


def write_file(path: str | PathLike[str], text: str) -> None:
    """Writes a text file in UTF-8 with line feeds, whole or not at all; raises as ``replacing``."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8", newline="\n")


def write_tensors(
    path: str | PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file, whole or not at all.

    Raises:
        OSError: It cannot be written; a full disk too.
    """
    with replacing(path) as draft:
        try:
            save_file(dict(tensors), draft, metadata=dict(metadata))
        except SafetensorError as error:  # the library's error for a full disk
            raise OSError(str(error)) from error
