"""Tokens guessed by a draft: a smaller model, or the module of multi-token prediction of the model.

It reads what the model reads, in a cache of its own for each row, and guesses the likeliest tokens
one after the other; rows whose tokens are checked in one call are guessed in one call. Guesses that
turn out wrong are rolled back before the next.

A module of multi-token prediction reads the model's hidden state of a token with the token behind
it. It has no hidden states of a prefix that was read for others, and begins after it. Guesses
beyond its first are made from its own hidden states.

Shape letters: R rows, N tokens of all rows, E embed size, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from polyhead.caches import ModelCache
from polyhead.generation import LanguageModel
from polyhead.models import MultiTokenPredictor, Transformer
from polyhead.serving.budget import Budget
from polyhead.serving.guesser import Guesser
from polyhead.serving.pace import Pace
from polyhead.serving.row import Row

SPARE = 8
"""Tokens of a row beyond those of the model's cache: its guesses."""
KEPT = 512
"""Hidden states that a row keeps while guesses do not pay; then it makes none any more."""
PRODUCT = 0.3
"""Time of a step of a model's size whose weights take no bytes, in steps of the model."""


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
    """Places of the row that its cache holds, or begins behind."""
    guessed: list[int]
    """Guesses that its cache holds behind them."""
    hidden: list[Tensor]
    """The model's hidden states ``[n, E]`` of the places behind them, where they are wanted."""

    def settle(self, keep: bool) -> int:
        """Counts guesses that have become the row's tokens, if ``keep``; returns the others."""
        if not keep:
            wrong, self.guessed = len(self.guessed), []
            return wrong
        ids = self.row.all_ids[self.held : self.held + len(self.guessed)]
        right = 0
        while right < len(ids) and ids[right] == self.guessed[right]:
            right += 1
        wrong = len(self.guessed) - right
        self.held, self.guessed = self.held + right, []
        return wrong


class _DraftBudget(Budget):
    """The budget of a draft: rows may lack tokens there, and have guesses behind their own."""

    def __init__(
        self,
        draft: LanguageModel | MultiTokenPredictor,
        tokens: int,
        page_size: int,
        members: Mapping[Row, _Member | None],
        *,
        share_prefixes: bool,
    ) -> None:
        super().__init__(draft, tokens, page_size, share_prefixes=share_prefixes, overcommit=False)
        self._members = members

    def _wanted(self, row: Row) -> int:
        return row.tokens + SPARE

    def _held(self, row: Row) -> int:
        member = self._members[row]
        return 0 if member is None else member.held


class Drafts(Guesser):
    """The guesses of a draft.

    Args:
        model: The model whose tokens are guessed.
        draft: A decoder with the same vocabulary, or the model's module of multi-token prediction.
        most: Tokens that are guessed of a row at most.
        tokens: Tokens of all its caches together.
        page_size: Tokens of a page.
        share_prefixes: Whether full pages of prompts are kept for later rows.

    Raises:
        TypeError: Something else.
        ValueError: A draft with another vocabulary, of another model, or that cannot be computed
            for many rows.
    """

    def __init__(
        self,
        model: LanguageModel,
        draft: LanguageModel | MultiTokenPredictor,
        most: int,
        tokens: int,
        page_size: int,
        *,
        share_prefixes: bool,
    ) -> None:
        self._steps: Transformer | MultiTokenPredictor
        if isinstance(draft, MultiTokenPredictor):
            if draft.model is not model.transformer:
                raise ValueError("draft must be a predictor of the engine's own model")
            self._steps, share_prefixes = draft.eval(), False
        elif isinstance(draft, LanguageModel):
            _check_vocabulary(model, draft)
            self._steps = draft.eval().transformer
        else:
            raise TypeError(
                f"draft must be a LanguageModel or a MultiTokenPredictor: got "
                f"{type(draft).__name__}"
            )
        self.most, self.wants_hidden = most, isinstance(draft, MultiTokenPredictor)
        self._members: dict[Row, _Member | None] = {}
        self._budget = _DraftBudget(
            draft, tokens, page_size, self._members, share_prefixes=share_prefixes
        )
        if self._budget.pool is None:
            raise ValueError(
                "draft must be a model whose layers remember keys and values alone: this one is "
                "computed row by row"
            )
        self._pool, self._context = self._budget.pool, draft.config.max_positions
        self._vocabulary = model.config.num_logits
        self._pace = Pace(_cost(model, draft))

    @property
    def bytes(self) -> int:
        return self._budget.bytes

    def read(self, row: Row, hidden: Tensor) -> None:
        if row.ended:
            return
        if row not in self._members:
            self._members[row] = self._start(row, len(hidden))
        member = self._members[row]
        if member is None:
            return
        if self.wants_hidden:
            member.hidden.append(hidden)
        end = row.fed - int(self.wants_hidden)  # the next guess has something left to read
        if not row.reads:
            if self.wants_hidden and end - member.held > KEPT:
                self.drop([row])
                self._members[row] = None
            return
        if end <= member.held:
            return
        self._roll_back(member.group)
        self._feed(member.group, *self._inputs(member.group, [end]))
        self._budget.keep_prefix(row, member.group.cache, 0)

    def _start(self, row: Row, read: int) -> _Member | None:
        """A row with a cache of its own; None where there is no room for it.

        Args:
            row: It.
            read: Tokens whose hidden states are there.
        """
        if row.tokens > self._context:
            return None
        found = self._budget.cache_for(row, [each for each, m in self._members.items() if m])
        if found is None:
            return None
        cache, held = found
        group = _Group(cache, [])
        member = _Member(row, group, row.fed - read if self.wants_hidden else held, [], [])
        group.members.append(member)
        return member

    def guess(self, rows: Sequence[Row], most: int, room: int) -> list[list[int]]:
        found = [member for row in rows if (member := self._members.get(row)) is not None]
        if not found:
            return [[] for _ in rows]
        longest = max(each.row.length for each in found)
        most = min(most, room // len(found), self._context - longest)
        count = self._pace.tokens(len(rows), max(0, most))
        if count < 1:
            return [[] for _ in rows]
        group = self._joined(found)
        self._roll_back(group)
        ends = [self._end(member.row) for member in group.members]
        guesses: list[list[int]] = [[] for _ in ends]
        last = self._feed(group, *self._inputs(group, ends))
        for number in range(count):
            best = self._likeliest(last)
            for guess, token in zip(guesses, best, strict=True):
                guess.append(token)
            if number + 1 < count:
                last = self._feed(group, [[token] for token in best], last)
        for member, guess in zip(group.members, guesses, strict=True):
            member.guessed = guess[:-1]
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
        """Forgets the guesses that did not become tokens, or were read with its own states."""
        wrong = [member.settle(not self.wants_hidden) for member in group.members]
        if any(wrong):
            group.cache.rollback(wrong)

    def _end(self, row: Row) -> int:
        """Places of a row that it can read: of its tokens, or of those with a token behind."""
        return row.length - int(self.wants_hidden)

    def _inputs(self, group: _Group, ends: Sequence[int]) -> tuple[list[list[int]], Tensor | None]:
        """What rows lack up to their ends, which then count as held: tokens, and hidden states."""
        ids, hidden, shift = [], [], int(self.wants_hidden)
        for member, end in zip(group.members, ends, strict=True):
            ids.append(member.row.all_ids[member.held + shift : end + shift])
            if self.wants_hidden:
                states, count = torch.cat(member.hidden), end - member.held
                hidden.append(states[:count])
                member.hidden = [states[count:]]
            member.held = end
        return ids, torch.cat(hidden) if hidden else None

    def _feed(self, group: _Group, ids: Sequence[Sequence[int]], hidden: Tensor | None) -> Tensor:
        """Reads tokens of all rows of a group; hidden states ``[R, E]`` of the last of each.

        Args:
            group: The rows.
            ids: Tokens of each.
            hidden: ``[N, E]`` of all of them, one row after the other.
        """
        counts = [*map(len, ids)]
        even = len(ids) == 1 or max(counts) == 1
        tokens = torch.tensor(ids if even else [[t for row in ids for t in row]], device="cpu")
        packed, cache = None if even else counts, group.cache
        if isinstance(self._steps, MultiTokenPredictor):
            assert hidden is not None
            states = hidden.view(*tokens.shape, -1)
            made = self._steps.hidden_states(tokens, states, cache=cache, counts=packed)
        else:
            made = self._steps.hidden_states(tokens, cache=cache, counts=packed)
        return made[:, -1] if even else made[0, [end - 1 for end in accumulate(counts)]]

    def _likeliest(self, hidden: Tensor) -> list[int]:
        logits = self._steps.logits(hidden[:, None])[:, 0, : self._vocabulary]
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


def _cost(model: LanguageModel, draft: LanguageModel | MultiTokenPredictor) -> float:
    """A step of a draft in steps of the model: bytes of weights, the head's included.

    Products take their time too: weights of a few bits count at least as ``PRODUCT``.
    """
    whole, counts = _weight_bytes(model.transformer), model.transformer.parameter_counts()
    if isinstance(draft, LanguageModel):
        share = draft.transformer.parameter_counts().total / counts.total
        return max(_weight_bytes(draft.transformer) / whole, PRODUCT * share)
    config = model.config
    return _weight_bytes(draft) / whole + config.num_logits * config.embed_dim / counts.total


def _weight_bytes(module: nn.Module) -> float:
    return float(sum(x.nbytes for x in (*module.parameters(), *module.buffers())))


def _check_vocabulary(model: LanguageModel, draft: LanguageModel) -> None:
    ours, theirs = model.tokenizer.vocabulary, draft.tokenizer.vocabulary
    if ours != theirs:
        token = min({*ours.items()} ^ {*theirs.items()}, key=lambda each: (each[1], each[0]))[0]
        raise ValueError(
            f"draft must have the model's vocabulary: token {token!r} is {theirs.get(token)} in "
            f"the draft and {ours.get(token)} in the model"
        )
