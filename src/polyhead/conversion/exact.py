"""Steps that change how a model is written and not what it computes.

    kv heads copied      k and v of a group become those of each of its heads: GQA → MHA
    heads permuted       rows of q, k, v and columns of o in another order
    norms folded         W (w · n(x)) = (W diag w) n(x): the weights of norms become ones
    values rotated       v' = M v, Wo' = Wo M⁻¹, any invertible M for each kv head
    keys rotated         k' = c k, q' = q / c̄ with one complex number c for each pair of features:
                         what rotary embedding does to a pair is a multiplication as well, and
                         complex numbers commute; Re(q̄' k') = Re(q̄ k)
    to latent attention  the cache of all kv heads as one latent: all pairs rotated, with their
                         frequencies given one by one, values as the latent, no norm

``proof.prove`` runs a model before and after each in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    NormConfig,
    RopeConfig,
)
from polyhead.conversion.draft import Draft
from polyhead.conversion.refusals import (
    refuse_clip,
    refuse_full_width,
    refuse_latent,
    refuse_linear,
    rotated_dim,
)
from polyhead.errors import InputError, UnsupportedError
from polyhead.layers.frequencies import inverse_frequencies


def copy_kv_heads(draft: Draft, layer: int, kv_heads: int) -> None:
    """Gives ``kv_heads`` groups keys and values of their own, copies of those they shared.

    Raises:
        InputError: Fewer than there are, or a number that does not divide the query heads or is
            no multiple of the kv heads.
        UnsupportedError: A norm over all keys at once.
    """
    config = draft.heads(layer, "copying kv heads")
    G = config.num_kv_heads
    if kv_heads % G or config.num_heads % kv_heads:
        raise InputError(
            f"kv heads are copied to a multiple of {G} that divides {config.num_heads} query "
            f"heads: got {kv_heads}"
        )
    refuse_full_width(config, layer, "copying kv heads")
    order = [g for g in range(G) for _ in range(kv_heads // G)]
    for name, size in (("k_proj", config.head_dim), ("v_proj", config.value_dim)):
        _reorder(draft, layer, name, order, size)
    _reorder_norm(draft, layer, "k_norm", config, order)
    draft.set_attention(layer, replace(config, num_kv_heads=kv_heads))


def permute_heads(draft: Draft, layer: int, order: Sequence[int]) -> None:
    """Query heads in another order.

    Args:
        draft: Changed.
        layer: Its number.
        order: The number of the head that comes to each place. Heads of a group stay side by side;
            groups move with their kv head.

    Raises:
        InputError: No permutation, or a group torn apart.
        UnsupportedError: Heads that differ by their number: ALiBi, a bias by distance, a norm over
            all heads at once.
    """
    attention = draft.layer(layer).attention
    H = attention.num_heads
    if sorted(order) != list(range(H)):
        raise InputError(f"order must hold each head from 0 to {H - 1} once: got {list(order)}")
    if draft.config.relative_bias is not None:
        raise UnsupportedError("heads have a bias by distance that all layers share: their order")
    if isinstance(attention, LatentAttentionConfig):
        config = draft.latent(layer, "permuting heads")
        name = "q_proj" if config.q_lora_rank is None else "q_b_proj"
        _reorder(draft, layer, name, order, config.qk_head_dim)
        _reorder(draft, layer, "kv_b_proj", order, config.qk_nope_head_dim + config.v_head_dim)
        _reorder_columns(draft, layer, order, config.v_head_dim)
        return
    heads = draft.heads(layer, "permuting heads")
    if heads.alibi is not None:
        raise UnsupportedError(
            f"layer {layer} has ALiBi, whose slopes follow from the number of a head: heads keep "
            "their order"
        )
    refuse_full_width(heads, layer, "permuting heads")
    size = H // heads.num_kv_heads
    groups = [[head // size for head in order[i : i + size]] for i in range(0, H, size)]
    if any(len(set(group)) != 1 for group in groups):
        raise InputError(
            f"the {size} query heads of a kv head must stay side by side: got order {list(order)}"
        )
    kv_order = [group[0] for group in groups]
    _reorder(draft, layer, "q_proj", order, heads.head_dim)
    _reorder(draft, layer, "k_proj", kv_order, heads.head_dim)
    _reorder(draft, layer, "v_proj", kv_order, heads.value_dim)
    _reorder_columns(draft, layer, order, heads.value_dim)
    _reorder_norm(draft, layer, "q_norm", heads, order)
    _reorder_norm(draft, layer, "k_norm", heads, kv_order)
    sinks = draft.find(layer, "sinks")
    if sinks is not None:
        draft.put(layer, sinks=sinks[list(order)])


def fold_norms(draft: Draft, layer: int) -> list[str]:
    """Weights of norms go into the projections that read their outputs.

    Returns:
        The norms that were folded, by name. A norm stays where something else reads it too (a
        router, a network beside attention), and the bias of a LayerNorm stays in it.
    """
    config, attention = draft.layer(layer), draft.layer(layer).attention
    folded = []
    if config.norm_placement in ("pre", "sandwich") and config.parallel != "one norm":
        if config.has_norm("attention"):
            readers = ["attention.q_proj", "attention.k_proj", "attention.v_proj"]
            if isinstance(attention, LatentAttentionConfig):
                first = "q_proj" if attention.q_lora_rank is None else "q_a_proj"
                readers = [f"attention.{first}", "attention.kv_a_proj_with_mqa"]
            folded += _fold(draft, layer, config.norm, "attention_norm", readers)
        network = config.feed_forward
        if type(network) is FeedForwardConfig and config.has_norm("feed_forward"):
            readers = ["feed_forward.gate_proj"] * network.gated + ["feed_forward.up_proj"]
            folded += _fold(draft, layer, config.norm, "feed_forward_norm", readers)
    if isinstance(attention, LatentAttentionConfig) and attention.norm is not None:
        pairs = [("attention.kv_a_norm", "attention.kv_b_proj")]
        if attention.q_lora_rank is not None:
            pairs.append(("attention.q_a_norm", "attention.q_b_proj"))
        for norm, reader in pairs:
            folded += _fold(draft, layer, attention.norm, norm, [reader])
    return folded


def rotate_values(draft: Draft, layer: int, matrices: Tensor) -> None:
    """Other coordinates for values, taken back by the output projection.

    Args:
        draft: Changed.
        layer: Its number.
        matrices: ``[G, V, V]`` float64, invertible; ``[H, V, V]`` for latent attention, whose heads
            have values of their own.

    Raises:
        InputError: Another shape, or a matrix that cannot be inverted in float64.
        UnsupportedError: Values that are clipped, which other coordinates would change.
    """
    attention = draft.layer(layer).attention
    H, V = attention.num_heads, attention.value_dim
    if isinstance(attention, LatentAttentionConfig):
        groups = H
    else:
        config = draft.heads(layer, "rotating values")
        refuse_clip(config, layer, "rotating values")
        groups = config.num_kv_heads
    if matrices.shape != (groups, V, V):
        raise InputError(f"matrices must be {[groups, V, V]}: got {list(matrices.shape)}")
    if not bool((torch.linalg.cond(matrices) < 1e10).all()):
        raise InputError("matrices must be invertible in float64: one is singular, or nearly")
    inverse = torch.linalg.inv(matrices).repeat_interleave(H // groups, dim=0)
    if isinstance(attention, LatentAttentionConfig):
        weight, N = draft.get(layer, "kv_b_proj.weight"), attention.qk_nope_head_dim
        made = weight.view(H, N + V, -1)
        turned = torch.cat((made[:, :N], matrices @ made[:, N:]), dim=1)
        draft.put(layer, kv_b_proj=turned.flatten(0, 1))
    else:
        for leaf in ("weight", "bias"):
            found = draft.find(layer, f"v_proj.{leaf}")
            if found is not None:
                turned = (matrices @ found.view(groups, V, -1)).reshape(found.shape)
                draft.state[f"layers.{layer}.attention.v_proj.{leaf}"] = turned
    out = draft.get(layer, "o_proj.weight")
    turned = torch.einsum("ehv,hvw->ehw", out.view(-1, H, V), inverse)
    draft.put(layer, o_proj=turned.flatten(1))


def rotate_keys(draft: Draft, layer: int, factors: Tensor) -> None:
    """One complex factor for each pair of features of a kv head's keys; queries make up for it.

    Args:
        draft: Changed.
        layer: Its number.
        factors: ``[G, pairs]`` complex128, none 0: of all pairs of a head (without rotary
            positions: its halves), or of those that are rotated. Latent attention has one head
            here, the shared rotated key.

    Raises:
        InputError: Another shape, or a factor of 0.
        UnsupportedError: Keys that are normalised or clipped after they are projected.
    """
    attention = draft.layer(layer).attention
    if isinstance(attention, LatentAttentionConfig):
        groups, rotated = 1, attention.qk_rope_head_dim
    else:
        config = draft.heads(layer, "rotating keys")
        refuse_linear(config, layer, "rotating keys")
        groups, rotated = config.num_kv_heads, rotated_dim(config)
    if factors.shape != (groups, rotated // 2) or not factors.is_complex():
        raise InputError(
            f"factors must be complex {[groups, rotated // 2]}: got {list(factors.shape)}, "
            f"{factors.dtype}"
        )
    if bool((factors.abs() < 1e-6).any()):
        raise InputError("factors must not be 0, nor nearly: queries are divided by them")
    inverse = (1 / factors.conj()).repeat_interleave(attention.num_heads // groups, dim=0)
    if isinstance(attention, LatentAttentionConfig):
        name = "q_proj" if attention.q_lora_rank is None else "q_b_proj"
        N, R = attention.qk_nope_head_dim, attention.kv_lora_rank
        _multiply(draft, layer, name, inverse, attention.qk_head_dim, N)
        _multiply(draft, layer, "kv_a_proj_with_mqa", factors, attention.latent_dim, R)
    else:
        _multiply(draft, layer, "q_proj", inverse, config.head_dim, 0)
        _multiply(draft, layer, "k_proj", factors, config.head_dim, 0)


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
    rope = config.rope
    if rope is not None:
        frequencies, factor = inverse_frequencies(rope, P)
        rope = RopeConfig(
            type="explicit",
            frequencies=tuple(frequencies.double().tolist()) * G,
            attention_factor=None if factor == 1.0 else factor,
        )
    draft.clear(layer)
    draft.put(layer, **made)
    draft.set_attention(
        layer,
        LatentAttentionConfig(
            num_heads=H,
            kv_lora_rank=R,
            qk_nope_head_dim=N,
            qk_rope_head_dim=2 * G * half,
            v_head_dim=V,
            bias=config.has_k_bias or config.qkv_bias or config.out_bias,
            q_bias=config.qkv_bias,
            norm=None,
            rope=rope,
            scale=D**-0.5 if config.scale is None else config.scale,
            dropout=config.dropout,
        ),
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


def _reorder_columns(draft: Draft, layer: int, order: Sequence[int], size: int) -> None:
    weight = draft.get(layer, "o_proj.weight")
    draft.put(layer, o_proj=weight.view(len(weight), -1, size)[:, list(order)].flatten(1))


def _reorder_norm(
    draft: Draft, layer: int, name: str, config: AttentionConfig, order: Sequence[int]
) -> None:
    if config.qk_norm is None or not config.qk_norm.per_head:
        return
    for key in [k for k in draft.state if k.startswith(f"layers.{layer}.attention.{name}.")]:
        draft.state[key] = draft.state[key][list(order)]


def _multiply(draft: Draft, layer: int, name: str, factors: Tensor, size: int, first: int) -> None:
    """Pairs of every head of ``size`` rows by ``factors [heads, pairs]``, from row ``first`` on."""
    heads, half = factors.shape
    for leaf in ("weight", "bias"):
        found = draft.find(layer, f"{name}.{leaf}")
        if found is None:
            continue
        rows = found.view(heads, size, -1).clone()
        pairs = torch.complex(
            rows[:, first : first + half], rows[:, first + half : first + 2 * half]
        )
        pairs = pairs * factors[..., None]
        rows[:, first : first + half] = pairs.real
        rows[:, first + half : first + 2 * half] = pairs.imag
        draft.state[f"layers.{layer}.attention.{name}.{leaf}"] = rows.reshape(found.shape)


def _fold(
    draft: Draft, layer: int, norm: NormConfig, name: str, readers: Sequence[str]
) -> list[str]:
    key = f"layers.{layer}.{name}.weight"
    weight = draft.state.get(key)
    bias = draft.state.get(f"layers.{layer}.{name}.bias")
    if weight is None or (bias is not None and bool((weight == 0).any())):
        return []
    factor = weight + norm.weight_offset
    for reader in readers:
        read = f"layers.{layer}.{reader}.weight"
        draft.state[read] = draft.state[read] * factor
    draft.state[key] = torch.ones_like(weight) - norm.weight_offset
    if bias is not None:  # W (w n + b) = (W diag w) (n + b / w)
        draft.state[f"layers.{layer}.{name}.bias"] = bias / factor
    return [f"layers.{layer}.{name}"]
