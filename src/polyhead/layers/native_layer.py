"""A layer as native code needs it: its parts read from modules once, as data.

The parts of a layer are its self-attention, its attention to a context, and its feed-forward
network. The description ends before the first that cannot be read (``native_export.py``), such as a
network with a hook: the remaining sub-modules run as modules. What is read is the configuration, so
a layer whose attributes say anything else than that is not described.

Shape letters: B batch, E embed size, H query heads, G kv heads, D key size, V value size; of latent
attention R latent size, N features of a key without rotation, P with rotation.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyhead.config import (
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    RopeConfig,
)
from polyhead.layers import native_export
from polyhead.layers.as_built import check_as_built
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.exact import CHECKED_ELSEWHERE, ExactType, SupportedFields, guarded_attributes
from polyhead.layers.hooks import Hooked
from polyhead.layers.latent_attention import MultiHeadLatentAttention
from polyhead.layers.native_attention import (
    BOUNDS,
    HEADS,
    LATENT,
    SELECTIVE,
    attention_heads,
    cross_attention,
    latent_heads,
    mask_fields,
)
from polyhead.layers.native_export import (
    ANY,
    NotExportableError,
    Parts,
    around,
    check_unhooked,
    modules_of,
)
from polyhead.layers.positions import RoPE
from polyhead.layers.selective_attention import SelectiveAttention
from polyhead.native import Code, Heads, LayerForm, LayerWeights
from polyhead.native.arguments import (
    DTYPES,
    MAX_STEP_ROWS,
    PARALLEL,
    Layer,
)

# Known fields of a layer's own configuration; its parts are checked one by one.
_KNOWN_AROUND = SupportedFields(
    native_export.KNOWN_NORM
    | {
        LayerConfig: ANY(
            "norm norm_placement dropout parallel residual_scale attention_norm "
            "feed_forward_out_norm"
        )
        | dict.fromkeys(("attention", "cross_attention", "feed_forward"), CHECKED_ELSEWHERE),
    }
)

_PARTS = ("attention", "cross_attention", "feed_forward")
ATTENTION, CROSS_ATTENTION, NETWORK = 1, 2, 3
"""Return codes: the last sub-layer that the native step computed."""


class NativeLayer(NamedTuple):
    """A layer that native code computes, as data. It keeps no module and no weight alive.

    Attributes:
        data: For native code.
        last: The last of its parts that is described.
        why: Why no further, as a phrase; empty: it is described to its end.
        heads: Of the self-attention.
        latent: The configuration of latent attention.
        crosses: Whether it attends to a context.
        cross: kv heads, key and value size of that attention, where it is described.
        rope: Rotary embedding of the self-attention, or None.
        rope_config: Configuration of the rotary embedding.
        rotation_key: Equal for layers that rotate by the same angles.
        biased: Whether the layer has a bias of its own.
        window: Keys that a query sees, itself included.
        chooses: Whether queries choose blocks of keys by bounds of their features.
        max_position: Tokens up to which queries have a temperature.
        min_cached: Tokens from which latent attention is computed absorbed.
        max_tokens: Most new tokens of a row.
        embed_dim: Embedding size E of the residual stream.
        dtype: Of weights and x.
        hooked: Attention modules with hooks or edits, which may apply to the calling thread.
        has_hooks: Whether forward hooks or torch.compile wrap it: it is never fused with other
            layers.
    """

    data: Layer
    last: int
    why: str
    heads: Heads
    latent: LatentAttentionConfig | None
    crosses: bool
    cross: tuple[int, int, int] | None
    rope: RoPE | None
    rope_config: RopeConfig | None
    rotation_key: tuple[int, int, int]
    biased: bool
    window: int | None
    chooses: bool
    max_position: float
    min_cached: int
    max_tokens: int
    embed_dim: int
    dtype: torch.dtype
    hooked: tuple[weakref.ref[Hooked], ...]
    has_hooks: bool

    def has_active_hooks(self) -> bool:
        """Whether a hook or a head edit is active in this thread."""
        found = (each() for each in self.hooked)
        return any(each is None or each.has_active_hooks for each in found)


LAYER_TYPES: list[ExactType[Any]] = []
"""Classes of layers that can be exported; the module of each imports this one and adds it."""


def last_part(config: LayerConfig) -> int:
    """How far a step gets through layers of this configuration, as they are built; 0: nowhere."""
    if not _KNOWN_AROUND.accepts(config) or not native_export.KNOWN.accepts(config.attention):
        return 0
    if config.feed_forward is None:
        return 0
    network, cross = native_export.KNOWN.accepts(config.feed_forward), config.cross_attention
    plain = network and type(config.feed_forward) is FeedForwardConfig
    if config.parallel is not None and not plain:
        return 0
    if cross is not None and not native_export.KNOWN.accepts(cross):
        return ATTENTION
    return NETWORK if network else ATTENTION if cross is None else CROSS_ATTENTION


def _unknown(config: LayerConfig) -> str:
    """What keeps ``last_part`` from getting anywhere, as a phrase."""
    if not _KNOWN_AROUND.accepts(config):
        return _KNOWN_AROUND.unknown(config)
    if not native_export.KNOWN.accepts(config.attention):
        return native_export.KNOWN.unknown(config.attention)
    return f"{type(config.feed_forward).__name__} parallel to attention"


def never(layer: nn.Module) -> str:
    """Why native code computes no layer of this configuration, as a phrase; empty: it may."""
    config = getattr(layer, "config", None)
    if not isinstance(config, LayerConfig) or last_part(config):
        return ""
    return f"native code does not compute {_unknown(config)}"


def export_layer(
    code: Code, layer: nn.Module, x: Tensor, changed: Mapping[type, str]
) -> NativeLayer:
    """The layer's description for the dtype of x.

    Args:
        code: What computes it.
        layer: Not in training.
        x: ``[B, T, E]``.
        changed: Classes that are not as they were defined (``exact.changed_classes``).

    Raises:
        NotExportableError: Native code does not know the layer.
    """
    kind = next((each for each in LAYER_TYPES if each.is_class(layer)), LAYER_TYPES[0])
    if not kind.is_exact(layer):
        raise NotExportableError(kind.why_not(layer))
    parts, config = layer._modules, layer.config
    attention = parts["attention"]
    last = last_part(config)
    if not last:
        raise NotExportableError(never(layer))
    if changed:
        for each in layer.modules():
            if (change := changed.get(type(each))) is not None:
                raise NotExportableError(f"its class was changed: {change}", each)
    check_as_built(layer, x.shape[2], "attention")
    weights: dict[str, Any] = dict.fromkeys(LayerWeights._fields)
    check_unhooked([LATENT, HEADS] if LATENT.is_class(attention) else [HEADS, SELECTIVE], attention)
    if isinstance(attention, MultiHeadLatentAttention):
        heads, own = latent_heads(attention, x)
    elif isinstance(attention, MultiHeadAttention):
        heads, own = attention_heads(attention, x)
    else:
        raise TypeError("an attention module of neither kind")
    weights |= own | around("attention", parts, x)
    done, why = _further(layer, last, weights, x)
    if config.parallel is not None and done != NETWORK:
        raise NotExportableError(why)
    rope, window, absorbed_from, max_position = attention.rope, None, 1, math.inf
    latent = blocks = None
    if isinstance(attention, MultiHeadLatentAttention):
        latent, fewest = attention.config, attention.config.absorbed_from
        if fewest is None or attention.preferred is not None:
            raise NotExportableError("it is not computed absorbed", attention)
        absorbed_from = fewest
    else:
        window = attention.config.visible_window
        if isinstance(attention, SelectiveAttention):
            check_unhooked([BOUNDS], attention.selector)
            blocks = attention.config.selector
        if (temperature := attention.config.query_temperature) is not None:
            periods = len(weights["temperatures"])
            max_position = temperature.every * periods - temperature.offset
    capacity = getattr(config.feed_forward, "capacity", None)
    form = LayerForm(
        DTYPES[x.dtype],
        x.shape[2],
        heads,
        PARALLEL[config.parallel],
        config.norm_placement == "post",
        config.residual_scale,
        *mask_fields(attention),
    )
    if blocks is not None:
        form = form._replace(block_size=blocks.size, top_k=blocks.top_k)
    # Guard hooked modules too, so that removing the hook exports the layer again.
    names = [f"{part}{norm}" for part in _PARTS[:last] for norm in ("", "_norm", "_out_norm")]
    found = [module for name in names if (module := parts.get(name)) is not None]
    seen = [module for part in found for module in modules_of(part, visited=done == NETWORK)]
    cross = layer.cross_attention if done > ATTENTION else None
    return NativeLayer(
        data=code.layer(LayerWeights(**weights), form, guarded_attributes([layer, *seen])),
        last=done,
        why=why,
        heads=heads,
        latent=latent,
        crosses=config.cross_attention is not None,
        cross=None if cross is None else (cross.num_kv_heads, cross.head_dim, cross.v_head_dim),
        rope=rope,
        rope_config=None if rope is None else rope.config,
        rotation_key=(id(rope), 0 if rope is None else id(rope.config), heads.rotary),
        biased=weights["slopes"] is not None,
        window=window,
        chooses=blocks is not None,
        max_position=max_position,
        min_cached=absorbed_from - 1,
        max_tokens=MAX_STEP_ROWS if capacity is None else capacity,
        embed_dim=x.shape[2],
        dtype=x.dtype,
        hooked=tuple(
            weakref.ref(each)
            for each in (attention, cross)
            if each is not None and (each._hooks or each._edits)
        ),
        has_hooks=has_hooks(layer),
    )


def has_hooks(layer: nn.Module) -> bool:
    """Whether forward hooks or torch.compile wrap the layer; it is never fused then."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    return bool(hooked or layer._compiled_call_impl)


def _further(layer: nn.Module, last: int, weights: dict[str, Any], x: Tensor) -> tuple[int, str]:
    """Adds the weights of the parts behind the self-attention, as far as they can be read.

    Returns:
        The last part of which they are there, and why no further.
    """
    done, parts = ATTENTION, layer._modules
    try:
        if parts.get("cross_attention") is not None and last > ATTENTION:
            check_as_built(layer, x.shape[2], "cross_attention")
            weights["cross"] = cross_attention(parts, x)
            done = CROSS_ATTENTION
        if last == NETWORK:
            check_as_built(layer, x.shape[2], "feed_forward")
            weights |= native_export.network(parts, x)
            return NETWORK, ""
    except NotExportableError as error:
        return done, phrase(parts, error)
    module = parts[
        "feed_forward" if done or parts.get("cross_attention") is None else "cross_attention"
    ]
    return done, f"native code does not compute {getattr(module, 'config', module)}"


def phrase(parts: Parts, error: NotExportableError) -> str:
    """An error as a phrase that names the module by its path."""
    for part, module in parts.items():
        for path, each in [] if module is None else module.named_modules():
            if each is error.module:
                return f"{part}.{path}".removesuffix(".") + f": {error.why}"
    return error.why
