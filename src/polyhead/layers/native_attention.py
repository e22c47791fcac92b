"""The attention of a layer as native code reads it: an allowlist, as ``native_export.py``.

Shape letters: B batch, E embed size, H query heads, G kv heads, D key size, V value size; of latent
attention R latent size, N features of a key without rotation, P with rotation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polyhead.layers import native_export
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.attention_parts import temperatures
from polyhead.layers.exact import ExactType
from polyhead.layers.latent_attention import MultiHeadLatentAttention
from polyhead.layers.native_export import (
    NotExportableError,
    Parts,
    around,
    check_unhooked,
    known_fields,
    latent_norm,
    linear,
    norm_of_heads,
    read,
)
from polyhead.layers.positions import RoPE
from polyhead.layers.selective_attention import SelectiveAttention
from polyhead.layers.selectors import BlockBounds
from polyhead.native import Heads
from polyhead.native.arguments import NORM_PLACES, Cross, Latent
from polyhead.semantics import ALiBi, RoundedALiBi

HEADS, LATENT = ExactType(MultiHeadAttention), ExactType(MultiHeadLatentAttention)
SELECTIVE, BOUNDS = ExactType(SelectiveAttention), ExactType(BlockBounds)
ROPE = ExactType(RoPE, "apply")


def attention_heads(
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


def mask_fields(attention: MultiHeadAttention | MultiHeadLatentAttention) -> tuple[Any, ...]:
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


def latent_heads(attention: MultiHeadLatentAttention, x: Tensor) -> tuple[Heads, dict[str, Any]]:
    """The same of latent attention, absorbed: one kv head of R + P features."""
    config, E = attention.config, x.shape[2]
    H, N, P = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    R, V, into = config.kv_lora_rank, config.v_head_dim, config.q_lora_rank
    known_fields(attention, config)
    if attention.training and attention.dropout:
        raise NotExportableError("it is training, with dropout", attention)
    if not P:
        raise NotExportableError("its keys have no rotary part", attention)
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


def cross_attention(parts: Parts, x: Tensor) -> Cross:
    """The weights of queries to the context and of what follows; its keys and values are cached."""
    attention = parts["cross_attention"]
    check_unhooked([HEADS], attention)
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
    heads, own = attention_heads(attention, x, cross=True)
    found = around("cross_attention", parts, x)
    norms = found["cross_attention_norm"], found["cross_attention_out_norm"]
    return Cross(heads, norms[0], own["q"], own.get("q_norm"), own["out"], norms[1])
