"""Pairs of tokens whose weight neither position nor the tokens themselves predict.

Most large weights say little: a head rests on the first token, or looks at its neighbour whatever
the text says. So each weight w is compared with what is expected of the same head:

    by distance   its mean weight on keys as far away, the larger of the means over this text
                  (without this pair) and over shuffles of its tokens
    shuffled      its mean weight between the same two tokens in the shuffles
    score         w · ln(w / larger of the two), a key's part in the divergence of the row

The first token, special tokens and the query itself are never pairs. A pair stands out where its
score is one that only 1 % of the rows of shuffled texts reach, each shuffle measured against the
others. That compares a text with texts that say nothing; it does not say what a head is for.

Letters: B texts, H query heads, T tokens, c candidates per row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead.interpret.heads import TokenizedText, WordPair
from polyhead.interpret.measuring import measure
from polyhead.interpret.probe import Probe
from polyhead.interpret.shuffles import Shuffles, special_tokens
from polyhead.interpret.view import AttentionView

_CANDIDATES = 4
"""Largest weights of a row that are compared."""

_LEAST = 0.01
"""What is expected at least: of less, ratios would be of noise."""

ALLOWED = 0.01
"""Share of the rows of shuffled texts that may reach the threshold."""

_SAME = 2
"""Most pairs with the same key, and with the same head, among those that are named."""


@dataclass(frozen=True)
class StandingPair:
    """One head's weight from one token to another, beside what was expected.

    Attributes:
        weight: The query's weight on the key.
        by_distance: What the head gives keys as far away, on average.
        shuffled: What it gives the same two tokens in shuffled texts; None where never both.
        others: What the other tokens of this text that see the key give it, on average.
        score: weight · ln(weight / expected).
    """

    layer: int
    head: int
    query: int
    key: int
    weight: float
    by_distance: float
    shuffled: float | None
    others: float
    score: float

    @property
    def times(self) -> float:
        """The weight as a multiple of what the distance predicts."""
        return self.weight / max(self.by_distance, _LEAST)

    @property
    def expected(self) -> float:
        """The weight that position and the tokens themselves predict."""
        return max(self.by_distance, self.shuffled or 0.0)


@dataclass(frozen=True)
class StandingOut:
    """What stands out on a text.

    Attributes:
        pairs: The highest score first, of different pairs of words; also those below the threshold.
        threshold: The score that ``ALLOWED`` of the rows of shuffled texts reach.
        rate: Share of the rows of this text that reach it.
        shuffles: How many shuffles there were.
    """

    pairs: list[StandingPair]
    threshold: float
    rate: float
    shuffles: int

    def found(self) -> list[StandingPair]:
        """The pairs that reach the threshold."""
        return [pair for pair in self.pairs if pair.score >= self.threshold]


def standing_out(
    seen: Probe, tokens: TokenizedText, shuffles: Shuffles, most: int = 24
) -> StandingOut:
    """The pairs of a text that stand out.

    Args:
        seen: A run of a model on the text.
        shuffles: The same model on shuffles of it.
        most: Pairs that are returned at most.
    """
    here, there, pairs = [], [], []
    for layer, own, control in _scored(seen, tokens, shuffles):
        # The first query of a decoder sees one key, whatever the head does.
        here.append(own.score.amax(-1)[..., 1:].flatten())
        there.append(control.score.amax(-1)[..., 1:].flatten())
        pairs += own.best(layer, 4 * most)
    count = len(shuffles.order)
    if not pairs:
        return StandingOut([], 0.0, 0.0, count)
    threshold = float(torch.cat(there).quantile(1 - ALLOWED))
    rate = float((torch.cat(here) >= threshold).float().mean())
    chosen = [
        replace(
            pair,
            others=_others(seen[pair.layer], pair.head, pair.query, [pair.key], shuffles.causal),
        )
        for pair in _different(pairs, tokens, most)
    ]
    return StandingOut(chosen, threshold, rate, count)


def heads_of_pair(
    seen: Probe, tokens: TokenizedText, shuffles: Shuffles, query: int, key: int
) -> list[StandingPair]:
    """Each head's weight of one pair where more is there than expected, the most beyond it first.

    Heads with the key among the four largest weights of the query's row.

    Args:
        seen: A run of a model on the text.
        shuffles: The same model on shuffles of it.
        query: The token that looks.
        key: The token that is looked at, not the first of the text.
    """
    found = [
        replace(pair, others=_others(seen[layer], pair.head, query, [key], shuffles.causal))
        for layer, here, _ in _scored(seen, tokens, shuffles)
        for pair in here.best(layer, here.score.numel())
        if (pair.query, pair.key) == (query, key)
    ]
    return sorted(found, key=lambda pair: pair.expected - pair.weight)


def pair_controls(
    seen: Probe, pair: WordPair, shuffles: Shuffles
) -> dict[tuple[int, int], tuple[float | None, float]]:
    """For each (layer, head) what it gives a pair of words in shuffles, and what others give.

    Returns:
        The sums over the keys: between the same tokens in shuffled texts, None where never both;
        and the mean of the other tokens of this text that see the keys.
    """
    found = {}
    for layer, view, control in zip(seen.layers, seen, shuffles.seen, strict=True):
        weights = control.rows().float().cpu()
        keys = torch.tensor(pair.keys).expand(1, weights.shape[1], -1)
        same = shuffles.pair_weights(weights, torch.tensor(pair.query), keys)[0].sum(-1)
        for head, chance in enumerate(same.tolist()):
            others = _others(view, head, pair.query, pair.keys, shuffles.causal)
            found[layer, head] = chance if chance == chance else None, others
    return found


def _others(view: AttentionView, head: int, query: int, keys: Sequence[int], causal: bool) -> float:
    """The mean weight on keys of the queries that see them all, the query and the keys aside."""
    columns = [
        view.tile(view.heads[head], slice(None), slice(key, key + 1))[0, :, 0].cpu() for key in keys
    ]
    kept = torch.ones(len(columns[0]), dtype=torch.bool)
    kept[: max(keys) + 1 if causal else 0] = False
    kept[[query, *keys]] = False
    return float(torch.stack(columns).sum(0)[kept].mean()) if kept.any() else 0.0


def _different(
    pairs: list[StandingPair], tokens: TokenizedText, most: int
) -> Iterator[StandingPair]:
    """The best pairs, each pair of words once, and few of one key or of one head."""
    known: Counter[object] = Counter()
    for pair in sorted(pairs, key=lambda each: (-each.score, each.layer, each.head)):
        # The tokens of one character, of which a byte tokenizer makes several, are one word.
        q, k = (tokens.spans[token] for token in (pair.query, pair.key))
        words = tuple(tokens.text[slice(*span)].strip() for span in (q, k))
        head = pair.layer, pair.head
        if q == k or known[words] or known[head, k] or max(known[head], known[k, "key"]) >= _SAME:
            continue
        known.update([words, (head, k), head, (k, "key")])
        yield pair
        most -= 1
        if not most:
            return


@dataclass
class _Texts:
    """The pairs of some texts of one length.

    Attributes:
        special: ``[B, T]`` which tokens are no words.
        counts: ``[B, bins]`` how many pairs there are at each distance.
    """

    special: Tensor
    counts: Tensor

    @classmethod
    def of(cls, special: Tensor, causal: bool) -> _Texts:
        length = special.shape[1]
        apart = torch.arange(1 - length, length)
        words = (~special).float()
        keys = words.clone()
        keys[:, 0] = 0.0
        # How many words have a key so far away: the correlation of both, by Fourier transforms.
        spectrum = torch.fft.rfft(words, 2 * length) * torch.fft.rfft(keys, 2 * length).conj()
        pairs = torch.fft.irfft(spectrum, 2 * length).round()[:, apart]
        pairs[:, (apart == 0) | ((apart < 0) if causal else (apart == length))] = 0.0
        counts = torch.zeros(len(special), 2 * _MIDDLE + 1)
        return cls(special, counts.index_add_(1, _bin(apart), pairs))


_MIDDLE = 64
"""The bin of distance 0: texts end long before 2 ** 30 tokens."""


def _bin(apart: Tensor) -> Tensor:
    """Distances up to 4 apart, beyond two bins to an octave; below the middle for later keys."""
    far = apart.abs()
    octaves = torch.log2(far.clamp(min=1) / 4)
    return _MIDDLE + torch.where(far <= 4, far, (4 + 2 * octaves).ceil().long()) * apart.sign()


@dataclass
class _Rows:
    """The largest weights of each row of some texts in one layer.

    Attributes:
        keys: ``[B, H, T, c]`` the places of their keys.
        weights: ``[B, H, T, c]``; 0 where the two are no pair.
        bins: ``[B, H, T, c]`` their distances.
        sums: ``[B, H, bins]`` the weights by distance. Smaller weights than these are missing, so
            means over a distance come out a little low.
    """

    texts: _Texts
    keys: Tensor
    weights: Tensor
    bins: Tensor
    sums: Tensor

    @classmethod
    def of(cls, view: AttentionView, texts: _Texts) -> _Rows:
        found = measure(view.call, ("top_weights", "top_keys"), _CANDIDATES)
        keys = found["top_keys"].cpu()
        queries = torch.arange(keys.shape[2])[:, None]
        special = texts.special[:, None, None].expand(*keys.shape[:3], -1)
        dull = special.gather(-1, keys.clamp(min=0)) | texts.special[:, None, :, None]
        dull = dull | (keys <= 0) | (keys == queries)
        keys = keys.clamp(min=0)
        weights = found["top_weights"].float().cpu().masked_fill(dull, 0.0).nan_to_num()
        bins = _bin(queries - keys)
        sums = torch.zeros(*keys.shape[:2], texts.counts.shape[1])
        sums.scatter_add_(2, bins.flatten(2), weights.flatten(2))
        return cls(texts, keys, weights, bins, sums)

    def at_bins(self, of_bins: Tensor) -> Tensor:
        """``[B or 1, H or 1, bins]`` numbers for each weight, ``[B, H, T, c]``."""
        spread = of_bins.expand(*self.sums.shape)
        return spread.gather(2, self.bins.flatten(2)).view(self.bins.shape)


@dataclass
class _Scored:
    """Rows beside what was expected, ``[B, H, T, c]`` each."""

    rows: _Rows
    by_distance: Tensor
    shuffled: Tensor
    score: Tensor

    @classmethod
    def of(cls, rows: _Rows, controls: _Rows, shuffled: Tensor) -> _Scored:
        own = (rows.at_bins(rows.sums) - rows.weights) / (
            rows.at_bins(rows.texts.counts[:, None]) - 1
        ).clamp(min=1)
        mean = controls.sums.sum(0) / controls.texts.counts.sum(0).clamp(min=1)
        by_distance = torch.maximum(own, rows.at_bins(mean[None]))
        expected = torch.maximum(by_distance, shuffled.nan_to_num()).clamp(min=_LEAST)
        score = (rows.weights * (rows.weights / expected).log()).nan_to_num()
        return cls(rows, by_distance, shuffled, score)

    def best(self, layer: int, most: int) -> list[StandingPair]:
        """The pairs of the first text with the highest scores."""
        score = self.score[0]
        places = score.flatten().topk(min(score.numel(), most)).indices
        heads, queries = places // score[0].numel(), places // score.shape[2] % score.shape[1]
        numbers = (
            self.rows.keys, self.rows.weights, self.by_distance, self.shuffled, self.score
        )  # fmt: skip
        columns = (each[0].flatten()[places].tolist() for each in numbers)
        return [
            StandingPair(
                layer=layer,
                head=head,
                query=query,
                key=key,
                weight=weight,
                by_distance=near,
                shuffled=same if same == same else None,
                others=0.0,
                score=value,
            )
            for head, query, key, weight, near, same, value in zip(
                heads.tolist(), queries.tolist(), *columns, strict=True
            )
            if value > 0
        ]


def _scored(
    seen: Probe, tokens: TokenizedText, shuffles: Shuffles
) -> Iterator[tuple[int, _Scored, _Scored]]:
    """Layer by layer the rows of a text and those of its shuffles, beside what was expected."""
    special = special_tokens(tokens)
    text = _Texts.of(special[None], shuffles.causal)
    shuffled = _Texts.of(special[shuffles.order], shuffles.causal)
    for layer, view, control in zip(seen.layers, seen, shuffles.seen, strict=True):
        rows = _Rows.of(view, text), _Rows.of(control, shuffled)
        yield layer, *_compare(*rows, control.rows().float().cpu(), shuffles)


def _compare(
    here: _Rows, there: _Rows, weights: Tensor, shuffles: Shuffles
) -> tuple[_Scored, _Scored]:
    """A text's rows and those of its shuffles, whose weights are ``[K, H, N, N]``."""
    queries = torch.arange(here.keys.shape[2])[None, None, :, None]
    same = shuffles.pair_weights(weights, queries, here.keys)
    order = shuffles.order[:, None, None]
    keys = order.expand(*there.keys.shape[:3], -1).gather(-1, there.keys)
    beside = shuffles.pair_weights(weights, order.mT, keys, besides=True)
    return _Scored.of(here, there, same), _Scored.of(there, there, beside)
