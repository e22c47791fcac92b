"""What layers of one call of a model hand on to later ones.

The call carries it, not the modules: calls in other threads, copies of a layer and recomputation
for gradients see their own. A configuration says what a layer ``hands_on`` and what it ``reads``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyhead.config.layout import EMBEDDING


@dataclass(frozen=True)
class Handed:
    """What one layer may read and hand on.

    Attributes:
        layer: Its number.
        values: What all layers of the call have handed on so far, by layer and name; what the
            embedding hands on stands under ``EMBEDDING``.
    """

    layer: int
    values: dict[tuple[int, str], Any] = field(default_factory=dict)

    def at(self, layer: int) -> Handed:
        """The same call, for another layer."""
        return Handed(layer, self.values)

    def hand_on(self, what: str, value: Any) -> None:
        """Lets later layers read it."""
        self.values[self.layer, what] = value


SHORTCUT = "shortcut"
"""What a layer's second network gave, for the layer behind it."""


def handed_to(handed: Handed | None, what: str, reads: Mapping[str, int]) -> Any:
    """What a layer reads.

    Args:
        handed: As the layer was given it.
        what: A name among ``reads``.
        reads: As of the layer's configuration.

    Raises:
        ValueError: The layer was called by itself.
    """
    source = reads[what]
    if handed is None or (source, what) not in handed.values:
        name = "the embedding" if source == EMBEDDING else f"layer {source}"
        raise ValueError(
            f"this layer reads the {what} of {name}: call it within its model, behind that"
        )
    return handed.values[source, what]


def given_by_layer_before(handed: Handed | None, what: str) -> Tensor:
    """What the layer before handed on to this one alone; without gradients, which may compute a
    layer once more, it is then forgotten.

    Args:
        handed: As the layer was given it.
        what: A name.

    Raises:
        ValueError: The layer was called by itself.
    """
    source = -2 if handed is None else handed.layer - 1
    given: Tensor = handed_to(handed, what, {what: source})
    if handed is not None and not torch.is_grad_enabled():
        del handed.values[source, what]
    return given
