"""One attention call as data: what every contestant of the attention routines is built from.

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D head size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polyhead.kernels.dispatch import attention
from polyhead.semantics import ALiBi, Causal, Documents, Mask, Window


@dataclass(frozen=True)
class Problem:
    """One attention call; the last query lines up with the last key.

    Attributes:
        causal: Whether no query sees what comes after it.
        window: How many keys a query sees at most, itself included.
        documents: Lengths of documents that do not see each other.
        sinks: Whether each head has a sink with score 0.
        latent: Values are the first so many columns of the keys (absorbed latent attention).
    """

    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: torch.dtype
    batch: int = 1
    causal: bool = False
    window: int | None = None
    documents: tuple[int, ...] = ()
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    latent: int | None = None

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k and v from torch's global generator."""
        B, G, S, D = self.batch, self.kv_heads, self.keys, self.head_dim
        q = torch.randn(B, self.heads, self.queries, D).to(self.dtype)
        k = torch.randn(B, G, S, D).to(self.dtype)
        if self.latent is not None:
            return q, k, k[..., : self.latent]
        return q, k, torch.randn(B, G, S, D).to(self.dtype)

    @property
    def mask(self) -> Mask | None:
        """The mask as polyhead's mask expression."""
        parts: list[Mask] = [Causal()] if self.causal else []
        if self.window is not None:
            parts.append(Window(self.window))
        if self.documents:
            parts.append(Documents(list(self.documents)))
        mask = parts[0] if parts else None
        for part in parts[1:]:
            mask = part if mask is None else mask & part
        return mask

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """The first key that each query sees and the one after its last, ``[T]`` each."""
        positions = torch.arange(self.keys - self.queries, self.keys, device="cpu")
        low, high = torch.zeros_like(positions), torch.full_like(positions, self.keys)
        if self.documents:
            ends = torch.tensor(self.documents, device="cpu").cumsum(0)
            document = torch.bucketize(positions, ends, right=True)
            low, high = (
                torch.cat([torch.zeros(1, dtype=ends.dtype, device="cpu"), ends])[document],
                ends[document],
            )
        if self.causal:
            high = high.minimum(positions + 1)
        if self.window is not None:
            low = low.maximum(positions - self.window + 1)
        return low, high

    @property
    def keep(self) -> Tensor:
        """``[T, S]`` bool, True where a query sees a key: what torch needs for most masks."""
        keys = torch.arange(self.keys, device="cpu")
        low, high = self.bounds
        return (keys >= low[:, None]) & (keys < high[:, None])

    @property
    def slopes(self) -> Tensor:
        """ALiBi's slopes, ``[H]``."""
        return ALiBi(self.heads).slopes

    @property
    def operations(self) -> float:
        """Operations of the two matrix products, for the pairs that the mask allows."""
        low, high = self.bounds
        pairs = self.batch * self.heads * int((high - low).sum())
        return 2.0 * pairs * (self.head_dim + (self.latent or self.head_dim))

    @property
    def bytes(self) -> float:
        """Bytes of keys and values, each read once."""
        columns = self.head_dim if self.latent is not None else 2 * self.head_dim
        return float(self.batch * self.kv_heads * self.keys * columns * self.dtype.itemsize)

    def ours(self, q: Tensor, k: Tensor, v: Tensor, *, kernel: str = "auto") -> Tensor:
        """The output of polyhead's kernel."""
        return attention(
            q, k, v, mask=self.mask, softcap=self.softcap, kernel=kernel,
            bias=ALiBi(self.heads) if self.alibi else None,
            sinks=torch.zeros(self.heads, device=q.device) if self.sinks else None,
        )  # fmt: skip
