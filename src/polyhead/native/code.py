"""Calls the compiled code of one instruction set.

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D key size, V value size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from polyhead.native.arguments import (
    ACTIVATIONS,
    DTYPES,
    MAX_GEMV_ROWS,
    MAX_STEP_ROWS,
    NO_SCORE_MODS,
    CacheSegment,
    Guard,
    KVSegment,
    Layer,
    LayerForm,
    LayerWeights,
    Network,
    NormWeight,
    Routing,
    Run,
    ScoreMods,
    TileSums,
    Weight,
)
from polyhead.native.dropout import Dropout
from polyhead.native.threads import threads

LayerCall = tuple[
    Layer,
    tuple[Tensor, Tensor] | None,
    list[CacheSegment],
    Tensor | None,
    CacheSegment | None,
    Tensor | None,
]
"""The fields of ``arguments.LayerCall``: made for every layer and token."""

_DTYPES = {
    "avx512_amx": frozenset({torch.float32, torch.float16}),
    "avx512_bf16": frozenset(DTYPES),
    "avx512": frozenset({torch.float32, torch.float16}),
    "avx2": frozenset(DTYPES),
}


class Code:
    """One instruction set's code.

    The module checks what it is given: dtypes, shapes, strides, and that tensors are plain.
    Arguments that do not fit together raise a ValueError, tensors that are not plain (or have gaps
    where none are allowed) a ``polyhead.errors.NotPlainError``, too little memory a MemoryError.

    Attributes:
        block_sizes: Numbers and bytes of a block, by the number of its type, for all that it reads.
        dtypes: In which products of more than ``MAX_GEMV_ROWS`` rows are as fast as torch's.
        prompts: The code that computes more than ``MAX_STEP_ROWS`` rows or queries: this one,
            unless another is faster at them (``with_prompts``). Calls with ``batch_invariant``
            never use it: the bits of a row may differ between two codes.
    """

    def __init__(self, module: ModuleType, index: int, name: str) -> None:
        self.name = name
        self.dtypes = _DTYPES.get(name, frozenset())
        self._index = index
        self.prompts = self
        self._native = module
        self.block_sizes: dict[int, tuple[int, int]] = module.interface()["blocks"]

    def with_prompts(self, prompts: Code) -> Code:
        """This code, with another one for prompts."""
        both = copy.copy(self)
        both.name = f"{self.name}, {prompts.name} for prompts"
        both.dtypes, both.prompts = prompts.dtypes, prompts
        return both

    def _for(self, rows: int, *, batch_invariant: bool = False) -> int:
        """The index of the code that computes so many rows or queries.

        Args:
            batch_invariant: Whether it must be the same code for any number of them.
        """
        if batch_invariant or rows <= MAX_STEP_ROWS:
            return self._index
        return self.prompts._index

    @property
    def matmul_dtypes(self) -> frozenset[torch.dtype]:
        """In which ``matmul`` is faster than torch's, which multiplies bfloat16 by pairs too."""
        return self.dtypes if self.prompts.name == "avx2" else self.dtypes - {torch.bfloat16}

    def product(
        self, x: Tensor, weights: Sequence[Weight], *, batch_invariant: bool = True
    ) -> Tensor:
        """``[x W0ᵀ + b0 | x W1ᵀ + b1 | …]``, added up in float32.

        Args:
            x: ``[rows, in]``, the last dimension dense.
            weights: At most ``MAX_WEIGHTS``, dense, in the dtype of x or in blocks.
            batch_invariant: A row has the same bits whatever rows are beside it, and however many.
                Otherwise more than ``MAX_STEP_ROWS`` rows, and with matrix tiles (AMX) 16 rows of
                bfloat16 and more, are added up in another order, which is faster; and blocks that
                meet more than ``MAX_GEMV_ROWS`` rows of bfloat16 are rounded to bfloat16, if the
                processor has an instruction for it. Matrix tiles take float32 as a sum of three
                bfloat16, of which infinite numbers give NaN.
        """
        y = x.new_empty(len(x), sum(each.weight.shape[0] for each in weights))
        index = self._for(len(x), batch_invariant=batch_invariant)
        self._native.product(index, threads(), x, weights, batch_invariant, y)
        return y

    def matmul(self, a: Tensor, b: Tensor, plus: Tensor | None = None) -> Tensor:
        """``plus + a b``, added up in float32 in the order that is fastest, rounded once.

        Args:
            a: ``[rows, K]`` of more than ``MAX_STEP_ROWS`` rows, one of its dimensions dense.
            b: ``[K, columns]`` in the dtype of a, it or its transpose contiguous.
            plus: ``[rows, columns]``, contiguous, which is written to; None: 0.

        Returns:
            ``plus`` where it is given, otherwise a new tensor.
        """
        y = a.new_empty(len(a), b.shape[1]) if plus is None else plus
        self._native.matmul(self._for(len(a)), threads(), a, b, plus is not None, y)
        return y

    def take_grids(self, grids: Tensor) -> None:
        """The grids of the IQ types, for all codes: before blocks of these types are read.

        Args:
            grids: uint8; those of IQ1, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S.
        """
        self._native.grids(grids)

    def unpack(self, blocks: Weight, numbers: int, dtype: torch.dtype) -> Tensor:
        """Rows of blocks as numbers, rounded from float32.

        Args:
            blocks: Of which only the last dimension is dense; a bias is not looked at.
            numbers: Numbers of a row.
            dtype: One of ``DTYPES``.

        Returns:
            ``[rows, numbers]``.
        """
        y = blocks.weight.new_empty((blocks.weight.shape[0], numbers), dtype=dtype)
        self._native.unpack(self._index, threads(), blocks, y)
        return y

    def feed_forward(self, x: Tensor, network: Network, *, batch_invariant: bool = True) -> Tensor:
        """What a network makes of rows; its hidden features stay float32 until the last product.

        Args:
            x: ``[rows, E]``, the last dimension dense.
            network: Its weights dense, in the dtype of x or in blocks.
            batch_invariant: As in ``product``.
        """
        y = x.new_empty(x.shape[0], network.down.weight.shape[0])
        index = self._for(len(x), batch_invariant=batch_invariant)
        self._native.feed_forward(index, threads(), x, network, batch_invariant, y)
        return y

    def route(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Which experts a few rows visit, and how much each counts.

        Args:
            x: ``[rows, E]``, at most ``MAX_GEMV_ROWS`` rows, the last dimension dense.
            routing: Its weights dense, in the dtype of x or in blocks.

        Returns:
            Weights ``[rows, K]`` in float32, with a shared gate ``[rows, K + 1]`` of which the last
            is its sigmoid; numbers of experts ``[rows, K]``.
        """
        more = 0 if routing.shared_gate is None else 1
        weights = torch.empty(len(x), routing.visited + more, dtype=torch.float32, device="cpu")
        chosen = torch.empty(len(x), routing.visited, dtype=torch.int64, device="cpu")
        for first in range(0, len(x), MAX_GEMV_ROWS):
            rows = slice(first, first + MAX_GEMV_ROWS)
            self._native.route(
                self._index, threads(), x[rows], routing, weights[rows], chosen[rows]
            )
        return weights, chosen

    def choose_blocks(
        self, q: Tensor, entries: Tensor, own: Tensor, count: int, lists: int
    ) -> Tensor:
        """The blocks of keys whose bounds allow the largest products with queries (Quest).

        Args:
            q: ``[B, H, T, D]``, the last dimension dense.
            entries: ``[B, n, 2 G D]`` in the dtype of q, the last dimension dense: of each whole
                block the greatest features of its keys, then the least, for each kv head.
            own: ``[1 or B, T]`` int64, dense: the query's own block, which is chosen; others are
                chosen of those before it. Below 0: the query chooses none.
            count: Blocks k that a query chooses.
            lists: G, lists of a query: the H / G heads of each choose by the sum of their bounds.

        Returns:
            ``[B, G, T, k]`` int64, ascending, -1 behind them.
        """
        shape = q.shape[0], lists, q.shape[2], count
        chosen = torch.empty(shape, dtype=torch.int64, device="cpu")
        self._native.choose_blocks(self._index, threads(), q, entries, own, chosen)
        return chosen

    def choose_keys(
        self,
        q: Tensor,
        weights: Tensor,
        segments: Sequence[KVSegment],
        mods: ScoreMods,
        count: int,
    ) -> Tensor:
        """The keys of highest ``Σ_h weights_h · relu(q_h · k)`` among those that a query sees.

        A query has the same scores, to the last bit, whatever is beside it and on any number of
        threads. Of equal ones the first keys are chosen; one of -inf or NaN never is.

        Args:
            q: ``[B, H, T, D]``, the last dimension dense.
            weights: ``[B, H, T]`` float32, any strides.
            segments: Keys of one kv head in the dtype of q; values are not looked at.
            mods: Bounds, and ``keep`` of one head.
            count: Keys k that a query chooses.

        Returns:
            ``[B, T, k]`` int64 numbers of keys of the call, ascending, -1 behind them.
        """
        _check_codings(segments)
        shape = q.shape[0], q.shape[2], count
        chosen = torch.empty(shape, dtype=torch.int64, device="cpu")
        self._native.choose_keys(self._index, threads(), q, weights, segments, mods, chosen)
        return chosen

    def sink(self, x: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        """``x · sigmoid(lse − sink)``: what heads give whose scores are joined by a sink.

        Args:
            x: ``[B, H, T, V]``, the last dimension dense.
            lse: ``[B, H, T]`` float32, dense.
            sinks: ``[H]``, dense, in float32 or the dtype of x.

        Returns:
            A new dense tensor like x.
        """
        y = x.new_empty(x.shape).copy_(x)
        self._native.sink(self._index, threads(), y, lse, sinks)
        return y

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        decay: Tensor | None,
        beta: Tensor | None,
        real: Tensor | None,
        state: Tensor,
        *,
        delta: bool,
    ) -> Tensor:
        """The recurrence of ``semantics/recurrence.py`` over all tokens: ``out [B, H, T, V]``.

        Args:
            q: ``[B, H or a divisor, T, K]``, the last dimension dense, other strides any.
            k: ``[B, H or a divisor, T, K]``, likewise, and in the dtype of q, as v.
            v: ``[B, H or a divisor, T, V]``, likewise.
            scale: Factor of q.
            decay: ``[B or 1, H, T, 1 or K]`` float32 factors, not logarithms, the last dimension
                dense; None: 1.
            beta: ``[B, H, T]`` float32, any strides; None: 1.
            real: ``[B, T]`` bool; None: all are.
            state: ``[B, H, K, V]`` float32, dense: updated in place.
            delta: Whether by the delta rule.
        """
        out = q.new_empty(*state.shape[:2], q.shape[2], state.shape[-1])
        self._native.recur(
            self._index, threads(), q, k, v, scale, decay, beta, real, int(delta), state, out
        )
        return out

    def norm(self, x: Tensor, by: NormWeight) -> Tensor:
        """``x / √(mean(x²) + eps) · (weight + offset)`` along the rows of ``[rows, E]``.

        A ``centred`` norm has ``x − mean(x)`` in place of x, and its bias is added.
        """
        y = x.new_empty(x.shape)
        self._native.norm(self._index, threads(), x, by, y)
        return y

    def norm_gradients(
        self, x: Tensor, weight: Tensor, eps: float, offset: float, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of x and the weight (float32), given that of ``norm``'s result."""
        grad_x, grad_weight = (
            x.new_empty(x.shape),
            torch.zeros(weight.shape, dtype=torch.float32, device="cpu"),
        )
        norm = NormWeight(weight, eps, offset)
        self._native.norm_gradients(self._index, threads(), x, norm, grad, grad_x, grad_weight)
        return grad_x, grad_weight

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """``activation(gate) · up``, of tensors of one shape and dtype, dense.

        ``activation`` is one of ``DIFFERENTIATED``.
        """
        y = gate.new_empty(gate.shape)
        self._native.gated(self._index, threads(), gate, up, ACTIVATIONS[activation], y)
        return y

    def gated_gradients(
        self, gate: Tensor, up: Tensor, activation: str, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of ``gate`` and ``up``, given that of ``gated``'s result."""
        found = gate.new_empty(gate.shape), up.new_empty(up.shape)
        number = ACTIVATIONS[activation]
        self._native.gated_gradients(self._index, threads(), gate, up, number, grad, *found)
        return found

    def dropped(self, x: Tensor, dropout: Dropout, plus: Tensor | None = None) -> Tensor:
        """``plus + x`` after dropout of single numbers, each the place of a key.

        Args:
            x: Contiguous tensor of any shape.
            dropout: The places are not looked at: the first number has place 0.
            plus: What is added, of x's shape, dense; its dtype, x's or float32, is the result's.
        """
        y = x.new_empty(x.shape, dtype=x.dtype if plus is None else plus.dtype)
        self._native.dropped(self._index, threads(), x, plus, dropout, y)
        return y

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x · cos + roll(x, D / 2) · sin`` of every head, a new dense tensor.

        Args:
            x: ``[B, T, N, D]``, the last dimension dense, other strides any.
            cos: ``T · D`` numbers, dense, in the dtype of x.
            sin: Likewise, the first half of D negative.
        """
        y = x.new_empty(x.shape)
        self._native.rotate(self._index, threads(), x, cos, sin, y)
        return y

    def attend(
        self,
        q: Tensor,
        segments: Sequence[KVSegment],
        scale: float,
        mods: ScoreMods = NO_SCORE_MODS,
        *,
        lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of ``q [B, H, T, D]`` over all segments: out and, if asked for, lse.

        Args:
            q: The last dimension dense, other strides any.
            segments: One to ``MAX_SEGMENTS``.
            scale: Factor of the scores.
            mods: Mask, bias, softcap.
            lse: Whether to return ``[B, H, T]`` float32.
        """
        _check_codings(segments)
        B, H, T, _ = q.shape
        out = q.new_empty(B, H, T, segments[0].value_dim)
        found = q.new_empty((B, H, T), dtype=torch.float32) if lse else None
        index = self._for(T, batch_invariant=mods.batch_invariant)
        self._native.attend(index, threads(), q, segments, scale, mods, out, found)
        return out, found

    def gradients(
        self,
        q: Tensor,
        segment: KVSegment,
        scale: float,
        mods: ScoreMods,
        result: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
        *,
        of_bias: bool = False,
    ) -> list[Tensor]:
        """Gradients of q, k and v, dense, and of the bias in float32 if asked for.

        Args:
            q: As ``attend`` got it, and so the next three.
            segment: The keys and values, in one segment.
            scale: Factor of the scores.
            mods: Mask, bias, softcap.
            result: out and lse, as ``attend`` gave them.
            grads: Gradients of out, the last dimension dense, and of lse ``[B, H, T]`` float32.
            of_bias: Whether to return the gradient of ``mods.learned`` too.
        """
        found = [q.new_empty(x.shape) for x in (q, segment.k, segment.v)]
        of_extras = None
        if of_bias and mods.learned is not None:
            of_extras = torch.zeros(mods.learned.shape, dtype=torch.float32, device="cpu")
        self._native.gradients(
            self._for(q.shape[2]),
            threads(),
            q,
            (segment,),
            scale,
            mods,
            *result,
            *grads,
            *found,
            of_extras,
        )
        return found if of_extras is None else [*found, of_extras]

    def head_product(self, x: Tensor, weight: Tensor, *, summed: bool) -> Tensor:
        """``x[m, h] · W[h]`` (summed) or ``W[h] · x[m, h]``, added up in float32.

        Args:
            x: ``[rows, H, in]``, at most ``MAX_GEMV_ROWS`` rows, the last dimension dense.
            weight: ``[H, in, out]`` where summed, else ``[H, out, in]``; the last two dense.
            summed: Which of the two.

        Returns:
            ``[rows, H, out]``.
        """
        y = x.new_empty(x.shape[0], x.shape[1], weight.shape[2 if summed else 1])
        for first in range(0, len(x), MAX_GEMV_ROWS):
            rows = slice(first, first + MAX_GEMV_ROWS)
            self._native.head_product(self._index, threads(), x[rows], weight, int(summed), y[rows])
        return y

    def guard(self, watched: tuple[Any, ...]) -> Guard:
        """What ``holds`` and ``step`` compare with objects as they are then; it keeps none alive.

        Args:
            watched: (object, names): its class, the names of all its attributes, and the values of
                those named; of a dict, what it holds. (dict, None): what it holds, in its order.
        """
        return Guard(self._native.guard(watched))

    def holds(self, guard: Guard) -> bool:
        """Whether everything that a guard watches is unchanged."""
        same: bool = self._native.holds(guard)
        return same

    def layer(self, weights: LayerWeights, form: LayerForm, watched: tuple[Any, ...]) -> Layer:
        """A layer as data, which ``step`` takes.

        Args:
            weights: In the dtype of the form; parameters themselves, since what is compared in
                every step is whether they still exist and lie where they lay.
            form: How they are put together.
            watched: What must be unchanged for the description to hold, as ``guard`` takes it.
        """
        return Layer(self._native.layer(weights, form, watched))

    def step(
        self,
        x: Tensor,
        guard: Guard,
        calls: list[LayerCall],
        starts: int | list[int] = 0,
        run: Run | None = None,
        counts: list[int] | None = None,
    ) -> tuple[Tensor, int]:
        """A few tokens of every batch row through layers, one behind the other.

        Args:
            x: ``[B, T, E]``, dense, T at most ``MAX_GEMV_ROWS`` and B · T at most
                ``MAX_STEP_ROWS``. Tokens of a row see themselves and those before them.
            guard: What must be unchanged beside the layers' own.
            calls: The layers, and what each is given.
            starts: Position of the first token; or of each row's, where they differ in length.
                All that a layer holds is then one segment, which begins with position 0, or the
                segments say what each row holds.
            run: Takes what was read of the calls, for ``again``.
            counts: Tokens of each batch row, where x has those of all rows, one row after the
                other, up to ``MAX_STEP_ROWS``; a row then has the bits of one call alone. Where
                they differ, ``starts`` are those of each row.

        Returns:
            ``[B, T, E]`` and how many parts were computed, three of each layer: its self-attention,
            the attention to the context (also where there is none), the network. Stops
            before the first layer whose guards fail (0: nothing was computed), and within a layer
            before a mixture if a routed expert's guards fail.
        """
        y = torch.empty_like(x)  # takes half the time of new_empty
        return y, self._native.step(self._index, threads(), x, guard, calls, starts, counts, run, y)

    def run(self) -> Run:
        """What ``step`` leaves for ``again``. It keeps no module, weight or cache alive."""
        return Run(self._native.run())

    def again(
        self,
        x: Tensor,
        guard: Guard,
        run: Run,
        start: int,
        rotations: tuple[tuple[Tensor, Tensor], ...],
    ) -> tuple[Tensor, int]:
        """The last ``step`` with other tokens, whose places in its caches begin at ``start``.

        Nothing is computed (0 parts) unless the run comes from calls of one segment of exact tokens
        from 0 on, without biases and contexts, x has the same sizes, and the tensors of the caches
        lie where they lay and have room. What they hold before ``start`` is the caller's business.

        Args:
            x: As of ``step``, and so the next.
            guard: What must be unchanged beside the layers' own.
            run: That ``step`` was given.
            start: Position of the first token of every row.
            rotations: Those of the calls, each once, in the order in which layers need them.
        """
        y = torch.empty_like(x)
        return y, self._native.again(self._index, threads(), x, guard, run, start, rotations, y)

    def weigh(self, logs: Tensor, first: int, sums: TileSums) -> None:
        """Turns logarithms of weights into weights, in place, and adds them to running sums.

        Args:
            logs: ``[B, rows, columns]`` float32, dense.
            first: Index of the first column's key.
            sums: The running sums of these rows and columns.
        """
        self._native.tile_sums(self._index, threads(), logs, first, sums)


def _check_codings(segments: Sequence[KVSegment]) -> None:
    for segment in segments:
        if segment.coding is not None:
            segment.coding.check(segment.k, segment.v)
