"""Steps that change how a model is written and not what it computes.

    kv heads copied      k and v of a group become those of each of its heads: GQA → MHA
    keys rotated         k' = c k, q' = q / c̄ with one complex number c for each pair of features:
                         what rotary embedding does to a pair is a multiplication as well, and
                         complex numbers commute; Re(q̄' k') = Re(q̄ k)
    to latent attention  the cache of all kv heads as one latent: all pairs rotated, with their
                         frequencies given one by one, values as the latent, no norm

``Proof`` runs a model before and after each in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polyhead.config import AttentionConfig, LatentAttentionConfig, RopeConfig
from polyhead.conversion.draft import Draft
from polyhead.conversion.refusals import (
    refuse_full_width,
    refuse_latent,
    refuse_linear,
    rotated_dim,
)
from polyhead.errors import InputError
from polyhead.layers.frequencies import inverse_frequencies


def copy_kv_heads(draft: Draft, layer: int, num_kv_heads: int) -> None:
    """Gives ``num_kv_heads`` groups keys and values of their own, copies of those they shared.

    Raises:
        InputError: Fewer than there are, or a number that does not divide the query heads or is
            no multiple of the kv heads.
        UnsupportedError: A norm over all keys at once.
    """
    config = draft.heads(layer, "copying kv heads")
    G = config.num_kv_heads
    if num_kv_heads % G or config.num_heads % num_kv_heads:
        raise InputError(
            f"kv heads are copied to a multiple of {G} that divides {config.num_heads} query "
            f"heads: got {num_kv_heads}"
        )
    refuse_full_width(config, layer, "copying kv heads")
    order = [g for g in range(G) for _ in range(num_kv_heads // G)]
    for name, size in (("k_proj", config.head_dim), ("v_proj", config.value_dim)):
        _reorder(draft, layer, name, order, size)
    _reorder_norm(draft, layer, "k_norm", config, order)
    draft.set_attention(layer, replace(config, num_kv_heads=num_kv_heads))


def rotate_keys(draft: Draft, layer: int, factors: Tensor) -> None:
    """Multiplies each pair of features of keys by a complex number, and divides those of queries.

    Args:
        draft: Model whose layer is rewritten in place.
        layer: Index of the layer.
        factors: ``[G, pairs]`` complex128 without zeros: a factor for each rotated pair of a head;
            without rotary positions for each pair of its two halves.

    Raises:
        InputError: Wrong shape, or a factor of 0.
        UnsupportedError: Keys that are normalized or clipped after they are projected.
    """
    config = draft.heads(layer, "rotating keys")
    refuse_linear(config, layer, "rotating keys")
    shape = config.num_kv_heads, rotated_dim(config) // 2
    if factors.shape != shape or not factors.is_complex():
        raise InputError(
            f"factors must be complex {[*shape]}: got {list(factors.shape)}, {factors.dtype}"
        )
    if bool((factors.abs() < 1e-6).any()):
        raise InputError("factors must not be 0, nor nearly: queries are divided by them")
    group = config.num_heads // config.num_kv_heads
    inverse = (1 / factors.conj()).repeat_interleave(group, dim=0)
    _multiply(draft, layer, "q_proj", inverse, config.head_dim)
    _multiply(draft, layer, "k_proj", factors, config.head_dim)


def to_latent(draft: Draft, layer: int) -> None:
    """Latent attention with the same cache: all keys that are rotated, and values as the latent.

    Raises:
        UnsupportedError: What latent attention has no place for, by name.
    """
    config = draft.heads(layer, "latent attention")
    refuse_latent(draft, layer)
    H, G, D, V = config.num_heads, config.num_kv_heads, config.head_dim, config.value_dim
    P, E = rotated_dim(config), draft.config.embed_dim
    half, N, group = P // 2, D - P, H // G
    R = G * (N + V)
    key, value = draft.get(layer, "k_proj.weight"), draft.get(layer, "v_proj.weight")
    made: dict[str, Tensor] = {
        "kv_a_proj_with_mqa": _latent_rows(key.view(G, D, E), value.view(G, V, E), P)
    }
    query = draft.get(layer, "q_proj.weight").view(H, D, E)
    made["q_proj"] = _query_rows(query, G, P)
    up = torch.zeros(H, N + V, R, dtype=torch.float64, device="cpu")
    for head in range(H):
        g = head // group
        up[head, :N, g * N : (g + 1) * N] = torch.eye(N, dtype=torch.float64, device="cpu")
        start = G * N + g * V
        up[head, N:, start : start + V] = torch.eye(V, dtype=torch.float64, device="cpu")
    made["kv_b_proj"] = up.flatten(0, 1)
    made["o_proj"] = draft.get(layer, "o_proj.weight")
    made |= _latent_biases(draft, layer, config, P)
    rope = explicit_rope(config, P, torch.arange(half, device="cpu").repeat(G))
    draft.clear(layer)
    draft.put(layer, **made)
    draft.set_attention(layer, latent_config(config, R, N, 2 * G * half, rope))


def latent_config(
    config: AttentionConfig, size: int, straight: int, rotated: int, rope: RopeConfig | None
) -> LatentAttentionConfig:
    """Latent attention with the heads of ``config``: a latent of ``size`` numbers, and keys of
    ``straight`` features without rotation and ``rotated`` with."""
    return LatentAttentionConfig(
        num_heads=config.num_heads,
        kv_lora_rank=size,
        qk_nope_head_dim=straight,
        qk_rope_head_dim=rotated,
        v_head_dim=config.value_dim,
        bias=config.has_k_bias or config.qkv_bias or config.out_bias,
        q_bias=config.qkv_bias,
        norm=None,
        rope=rope,
        scale=config.head_dim**-0.5 if config.scale is None else config.scale,
        dropout=config.dropout,
    )


def explicit_rope(config: AttentionConfig, rotated: int, chosen: Tensor) -> RopeConfig | None:
    """Rotary embedding with the frequencies of the chosen pairs of ``rotated`` features."""
    if config.rope is None:
        return None
    frequencies, factor = inverse_frequencies(config.rope, rotated)
    return RopeConfig(
        type="explicit",
        frequencies=tuple(frequencies.double()[chosen].tolist()),
        attention_factor=None if factor == 1.0 else factor,
    )


def _latent_rows(key: Tensor, value: Tensor, rotated: int) -> Tensor:
    """``[G, D, ...]`` and ``[G, V, ...]`` as rows of the latent, then the rotated key."""
    half = rotated // 2
    parts = (
        key[:, rotated:].flatten(0, 1),
        value.flatten(0, 1),
        key[:, :half].flatten(0, 1),
        key[:, half:rotated].flatten(0, 1),
    )
    return torch.cat(parts)


def _query_rows(query: Tensor, groups: int, rotated: int) -> Tensor:
    """``[H, D, ...]`` as queries of latent attention: each head asks for its own pairs."""
    H, half = len(query), rotated // 2
    first = query.new_zeros(H, groups, half, *query.shape[2:])
    second = torch.zeros_like(first)
    for head in range(H):
        group = head * groups // H
        first[head, group] = query[head, :half]
        second[head, group] = query[head, half:rotated]
    rows = (query[:, rotated:], first.flatten(1, 2), second.flatten(1, 2))
    return torch.cat(rows, dim=1).flatten(0, 1)


def _latent_biases(
    draft: Draft, layer: int, config: AttentionConfig, rotated: int
) -> dict[str, Tensor]:
    """Biases of the projections, zeros where latent attention has one and the layer none."""
    made: dict[str, Tensor] = {}
    if not (config.has_k_bias or config.qkv_bias or config.out_bias):
        return made
    H, G, D, V = config.num_heads, config.num_kv_heads, config.head_dim, config.value_dim

    def of(name: str, size: int) -> Tensor:
        found = draft.find(layer, f"{name}.bias")
        return torch.zeros(size, dtype=torch.float64, device="cpu") if found is None else found

    key, value = of("k_proj", G * D).view(G, D), of("v_proj", G * V).view(G, V)
    made["kv_a_proj_with_mqa_bias"] = _latent_rows(key, value, rotated)
    made["o_proj_bias"] = of("o_proj", draft.config.embed_dim)
    if config.qkv_bias:
        made["q_proj_bias"] = _query_rows(of("q_proj", H * D).view(H, D), G, rotated)
    return made


def _reorder(draft: Draft, layer: int, name: str, order: Sequence[int], size: int) -> None:
    """Heads of ``size`` rows each in another order, of a projection's weight and bias."""
    for leaf in ("weight", "bias"):
        found = draft.find(layer, f"{name}.{leaf}")
        if found is not None:
            rows = found.view(-1, size, *found.shape[1:])[list(order)]
            draft.state[f"layers.{layer}.attention.{name}.{leaf}"] = rows.flatten(0, 1)


def _reorder_norm(
    draft: Draft, layer: int, name: str, config: AttentionConfig, order: Sequence[int]
) -> None:
    if config.qk_norm is None or not config.qk_norm.per_head:
        return
    for key in [k for k in draft.state if k.startswith(f"layers.{layer}.attention.{name}.")]:
        draft.state[key] = draft.state[key][list(order)]


def _multiply(draft: Draft, layer: int, name: str, factors: Tensor, size: int) -> None:
    """Multiplies the pairs of every head of ``size`` rows by ``factors [heads, pairs]``."""
    heads, half = factors.shape
    for leaf in ("weight", "bias"):
        found = draft.find(layer, f"{name}.{leaf}")
        if found is None:
            continue
        rows = found.view(heads, size, -1).clone()
        pairs = torch.complex(rows[:, :half], rows[:, half : 2 * half]) * factors[..., None]
        rows[:, :half], rows[:, half : 2 * half] = pairs.real, pairs.imag
        draft.state[f"layers.{layer}.attention.{name}.{leaf}"] = rows.reshape(found.shape)
