"""A projection with a low-rank change beside it.

    y = W x + b + s · B A x,     A [R, in], B [out, R]

Hu et al. 2022. It is deliberately no ``nn.Linear``: fast paths and tools that read weights accept
exactly that class, so none can miss the change.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyhead.errors import UnsupportedError


class LoraLinear(nn.Module):
    """``base`` and the change beside it.

    Args:
        base: The frozen projection.
        down: LoRA's A, which reduces the features to the rank.
        up: LoRA's B, which expands the rank to the features.
        scale: Factor s of the low-rank product.
        dropout: Dropout probability of the inputs of A, when training.

    Attributes:
        active: Whether the change is added.
    """

    def __init__(
        self,
        base: nn.Linear,
        down: nn.Parameter,
        up: nn.Parameter,
        scale: float,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.base, self.down, self.up = base, down, up
        self.scale, self.dropout, self.active = scale, dropout, True

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``; the change is computed in the dtype of A and B."""
        y: Tensor = self.base(x)
        if not self.active:
            return y
        z = nn.functional.dropout(x.to(self.down.dtype), self.dropout, self.training)
        return y + (z @ self.down.T @ self.up.T * self.scale).to(y.dtype)

    @property
    def out_features(self) -> int:
        """Features of the output."""
        return self.base.out_features

    @property
    def weight(self) -> Tensor:
        """Raises: the base's weight lacks the change.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "this projection has an adapter beside its weight: call merge() of the adapter first"
        )

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """``base`` with the change added to its weight."""
        weight = self.base.weight
        change = self.up.float() @ self.down.float()
        weight.copy_((weight.float() + self.scale * change).to(weight.dtype))
        return self.base

    def extra_repr(self) -> str:
        return f"rank={len(self.down)}, scale={self.scale:g}, active={self.active}"
