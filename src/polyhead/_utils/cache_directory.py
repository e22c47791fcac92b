"""Where polyhead keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """``POLYHEAD_CACHE``, or the platform's place for caches (``XDG_CACHE_HOME`` is honoured)."""
    named = os.environ.get("POLYHEAD_CACHE")
    if named:
        return Path(named).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("polyhead", appauthor=False))
