"""What is added to the scores: biases by position, drawn tile by tile.

    ALiBi(slopes)                −slope_h · |query − key|       (Press et al. 2022)
    RelativeBias(table)          table[bucket(key − query), h]  (T5, Raffel et al. 2020)
    TensorBias(tensor)           any tensor that broadcasts to [B, H, T, S]

A bias is a function of a pair, its ``rule``. It draws one tile (``tile``) and takes back the
gradient of one tile (``add_gradients``), so a learned bias costs no T×S memory forward or backward.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyhead.semantics.component import Component, inherit_no_shortcut
from polyhead.semantics.masks import check_broadcast, of_heads, of_tokens
from polyhead.semantics.pairs import PairExpr, QueryKeyPairs, Tile, cut
from polyhead.semantics.tokens import Tokens, active_capture, distance, is_tracing

FARTHEST = 1 << 14
"""Most distances of a bias by distance: there is a number for each."""


class KernelBias(NamedTuple):
    """A bias as compiled code reads it: one of these.

    Attributes:
        slopes: ``[H]``: what is added is −slope · |query position − key position|.
        rounded: Not 0: it is bfloat16(slope · key position) · rounded instead.
        by_distance: ``[H, 2 n + 1]``: what is added for keys n and more places behind the query,
            …, n and more ahead of it.
        tensor: ``[1 or B, 1 or H, 1 or T, 1 or S]`` by index in the call.
    """

    slopes: Tensor | None = None
    by_distance: Tensor | None = None
    tensor: Tensor | None = None
    rounded: float = 0.0


class Bias(Component, ABC):
    """A term added to the scores, after softcap and before the mask.

    Your own bias defines ``rule``, or ``tile`` if it is not a function of numbers of a pair. It
    may override other methods with faster ones. Define ``arguments`` if files should store it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        inherit_no_shortcut(cls, Bias, "tile", "add_gradients", "kernel_bias")

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the bias is computed from, and that a gradient may flow to."""

    @abstractmethod
    def with_tensors(self, tensors: Sequence[Tensor]) -> Bias:
        """The same bias computed from other tensors of the same shapes."""

    @abstractmethod
    def of_heads(self, heads: Sequence[int]) -> Bias:
        """The same bias for some query heads alone."""

    def on(self, device: torch.device) -> Bias:
        """The same bias with its tensors on a device; without gradients kept for further calls."""
        tensors, step = self.tensors, active_capture()
        if all(x.device == device for x in tensors):
            return self
        if any(x.requires_grad for x in tensors) or (is_tracing() and step is None):
            return self.with_tensors([x.to(device) for x in tensors])
        versions = [None if x.is_inference() else x._version for x in tensors]
        kept: tuple[Any, Bias] | None = self.__dict__.get("_elsewhere")
        if kept is None or kept[0] != (device, versions):
            kept = (device, versions), self.with_tensors([x.to(device) for x in tensors])
            self.__dict__["_elsewhere"] = kept
        if step is not None:
            step.held.append(kept)
        return kept[1]

    def of_tokens(self, queries: slice, keys: slice) -> Bias:
        """The bias of a call with some of the queries and keys of this bias' call.

        One that reads the indexes of tokens must define it; others know tokens by their positions.
        """
        return self

    @abstractmethod
    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raises ValueError if this bias cannot belong to such a call."""

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        """What is added to the score of a pair."""
        raise NotImplementedError(f"{type(self).__name__} must define rule or tile")

    def tile(self, q: Tokens, k: Tokens, like: Tensor) -> Tensor:
        """The bias of a tile, ``[B, H, T, S]`` after broadcasting, in the dtype of ``like``."""
        drawn: Tensor = self.rule(Tile(q, k, like.device, like.dtype))(())
        return drawn.to(like)

    def add_gradients(self, totals: Sequence[Tensor], scores: Tensor, q: Tokens, k: Tokens) -> None:
        """Adds to ``totals`` (shaped as ``tensors``) the gradients from a tile's score gradients.

        Here by torch's derivative of ``tile``.

        Args:
            totals: Running sums, in the precision of ``scores``.
            scores: ``[B, H, T, S]`` gradient of the loss by the tile's scores.
            q: Queries of the tile.
            k: Keys of the tile.
        """

        def drawn(*tensors: Tensor) -> Tensor:
            return self.with_tensors(tensors).tile(q, k, scores)

        leaves = (x.detach().to(scores.dtype) for x in self.tensors)
        tile, pull = torch.func.vjp(drawn, *leaves)[:2]
        for total, piece in zip(totals, pull(scores.sum_to_size(tile.shape)), strict=True):
            total += piece

    def kernel_bias(self) -> KernelBias | None:
        """The bias as compiled code reads it, differentiable; None: it has no such form."""
        return None


class ALiBi(Bias, arguments={"slopes": Tensor}):
    """Attention with linear biases (Press et al. 2022): −slope · |query position − key position|.

    Args:
        slopes: ``[H]`` slopes, or the number of heads for the paper's geometric sequence.

    Raises:
        ValueError: Slopes that are not one-dimensional and floating.
    """

    def __init__(self, slopes: Tensor | Sequence[float] | int) -> None:
        if isinstance(slopes, int):
            slopes = alibi_slopes(slopes)
        self.slopes = (
            slopes
            if isinstance(slopes, Tensor)
            else torch.tensor(slopes, dtype=torch.float32, device="cpu")
        )
        if self.slopes.ndim != 1 or not self.slopes.is_floating_point():
            raise ValueError(
                f"ALiBi slopes must be floating point of shape [H]: got {self.slopes.dtype} of "
                f"shape {list(self.slopes.shape)}"
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.slopes,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> ALiBi:
        return type(self)(*tensors)

    def of_heads(self, heads: Sequence[int]) -> ALiBi:
        return type(self)(self.slopes[list(heads)])

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        # In the precision of scores: bfloat16 would round distances.
        slope, q, k = of.per_head(self.slopes), of.q_position, of.k_position
        return lambda pair: -slope(pair) * (q(pair) - k(pair)).abs()

    def add_gradients(self, totals: Sequence[Tensor], scores: Tensor, q: Tokens, k: Tokens) -> None:
        apart = distance(q, k, scores.device).abs().to(scores.dtype)
        totals[0].sub_((scores * apart).sum(dim=(0, 2, 3)))

    def kernel_bias(self) -> KernelBias | None:
        return KernelBias(slopes=self.slopes.float())

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if len(self.slopes) != heads:
            raise ValueError(
                f"ALiBi needs a slope per head, [H] = [{heads}]: got {len(self.slopes)}"
            )

    def __repr__(self) -> str:
        return f"ALiBi([{len(self.slopes)}])"


class RoundedALiBi(ALiBi, arguments={"slopes": Tensor, "scale": float | int}):
    """ALiBi as Falcon computes it: bfloat16(slope · key position) · scale.

    Without the query's position, which softmax does not see, and rounded whatever the dtype, so
    that neighbouring keys far from the beginning get the same bias.

    Args:
        slopes: As of ``ALiBi``.
        scale: Factor after rounding.
    """

    def __init__(self, slopes: Tensor | Sequence[float] | int, scale: float = 1.0) -> None:
        super().__init__(slopes)
        self.scale = scale

    def with_tensors(self, tensors: Sequence[Tensor]) -> RoundedALiBi:
        return RoundedALiBi(tensors[0], self.scale)

    def of_heads(self, heads: Sequence[int]) -> RoundedALiBi:
        return RoundedALiBi(self.slopes[list(heads)], self.scale)

    def tile(self, q: Tokens, k: Tokens, like: Tensor) -> Tensor:
        positions = k.position_tensor(like.device)
        positions = positions[None] if positions.ndim == 1 else positions
        slopes = self.slopes.to(device=like.device, dtype=torch.bfloat16)
        rounded = slopes[:, None, None] * positions[:, None, None, :]
        return rounded.to(like) * self.scale

    def kernel_bias(self) -> KernelBias | None:
        if self.slopes.requires_grad or not self.scale:
            return None
        return KernelBias(slopes=self.slopes.float(), rounded=self.scale)

    def __repr__(self) -> str:
        return f"RoundedALiBi([{len(self.slopes)}], scale={self.scale})"


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> Tensor:
    """``[H]`` slopes of the paper: 2^(−8i/H), and for other counts its interleaving rule.

    Args:
        num_heads: Number of query heads H.
        max_bias: In place of 8.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1: got {num_heads}")
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-max_bias * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-max_bias * (i + 0.5) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes + between, dtype=torch.float32, device="cpu")


class RelativeBias(Bias, arguments={"table": Tensor, "bidirectional": bool, "max_distance": int}):
    """T5's learned relative position bias: one number per bucket of distance and head.

    Half of the buckets (of one direction) are exact distances, the other half grow
    logarithmically up to ``max_distance``.

    Args:
        table: ``[num_buckets, H]``, as T5's ``relative_attention_bias.weight``.
        bidirectional: Whether keys ahead have buckets of their own (encoders).
        max_distance: Distances from here on share the last bucket.

    Raises:
        ValueError: A table that is not two-dimensional and floating, or too few buckets.
    """

    def __init__(
        self, table: Tensor, *, bidirectional: bool = True, max_distance: int = 128
    ) -> None:
        if table.ndim != 2 or not table.is_floating_point():
            raise ValueError(
                f"RelativeBias table must be floating point of shape [num_buckets, H]: got "
                f"{table.dtype} of shape {list(table.shape)}"
            )
        exact = table.shape[0] // (4 if bidirectional else 2)
        if exact < 1 or max_distance <= exact:
            raise ValueError(
                f"RelativeBias needs max_distance greater than its {exact} exact buckets, and at "
                f"least 1 of those: got num_buckets={table.shape[0]}, max_distance={max_distance}"
            )
        self.table = table
        self.bidirectional = bidirectional
        self.max_distance = max_distance
        self._keeps_numbers = False
        self._numbers: KernelBias | None = None

    def prepared(self) -> RelativeBias:
        """The same bias for many calls: compiled code's table is computed once, without gradients.

        Its table must not change while it is used.
        """
        made = self.with_tensors([each.detach() for each in self.tensors])
        made._keeps_numbers = True
        return made

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.table,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> RelativeBias:
        return type(self)(
            *tensors, bidirectional=self.bidirectional, max_distance=self.max_distance
        )

    def of_heads(self, heads: Sequence[int]) -> RelativeBias:
        return self.with_tensors((self.table[:, list(heads)],))

    def buckets(self, q: Tokens, k: Tokens, device: torch.device) -> Tensor:
        """``[1 or B, T, S]`` bucket numbers."""
        ahead = -distance(q, k, device)[:, 0]
        count = self.table.shape[0]
        if self.bidirectional:
            count //= 2
            first = (ahead > 0) * count
            apart = ahead.abs()
        else:
            first = torch.zeros_like(ahead)
            apart = (-ahead).clamp(min=0)
        exact = count // 2
        # In float32 as T5 does: a double would put borderline distances in another bucket.
        far = torch.log(apart.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (far * (count - exact)).long()).clamp(max=count - 1)
        return first + torch.where(apart < exact, apart, far)

    def by_distance(self, like: Tensor) -> Tensor:
        """``[H, 2 · max_distance + 1]`` what is added to scores, in the dtype of ``like``.

        Column ``max_distance + d`` is for keys d places ahead of the query; the first and the last
        are also for those farther away, which share a bucket. Differentiable.
        """
        origin, keys = Tokens.of(1, shift=self.max_distance), Tokens.of(2 * self.max_distance + 1)
        buckets = self.buckets(origin, keys, like.device).flatten()
        # Not by indexing, whose gradient is summed in any order.
        return self.table.to(like).index_select(0, buckets).mT

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        # By a table of whole distances: a compiler's logarithm may round to another bucket.
        far = self.max_distance
        q, k, most = of.q_position, of.k_position, of.number(far)
        table = self.by_distance(torch.empty(0, device=of.device, dtype=of.dtype))[None]
        return of.look_up(
            table, lambda pair: (k(pair) - q(pair)).clamp(-most(pair), most(pair)) + most(pair)
        )

    def tile(self, q: Tokens, k: Tokens, like: Tensor) -> Tensor:
        return self.table.to(like)[self.buckets(q, k, like.device)].permute(0, 3, 1, 2)

    def kernel_bias(self) -> KernelBias | None:
        if self.max_distance > FARTHEST:
            return None
        if self._numbers is not None:
            return self._numbers
        like = self.table.new_empty(0, dtype=torch.float32)
        numbers = KernelBias(by_distance=self.by_distance(like).contiguous())
        if self._keeps_numbers:
            self._numbers = numbers
        return numbers

    def add_gradients(self, totals: Sequence[Tensor], scores: Tensor, q: Tokens, k: Tokens) -> None:
        buckets = self.buckets(q, k, scores.device)
        if buckets.shape[0] == 1:
            scores = scores.sum(dim=0, keepdim=True)
        rows = scores.permute(0, 2, 3, 1).reshape(-1, scores.shape[1])
        totals[0].index_add_(0, buckets.reshape(-1), rows)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if self.table.shape[1] != heads:
            raise ValueError(
                f"RelativeBias table must be [num_buckets, H] with H = {heads}: got "
                f"{list(self.table.shape)}"
            )

    def __repr__(self) -> str:
        return (
            f"RelativeBias({list(self.table.shape)}, bidirectional={self.bidirectional}, "
            f"max_distance={self.max_distance})"
        )


class TensorBias(Bias, arguments={"tensor": Tensor}):
    """A tensor that broadcasts to ``[B, H, T, S]``; rows and columns are this call's q and k."""

    def __init__(self, tensor: Tensor) -> None:
        if not tensor.is_floating_point():
            raise TypeError(
                f"bias must be floating point: got {tensor.dtype}; a bool tensor is a mask, "
                "polyhead.Keep(tensor) or polyhead.Drop(tensor)"
            )
        if tensor.ndim > 4:
            raise ValueError(f"bias must broadcast to [B, H, T, S]: got shape {list(tensor.shape)}")
        self.tensor = tensor[(None,) * (4 - tensor.ndim)]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> TensorBias:
        return type(self)(*tensors)

    def of_heads(self, heads: Sequence[int]) -> TensorBias:
        return type(self)(of_heads(self.tensor, heads))

    def of_tokens(self, queries: slice, keys: slice) -> TensorBias:
        return type(self)(of_tokens(self.tensor, queries, keys))

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        return of.of_pair(self.tensor)

    def kernel_bias(self) -> KernelBias:
        return KernelBias(tensor=self.tensor.float().resolve_neg())

    def add_gradients(self, totals: Sequence[Tensor], scores: Tensor, q: Tokens, k: Tokens) -> None:
        part = cut(totals[0], q, k)
        part += scores.sum_to_size(part.shape)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        check_broadcast("bias", self.tensor, (batch, heads, queries, keys))

    def __repr__(self) -> str:
        return f"TensorBias({list(self.tensor.shape)})"
