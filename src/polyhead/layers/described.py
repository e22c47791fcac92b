"""A layer as native code needs it: its parts read from modules once, as data.

The parts of a layer are its self-attention, its attention to a context, and its feed-forward
network. The description ends before the first that cannot be read (``reading.py``), such as a
network with a hook: the modules go on from there.

Shape letters: B batch, E embed size, H query heads, G kv heads, D key size, V value size; of latent
attention R latent size, N features of a key without rotation, P with rotation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from polyhead.config import FeedForwardConfig, LayerConfig, RopeConfig
from polyhead.layers import reading
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.attention_parts import temperatures
from polyhead.layers.exact import UNSEEN, Exactly, KnownFields, facts_of
from polyhead.layers.latent_attention import MultiHeadLatentAttention
from polyhead.layers.positions import RoPE
from polyhead.layers.reading import (
    CannotBeReadError,
    Parts,
    any_value,
    around,
    latent_norm,
    linear,
    modules_of,
    norm_of_heads,
    read,
)
from polyhead.native import Code, Heads, LayerForm, LayerWeights
from polyhead.native.arguments import (
    DTYPES,
    MOST_ROWS,
    NORM_PLACES,
    PARALLEL,
    Cross,
    Latent,
    Layer,
)
from polyhead.semantics import ALiBi, RoundedALiBi

if TYPE_CHECKING:
    from polyhead.layers.transformer_layer import TransformerLayer

_HEADS, _LATENT = Exactly(MultiHeadAttention), Exactly(MultiHeadLatentAttention)
ROPE = Exactly(RoPE, "apply")

# Known fields of a layer's own configuration; its parts are checked one by one.
_KNOWN_AROUND = KnownFields(
    reading.KNOWN_NORM
    | {
        LayerConfig: any_value("norm norm_placement dropout parallel residual_scale attention_norm")
        | dict.fromkeys(("attention", "cross_attention", "feed_forward"), UNSEEN),
    }
)

_PARTS = ("attention", "cross_attention", "feed_forward")
ATTENTION, CROSS_ATTENTION, NETWORK = 1, 2, 3
"""The parts of a layer, in order: the last that a step went through."""


class DescribedLayer(NamedTuple):
    """A layer that native code computes, as data.

    Attributes:
        crosses: Whether it attends to a context.
        is_called: Whether its calls are seen or changed (hooks, compilation): it is left out of
            runs of layers.
    """

    data: Layer
    attention: MultiHeadAttention | MultiHeadLatentAttention
    cross: MultiHeadAttention | None
    last: int  # of the parts
    rope: RoPE | None
    rope_config: RopeConfig | None
    heads: Heads
    biased: bool
    window: int | None
    most_past: float
    least_past: int
    most_tokens: int
    embed_dim: int
    dtype: torch.dtype
    crosses: bool
    is_called: bool


def last_part(config: LayerConfig) -> int:
    """How far a step gets through layers of this configuration, as they are built; 0: nowhere."""
    if not _KNOWN_AROUND.cover(config) or not reading.KNOWN.cover(config.attention):
        return 0
    network, cross = reading.KNOWN.cover(config.feed_forward), config.cross_attention
    plain = network and type(config.feed_forward) is FeedForwardConfig
    if config.parallel is not None and not plain:
        return 0
    if cross is not None and not reading.KNOWN.cover(cross):
        return ATTENTION
    return NETWORK if network else ATTENTION if cross is None else CROSS_ATTENTION


def describe(code: Code, layer: TransformerLayer, x: Tensor) -> DescribedLayer | None:
    """The layer's description for the dtype of x; None if native code does not know the layer."""
    parts, config = layer._modules, layer.config
    attention = parts["attention"]
    last = last_part(config)
    if not layer.is_itself or not last:
        return None
    weights: dict[str, Any] = dict.fromkeys(LayerWeights._fields)
    try:
        if _HEADS.is_unwatched(attention):
            heads, own = _heads(attention, x)
        elif _LATENT.is_unwatched(attention):
            heads, own = _latent(attention, x)
        else:
            return None
        weights |= own | around("attention", parts, x)
    except CannotBeReadError:
        return None
    done = _further(parts, last, weights, x)
    if config.parallel is not None and done != NETWORK:
        return None
    rope, window, absorbed_from, most_past = attention.rope, None, 1, math.inf
    if isinstance(attention, MultiHeadLatentAttention):
        fewest = attention.config.absorbed_from
        if fewest is None or attention.preferred is not None:
            return None
        absorbed_from = fewest
    else:
        window = attention.config.visible_window
        if (temperature := attention.config.query_temperature) is not None:
            periods = len(weights["temperatures"])
            most_past = temperature.every * periods - temperature.offset
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
    # Also for parts that could be described without a hook: it may be removed later.
    names = [f"{part}{norm}" for part in _PARTS[:last] for norm in ("", "_norm", "_out_norm")]
    found = [module for name in names if (module := parts.get(name)) is not None]
    seen = [module for part in found for module in modules_of(part, visited=done == NETWORK)]
    return DescribedLayer(
        code.layer(
            LayerWeights(**weights),
            form,
            facts_of([layer, *seen]),
        ),
        attention,
        layer.cross_attention if done > ATTENTION else None,
        done,
        rope,
        None if rope is None else rope.config,
        heads,
        weights["slopes"] is not None,
        window,
        most_past,
        absorbed_from - 1,
        MOST_ROWS if capacity is None else capacity,
        x.shape[2],
        x.dtype,
        config.cross_attention is not None,
        bool(layer._forward_hooks or layer._forward_pre_hooks or layer._compiled_call_impl),
    )


def _further(parts: Parts, last: int, weights: dict[str, Any], x: Tensor) -> int:
    """Adds the weights of the parts behind the self-attention, as far as they can be read.

    Returns:
        The last part of which they are there.
    """
    done = ATTENTION
    try:
        if parts.get("cross_attention") is not None and last > ATTENTION:
            weights["cross"] = _cross(parts, x)
            done = CROSS_ATTENTION
        if last == NETWORK:
            weights |= reading.network(parts, x)
            done = NETWORK
    except CannotBeReadError:
        pass
    return done


def _heads(
    attention: MultiHeadAttention, x: Tensor, *, of_context: bool = False
) -> tuple[Heads, dict[str, Any]]:
    """The heads of a token, and the weights that only attention by heads has.

    Args:
        attention: The module.
        x: The token.
        of_context: Without what makes keys and values.
    """
    rope, place = attention.rope, attention.qk_norm_place
    H, G = attention.num_heads, attention.num_kv_heads
    D, V, E = attention.head_dim, attention.v_head_dim, x.shape[2]
    if (
        not reading.KNOWN.cover(attention.config)
        or (attention.training and attention.dropout)
        or H % G
    ):
        raise CannotBeReadError
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
    if of_context:
        return heads, own
    own["k"] = linear(parts["k_proj"], E, G * D, x)
    own["v"] = linear(parts["v_proj"], E, G * V, x)
    if place is not None:
        own["k_norm"] = norm_of_heads(parts["k_norm"], G, D, x, whole=whole)
    if attention._alibi is not None:
        own["slopes"] = _slopes(attention._alibi)
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


def _slopes(alibi: ALiBi) -> Tensor:
    """``[H]`` float32: as they are kept, so that a change of them is seen."""
    if type(alibi) not in (ALiBi, RoundedALiBi) or alibi.slopes.dtype != torch.float32:
        raise CannotBeReadError
    return alibi.slopes


def _latent(attention: MultiHeadLatentAttention, x: Tensor) -> tuple[Heads, dict[str, Any]]:
    """The same of latent attention, absorbed: one kv head of R + P features."""
    config, E = attention.config, x.shape[2]
    H, N, P = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    R, V, into = config.kv_lora_rank, config.v_head_dim, config.q_lora_rank
    if not reading.KNOWN.cover(config) or (attention.training and attention.dropout):
        raise CannotBeReadError
    rotary = _rotated(attention.rope, P)
    heads = Heads(H, 1, R + P, R, attention.scale, 0.0, rotary, NORM_PLACES["before_rope"])
    parts = attention._modules
    up = linear(parts["kv_b_proj"], R, H * (N + V), x)
    if up.bias is not None or up.type:
        raise CannotBeReadError
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
    if not ROPE.is_class_of(rope) or not reading.KNOWN.cover(rope.config):
        raise CannotBeReadError
    return rope.config.dim or head_dim


def _cross(parts: Parts, x: Tensor) -> Cross:
    """The weights of queries to the context and of what follows; its keys and values are cached."""
    attention = parts["cross_attention"]
    if (
        not _HEADS.is_unwatched(attention)
        or attention._alibi is not None
        or attention._parameters["sinks"] is not None
        or attention._clip is not None
        or attention._window is not None
        or attention._temperature is not None
    ):
        raise CannotBeReadError
    heads, own = _heads(attention, x, of_context=True)
    found = around("cross_attention", parts, x)
    norms = found["cross_attention_norm"], found["cross_attention_out_norm"]
    return Cross(heads, norms[0], own["q"], own.get("q_norm"), own["out"], norms[1])
