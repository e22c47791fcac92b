"""Biases by content and distance: what a query, or a key, makes of every distance.

DeBERTa's disentangled attention (He et al. 2021) and Transformer-XL (Dai et al. 2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead.semantics.biases import FARTHEST, Bias
from polyhead.semantics.pairs import PairExpr, QueryKeyPairs, Tile
from polyhead.semantics.tokens import Tokens


class RelativeContentBias(
    Bias,
    arguments={
        "of_query": Tensor | None,
        "of_key": Tensor | None,
        "max_distance": int | None,
        "nearest": int | None,
    },
):
    """A number of the query for every distance, and one of the key.

        bias_bhij = of_query_bhin + of_key_bhjn        n = column(i − j)

    i and j are positions of the query and the key. Of n columns one is distance 0, those behind it
    are of keys ever farther back, and the first and the last also stand for all that lie beyond.
    DeBERTa's tables are q_i · (r_n Wk) and k_j · (r_n Wq) of embeddings r_n, Transformer-XL's is
    (q_i + v) · (r_n Wr).

    Args:
        of_query: ``[1 or B, 1 or H, T, n]``, a row of each of the call's queries; None: no term.
        of_key: ``[1 or B, 1 or H, S, n]``, a row of each of the call's keys; None: no term.
        max_distance: None: a column for every distance. Else, as DeBERTa-v2 has it, distances
            beyond n / 4 share columns, ever more of them up to max_distance − 1, where the
            columns of one side end.
        nearest: The column of distance 0; None: the middle one, n // 2.

    Raises:
        ValueError: No table, tables of other shapes or numbers of columns, a max_distance that
            leaves no distance to share or stands beside ``nearest``, or no such column.
    """

    def __init__(
        self,
        of_query: Tensor | None = None,
        of_key: Tensor | None = None,
        *,
        max_distance: int | None = None,
        nearest: int | None = None,
    ) -> None:
        self.of_query, self.of_key, self.max_distance = of_query, of_key, max_distance
        self.nearest = nearest
        if not self.tensors:
            raise ValueError("RelativeContentBias needs of_query, of_key or both: got neither")
        for name, table in (("of_query", of_query), ("of_key", of_key)):
            if table is not None and (table.ndim != 4 or not table.is_floating_point()):
                raise ValueError(
                    f"RelativeContentBias {name} must be floating point of shape [B, H, tokens, "
                    f"n]: got {table.dtype} of shape {list(table.shape)}"
                )
        columns = {table.shape[-1] for table in self.tensors}
        if len(columns) > 1 or 0 in columns:
            raise ValueError(
                "RelativeContentBias tables must have the same number of columns, at least 1: got "
                f"{[list(table.shape) for table in self.tensors]}"
            )
        self.columns: int = columns.pop()
        exact, rest = divmod(self.columns, 4)
        if max_distance is not None and (rest or not exact + 1 < max_distance <= FARTHEST):
            raise ValueError(
                "RelativeContentBias needs n a multiple of 4 and max_distance from n / 4 + 2 to "
                f"{FARTHEST}: got n={self.columns}, max_distance={max_distance}"
            )
        if nearest is not None and (max_distance is not None or not 0 <= nearest < self.columns):
            raise ValueError(
                f"RelativeContentBias nearest must be a column, 0 to {self.columns - 1}, without "
                f"max_distance: got nearest={nearest}, max_distance={max_distance}"
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.of_query, self.of_key) if x is not None)

    def with_tensors(self, tensors: Sequence[Tensor]) -> RelativeContentBias:
        given = iter(tensors)
        tables = [None if x is None else next(given) for x in (self.of_query, self.of_key)]
        return type(self)(*tables, max_distance=self.max_distance, nearest=self.nearest)

    def of_heads(self, heads: Sequence[int]) -> RelativeContentBias:
        chosen = list(heads)
        return self.with_tensors([x if x.shape[1] == 1 else x[:, chosen] for x in self.tensors])

    def of_tokens(self, queries: slice, keys: slice) -> RelativeContentBias:
        parts = ((self.of_query, queries), (self.of_key, keys))
        return self.with_tensors([x[:, :, part] for x, part in parts if x is not None])

    def by_distance(self, device: torch.device) -> Tensor:
        """``[2 · f + 1]`` the column of the distances −f … f; those beyond have the same."""
        half, far = self.columns // 2, self.max_distance or self.columns
        apart = torch.arange(-far, far + 1, device=device)
        if self.max_distance is not None:
            exact = half // 2
            # In float32 as DeBERTa does: a double would put borderline distances elsewhere.
            precise = torch.float32
            grown = torch.log(apart.abs().clamp(min=exact).to(precise) / exact)
            all_of_it = torch.log(torch.tensor((far - 1) / exact, dtype=precise, device=device))
            shared = torch.ceil(grown / all_of_it * (exact - 1)) + exact
            apart = torch.where(apart.abs() <= exact, apart, (shared * apart.sign()).long())
        return (apart + (half if self.nearest is None else self.nearest)).clamp(0, self.columns - 1)

    def _column(self, of: QueryKeyPairs) -> PairExpr:
        columns = self.by_distance(of.device)[None, None]
        q, k, most = of.q_position, of.k_position, of.number(columns.shape[-1] // 2)
        return of.look_up(
            columns, lambda pair: (q(pair) - k(pair)).clamp(-most(pair), most(pair)) + most(pair)
        )

    def rule(self, of: QueryKeyPairs) -> PairExpr:
        column, dtype = self._column(of), of.dtype
        query = None if self.of_query is None else of.of_query(self.of_query, column)
        key = None if self.of_key is None else of.of_key(self.of_key, column)
        if query is None or key is None:
            one = query or key
            assert one is not None  # the constructor says so
            return lambda pair: one(pair).to(dtype)
        wide = torch.promote_types(dtype, self.tensors[0].dtype)
        return lambda pair: (query(pair).to(wide) + key(pair).to(wide)).to(dtype)

    def add_gradients(self, totals: Sequence[Tensor], scores: Tensor, q: Tokens, k: Tokens) -> None:
        given = iter(totals)
        columns = self._column(Tile(q, k, scores.device))(())
        if self.of_query is not None:
            _add(next(given)[:, :, q.start : q.start + q.length], scores, columns)
        if self.of_key is not None:
            _add(next(given)[:, :, k.start : k.start + k.length], scores.mT, columns.mT)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        for name, table, tokens in (
            ("of_query", self.of_query, queries),
            ("of_key", self.of_key, keys),
        ):
            if table is None:
                continue
            rows, its_heads, length, _ = table.shape
            if rows not in (1, batch) or its_heads not in (1, heads) or length != tokens:
                raise ValueError(
                    f"RelativeContentBias {name} must be [1 or B, 1 or H, tokens, n] with "
                    f"B = {batch}, H = {heads} and {tokens} tokens: got {list(table.shape)}"
                )

    def __repr__(self) -> str:
        tables = (("of_query", self.of_query), ("of_key", self.of_key))
        said = [f"{name}={list(x.shape)}" for name, x in tables if x is not None]
        options = (("max_distance", self.max_distance), ("nearest", self.nearest))
        said += [f"{name}={number}" for name, number in options if number is not None]
        return f"RelativeContentBias({', '.join(said)})"


def _add(total: Tensor, scores: Tensor, columns: Tensor) -> None:
    """Adds gradients of scores ``[B, H, T, S]`` to rows ``[1 or B, 1 or H, T, n]`` by column."""
    rows, heads, tokens, n = total.shape
    rows = max(rows, columns.shape[0])
    scores = scores.sum_to_size(rows, heads, *scores.shape[2:])
    made = scores.new_zeros(rows, heads, tokens, n)
    total += made.scatter_add_(-1, columns.expand(scores.shape), scores).sum_to_size(total.shape)
