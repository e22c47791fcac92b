"""Floating-point operations, exact in visible pairs.

A causal query at position p sees min(p + 1, w) keys, w its window. So T queries after S₀ cached
tokens, S in all, see

    T · S − Δ(T − 1) − (Δ(S − w) − Δ(S₀ − w)),      Δ(n) = n(n + 1)/2 for n > 0, else 0

pairs: half of T² for a prompt, not the whole square of which a mask discards half. *Model* FLOPs
count those pairs. *Hardware* FLOPs count what a tiled kernel multiplies: every tile of ``TILE``
queries × ``TILE`` keys that holds at least one visible pair, whole.

A multiply-add is 2 operations. Norms, softmax, activations and rotary embedding are not counted:
they grow with the width, not with its square.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polyhead.config import (
    AttentionConfig,
    HeadLayout,
    LayerConfig,
    ParameterGroup,
    TransformerConfig,
)
from polyhead.config.head import last_dim
from polyhead.planning.weights import encoder_dim

TILE = 128


@dataclass(frozen=True)
class Flops:
    """Operations of one pass over all sequences of a batch, all ranks together.

    Attributes:
        projections: Operations of attention, into and out of heads.
        scores: Queries with keys and weights with values, over the visible pairs.
        feed_forward: Networks, routers included; of a mixture, the experts that tokens visit; what
            layers add to the residual stream beside both, and mixes of several streams.
        head: Logits, of the last token of each sequence.
        hardware_scores: ``scores`` over all pairs of the tiles that hold a visible one.
    """

    projections: int
    scores: int
    feed_forward: int
    head: int
    hardware_scores: int

    @property
    def model(self) -> int:
        """Operations of the model's formula."""
        return self.projections + self.scores + self.feed_forward + self.head

    @property
    def hardware(self) -> int:
        """Operations of a kernel that computes whole tiles."""
        return self.model - self.scores + self.hardware_scores


def visible_pairs(
    queries: int,
    cached: int = 0,
    window: int | None = None,
    *,
    ahead: int | None = 0,
    chunk: int | None = None,
) -> int:
    """Pairs that ``queries`` queries after ``cached`` tokens see.

    Args:
        window: Keys behind a query that it sees, itself included; None: all.
        ahead: Keys ahead of it; 0: causal, None: all.
        chunk: Causal queries see their own run of so many positions alone.
    """
    keys = cached + queries
    if chunk is not None:
        (last, rest), (first, rest_before) = divmod(keys, chunk), divmod(cached, chunk)
        return (last - first) * _triangle(chunk) + _triangle(rest) - _triangle(rest_before)
    pairs = queries * keys
    if ahead is not None:  # the first query has T - 1 keys ahead of it, the last one none
        pairs -= _triangle(queries - 1 - ahead)
    if window is not None:  # a query at position p has p + 1 keys behind it
        pairs -= _triangle(keys - window) - _triangle(cached - window)
    return pairs


def _triangle(n: int) -> int:
    """1 + 2 + … + n, and 0 below 1."""
    return n * (n + 1) // 2 if n > 0 else 0


def tiled_pairs(
    queries: int,
    cached: int = 0,
    window: int | None = None,
    tile: int = TILE,
    *,
    ahead: int | None = 0,
    chunk: int | None = None,
) -> int:
    """Pairs of the tiles that hold a visible pair, tiles cut at the ends; see ``visible_pairs``."""
    keys, total = cached + queries, 0
    for start in range(0, queries, tile):
        stop = min(start + tile, queries)
        low = 0 if window is None else max(0, cached + start - window + 1)
        if chunk is not None:
            low = (cached + start) // chunk * chunk
        high = keys if ahead is None else min(cached + stop + ahead, keys)
        low, high = low // tile * tile, min(-(-high // tile) * tile, keys)
        total += (stop - start) * (high - low)
    return total


def flops(
    model: TransformerConfig, *, queries: int, cached: int, batch_size: int, context: int = 0
) -> Flops:
    """Operations of a pass over ``queries`` new tokens after ``cached`` ones.

    A funnel's layer whose queries are of pairs counts as if all its keys had queries.

    Args:
        cached: Tokens of each sequence that the cache holds.
        context: Tokens of the encoder's output, in an encoder-decoder. The encoder itself is
            part of the pass where nothing is cached.
    """
    E, C, causal = model.embed_dim, encoder_dim(model), model.kind != "encoder"
    sums: Counter[str] = Counter()
    strides = (1,) * len(model.layers) if model.funnel is None else model.funnel.strides
    for (shape, stride), times in Counter(zip(model.layers, strides, strict=True)).items():
        tokens = -(-queries // stride)
        _add_layer(sums, shape, E, times, tokens, cached, batch_size, causal=causal)
        if shape.crossing is not None:
            own = 0 if shape.cross_attention is None else E
            _add_cross(sums, shape.crossing, own, C, times, queries, cached, batch_size, context)
    if model.encoder_layers and not cached:
        for shape, times in Counter(model.encoder_layers).items():
            _add_layer(sums, shape, C, times, context, 0, batch_size, causal=False)
    head = 0 if model.head is None else 2 * batch_size * _logits(model)
    return Flops(
        projections=sums["projections"],
        scores=sums["scores"],
        feed_forward=sums["feed_forward"],
        head=head,
        hardware_scores=sums["hardware"],
    )


def attention_flops(shape: HeadLayout, queries: int, cached: int, batch_size: int) -> int:
    """Operations of the scores and weighted values of one causal layer, over visible pairs."""
    return _scores(shape, queries, cached, batch_size, causal=True)[0]


def _add_layer(
    sums: Counter[str],
    shape: LayerConfig,
    E: int,
    times: int,
    queries: int,
    cached: int,
    batch_size: int,
    *,
    causal: bool,
) -> None:
    model, hardware, extra = _scores(shape.attention, queries, cached, batch_size, causal=causal)
    per_token = _multiplied(shape.attention.parameter_groups(E))
    sums["projections"] += times * (2 * batch_size * queries * per_token + extra)
    sums["scores"] += times * model
    sums["hardware"] += times * hardware
    hidden = _multiplied(shape.residual_parameter_groups(E))
    for network in shape.networks:
        hidden += _multiplied(network.parameter_groups(E))
    sums["feed_forward"] += times * 2 * batch_size * queries * hidden


def _add_cross(
    sums: Counter[str],
    shape: AttentionConfig,
    E: int,
    C: int,
    times: int,
    queries: int,
    cached: int,
    batch_size: int,
    context: int,
) -> None:
    H, G, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
    V = shape.value_dim
    remembered = 0 if cached else context * G * (D + V) * C
    projected = queries * H * (D + V) * E + remembered
    pairs = 2 * batch_size * queries * context * H * (D + V)
    sums["projections"] += times * 2 * batch_size * projected
    sums["scores"] += times * pairs
    sums["hardware"] += times * pairs


def _scores(
    shape: HeadLayout, queries: int, cached: int, batch_size: int, *, causal: bool
) -> tuple[int, int, int]:
    """Operations over visible pairs, over pairs of tiles, and for keys made of the past."""
    cost, span = shape.call_cost(batch_size, queries, cached), shape.attention_span
    seen: Any = {"ahead": 0 if causal else span.ahead, "chunk": span.chunk}
    each, choice = 2 * batch_size * cost.per_pair, 2 * batch_size * cost.per_choice
    states = 2 * batch_size * queries * cost.per_token
    pairs = visible_pairs(queries, cached, span.window, **seen)
    tiles = tiled_pairs(queries, cached, span.window, **seen)
    # The first m keys and the last m are as many, so what is chosen is counted as a window.
    chosen = pairs if span.chosen is None else visible_pairs(queries, cached, span.chosen, **seen)
    hardware = tiles if span.chosen is None else chosen
    model = each * chosen + choice * pairs + states
    return model, each * hardware + choice * tiles + states, cost.remade


def _logits(model: TransformerConfig) -> int:
    """Multiply-adds of the logits of one token."""
    size, total = model.hidden_dim, 0
    for transform in model.head_transforms:
        before, size = size, last_dim(size, (transform,))
        total += before * size
    return total + size * model.vocab_size


def _multiplied(found: Iterator[ParameterGroup]) -> int:
    return sum(piece.active for piece in found if piece.multiplied)
