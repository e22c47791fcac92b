"""Whether the attributes of a layer are those of a new one of its configuration.

Native code reads the configuration (``native_layer.py``): a layer whose attributes say anything
else runs as modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.config import Data, LayerConfig
from polyhead.layers.native_export import NotExportableError
from polyhead.layers.positions import RoPE


def check_as_built(layer: Any, embed_dim: int, part: str) -> None:
    """Raises unless attributes of the layer and of a part are what their configurations say."""
    context_dim = None if layer.cross_attention is None else layer.cross_attention.kdim
    built = _built(type(layer).from_config, embed_dim, layer.config, context_dim)
    for path, (kind, attributes) in built.items():
        if path and path.partition(".")[0] not in (part, f"{part}_norm", f"{part}_out_norm"):
            continue
        module: nn.Module | None = layer
        for name in path.split(".") if path else ():
            module = None if module is None else module._modules.get(name)
        if type(module) is not kind:
            continue  # what replaces a module is read by what it is (``native_export.py``)
        for name, wanted in attributes.items():
            got = getattr(module, name, None)
            if name not in _ASKED_IN_EVERY_STEP and not _same_attribute(got, wanted):
                raise NotExportableError(
                    f"{name} is {got!s:.80} where its configuration says {wanted!s:.80}",
                    module,
                )


@lru_cache(maxsize=64)
def _built(
    kind: Callable[..., nn.Module], embed_dim: int, config: LayerConfig, context_dim: int | None
) -> dict[str, tuple[type[nn.Module], dict[str, Any]]]:
    """What the modules of a new layer are, by path: their classes and own attributes."""
    with torch.device("meta"):
        layer = kind(embed_dim, config, context_dim=context_dim)
    tables = {name for name, value in vars(nn.Module()).items() if name != "training"}
    return {
        path: (
            type(module),
            {
                name: value
                for name, value in vars(module).items()
                if name not in tables and name != "training"
            },
        )
        for path, module in layer.named_modules()
        if type(module).__module__.startswith("polyhead.")
    }


_ASKED_IN_EVERY_STEP = frozenset({"_hooks", "_edits"})
"""Dicts that need not be empty: ``has_active_hooks`` asks them for each step."""


def _same_attribute(a: object, b: object) -> bool:
    """Whether two attributes of modules mean the same, and guards notice a change of them.

    Guards compare the entries of a dict by identity, so these must be immutable.
    """
    if isinstance(a, dict) and type(a) is type(b):
        return a.keys() == b.keys() and all(_same_value(a[key], b[key]) for key in a)
    return _same_value(a, b)


def _same_value(a: object, b: object) -> bool:
    """Whether two values mean the same; False for containers that can change in place.

    Numbers in tensors are read where they lie.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, RoPE):
        return isinstance(b, RoPE) and a.config == b.config
    if isinstance(a, Tensor):
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same_value, a, b))
    if isinstance(a, Data | int | float | str | torch.dtype | None):
        return bool(a == b)
    if not type(a).__module__.startswith("polyhead.") or not hasattr(a, "__dict__"):
        return False
    mine, theirs = vars(a), vars(b)
    return mine.keys() == theirs.keys() and all(
        _same_value(mine[name], theirs[name]) for name in mine
    )
