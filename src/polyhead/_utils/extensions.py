"""Installed packages that add kinds of their own: layouts, networks, masks, biases, families.

A package names a module of its own in the entry point group ``polyhead``::

    [project.entry-points.polyhead]
    my_heads = "my_package.heads"

The module is imported when polyhead meets a kind that it does not know. It defines configurations
(``class MyHeads(HeadLayout, kind="my_heads")``), calls ``register_builder`` for their modules,
defines masks and biases with ``arguments``, and lists families in ``FAMILIES``.
"""

from __future__ import annotations

import importlib.metadata
import threading
import warnings
from types import ModuleType

GROUP = "polyhead"

_lock = threading.RLock()
_loaded: list[ModuleType] = []
_points: list[importlib.metadata.EntryPoint] | None = None


def extensions() -> tuple[ModuleType, ...]:
    """The modules that installed packages name, each imported once.

    One that cannot be imported is left out with a warning. A module that asks while it is imported
    itself gets those that were imported before it.
    """
    global _points
    with _lock:
        if _points is None:
            _points = sorted(importlib.metadata.entry_points(group=GROUP))
            for point in _points:
                try:
                    module = importlib.import_module(point.module)
                except Exception as error:
                    warnings.warn(
                        f"polyhead does without the extension {point.name} ({point.value}): "
                        f"{type(error).__name__}: {error}",
                        stacklevel=2,
                    )
                else:
                    _loaded.append(module)
        return tuple(_loaded)


def is_of_extension(cls: type) -> bool:
    """Whether a class is defined in the package of an extension."""
    packages = {module.__name__.partition(".")[0] for module in extensions()}
    return cls.__module__.partition(".")[0] in packages
