"""Statistics of every attention row, streamed over tiles in O(T) memory.

A tile of weights is p = exp(score − lse): with the lse that the kernel saved, no softmax is done
again and tiles can be met in any order. Each statistic is a sum or a maximum over the keys of a
row, so it grows tile by tile and the T×S matrix never exists.

    entropy           −Σ p log p, in nats; a sink is one more key
    effective_keys    1 / Σ p², the number of equal weights with this Σ p² (Hill 1973, order 2)
    max_weight        the largest weight, and max_key, the index of its key (−1: nothing seen)
    top_weights       the k largest weights in order, and top_keys, their keys
    first_token       weight on the token at position 0
    previous_token    weight on the token one position before the query
    self              weight on the query's own position
    duplicate         weight on earlier copies of the query's token
    induction         weight on the tokens that followed earlier copies of the query's token (the
                      prefix matching score of Olsson et al. 2022)
    mean_distance     Σ p |query position − key position|, in tokens
    document_mass     weight on each document
    received          Σ over queries of the weight on each key

Letters: B batch, H query heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.errors import InputError
from polyhead.inspection.kept import KeptCall, positions_of
from polyhead.native import TileSums, code_for
from polyhead.semantics import Tokens, Visibility
from polyhead.semantics.scores import accumulation_dtype
from polyhead.semantics.tokens import Span, distance


@dataclass(frozen=True)
class Statistic:
    """What one statistic is. Pages say it in words: the texts ``stat.SUMMARY`` and its ``.help``.

    Attributes:
        name: As ``measure`` calls it.
        unit: What it is counted in: ``"nats"``, ``"keys"``, ``"tokens"``, ``"share"`` from 0 to 1,
            or ``"key"``, the index of one.
        needs: ``"weights"`` alone, ``"positions"`` that queries and keys share, the ``"tokens"`` or
            the ``"documents"``.
        summary: Its mean over queries in ``HeadSummary`` and on pages; empty where there is none.
        native: The sum of ``native.TileSums`` that makes it in compiled code; empty: torch does.
    """

    name: str
    unit: str
    needs: str = "weights"
    summary: str = ""
    native: str = ""

    @property
    def one_sequence(self) -> bool:
        """Whether queries and keys must be of one sequence, as those of cross-attention are not."""
        return self.needs in ("positions", "tokens")


TABLE = (
    Statistic("entropy", "nats", summary="entropy", native="entropy"),
    Statistic("effective_keys", "keys", summary="effective_keys", native="squares"),
    Statistic("first_token", "share", summary="first_token"),
    Statistic("previous_token", "share", "positions", "previous_token"),
    Statistic("self", "share", "positions", "self_token"),
    Statistic("max_weight", "share", summary="max_weight", native="largest"),
    Statistic("max_key", "key", native="largest"),
    Statistic("mean_distance", "tokens", "positions", "mean_distance"),
    Statistic("duplicate", "share", "tokens", "duplicate"),
    Statistic("induction", "share", "tokens", "induction"),
    Statistic("top_weights", "share", native="top"),
    Statistic("top_keys", "key", native="top"),
    Statistic("document_mass", "share", "documents"),
    Statistic("received", "share", native="received"),
)
"""All statistics, in the order in which they are shown."""

_LISTS = ("top_weights", "top_keys", "document_mass", "received")
"""Those that are more than one number per row."""

SUMMARIES = tuple(statistic for statistic in TABLE if statistic.summary)
"""Those that a head has one number of, its mean over queries."""

STATISTICS = tuple(statistic.name for statistic in TABLE)

TOKEN_STATISTICS = tuple(statistic.name for statistic in TABLE if statistic.needs == "tokens")
"""One number per row that needs the token ids."""

ROW_STATISTICS = tuple(name for name in STATISTICS if name not in (*_LISTS, *TOKEN_STATISTICS))
"""One number per row that needs nothing but the weights and positions."""

ROWS_PER_TILE, KEYS_PER_TILE = 512, 1024
"""Half a million weights at a time, 2 MiB in float32: they stay in a CPU's cache."""

_NEAR = 1 << 20
"""Spans longer than this hold a token that stands nowhere (``caches.source.NOWHERE``)."""


@torch.no_grad()
def measure(call: KeptCall, names: Collection[str], top_k: int = 8) -> dict[str, Tensor]:
    """Some statistics of all rows of a call, in one pass over its tiles.

    Args:
        call: What was kept of the attention.
        names: From ``STATISTICS``.
        top_k: Weights per row of ``top_weights``; fewer where there are fewer keys.

    Returns:
        Row statistics ``[B, H, T]`` in float32 (float64 for float64), 0 for a query that sees
        nothing; ``max_key`` in int64; ``top_weights`` and ``top_keys`` ``[B, H, T, k]``, −1 for
        the key of a weight 0; ``document_mass`` ``[B, H, T, documents]``; ``received``
        ``[B, H, S]``.

    Raises:
        InputError: An unknown name, or one that needs token ids or documents which the call lacks.
    """
    _check(call, names)
    return _Measurement(call, names, top_k).run()


def tile_size(call: KeptCall) -> tuple[int, int]:
    """Queries and keys of a tile: fewer of both where a batch is large."""
    batch = max(1, call.q.shape[0])
    rows = max(16, ROWS_PER_TILE // batch)
    return rows, max(64, ROWS_PER_TILE * KEYS_PER_TILE // (rows * batch))


def tiles_seen(call: KeptCall, rows: Tokens, tiles: list[Tokens]) -> Iterator[tuple[Tokens, bool]]:
    """The tiles of which some row sees something, and whether every row sees all of it."""
    for tile in tiles:
        mask = call.spec.mask
        kind = Visibility.ALL if mask is None else mask.classify(rows, tile)
        if kind is not Visibility.NONE:
            yield tile, kind is Visibility.ALL and call.spec.bias is None


def _check(call: KeptCall, names: Collection[str]) -> None:
    for name in names:
        if name not in STATISTICS:
            raise InputError(f"statistics are {', '.join(STATISTICS)}: got {name!r}")
        if name in TOKEN_STATISTICS and call.ids is None:
            raise InputError(
                f"{name} needs the tokens: probe a model that takes ids, or pass "
                "probe(model, ids=…) with those of the whole sequence"
            )
        if name == "document_mass" and call.documents is None:
            raise InputError(
                "document_mass needs documents: a Documents mask in the call, or "
                "probe(model, documents=…)"
            )


class _Measurement:
    """The running sums of one pass."""

    def __init__(self, call: KeptCall, names: Collection[str], top_k: int) -> None:
        self.call, self.names = call, set(names)
        self.precise = accumulation_dtype(call.q.dtype)
        batch, heads, queries, _ = call.q.shape
        keys = call.k_tokens.length
        rows, columns = tile_size(call)
        # One memory for the weights of all tiles: a fresh one each time costs page faults.
        self.scratch = call.q.new_empty(batch * rows * columns, dtype=self.precise)
        shape = (batch, heads, queries)
        self.found: dict[str, Tensor] = {}
        for name in (*ROW_STATISTICS, *TOKEN_STATISTICS):
            if name in self.names:
                self.found[name] = call.q.new_zeros(shape, dtype=self.precise)
        if "max_key" in self.names or "max_weight" in self.names:
            self.found["max_weight"] = call.q.new_zeros(shape, dtype=self.precise)
            self.found["max_key"] = call.q.new_full(shape, -1, dtype=torch.int64)
        if self.names & {"top_weights", "top_keys"}:
            top = (*shape, min(top_k, keys))
            self.found["top_weights"] = call.q.new_zeros(top, dtype=self.precise)
            self.found["top_keys"] = call.q.new_full(top, -1, dtype=torch.int64)
        if "received" in self.names:
            self.found["received"] = call.q.new_zeros(batch, heads, keys, dtype=self.precise)
        self.indicators: Tensor | None = None
        if "document_mass" in self.names and call.documents is not None:
            self.indicators = _indicators(call).to(self.precise)
            many = self.indicators.shape[-1]
            self.found["document_mass"] = call.q.new_zeros(*shape, many, dtype=self.precise)

    def run(self) -> dict[str, Tensor]:
        call = self.call
        row_size, key_size = tile_size(call)
        tiles = call.k_tokens.split(key_size)
        for rows in call.q_tokens.split(row_size):
            for tile, all_seen in tiles_seen(call, rows, tiles):
                relations = self._relations(rows, tile)
                for head in range(call.q.shape[1]):
                    self._add(head, rows, tile, all_seen, relations)
        self._add_sinks()
        if "effective_keys" in self.found:
            squares = self.found["effective_keys"]
            self.found["effective_keys"] = torch.where(squares > 0, 1.0 / squares, 0.0)
        return {name: values for name, values in self.found.items() if name in self.names}

    def _add(
        self,
        head: int,
        rows: Tokens,
        tile: Tokens,
        all_seen: bool,
        relations: dict[str, tuple[Tensor, ...]],
    ) -> None:
        """Adds one head's weights on one tile to every sum."""
        part = slice(rows.start, rows.start + rows.length)
        logs = self.call.log_weights(head, rows, tile)[:, 0]
        native = code_for(logs)
        if native is not None and logs.dtype is torch.float32 and logs.is_contiguous():
            weights = logs
            native.weigh(weights, tile.start, self._sums(head, part, tile))
        else:
            weights = self._sum(head, part, tile, logs, all_seen)
        found = self.found
        if "mean_distance" in found:
            found["mean_distance"][:, head, part] += _distances(weights, rows, tile)
        if self.indicators is not None:
            columns = self.indicators[:, tile.start : tile.start + tile.length]
            found["document_mass"][:, head, part] += weights @ columns
        for name, (batch, row, key) in relations.items():
            sums = found[name][:, head, part]
            sums.index_put_((batch, row), weights[batch, row, key], accumulate=True)

    def _sums(self, head: int, part: slice, tile: Tokens) -> TileSums:
        """What native code adds to in its pass over a tile."""

        def rows_of(name: str) -> Tensor | None:
            return self.found[name][:, head, part] if name in self.found else None

        def both(name: str, other: str) -> tuple[Tensor, Tensor] | None:
            first, second = rows_of(name), rows_of(other)
            return None if first is None or second is None else (first, second)

        received = self.found.get("received")
        keys = slice(tile.start, tile.start + tile.length)
        return TileSums(
            entropy=rows_of("entropy"),
            squares=rows_of("effective_keys"),
            largest=both("max_weight", "max_key"),
            top=both("top_weights", "top_keys"),
            received=None if received is None else received[:, head, keys],
        )

    def _sum(self, head: int, part: slice, tile: Tokens, logs: Tensor, all_seen: bool) -> Tensor:
        """The weights of a tile, and what ``Code.weigh`` would add, by torch's operations."""
        weights = torch.exp(logs, out=self.scratch[: logs.numel()].view(logs.shape))
        found = self.found
        if "entropy" in found:
            # 0 · −∞ is NaN; e^−1e4 is 0 as well.
            logs = logs if all_seen else logs.clamp_(min=-1e4)
            found["entropy"][:, head, part] -= torch.linalg.vecdot(logs, weights)
        if "effective_keys" in found:
            found["effective_keys"][:, head, part] += torch.linalg.vecdot(weights, weights)
        if "max_weight" in found:
            largest, key = weights.max(dim=-1)
            best, best_key = found["max_weight"][:, head, part], found["max_key"][:, head, part]
            better = largest > best
            best_key.copy_(torch.where(better, key + tile.start, best_key))
            best.copy_(torch.maximum(best, largest))  # keeps NaN, which is not better
        if "top_weights" in found:
            self._add_top(head, part, weights, tile)
        if "received" in found:
            keys = slice(tile.start, tile.start + tile.length)
            found["received"][:, head, keys] += weights.sum(dim=1)
        return weights

    def _add_top(self, head: int, part: slice, weights: Tensor, tile: Tokens) -> None:
        best = self.found["top_weights"][:, head, part]
        best_keys = self.found["top_keys"][:, head, part]
        # Few rows of a later tile have anything among their largest; NaN is not less either.
        rows = ~(weights.amax(dim=-1) <= best[..., -1])
        if 2 * int(rows.sum()) > rows.numel():
            _merge_top(best, best_keys, weights, tile)
        else:
            values, keys = best[rows], best_keys[rows]
            _merge_top(values, keys, weights[rows], tile)
            best[rows], best_keys[rows] = values, keys

    def _relations(self, rows: Tokens, tile: Tokens) -> dict[str, tuple[Tensor, ...]]:
        """For each statistic that is the weight on related keys: the pairs of this tile.

        Pairs are few (a diagonal, a column, the copies of a token), so picking them costs less
        than multiplying the tile by a mask, for each head.
        """
        nearest, farthest = _distance_range(rows, tile)
        possible = {
            "first_token": tile.span is None or tile.span.low <= 0 <= tile.span.high,
            "previous_token": nearest <= 1 <= farthest,
            "self": nearest <= 0 <= farthest,
        }
        wanted = [name for name, can_be in possible.items() if can_be and name in self.found]
        tokens = [name for name in TOKEN_STATISTICS if name in self.found]
        if not wanted and not tokens:
            return {}
        call = self.call
        device = call.q.device
        apart = distance(rows, tile, device)[:, 0]
        related = {}
        if "first_token" in wanted:
            at_zero = positions_of(tile, device) == 0
            related["first_token"] = at_zero[:, None].expand(-1, rows.length, -1)
        if "previous_token" in wanted:
            related["previous_token"] = apart == 1
        if "self" in wanted:
            related["self"] = apart == 0
        if call.ids is not None:
            asking = call.ids.queries[:, rows.start : rows.start + rows.length, None]
            part = slice(tile.start, tile.start + tile.length)
            if "duplicate" in tokens:
                same = asking == call.ids.keys[:, None, part]
                related["duplicate"] = same & (asking >= 0) & (apart > 0)
            if "induction" in tokens:
                same = asking == call.ids.preceding[:, None, part]
                related["induction"] = same & (asking >= 0) & (apart >= 0)
        batch = call.q.shape[0]
        return {
            name: pairs.expand(batch, -1, -1).nonzero(as_tuple=True)
            for name, pairs in related.items()
        }

    def _add_sinks(self) -> None:
        """The sink of a head is one more key, of weight exp(sink − lse)."""
        call = self.call
        if call.spec.sinks is None:
            return
        log_share = call.spec.sinks.to(self.precise)[:, None] - call.lse.to(self.precise)
        share = log_share.exp()
        if "entropy" in self.found:
            self.found["entropy"] -= share * log_share
        if "effective_keys" in self.found:
            self.found["effective_keys"] += share**2


def _merge_top(best: Tensor, keys: Tensor, weights: Tensor, tile: Tokens) -> None:
    """Puts the weights ``[..., S]`` of a tile among the largest so far, ``[..., k]``, in place."""
    most = best.shape[-1]
    new, new_keys = weights.topk(min(most, weights.shape[-1]), dim=-1)
    # A weight of 0 is no key that was looked at, and a masked one may not be named.
    new_keys = (new_keys + tile.start).masked_fill(new == 0, -1)
    values, order = torch.cat([best, new], dim=-1).topk(most, dim=-1)
    best.copy_(values)
    keys.copy_(torch.cat([keys, new_keys], dim=-1).gather(-1, order))


def _indicators(call: KeptCall) -> Tensor:
    """``[1 or B, S, documents]`` 1 where the key belongs to the document."""
    if call.documents is None:
        raise InputError("the documents of this call are not known")
    many = max(len(row) for row in call.documents.lengths)
    numbers = call.documents.ids(call.k_tokens, call.q.device)
    return numbers[..., None] == torch.arange(many, device=call.q.device)


def _distance_range(rows: Tokens, tile: Tokens) -> tuple[float, float]:
    """Least and greatest query position minus key position."""
    if rows.span is None or tile.span is None:
        return -torch.inf, torch.inf
    return rows.span.low - tile.span.high, rows.span.high - tile.span.low


def _distances(weights: Tensor, rows: Tokens, tile: Tokens) -> Tensor:
    """Σ p |query position − key position| over the keys of a tile, ``[B, rows]``."""
    nearest, farthest = _distance_range(rows, tile)
    span = tile.span or Span(0, 2 * _NEAR)
    if (nearest < 0 < farthest) or span.high - span.low > _NEAR:
        apart = distance(rows, tile, weights.device)[:, 0].abs()
        return (weights * apart).sum(dim=-1)
    # All keys on one side: two products, both of terms that are not negative.
    edge = span.high if nearest >= 0 else span.low
    device = weights.device
    outer = (rows.position_tensor(device) - edge).abs().to(weights.dtype)
    inner = (tile.position_tensor(device) - edge).abs().to(weights.dtype)
    inner = inner if inner.ndim == 1 else inner[..., None]
    near = weights @ inner
    return outer * weights.sum(dim=-1) + (near if near.ndim == 2 else near[..., 0])
