"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
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
        OSError: The folder is missing, may not be written or is full.
    """
    target = Path(path)
    draft = target.parent / f".partial-{secrets.token_hex(8)}"
    try:
        yield draft
        os.replace(draft, target)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


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
        except SafetensorError as error:  # how the library reports a full disk
            raise OSError(str(error)) from error
