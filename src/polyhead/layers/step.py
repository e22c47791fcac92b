"""One token through a whole layer by native code: what decoding does once per token and layer.

A layer of a small model takes less time to compute than Python takes to ask for its ten operations.
Here they are one call, with the bits of the layer's own path. What that call cannot do (prompts,
gradients, hooks, other masks, other caches than dense rows and rings) takes the modules, one by
one. So does whatever it does not know: it is an allowlist of exact classes and of fields of
configurations. What a layer consists of is found out once, and again when anything about its
modules changed.

Shape letters: B batch, E embed size, H query heads, G kv heads, D key size, V value size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from polyhead.caches import DenseCache, KeyValueCache, Ring, RingCache, StoredCache
from polyhead.caches.contents import Shape
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
)
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.exact import Exactly, KnownFields, Unchanged
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.linear import PLAIN_LINEAR, code_for_rows
from polyhead.layers.norms import RMSNorm
from polyhead.layers.positions import RoPE
from polyhead.native import Heads, LayerWeights, is_plain
from polyhead.native.arguments import ACTIVATIONS, NormWeight, Weight
from polyhead.semantics import Causal, Mask

if TYPE_CHECKING:
    from polyhead.layers.transformer_layer import TransformerLayer

_ATTENTION, _FEED_FORWARD = Exactly(MultiHeadAttention), Exactly(FeedForward)
_NORM, _ROPE = Exactly(RMSNorm), Exactly(RoPE, "apply")
_CACHES = tuple(Exactly(kind, "append") for kind in (StoredCache, DenseCache, RingCache))


def _any(names: str) -> dict[str, None]:
    """Fields that may have any value."""
    return dict.fromkeys(names.split())


_KNOWN = KnownFields(
    {
        LayerConfig: _any("attention feed_forward norm dropout")
        | {"norm_placement": ("pre", "sandwich")},
        AttentionConfig: _any(
            "num_heads num_kv_heads head_dim v_head_dim qkv_bias out_bias rope qk_norm window "
            "softcap scale dropout"
        ),
        QKNormConfig: _any("norm") | {"place": ("before_rope",)},
        FeedForwardConfig: _any("hidden_dim gated bias dropout") | {"activation": ACTIVATIONS},
        NormConfig: _any("eps weight_offset") | {"type": ("rmsnorm",)},
        RopeConfig: _any(
            "theta type dim factor original_max_positions low_freq_factor high_freq_factor "
            "beta_fast beta_slow attention_factor mscale mscale_all_dim truncate short_factor "
            "long_factor frequencies"
        ),
    }
)


class Remembered:
    """What ``step`` found out about a layer, and which modules must be as they were for it to hold.

    A copy of a layer is another layer: it starts without.
    """

    __slots__ = ("layer",)

    def __init__(self) -> None:
        self.layer: _Layer | None = None

    def __reduce__(self) -> tuple[type[Remembered], tuple[()]]:
        return Remembered, ()


class _Layer(NamedTuple):
    """A layer that native code computes, as data."""

    unchanged: Unchanged
    attention: MultiHeadAttention
    heads: Heads
    rope: RoPE | None
    rope_config: RopeConfig | None
    window: int | None
    weights: LayerWeights
    activation: str
    embed_dim: int
    dtype: torch.dtype


def step(
    layer: TransformerLayer, x: Tensor, mask: Mask | None, cache: KeyValueCache
) -> Tensor | None:
    """``x`` behind a pre-norm or sandwich layer, its keys and values then in the cache; or None.

    Args:
        layer: Exactly a ``TransformerLayer``, without cross-attention, not in training.
        x: ``[B, 1, E]``.
        mask: Who may look at whom.
        cache: Of the self-attention; untouched where this returns None.

    Returns:
        ``[B, 1, E]``, with the bits of the modules one after the other. None for more than 8 rows,
        masks other than ``Causal``, caches other than exact tokens in rows of equal length with
        room (dense, or the ring of a window), modules that are hooked or replaced,
        deterministic algorithms, and where there is no native code.
    """
    code = code_for_rows(x)
    if (
        code is None
        or x.shape[1] != 1
        or not x.is_contiguous()
        or torch.are_deterministic_algorithms_enabled()  # its threads share the keys
        or not (mask is None or type(mask) is Causal)
        or not _in_rows(cache)
    ):
        return None
    remembered = layer.remembered
    known = remembered.layer
    if known is None or known.dtype is not x.dtype or not known.unchanged:
        known = remembered.layer = _described(layer, x)
    if known is None or known.embed_dim != x.shape[2] or known.attention.is_shown:
        return None
    position, rotation, heads, window = cache.length, None, known.heads, known.window
    if window is not None and position >= window and type(cache.layout) is not Ring:
        return None  # whose tiles begin elsewhere: the sums would round differently
    if known.rope is not None:
        if not _ROPE.is_class_of(known.rope) or known.rope.config is not known.rope_config:
            return None
        rotation = known.rope.tables_at(x, position, heads.key_dim)
    H, G, D, V, scale, softcap, _ = heads
    with cache.in_use:
        held = cache.grow(Shape(x.shape[0], G, D, V, x.dtype, x.device), window)
        if held is None:
            return None
        heads = Heads(H, G, D, V, scale, softcap, rotation)
        try:
            return code.step(x, known.weights, heads, held, known.activation)
        except ValueError:  # ``parameter.data = ...``: the modules read what it is now
            cache.rollback(1)
            remembered.layer = None
            return None


def _in_rows(cache: KeyValueCache) -> TypeGuard[StoredCache]:
    return any(kind.is_class_of(cache) for kind in _CACHES)


def _described(layer: TransformerLayer, x: Tensor) -> _Layer | None:
    """What the layer computes with in the dtype of x; None if it is not what native code knows."""
    parts = layer._modules
    attention, feed_forward = parts["attention"], parts["feed_forward"]
    if (
        not _KNOWN.cover(layer.config)
        or not _ATTENTION.is_unwatched(attention)
        or not _KNOWN.cover(attention.config)
        or not _FEED_FORWARD.is_unwatched(feed_forward)
        or not _KNOWN.cover(feed_forward.config)
        or feed_forward.activation not in ACTIVATIONS
        or (feed_forward.training and feed_forward.dropout)
    ):
        return None
    heads = _heads(attention)
    if heads is None:
        return None
    try:
        weights = _weights(parts, attention, feed_forward, x)
    except _CannotBeReadError:
        return None
    rope = attention.rope
    return _Layer(
        Unchanged(layer.modules()),
        attention,
        heads,
        rope,
        None if rope is None else rope.config,
        attention.config.window,
        weights,
        feed_forward.activation,
        x.shape[2],
        x.dtype,
    )


def _heads(attention: MultiHeadAttention) -> Heads | None:
    """What the attention of a token consists of; None if it is more than that."""
    rope = attention.rope
    H, G = attention.num_heads, attention.num_kv_heads
    D, V = attention.head_dim, attention.v_head_dim
    if (
        (attention.training and attention.dropout)
        or attention._parameters["sinks"] is not None
        or attention.qk_norm_place not in (None, "before_rope")
        or not (rope is None or _rotates_all(rope, D))
        or H % G
    ):
        return None
    return Heads(H, G, D, V, attention.scale, attention.softcap or 0.0, None)


def _rotates_all(rope: RoPE, head_dim: int) -> bool:
    config = rope.config
    return _ROPE.is_class_of(rope) and _KNOWN.cover(config) and config.dim in (None, head_dim)


class _CannotBeReadError(Exception):
    """A parameter that does not lie in memory as native code reads it."""


def _weights(
    parts: dict[str, nn.Module | None],
    attention: MultiHeadAttention,
    feed_forward: FeedForward,
    x: Tensor,
) -> LayerWeights:
    attend, feed, E = attention._modules, feed_forward._modules, x.shape[2]
    H, G = attention.num_heads, attention.num_kv_heads
    D, V = attention.head_dim, attention.v_head_dim
    hidden = feed_forward.hidden_dim
    qk_norm = attention.qk_norm_place is not None
    sandwich = parts["attention_out_norm"] is not None
    gated = feed["gate_proj"] is not None
    return LayerWeights(
        attention_norm=_norm(parts["attention_norm"], E, x),
        q=_linear(attend["q_proj"], E, H * D, x),
        k=_linear(attend["k_proj"], E, G * D, x),
        v=_linear(attend["v_proj"], E, G * V, x),
        q_norm=_norm(attend["q_norm"], D, x) if qk_norm else None,
        k_norm=_norm(attend["k_norm"], D, x) if qk_norm else None,
        out=_linear(attend["o_proj"], H * V, E, x),
        attention_out_norm=_norm(parts["attention_out_norm"], E, x) if sandwich else None,
        feed_forward_norm=_norm(parts["feed_forward_norm"], E, x),
        gate=_linear(feed["gate_proj"], E, hidden, x) if gated else None,
        up=_linear(feed["up_proj"], E, hidden, x),
        down=_linear(feed["down_proj"], hidden, E, x),
        feed_forward_out_norm=_norm(parts["feed_forward_out_norm"], E, x) if sandwich else None,
    )


def _linear(module: nn.Module | None, inputs: int, outputs: int, x: Tensor) -> Weight:
    if not PLAIN_LINEAR.is_unwatched(module):
        raise _CannotBeReadError
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    return Weight(
        _read(weight, (outputs, inputs), x), bias if bias is None else _read(bias, (outputs,), x)
    )


def _norm(module: nn.Module | None, features: int, x: Tensor) -> NormWeight:
    if not _NORM.is_unwatched(module) or not _KNOWN.cover(module.config):
        raise _CannotBeReadError
    weight = _read(module._parameters["weight"], (features,), x)
    return NormWeight(weight, module.eps, module.weight_offset)


def _read(weight: Tensor | None, shape: tuple[int, ...], x: Tensor) -> Tensor:
    if weight is None or weight.shape != shape or not is_plain(weight, x):
        raise _CannotBeReadError
    return weight
