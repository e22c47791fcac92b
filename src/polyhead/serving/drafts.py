"""Tokens guessed by a model that is smaller than the engine's: a draft.

It reads what the model reads, in a cache of its own for each row, and guesses the likeliest tokens
one after the other; rows whose tokens are checked in one call are guessed in one call. Guesses that
turn out wrong are rolled back before the next.

Shape letters: R rows, N tokens of all rows, E embed size, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from polyhead.caches import ModelCache
from polyhead.generation import LanguageModel
from polyhead.serving.budget import Budget
from polyhead.serving.guesser import Guesser
from polyhead.serving.pace import PAUSE, Pace
from polyhead.serving.row import Row

SPARE = PAUSE + 8
"""Tokens of a row beyond those of the model's cache: what it lacks, and its guesses."""


@dataclass(eq=False)
class _Group:
    """Rows that are guessed together, and the draft's cache of them."""

    cache: ModelCache
    members: list[_Member]


@dataclass(eq=False)
class _Member:
    """A row as the draft has it."""

    row: Row
    group: _Group
    held: int
    """Tokens of the row that its cache holds."""
    guessed: list[int]
    """Guesses that its cache holds behind them."""

    def settle(self) -> int:
        """Counts guesses that have become the row's tokens; returns how many have not."""
        ids = self.row.all_ids[self.held : self.held + len(self.guessed)]
        right = 0
        while right < len(ids) and ids[right] == self.guessed[right]:
            right += 1
        wrong = len(self.guessed) - right
        self.held, self.guessed = self.held + right, []
        return wrong


class Drafts(Guesser):
    """The guesses of a draft.

    Args:
        model: The model whose tokens are guessed.
        draft: A decoder with the same vocabulary.
        most: Tokens that are guessed of a row at most.
        tokens: Tokens of all its caches together.
        page_size: Tokens of a page.
        share_prefixes: Whether full pages of prompts are kept for later rows.

    Raises:
        TypeError: Something else.
        ValueError: A draft with another vocabulary, or that cannot be computed for many rows.
    """

    def __init__(
        self,
        model: LanguageModel,
        draft: LanguageModel,
        most: int,
        tokens: int,
        page_size: int,
        *,
        share_prefixes: bool,
    ) -> None:
        if not isinstance(draft, LanguageModel):
            raise TypeError(f"draft must be a LanguageModel: got {type(draft).__name__}")
        _check_vocabulary(model, draft)
        self.most, self._draft, self._vocabulary = most, draft.eval(), model.config.num_logits
        self._budget = Budget(
            draft, tokens, page_size, share_prefixes=share_prefixes, overcommit=False
        )
        if self._budget.pool is None:
            raise ValueError(
                "draft must be a model whose layers remember keys and values alone: this one is "
                "computed row by row"
            )
        self._pool, self._context = self._budget.pool, draft.config.max_positions
        self._members: dict[Row, _Member | None] = {}
        self._pace = Pace(_weight_bytes(draft) / _weight_bytes(model))

    @property
    def bytes(self) -> int:  # type: ignore[override]
        return self._budget.bytes

    def read(self, row: Row, hidden: Tensor | None) -> None:
        if row.ended:
            return
        if row not in self._members:
            self._members[row] = self._start(row)
        member = self._members[row]
        if member is None or len(member.group.members) > 1 or row.fed - member.held < PAUSE:
            return
        self._roll_back(member.group)
        self._feed(member.group, [row.all_ids[member.held : row.fed]])
        member.held = row.fed
        self._budget.keep_prefix(row, member.group.cache, 0)

    def _start(self, row: Row) -> _Member | None:
        """A row with a cache of its own; None where there is no room for it."""
        if row.tokens > self._context:
            return None
        found = self._budget.cache_for(row, [each for each, m in self._members.items() if m])
        if found is None:
            return None
        cache, held = found
        group = _Group(cache, [])
        group.members.append(_Member(row, group, held, []))
        return group.members[0]

    def guess(self, rows: Sequence[Row], most: int, room: int) -> list[list[int]]:
        found = [member for row in rows if (member := self._members.get(row)) is not None]
        if not found:
            return [[] for _ in rows]
        longest = max(each.row.length for each in found)
        most = min(most, room // len(found), self._context - longest)
        count = self._pace.tokens(len(rows), max(0, most))
        if count < 1 and all(each.row.length - each.held < PAUSE for each in found):
            return [[] for _ in rows]
        group = self._joined(found)
        self._roll_back(group)
        ids = [member.row.all_ids[member.held :] for member in group.members]
        guesses: list[list[int]] = [[] for _ in ids]
        hidden = self._feed(group, ids)
        for number in range(count):
            best = self._likeliest(hidden)
            for guess, token in zip(guesses, best, strict=True):
                guess.append(token)
            if number + 1 < count:
                hidden = self._feed(group, [[token] for token in best])
        for member, guess in zip(group.members, guesses, strict=True):
            member.held, member.guessed = member.row.length, guess[:-1]
        made = {member.row: guess for member, guess in zip(group.members, guesses, strict=True)}
        return [made.get(row, []) for row in rows]

    def _joined(self, found: Sequence[_Member]) -> _Group:
        """The group that has these rows and no others."""
        group, *others = dict.fromkeys(member.group for member in found)
        for other in others:
            self._pool.join(group.cache, other.cache)
            group.members += other.members
            for member in other.members:
                member.group = group
        assert len(group.members) == len(found)
        return group

    def _roll_back(self, group: _Group) -> None:
        """Forgets the guesses that did not become tokens."""
        wrong = [member.settle() for member in group.members]
        if any(wrong):
            group.cache.rollback(wrong)

    def _feed(self, group: _Group, ids: Sequence[Sequence[int]]) -> Tensor:
        """Reads tokens of all rows of a group; hidden states ``[R, E]`` of the last of each."""
        transformer, counts = self._draft.transformer, [*map(len, ids)]
        if len(ids) == 1 or max(counts) == 1:
            tokens = torch.tensor(ids, device="cpu")
            return transformer.hidden_states(tokens, cache=group.cache, last=1)[:, 0]
        tokens = torch.tensor([[token for row in ids for token in row]], device="cpu")
        hidden = transformer.hidden_states(tokens, cache=group.cache, counts=counts)
        return hidden[0, [end - 1 for end in accumulate(counts)]]

    def _likeliest(self, hidden: Tensor) -> list[int]:
        logits = self._draft.transformer.logits(hidden[:, None])[:, 0, : self._vocabulary]
        best: list[int] = logits.argmax(dim=-1).tolist()
        return best

    def count(self, row: Row, guessed: int, accepted: int) -> None:
        if guessed:
            self._pace.count(guessed, accepted)

    def drop(self, rows: Sequence[Row]) -> None:
        for row in rows:
            member = self._members.pop(row, None)
            if member is None:
                continue
            group = member.group
            place = group.members.index(member)
            del group.members[place]
            if group.members:
                kept = [each for each in range(len(group.members) + 1) if each != place]
                group.cache.reorder(kept)
            else:
                group.cache.reset()

    def forget_prefixes(self) -> None:
        self._budget.forget_prefixes()


def _weight_bytes(model: LanguageModel) -> float:
    module: Any = model.transformer
    return float(sum(x.nbytes for x in (*module.parameters(), *module.buffers())))


def _check_vocabulary(model: LanguageModel, draft: LanguageModel) -> None:
    ours, theirs = model.tokenizer.vocabulary, draft.tokenizer.vocabulary
    if ours != theirs:
        token = min({*ours.items()} ^ {*theirs.items()}, key=lambda each: (each[1], each[0]))[0]
        raise ValueError(
            f"draft must have the model's vocabulary: token {token!r} is {theirs.get(token)} in "
            f"the draft and {ours.get(token)} in the model"
        )
