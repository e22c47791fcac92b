"""The search for texts: one token after the other, drawn or greedy, or several beams side by side.

Beam search keeps the K likeliest beginnings of a text. Each step continues them by every token,
keeps the best K that have not ended, and collects those that have; a text's score is

    Σ log p(token | before) / lengthᵖ                             (Wu et al. 2016, eq. 14)

All sentences of a batch take their steps together; a sentence that is finished leaves the batch.

Shape letters: B sentences, K beams, N = B · K rows, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from polyhead.generation.decoding.logprobs import LogprobRecord, TokenLogprobs, logprobs_of
from polyhead.generation.decoding.options import GenerationOptions
from polyhead.generation.decoding.rules import Rows, Rule
from polyhead.generation.decoding.sampling import NO_TOKEN, Sampler, drawn_each


class Steps(Protocol):
    """A model with a cache, as the search uses it."""

    def start(self) -> Tensor:
        """Logits ``[B, V]`` after the prompts."""
        ...

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Logits ``[N, V]`` after one more token in each row."""
        ...

    def reorder(self, rows: Sequence[int], sentences: Sequence[int]) -> None:
        """Row i becomes what row ``rows[i]`` was, of the sentences that stay; there may be more or
        fewer rows, as many for each sentence, side by side.
        """
        ...


@dataclass(frozen=True)
class Hypothesis:
    """A text.

    Attributes:
        ids: Its new tokens, a stop token included.
        score: Score of beam search; None where tokens are drawn one by one.
        logprobs: One for each token, where they were asked for.
    """

    ids: tuple[int, ...]
    score: float | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass
class _Sentence:
    """A sentence of beam search.

    Attributes:
        beams: New tokens of the running beams.
        scores: Sums of their log-probabilities.
        finished: Texts that have ended, the best first.
        told: Log-probabilities of the tokens of each running beam, if they are asked for.
        improvable: Whether a running beam may still become better than those.
    """

    number: int
    beams: list[tuple[int, ...]]
    scores: Tensor
    told: list[tuple[TokenLogprobs, ...]]
    finished: list[Hypothesis] = field(default_factory=list)
    improvable: bool = True


class BeamSearch:
    """Several beams for each sentence of a batch.

    Args:
        options: ``num_beams`` and what ranks them.
        rules: Applied to log-probabilities.
        stop_ids: Tokens that end a text.
        most: New tokens at most, for all sentences.
        logprobs: As of ``logprobs_of``; None: they are not asked for.
    """

    def __init__(
        self,
        options: GenerationOptions,
        rules: Sequence[Rule],
        stop_ids: frozenset[int],
        most: int,
        logprobs: int | None = None,
    ) -> None:
        self.logprobs = logprobs
        self.options, self.rules, self.stop_ids, self.most = options, rules, stop_ids, most
        self.width = options.num_beams
        self.kept = max(2, 1 + len(stop_ids)) * self.width

    def run(
        self,
        steps: Steps,
        prompts: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]] = (),
    ) -> list[list[Hypothesis]]:
        """The best texts of every prompt, ``num_return_sequences`` each, the best first."""
        sources = sources or prompts
        if self.most < 1:
            nothing = Hypothesis((), 0.0, None if self.logprobs is None else ())
            return [[nothing] * self.options.num_return_sequences for _ in prompts]
        K, sampling = self.width, self.options.sampling
        first = steps.start()
        samplers: list[Sampler | None] = [None] * len(prompts)
        if not sampling.greedy:
            # One for each sentence, so that its text does not depend on its neighbours.
            least = 1 + len(self.stop_ids)
            samplers = [Sampler(sampling, first.device, least=least) for _ in prompts]
        # At first the K beams are equal: only one may continue.
        alone = torch.full((K,), -1e9, dtype=torch.float32, device="cpu")
        alone[0] = 0.0
        running = [_Sentence(b, [()] * K, alone, [()] * K) for b in range(len(prompts))]
        done: list[_Sentence] = []
        logits, new = first.repeat_interleave(K, dim=0), 0
        steps.reorder([b for b in range(len(prompts)) for _ in range(K)], range(len(prompts)))
        while True:
            rows = Rows(
                [[*prompts[s.number], *beam] for s in running for beam in s.beams],
                new,
                [len(prompts[s.number]) for s in running for _ in s.beams],
                [sources[s.number] for s in running for _ in s.beams],
            )
            scores = logits.float().log_softmax(dim=-1)
            for rule in self.rules:
                scores = rule(rows, scores)
            if samplers[0] is not None:
                scores = samplers[0].restricted(scores)
            if self.options.renormalize_logits:
                scores = scores.log_softmax(dim=-1)
            chosen: list[int] = []
            tokens: list[int] = []
            left: list[int] = []
            for n, sentence in enumerate(running):
                its, sampler = slice(n * K, n * K + K), samplers[sentence.number]
                parents, going_on = self._advance(sentence, scores[its], new, sampler, logits[its])
                if going_on:
                    chosen += [n * K + parent for parent in parents]
                    tokens += [beam[-1] for beam in sentence.beams]
                    left.append(n)
                else:
                    done.append(sentence)
            new += 1
            # A sentence whose texts are all there leaves the batch.
            running = [running[n] for n in left]
            if not running:
                break
            steps.reorder(chosen, left)
            logits = steps.step(tokens)
        best = {sentence.number: sentence.finished for sentence in done}
        wanted = self.options.num_return_sequences
        return [best[b][:wanted] for b in range(len(prompts))]

    def _advance(
        self,
        sentence: _Sentence,
        scores: Tensor,
        new: int,
        sampler: Sampler | None,
        logits: Tensor,
    ) -> tuple[list[int], bool]:
        """One step of a sentence: which beams its next ones come from, and whether it goes on."""
        K, V = scores.shape
        total = (scores + sentence.scores.to(scores.device)[:, None]).view(-1)
        if not torch.isfinite(total.max()):
            raise ValueError(NO_TOKEN)
        kept = min(self.kept, total.numel())
        if sampler is None:
            values, places = total.topk(kept)
        else:
            places = sampler.several(total, kept)
            values = total[places]
        ended: list[Hypothesis] = []
        going_on: list[tuple[float, int, Hypothesis]] = []
        chosen = [divmod(place, V) for place in places.tolist()]
        told = self._told(sentence, logits, chosen)
        length = (new + 1) ** self.options.length_penalty
        ranked = (values / length).tolist()
        for rank, ((parent, token), value) in enumerate(zip(chosen, values.tolist(), strict=True)):
            ids = (*sentence.beams[parent], token)
            text = Hypothesis(ids, ranked[rank], None if told is None else told[rank])
            if token in self.stop_ids or new + 1 >= self.most:
                if rank < K:
                    ended.append(text)
            else:
                going_on.append((value, parent, text))
        full = len(sentence.finished) == K
        if sentence.improvable and not (full and self.options.early_stopping is True):
            merged = sentence.finished + ended
            sentence.finished = sorted(merged, key=lambda each: -(each.score or 0.0))[:K]
        going_on = sorted(going_on, key=lambda each: -each[0])[:K]
        if len(going_on) < K:
            return [], False
        sentence.beams = [text.ids for _, _, text in going_on]
        sentence.told = [text.logprobs or () for _, _, text in going_on]
        sentence.scores = torch.tensor(
            [value for value, _, _ in going_on], dtype=torch.float32, device="cpu"
        )
        if len(sentence.finished) == K:
            best = sentence.scores[:1] / self._reach(new + 1) ** self.options.length_penalty
            sentence.improvable &= float(best) > (sentence.finished[-1].score or 0.0)
            if self.options.early_stopping is True:
                return [], False
        return [parent for _, parent, _ in going_on], sentence.improvable

    def _told(
        self, sentence: _Sentence, logits: Tensor, chosen: Sequence[tuple[int, int]]
    ) -> list[tuple[TokenLogprobs, ...]] | None:
        """Log-probabilities of all tokens of beams with another token: (beam, token) of each."""
        if self.logprobs is None:
            return None
        parents, tokens = [beam for beam, _ in chosen], [token for _, token in chosen]
        new = logprobs_of(logits[parents], tokens, self.logprobs)
        return [(*sentence.told[beam], one) for beam, one in zip(parents, new, strict=True)]

    def _reach(self, new: int) -> int:
        """The length at which the best running beam is compared with what is finished."""
        options = self.options
        return (
            self.most if options.early_stopping == "never" and options.length_penalty > 0 else new
        )


def draw(
    steps: Steps,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    rules: Sequence[Rule],
    stop_ids: frozenset[int],
    most: Sequence[int],
    sources: Sequence[Sequence[int]] = (),
    ended: Container[int] = (),
    record: LogprobRecord | None = None,
) -> Iterator[tuple[int, int]]:
    """One token after the other: ``(row, token)`` as they come, a stop token included.

    Row r is sample ``r % R`` of sentence ``r // R``, with R = ``num_return_sequences``. Rows draw
    from generators of their own, so that a row's text does not depend on its neighbours.

    Args:
        steps: Decoding steps of the model.
        prompts: Ids of the sentences' prompts.
        options: How tokens are drawn.
        rules: Applied to the logits first.
        stop_ids: Tokens that end a text.
        most: New tokens at most, for each sentence.
        sources: Ids that an encoder reads; empty: the prompts.
        ended: Rows that whoever reads the tokens wants no more of.
        record: Notes the log-probability of each token before it is given.
    """
    R, sources = options.num_return_sequences, sources or prompts
    rows = [row for row in range(len(prompts) * R) if most[row // R] > 0]
    if not rows:
        return
    logits = steps.start()
    of = [row // R for row in rows]
    if of != [*range(len(prompts))]:
        steps.reorder(of, of)
        logits = logits[of]
    samplers = {row: Sampler(options.sampling, logits.device, sample=row % R) for row in rows}
    ids: dict[int, list[int]] = {row: [] for row in rows}
    new = 0
    while True:
        scores = logits
        if rules:
            held = Rows(
                [[*prompts[row // R], *ids[row]] for row in rows],
                new,
                [len(prompts[row // R]) for row in rows],
                [sources[row // R] for row in rows],
            )
            scores = scores.float()
            for rule in rules:
                scores = rule(held, scores)
        new += 1
        left = []
        tokens = drawn_each([samplers[row] for row in rows], scores)
        if record is not None:
            record.add(rows, logits, tokens)
        for n, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            ids[row].append(token)
            yield row, token
            if token not in stop_ids and new < most[row // R] and row not in ended:
                left.append(n)
        if not left:
            return
        if len(left) < len(rows):
            steps.reorder(left, left)
            rows = [rows[n] for n in left]
        logits = steps.step([ids[row][-1] for row in rows])
