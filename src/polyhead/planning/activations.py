"""Activations of a prefill in one piece: the most that is alive at a time, token by token.

Without gradients a layer's tensors live from where they are made to the end of the part that made
them, so the peak is one layer's: the residual stream twice (what came in, what goes on), its norm,
and the widest moment of attention or of the feed-forward network,

    gated      3F + E     gate and value, the activated gate, and the output
    heads      q, k, v with what rotates them, or with the heads' outputs in both orders
    latent     q and k of all heads, what both were made of, and the heads' outputs, or what
               the absorbed computation has in their place

in elements per token. A kernel's own workspace, some MiB whatever T is, is not counted, and logits
are those of the last token. Tested against torch's memory profiler.
"""

from __future__ import annotations

from dataclasses import replace

from polyhead.layers.config import AttentionConfig
from polyhead.layers.latent_config import LatentAttentionConfig
from polyhead.layers.latent_cost import Computation, choose
from polyhead.planning.architecture import Architecture, FeedForwardShape, LayerShape

_NORMED_HALF = 5
"""Times the size of what is normed: in float32, normed in float32, and rounded."""


def activation_elements(
    model: Architecture, *, tokens: int, batch: int, ranks: int = 1, half: bool = True
) -> int:
    """Elements alive at a time on one rank, at most.

    Args:
        model: The shapes.
        tokens: Of each sequence's prompt; of an encoder-decoder, of both sides.
        batch: Sequences.
        ranks: That share heads and hidden features.
        half: Of 16 bits: q, k and v are then one product and rotated together, and norms go
            through float32, which both take more.
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
    out = 2 * H * V + E
    if c.rope is None:
        return made + out
    # x · cos and x with its halves swapped, beside a normed copy where there is one.
    copies = 2
    if c.qk_norm is not None:
        copies = _NORMED_HALF if half else 3
    elif half:
        return made + max(copies * (Q + K), Q + K + out)
    placed = max(made + copies * Q, made + Q + copies * K)
    return max(placed, made + out)


def _latent(c: LatentAttentionConfig, way: Computation, E: int, ranks: int) -> int:
    H = -(-c.num_heads // ranks)
    projected = H * (c.qk_head_dim + c.qk_rope_head_dim) + c.latent_dim
    out = 2 * H * c.v_head_dim + E
    if way == "absorbed":
        return projected + H * (c.latent_dim + c.kv_lora_rank) + out
    made = H * (c.qk_nope_head_dim + c.v_head_dim)
    return projected + made + 2 * H * c.qk_head_dim + out


def _network(f: FeedForwardShape, E: int, ranks: int) -> int:
    plain = _of_width(f.hidden_dim, f.gated, E, ranks)
    if f.experts == 1:
        return plain
    # The sum so far and the next, and one expert at work, at worst on every token.
    routed = 2 * E + plain + 2 * E
    return max(routed, 2 * E + _of_width(f.shared_hidden_dim, f.gated, E, ranks))


def _of_width(hidden_dim: int, gated: bool, E: int, ranks: int) -> int:
    F = -(-hidden_dim // ranks)
    return 3 * F + E if gated else max(2 * F, F + E)
