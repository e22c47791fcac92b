"""Activations of a prefill in one piece: the most that is alive at a time, token by token.

Without gradients a layer's tensors live from where they are made to the end of the part that made
them, so the peak is one layer's: the residual stream twice (what came in, what goes on), its norm,
and the widest moment of attention or of the feed-forward network,

    gated      2F + E     the activated gate, the values, and the output
    heads      q, k, v with what norms and rotates them, or with the heads' outputs in both orders
    latent     q and k of all heads, what both were made of, and the heads' outputs, or what
               the absorbed computation has in their place

in elements per token. Compiled code (``polyhead.native``) norms and rotates without copies between;
torch hands the heads' outputs on in the order that the next product reads. A plan is for either, so
each part counts the way that holds more, and a layer allocates at most that much on both: with
native code up to a third less where norms and rotations are the peak, without it up to a fifth
less elsewhere. A kernel's own workspace, some MiB whatever T is, is not counted, nor are the few
numbers per token of a norm or of a mixture's choice, and logits are those of the last token. Tested
against torch's memory profiler, with native code and without.
"""

from __future__ import annotations

from dataclasses import replace

from polyhead.config import AttentionConfig, LatentAttentionConfig
from polyhead.layers.latent_cost import Computation, choose
from polyhead.planning.architecture import Architecture, FeedForwardShape, LayerShape

_NORMED_HALF = 5
"""Times the size of what torch norms: in float32, normed in float32, and rounded."""

_ROTATED = 2
"""Times the size of what torch rotates: x · cos, and x with its halves swapped."""


def activation_elements(
    model: Architecture, *, tokens: int, batch: int, ranks: int = 1, half: bool = True
) -> int:
    """Elements alive at a time on one rank, at most.

    Args:
        model: The shapes.
        tokens: Of each sequence's prompt; of an encoder-decoder, of both sides.
        batch: Sequences.
        ranks: That share heads and hidden features.
        half: Of 16 bits: without native code, norms then go through float32.
    """
    E = model.embed_dim
    layers = [
        _layer(shape, E, tokens, batch, ranks, half)
        for shape in {*model.layers, *model.encoder_layers}
    ]
    stream = E if model.encoder_layers else 0  # the encoder's output waits for the decoder
    head = 0 if model.head is None else -(-model.vocab_size // ranks)
    return batch * max(tokens * (max(layers) + stream), tokens * 2 * E + head)


def _layer(shape: LayerShape, E: int, tokens: int, batch: int, ranks: int, half: bool) -> int:
    attention = _attention(shape, E, tokens, batch, ranks, half)
    if shape.cross_attention is not None:
        # One more residual is alive behind the self-attention.
        crossing = replace(shape.cross_attention, rope=None)
        attention = max(attention, E + _heads(crossing, E, ranks, half))
    # What came in, what goes on, the attention's output, and the norm of the sum.
    normed = 3 * E + (_NORMED_HALF if half else 1) * E
    return max(2 * E + attention, normed, 3 * E + _network(shape.feed_forward, E, ranks))


def _attention(shape: LayerShape, E: int, tokens: int, batch: int, ranks: int, half: bool) -> int:
    if isinstance(shape.attention, LatentAttentionConfig):
        way = choose(shape.attention, batch, tokens, tokens)
        return _latent(shape.attention, way, E, ranks)
    return _heads(shape.attention, E, ranks, half)


def _heads(c: AttentionConfig, E: int, ranks: int, half: bool) -> int:
    H, G = -(-c.num_heads // ranks), -(-c.num_kv_heads // ranks)
    Q, K = H * c.head_dim, G * c.head_dim
    V = c.head_dim if c.v_head_dim is None else c.v_head_dim
    made = Q + K + G * V
    copies = _copies(c, half)
    return made + max(copies * Q, Q + copies * K if copies else 0, 2 * H * V + E)


def _copies(c: AttentionConfig, half: bool) -> int:
    """Times the size of projected q or k that norming and rotating it holds beside it."""
    rotated = 0 if c.rope is None else _ROTATED
    if c.qk_norm is None:
        return rotated
    normed = _NORMED_HALF if half else 1
    if c.rope is None:
        return normed
    first, second = (rotated, normed) if c.qk_norm.place == "after_rope" else (normed, rotated)
    return max(first, 1 + second)


def _latent(c: LatentAttentionConfig, way: Computation, E: int, ranks: int) -> int:
    H = -(-c.num_heads // ranks)
    projected = H * (c.qk_head_dim + c.qk_rope_head_dim) + c.latent_dim
    N, R, V = c.qk_nope_head_dim, c.kv_lora_rank, c.v_head_dim
    out = 2 * H * V + E
    if way == "absorbed":
        # Both products with parts of Wkv_b take their left side in another order: a copy of it.
        q = H * c.latent_dim
        return projected + max(H * R + max(H * N, q), q + max(2 * H * R + H * V, out))
    made = H * (N + V)
    return projected + made + 2 * H * c.qk_head_dim + out


def _network(f: FeedForwardShape, E: int, ranks: int) -> int:
    plain = _of_width(f.hidden_dim, f.gated, E, ranks)
    if f.experts == 1:
        return plain
    # At worst every token visits the same expert. Beside one at work lie its input, the sum so far
    # and the last expert's output; the next sum takes that output twice more, once in float32.
    shared = 2 * E + _of_width(f.shared_hidden_dim, f.gated, E, ranks)
    return max(3 * E + plain, 5 * E, shared)


def _of_width(hidden_dim: int, gated: bool, E: int, ranks: int) -> int:
    F = -(-hidden_dim // ranks)
    return 2 * F + E if gated else max(2 * F, F + E)
