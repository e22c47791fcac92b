"""A short convolution over tokens, added to what it reads: of keys, of values, of a layer's parts.

    y_t = x_t + Σ_n w_n ∘ x_(t − n)        n = 0 … N − 1, and x is 0 before a sequence

Inkling (Thinking Machines 2026). In a cache it remembers the last N − 1 inputs, a ``Tail``.

Shape letters: B batch, T tokens, W width, N tokens that a convolution sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.caches.layer_cache import Packing, Step
from polyhead.layers.attention_parts import check_layer_cache, ragged_positions
from polyhead.layers.recurrent import convolve, with_tail


class CausalConvolution(nn.Module):
    """Each feature by itself; computed in float32 or more.

    Args:
        width: Features W.
        tokens: Tokens N that it sees, the current one included.
        name: Of its memory.

    Attributes:
        weight: ``[W, N]``, the last column of the current token.
    """

    def __init__(self, width: int, tokens: int, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.empty(width, tokens))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights as torch's ``Conv1d``."""
        bound = 1.0 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, call: Packing) -> Tensor:
        """``[B, T, W]`` to ``[B, T, W]``.

        Args:
            x: Of the tokens of a call, as the layer has them.
            call: Of ``convolved_call``.
        """
        step = call if isinstance(call, Step) else None
        inputs = with_tail(self.name, call.pack(x), self.weight.shape[1] - 1, step)
        return call.unpack(convolve(inputs, self.weight, beside=True))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, tokens={self.weight.shape[1]}"


@contextmanager
def convolved_call(x: Tensor, positions: Tensor | None, cache: Any) -> Iterator[Packing]:
    """One call of what convolves: a step of its cache, or without one a sequence from its start.

    Args:
        x: ``[B, T, E]``, the layer's input.
        positions: ``[T]`` or ``[B, T]``, below 0 for padding; default: they follow on.
        cache: A ``LayerCache``, or None.

    Raises:
        TypeError: A cache of another kind.
    """
    if cache is None:
        padding = None if positions is None else (positions < 0).expand(x.shape[:2])
        yield Packing(padding if padding is not None and bool(padding.any()) else None)
        return
    held = check_layer_cache(cache)
    with held.step(x, ragged_positions(held, x) if positions is None else positions) as step:
        yield step
