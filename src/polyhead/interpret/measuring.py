"""Statistics of every attention row, streamed over tiles in O(T) memory.

A tile of weights is p = exp(score − lse): the kernel saved lse, so softmax is not repeated and
tiles may come in any order. Each statistic is a sum or a maximum over the keys of a row, so it is
updated tile by tile and the T×S matrix never exists. ``statistics.py`` defines them.

Letters: B batch, H query heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import InputError
from polyhead.interpret.kept import KeptCall, positions_of
from polyhead.interpret.statistics import OF_TOKENS, TABLE
from polyhead.native import TileSums, code_for
from polyhead.semantics import Tokens, Visibility
from polyhead.semantics.scores import accumulation_dtype
from polyhead.semantics.state import sinks_of_rows
from polyhead.semantics.tokens import Span, distance

ROWS_PER_TILE, KEYS_PER_TILE = 512, 1024
"""Half a million weights at a time, 2 MiB in float32: they stay in a CPU's cache."""

DEVICE_ROWS, DEVICE_KEYS = 2048, 8192
"""On other devices 64 MiB: fewer launches."""

_NEAR = 1 << 20
"""Spans longer than this hold a token that stands nowhere (``caches.source.NO_POSITION``)."""


@torch.no_grad()
def measure(call: KeptCall, names: Collection[str], top_k: int = 8) -> dict[str, Tensor]:
    """Some statistics of all rows of a call, in one pass over its tiles.

    Args:
        call: What was kept of the attention.
        top_k: Weights per row of ``top_weights``; fewer where there are fewer keys.

    Returns:
        Each by its name, of the shape that ``TABLE`` states.

    Raises:
        InputError: An unknown name, or one that needs token ids or documents which the call lacks.
    """
    _check(call, names)
    return _Measurement(call, names, top_k).run()


def tile_size(call: KeptCall) -> tuple[int, int]:
    """Queries and keys of a tile: fewer of both where a batch is large."""
    most, keys = (ROWS_PER_TILE, KEYS_PER_TILE) if _is_near(call) else (DEVICE_ROWS, DEVICE_KEYS)
    batch = max(1, call.q.shape[0])
    rows = max(16, most // batch)
    return rows, max(64, most * keys // (rows * batch))


def tiles_seen(call: KeptCall, rows: Tokens, tiles: list[Tokens]) -> Iterator[tuple[Tokens, bool]]:
    """The tiles of which some row sees something, and whether every row sees all of it."""
    for tile in tiles:
        mask = call.spec.mask
        kind = Visibility.ALL if mask is None else mask.classify(rows, tile)
        if kind is not Visibility.NONE:
            yield tile, kind is Visibility.ALL and call.spec.bias is None


def _is_near(call: KeptCall) -> bool:
    """Whether counting something on the device of a call waits for nothing."""
    return call.q.is_cpu


def _check(call: KeptCall, names: Collection[str]) -> None:
    for name in names:
        if name not in TABLE:
            raise InputError(f"statistics are {', '.join(TABLE)}: got {name!r}")
        if TABLE[name].needs == "tokens" and call.ids is None:
            raise InputError(
                f"{name} needs the tokens: probe a model that takes ids, or pass "
                "probe(model, ids=…) with those of the whole sequence"
            )
        if TABLE[name].needs == "documents" and call.documents is None:
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
        self.indicators: Tensor | None = None
        if "document_mass" in self.names:
            self.indicators = _indicators(call).to(self.precise)
        many = 0 if self.indicators is None else self.indicators.shape[-1]
        sizes = {"B": batch, "H": heads, "T": queries, "S": keys, "k": min(top_k, keys), "N": many}
        together = {TABLE[name].native for name in self.names} - {""}
        made = [each for each in TABLE.values() if each.name in names or each.native in together]
        self.native = [each for each in made if each.native]
        self.found: dict[str, Tensor] = {}
        for each in made:
            shape = [sizes[letter] for letter in each.shape]
            if each.unit == "key":
                self.found[each.name] = call.q.new_full(shape, -1, dtype=torch.int64)
            else:
                self.found[each.name] = call.q.new_zeros(shape, dtype=self.precise)

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
        relations: Mapping[str, Tensor | tuple[Tensor, ...]],
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
        for name, pairs in relations.items():
            sums = found[name][:, head, part]
            if isinstance(pairs, Tensor):
                sums += weights.masked_fill(~pairs, 0.0).sum(dim=-1)
            else:
                batch, row, key = pairs
                sums.index_put_((batch, row), weights[batch, row, key], accumulate=True)

    def _sums(self, head: int, part: slice, tile: Tokens) -> TileSums:
        """What native code adds to in its pass over a tile."""
        keys = slice(tile.start, tile.start + tile.length)
        sums: dict[str, Any] = {}
        for each in self.native:
            of_tile = self.found[each.name][:, head, part if "T" in each.shape else keys]
            sums[each.native] = (sums[each.native], of_tile) if each.native in sums else of_tile
        return TileSums(**sums)

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
        if not _is_near(self.call):  # counting rows would wait for the device
            _merge_top(best, best_keys, weights, tile)
            return
        # Few rows of a later tile have anything among their largest; NaN is not less either.
        rows = ~(weights.amax(dim=-1) <= best[..., -1])
        if 2 * int(rows.sum()) > rows.numel():
            _merge_top(best, best_keys, weights, tile)
        else:
            values, keys = best[rows], best_keys[rows]
            _merge_top(values, keys, weights[rows], tile)
            best[rows], best_keys[rows] = values, keys

    def _relations(self, rows: Tokens, tile: Tokens) -> Mapping[str, Tensor | tuple[Tensor, ...]]:
        """For each statistic that is the weight on related keys: the pairs of this tile.

        Pairs are few (a diagonal, a column, the copies of a token), so picking them costs less
        than masking the tile, for each head. Other devices mask: to count pairs is to wait.
        """
        nearest, farthest = _distance_range(rows, tile)
        possible = {
            "first_token": tile.span is None or tile.span.low <= 0 <= tile.span.high,
            "previous_token": nearest <= 1 <= farthest,
            "self": nearest <= 0 <= farthest,
        }
        wanted = [name for name, can_be in possible.items() if can_be and name in self.found]
        tokens = [name for name in OF_TOKENS if name in self.found]
        if not wanted and not tokens:
            return {}
        call = self.call
        device = call.q.device
        apart = distance(rows, tile, device)[:, 0]
        related: dict[str, Tensor] = {}
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
        if not _is_near(call):
            return related
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
        log_share = sinks_of_rows(call.spec.sinks).to(self.precise) - call.lse.to(self.precise)
        share = log_share.exp()
        if "entropy" in self.found:
            self.found["entropy"] -= share * log_share
        if "effective_keys" in self.found:
            self.found["effective_keys"] += share**2


def _merge_top(best: Tensor, keys: Tensor, weights: Tensor, tile: Tokens) -> None:
    """Puts the weights ``[..., S]`` of a tile among the largest so far, ``[..., k]``, in place."""
    most = best.shape[-1]
    new, new_keys = weights.topk(min(most, weights.shape[-1]), dim=-1)
    # A weight of 0 is not a key that was looked at, and a masked one may not be named.
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
