"""Changing heads while a model runs: ablation, and patching from another text.

A head is ablated by replacing its output before the output projection; kernels do not change.

    zero       nothing: the same as zeroing the head's columns of o_proj
    mean       the head's mean output over a reference (Wang et al. 2023)
    resample   its output at random tokens of a reference (Chan et al. 2022)

Letters: B batch, H query heads, T tokens, V value size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from polyhead.errors import InputError
from polyhead.layers.record import HeadEdit
from polyhead.models import Transformer
from polyhead.models.parts import (
    Heads,
    attention_of,
    checked_heads,
    device_of,
    head_count,
    transformer_of,
)

Mode = Literal["zero", "mean", "resample"]
Metric = Callable[[Tensor], Tensor]
"""Logits ``[B, T, W]`` to one number per row ``[B]``."""


@contextmanager
def ablate(
    model: nn.Module,
    heads: Heads,
    mode: Mode = "zero",
    *,
    reference: Tensor | None = None,
    seed: int = 0,
) -> Iterator[None]:
    """Takes heads out of a model while the ``with`` block runs.

    They are out for the thread or task that opened the block; other threads use the whole model.

        with ph.ablate(model, {3: [1], 7: [4, 5]}):
            model.generate("The capital of France is")

    Args:
        model: A Transformer, or what holds one.
        heads: Query heads by layer, both counted from 0: ``{3: [1]}``, ``"3.1,7.4"`` or
            ``[(3, 1), (7, 4)]``.
        mode: What replaces the heads' outputs: ``"zero"``, the ``"mean"`` over the reference, or
            ``"resample"``, outputs at random tokens of the reference.
        reference: ``[B, T]`` token ids, for the last two modes.
        seed: Seed of the random tokens of ``"resample"``.

    Raises:
        InputError: A layer or head that is not there, an unknown mode, or no reference.
    """
    transformer = transformer_of(model)
    chosen = checked_heads(transformer, heads)
    if mode not in ("zero", "mean", "resample"):
        raise InputError(f"mode must be 'zero', 'mean' or 'resample': got {mode!r}")
    if mode != "zero" and reference is None:
        raise InputError(f"mode={mode!r} needs reference=, token ids [B, T] to take outputs from")
    seen = {} if reference is None else head_outputs_of(transformer, reference, list(chosen))
    generator = torch.Generator().manual_seed(seed)
    with ExitStack() as edits:
        for layer, numbers in chosen.items():
            if not numbers:
                continue
            edit: HeadEdit = partial(_zeroed, heads=numbers)
            if mode == "mean":
                edit = partial(_put, heads=numbers, value=seen[layer].mean(dim=(0, 2))[numbers])
            elif mode == "resample":
                edit = partial(_drawn, heads=numbers, seen=seen[layer], generator=generator)
            edits.enter_context(attention_of(transformer, layer).register_head_edit(edit))
        yield


def patch_heads(
    model: nn.Module,
    source: Tensor,
    target: Tensor,
    metric: Metric,
    layers: Sequence[int] | None = None,
) -> list[Tensor]:
    """Activation patching by head: the target text, each head in turn as on the source text.

    Meng et al. 2022, Wang et al. 2023. All heads of a layer run in one batch.

    Args:
        model: A Transformer decoder, or what holds one.
        source: ``[1, T]`` the text from which one head's outputs are taken.
        target: ``[1, T]`` the text that the model runs on.
        metric: What is measured, such as ``logit_difference(answer, other)``.
        layers: Whose heads, counted from 0; None: all.

    Returns:
        ``[H]`` per layer: the metric with that head patched.

    Raises:
        InputError: The texts have not the same number of tokens, or there are several.
    """
    transformer = transformer_of(model)
    if source.shape != target.shape or source.shape[0] != 1:
        raise InputError(
            f"source and target must both be [1, T] with the same T: got {list(source.shape)} and "
            f"{list(target.shape)}"
        )
    chosen = range(len(transformer.layers)) if layers is None else layers
    seen = head_outputs_of(transformer, source, chosen)
    return [_one_head_per_row(transformer, target, layer, seen[layer], metric) for layer in chosen]


def leave_one_out(model: nn.Module, ids: Tensor, metric: Metric) -> list[Tensor]:
    """The metric with each head in turn zeroed, ``[H]`` per layer.

    Args:
        model: A Transformer decoder, or what holds one.
        ids: ``[1, T]``.
        metric: Function of the logits, such as ``next_token_loss(ids)``.
    """
    transformer = transformer_of(model)
    layers = range(len(transformer.layers))
    return [_one_head_per_row(transformer, ids, layer, None, metric) for layer in layers]


def logit_difference(answer: int, other: int, position: int = -1) -> Metric:
    """The metric: logit of one token less that of another, at a position."""

    def metric(logits: Tensor) -> Tensor:
        return logits[:, position, answer] - logits[:, position, other]

    return metric


def next_token_loss(ids: Tensor) -> Metric:
    """The metric: mean −log p of each token of ``ids [1 or B, T]`` after those before it."""

    def metric(logits: Tensor) -> Tensor:
        wanted = ids[:, 1:].to(logits.device).expand(logits.shape[0], -1)
        losses = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), wanted.flatten(), reduction="none"
        )
        return losses.view(wanted.shape).mean(dim=1)

    return metric


def head_outputs_of(model: Transformer, ids: Tensor, layers: Sequence[int]) -> Mapping[int, Tensor]:
    """The heads' outputs ``[B, H, T, V]`` of some layers on a text."""
    seen: dict[int, Tensor] = {}
    with ExitStack() as hooks:
        for layer in layers:

            def keep(out: Tensor, layer: int = layer) -> Tensor:
                seen[layer] = out.detach()
                return out

            hooks.enter_context(attention_of(model, layer).register_head_edit(keep))
        with torch.no_grad():
            model(ids.to(device_of(model)))
    return seen


def _one_head_per_row(
    model: Transformer, ids: Tensor, layer: int, value: Tensor | None, metric: Metric
) -> Tensor:
    """``[H]`` the metric of a batch whose row h has head h changed: to ``value``, or to zero."""
    module = attention_of(model, layer)
    row = torch.arange(head_count(model, layer), device=device_of(model))

    def edit(out: Tensor) -> Tensor:
        out = out.clone()
        out[row, row] = 0.0 if value is None else value[0]
        return out

    with module.register_head_edit(edit), torch.no_grad():
        return metric(model(ids.to(row.device).expand(len(row), -1)))


def _zeroed(out: Tensor, heads: Sequence[int]) -> Tensor:
    out = out.clone()
    out[:, list(heads)] = 0.0
    return out


def _put(out: Tensor, heads: Sequence[int], value: Tensor) -> Tensor:
    """The heads' outputs replaced by ``value [heads, V]`` at every token."""
    out = out.clone()
    out[:, list(heads)] = value[:, None].to(out)
    return out


def _drawn(out: Tensor, heads: Sequence[int], seen: Tensor, generator: torch.Generator) -> Tensor:
    """The heads' outputs replaced by those of random tokens of ``seen [B, H, T, V]``."""
    out = out.clone()
    batch, _, tokens, _ = out.shape
    rows = torch.randint(seen.shape[0], (batch, tokens), generator=generator, device="cpu")
    columns = torch.randint(seen.shape[2], (batch, tokens), generator=generator, device="cpu")
    for head in heads:
        out[:, head] = seen[:, head][rows.to(seen.device), columns.to(seen.device)].to(out)
    return out
