"""Attributes of modules that describe how they were built, and cannot be assigned afterwards.

Weights and masks are made from a configuration once, and every path reads the attributes that it
needs: a configuration assigned later would be true of some paths and not of others.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn


class Fixed(nn.Module):
    """A module with attributes that are set once; reading them costs what it does of any module.

    What replaces them all the same, such as processes that share a layer's heads, writes to
    ``vars(module)`` and answers for the rest of the module.
    """

    _fixed: ClassVar[frozenset[str]] = frozenset({"config"})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fixed and name in self.__dict__:
            kind = type(self).__name__
            raise AttributeError(
                f"{kind}.{name} cannot be assigned, since weights and computation were made for "
                f"{self.__dict__[name]!r:.200}: build another {kind}"
            )
        super().__setattr__(name, value)
