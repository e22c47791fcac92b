"""Floating-point operations, exact in visible pairs.

A causal query at position p sees min(p + 1, w) keys, w its window. So T queries after S₀ cached
tokens see

    Σ_{i=1..T} min(S₀ + i, w) = n · S₀ + n(n + 1)/2 + (T − n) · w,      n = clamp(w − S₀, 0, T)

pairs: half of T² for a prompt, and never the square that a mask then throws away. *Model* FLOPs
count those pairs. *Hardware* FLOPs count what a tiled kernel multiplies: every tile of ``TILE``
queries × ``TILE`` keys that holds at least one visible pair, whole.

A multiply-add is 2 operations. Norms, softmax, activations and rotary embedding are not counted:
they grow with the width, not with its square.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from polyhead.config import AttentionConfig, Piece
from polyhead.planning.architecture import Architecture, AttentionShape, LayerShape
from polyhead.planning.weights import of_attention, of_feed_forward

TILE = 128


@dataclass(frozen=True)
class Flops:
    """Operations of one pass over all sequences of a batch, all ranks together.

    Attributes:
        projections: Of attention, into and out of heads.
        scores: Queries with keys and weights with values, over the visible pairs.
        feed_forward: Networks, routers included; of a mixture, the experts that tokens visit.
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
        """What the model's formula needs."""
        return self.projections + self.scores + self.feed_forward + self.head

    @property
    def hardware(self) -> int:
        """What a kernel that works in whole tiles does."""
        return self.model - self.scores + self.hardware_scores


def visible_pairs(queries: int, cached: int = 0, window: int | None = None) -> int:
    """Pairs that ``queries`` causal queries after ``cached`` tokens see."""
    widest = cached + queries if window is None else window
    growing = min(max(widest - cached, 0), queries)
    return growing * cached + growing * (growing + 1) // 2 + (queries - growing) * widest


def tiled_pairs(queries: int, cached: int = 0, window: int | None = None, tile: int = TILE) -> int:
    """Pairs of the tiles that hold a visible pair of a causal mask, tiles cut at the ends."""
    keys, total = cached + queries, 0
    for start in range(0, queries, tile):
        stop = min(start + tile, queries)
        first = 0 if window is None else max(0, cached + start - window + 1)
        low, high = first // tile * tile, min(-(-(cached + stop) // tile) * tile, keys)
        total += (stop - start) * (high - low)
    return total


def flops(model: Architecture, *, queries: int, cached: int, batch: int, context: int = 0) -> Flops:
    """Operations of a pass over ``queries`` new tokens after ``cached`` ones.

    Args:
        model: The shapes.
        queries: New tokens of each sequence.
        cached: Tokens of each sequence that the cache holds.
        batch: Sequences.
        context: Of an encoder-decoder: tokens of the encoder's output. The encoder itself is part
            of the pass where nothing is cached.
    """
    E, causal = model.embed_dim, model.kind != "encoder"
    sums: Counter[str] = Counter()
    for shape, times in Counter(model.layers).items():
        _add_layer(sums, shape, E, times, queries, cached, batch, causal=causal)
        if shape.cross_attention is not None:
            _add_cross(sums, shape.cross_attention, E, times, queries, cached, batch, context)
    if model.encoder_layers and not cached:
        for shape, times in Counter(model.encoder_layers).items():
            _add_layer(sums, shape, E, times, context, 0, batch, causal=False)
    head = 0 if model.head is None else 2 * batch * E * model.vocab_size
    return Flops(
        projections=sums["projections"],
        scores=sums["scores"],
        feed_forward=sums["feed_forward"],
        head=head,
        hardware_scores=sums["hardware"],
    )


def attention_flops(shape: AttentionShape, queries: int, cached: int, batch: int) -> int:
    """Operations of the scores and weighted values of one causal layer, over visible pairs."""
    return _scores(shape, queries, cached, batch, causal=True)[0]


def _add_layer(
    sums: Counter[str],
    shape: LayerShape,
    E: int,
    times: int,
    queries: int,
    cached: int,
    batch: int,
    *,
    causal: bool,
) -> None:
    model, hardware, extra = _scores(shape.attention, queries, cached, batch, causal=causal)
    per_token = _multiplied(of_attention(shape.attention, E))
    sums["projections"] += times * (2 * batch * queries * per_token + extra)
    sums["scores"] += times * model
    sums["hardware"] += times * hardware
    hidden = _multiplied(of_feed_forward(shape.feed_forward, E))
    sums["feed_forward"] += times * 2 * batch * queries * hidden


def _add_cross(
    sums: Counter[str],
    shape: AttentionConfig,
    E: int,
    times: int,
    queries: int,
    cached: int,
    batch: int,
    context: int,
) -> None:
    H, G, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
    V = shape.value_dim
    remembered = 0 if cached else context * G * (D + V) * E
    projected = queries * H * (D + V) * E + remembered
    pairs = 2 * batch * queries * context * H * (D + V)
    sums["projections"] += times * 2 * batch * projected
    sums["scores"] += times * pairs
    sums["hardware"] += times * pairs


def _scores(
    shape: AttentionShape, queries: int, cached: int, batch: int, *, causal: bool
) -> tuple[int, int, int]:
    """Over visible pairs, over pairs of tiles, and what making keys of the past takes besides."""
    keys = cached + queries
    cost, window = shape.call_cost(batch, queries, cached), shape.visible_window
    if causal:
        seen = visible_pairs(queries, cached, window), tiled_pairs(queries, cached, window)
    else:
        seen = (queries * keys,) * 2
    each = 2 * batch * cost.per_pair
    return each * seen[0], each * seen[1], cost.remade


def _multiplied(found: list[Piece]) -> int:
    return sum(piece.active for piece in found if piece.multiplied)
