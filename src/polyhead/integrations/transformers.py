"""Hugging Face transformers with polyhead's attention: ``attn_implementation="polyhead"``.

    from polyhead.integrations import transformers as polyhead_transformers

    polyhead_transformers.register()
    model = AutoModel.from_pretrained(..., attn_implementation="polyhead")
    polyhead_transformers.use(model)                  # or: switch a model that is there already
    print(polyhead_transformers.explain(model, input_ids=ids))

Registered are an attention function and a mask function under one name: without the second,
transformers would hand over no mask and padding and windows would be lost. Masks travel typed
(``Causal() & Window(4096) & KeyLengths(…)``), so they cost no T×S memory.

A query that may see nothing (left padding) gives 0, where transformers' eager attention averages
over the padding; nothing that is not padding depends on it.

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from polyhead.errors import UnsupportedError
from polyhead.integrations._masks import additive, all_of
from polyhead.integrations._transformers_masks import (
    TypedMask,
    tensor_mask,
    translates,
    typed_mask,
)
from polyhead.integrations._transformers_source import (
    NAME,
    asks_interface,
    computes_attention_itself,
    reason,
    reason_against,
    reason_against_module,
    watch_construction,
)
from polyhead.integrations._weights import attention_with_weights
from polyhead.kernels import dispatch
from polyhead.kernels.dispatch import Explanation
from polyhead.layers import third_party
from polyhead.layers.hooks import attention_with_hooks
from polyhead.layers.record import AttentionHook
from polyhead.semantics import Causal, DenseSource, Documents, Keep, Mask, Window
from polyhead.semantics.tokens import is_traced

_CHANGES_NOTHING = {
    "cache_position", "deterministic", "logits_to_keep", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "past_key_values",
    "position_embeddings", "position_ids", "return_dict", "seq_idx", "use_cache",
}  # fmt: skip
"""Keyword arguments that reach attention functions and that eager attention ignores rightly."""


def register(
    name: str = NAME,
    *,
    typed_masks: bool = True,
    ignore: tuple[str, ...] = (),
    kernel: str = "auto",
) -> str:
    """Makes ``attn_implementation=name`` mean polyhead, in every transformers model.

    Args:
        name: Name under which the attention and mask functions are registered.
        typed_masks: False gives the models ``[B, 1, T, S]`` bool tensors, for a model that
            computes with its mask.
        ignore: Names of further keyword arguments that do not change the result; unknown ones are
            refused.
        kernel: Name of the kernel, as in ``polyhead.attention``.

    Returns:
        ``name``.
    """

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        kwargs = {key: value for key, value in kwargs.items() if key not in ignore}
        return attention_forward(module, query, key, value, attention_mask, kernel=kernel, **kwargs)

    def mask(*args: Any, config: Any = None, **kwargs: Any) -> TypedMask | Tensor:
        if (why := reason_against(type(config))) is not None:
            raise UnsupportedError(why)
        return (typed_mask if typed_masks else tensor_mask)(*args, **kwargs)

    _names.add(name)
    watch_construction(_names)
    translates()  # checked now, because a compiler that traces a model cannot
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    return name


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: TypedMask | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = False,
    kernel: str = "auto",
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers.

    Args:
        module: The attention layer; dropout is off unless it is training.
        query: ``[B, H, T, D]``.
        key: ``[B, G, S, D]``.
        value: ``[B, G, S, V]``.
        attention_mask: What the mask function returned; or a tensor of the caller, bool (True:
            may attend) or float (added to the scores); or None: causal where ``is_causal`` or,
            without it, the module says so (first query at the first key), else everything.
        scaling: Factor of the scores; default 1/√D.
        dropout: Dropout probability of the weights.
        is_causal: Whether attention is causal where ``attention_mask`` is None; None: ask the
            module.
        sliding_window: Used where there is no mask; else the mask has it.
        softcap: c in c · tanh(score / c); None is off.
        s_aux: ``[H]`` attention sinks, one logit per head.
        position_bias: Added to the scores, broadcasts to ``[B, H, T, S]``.
        cu_seq_lens_q: Cumulative lengths of documents packed in one row.
        cu_seq_lens_k: The same for keys; must be equal.
        output_attentions: Also return the weights.
        kernel: Name of the kernel, as in ``polyhead.attention``.
        rest: Other arguments, refused unless known to change nothing.

    Returns:
        ``[B, T, H, V]`` and the weights ``[B, H, T, S]`` or None.

    Raises:
        UnsupportedError: An argument that polyhead does not know.
    """
    _refuse_unknown(module, rest)
    if query.shape[0] != key.shape[0]:  # learned queries that all rows share
        query = query.expand(key.shape[0], -1, -1, -1)
    S = key.shape[2]
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    mask, bias, q_positions, keys = _mask_of(attention_mask, query, S, causal, sliding_window)
    if keys < S:
        key, value = key[:, :, :keys], value[:, :, :keys]
    if position_bias is not None and (_has_gradient(position_bias) or bool(position_bias.any())):
        if position_bias.shape[-1] == S:
            position_bias = position_bias[..., :keys]
        bias = position_bias if bias is None else bias + position_bias
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        mask = all_of(mask, _documents(cu_seq_lens_q, cu_seq_lens_k, query, key))

    options: dict[str, Any] = {
        "mask": mask,
        "bias": bias,
        "scale": 1.0 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling),
        "softcap": softcap,
        "sinks": s_aux,
        "q_positions": q_positions,
        "dropout_p": dropout if module.training else 0.0,
        "kernel": kernel,
    }
    out, weights = _attend(module, query, key, value, options, bool(output_attentions))
    if weights is not None and keys < S:
        weights = nn.functional.pad(weights, (0, S - keys))
    return out.transpose(1, 2).contiguous(), weights


def _refuse_unknown(module: nn.Module, rest: dict[str, Any]) -> None:
    for name, given in rest.items():
        if given is not None and given is not False and name not in _CHANGES_NOTHING:
            raise UnsupportedError(
                f"{type(module).__name__} passes {name!r} to its attention, which polyhead does "
                f"not know; if it changes nothing, register(ignore=({name!r},))"
            )


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
    with_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """The attention ``[B, H, T, V]``, and its weights if asked for; explain and hooks see it."""
    watched = not torch.compiler.is_compiling()
    if watched and (recorder := _recorder.get()) is not None:
        recorder.append((module, dispatch.explain(query, key, value, **options)))
    hooks = third_party.hooks_of(module) if watched else ()
    if with_weights:
        out, weights = attention_with_weights(query, key, value, **options)
        if hooks:
            with torch.no_grad():
                _shown(module, hooks, query, key, value, options | {"dropout_p": 0.0})
        return out, weights
    if hooks:
        return _shown(module, hooks, query, key, value, options), None
    return dispatch.attention(query, key, value, **options), None


def _shown(
    module: nn.Module,
    hooks: tuple[AttentionHook, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """The attention, shown to hooks."""
    # The keys of a static cache are the cache's own memory, which later tokens change.
    kept = key.clone() if key.shape[2] != query.shape[2] else key
    return attention_with_hooks(module, hooks, query, DenseSource(kept, value), **options)


def _mask_of(
    given: TypedMask | Tensor | None, query: Tensor, S: int, is_causal: bool, window: int | None
) -> tuple[Mask | None, Tensor | None, Tensor | None, int]:
    """Mask, bias, positions of the queries, and how many keys count."""
    T = query.shape[2]
    if isinstance(given, TypedMask):
        if given.shape[2:] != (T, S):
            raise UnsupportedError(
                f"the mask was made for {given.shape[2]} queries and {given.shape[3]} keys, the "
                f"attention has {T} and {S}; register(typed_masks=False) may follow this model"
            )
        if torch.compiler.is_compiling() and given.compiled is not None:
            mask, q_positions = given.compiled
            return mask, None, q_positions, S
        return given.mask, None, given.q_positions, given.keys
    if given is not None:
        given = given[..., :S]
        if given.dtype == torch.bool:
            return Keep(given), None, None, S
        # Additive masks of transformers hold the least finite number where others hold −∞.
        keep, bias = additive(given, floor=torch.finfo(given.dtype).min / 2)
        return keep, bias, None, S
    if not is_causal or T == 1:
        return None if window is None else Window(window, ahead=window - 1), None, None, S
    # As in transformers' fused attentions: the first query stands at the first key.
    return all_of(Causal(), None if window is None else Window(window)), None, None, min(T, S)


def _has_gradient(tensor: Tensor) -> bool:
    """Whether a tensor must be kept: it needs a gradient, or its values cannot be read."""
    return is_traced(tensor) or (torch.is_grad_enabled() and tensor.requires_grad)


def _documents(cu_q: Tensor | None, cu_k: Tensor | None, query: Tensor, key: Tensor) -> Documents:
    if (
        cu_q is None or cu_k is None or query.shape[0] != 1 or query.shape[2] != key.shape[2]
        or not torch.equal(cu_q, cu_k)
    ):  # fmt: skip
        raise UnsupportedError(
            "cu_seq_lens_q and cu_seq_lens_k must be equal and belong to one batch row without a "
            f"cache: got batch {query.shape[0]}, {query.shape[2]} queries, {key.shape[2]} keys"
        )
    return Documents(cu_q.diff())


_names: set[str] = set()
"""The names under which polyhead is registered."""


@third_party.recognise
def _is_ours(module: nn.Module) -> bool:
    """Whether polyhead computes a module's attention."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    kind: type = type(module)
    return name in _names and asks_interface(kind)


def check(model: PreTrainedModel | type[PreTrainedModel] | PreTrainedConfig) -> None:
    """Raises unless the model's attention goes through transformers' attention interface.

    Args:
        model: A model, a model class or a configuration. Of a model every attention module in it
            is looked at; of a class or configuration, the file that defines it.

    Raises:
        UnsupportedError: Names the classes that compute attention themselves and would ignore
            ``attn_implementation="polyhead"``.
    """
    if isinstance(model, nn.Module):
        classes: set[type] = {type(module) for module in model.modules()}
        own = [cls for cls in classes if computes_attention_itself(cls)]
        if own:
            names = ", ".join(sorted(cls.__name__ for cls in own))
            raise UnsupportedError(reason(type(model).__name__, names))
        return
    if isinstance(model, type):
        if (why := reason_against_module(sys.modules[model.__module__])) is not None:
            raise UnsupportedError(why)
    elif (why := reason_against(type(model))) is not None:
        raise UnsupportedError(why)


def use(model: PreTrainedModel) -> PreTrainedModel:
    """Checks a model, registers polyhead and switches the model to it.

    Returns:
        ``model`` itself.

    Raises:
        UnsupportedError: Parts of the model would ignore it.
    """
    check(model)
    model.set_attn_implementation(register())
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation != NAME:
            raise UnsupportedError(
                f"{name or type(model).__name__} stayed at attn_implementation="
                f"{part.config._attn_implementation!r}: {type(part).__name__} cannot be switched"
            )
    return model


@dataclass(frozen=True)
class LayerExplanations:
    """What ran in each attention layer of a model, in order; print it.

    Attributes:
        layers: Name of the module and its explanation, one for every time it ran.
    """

    layers: list[tuple[str, Explanation]] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[str, Explanation]]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.layers), default=0)
        return "\n".join(f"{name:{width}}  {one.kernel}: {one.call}" for name, one in self.layers)


_recorder: ContextVar[list[tuple[nn.Module, Explanation]] | None] = ContextVar("r", default=None)


def explain(model: PreTrainedModel, *args: Any, **inputs: Any) -> LayerExplanations:
    """Runs a model once, without gradients, and says which kernel each attention layer used.

    Args:
        model: A model whose ``attn_implementation`` is polyhead.
        args: Positional arguments of the model's forward.
        inputs: Keyword arguments of the model's forward.

    Raises:
        UnsupportedError: No attention of the model went through polyhead.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found: list[tuple[nn.Module, Explanation]] = []
    token = _recorder.set(found)
    try:
        with torch.no_grad():
            model(*args, **inputs)
    finally:
        _recorder.reset(token)
    if not found:
        raise UnsupportedError(
            f"no attention of {type(model).__name__} went through polyhead: "
            f"attn_implementation is {model.config._attn_implementation!r}"
        )
    return LayerExplanations([(names.get(id(module), "?"), what) for module, what in found])
