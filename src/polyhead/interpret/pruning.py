"""Which heads matter on a text, and a smaller model without some.

Michel, Levy & Neubig 2019, "Are Sixteen Heads Really Better than One?": give every head a gate ξ
of 1; its importance is E |∂L/∂ξ| (eq. 2), one forward and one backward pass for all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from polyhead.config import AttentionConfig
from polyhead.errors import InputError, UnsupportedError
from polyhead.generation import LanguageModel, TextEncoder
from polyhead.interpret.ablation import leave_one_out, next_token_loss
from polyhead.layers import MultiHeadAttention
from polyhead.models import Transformer
from polyhead.models.parts import (
    Heads,
    attention_of,
    checked_heads,
    device_of,
    head_count,
    projections_of,
    transformer_of,
)
from polyhead.models.quantized import unpacked_state

Model = TypeVar("Model", Transformer, LanguageModel, TextEncoder)


def head_importance(
    model: nn.Module, ids: Tensor, method: Literal["gradient", "leave-one-out"] = "gradient"
) -> list[Tensor]:
    """How much the loss on a text depends on each head.

    Args:
        model: A Transformer decoder, or what holds one.
        ids: ``[B, T]`` whose next tokens are predicted.
        method: ``"gradient"``: E |∂L/∂gate|, mean over the rows. ``"leave-one-out"``: by how much
            the loss rises when the head is zeroed, exact and as many runs as there are heads.

    Returns:
        ``[H]`` per layer, in nats per token.

    Raises:
        InputError: An unknown method, or fewer than two tokens.
    """
    if method not in ("gradient", "leave-one-out"):
        raise InputError(f"method must be 'gradient' or 'leave-one-out': got {method!r}")
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise InputError(f"ids must be [B, T] with at least two tokens: got {list(ids.shape)}")
    transformer = transformer_of(model)
    if method == "leave-one-out":
        return _losses_without(transformer, ids)
    ids = ids.to(device_of(transformer))
    gates: list[Tensor] = []
    with ExitStack() as edits, torch.enable_grad():
        for layer in range(len(transformer.layers)):
            module = attention_of(transformer, layer)
            count = head_count(transformer, layer)
            gate = torch.ones(
                len(ids), count, device=ids.device, requires_grad=True, dtype=torch.float32
            )
            gates.append(gate)

            def gated(out: Tensor, gate: Tensor = gate) -> Tensor:
                return out * gate[:, :, None, None].to(out.dtype)

            edits.enter_context(module.register_head_edit(gated))
        losses = next_token_loss(ids)(transformer(ids))
        found = torch.autograd.grad(losses.sum(), gates)
    return [gradient.abs().mean(dim=0) for gradient in found]


def _losses_without(model: Transformer, ids: Tensor) -> list[Tensor]:
    risen: list[Tensor] = []
    for i in range(len(ids)):
        row = ids[i : i + 1]
        metric = next_token_loss(row)
        with torch.no_grad():
            whole = metric(model(row.to(device_of(model))))
        without = leave_one_out(model, row, metric)
        rises = [(losses - whole) / len(ids) for losses in without]
        risen = rises if not risen else [a + b for a, b in zip(risen, rises, strict=True)]
    return risen


def prune(model: Model, heads: Heads) -> Model:
    """A smaller model of the same kind without some heads; equal to the model with them zeroed.

    The heads of a group share a key/value head, and every group must stay as large as the others:
    whole groups go (with their key/value head), or as many heads from each group.

    Args:
        model: A Transformer, LanguageModel or TextEncoder; it stays as it is.
        heads: Query heads by layer, both counted from 0.

    Returns:
        The new model. Where its layers differ in their heads, ``save_checkpoint`` needs
        ``form="polyhead"``.

    Raises:
        InputError: A layer or head that is not there, all heads of a layer, or groups of unequal
            size; says which.
        UnsupportedError: A norm over all heads together, whose result would change, or attention of
            another layout.
    """
    transformer = transformer_of(model)
    chosen = {
        layer: dropped for layer, dropped in checked_heads(transformer, heads).items() if dropped
    }
    config = transformer.config
    if config.relative_bias is not None or config.weights_of:
        what = "a bias" if config.relative_bias is not None else "weights"
        raise UnsupportedError(f"layers that share {what} cannot lose heads one by one")
    layers = list(config.layers)
    kept: dict[int, tuple[list[int], list[int]]] = {}
    for layer, dropped in chosen.items():
        attention = projections_of(transformer, layer).config
        kept[layer] = _remaining(attention, dropped, layer)
        q_heads, kv_heads = kept[layer]
        smaller = replace(attention, num_heads=len(q_heads), num_kv_heads=len(kv_heads))
        layers[layer] = replace(layers[layer], attention=smaller)
    config = replace(config, layers=tuple(layers))
    like = next(transformer.parameters())
    with torch.device(like.device):
        pruned = Transformer(config).to(like.dtype)
    state = unpacked_state(transformer)
    for layer, (q_heads, kv_heads) in kept.items():
        module = projections_of(transformer, layer)
        for name, tensor in _cut(module, q_heads, kv_heads).items():
            state[f"layers.{layer}.attention.{name}"] = tensor
    pruned.load_state_dict(state)
    pruned.train(transformer.training)
    if isinstance(model, Transformer):
        return pruned
    wrapped = type(model)(pruned, model.tokenizer, f"{model.origin}, pruned")
    return wrapped.train(model.training)


def _remaining(
    config: AttentionConfig, dropped: Sequence[int], layer: int
) -> tuple[list[int], list[int]]:
    """Query heads and kv heads that stay."""
    if config.alibi is not None:
        raise UnsupportedError(
            f"layer {layer} has ALiBi, whose slopes follow from the number of heads: without one, "
            "the others would change"
        )
    if config.hands_on_keys:
        raise UnsupportedError(f"layer {layer} hands its keys on, which other layers need whole")
    if config.qk_norm is not None and config.qk_norm.per_head:
        raise UnsupportedError(f"layer {layer} has a norm for each head: pruning does not cut it")
    if config.qk_norm is not None and config.qk_norm.place == "full_width":
        raise UnsupportedError(
            f"layer {layer} normalizes all heads together (qk_norm full_width): without one, the "
            "others would change"
        )
    group = config.num_heads // config.num_kv_heads
    q_heads = [head for head in range(config.num_heads) if head not in dropped]
    if not q_heads:
        raise InputError(f"layer {layer} must keep a head: all {config.num_heads} are to go")
    sizes = {
        kv_head: sum(head // group == kv_head for head in q_heads)
        for kv_head in range(config.num_kv_heads)
    }
    left = {size for size in sizes.values() if size}
    if len(left) > 1:
        told = ", ".join(f"kv head {kv_head} keeps {size}" for kv_head, size in sizes.items())
        raise InputError(
            f"the groups of layer {layer} must keep as many heads each, or none: {told}; take as "
            f"many from each group of {group}, or whole groups"
        )
    return q_heads, [kv_head for kv_head, size in sizes.items() if size]


def _cut(
    module: MultiHeadAttention, q_heads: Sequence[int], kv_heads: Sequence[int]
) -> dict[str, Tensor]:
    """The parameters of an attention that has these heads only."""
    state = {}
    for name, heads, size in (
        ("q_proj", q_heads, module.head_dim),
        ("k_proj", kv_heads, module.head_dim),
        ("v_proj", kv_heads, module.v_head_dim),
    ):
        projection: nn.Linear = getattr(module, name)
        rows = torch.cat(
            [torch.arange(head * size, (head + 1) * size, device="cpu") for head in heads]
        )
        for leaf, tensor in (("weight", projection.weight), ("bias", projection.bias)):
            if tensor is not None:
                state[f"{name}.{leaf}"] = tensor.detach()[rows.to(tensor.device)]
    size = module.v_head_dim
    columns = torch.cat(
        [torch.arange(head * size, (head + 1) * size, device="cpu") for head in q_heads]
    )
    weight = module.o_proj.weight.detach()
    state["o_proj.weight"] = weight[:, columns.to(weight.device)]
    if module.sinks is not None:
        state["sinks"] = module.sinks.detach()[list(q_heads)]
    return state
