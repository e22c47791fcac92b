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
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyhead.config import (
    Data,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    RopeConfig,
)
from polyhead.layers import native_export
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.attention_parts import temperatures
from polyhead.layers.exact import CHECKED_ELSEWHERE, ExactType, SupportedFields, guarded_attributes
from polyhead.layers.hooks import Hooked
from polyhead.layers.latent_attention import MultiHeadLatentAttention
from polyhead.layers.native_export import (
    ANY,
    NotExportableError,
    Parts,
    around,
    check_unhooked,
    known_fields,
    latent_norm,
    linear,
    modules_of,
    norm_of_heads,
    read,
)
from polyhead.layers.positions import RoPE
from polyhead.layers.selective_attention import SelectiveAttention
from polyhead.layers.selectors import BlockBounds
from polyhead.native import Code, Heads, LayerForm, LayerWeights
from polyhead.native.arguments import (
    DTYPES,
    MAX_STEP_ROWS,
    NORM_PLACES,
    PARALLEL,
    Cross,
    Latent,
    Layer,
)
from polyhead.semantics import ALiBi, RoundedALiBi

_HEADS, _LATENT = ExactType(MultiHeadAttention), ExactType(MultiHeadLatentAttention)
_SELECTIVE, _BOUNDS = ExactType(SelectiveAttention), ExactType(BlockBounds)
ROPE = ExactType(RoPE, "apply")

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
    _as_built(layer, x.shape[2], "attention")
    weights: dict[str, Any] = dict.fromkeys(LayerWeights._fields)
    check_unhooked(
        [_LATENT, _HEADS] if _LATENT.is_class(attention) else [_HEADS, _SELECTIVE], attention
    )
    if isinstance(attention, MultiHeadLatentAttention):
        heads, own = _latent(attention, x)
    elif isinstance(attention, MultiHeadAttention):
        heads, own = _heads(attention, x)
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
            check_unhooked([_BOUNDS], attention.selector)
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
        *_masks(attention),
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
            _as_built(layer, x.shape[2], "cross_attention")
            weights["cross"] = _cross(parts, x)
            done = CROSS_ATTENTION
        if last == NETWORK:
            _as_built(layer, x.shape[2], "feed_forward")
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


def _as_built(layer: Any, embed_dim: int, part: str) -> None:
    """Raises unless attributes of the layer and of a part are what their configurations say."""
    context_dim = None if layer.cross_attention is None else layer.cross_attention.kdim
    built = _built(type(layer).from_config, embed_dim, layer.config, context_dim)
    for path, (kind, attributes) in built.items():
        if path and path.partition(".")[0] not in (part, f"{part}_norm", f"{part}_out_norm"):
            continue
        module: nn.Module | None = layer
        for name in path.split(".") if path else ():
            module = None if module is None else module._modules.get(name)
        if type(module) is not kind:
            continue  # what replaces a module is read by what it is (``native_export.py``)
        for name, wanted in attributes.items():
            got = getattr(module, name, None)
            if name not in _ASKED_IN_EVERY_STEP and not _same_attribute(got, wanted):
                raise NotExportableError(
                    f"{name} is {got!s:.80} where its configuration says {wanted!s:.80}",
                    module,
                )


@lru_cache(maxsize=64)
def _built(
    kind: Callable[..., nn.Module], embed_dim: int, config: LayerConfig, context_dim: int | None
) -> dict[str, tuple[type[nn.Module], dict[str, Any]]]:
    """What the modules of a new layer are, by path: their classes and own attributes."""
    with torch.device("meta"):
        layer = kind(embed_dim, config, context_dim=context_dim)
    tables = {name for name, value in vars(nn.Module()).items() if name != "training"}
    return {
        path: (
            type(module),
            {
                name: value
                for name, value in vars(module).items()
                if name not in tables and name != "training"
            },
        )
        for path, module in layer.named_modules()
        if type(module).__module__.startswith("polyhead.")
    }


_ASKED_IN_EVERY_STEP = frozenset({"_hooks", "_edits"})
"""Dicts that need not be empty: ``has_active_hooks`` asks them for each step."""


def _same_attribute(a: object, b: object) -> bool:
    """Whether two attributes of modules mean the same, and guards notice a change of them.

    Guards compare the entries of a dict by identity, so these must be immutable.
    """
    if isinstance(a, dict) and type(a) is type(b):
        return a.keys() == b.keys() and all(_same_value(a[key], b[key]) for key in a)
    return _same_value(a, b)


def _same_value(a: object, b: object) -> bool:
    """Whether two values mean the same; False for containers that can change in place.

    Numbers in tensors are read where they lie.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, RoPE):
        return isinstance(b, RoPE) and a.config == b.config
    if isinstance(a, Tensor):
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same_value, a, b))
    if isinstance(a, Data | int | float | str | torch.dtype | None):
        return bool(a == b)
    if not type(a).__module__.startswith("polyhead.") or not hasattr(a, "__dict__"):
        return False
    mine, theirs = vars(a), vars(b)
    return mine.keys() == theirs.keys() and all(
        _same_value(mine[name], theirs[name]) for name in mine
    )


def _heads(
    attention: MultiHeadAttention, x: Tensor, *, cross: bool = False
) -> tuple[Heads, dict[str, Any]]:
    """The heads of a token, and the weights that only attention by heads has.

    Args:
        attention: Attention module to export.
        x: Hidden states ``[B, T, E]`` of the step.
        cross: Without what makes keys and values.
    """
    rope, place = attention.rope, attention.qk_norm_place
    H, G = attention.num_heads, attention.num_kv_heads
    D, V, E = attention.head_dim, attention.v_head_dim, x.shape[2]
    known_fields(attention, attention.config)
    if attention.training and attention.dropout:
        raise NotExportableError("it is training, with dropout", attention)
    if H % G:
        raise NotExportableError(f"{G} kv heads do not divide {H} heads", attention)
    heads = Heads(
        H, G, D, V, attention.scale, attention.softcap or 0.0,
        _rotated(rope, D), NORM_PLACES[place or "before_rope"],
    )  # fmt: skip
    parts = attention._modules
    own: dict[str, Any] = {
        "q": linear(parts["q_proj"], E, H * D, x),
        "out": linear(parts["o_proj"], H * V, E, x),
    }
    whole = place == "full_width"
    if place is not None:
        own["q_norm"] = norm_of_heads(parts["q_norm"], H, D, x, whole=whole)
    if cross:
        return heads, own
    own["k"] = linear(parts["k_proj"], E, G * D, x)
    own["v"] = linear(parts["v_proj"], E, G * V, x)
    if place is not None:
        own["k_norm"] = norm_of_heads(parts["k_norm"], G, D, x, whole=whole)
    if attention._alibi is not None:
        own["slopes"] = _slopes(attention, attention._alibi)
    own["sinks"] = _sinks(attention, x)
    if attention.config.query_temperature is not None:
        own["temperatures"] = temperatures(attention.config.query_temperature)
    return heads, own


def _sinks(attention: MultiHeadAttention, x: Tensor) -> Tensor | None:
    """``[H]`` in float32 or the dtype of x."""
    sinks = attention._parameters["sinks"]
    if sinks is None or sinks.dtype == torch.float32:
        return sinks if sinks is None else read(sinks, (attention.num_heads,), sinks)
    return read(sinks, (attention.num_heads,), x)


def _masks(attention: MultiHeadAttention | MultiHeadLatentAttention) -> tuple[Any, ...]:
    """The fields of ``LayerForm`` that only attention by heads has."""
    if isinstance(attention, MultiHeadLatentAttention):
        return ()
    config, alibi = attention.config, attention._alibi
    clip = math.inf if config.qkv_clip is None else config.qkv_clip
    rounded = alibi.scale if type(alibi) is RoundedALiBi else 0.0
    found = config.window, clip, config.chunk, rounded
    temperature = config.query_temperature
    return found if temperature is None else (*found, temperature.every, temperature.offset)


def _slopes(attention: MultiHeadAttention, alibi: ALiBi) -> Tensor:
    """``[H]`` float32: as they are kept, so that a change of them is seen."""
    if type(alibi) not in (ALiBi, RoundedALiBi) or alibi.slopes.dtype != torch.float32:
        raise NotExportableError("its bias is no ALiBi in float32", attention)
    return alibi.slopes


def _latent(attention: MultiHeadLatentAttention, x: Tensor) -> tuple[Heads, dict[str, Any]]:
    """The same of latent attention, absorbed: one kv head of R + P features."""
    config, E = attention.config, x.shape[2]
    H, N, P = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    R, V, into = config.kv_lora_rank, config.v_head_dim, config.q_lora_rank
    known_fields(attention, config)
    if attention.training and attention.dropout:
        raise NotExportableError("it is training, with dropout", attention)
    rotary = _rotated(attention.rope, P)
    heads = Heads(H, 1, R + P, R, attention.scale, 0.0, rotary, NORM_PLACES["before_rope"])
    parts = attention._modules
    up = linear(parts["kv_b_proj"], R, H * (N + V), x)
    if up.bias is not None or up.type:
        raise NotExportableError("it has a bias, or is quantized", parts["kv_b_proj"])
    q = q_norm = None
    first = linear(parts["q_proj" if into is None else "q_a_proj"], E, into or H * (N + P), x)
    if into is not None:
        q_norm = latent_norm(parts["q_a_norm"], into, x)
        q = linear(parts["q_b_proj"], into, H * (N + P), x)
    latent = latent_norm(parts["kv_a_norm"], R, x)
    return heads, {
        "q": first,
        "k": linear(parts["kv_a_proj_with_mqa"], E, R + P, x),
        "latent": Latent(R, N, P, V, q, q_norm, latent, up.weight),
        "out": linear(parts["o_proj"], H * V, E, x),
    }


def _rotated(rope: RoPE | None, head_dim: int) -> int:
    """Features of a head that are rotated, from the first."""
    if rope is None:
        return 0
    if not ROPE.is_exact(rope) or not native_export.KNOWN.accepts(rope.config):
        raise NotExportableError(f"native code does not know its rotary positions {rope}")
    return rope.config.dim or head_dim


def _cross(parts: Parts, x: Tensor) -> Cross:
    """The weights of queries to the context and of what follows; its keys and values are cached."""
    attention = parts["cross_attention"]
    check_unhooked([_HEADS], attention)
    assert isinstance(attention, MultiHeadAttention)
    if (
        attention._alibi is not None
        or attention._parameters["sinks"] is not None
        or attention._clip is not None
        or attention._window is not None
        or attention._temperature is not None
    ):
        raise NotExportableError(
            "it has a bias, sinks, a clip, a window or a temperature", attention
        )
    heads, own = _heads(attention, x, cross=True)
    found = around("cross_attention", parts, x)
    norms = found["cross_attention_norm"], found["cross_attention_out_norm"]
    return Cross(heads, norms[0], own["q"], own.get("q_norm"), own["out"], norms[1])
