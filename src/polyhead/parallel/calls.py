"""Calls of a model that are the same on all ranks of ``tensor``, told before anything is computed.

Ranks that share heads add up what they computed: other tokens on one of them would be a wrong sum,
and another number of tokens the end of a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyhead.caches import ModelCache
from polyhead.errors import InputError
from polyhead.models import Transformer
from polyhead.parallel.model_cache import RanksCache
from polyhead.parallel.ranks import (
    Ranks,
    agreed,
    check_same,
    content,
    fingerprint,
    refuse,
    tell_backward,
    unsupported,
)

NAMES = (
    ("B, the batch rows of ids,", ""),
    ("T, the tokens of ids,", ""),
    ("the rest of the call (mask, kernel, cache, positions)", ""),
    ("the tokens (a checksum of ids)", "; give ranks that draw tokens one seed"),
    ("the positions (their checksum)", ""),
    ("the mode (gradients, training, autocast, dtypes of the weights)", ""),
)

SAME = (
    ("the model's configuration", ""),
    ("the number of parameters", ""),
    ("the weights (a checksum of some)", "; load them, or draw them after one torch.manual_seed"),
    ("the arguments (exchange, order, training, loss_parallel, sequence_parallel)", ""),
)

DIMENSIONS: WeakKeyDictionary[nn.Module, list[Ranks]] = WeakKeyDictionary()
"""The ranks of every dimension of the mesh that a module was parallelized for."""

_LAST_NUMBER = [0]
"""What ``same_on_all`` returned last."""

_SAMPLE = 16
"""Numbers of a parameter that are compared."""


def call_signature(
    module: nn.Module, ids: object, positions: Tensor | None, *rest: object
) -> list[int]:
    """What a call is told by, in the order of ``NAMES``; tensors of ``rest`` by their content."""
    if not isinstance(ids, Tensor) or ids.ndim < 2 or not ids.numel():
        got = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"ids must be [B, T] with at least one token on every rank: got {got}")
    of_positions = None if positions is None else (positions.ndim, len(positions[..., 0:1]))
    call_fields = fingerprint(of_positions, ids.shape[2:], ids.dtype, *rest)
    return [
        len(ids), ids.shape[1], call_fields, content(ids), content(positions), mode(module, ids)
    ]  # fmt: skip


def mode(module: nn.Module, *inputs: Tensor) -> int:
    """A number that differs where the modes of ranks differ, which decide what they exchange."""
    learns = torch.is_grad_enabled()
    return fingerprint(
        learns, torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(),
        [(torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in ("cpu", "cuda")],
        [each.training for each in module.modules()],
        [(str(x.dtype), learns and x.requires_grad) for x in module.parameters()],
        [learns and x.requires_grad for x in inputs],
    )  # fmt: skip


def check_alike(ranks: Ranks, found: Sequence[Sequence[int]]) -> None:
    """Raises where a rank makes another call.

    Raises:
        RankError: Names the rank and what differs.
    """
    for (name, hint), values in zip(NAMES, zip(*found, strict=True), strict=True):
        check_same(ranks, name, values, hint)


def agree_alike(
    dimensions: Sequence[Ranks], what: str, module: nn.Module, ids: Tensor,
    positions: Tensor | None, *rest: object, refused: Exception | None = None,
) -> None:  # fmt: skip
    """Raises on every rank unless all make the same call.

    Raises:
        RankError: Names the rank that makes another.
    """
    facts = [0] * len(NAMES)
    try:
        facts = call_signature(module, ids, positions, *rest)
    except Exception as error:  # whatever it is, other ranks must not wait
        refused = refused or error
    agreed([(ranks, partial(check_alike, ranks)) for ranks in dimensions], what, facts, refused)


@dataclass(eq=False)
class Bound:
    """Runs before ``forward``: arguments that it does not take are refused on all ranks."""

    dimensions: Sequence[Ranks]

    def __call__(self, module: nn.Module, given: tuple[Any, ...], call: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            signature(type(module).forward).bind(module, *given, **call)
        except TypeError as error:
            refuse(self.dimensions, TypeError(f"{type(module).__name__}: {error}"))


@dataclass(eq=False)
class AgreedCall:
    """``Transformer.hidden_states`` or ``encode`` of calls that ranks have agreed on."""

    model: Transformer
    ranks: Ranks
    method: str

    def __call__(self, ids: Tensor, **call: Any) -> Tensor:
        method = getattr(type(self.model), self.method)
        if torch.compiler.is_compiling():  # notes are read on the way, graphs are not
            made: Tensor = method(self.model, ids, **call)
            return made
        call_fields = {"kernel": "auto"} | {name: x for name, x in call.items() if x is not None}
        positions, cache = call_fields.pop("positions", None), call_fields.pop("cache", None)
        held: object = type(cache).__name__
        if isinstance(cache, ModelCache):
            held = cache.lengths, [each.description() for each in cache.layers]
        if isinstance(cache, RanksCache):
            held = held, cache.history
        agree_alike(
            [self.ranks], f"{self.method} of a model", self.model, ids, positions, held,
            sorted(call_fields.items()),
        )  # fmt: skip
        if isinstance(cache, RanksCache):
            cache.note(ids, positions)
        return tell_backward([self.ranks], method(self.model, ids, **call))


@dataclass(eq=False)
class _NewCache:
    """``Transformer.new_cache`` whose ranks agree on what is done with it."""

    model: Transformer
    ranks: Ranks

    def __call__(self, *given: Any, **options: Any) -> ModelCache:
        if options.get("evicting") is not None:
            raise unsupported("a cache that evicts keys: ranks choose different ones")
        cache = type(self.model).new_cache(self.model, *given, **options)
        return RanksCache(cache.layers, cache.cross, cache.owner, [self.ranks])


def agree_on_calls(model: Transformer, ranks: Ranks) -> None:
    """From now on the ranks of ``tensor`` agree on every call of the model."""
    model.hidden_states = AgreedCall(model, ranks, "hidden_states")  # type: ignore[method-assign]
    model.encode = AgreedCall(model, ranks, "encode")  # type: ignore[method-assign]
    model.new_cache = _NewCache(model, ranks)  # type: ignore[method-assign]
    model.register_forward_pre_hook(Bound([ranks]), prepend=True, with_kwargs=True)


def same_on_all(
    dimensions: Sequence[Ranks], model: object, arguments: object, refused: Exception | None
) -> int:
    """Raises on every rank of a mesh where one refuses, or was given another model or arguments.

    Returns:
        A number that is the same on all ranks, and greater than what this returned before.

    Raises:
        RankError: Names the rank.
        Exception: ``refused`` itself, on the rank that gave it.
    """
    facts = [0] * len(SAME)
    try:
        if isinstance(model, nn.Module):
            config = model.config.to_json() if isinstance(model, Transformer) else repr(model)
            count = sum(parameter.numel() for parameter in model.parameters())
            facts = [fingerprint(config), count, _some(model), fingerprint(arguments)]
    except Exception as error:  # whatever it is, other ranks must not wait
        refused = refused or error

    def check(ranks: Ranks, found: Sequence[Sequence[int]]) -> None:
        for (name, hint), values in zip(SAME, zip(*found, strict=True), strict=True):
            check_same(ranks, name, values, hint)

    # Twice: what a dimension finds, those before it must hear.
    agreed(
        [(ranks, partial(check, ranks)) for ranks in (*dimensions, *dimensions[:-1])],
        "parallelize", facts, refused,
    )  # fmt: skip
    number = _LAST_NUMBER[0] + 1
    for ranks in dimensions:
        number = max(each for (each,) in ranks.agree("parallelize", [number]))
    _LAST_NUMBER[0] = number
    return number


def _some(model: nn.Module) -> int:
    """A checksum of a few numbers of every parameter that is whole and has numbers."""
    with torch.no_grad():
        parts = [
            x.flatten()[:: max(1, x.numel() // _SAMPLE)][:_SAMPLE].float()
            for x in model.parameters()
            if not isinstance(x, DTensor) and not x.is_meta
        ]
        return content(torch.cat(parts).view(torch.int32)) if parts else 0
