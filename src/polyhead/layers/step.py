"""One token through a whole layer by native code: what decoding does once per token and layer.

A layer of a small model takes less time to compute than Python takes to ask for its ten operations.
Here they are one call, with the bits of the layer's own path. What that call cannot do (prompts,
gradients, hooks, other masks, other caches than dense rows and rings) takes the modules, one by
one. So does whatever it does not know: it is an allowlist of exact classes and of fields of
configurations. A layer is described to native code once, as data, and again when anything about
its modules changed, which every call finds out.

Shape letters: B batch, E embed size, H query heads, G kv heads, D key size, V value size; of latent
attention R latent size, N features of a key without rotation, P with rotation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from polyhead.caches import DenseCache, KeyValueCache, LatentCache, Ring, RingCache, StoredCache
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
)
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.exact import Exactly, KnownFields, facts_of
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.latent_attention import MultiHeadLatentAttention
from polyhead.layers.linear import PLAIN_LINEAR, code_for_rows
from polyhead.layers.norms import LayerNorm, RMSNorm
from polyhead.layers.positions import RoPE
from polyhead.native import Code, Heads, LayerForm, LayerWeights, is_plain
from polyhead.native.arguments import (
    ACTIVATIONS,
    DTYPES,
    NORM_PLACES,
    PARALLEL,
    Latent,
    NormWeight,
    Weight,
)
from polyhead.native.code import Layer
from polyhead.semantics import Causal, Mask

if TYPE_CHECKING:
    from polyhead.layers.transformer_layer import TransformerLayer

_HEADS, _LATENT = Exactly(MultiHeadAttention), Exactly(MultiHeadLatentAttention)
_FEED_FORWARD, _ROPE, _NOTHING = Exactly(FeedForward), Exactly(RoPE, "apply"), Exactly(nn.Identity)
_RMS_NORM, _LAYER_NORM = Exactly(RMSNorm), Exactly(LayerNorm)
_CACHES = {
    kind: Exactly(kind, "append") for kind in (StoredCache, DenseCache, RingCache, LatentCache)
}


def _any(names: str) -> dict[str, None]:
    """Fields that may have any value."""
    return dict.fromkeys(names.split())


_KNOWN = KnownFields(
    {
        LayerConfig: _any(
            "attention feed_forward norm norm_placement dropout parallel residual_scale "
            "attention_norm"
        ),
        AttentionConfig: _any(
            "num_heads num_kv_heads head_dim v_head_dim qkv_bias k_bias out_bias rope qk_norm "
            "window softcap scale dropout"
        ),
        LatentAttentionConfig: _any(
            "num_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim q_lora_rank bias "
            "norm q_bias rope scale dropout"
        ),
        QKNormConfig: _any("norm place"),
        FeedForwardConfig: _any("hidden_dim gated bias dropout") | {"activation": ACTIVATIONS},
        NormConfig: _any("type eps bias weight_offset"),
        RopeConfig: _any(
            "theta type dim factor original_max_positions low_freq_factor high_freq_factor "
            "beta_fast beta_slow attention_factor mscale mscale_all_dim truncate short_factor "
            "long_factor frequencies"
        ),
    }
)


class Remembered:
    """What ``step`` found out about a layer.

    A copy of a layer is another layer: it starts without.
    """

    __slots__ = ("layer",)

    def __init__(self) -> None:
        self.layer: _Layer | None = None

    def __reduce__(self) -> tuple[type[Remembered], tuple[()]]:
        return Remembered, ()


class _Layer(NamedTuple):
    """A layer that native code computes, as data."""

    data: Layer
    attention: MultiHeadAttention | MultiHeadLatentAttention
    rope: RoPE | None
    rope_config: RopeConfig | None
    rotary: int
    window: int | None
    least_past: int
    sizes: tuple[int, int, int]
    embed_dim: int
    dtype: torch.dtype


def step(
    layer: TransformerLayer, x: Tensor, mask: Mask | None, cache: KeyValueCache
) -> Tensor | None:
    """``x`` behind a layer, its keys and values then in the cache; or None.

    Args:
        layer: A ``TransformerLayer`` without cross-attention, not in training.
        x: ``[B, 1, E]``.
        mask: Who may look at whom.
        cache: Of the self-attention; untouched where this returns None.

    Returns:
        ``[B, 1, E]``, with the bits of the modules one after the other. None for more than 8 rows,
        masks other than ``Causal``, caches other than exact tokens in rows of equal length with
        room (dense, or the ring of a window), modules that are hooked or replaced,
        deterministic algorithms, and where there is no native code.
    """
    code, shape = code_for_rows(x), x.shape
    if (
        code is None
        or len(shape) != 3
        or shape[1] != 1
        or not x.is_contiguous()
        or torch.are_deterministic_algorithms_enabled()  # its threads share the keys
        or not (mask is None or type(mask) is Causal)
        or not _in_rows(cache)
    ):
        return None
    remembered = layer.remembered
    for known in (remembered.layer, None):
        if known is None or known.dtype is not x.dtype or known.embed_dim != shape[2]:
            remembered.layer = known = _described(code, layer, x)
            if known is None:
                return None
        y = _computed(code, known, x, cache)
        if y is not False:
            return y
    return None


def knows(config: LayerConfig) -> bool:
    """Whether layers of this configuration, as they are built, may take a step."""
    return _KNOWN.cover(config)


def _in_rows(cache: KeyValueCache) -> TypeGuard[StoredCache]:
    kind = _CACHES.get(type(cache))  # type: ignore[arg-type]  # any other kind is not there
    return kind is not None and kind.is_class_of(cache)


def _computed(
    code: Code, known: _Layer, x: Tensor, cache: StoredCache
) -> Tensor | Literal[False] | None:
    """The step; None where the modules must take it, False where the layer has changed."""
    if known.attention.is_shown:
        return None
    position, rotation, window = cache.length, None, known.window
    if window is not None and position >= window and type(cache.layout) is not Ring:
        return None  # whose tiles begin elsewhere: the sums would round differently
    if position < known.least_past:
        return None  # keys and values of few tokens are made, and no queries for the latent
    if known.rope is not None:
        if not _ROPE.is_class_of(known.rope) or known.rope.config is not known.rope_config:
            return False
        rotation = known.rope.tables_at(x, position, known.rotary)
    with cache.in_use:
        held = cache.grow((x.shape[0], *known.sizes, x.dtype, x.device), window)
        if held is None:
            return None
        try:
            y = code.step(x, known.data, rotation, held)
        except ValueError:
            cache.ungrow()
            raise
        if y is None:
            cache.ungrow()
            return False
        return y


def _described(code: Code, layer: TransformerLayer, x: Tensor) -> _Layer | None:
    """What the layer computes with in the dtype of x; None if it is not what native code knows."""
    parts = layer._modules
    attention, feed_forward = parts["attention"], parts["feed_forward"]
    config = layer.config
    if (
        not layer.is_itself
        or not _KNOWN.cover(config)
        or not _FEED_FORWARD.is_unwatched(feed_forward)
        or not _KNOWN.cover(feed_forward.config)
        or feed_forward.activation not in ACTIVATIONS
        or (feed_forward.training and feed_forward.dropout)
    ):
        return None
    try:
        if _HEADS.is_unwatched(attention):
            heads, own = _heads(attention, x)
        elif _LATENT.is_unwatched(attention):
            heads, own = _latent(attention, x)
        else:
            return None
        weights = _weights(parts, own, feed_forward, x)
    except _CannotBeReadError:
        return None
    form = LayerForm(
        DTYPES[x.dtype],
        x.shape[2],
        heads,
        ACTIVATIONS[feed_forward.activation],
        PARALLEL[config.parallel],
        config.norm_placement == "post",
        config.residual_scale,
    )
    rope, window, absorbed_from = attention.rope, None, 1
    if isinstance(attention, MultiHeadLatentAttention):
        fewest = attention.config.absorbed_from
        if fewest is None:
            return None
        absorbed_from = fewest
    else:
        window = attention.config.window
    return _Layer(
        code.layer(weights, form, facts_of(layer.modules())),
        attention,
        rope,
        None if rope is None else rope.config,
        heads.rotary,
        window,
        absorbed_from - 1,
        heads[1:4],
        x.shape[2],
        x.dtype,
    )


class _CannotBeReadError(Exception):
    """What native code does not do, or a parameter that does not lie in memory as it reads it."""


def _heads(attention: MultiHeadAttention, x: Tensor) -> tuple[Heads, dict[str, Any]]:
    """The heads of a token, and the weights that only attention by heads has."""
    rope, place = attention.rope, attention.qk_norm_place
    H, G = attention.num_heads, attention.num_kv_heads
    D, V, E = attention.head_dim, attention.v_head_dim, x.shape[2]
    if (
        not _KNOWN.cover(attention.config)
        or (attention.training and attention.dropout)
        or attention._parameters["sinks"] is not None
        or H % G
    ):
        raise _CannotBeReadError
    heads = Heads(
        H, G, D, V, attention.scale, attention.softcap or 0.0,
        _rotated(rope, D), NORM_PLACES[place or "before_rope"],
    )  # fmt: skip
    parts = attention._modules
    own: dict[str, Any] = {
        "q": _linear(parts["q_proj"], E, H * D, x),
        "k": _linear(parts["k_proj"], E, G * D, x),
        "v": _linear(parts["v_proj"], E, G * V, x),
        "out": _linear(parts["o_proj"], H * V, E, x),
    }
    if place is not None:
        width = (H * D, G * D) if place == "full_width" else (D, D)
        own["q_norm"] = _norm(parts["q_norm"], width[0], x)
        own["k_norm"] = _norm(parts["k_norm"], width[1], x)
    return heads, own


def _latent(attention: MultiHeadLatentAttention, x: Tensor) -> tuple[Heads, dict[str, Any]]:
    """The same of latent attention, absorbed: one kv head of R + P features."""
    config, E = attention.config, x.shape[2]
    H, N, P = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    R, V, into = config.kv_lora_rank, config.v_head_dim, config.q_lora_rank
    if not _KNOWN.cover(config) or (attention.training and attention.dropout):
        raise _CannotBeReadError
    rotary = _rotated(attention.rope, P)
    heads = Heads(H, 1, R + P, R, attention.scale, 0.0, rotary, NORM_PLACES["before_rope"])
    parts = attention._modules
    up, bias = _linear(parts["kv_b_proj"], R, H * (N + V), x)
    if bias is not None:
        raise _CannotBeReadError
    q = q_norm = None
    first = _linear(parts["q_proj" if into is None else "q_a_proj"], E, into or H * (N + P), x)
    if into is not None:
        q_norm = _latent_norm(parts["q_a_norm"], into, x)
        q = _linear(parts["q_b_proj"], into, H * (N + P), x)
    norm = _latent_norm(parts["kv_a_norm"], R, x)
    return heads, {
        "q": first,
        "k": _linear(parts["kv_a_proj_with_mqa"], E, R + P, x),
        "latent": Latent(R, N, P, V, q, q_norm, norm, up),
        "out": _linear(parts["o_proj"], H * V, E, x),
    }


def _rotated(rope: RoPE | None, head_dim: int) -> int:
    """Features of a head that are rotated, from the first."""
    if rope is None:
        return 0
    if not _ROPE.is_class_of(rope) or not _KNOWN.cover(rope.config):
        raise _CannotBeReadError
    return rope.config.dim or head_dim


def _weights(
    parts: dict[str, nn.Module | None], own: dict[str, Any], feed_forward: FeedForward, x: Tensor
) -> LayerWeights:
    feed, E, hidden = feed_forward._modules, x.shape[2], feed_forward.hidden_dim

    def norm(name: str) -> NormWeight | None:
        part = parts[name]
        return None if part is None else _norm(part, E, x)

    gate = feed["gate_proj"]
    nothing: dict[str, Any] = dict.fromkeys(("v", "q_norm", "k_norm", "latent"))
    return LayerWeights(
        **nothing | own,
        attention_norm=norm("attention_norm"),
        attention_out_norm=norm("attention_out_norm"),
        feed_forward_norm=norm("feed_forward_norm"),
        gate=None if gate is None else _linear(gate, E, hidden, x),
        up=_linear(feed["up_proj"], E, hidden, x),
        down=_linear(feed["down_proj"], hidden, E, x),
        feed_forward_out_norm=norm("feed_forward_out_norm"),
    )


def _linear(module: nn.Module | None, inputs: int, outputs: int, x: Tensor) -> Weight:
    if not PLAIN_LINEAR.is_unwatched(module):
        raise _CannotBeReadError
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    return Weight(
        _read(weight, (outputs, inputs), x), bias if bias is None else _read(bias, (outputs,), x)
    )


def _norm(module: nn.Module | None, features: int, x: Tensor) -> NormWeight:
    if _RMS_NORM.is_unwatched(module) and _KNOWN.cover(module.config):
        only = _read(module._parameters["weight"], (features,), x)
        return NormWeight(only, module.eps, module.weight_offset)
    if not _LAYER_NORM.is_unwatched(module) or module.normalized_shape != (features,):
        raise _CannotBeReadError
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    return NormWeight(
        _read(weight, (features,), x),
        module.eps,
        module.weight_offset,
        bias if bias is None else _read(bias, (features,), x),
        centred=True,
    )


def _latent_norm(module: nn.Module | None, features: int, x: Tensor) -> NormWeight | None:
    return None if _NOTHING.is_unwatched(module) else _norm(module, features, x)


def _read(weight: Tensor | None, shape: tuple[int, ...], x: Tensor) -> Tensor:
    if weight is None or weight.shape != shape or not is_plain(weight, x):
        raise _CannotBeReadError
    return weight
