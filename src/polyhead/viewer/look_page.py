"""A look as the page that stands alone, with all its views inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polyhead.interpret.statistics import AVERAGED
from polyhead.viewer import packing
from polyhead.viewer.looks import Look, SeenLayer
from polyhead.viewer.packing import Vectors
from polyhead.viewer.page import PageData

GUESS_WORK = 4e10
"""Most multiplications for guesses; of a longer text only the last tokens have guesses."""


def page_data(
    look: Look,
    *,
    continuation: str | None = None,
    facts: Mapping[str, str] | None = None,
    focus: tuple[int, int] | None = None,
    language: str | None = None,
) -> PageData:
    """What a page shows of a look.

    Args:
        continuation: What the model wrote after it; None: what an encoder-decoder made of it.
        focus: (query token, key token) to begin with.
        language: Language of the page, "en" or "zh"; None: the browser's.
    """
    header = look.header()
    measured = [look.statistics(layer) for layer in range(len(look.layers))]
    empty = [[None] * heads for heads in look.heads]
    statistics = {
        name: [row.get(name, none) for row, none in zip(measured, empty, strict=True)]
        for name in AVERAGED
        if any(name in row for row in measured)
    }
    vectors = None
    if sum(map(_vector_bytes, look.layers)) <= packing.VECTOR_BYTES:
        vectors = [_vectors(layer) for layer in look.layers]
    return PageData(
        title=look.text,
        model=look.model,
        tokens=look.pieces,
        weights=[layer.view.rows()[0].float().cpu().numpy() for layer in look.layers],
        num_kv_heads=[layer.kv_heads for layer in look.layers],
        continuation=header["continuation"] if continuation is None else continuation,
        statistics=statistics,
        facts=facts or {},
        focus=focus,
        parts=[(layer.part, layer.number) for layer in look.layers],
        shares=[layer.shares for layer in look.layers],
        runs=[(layer.queries, layer.keys) for layer in look.layers],
        vectors=vectors,
        next_token=header["next"],
        way=_ways(look),
        own=look.own_tokens.start,
        kind=look.kind,
        notable=look.notable(),
        language=language,
    )


def stored_weights(look: Look) -> int:
    """Weights that a page of a look holds."""
    return sum(
        packing.count_of(
            (len(layer.view.heads), *map(_length, (layer.queries, layer.keys))),
            layer.part in ("layer", "decoder") and look.kind != "encoder",
        )
        for layer in look.layers
    )


def _length(run: tuple[int, int]) -> int:
    return run[1] - run[0]


def _ways(look: Look) -> list[dict[str, Any]]:
    work = look.stream.guesses_work
    guessed = int(GUESS_WORK // work) if work else 0
    own = look.own_tokens
    return [look.way(token, guesses=token >= own.stop - guessed) for token in own]


def _vector_bytes(layer: SeenLayer) -> int:
    call = layer.view.call
    return 4 * (call.q.numel() + call.k.numel() + call.lse.numel())


def _vectors(layer: SeenLayer) -> Vectors:
    call = layer.view.call
    q, k, lse = (np.asarray(x[0].float().cpu()) for x in (call.q, call.k, call.lse))
    return Vectors(q, k, lse, float(call.spec.scale), call.spec.softcap)
