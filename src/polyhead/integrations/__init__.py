"""polyhead inside other libraries: three drop-ins, each imported when first used.

    integrations.torch          torch.nn.MultiheadAttention, and ``replace(model)``
    integrations.transformers   ``attn_implementation="polyhead"`` in Hugging Face models
    integrations.flash_attn     the functions of the flash_attn package

Nothing else in polyhead imports this package.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["flash_attn", "torch", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
