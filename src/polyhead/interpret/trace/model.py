"""One head of a loaded model on a text, step by step, from the numbers the layer really used.

The layer runs as usual while hooks record its input and its ``AttentionRecord``; the steps are then
computed again in float64 from these, so that the last one, the layer's output, can be compared with
what the layer returned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyhead._utils.texts import Texts
from polyhead.interpret.trace.steps import (
    Trace,
    TraceStep,
    combine_steps,
    head_steps,
    projection_step,
    subscript,
    titled,
)
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.record import AttentionRecord
from polyhead.layers.scope import Scope
from polyhead.models.naming import attention_modules, numbered_layers
from polyhead.semantics import Bias, TensorBias


def trace_model(
    model: nn.Module,
    ids: Sequence[int],
    layer: int,
    head: int,
    tokens: Sequence[str] = (),
    *,
    language: str = "en",
) -> Trace:
    """Works one head of one layer on the tokens ``ids``.

    Heads and layers are counted from 0. The keys are those of ``trace_attention`` with this head's
    number, and ``headN.Q_placed`` and ``headN.K_placed`` where queries and keys are normalized or
    rotated before they meet.

    Args:
        model: called as ``model(ids [1, T])``; holds ``MultiHeadAttention`` modules.
        ids: Token ids of the text.
        layer: Index of the attention layer, from 0, in the order in which the model holds them.
        head: Index of the query head, from 0.
        tokens: A name for each token.
        language: language of the titles, a code of ``polyhead._utils.texts.LANGUAGES``.

    Raises:
        ValueError: a layer or head that is not there, by name.
    """
    modules = attention_modules(model)
    numbered = numbered_layers(modules)
    if not 0 <= layer < len(numbered):
        raise ValueError(f"layer must be from 0 to {len(numbered) - 1}: got {layer}")
    module = modules[numbered[layer]]
    if type(module) is not MultiHeadAttention:
        raise ValueError(
            f"layer {layer} is a {type(module).__name__}, whose heads have no keys and values of "
            "their own to show: trace a MultiHeadAttention"
        )
    if not module.config.projects_values:
        raise ValueError(
            f"layer {layer} normalizes its values or makes them of its keys: trace a layer whose "
            "v_proj alone makes them"
        )
    if not 0 <= head < module.num_heads:
        raise ValueError(f"head must be from 0 to {module.num_heads - 1}: got {head}")
    said = Texts(language, "trace")
    x, record, output = _run(model, module, ids)
    kv_head = head // (module.num_heads // module.num_kv_heads)
    steps = [TraceStep("X", said("input_layer"), "X", x)]
    for letter, name, number in (("Q", "q_proj", head), ("K", "k_proj", kv_head)):
        steps.append(_projection(module, letter, name, head, number, x, said))
    placed = {
        "Q": record.q[0, head].double(),
        "K": record.k[0, kv_head].double(),
    }
    steps += _placed_steps(_placement(module), head, placed, said)
    steps.append(_projection(module, "V", "v_proj", head, kv_head, x, said))
    exact_scale = math.isclose(record.scale, 1 / math.sqrt(module.head_dim), rel_tol=1e-12)
    steps += head_steps(
        head,
        placed["Q"],
        placed["K"],
        record.v[0, kv_head].double(),
        scale=None if exact_scale else record.scale,
        softcap=record.softcap,
        bias=_bias(record, head),
        visible=_visible(record, head),
        sink=None if record.sinks is None else record.sinks[head].item(),
        said=said,
    )
    steps += _combined(module, record, said)
    difference = float((steps[-1].values - output.double()).abs().max())
    dtype = str(output.dtype).removeprefix("torch.")
    note = said("difference", dtype=dtype, difference=f"{difference:.1e}")
    title = said(
        "title_model",
        layer=layer,
        head=head,
        heads=module.num_heads,
        kv_head=kv_head,
        kv_heads=module.num_kv_heads,
        size=module.head_dim,
    )
    return Trace(title, tuple(tokens), tuple(steps), (note,))


def _run(
    model: nn.Module, module: MultiHeadAttention, ids: Sequence[int]
) -> tuple[Tensor, AttentionRecord, Tensor]:
    """Input ``[T, E]`` in float64, record and output ``[T, E]`` of ``module``."""
    seen: dict[str, Any] = {}

    def take(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen["x"], seen["output"] = args[0], output

    def keep(record: AttentionRecord) -> None:
        seen["record"] = record

    device = next(model.parameters()).device
    here = Scope()
    hook = module.register_forward_hook(here.only(take))
    handle = module.register_attention_hook(keep)
    try:
        with torch.no_grad():
            model(torch.tensor([list(ids)], device=device))
    finally:
        hook.remove()
        handle.remove()
        here.close()
    return seen["x"][0].double(), seen["record"], seen["output"][0]


def _projection(
    module: MultiHeadAttention,
    letter: str,
    name: str,
    head: int,
    number: int,
    x: Tensor,
    said: Texts,
) -> TraceStep:
    """Q, K or V of one head from the layer's input."""
    linear: nn.Linear = getattr(module, name)
    size = module.v_head_dim if letter == "V" else module.head_dim
    rows = slice(number * size, (number + 1) * size)
    step = projection_step(letter, head, number, x, linear.weight[rows].detach().double().T, said)
    scale = module.config.value_scale if letter == "V" else 1.0
    if linear.bias is None and scale == 1.0:
        return step
    # A number is then not the sum of its products alone, so the step shows no factors.
    formula, values = step.formula, step.values
    if linear.bias is not None:
        formula, values = f"{formula} + b_{letter}", values + linear.bias[rows].detach().double()
    if scale != 1.0:
        formula, values = f"({formula}) · {scale:g}", values * scale
    return TraceStep(step.key, step.title, formula, values)


def _placement(module: MultiHeadAttention) -> list[str]:
    """What happens to queries and keys between projection and scores, in order."""
    qk_norm = module.config.qk_norm
    parts = ["rotary"] if module.rope is not None else []
    if qk_norm is not None:
        parts.insert(len(parts) if qk_norm.place == "after_rope" else 0, "norm")
    return parts


def _placed_steps(
    how: Sequence[str], head: int, placed: Mapping[str, Tensor], said: Texts
) -> list[TraceStep]:
    """Queries and keys after the functions ``how``; no steps if there are none."""
    moved = said("and").join(said(function) for function in how)
    before, after = "".join(f"{function}(" for function in reversed(how)), ")" * len(how)
    return [
        TraceStep(
            f"head{head}.{letter}_placed",
            titled(said, head, said("placed", what=said(letter), how=moved)),
            f"{letter}{subscript(head)} ← {before}{letter}{subscript(head)}{after}",
            values,
        )
        for letter, values in placed.items()
        if how
    ]


def _visible(record: AttentionRecord, head: int) -> Tensor | None:
    if record.mask is None:
        return None
    visible = record.mask.visible(record.q_tokens, record.kv_tokens, record.q.device)
    return _of_head(visible, record, head)


def _bias(record: AttentionRecord, head: int) -> Tensor | None:
    bias: Bias | Tensor | None = record.bias
    if bias is None:
        return None
    if isinstance(bias, Tensor):
        bias = TensorBias(bias)
    like = record.q.new_zeros((), dtype=torch.float64)
    tile = bias.tile(record.q_tokens, record.kv_tokens, like)
    return _of_head(tile, record, head).detach().double()


def _of_head(tile: Tensor, record: AttentionRecord, head: int) -> Tensor:
    """What broadcasts to ``[B, H, T, S]``, for the first text and one head: ``[T, S]``."""
    batch, heads, queries, _ = record.q.shape
    return tile.expand(batch, heads, queries, record.k.shape[2])[0, head]


def _combined(module: MultiHeadAttention, record: AttentionRecord, said: Texts) -> list[TraceStep]:
    """Concatenation and output projection of all heads."""
    outputs = list(record.out[0].double())
    last = subscript(module.num_heads - 1)
    names = f"head₀ … head{last}" if module.num_heads > 1 else "head₀"
    w_o = module.o_proj.weight.detach().double().T
    concat, output = combine_steps(outputs, w_o, names, said=said)
    if module.o_proj.bias is not None:
        output = TraceStep(
            output.key,
            output.title,
            f"{output.formula} + b_O",
            output.values + module.o_proj.bias.detach().double(),
        )
    return [concat, output]
