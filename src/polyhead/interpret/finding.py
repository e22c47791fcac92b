"""What the heads of a model do: labels with scores, against thresholds from the literature.

Each score is a mean of a streamed statistic, so heads are found on texts of any length. Induction
and duplicate-token heads are looked for on random tokens that repeat, where nothing but the
repetition can tell what comes next (Olsson et al. 2022); the others on the given texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_several
from polyhead.errors import InputError
from polyhead.interpret.alignment import Alignment, alignment_score
from polyhead.interpret.heads import find_pair
from polyhead.interpret.tables import HeadTable, Text, aligned, ids_of, run_ids, tokenized

if TYPE_CHECKING:
    from polyhead.interpret.probe import Probe
    from polyhead.interpret.view import AttentionView


class Criterion(NamedTuple):
    """When a head gets a label.

    Attributes:
        threshold: Smallest score that earns the label.
        score: Description of the score.
        source: Publication of the threshold.
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
        "fraction of queries whose largest weight lies at the head's most frequent distance, sinks "
        "on the first token aside",
        "Voita et al. 2019, §5.1",
    ),
    "broad": Criterion(
        0.9, "1 − mean largest weight of a row", "Clark et al. 2019, §3.2: at most 10 % on one key"
    ),
    "pair": Criterion(
        0.3,
        "weight from the query word to the key word",
        "as for sinks: a clear fraction of the row",
    ),
    "alignment": Criterion(
        0.9,
        "fraction of the queries of an Alignment whose largest weight lies on a right key",
        "Schwaller et al. 2021; threshold as for positional heads",
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
        layer: Index of the layer, from 0.
        head: Index of the query head, from 0.
        spread: Standard deviation of the score over the texts.
    """

    label: str
    score: float
    layer: int
    head: int
    spread: float = 0.0


class HeadScores(HeadTable):
    """The scores of all heads for each label; ``by_text`` is by label.

    The repeated random tokens and each alignment are texts of their own.
    """

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
            scores, spread = self.mean(label), self.spread(label)
            earned = [
                HeadLabel(label, float(scores[i, h]), self.layers[i], h, float(spread[i, h]))
                for i, h in (scores >= least[label]).nonzero().tolist()
            ]
            found += sorted(earned, key=lambda e: (-e.score, e.layer, e.head))
        return found


def find_heads(
    model: nn.Module,
    texts: Sequence[Text],
    *,
    pair: tuple[str, str] | None = None,
    alignments: Sequence[Alignment] = (),
    thresholds: Mapping[str, float] | None = None,
) -> list[HeadLabel]:
    """Labels heads by what they do on texts, and on repeated random tokens.

    Args:
        model: As ``polyhead.load`` makes it; or, where texts are tokens, a transformers model with
            ``attn_implementation="polyhead"``.
        texts: At least one, or an alignment: strings, or token ids ``[T]``.
        pair: Two words, such as ``("it", "animal")``: heads that look from the first to the second
            in the texts that hold both are labelled ``"pair"``.
        alignments: Texts with a known key for some queries: heads that look there are labelled
            ``"alignment"``.
        thresholds: Least scores by label, in the place of those of ``CRITERIA``.

    Returns:
        One entry for each head and each label that it earns.

    Raises:
        InputError: No texts, a pair that no text holds, a pair without strings, or a threshold for
            an unknown label.
    """
    return score_heads(model, texts, pair=pair, alignments=alignments).labels(thresholds)


def score_heads(
    model: nn.Module,
    texts: Sequence[Text],
    *,
    pair: tuple[str, str] | None = None,
    alignments: Sequence[Alignment] = (),
) -> HeadScores:
    """The scores behind ``find_heads``, of every head and every text.

    Raises:
        InputError: No texts, or a pair that no text holds.
    """
    check_several("texts", texts)
    if not (texts or alignments):
        raise InputError("find_heads needs at least one text: got none")
    by_text: dict[str, list[Tensor]] = {label: [] for label in CRITERIA}
    refusal: InputError | None = None
    for text in texts:
        seen = run_ids(model, ids_of(model, text))
        for label, scores in _text_scores(seen).items():
            by_text[label].append(scores)
        if pair is not None:
            try:
                by_text["pair"].append(_pair_scores(model, text, pair, seen))
            except InputError as error:
                refusal = error
    if pair is not None and not by_text["pair"] and refusal is not None:
        raise refusal
    by_text["alignment"] = [alignment_score(model, text) for text in alignments]
    config: Any = model.config
    seen = run_ids(model, repeated_tokens(config.vocab_size, min(_HALF, _context(config) // 2)))
    for label in ("induction", "duplicate"):
        # Means over the second half: in the first, no token has an earlier copy.
        measured = [view.measure([label])[label] for view in seen]
        rows = [values[..., values.shape[-1] // 2 :].mean(dim=(0, 2)) for values in measured]
        by_text[label].append(aligned(rows))
    scored = {label: torch.stack(rows) for label, rows in by_text.items() if rows}
    return HeadScores(seen.layers, scored)


def _pair_scores(model: nn.Module, text: Text, pair: tuple[str, str], seen: Probe) -> Tensor:
    """``[layers, heads]`` the weight from the first word to the second."""
    if not isinstance(text, str):
        raise InputError("pair= needs texts that are strings: got token ids")
    config: Any = model.config
    causal = config.kind == "decoder"
    found = find_pair(tokenized(model, text), *pair, causal=causal)
    row = slice(found.query, found.query + 1)
    return aligned([view.rows(queries=row)[0, :, 0, list(found.keys)].sum(-1) for view in seen])


def _context(config: Any) -> int:
    """How many tokens a model can read."""
    own = hasattr(config, "max_positions")
    most: int = getattr(config, "max_positions" if own else "max_position_embeddings")
    return most


def repeated_tokens(vocab_size: int, count: int) -> Tensor:
    """``[2, 2 · count]`` random tokens and the same ones again, always the same draw."""
    count = min(count, vocab_size)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randperm(vocab_size, generator=generator, device="cpu") for _ in range(2)]
    once = torch.stack(rows)[:, :count]
    return torch.cat([once, once], dim=1)


def _text_scores(seen: Probe) -> dict[str, Tensor]:
    summaries = [view.summary() for view in seen]
    return {
        "previous-token": aligned([summary.previous_token for summary in summaries]),
        "sink": aligned([summary.first_token for summary in summaries]),
        "broad": aligned([1.0 - summary.max_weight for summary in summaries]),
        "positional": aligned([_at_one_distance(view) for view in seen]),
    }


def _at_one_distance(view: AttentionView) -> Tensor:
    """``[H]`` the fraction of queries whose largest weight lies at the most frequent distance.

    The first two queries have few keys, and a weight on the first token is at no fixed distance.
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
