"""What the heads of a model do: labels with scores, against thresholds from the literature.

Each score is a mean of a streamed statistic, so heads are found on texts of any length. Induction
and duplicate-token heads are looked for on random tokens that repeat, where nothing but the
repetition can tell what comes next (Olsson et al. 2022); the others on the given texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from polyhead.errors import InputError
from polyhead.inspection.heads import TokenizedText, find_pair
from polyhead.inspection.probe import Probe, probe

if TYPE_CHECKING:
    from polyhead.generation import LanguageModel, TextEncoder
    from polyhead.inspection.view import AttentionView


class Criterion(NamedTuple):
    """When a head gets a label.

    Attributes:
        threshold: The least score.
        score: What the score is.
        source: Where the threshold comes from.
    """

    threshold: float
    score: str
    source: str


CRITERIA: Mapping[str, Criterion] = {
    "induction": Criterion(
        0.4,
        "mean weight on the tokens that followed earlier copies, on repeated random tokens",
        "the prefix matching score of Olsson et al. 2022; threshold of the ARENA course, §1.2",
    ),
    "duplicate": Criterion(
        0.4,
        "mean weight on earlier copies of the token, on repeated random tokens",
        "Wang et al. 2023 (IOI), §3; threshold as for induction",
    ),
    "previous-token": Criterion(
        0.4,
        "mean weight on the token before the query",
        "Olsson et al. 2022; threshold of the ARENA course, §1.2",
    ),
    "sink": Criterion(
        0.3, "mean weight on the first token", "Gu et al. 2025, eq. 8, with their ε = 0.3"
    ),
    "positional": Criterion(
        0.9,
        "share of queries whose largest weight lies at the head's most frequent distance, sinks "
        "on the first token aside",
        "Voita et al. 2019, §5.1",
    ),
    "broad": Criterion(
        0.9, "1 − mean largest weight of a row", "Clark et al. 2019, §3.2: at most 10 % on one key"
    ),
    "pair": Criterion(
        0.3, "weight from the query word to the key word", "as for sinks: a clear share of the row"
    ),
}

_HALF = 64
"""Random tokens that are repeated once."""


@dataclass(frozen=True, order=True)
class HeadLabel:
    """One thing that one head does.

    Attributes:
        label: A name of ``CRITERIA``.
        score: From 0 to 1.
        layer: Counted from 0.
        head: Query head, counted from 0.
    """

    label: str
    score: float
    layer: int
    head: int


@dataclass(frozen=True)
class HeadScores:
    """The scores of all heads for each label, over many texts.

    Attributes:
        layers: The numbers of the layers.
        by_text: For each label ``[texts, layers, heads]``; the repeated random tokens and a pair
            are one text. NaN where a layer has fewer heads than another.
    """

    layers: tuple[int, ...]
    by_text: Mapping[str, Tensor]

    def mean(self, label: str) -> Tensor:
        """``[layers, heads]`` over the texts."""
        return self.by_text[label].mean(dim=0)

    def spread(self, label: str) -> Tensor:
        """``[layers, heads]`` standard deviation over the texts; 0 of one text."""
        return self.by_text[label].std(dim=0, correction=0)

    def labels(self, thresholds: Mapping[str, float] | None = None) -> list[HeadLabel]:
        """Every head with each label that it earns, the highest score of a label first.

        Args:
            thresholds: In the place of those of ``CRITERIA``.

        Raises:
            InputError: A threshold for a label that there is not.
        """
        least = {label: criterion.threshold for label, criterion in CRITERIA.items()}
        for label in thresholds or {}:
            if label not in least:
                raise InputError(f"labels are {', '.join(least)}: got {label!r}")
        least |= thresholds or {}
        found = []
        for label in self.by_text:
            scores = self.mean(label)
            places = (scores >= least[label]).nonzero().tolist()
            earned = [HeadLabel(label, float(scores[i, h]), self.layers[i], h) for i, h in places]
            found += sorted(earned, key=lambda e: (-e.score, e.layer, e.head))
        return found


def find_heads(
    model: LanguageModel | TextEncoder,
    texts: Sequence[str],
    *,
    pair: tuple[str, str] | None = None,
    thresholds: Mapping[str, float] | None = None,
) -> list[HeadLabel]:
    """Labels heads by what they do on texts, and on repeated random tokens.

    Args:
        model: As ``polyhead.load`` makes it.
        texts: At least one.
        pair: Two words, such as ``("it", "animal")``: heads that look from the first to the second
            in the texts that hold both are labelled ``"pair"``.
        thresholds: Least scores by label, in the place of those of ``CRITERIA``.

    Returns:
        One entry for each head and each label that it earns.

    Raises:
        InputError: No texts, a pair that no text holds, or a threshold for an unknown label.
    """
    return score_heads(model, texts, pair=pair).labels(thresholds)


def score_heads(
    model: LanguageModel | TextEncoder,
    texts: Sequence[str],
    *,
    pair: tuple[str, str] | None = None,
) -> HeadScores:
    """The scores behind ``find_heads``, of every head and every text.

    Raises:
        InputError: No texts, or a pair that no text holds.
    """
    if not texts:
        raise InputError("find_heads needs at least one text: got none")
    by_text: dict[str, list[Tensor]] = {label: [] for label in CRITERIA}
    layers: tuple[int, ...] = ()
    refusal: InputError | None = None
    for text in texts:
        tokens = TokenizedText.of(model.tokenizer, text)
        seen = _run(model, torch.tensor([tokens.ids]))
        layers = seen.layers
        for label, scores in _text_scores(seen).items():
            by_text[label].append(scores)
        if pair is not None:
            try:
                found = find_pair(tokens, *pair, causal=model.config.kind == "decoder")
            except InputError as error:
                refusal = error
                continue
            row = slice(found.query, found.query + 1)
            weights = [view.rows(queries=row)[0, :, 0, list(found.keys)].sum(-1) for view in seen]
            by_text["pair"].append(_aligned(weights))
    if pair is not None and not by_text["pair"] and refusal is not None:
        raise refusal
    ids = repeated_tokens(model.config.vocab_size, min(_HALF, model.config.max_positions // 2))
    seen = _run(model, ids)
    half = ids.shape[1] // 2
    for label in ("induction", "duplicate"):
        # Of the second half: in the first, no token has an earlier copy.
        weights = [view.measure([label])[label][..., half:].mean(dim=(0, 2)) for view in seen]
        by_text[label].append(_aligned(weights))
    return HeadScores(layers, {label: torch.stack(rows) for label, rows in by_text.items() if rows})


def repeated_tokens(vocab_size: int, count: int, batch: int = 2) -> Tensor:
    """``[batch, 2 · count]`` random tokens and the same ones again, always the same draw."""
    count = min(count, vocab_size)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(vocab_size, generator=generator)[:count] for _ in range(batch)]
    once = torch.stack(rows)
    return torch.cat([once, once], dim=1)


def _run(model: LanguageModel | TextEncoder, ids: Tensor) -> Probe:
    device = next(model.parameters()).device
    with probe(model) as seen, torch.inference_mode():
        model(ids.to(device))
    return seen


def _text_scores(seen: Probe) -> dict[str, Tensor]:
    summaries = [view.summary() for view in seen]
    return {
        "previous-token": _aligned([summary.previous_token for summary in summaries]),
        "sink": _aligned([summary.first_token for summary in summaries]),
        "broad": _aligned([1.0 - summary.max_weight for summary in summaries]),
        "positional": _aligned([_at_one_distance(view) for view in seen]),
    }


def _at_one_distance(view: AttentionView) -> Tensor:
    """``[H]`` the share of queries whose largest weight lies at the most frequent distance.

    The first two queries have hardly a choice, and what rests on the first token keeps no distance.
    """
    queries, keys = view.max_key.shape[-1], view.call.k_tokens.length
    apart = torch.arange(keys - queries, keys, device=view.lse.device) - view.max_key
    apart, chosen = apart[..., 2:], view.max_key[..., 2:] > 0
    shares = view.lse.new_zeros(apart.shape[1])
    for head in range(apart.shape[1]):
        kept = apart[:, head][chosen[:, head]]
        if len(kept):
            shares[head] = torch.bincount(kept - kept.amin()).amax() / apart[:, head].numel()
    return shares


def _aligned(rows: Sequence[Tensor]) -> Tensor:
    """``[layers, heads]`` from a row per layer; NaN fills where layers have fewer heads."""
    return torch.nn.utils.rnn.pad_sequence(
        [row.float().cpu() for row in rows], batch_first=True, padding_value=torch.nan
    )
