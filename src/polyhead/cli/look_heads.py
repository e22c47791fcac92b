"""What ``polyhead look`` does to heads: labels them, takes them out, draws them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyhead.generation import LanguageModel, TextEncoder
    from polyhead.inspection.finding import HeadScores
    from polyhead.inspection.heads import TokenizedText
    from polyhead.inspection.probe import Probe

    Model = LanguageModel | TextEncoder
    Heads = dict[int, list[int]]

NextTokens = list[tuple[str, float]]


def parsed(text: str | None) -> Heads:
    """``"3.1,7.4"`` as heads by layer; none of None."""
    from polyhead.inspection.model import parse_heads

    return {} if text is None else parse_heads(text)


def lines_of(file: Path) -> list[str]:
    """The texts of a file, one a line.

    Raises:
        InputError: There is none.
    """
    from polyhead.cli.terminal import read_text
    from polyhead.errors import InputError

    lines = [line for line in read_text(None, file).splitlines() if line.strip()]
    if not lines:
        raise InputError(f"--texts: {file} holds no text, one is expected on each line")
    return lines


def without(model: Model, heads: Heads) -> AbstractContextManager[None]:
    """The model runs without some heads while the block runs."""
    from polyhead.inspection.ablation import ablate

    return ablate(model, heads) if heads else nullcontext()


def next_tokens(
    model: Model, tokens: TokenizedText, heads: Heads
) -> tuple[NextTokens, NextTokens] | None:
    """The likeliest next tokens as they are and without some heads; None of an encoder."""
    from polyhead.inspection.studio import run_text

    if not heads or model.config.kind != "decoder":
        return None
    return run_text(model, tokens, {}), run_text(model, tokens, heads)


def scores_of(model: Model, texts: Sequence[str], pair: tuple[str, str] | None) -> HeadScores:
    """What each head scores for each label."""
    from polyhead.cli.terminal import progress
    from polyhead.inspection.finding import score_heads

    with progress("finding what the heads do"):
        return score_heads(model, texts, pair=pair)


def draw(out: Path, model: str, seen: Probe, tokens: TokenizedText, heads: Heads) -> None:
    """Writes an SVG with the maps of some heads.

    Raises:
        InputError: A layer or head that is not there.
        OSError: The file cannot be written.
    """
    from polyhead.inspection.drawing import draw_heads

    picture = draw_heads(seen, heads, tokens.pieces, title=f"{model}: {tokens.text}")
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    draft.write_text(picture, encoding="utf-8")
    draft.replace(out)
