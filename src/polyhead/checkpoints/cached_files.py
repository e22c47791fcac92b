"""The user's cache directory: what polyhead keeps there, listed and removed.

    joined/STEM-DIGEST.gguf             a file that packages carry in parts (``joined``)
    joined/.partial-...                 one that is being written, or was when a process was killed
    converted/STEM-DIGEST-DIGEST/       copies that earlier versions kept

Only what has such a name and such contents counts as polyhead's; links are never followed. Removing
a file that another process has mapped into memory leaves that process its numbers.
"""

from __future__ import annotations

import os
import re
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polyhead._utils.cache_directory import cache_directory

Kind = Literal["joined", "converted", "unfinished"]

_NAMES: dict[Kind, re.Pattern[str]] = {
    "joined": re.compile(r"(.+)-[0-9a-f]{12}(?:\.\w+)?"),
    "converted": re.compile(r"(.+)-[0-9a-f]{12}-[0-9a-f]{12}"),
}
_DRAFT = re.compile(r"\.partial-\w{6,16}")
_OF_A_COPY = re.compile(
    r"polyhead\.json|(model|\.partial-\w+)(\.safetensors)?|(tokenizer|generation)\w*\.json"
)
_ABANDONED_SECONDS = 24 * 3600


@dataclass(frozen=True)
class CachedFile:
    """A file, or a folder of files, that polyhead keeps.

    Attributes:
        name: Of the file that it was made of, without its ending.
        kind: ``"joined"`` from parts; ``"converted"``, which this version does not read;
            ``"unfinished"``, left by a process that was killed more than a day ago.
        path: Where it is.
        num_bytes: Its size.
        used: When it was last used, in seconds since 1970.
    """

    name: str
    kind: Kind
    path: Path
    num_bytes: int
    used: float

    def remove(self) -> bool:
        """Removes it; whether it is gone.

        False where it may not be removed, or a file that polyhead did not write has come into it.
        """
        if self.path.is_dir() and not self.path.is_symlink():
            with suppress(OSError):
                for file in _copied(self.path) or ():
                    file.unlink(missing_ok=True)
                self.path.rmdir()
        else:
            with suppress(OSError):
                self.path.unlink()
        return not os.path.lexists(self.path)


def cached_files() -> list[CachedFile]:
    """What polyhead keeps in the cache directory, the largest first; reads no file."""
    found: list[CachedFile] = []
    for kind in _NAMES:
        folder = cache_directory() / kind
        with suppress(OSError):
            for path in () if folder.is_symlink() else folder.iterdir():
                with suppress(OSError):  # removed by another process meanwhile
                    found += filter(None, [_entry(path, kind)])
    return sorted(found, key=lambda each: (-each.num_bytes, each.path))


def _entry(path: Path, kind: Kind) -> CachedFile | None:
    """What polyhead wrote at a path; None where it wrote nothing, or may be writing still."""
    named = _NAMES[kind].fullmatch(path.name)
    files = _copied(path) if kind == "converted" else [path]
    if files is None or not (named or _DRAFT.fullmatch(path.name)):
        return None
    states = [file.lstat() for file in files]
    if not all(stat.S_ISREG(state.st_mode) for state in states):
        return None
    size = sum(state.st_size for state in states)
    times = [(state.st_mtime, state.st_atime) for state in states] or [(path.lstat().st_mtime,) * 2]
    if not named:
        if time.time() - max(changed for changed, _ in times) < _ABANDONED_SECONDS:
            return None
        kind = "unfinished"
    return CachedFile(named[1] if named else path.name, kind, path, size, max(map(max, times)))


def _copied(folder: Path) -> list[Path] | None:
    """The files of a converted copy; None where something else is there."""
    if folder.is_symlink() or not folder.is_dir():
        return None
    files = [*folder.iterdir()]
    return files if all(_OF_A_COPY.fullmatch(file.name) for file in files) else None
