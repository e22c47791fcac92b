"""polyhead: every kind of multi-head attention as one system.

    import polyhead as ph

    out = ph.attention(q, k, v, mask=ph.Causal() & ph.Window(4096), softcap=50.0)
    print(ph.explain(q, k, v, mask=ph.Causal()))

Names are imported when first used: ``import polyhead`` alone does not import torch.
"""

from __future__ import annotations

import importlib
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_DEPRECATED = {
    "draw": ("polyhead.semantics", "draw_mask", "ph.draw_mask"),
    "reproducible": (
        "polyhead.kernels.batch_invariant", "batch_invariant", "ph.batch_invariant"
    ),
    "word_times": (
        "polyhead.interpret.word_times", "word_times", "transcribe(..., word_timestamps=True)"
    ),
}  # fmt: skip
"""Names of version 0.1, which work with a warning until the next one."""


_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULES = {name: module for module, name in re.findall(r"from (\S+) import (\w+) as \2", _STUB)}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _DEPRECATED:
        module, current, use = _DEPRECATED[name]
        warnings.warn(f"ph.{name} is deprecated: use {use}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), current)
    if name == "__version__":
        value: Any = _version()
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    elif not name.startswith("_") and find_spec(f"polyhead.{name}") is not None:
        return importlib.import_module(f"polyhead.{name}")
    else:
        raise AttributeError(f"module 'polyhead' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "__version__"})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("polyhead")
    except PackageNotFoundError:  # imported from a source tree that is not installed
        return "0+unknown"
