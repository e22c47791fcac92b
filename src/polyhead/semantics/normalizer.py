"""The interface of normalizers: how scores become weights where it is not by a softmax.

    out_i = Σ_j weights_ij v_j        weights_i = normalizer(scores_i)

A softmax needs one number of a row, its log-sum-exp, so that states of parts of the keys merge.
A normalizer needs no such number: it is given whole rows of scores, all keys of some queries, and
outputs of parts of the keys would add. Kernels that cut keys refuse it by name.

Shape letters: B batch, H query heads, T queries, S keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from polyhead.semantics.component import Component
from polyhead.semantics.tokens import Tokens


class Normalizer(Component, ABC):
    """Weights of whole rows of scores, in place of the softmax.

    Your own defines ``weights``, differentiable in scores and ``tensors``.

    Attributes:
        mixes_heads: Whether a weight depends on scores of other heads. Such weights may be
            negative.
        queries_before: Queries that a row of weights depends on beside its own, those before it.
    """

    mixes_heads: bool = False
    queries_before: int = 0

    @abstractmethod
    def weights(self, scores: Tensor, q: Tokens, k: Tokens) -> Tensor:
        """The weights of some queries on all keys.

        Args:
            scores: ``[B, H, T, S]`` after softcap, bias and mask; −∞ for a key that is not seen,
                which has no effect. A row that sees nothing is all 0.
            q: The queries.
            k: The keys.

        Returns:
            ``[B, H, T, S]`` in the dtype of ``scores``; those of keys not seen are not read.
        """

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is learned."""
        return ()

    def of_heads(self, heads: Sequence[int]) -> Self:
        """The normalizer of some heads alone."""
        return self

    def check(self, batch: int, heads: int, queries: int) -> None:
        """Raises ValueError unless it fits a call."""


def check_numbers(name: str, x: object, shape: str) -> None:
    """Raises unless ``x`` is a floating-point tensor with the dimensions of ``shape``, "[H, H]"."""
    said = f"{name} must be a floating-point tensor {shape}: got"
    if not isinstance(x, Tensor):
        raise TypeError(f"{said} {type(x).__name__}")
    if not x.is_floating_point() or x.ndim != shape.count(",") + 1 or not x.shape[-1]:
        raise ValueError(f"{said} {x.dtype} of shape {list(x.shape)}")


def normalized(normalizer: Normalizer, scores: Tensor, q: Tokens, k: Tokens) -> Tensor:
    """The weights ``[B, H, T, S]`` of whole rows of masked scores; 0 where a key is not seen."""
    if scores.shape[-1] == 0:
        return scores
    hidden = scores.isneginf()
    empty = hidden.all(dim=-1, keepdim=True)
    weights = normalizer.weights(scores.masked_fill(empty, 0.0), q, k)
    return weights.masked_fill(hidden, 0.0)


def sums_of_later(x: Tensor, k: Tokens) -> Tensor:
    """``[B, H, T, S]`` sums of the numbers of each key and of those at later positions.

    Args:
        x: ``[B, H, T, S]``, 0 for keys that a query does not see.
        k: The keys, in any order of position.
    """
    return by_position(lambda row: row.flip(-1).cumsum(dim=-1).flip(-1), x, k)


def by_position(function: Callable[[Tensor], Tensor], x: Tensor, k: Tokens) -> Tensor:
    """What a function of ``[B, H, T, S]``, keys in the order of their positions, makes of x."""
    if k.positions is None:
        return function(x)
    order = k.positions.argsort(dim=-1, stable=True)
    order = order if order.ndim == 1 else order[:, None, None]
    order = order.expand(x.shape)
    made = function(x.gather(-1, order))
    return torch.empty_like(made).scatter(-1, order, made)
