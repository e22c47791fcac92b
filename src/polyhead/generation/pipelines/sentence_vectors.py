"""Hidden states of a text's tokens to its vector: pooling, then what sentence-transformers adds.

    mean           Σ hᵢ / n            mean_sqrt_len  Σ hᵢ / √n
    weighted_mean  Σ (i + 1) hᵢ / Σ (i + 1)
    max            the largest of each feature
    first, last    h₀, hₙ₋₁

Several poolings stand side by side in one vector. Source: Reimers and Gurevych 2019.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from polyhead.checkpoints.formats import sentence_modules as files


def pool(hidden: Tensor, lengths: Tensor, pooling: str, skipped: int = 0) -> Tensor:
    """One vector a text.

    Args:
        hidden: ``[B, T, E]`` float32, padded on the right.
        lengths: tokens of each text ``[B]``.
        pooling: one or more of ``POOLINGS``, joined by "+".
        skipped: so many tokens at the beginning are left out; they keep their places.

    Returns:
        ``[B, P · E]`` float32, for P poolings.
    """
    places = torch.arange(hidden.shape[1], device=hidden.device)
    real = ((places < lengths[:, None]) & (places >= skipped))[..., None]
    rows = torch.arange(len(hidden), device=hidden.device)
    count = real.sum(dim=1)
    found = []
    for mode in pooling.split(files.SEPARATOR):
        if mode in ("first", "last"):
            place = lengths - 1 if mode == "last" else torch.full_like(lengths, skipped)
            found.append(hidden[rows, place])
        elif mode == "max":
            found.append(hidden.masked_fill(~real, -torch.inf).amax(dim=1))
        elif mode == "weighted_mean":
            weights = real * (places + 1)[:, None]
            found.append((hidden * weights).sum(dim=1) / weights.sum(dim=1))
        else:
            total = hidden.masked_fill(~real, 0.0).sum(dim=1)
            found.append(total / (count if mode == "mean" else count.sqrt()))
    return torch.cat(found, dim=-1)


class Dense(nn.Module):
    """``activation(x Wᵀ + b)``, plus x or its projection; see ``sentence_modules.Dense``."""

    def __init__(self, said: files.Dense) -> None:
        super().__init__()
        # Parameters of their own: the file's are mapped into memory.
        self.weight = nn.Parameter(said.weight.float().clone())
        self.bias = None if said.bias is None else nn.Parameter(said.bias.float().clone())
        projection = said.projection
        self.projection = None if projection is None else nn.Parameter(projection.float().clone())
        self.residual = said.residual
        self.activation = said.activation

    def forward(self, x: Tensor) -> Tensor:
        given = x.to(self.weight.dtype)
        made = activated(nn.functional.linear(given, self.weight, self.bias), self.activation)
        if self.residual:
            shorter = self.projection
            made = made + (given if shorter is None else nn.functional.linear(given, shorter))
        return made.to(x.dtype)

    def said(self) -> files.Dense:
        """Its data, as it is saved."""
        return files.Dense(self.weight, self.bias, self.activation, self.residual, self.projection)


class PostPooling(nn.Module):
    """Dense layers and normalizations that sentence-transformers applies after pooling.

    Args:
        said: from the model's files.
    """

    def __init__(self, said: Iterable[files.Dense | files.Normalize]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(
            Dense(each) if isinstance(each, files.Dense) else Normalize() for each in said
        )

    def forward(self, x: Tensor, normalize: bool | None = None) -> Tensor:
        """Vectors ``[..., E]``.

        Args:
            x: what pooling made, ``[..., E]`` float32.
            normalize: whether the results have length 1, whatever the files say of the last step.
        """
        steps = [*self.steps]
        if normalize is False and steps and isinstance(steps[-1], Normalize):
            steps.pop()
        for step in steps:
            x = step(x)
        return nn.functional.normalize(x, dim=-1) if normalize else x

    def said(self) -> tuple[files.Dense | files.Normalize, ...]:
        """Their data, as they are saved."""
        return tuple(
            each.said() if isinstance(each, Dense) else files.Normalize() for each in self.steps
        )


class Normalize(nn.Module):
    """Vectors of length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1)


_ACTIVATIONS = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": nn.functional.gelu,
    "SiLU": nn.functional.silu,
    "Sigmoid": torch.sigmoid,
}


def activated(x: Tensor, name: str) -> Tensor:
    """An activation of ``sentence_modules.ACTIVATIONS``."""
    made: Tensor = _ACTIVATIONS[name](x)
    return made


def similarity(a: Tensor, b: Tensor, name: str) -> Tensor:
    """How alike vectors are; of distances the negative, so that more is nearer.

    Args:
        a: ``[N, E]``.
        b: ``[M, E]``.
        name: ``"cosine"``, ``"dot"``, ``"euclidean"`` or ``"manhattan"``.

    Returns:
        ``[N, M]``.
    """
    if name in ("euclidean", "manhattan"):
        return -torch.cdist(a, b, p=2.0 if name == "euclidean" else 1.0)
    if name == "cosine":
        a, b = nn.functional.normalize(a, dim=-1), nn.functional.normalize(b, dim=-1)
    return a @ b.mT


def largest_sums(queries: list[Tensor], documents: list[Tensor]) -> Tensor:
    """Late interaction: Σ over a query's tokens of the largest dot product with a document's.

    Args:
        queries: ``[tokens, E]`` each.
        documents: ``[tokens, E]`` each.

    Returns:
        ``[queries, documents]``.
    """
    made = [[(q @ d.mT).amax(dim=-1).sum() for d in documents] for q in queries]
    return torch.stack([torch.stack(row) for row in made])
