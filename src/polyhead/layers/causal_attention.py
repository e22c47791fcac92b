"""Attention that is causal by nature and remembers more than keys and values."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from torch import Tensor

from polyhead.caches.layer_cache import Packing
from polyhead.errors import UnsupportedError
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.attention_parts import check_layer_cache
from polyhead.layers.recurrent import real_tokens
from polyhead.semantics import Causal, KeyLengths


class CausalAttention(MultiHeadAttention):
    """``MultiHeadAttention`` over its own input, with a ``LayerCache`` of its layout's memories.

    It takes no context, and of masks ``Causal()``, with ``KeyLengths`` without a cache.

    Attributes:
        called: What errors call it.
    """

    called: ClassVar[str]

    def _check_cache(self, cache: Any) -> None:
        check_layer_cache(cache)

    def forward(self, x: Tensor, context: Any = None, *more: Tensor, **call: Any) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``, as ``MultiHeadAttention`` says.

        Args:
            x: ``[B, T, E]``.
            context: None.
            *more: Refused.
            **call: As of ``MultiHeadAttention``; ``positions`` below 0 are padding.

        Raises:
            ValueError: Shapes that do not fit, or a context.
            UnsupportedError: Another mask.
            TypeError: A cache of another kind.
        """
        call["mask"] = Causal() if call.get("mask") is None else call["mask"]
        if x.ndim != 3 or context is not None:
            return super().forward(x, context, *more, **call)
        cached, positions = call.get("cache") is not None, call.get("positions")
        real = real_tokens(call["mask"], x, positions, cached=cached, what=self.called)
        return self._over(x, real, *more, **call)

    def _over(self, x: Tensor, real: Tensor | None, *more: Tensor, **call: Any) -> Tensor:
        """``forward`` of a call whose mask is known; ``real`` ``[B, T]``, None: no padding."""
        return super().forward(x, None, *more, **call)

    def _packed(self, x: Tensor, real: Tensor, *more: Tensor, **call: Any) -> Tensor:
        """``forward`` with the real tokens ``[B, T]`` of each row before its padding, and back."""
        beside = "" if (cached := call.get("cache") is not None) else " without a cache"
        if call.get("bias") is not None:
            raise UnsupportedError(f"{self.called} takes no bias beside padding{beside}: got one")
        packing = Packing(~real)
        if not cached:
            call["mask"] = Causal() & KeyLengths(real.sum(dim=1))
        positions = packing.pack(call["positions"].expand(real.shape))
        call["positions"] = positions if packing.real is None else positions.where(packing.real, -1)
        return packing.unpack(super().forward(packing.pack(x), None, *more, **call))

    def _cross_attention(self, *_: Any) -> NoReturn:
        raise ValueError(f"{self.called} is over its own input: got a context")
