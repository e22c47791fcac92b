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
from typing import Any

from polyhead.config.layout import NORMED_HALF
from polyhead.planning.architecture import Architecture, FeedForwardShape, LayerShape


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
    given: Any = {"tokens": tokens, "batch": batch, "ranks": ranks, "half": half}
    attention = shape.attention.alive_elements(E, **given)
    if shape.cross_attention is not None:
        # One more residual is alive behind the self-attention.
        crossing = replace(shape.cross_attention, rope=None)
        attention = max(attention, E + crossing.alive_elements(E, **given))
    # What came in, what goes on, the attention's output, and the norm of the sum.
    normed = 3 * E + (NORMED_HALF if half else 1) * E
    return max(2 * E + attention, normed, 3 * E + _network(shape.feed_forward, E, ranks))


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
