"""Activations of one text in the run of another: what depends on them, and through which path.

    patch            each activation in turn as on the source text       Meng et al. 2022
    attribution      (source − target) · ∂metric/∂activation             Nanda 2023
    patch_path       only the way from some activations to others        Wang et al. 2023
    knockout         some queries do not see some keys                   Geva et al. 2023

Letters: B batch, H heads, T tokens, E embed size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import InputError, UnsupportedError
from polyhead.interpret.ablation import Metric
from polyhead.interpret.activations.tracing import Trace, trace
from polyhead.interpret.activations.wrapping import wrapped
from polyhead.interpret.effects import Effects
from polyhead.layers.recurrent import RecurrentLayer
from polyhead.layers.scope import Scope
from polyhead.models.parts import attention_of, device_of, transformer_of
from polyhead.semantics import Drop, KeyValueSource
from polyhead.semantics.arguments import query_tokens

Place = str | tuple[str, int]
"""A name of ``ph.trace``, ``"layers.3.mlp.out"``; of one head ``("layers.3.attention.q", 2)``."""

_MOST_ROWS = 64


def patch(
    model: nn.Module,
    source: Tensor,
    target: Tensor,
    metric: Metric,
    at: str = "resid_pre",
    each: Sequence[str] = ("layer", "position"),
    *,
    layers: Sequence[int] | None = None,
) -> Effects:
    """The metric on the target text with each activation in turn as on the source text.

    Args:
        model: A Transformer decoder or encoder, or what holds one.
        source: ``[1, T]`` the text from which activations are taken.
        target: ``[1, T]`` the text that the model runs on.
        metric: What is measured, such as ``logit_difference(answer, other)``.
        at: A name below a layer: ``"resid_pre"``, ``"mlp.out"``, ``"attention.heads"``, ….
        each: What is patched one at a time, of ``"layer"``, ``"head"`` and ``"position"``; along
            the others everything is patched at once.
        layers: Which layers; None: all that have ``at``.

    Returns:
        The metric along ``each``.

    Raises:
        InputError: Texts of other shapes, or an axis that the activation does not have.
    """
    seen = _of_source(model, source, target, at, layers)
    masks, axes = _masks(next(iter(seen.values())), each)
    groups = [[layer] for layer in seen] if "layer" in each else [[*seen]]
    if "layer" in each:
        axes = {"layer": tuple(seen), **axes}
    found = []
    target = target.to(device_of(model))
    for group in groups:
        for some in torch.split(masks, _MOST_ROWS):
            with torch.no_grad(), trace(model) as t:
                for layer in group:
                    _put(t, f"layers.{layer}.{at}", seen[layer], some)
                found.append(metric(model(target.expand(len(some), -1))))
    shape = [len(axes[name]) for name in axes]
    return Effects(torch.cat(found).view(shape), axes)


def attribution(
    model: nn.Module,
    source: Tensor,
    target: Tensor,
    metric: Metric,
    at: str = "resid_pre",
    each: Sequence[str] = ("layer", "position"),
    *,
    layers: Sequence[int] | None = None,
) -> Effects:
    """What ``patch`` would change, to first order: one run forward and back for all of it.

    Args:
        model: As in ``patch``, and so the rest.
        source: ``[1, T]``.
        target: ``[1, T]``.
        metric: What is measured.
        at: A name below a layer.
        each: Along what it is not summed, of ``"layer"``, ``"head"`` and ``"position"``.
        layers: Which layers; None: all that have ``at``.

    Returns:
        Gradient times difference along ``each``: an estimate of the change of the metric.

    Raises:
        InputError: As ``patch``.
    """
    seen = _of_source(model, source, target, at, layers)
    with torch.inference_mode(False), torch.enable_grad(), trace(model) as t:
        t.layers[0].resid_pre.edit(lambda x: x.detach().clone().requires_grad_())
        points = [t[f"layers.{layer}.{at}"] for layer in seen]
        if at.endswith(("scores", "weights")):
            for point in points:
                point.edit(torch.clone)  # else the output does not depend on them
        own = [point.save() for point in points]
        measured = metric(model(target.to(device_of(model)))).sum()
        values = [each_.value for each_ in own]
        gradients = torch.autograd.grad(measured, values)
    products = [
        ((seen[layer] - value.detach()) * gradient).nan_to_num()
        for layer, value, gradient in zip(seen, values, gradients, strict=True)
    ]
    stacked = torch.stack(products)[:, 0]  # [layers, (heads,) T, …]
    names = ["layer", *_axes_of(products[0])]
    _check(each, names)
    dropped = [i for i in range(stacked.ndim) if i >= len(names) or names[i] not in each]
    axes = {"layer": tuple(seen), **_axes_of(products[0])}
    kept = stacked.sum(dim=dropped) if dropped else stacked
    return Effects(kept, {name: axes[name] for name in names if name in each})


def patch_path(
    model: nn.Module,
    source: Tensor,
    target: Tensor,
    metric: Metric,
    senders: Sequence[Place],
    receivers: Sequence[Place],
) -> Tensor:
    """The metric where receivers read what the senders of the source text wrote, and no more.

    The senders are as on the source text; all other heads and networks write what they write on the
    target text, so that the change reaches receivers on the direct way alone; then the model runs
    on the target text with what the receivers were.

    Args:
        model: A Transformer decoder, or what holds one.
        source: ``[B, T]`` the text from which senders are taken.
        target: ``[B, T]`` the text that the model runs on.
        metric: What is measured.
        senders: What is patched: ``"layers.0.resid_pre"``, ``("layers.3.attention.heads", 2)``,
            ``"layers.4.mlp.out"``.
        receivers: What may read it: ``("layers.7.attention.q", 1)``, ``"layers.7.mlp.input"``,
            ``"final"``.

    Returns:
        ``[B]``.

    Raises:
        InputError: Texts of different shapes.
    """
    _check_texts(source, target)
    device = device_of(model)
    source, target = source.to(device), target.to(device)
    sent = _saved(model, source, [_name(place) for place in senders])
    with trace(model) as t:
        frozen = [name for name in t.names() if name.endswith((".attention.heads", ".mlp.out"))]
    own = _saved(model, target, frozen)
    with torch.no_grad(), trace(model) as t:
        for name in frozen:
            t[name].set(own[name])
        for place in senders:
            _put_place(t, place, sent[_name(place)])
        read = {_name(place): t[_name(place)].save() for place in receivers}
        model(target)
    with torch.no_grad(), trace(model) as t:
        for place in receivers:
            _put_place(t, place, read[_name(place)].value)
        return metric(model(target))


@contextmanager
def knockout(
    model: nn.Module,
    queries: Sequence[int],
    keys: Sequence[int],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Iterator[None]:
    """While the block runs, queries at some positions do not see keys at others.

    It is a mask: kernels stay, and a row's other weights share what is gone.

    Args:
        model: A Transformer, or what holds one.
        queries: Positions that do not see.
        keys: Positions that are not seen by them.
        layers: In which layers; None: in all with attention to tokens.
        heads: Of which query heads; None: of all.

    Raises:
        InputError: A layer that is not there.
        UnsupportedError: A layer without attention to tokens.
    """
    transformer = transformer_of(model)
    every = range(len(transformer.layers))
    if layers is None:
        layers = [i for i in every if not isinstance(attention_of(transformer, i), RecurrentLayer)]
    scope = Scope()

    def around(call: Any, q: Tensor, given: KeyValueSource, **options: Any) -> Tensor:
        at = query_tokens(q, given, options.get("q_positions")).position_tensor(q.device)
        of_keys = given.tokens.position_tensor(q.device)
        rows = torch.isin(at, torch.tensor(list(queries), device=q.device))
        columns = torch.isin(of_keys, torch.tensor(list(keys), device=q.device))
        hidden = (rows[..., :, None] & columns[..., None, :]).view(
            -1, 1, q.shape[2], columns.shape[-1]
        )
        if heads is not None:
            chosen = torch.zeros(q.shape[1], dtype=torch.bool, device=q.device)
            chosen[list(heads)] = True
            hidden = hidden & chosen[:, None, None]
        mask = options.pop("mask", None)
        out: Tensor = call(q, given, mask=Drop(hidden) if mask is None else mask & Drop(hidden),
                           **options)  # fmt: skip
        return out

    with ExitStack() as stack:
        stack.callback(scope.close)
        for layer in layers:
            module = attention_of(transformer, layer)
            if isinstance(module, RecurrentLayer):
                raise UnsupportedError(
                    f"layer {layer} is a {type(module).__name__}, which has no weights to knock out"
                )
            stack.enter_context(wrapped(module, "_attend", scope, around))
        yield


def _check_texts(source: Tensor, target: Tensor, rows: int | None = None) -> None:
    if source.shape != target.shape or (rows is not None and source.shape[0] != rows):
        wanted = "[1, T]" if rows == 1 else "[B, T]"
        raise InputError(
            f"source and target must both be {wanted} with the same T: got {list(source.shape)} "
            f"and {list(target.shape)}"
        )


def _of_source(
    model: nn.Module, source: Tensor, target: Tensor, at: str, layers: Sequence[int] | None
) -> dict[int, Tensor]:
    """By layer the activation on the source text."""
    _check_texts(source, target, rows=1)
    with trace(model) as t:
        known = set(t.names())
        if layers is None:
            layers = [i for i in range(len(t.layers)) if f"layers.{i}.{at}" in known]
        if not layers:
            raise InputError(f"no layer has {at!r}: names are {', '.join(t.layers[0].names())}")
    names = [f"layers.{layer}.{at}" for layer in layers]
    seen = _saved(model, source.to(device_of(model)), names)
    return dict(zip(layers, seen.values(), strict=True))


def _saved(model: nn.Module, ids: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    with torch.no_grad(), trace(model) as t:
        asked = {name: t[name].save() for name in names}
        model(ids)
    return {name: each.value for name, each in asked.items()}


def _axes_of(x: Tensor) -> dict[str, tuple[int, ...]]:
    """The axes of an activation ``[B, T, …]`` or ``[B, H, T, …]`` that can be patched singly."""
    if x.ndim == 3:
        return {"position": tuple(range(x.shape[1]))}
    return {"head": tuple(range(x.shape[1])), "position": tuple(range(x.shape[2]))}


def _check(each: Sequence[str], names: Sequence[str]) -> None:
    for name in each:
        if name not in names:
            raise InputError(
                f"each must be of {', '.join(names)} for this activation: got {name!r}"
            )


def _masks(x: Tensor, each: Sequence[str]) -> tuple[Tensor, dict[str, tuple[int, ...]]]:
    """``[N, (H,) T, 1]`` what is patched in each of N runs, and the axes of the runs."""
    axes = _axes_of(x)
    _check(each, ["layer", *axes])
    mask = torch.ones(1, dtype=torch.bool, device=x.device)
    for name, labels in axes.items():
        one = torch.eye(len(labels), dtype=torch.bool, device=x.device)
        chosen = one if name in each else one.any(dim=0, keepdim=True)
        chosen = chosen.view(1, len(chosen), *[1] * (mask.ndim - 1), len(labels))
        mask = (mask[:, None, ..., None] & chosen).flatten(0, 1)
    return mask[..., None], {name: axes[name] for name in axes if name in each}


def _put(t: Trace, name: str, value: Tensor, mask: Tensor) -> None:
    t[name].edit(lambda x: torch.where(mask, value.to(x), x))


def _name(place: Place) -> str:
    return place if isinstance(place, str) else place[0]


def _put_place(t: Trace, place: Place, value: Tensor) -> None:
    def put(x: Tensor) -> Tensor:
        if isinstance(place, str):
            return value.to(x)
        x = x.clone()
        x[:, place[1]] = value[:, place[1]].to(x)
        return x

    t[_name(place)].edit(put)
