"""A layer as native code needs it: its parts read from modules once, as data.

An allowlist of exact classes and of fields of configurations. The parts of a layer are its
self-attention, its attention to a context, and its feed-forward network. The description ends
before the first that is not on the list, such as a mixture of experts: the modules go on from
there.

Shape letters: B batch, E embed size, H query heads, G kv heads, D key size, V value size; of latent
attention R latent size, N features of a key without rotation, P with rotation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
)
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.exact import UNSEEN, Exactly, KnownFields, facts_of
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.latent_attention import MultiHeadLatentAttention
from polyhead.layers.linear import weight_of
from polyhead.layers.norms import LayerNorm, RMSNorm
from polyhead.layers.positions import RoPE
from polyhead.native import Code, Heads, LayerForm, LayerWeights, is_plain
from polyhead.native.arguments import (
    ACTIVATIONS,
    DTYPES,
    NORM_PLACES,
    PARALLEL,
    Cross,
    Latent,
    NormWeight,
    Weight,
)
from polyhead.native.code import Layer
from polyhead.semantics import ALiBi, Bias

if TYPE_CHECKING:
    from polyhead.layers.transformer_layer import TransformerLayer

_HEADS, _LATENT = Exactly(MultiHeadAttention), Exactly(MultiHeadLatentAttention)
_FEED_FORWARD, _NOTHING = Exactly(FeedForward), Exactly(nn.Identity)
ROPE = Exactly(RoPE, "apply")
_RMS_NORM, _LAYER_NORM = Exactly(RMSNorm), Exactly(LayerNorm)


def _any(names: str) -> dict[str, None]:
    """Fields that may have any value."""
    return dict.fromkeys(names.split())


_KNOWN_NORM = {NormConfig: _any("type eps bias weight_offset")}
_KNOWN = KnownFields(
    _KNOWN_NORM
    | {
        AttentionConfig: _any(
            "num_heads num_kv_heads head_dim v_head_dim qkv_bias k_bias out_bias rope qk_norm "
            "window softcap scale dropout alibi"
        ),
        ALiBiConfig: _any("max_bias scale"),
        LatentAttentionConfig: _any(
            "num_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim q_lora_rank bias "
            "norm q_bias rope scale dropout"
        ),
        QKNormConfig: _any("norm place"),
        FeedForwardConfig: _any("hidden_dim gated bias dropout") | {"activation": ACTIVATIONS},
        RopeConfig: _any(
            "theta type dim factor original_max_positions low_freq_factor high_freq_factor "
            "beta_fast beta_slow attention_factor mscale mscale_all_dim truncate short_factor "
            "long_factor frequencies"
        ),
    }
)


# Of a layer's own configuration: its parts are asked for one by one.
_KNOWN_AROUND = KnownFields(
    _KNOWN_NORM
    | {
        LayerConfig: _any("norm norm_placement dropout parallel residual_scale attention_norm")
        | dict.fromkeys(("attention", "cross_attention", "feed_forward"), UNSEEN),
    }
)

_PARTS = ("attention", "cross_attention", "feed_forward")
ATTENTION, CROSS_ATTENTION, NETWORK = 1, 2, 3
"""The parts of a layer, in order: the last that a step went through."""


class DescribedLayer(NamedTuple):
    """A layer that native code computes, as data."""

    data: Layer
    attention: MultiHeadAttention | MultiHeadLatentAttention
    cross: MultiHeadAttention | None
    last: int  # of the parts
    rope: RoPE | None
    rope_config: RopeConfig | None
    heads: Heads
    biased: bool
    window: int | None
    least_past: int
    embed_dim: int
    dtype: torch.dtype


def last_part(config: LayerConfig) -> int:
    """How far a step gets through layers of this configuration, as they are built; 0: nowhere."""
    if not _KNOWN_AROUND.cover(config) or not _KNOWN.cover(config.attention):
        return 0
    network, cross = _KNOWN.cover(config.feed_forward), config.cross_attention
    if config.parallel is not None and not network:
        return 0
    if cross is not None and not _KNOWN.cover(cross):
        return ATTENTION
    return NETWORK if network else ATTENTION if cross is None else CROSS_ATTENTION


def describe(code: Code, layer: TransformerLayer, x: Tensor) -> DescribedLayer | None:
    """What the layer computes with in the dtype of x; None if it is not what native code knows."""
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
        weights |= own | _around("attention", parts, x)
    except _CannotBeReadError:
        return None
    read, activation = _further(parts, last, weights, x)
    if config.parallel is not None and read != NETWORK:
        return None
    form = LayerForm(
        DTYPES[x.dtype],
        x.shape[2],
        heads,
        activation,
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
    # Of parts that could be read but for a hook, too: it may be taken away.
    names = [f"{part}{norm}" for part in _PARTS[:last] for norm in ("", "_norm", "_out_norm")]
    seen = [module for name in names if (module := parts.get(name)) is not None]
    return DescribedLayer(
        code.layer(
            LayerWeights(**weights),
            form,
            facts_of([layer, *(module for part in seen for module in part.modules())]),
        ),
        attention,
        layer.cross_attention if read > ATTENTION else None,
        read,
        rope,
        None if rope is None else rope.config,
        heads,
        weights["slopes"] is not None,
        window,
        absorbed_from - 1,
        x.shape[2],
        x.dtype,
    )


def _further(
    parts: dict[str, nn.Module | None], last: int, weights: dict[str, Any], x: Tensor
) -> tuple[int, int]:
    """Adds the weights of the parts behind the self-attention, as far as they can be read.

    Returns:
        The last part of which they are there, and the number of the network's activation.
    """
    read, activation = ATTENTION, 0
    try:
        if parts.get("cross_attention") is not None and last > ATTENTION:
            weights["cross"] = _cross(parts, x)
            read = CROSS_ATTENTION
        if last == NETWORK:
            more, activation = _network(parts, x)
            weights |= more
            read = NETWORK
    except _CannotBeReadError:
        pass
    return read, activation


class _CannotBeReadError(Exception):
    """What native code does not do, or a parameter that does not lie in memory as it reads it."""


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
        "out": _linear(parts["o_proj"], H * V, E, x),
    }
    whole = place == "full_width"
    if place is not None:
        own["q_norm"] = _norm(parts["q_norm"], H * D if whole else D, x)
    if of_context:
        return heads, own
    own["k"] = _linear(parts["k_proj"], E, G * D, x)
    own["v"] = _linear(parts["v_proj"], E, G * V, x)
    if place is not None:
        own["k_norm"] = _norm(parts["k_norm"], G * D if whole else D, x)
    if attention._alibi is not None:
        own["slopes"] = _slopes(attention._alibi)
    return heads, own


def _slopes(alibi: Bias) -> Tensor:
    """``[H]`` float32: as they are kept, so that a change of them is seen."""
    if type(alibi) is not ALiBi or alibi.slopes.dtype != torch.float32:
        raise _CannotBeReadError
    return alibi.slopes


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
    up, bias, blocks = _linear(parts["kv_b_proj"], R, H * (N + V), x)
    if bias is not None or blocks:
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
    if not ROPE.is_class_of(rope) or not _KNOWN.cover(rope.config):
        raise _CannotBeReadError
    return rope.config.dim or head_dim


def _cross(parts: dict[str, nn.Module | None], x: Tensor) -> Cross:
    """What makes queries for the context, and what follows; its keys and values are held."""
    attention = parts["cross_attention"]
    if not _HEADS.is_unwatched(attention) or attention._alibi is not None:
        raise _CannotBeReadError
    heads, own = _heads(attention, x, of_context=True)
    around = _around("cross_attention", parts, x)
    norms = around["cross_attention_norm"], around["cross_attention_out_norm"]
    return Cross(heads, norms[0], own["q"], own.get("q_norm"), own["out"], norms[1])


def _network(
    parts: dict[str, nn.Module | None], x: Tensor
) -> tuple[dict[str, Weight | NormWeight | None], int]:
    """The weights of the feed-forward network and its norms, and the number of its activation."""
    network, E = parts["feed_forward"], x.shape[2]
    if (
        not _FEED_FORWARD.is_unwatched(network)
        or not _KNOWN.cover(network.config)
        or network.activation not in ACTIVATIONS
        or (network.training and network.dropout)
    ):
        raise _CannotBeReadError
    inner, hidden = network._modules, network.hidden_dim
    gate = inner["gate_proj"]
    return {
        "gate": None if gate is None else _linear(gate, E, hidden, x),
        "up": _linear(inner["up_proj"], E, hidden, x),
        "down": _linear(inner["down_proj"], hidden, E, x),
    } | _around("feed_forward", parts, x), ACTIVATIONS[network.activation]


def _around(
    part: str, parts: dict[str, nn.Module | None], x: Tensor
) -> dict[str, NormWeight | None]:
    """The norms before and behind a part."""
    found = ((name, parts[name]) for name in (f"{part}_norm", f"{part}_out_norm"))
    return {name: None if it is None else _norm(it, x.shape[2], x) for name, it in found}


def _linear(module: nn.Module | None, inputs: int, outputs: int, x: Tensor) -> Weight:
    found = weight_of(module, x, inputs)
    if found is None or len(found.weight) != outputs:
        raise _CannotBeReadError
    bias = found.bias
    if bias is not None and bias.shape != (outputs,):
        raise _CannotBeReadError
    return found


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
