"""One attention layer's latest call: exact weights on demand, statistics of every row.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.errors import InputError
from polyhead.interpret.kept import KeptCall, weights_of
from polyhead.interpret.kept_rows import KeptRows
from polyhead.interpret.measuring import measure, tile_size, tiles_seen
from polyhead.interpret.statistics import (
    AVERAGED,
    OF_ROWS,
    OF_TOKENS,
    TABLE,
    HeadSummary,
    Statistics,
)
from polyhead.semantics import Tokens
from polyhead.semantics.weights import log_weight_rows

_ALL = slice(None)


class AttentionView(Statistics):
    """What one attention did, seen through its queries, keys and lse.

    Its statistics are the attributes of ``Statistics`` (``view.entropy``). One that was not
    measured while the model ran is measured at its first use, together with others of its kind.

    Attributes:
        layer: The layer's name or number.
        heads: The query heads that are seen; the heads of all tensors are these, in this order.
        kv_heads: The kv head that each of them reads.
        lse: ``[B, H, T]`` natural log-sum-exp, −∞ for a query that sees nothing.
    """

    _graph: tuple[Tensor, Tensor] | None = None

    def __init__(
        self,
        layer: int | str,
        call: KeptCall,
        heads: Sequence[int] | None = None,
        *,
        statistics: Collection[str] | None = None,
        top_k: int = 8,
    ) -> None:
        self.layer = layer
        self.heads = tuple(range(call.q.shape[1]) if heads is None else heads)
        self.top_k = top_k
        self.kv_heads = tuple(call.kv_heads[head] for head in self.heads)
        if heads is not None:
            call = call.of_heads(self.heads)
        self._measured: dict[str, Tensor] = {}
        self._call: KeptCall | None = None
        self._q_tokens = call.q_tokens
        if statistics is None:
            self._call = call.owned()
            self.lse = self._call.lse
        else:
            self._measured = measure(call, statistics, top_k)
            self.lse = call.lse.clone()

    def state(self) -> dict[str, Any]:
        """Everything kept, for ``from_state``."""
        names = ("heads", "top_k", "kv_heads", "lse", "_q_tokens", "_measured", "_call")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_state(cls, layer: int | str, state: dict[str, Any]) -> Self:
        """The view whose ``state`` was taken."""
        view = cls.__new__(cls)
        view.__dict__.update(state, layer=layer)
        view.heads, view.kv_heads = tuple(state["heads"]), tuple(state["kv_heads"])
        if view._call is not None:
            view.lse = view._call.lse
        return view

    @property
    def call(self) -> KeptCall:
        """The queries, keys and lse.

        Raises:
            InputError: Only statistics were kept.
        """
        if self._call is None:
            kept = ", ".join(self._measured) or "no statistics"
            raise InputError(
                f"layer {self.layer} keeps {kept} alone: probe without statistics= to keep "
                "queries and keys too"
            )
        return self._call

    @property
    def q(self) -> Tensor:
        """``[B, H, T, D]`` queries as the scores used them."""
        return self.call.q

    @property
    def k(self) -> Tensor:
        """``[B, G, S, D]`` keys as the scores used them; of kept heads only."""
        return self.call.k

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        kept = self.lse.nbytes if self._call is None else self._call.nbytes
        return kept + sum(values.nbytes for values in self._measured.values())

    def rows(
        self,
        heads: Sequence[int] | int | None = None,
        queries: slice | int | None = None,
        *,
        requires_grad: bool = False,
    ) -> Tensor:
        """The exact weights of some rows, float32 (float64 for float64) ``[B, heads, rows, S]``.

        Args:
            heads: Query heads, counted from 0, or the number of one; None: all.
            queries: Which queries, or the number of one; None: all. A row sums to 1 (less a sink's
                share), or to 0 where the query sees nothing.
            requires_grad: Whether gradients flow from the weights to what the model computed before
                them; the probe must have been opened with ``requires_grad=True``.

        Raises:
            InputError: A head that is not there, only statistics were kept, or no graph.
        """
        call = self.call
        if isinstance(heads, int):
            heads = [heads]
        places = [self._place(head) for head in (self.heads if heads is None else heads)]
        if isinstance(queries, int):
            count = call.q_tokens.length
            if not -count <= queries < count:
                raise InputError(f"queries must be from 0 to {count - 1}: got {queries}")
            queries = slice(queries % count, queries % count + 1)
        start, stop, step = (queries or slice(None)).indices(call.q_tokens.length)
        index = range(start, stop, step)
        if not index or not places:
            shape = (call.q.shape[0], len(places), len(index), call.k_tokens.length)
            return call.lse.new_zeros(shape)
        if requires_grad:
            return self._differentiable(places, index)
        if len(index) == 1 or step not in (1, -1):
            return torch.stack([call.row(query)[:, places] for query in index], dim=2)
        low, high = min(index), max(index) + 1
        found = torch.stack([self._tile(place, low, high) for place in places], dim=1)
        return found if step == 1 else found.flip(2)

    weights = rows

    def signed_rows(self, queries: slice) -> Tensor:
        """What each output is a sum of values by, ``[B, H, rows, S]``, of all heads that are seen.

        Of softmax attention these are ``rows``. Heads that remember a state have weights of either
        sign, q_t · Π decay · k_s and with the delta rule what is left of it, that add up to
        anything; ``rows``, pictures and statistics are their shares, |w_ts| / Σ_j |w_tj|.

        Args:
            queries: Contiguous slice of queries.

        Raises:
            InputError: Steps, or only statistics were kept.
        """
        start, stop = _run("queries", queries, self.call.q_tokens.length)
        if isinstance(self.call, KeptRows):
            return self.call.signed(start, stop)
        return self.rows(queries=slice(start, stop))

    def keep_graph(self, q: Tensor, k: Tensor) -> None:
        """Keeps queries and keys of all heads as parts of the graph that computed them."""
        self._graph = q, k

    def _differentiable(self, places: Sequence[int], index: range) -> Tensor:
        """``rows`` by the formula, from queries and keys in their graph."""
        if self._graph is None or not self._graph[0].requires_grad:
            raise InputError(
                "rows(requires_grad=True) needs the graph of the run: open the probe with "
                "requires_grad=True, and run the model with gradients on"
            )
        (q, k), call = self._graph, self.call.of_heads(places)
        heads = [self.heads[place] for place in places]
        low, high = min(index), max(index) + 1
        q = q[:, heads, low:high]
        scores = log_weight_rows(
            q,
            k[:, [self.kv_heads[place] for place in places]],
            q.new_zeros(q.shape[:-1], dtype=call.lse.dtype),
            call.spec,
            call.q_tokens.slice(low, high),
            call.k_tokens,
        )
        sinks = call.spec.sinks
        if sinks is not None and sinks.ndim == 3:
            sinks = sinks[..., low:high]
        return weights_of(scores, sinks)[:, :, [i - low for i in index]]

    def tile(self, head: int, q_range: slice, k_range: slice) -> Tensor:
        """The exact weights of one head on a rectangle, ``[B, queries, keys]``.

        Args:
            head: Index of the query head, from 0.
            q_range: Contiguous slice of queries.
            k_range: Contiguous slice of keys.

        Raises:
            InputError: A head that is not there, steps, or only statistics were kept.
        """
        call = self.call
        rows = _run("q_range", q_range, call.q_tokens.length)
        return self._tile(self._place(head), *rows, _run("k_range", k_range, call.k_tokens.length))

    def map(
        self,
        head: int,
        pixels: int = 256,
        reduce: Literal["max", "mean"] = "max",
        *,
        q_range: slice = _ALL,
        k_range: slice = _ALL,
    ) -> Tensor:
        """One head's weights, or a rectangle of them, as a picture of ``pixels`` × ``pixels``.

        Args:
            head: Index of the query head, from 0.
            pixels: Most cells along each side; a cell is a square of queries × keys.
            reduce: ``"max"``: the largest weight of a cell, so that no thin line is lost;
                ``"mean"``: their mean.
            q_range: Contiguous slice of queries.
            k_range: Contiguous slice of keys.

        Returns:
            ``[B, ⌈queries / cell⌉, ⌈keys / cell⌉]`` in the dtype of ``rows``.

        Raises:
            InputError: A head that is not there, no pixels, steps, or only statistics were kept.
        """
        if pixels < 1:
            raise InputError(f"pixels must be at least 1: got {pixels}")
        call, place = self.call, self._place(head)
        start, stop = _run("q_range", q_range, call.q_tokens.length)
        keys = _run("k_range", k_range, call.k_tokens.length)
        cell = max(1, -(-max(stop - start, keys[1] - keys[0]) // pixels))
        bands = [call.lse.new_zeros(call.q.shape[0], 0, -(-(keys[1] - keys[0]) // cell))]
        height = max(1, tile_size(call)[0] // cell) * cell
        for first in range(start, stop, height):
            band = first, min(first + height, stop)
            if reduce == "max":
                bands.append(self._largest(place, *band, keys, cell))
            else:
                bands.append(_mean(self._tile(place, *band, keys), cell))
        return torch.cat(bands, dim=1)

    def _largest(
        self, place: int, start: int, stop: int, keys: tuple[int, int], cell: int
    ) -> Tensor:
        """The largest weight of each cell of a band of queries, ``[B, cells, cells]``.

        A band is either one row of cells, of any number of tiles, or one row of tiles. The largest
        logarithm has the largest weight, so ``exp`` is taken of cells and not of weights.
        """
        call = self.call
        first, last = keys
        row_size, key_size = tile_size(call)
        columns = _runs(call.k_tokens, first, last, max(1, key_size // cell) * cell)
        size = [call.q.shape[0], -(-(stop - start) // cell), -(-(last - first) // cell)]
        logs = call.lse.new_full(size, -torch.inf)
        for rows in _runs(call.q_tokens, start, stop, row_size):
            for tile, _ in tiles_seen(call, rows, columns):
                found = _largest_of(call.log_weights(place, rows, tile)[:, 0], cell)
                top, left = (rows.start - start) // cell, (tile.start - first) // cell
                here = logs[:, top : top + found.shape[1], left : left + found.shape[2]]
                torch.maximum(here, found, out=here)
        return logs.exp_()

    def _tile(
        self, place: int, start: int, stop: int, keys: tuple[int, int] | None = None
    ) -> Tensor:
        """Weights ``[B, queries, keys]``; tiles in which nothing is seen are not computed."""
        call = self.call
        first, last = keys or (0, call.k_tokens.length)
        weights = call.lse.new_zeros(call.q.shape[0], stop - start, last - first)
        row_size, key_size = tile_size(call)
        columns = _runs(call.k_tokens, first, last, key_size)
        for rows in _runs(call.q_tokens, start, stop, row_size):
            for tile, _ in tiles_seen(call, rows, columns):
                weights[
                    :,
                    rows.start - start : rows.start - start + rows.length,
                    tile.start - first : tile.start - first + tile.length,
                ] = call.log_weights(place, rows, tile)[:, 0].exp_()
        return weights

    def _place(self, head: int) -> int:
        if head not in self.heads:
            known = (
                f"from 0 to {len(self.heads) - 1}"
                if self.heads == tuple(range(len(self.heads)))
                else f"one of {list(self.heads)}"
            )
            raise InputError(f"heads must be {known}: got {head}")
        return self.heads.index(head)

    def measure(self, names: Collection[str] = tuple(TABLE)) -> dict[str, Tensor]:
        """Several statistics in one pass over the weights.

        Raises:
            InputError: An unknown name, or one that needs tokens or documents that are not known.
        """
        missing = [name for name in names if name not in self._measured]
        if missing:
            self._measured |= measure(self.call, missing, self.top_k)
        return {name: self._measured[name] for name in names}

    def summary(self) -> HeadSummary:
        """Each statistic as one number per head.

        Raises:
            InputError: Statistics were chosen when probing, and not all that a summary needs.
        """
        batch, _, total = self.lse.shape
        counted = ~self.lse.isneginf()
        if total > 1:
            first = self._q_tokens.position_tensor(self.lse.device).expand(batch, total)
            counted = counted & (first > first.amin(dim=-1, keepdim=True))[:, None]
        number = counted.sum(dim=(0, 2))

        means = {}
        for name in AVERAGED:
            if name in OF_TOKENS and not self._knows(name):
                continue
            summed = self.statistic(name).masked_fill(~counted, 0.0).sum(dim=(0, 2))
            means[name] = (summed / number).masked_fill(number == 0, torch.nan)
        return HeadSummary(means)

    def _knows(self, name: str) -> bool:
        return name in self._measured or (self._call is not None and self._call.ids is not None)

    def statistic(self, name: str) -> Tensor:
        if name not in self._measured:
            if name in OF_ROWS:
                tokens = OF_TOKENS if self.call.ids is not None else ()
                self.measure([*OF_ROWS, *tokens])
            else:
                sum_of = TABLE[name].native
                alike = [other for other, each in TABLE.items() if sum_of and each.native == sum_of]
                self.measure(alike or [name])
        return self._measured[name]

    def __repr__(self) -> str:
        batch, heads, queries = self.lse.shape
        kept = ", ".join(self._measured)
        if self._call is not None:
            kept = f"{self._call.k_tokens.length} keys of {self.k.shape[1]} kv heads"
        return (
            f"AttentionView(layer {self.layer}: batch {batch}, {heads} query heads, "
            f"{queries} queries, {kept}, {self.nbytes:,} bytes)"
        )


def _run(name: str, wanted: slice, length: int) -> tuple[int, int]:
    start, stop, step = wanted.indices(length)
    if step != 1:
        raise InputError(f"{name} must be a contiguous slice of tokens: got {wanted}")
    return start, max(start, stop)


def _runs(tokens: Tokens, start: int, stop: int, size: int) -> list[Tokens]:
    return tokens.slice(start, stop).split(size)


def _largest_of(values: Tensor, cell: int) -> Tensor:
    """The largest of each cell of ``[B, rows, keys]``, of fewer rows and keys at the last edges."""
    batch, rows, keys = values.shape
    down, across = min(rows, cell), min(keys, cell)
    if rows % down or keys % across:
        values = F.pad(values, (0, -keys % across, 0, -rows % down), value=-torch.inf)
    cells = values.view(batch, -(-rows // down), down, -(-keys // across), across)
    return cells.amax(dim=2).amax(dim=-1)  # three times faster than both at once


def _mean(weights: Tensor, cell: int) -> Tensor:
    """The mean of each cell of ``[B, rows, keys]``, of fewer rows and keys at the last edges."""
    batch, rows, keys = weights.shape
    padded = F.pad(weights, (0, -keys % cell, 0, -rows % cell))
    cells = padded.view(batch, -(-rows // cell), cell, -(-keys // cell), cell)
    down, across = (
        torch.tensor([min(cell, length - i) for i in range(0, length, cell)], device=weights.device)
        for length in (rows, keys)
    )
    mean: Tensor = cells.sum(dim=(2, 4)) / (down[:, None] * across)
    return mean
