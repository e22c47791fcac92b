"""Every weight of a model as a piece of data: how many, of which part, how ranks share it.

A piece is ``units × size`` parameters. Tensor parallelism shares the units among the ranks (query
heads, kv heads, hidden features, rows of the vocabulary); one unit is on every rank. A kv head
is copied where there are more ranks than kv heads, and the latent projections of MLA always are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from polyhead.config import Piece
from polyhead.errors import ConfigError
from polyhead.models.counts import ParameterCounts
from polyhead.planning.architecture import (
    Architecture,
    AttentionShape,
    FeedForwardShape,
    LayerShape,
)


def pieces(model: Architecture) -> Counter[Piece]:
    """All pieces of a model, each with how often it occurs."""
    E, found = model.embed_dim, Counter[Piece]()
    # A tied embedding is the head too, and a step reads all of it.
    looked_up = model.head != "tied"
    table = Piece("embedding", model.vocab_size, E, multiplied=False, looked_up=looked_up)
    found[table] += 1
    for rows in (model.learned_positions, model.segments):
        if rows:
            found[Piece("embedding", 1, rows * E, multiplied=False)] += 1
    norm = Piece("norms", 1, E * (1 + model.norm_bias), multiplied=False)
    found[norm] += model.embedding_norms + model.final_norms
    for shape, times in Counter((*model.layers, *model.encoder_layers)).items():
        found[norm] += times * shape.norms
        for piece in _of_layer(E, shape):
            found[piece] += times
    if model.head == "untied":
        found[Piece("head", model.vocab_size, E, multiplied=False)] += 1
    if model.head_bias:
        found[Piece("head", model.vocab_size, 1, multiplied=False)] += 1
    if model.pooler:
        found[Piece("head", 1, E * E + E, multiplied=False)] += 1
    if model.extra_attention:
        found[Piece("attention", 1, model.extra_attention, multiplied=False)] += 1
    return Counter({piece: times for piece, times in found.items() if times and piece.count})


def counts(found: Counter[Piece]) -> ParameterCounts:
    """Parameters by part."""
    parts: Counter[str] = Counter()
    for piece, times in found.items():
        parts[piece.part] += times * piece.count
    names = ("embedding", "attention", "feed_forward", "norms", "head")
    return ParameterCounts(**{name: parts[name] for name in names})


def of_attention(shape: AttentionShape, embed_dim: int) -> list[Piece]:
    """The pieces of one attention, its own norms included."""
    return list(shape.pieces(embed_dim))


def of_feed_forward(shape: FeedForwardShape, embed_dim: int) -> list[Piece]:
    """The pieces of one feed-forward network or mixture."""
    return list(_feed_forward(shape, embed_dim))


def check_ranks(model: Architecture, ranks: int) -> None:
    """Raises ConfigError where ``ranks`` cannot share the heads or the hidden features evenly."""
    for shape in {*model.layers, *model.encoder_layers}:
        for attention in (shape.attention, shape.cross_attention):
            if attention is None:
                continue
            H = attention.output_heads
            if H % ranks:
                raise ConfigError(f"tensor_parallel must divide num_heads={H}: got {ranks}")
            G = attention.cache_shape.kv_heads
            if G % ranks and ranks % G:
                raise ConfigError(
                    f"tensor_parallel must divide num_kv_heads={G} or be a multiple of it: got "
                    f"{ranks}"
                )
        hidden = shape.feed_forward
        for name, width in (
            ("hidden_dim", hidden.hidden_dim),
            ("shared_hidden_dim", hidden.shared_hidden_dim),
        ):
            if width % ranks:
                raise ConfigError(
                    f"tensor_parallel must divide the feed-forward {name}={width}: got {ranks}"
                )


def _of_layer(E: int, shape: LayerShape) -> Iterator[Piece]:
    yield from of_attention(shape.attention, E)
    if shape.cross_attention is not None:
        yield from of_attention(shape.cross_attention, E)
    yield from _feed_forward(shape.feed_forward, E)


def _feed_forward(f: FeedForwardShape, E: int) -> Iterator[Piece]:
    n, k, into = f.experts, f.experts_per_token, 2 if f.gated else 1
    weight = Piece("feed_forward", f.hidden_dim, n * (into + 1) * E, experts=n, visited=k)
    yield weight
    if f.bias:
        yield replace(weight, size=n * into, multiplied=False)
        yield replace(weight, units=1, size=n * E, multiplied=False)
    if n > 1:
        yield Piece("feed_forward", 1, n * E)
        if f.router_bias:
            yield Piece("feed_forward", 1, n, multiplied=False)
    if f.shared_hidden_dim:
        yield Piece("feed_forward", f.shared_hidden_dim, (into + 1) * E)
        if f.shared_bias:
            yield Piece("feed_forward", f.shared_hidden_dim, into, multiplied=False)
            yield Piece("feed_forward", 1, E, multiplied=False)
        if f.shared_gate:
            yield Piece("feed_forward", 1, E)
