"""Activations of a prefill in one piece: the most elements per token that are alive at a time.

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
native code up to half less (it norms and rotates in place, and has room for the hidden features of
768 tokens), without it up to a fifth less. A kernel's own workspace, some MiB whatever T is, is not
counted, nor are the few numbers per token of a norm or of a mixture's choice, and logits are those
of the last token. Tested against torch's memory profiler, with native code and without.
"""

from __future__ import annotations

from dataclasses import replace

from polyhead.config import LayerConfig, TransformerConfig
from polyhead.config.layout import NORMED_HALF, Prefill
from polyhead.planning.weights import encoder_dim


def activation_elements(
    model: TransformerConfig, *, tokens: int, batch_size: int, ranks: int = 1, half: bool = True
) -> int:
    """Elements alive at a time on one rank, at most.

    Args:
        tokens: Tokens of each sequence's prompt; of an encoder-decoder, of both sides.
        ranks: Ranks of tensor parallelism.
        half: Whether numbers have 16 bits: without native code, norms then go through float32.
    """
    E, context = model.embed_dim, encoder_dim(model)
    stacks = [(E, shape) for shape in {*model.layers}]
    stacks += [(context, shape) for shape in {*model.encoder_layers}]
    call = Prefill(tokens, batch_size, ranks, half)
    layers = [_layer(shape, dim, call) for dim, shape in stacks]
    stream = context if model.encoder_layers else 0  # the encoder's output waits for the decoder
    # What layers hand on stays to the end.
    stream += sum(layer.attention.handed_elements for layer in model.layers) // ranks
    stream += E * (model.reads_embedded or model.funnel is not None)
    if model.per_layer_embedding is not None:
        # The vectors stay to the end; they are the sum of two of their size, one of them normed.
        own = len(model.layers) * model.per_layer_embedding.dim
        layers.append(max(2, NORMED_HALF if half else 1) * own + E)
        stream += own
    if model.streams is not None:
        layers.append(model.streams.peak_activation_elements(E))
    head = 0 if model.head is None else -(-model.vocab_size // ranks)
    return batch_size * max(tokens * (max(layers) + stream), tokens * 2 * model.hidden_dim + head)


def _layer(shape: LayerConfig, E: int, call: Prefill) -> int:
    half = call.half
    attention = shape.attention.peak_activation_elements(E, call)
    normed_input = E * (shape.laurel_rank is not None)
    attention += normed_input
    if shape.cross_attention is not None:
        # One more residual is alive behind the self-attention.
        crossing = replace(shape.cross_attention, rope=None)
        attention = max(attention, E + crossing.peak_activation_elements(E, call))
    # What came in, what goes on, the attention's output, and the norm of the sum.
    normed = 3 * E + (NORMED_HALF if half else 1) * E + normed_input
    peaks = [2 * E + attention]
    for network in shape.networks:
        peaks += [normed, 3 * E + network.peak_activation_elements(E, call.ranks)]
    if shape.per_layer_input is not None:
        P = shape.per_layer_input.dim
        peaks.append(2 * E + max(3 * P, P + E, (1 + (NORMED_HALF if half else 1)) * E))
    if shape.norm_gate is not None:
        peaks.append(2 * E + shape.norm_gate.peak_activation_elements(E, half=half))
    if shape.out_convolution is not None:  # its inputs behind the last ones, and in float32
        peaks.append((9 if half else 5) * E)
    # What a shortcut gave waits for the end of the next layer, a state for its network.
    waits = E * (shape.joins_shortcut + (shape.shortcut is not None))
    waits += sum(network.reads_dim for network in shape.networks)
    peaks = [peak + waits for peak in peaks]
    if (streams := shape.streams) is not None:
        return max(peaks) + streams.held_activation_elements(E)
    return max(peaks)
