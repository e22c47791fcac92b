"""What ``polyhead look`` finds out: the continuation, one run under a probe, and what heads do."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyhead.errors import ContextLengthError, InputError

if TYPE_CHECKING:
    from polyhead.generation import Generation, LanguageModel, TextEncoder
    from polyhead.interpret.finding import HeadScores
    from polyhead.interpret.heads import HeadLook, TokenizedText, WordPair
    from polyhead.interpret.probe import Probe
    from polyhead.models.parts import HeadsByLayer
    from polyhead.viewer.looks import Look
    from polyhead.viewer.notable import Findings

    Model = LanguageModel | TextEncoder

NextTokens = list[tuple[str, float]]

_LIKELIEST = 12
_ECHO = 400
"""Characters of the prompt that are shown before its continuation."""


@dataclass(frozen=True)
class Found:
    """What was found about a model on a text.

    Attributes:
        name: Name of the model, as the user wrote it.
        written: The continuation; None where none was asked for, and of an encoder.
        chosen: Whether the pair was chosen by itself, as the one that stands out most.
        findings: What heads do here, beside what they do on shuffles of the text.
        controls: By layer and head, the weight along the pair in shuffles, and that of others.
        looks: The heads along the pair, the strongest first, of the layers asked for.
        scores: What each head scores for each label, where labels were asked for.
        next_tokens: The likeliest next tokens with and without the ablated heads, if any.
    """

    name: str
    model: Model
    tokens: TokenizedText
    written: Generation | None
    look: Look
    pair: WordPair
    chosen: bool
    findings: Findings
    controls: Mapping[tuple[int, int], tuple[float | None, float]]
    looks: list[HeadLook]
    scores: HeadScores | None
    next_tokens: tuple[NextTokens, NextTokens] | None

    @property
    def seen(self) -> Probe:
        """The probe of the run."""
        return self.look.seen


def check(
    model: Model,
    tokens: TokenizedText,
    *,
    pair: tuple[str, str] | None,
    heads: Sequence[HeadsByLayer],
    layers: Sequence[int] | None,
) -> None:
    """Refuses what cannot be looked at, before the model runs, which may take minutes.

    Raises:
        ContextLengthError: More tokens than the model's context.
        InputError: A layer, a head or a word that is not there.
    """
    from polyhead.interpret.heads import find_pair
    from polyhead.models.parts import checked_heads

    most, count = model.config.max_positions, len(model.config.layers)
    if len(tokens.ids) > most:
        raise ContextLengthError(
            f"the text has {len(tokens.ids):,} tokens, the model's context holds {most:,}"
        )
    for chosen in heads:
        checked_heads(model.transformer, chosen)
    for layer in layers or ():
        if not 0 <= layer < count:
            raise InputError(f"--layers: the model's layers are 0 to {count - 1}: got {layer}")
    if pair is not None:
        find_pair(tokens, *pair, causal=model.config.kind == "decoder")


def examine(
    name: str,
    model: Model,
    tokens: TokenizedText,
    *,
    pair: tuple[str, str] | None,
    ablated: HeadsByLayer,
    layers: Sequence[int] | None,
    labelled: Sequence[str],
    max_new_tokens: int,
    echo: bool,
) -> Found:
    """Looks at every head of a model on a text.

    Args:
        name: What the user calls the model.
        tokens: The text; with the other arguments ``check`` has passed it.
        pair: The word that looks and the word that is looked at; None: found in the text.
        layers: Those whose heads are ranked; None: all.
        labelled: The texts over which heads are labelled; none: no labels.
        echo: Whether the continuation is printed while it is written.
    """
    from polyhead.generation import LanguageModel
    from polyhead.interpret.heads import rank_heads
    from polyhead.interpret.standing_out import pair_controls
    from polyhead.viewer.looks import without

    written = None
    next_tokens = _next_tokens(model, tokens, ablated)
    with without(model, ablated):
        if isinstance(model, LanguageModel) and max_new_tokens != 0:
            written = _continue(model, tokens.text, max_new_tokens, show=echo)
    look = _run(name, model, tokens, ablated)
    findings = _find(look)
    found = _pair(findings, tokens, pair, model.config.kind == "decoder")
    controls = pair_controls(look.seen, found, findings.shuffles)
    looks = rank_heads(look.seen, found)
    if layers is not None:
        looks = [entry for entry in looks if entry.layer in layers]
    scores = _scores(model, labelled, pair) if labelled else None
    return Found(
        name,
        model,
        tokens,
        written,
        look,
        found,
        pair is None,
        findings,
        controls,
        looks,
        scores,
        next_tokens,
    )


def _next_tokens(
    model: Model, tokens: TokenizedText, heads: HeadsByLayer
) -> tuple[NextTokens, NextTokens] | None:
    """The likeliest next tokens as they are and without some heads; None of an encoder."""
    from polyhead.viewer.looks import next_token, without

    if not heads or model.config.kind != "decoder":
        return None
    found = []
    for some in ({}, heads):
        with without(model, some):
            following = next_token(model, tokens.ids)
        likely = [] if following is None else following.likeliest(_LIKELIEST)
        found.append([(model.tokenizer.pieces([token])[0], share) for token, share in likely])
    return found[0], found[1]


def _continue(model: LanguageModel, text: str, max_new_tokens: int, *, show: bool) -> Generation:
    """The continuation, streamed to the terminal behind its prompt."""
    from polyhead.cli.generate import figures
    from polyhead.cli.terminal import BOLD, FAINT, started, write_text
    from polyhead.generation import Generation

    stream = model.stream(text, max_new_tokens=max_new_tokens)
    echo = f"…{text[-_ECHO:]}" if len(text) > _ECHO else text
    pieces: list[str] = []
    try:
        for piece in started(stream):
            if show and not pieces:
                write_text(echo, style=FAINT)
            pieces.append(piece)
            if show:
                write_text(piece, style=BOLD)
        if show and not pieces:
            write_text(echo, style=FAINT)
    finally:
        if show and not isinstance(sys.exc_info()[1], BrokenPipeError):
            print(flush=True)
    if show:
        write_text(figures(stream.stats) + "\n", style=FAINT)
    return Generation("".join(pieces), tuple(stream.ids), stream.stats)


def _run(name: str, model: Model, tokens: TokenizedText, ablated: HeadsByLayer) -> Look:
    """One run on the text, with statistics of every head."""
    from polyhead.cli.terminal import progress
    from polyhead.viewer.looks import look_at

    with progress("looking at every head") as advance:
        look = look_at(name, model, tokens, ablated)
        for number in range(len(look.layers)):
            advance("looking at every head", number, len(look.layers))
            look.statistics(number)
    return look


def _find(look: Look) -> Findings:
    """What is worth seeing, with a run on shuffles of the text."""
    from polyhead.cli.terminal import progress

    with progress("looking at shuffles of the text"):
        found = look.findings
    if found is None:
        raise InputError(f"{look.model} reads two texts: it has no shuffles")
    return found


def _pair(
    found: Findings, tokens: TokenizedText, pair: tuple[str, str] | None, causal: bool
) -> WordPair:
    """The pair that was asked for, else the one that stands out most."""
    from polyhead.interpret.heads import WordPair, find_pair

    if pair is not None:
        return find_pair(tokens, *pair, causal=causal)
    for best in found.standing.pairs:
        return WordPair(best.query, (best.key,), tokens.word(best.query), tokens.word(best.key))
    last = len(tokens.ids) - 1  # a text of one or two words has no pair
    key = max(0, last - 1)
    return WordPair(last, (key,), tokens.word(last), tokens.word(key))


def _scores(model: Model, texts: Sequence[str], pair: tuple[str, str] | None) -> HeadScores:
    """What each head scores for each label."""
    from polyhead.cli.terminal import progress
    from polyhead.interpret.finding import score_heads

    with progress("finding what the heads do"):
        return score_heads(model, texts, pair=pair)
