"""A trained model whose heads choose the keys that they read: the same weights, other layers.

quest = choose_blocks(model)        # Quest: Tang et al. 2024, arXiv 2406.10774
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import TypeVar, cast

from torch import nn

from polyhead._utils.checks import check_int
from polyhead.config import (
    AttentionConfig,
    BlockBoundsConfig,
    SelectiveAttentionConfig,
    SelectorConfig,
)
from polyhead.errors import InputError, UnsupportedError
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.selective_attention import SelectiveAttention
from polyhead.models.parts import attention_of, transformer_of
from polyhead.models.transformer import Transformer

Model = TypeVar("Model", bound=nn.Module)


def choose_blocks(
    model: Model,
    selector: SelectorConfig | None = None,
    *,
    layers: Iterable[int] | None = None,
) -> Model:
    """A model of the same weights whose heads choose blocks of keys; nothing is copied.

    Args:
        model: A decoder: a Transformer or LanguageModel; it stays as it is.
        selector: How they choose, without parameters; default ``BlockBoundsConfig()``: Quest, 64
            blocks of 16 keys.
        layers: Which layers; default: all but the first two, as in the paper, that have neither a
            window nor chunks.

    Returns:
        The new model, whose ``new_cache`` makes room for what the selector remembers.

    Raises:
        InputError: A layer that is not there, or no decoder.
        UnsupportedError: Heads of another kind than ``AttentionConfig``, or a selector that has
            weights of its own, which would have to be trained.
    """
    selector = BlockBoundsConfig() if selector is None else selector
    old = transformer_of(model)
    if old.config.kind != "decoder":
        raise InputError(f"choose_blocks needs a decoder: got kind={old.config.kind!r}")
    count = len(old.layers)
    if layers is None:
        chosen = [
            i
            for i, layer in enumerate(old.config.layers)
            if i >= 2 and type(layer.attention) is AttentionConfig
            and layer.attention.visible_window is None
        ]  # fmt: skip
    else:
        chosen = sorted({check_int("layers", i, least=0, error=InputError) for i in layers})
    if chosen and chosen[-1] >= count:
        raise InputError(f"layers must be 0 to {count - 1}: got {chosen[-1]}")
    made = _shallow(old)
    configs = [*old.config.layers]
    for i in chosen:
        layer = _shallow(old.layers[i])
        attention = attention_of(old, i)
        layer.attention = _choosing(old.config.embed_dim, attention, selector, i)
        configs[i] = replace(configs[i], attention=layer.attention.config)
        vars(layer)["config"] = configs[i]
        made.layers[i] = layer
    vars(made)["config"] = replace(old.config, layers=tuple(configs))
    vars(made).pop("_config_json", None)  # made of the old one when it was first asked for
    if isinstance(model, Transformer):
        return cast(Model, made)
    wrapped: Model = type(model)(made, model.tokenizer, f"{model.origin}, {selector.name}")
    return wrapped.train(model.training)


def _choosing(
    embed_dim: int, old: nn.Module, selector: SelectorConfig, layer: int
) -> SelectiveAttention:
    """Attention with the weights of ``old`` whose heads choose."""
    config = getattr(old, "config", None)
    if type(old) is not MultiHeadAttention or type(config) is not AttentionConfig:
        raise UnsupportedError(
            f"layer {layer} has {type(old).__name__}: heads that choose blocks are made of "
            "MultiHeadAttention alone"
        )
    if [*selector.parameter_groups(embed_dim, config)]:
        raise UnsupportedError(f"{selector.name} has weights of its own, which need training")
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    made = SelectiveAttention.__new__(SelectiveAttention)
    vars(made).update(vars(_shallow(old)))
    vars(made)["config"] = SelectiveAttentionConfig(**values, selector=selector)
    vars(made)["_hooks"], vars(made)["_edits"] = {}, {}
    made._add_modules()
    return made.train(old.training)


def _shallow(module: Model) -> Model:
    """A module with the same tensors and parts, whose parts can be replaced."""
    made = copy.copy(module)
    vars(made)["_modules"] = {
        name: _shallow(part) if isinstance(part, nn.ModuleList) else part
        for name, part in module._modules.items()
    }
    return made
