"""Calls of a model that are the same on all ranks of ``tensor``, told before anything is computed.

Ranks that share heads add up what they computed: other tokens on one of them would be a wrong sum,
and another number of tokens the end of a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyhead.caches import ModelCache
from polyhead.errors import InputError
from polyhead.models import Transformer
from polyhead.parallel.ranks import Ranks, agreed, check_same, content, fingerprint

NAMES = (
    ("B, the batch rows of ids,", ""),
    ("T, the tokens of ids,", ""),
    ("the rest of the call (mask, kernel, cache, positions)", ""),
    ("the tokens (a checksum of ids)", "; give ranks that draw tokens one seed"),
    ("the positions (their checksum)", ""),
)

SAME = (
    ("the model's configuration", ""),
    ("the number of parameters", ""),
    ("the weights (a checksum of some)", "; load them, or draw them after one torch.manual_seed"),
    ("the arguments (exchange, order, training, loss_parallel, sequence_parallel)", ""),
)

_SAMPLE = 16
"""Numbers of a parameter that are compared."""


def facts_of(ids: object, positions: Tensor | None, *rest: object) -> list[int]:
    """What a call is told by, in the order of ``NAMES``; tensors of ``rest`` by their content."""
    if not isinstance(ids, Tensor) or ids.ndim < 2 or not ids.numel():
        got = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"ids must be [B, T] with at least one token on every rank: got {got}")
    told = [content(each) if isinstance(each, Tensor) else each for each in rest]
    return [
        len(ids), ids.shape[1], fingerprint(positions is None, ids.shape[2:], told), content(ids),
        content(positions),
    ]  # fmt: skip


def check_alike(ranks: Ranks, found: Sequence[Sequence[int]]) -> None:
    """Raises where a rank makes another call.

    Raises:
        RankError: Names the rank and what differs.
    """
    for (name, hint), values in zip(NAMES, zip(*found, strict=True), strict=True):
        check_same(ranks, name, values, hint)


def agree_alike(
    dimensions: Sequence[Ranks], ids: Tensor, positions: Tensor | None, *rest: object,
    refused: Exception | None = None,
) -> None:  # fmt: skip
    """Raises on every rank unless all make the same call.

    Raises:
        RankError: Names the rank that makes another.
    """
    facts = [0] * len(NAMES)
    try:
        facts = facts_of(ids, positions, *rest)
    except InputError as error:
        refused = refused or error
    agreed([(ranks, partial(check_alike, ranks)) for ranks in dimensions], facts, refused)


@dataclass(eq=False)
class Told:
    """``Transformer.hidden_states`` or ``encode`` of calls that ranks have agreed on."""

    model: Transformer
    ranks: Ranks
    method: str

    def __call__(self, ids: Tensor, **call: Any) -> Tensor:
        told = dict(call)
        positions, cache = told.pop("positions", None), told.pop("cache", None)
        held = cache.lengths if isinstance(cache, ModelCache) else None
        if not torch.compiler.is_compiling():  # notes are read on the way, graphs are not
            agree_alike([self.ranks], ids, positions, held, *told, *told.values())
        made: Tensor = getattr(type(self.model), self.method)(self.model, ids, **call)
        return made


def tell_calls(model: Transformer, ranks: Ranks) -> None:
    """From now on the ranks of ``tensor`` agree on every call of the model."""
    model.hidden_states = Told(model, ranks, "hidden_states")  # type: ignore[method-assign]
    model.encode = Told(model, ranks, "encode")  # type: ignore[method-assign]


def same_on_all(
    dimensions: Sequence[Ranks], model: object, arguments: object, refused: Exception | None
) -> None:
    """Raises on every rank of a mesh where one refuses, or was given another model or arguments.

    Raises:
        RankError: Names the rank.
        Exception: ``refused`` itself, on the rank that gave it.
    """
    facts = [0] * len(SAME)
    if isinstance(model, nn.Module):
        config = model.config.to_json() if isinstance(model, Transformer) else repr(model)
        count = sum(parameter.numel() for parameter in model.parameters())
        facts = [fingerprint(config), count, _some(model), fingerprint(arguments)]

    def check(ranks: Ranks, found: Sequence[Sequence[int]]) -> None:
        for (name, hint), values in zip(SAME, zip(*found, strict=True), strict=True):
            check_same(ranks, name, values, hint)

    # Twice: what a dimension finds, those before it must hear.
    agreed(
        [(ranks, partial(check, ranks)) for ranks in (*dimensions, *dimensions[:-1])], facts,
        refused,
    )  # fmt: skip


def _some(model: nn.Module) -> int:
    """A checksum of a few numbers of every parameter that is whole and has numbers."""
    with torch.no_grad():
        parts = [
            x.flatten()[:: max(1, x.numel() // _SAMPLE)][:_SAMPLE].float()
            for x in model.parameters()
            if not isinstance(x, DTensor) and not x.is_meta
        ]
        return content(torch.cat(parts).view(torch.int32)) if parts else 0
