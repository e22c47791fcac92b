"""The parts of a model that tools reach into: its Transformer, its self-attention layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from polyhead.errors import InputError, UnsupportedError, shortened
from polyhead.layers import MultiHeadAttention, TransformerLayer
from polyhead.layers.hooks import Hooked
from polyhead.layers.lora import LoraLinear
from polyhead.models import Transformer

HeadsByLayer = Mapping[int, Sequence[int]]
Heads = HeadsByLayer | str | Iterable[tuple[int, int]]
"""Heads by layer, ``{18: [6]}``; or ``"18.6,17.3"``, or pairs ``[(18, 6)]``: layer, head."""


def transformer_of(model: nn.Module) -> Transformer:
    """The Transformer that a model is or holds.

    Raises:
        InputError: It holds none.
    """
    found = next((part for part in model.modules() if isinstance(part, Transformer)), None)
    if found is None:
        raise InputError(f"{type(model).__name__} holds no polyhead.Transformer")
    return found


def layer_of(model: Transformer, layer: int) -> TransformerLayer:
    """A layer by its number.

    Raises:
        InputError: No such layer.
    """
    if not 0 <= layer < len(model.layers):
        raise InputError(f"layers are counted from 0 to {len(model.layers) - 1}: got {layer!r}")
    return cast(TransformerLayer, model.layers[layer])


def attention_of(model: Transformer, layer: int) -> Hooked:
    """The self-attention of a layer, of any head layout.

    Raises:
        InputError: No such layer.
    """
    return layer_of(model, layer).attention


def head_count(model: Transformer, layer: int) -> int:
    """Heads of a layer's self-attention whose outputs can be edited.

    Raises:
        InputError: No such layer.
    """
    return layer_of(model, layer).config.attention.output_heads


def projections_of(model: Transformer, layer: int) -> MultiHeadAttention:
    """The self-attention of a layer whose heads are rows and columns of four projections.

    Raises:
        InputError: No such layer.
        UnsupportedError: An attention that does more, or something else; or an adapter beside
            the model's weights.
    """
    module = attention_of(model, layer)
    if type(module) is not MultiHeadAttention:
        raise UnsupportedError(
            f"layer {layer} is a {type(module).__name__}: this needs a MultiHeadAttention, whose "
            "heads are rows of q_proj, k_proj and v_proj and columns of o_proj"
        )
    if not module.config.projects_values:
        raise UnsupportedError(
            f"layer {layer} normalizes its values or makes them of its keys: this needs values "
            "that v_proj alone makes"
        )
    if any(isinstance(part, LoraLinear) for part in model.modules()):
        raise UnsupportedError(
            "this reads weights, and the model has an adapter beside them: call merge() of the "
            "adapter first"
        )
    return module


def checked_heads(model: Transformer, heads: Heads) -> dict[int, list[int]]:
    """Heads by layer, each once and in order.

    Raises:
        InputError: A layer or a head that is not there, or no heads at all.
    """
    chosen = {}
    for layer, numbers in _by_layer(heads).items():
        count = head_count(model, layer)
        for head in numbers:
            if not 0 <= head < count:
                raise InputError(f"heads of layer {layer} are 0 to {count - 1}: got {head}")
        chosen[layer] = sorted(set(numbers))
    return chosen


def _by_layer(heads: Heads) -> HeadsByLayer:
    if isinstance(heads, str):
        return parse_heads(heads)
    if isinstance(heads, Mapping):
        for layer, numbers in heads.items():
            if isinstance(numbers, int):
                raise InputError(
                    f"heads of a layer must be a list, such as {{{layer}: [{numbers}]}}: got "
                    f"{{{layer}: {numbers}}}"
                )
        return heads
    found: dict[int, list[int]] = {}
    try:
        for layer, head in heads:
            found.setdefault(int(layer), []).append(int(head))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"heads must be {{18: [6]}}, '18.6' or [(18, 6)] (layer, head): got {shortened(heads)}"
        ) from error
    return found


_LONGEST_PART = 24


def parse_heads(text: str) -> dict[int, list[int]]:
    """``"3.1,7.4"`` as ``{3: [1], 7: [4]}``: layer, a point, head.

    Raises:
        InputError: It is not of that form.
    """
    found: dict[int, list[int]] = {}
    for part in text.split(","):
        layer, point, head = part.strip().partition(".")
        if not (point and layer.isdecimal() and head.isdecimal()) or len(part) > _LONGEST_PART:
            raise InputError(f"heads must look like 3.1,7.4 (layer.head): got {shortened(text)}")
        found.setdefault(int(layer), []).append(int(head))
    return found


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    return next(iter(model.parameters())).device


def all_heads(model: Transformer) -> Iterable[tuple[int, int]]:
    """Every (layer, head) of a model's self-attention."""
    for layer in range(len(model.layers)):
        for head in range(head_count(model, layer)):
            yield layer, head
