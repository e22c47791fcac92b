"""Rules that change the scores of the next token before one is chosen.

Every rule is a function of a batch: the tokens that each row holds so far, and the rows' scores
``[N, V]`` (logits where tokens are drawn one by one, log-probabilities in beam search). Rules run
in the order of ``rules_of``, which is the order of Hugging Face's ``generate``.

Shape letters: N rows (sentences × beams), V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.generation.decoding.options import GenerationOptions

NEVER = -math.inf


@dataclass(frozen=True)
class Rows:
    """What the rows of a batch hold.

    Attributes:
        ids: Each row's tokens so far, those of its prompt included.
        new: How many of them were generated; the same number in all rows.
        prompts: Tokens of each row's prompt.
        sources: Each row's source tokens, of an encoder-decoder; of a decoder its prompt, as in
            transformers.
    """

    ids: Sequence[Sequence[int]]
    new: int
    prompts: Sequence[int]
    sources: Sequence[Sequence[int]] = ()


Rule = Callable[[Rows, Tensor], Tensor]


def rules_of(options: GenerationOptions, stop_ids: Sequence[int], most: int) -> list[Rule]:
    """The rules that some options ask for, in order.

    Args:
        options: What is asked for.
        stop_ids: Tokens that end a text.
        most: New tokens at most; the last of them may be forced to be a stop.
    """
    o, stops = options, list(stop_ids)
    rules: list[Rule] = []
    if o.encoder_repetition_penalty != 1.0:
        rules.append(_penalised(1 / o.encoder_repetition_penalty, of_source=True))
    if o.repetition_penalty != 1.0:
        rules.append(_penalised(float(o.repetition_penalty), of_source=False))
    if o.no_repeat_ngram_size:
        rules.append(_no_repeats(o.no_repeat_ngram_size, of_source=False))
    if o.encoder_no_repeat_ngram_size:
        rules.append(_no_repeats(o.encoder_no_repeat_ngram_size, of_source=True))
    if o.bad_words_ids:
        bad = [words for words in o.bad_words_ids if [*words] not in [[stop] for stop in stops]]
        rules.append(_without_words(bad))
    if stops and (o.min_length or o.min_new_tokens):
        least = 0 if o.min_new_tokens else o.min_length
        rules.append(_not_before(stops, least, o.min_new_tokens))
    if o.forced_bos_token_id is not None:
        rules.append(_forced_first(o.forced_bos_token_id))
    if o.forced_eos_token_ids:
        rules.append(_forced_last(o.forced_eos_token_ids, most))
    if o.remove_invalid_values:
        rules.append(lambda rows, scores: torch.nan_to_num(scores, nan=0.0))
    if o.exponential_decay_length_penalty is not None and stops:
        rules.append(_pressed_to_stop(stops, *o.exponential_decay_length_penalty))
    if o.suppress_tokens:
        rules.append(_suppressed(o.suppress_tokens))
    if o.begin_suppress_tokens:
        rules.append(_suppressed_first(o.begin_suppress_tokens, o.forced_bos_token_id))
    return rules


def _penalised(penalty: float, *, of_source: bool) -> Rule:
    """Scores of tokens that are there already, divided (or multiplied, below 0) by a penalty.

    Keskar et al. 2019, §4.1.
    """

    def rule(rows: Rows, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in zip(scores, rows.sources if of_source else rows.ids, strict=True):
            seen = _within(ids, row.numel(), row.device)
            values = row[seen]
            row[seen] = torch.where(values < 0, values * penalty, values / penalty)
        return scores

    return rule


def _within(ids: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """The distinct tokens that have a score."""
    return torch.tensor(sorted({i for i in ids if i < vocab_size}), device=device, dtype=torch.long)


def _no_repeats(size: int, *, of_source: bool) -> Rule:
    """Forbids an n-gram that a row (or its source) already has."""

    def rule(rows: Rows, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for n, (row, ids) in enumerate(zip(scores, rows.ids, strict=True)):
            text = [*(rows.sources[n] if of_source else ids)]
            if len(ids) < size - 1:
                continue
            begun = [*ids[len(ids) - size + 1 :]]
            last = len(text) - size + 1
            banned = [text[i + size - 1] for i in range(last) if text[i : i + size - 1] == begun]
            row[_within(banned, row.numel(), row.device)] = NEVER
        return scores

    return rule


def _without_words(words: Sequence[Sequence[int]]) -> Rule:
    """Forbids the last token of a word whose other tokens are there."""

    def rule(rows: Rows, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in zip(scores, rows.ids, strict=True):
            for word in words:
                before = len(word) - 1
                if not before or [*ids[-before:]] == [*word[:-1]]:
                    row[word[-1]] = NEVER
        return scores

    return rule


def _not_before(stops: Sequence[int], length: int, new_tokens: int) -> Rule:
    """Forbids stop tokens before ``length`` tokens, or ``new_tokens`` new ones."""

    def rule(rows: Rows, scores: Tensor) -> Tensor:
        short = [len(ids) < length or rows.new < new_tokens for ids in rows.ids]
        if not any(short):
            return scores
        hidden = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        here = [stop for stop in stops if 0 <= stop < scores.shape[-1]]
        hidden[:, here] = torch.tensor(short, device=scores.device)[:, None]
        return scores.masked_fill(hidden, NEVER)

    return rule


def _forced_first(token: int) -> Rule:
    """Forces the second token of a row, after a decoder's start token."""
    return lambda rows, scores: _only_in(scores, [len(ids) == 1 for ids in rows.ids], [token])


def _forced_last(tokens: Sequence[int], most: int) -> Rule:
    """Forces the last token that there is room for."""
    return lambda rows, scores: _only(scores, tokens) if rows.new == most - 1 else scores


def _only_in(scores: Tensor, chosen: Sequence[bool], tokens: Sequence[int]) -> Tensor:
    if not any(chosen):
        return scores
    here = torch.tensor(chosen, device=scores.device)[:, None]
    return torch.where(here, _only(scores, tokens), scores)


def _only(scores: Tensor, tokens: Sequence[int]) -> Tensor:
    forced = torch.full_like(scores, NEVER)
    forced[:, [*tokens]] = 0.0
    return forced


def _pressed_to_stop(stops: Sequence[int], start: int, factor: float) -> Rule:
    """Stops become likelier, exponentially from ``start`` new tokens on."""

    def rule(rows: Rows, scores: Tensor) -> Tensor:
        if rows.new <= start:
            return scores
        here = [stop for stop in stops if 0 <= stop < scores.shape[-1]]
        values = scores[:, here]
        growth = torch.tensor(float(factor), dtype=torch.float64, device="cpu") ** (
            rows.new - start
        )  # or infinity
        more = values.abs() * (growth.to(values) - 1)
        pressed = scores.clone()
        pressed[:, here] = values + more.masked_fill(~values.isfinite(), 0.0)
        return pressed

    return rule


def _suppressed(tokens: Sequence[int]) -> Rule:
    def rule(rows: Rows, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, [*tokens]] = NEVER
        return scores

    return rule


def _suppressed_first(tokens: Sequence[int], forced_first: int | None) -> Rule:
    """Forbids ``tokens`` as the first new token; after a forced first token, as the second."""

    def rule(rows: Rows, scores: Tensor) -> Tensor:
        first = 0 if forced_first is None else 1
        scores = scores.clone()
        for row, prompt in zip(scores, rows.prompts, strict=True):
            if rows.new == (first if prompt == 1 else 0):
                row[[*tokens]] = NEVER
        return scores

    return rule
