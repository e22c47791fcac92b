"""Every weight of a model as a piece of data: how many, of which part, how ranks share it.

A piece is ``units × size`` parameters. Tensor parallelism shares the units among the ranks (query
heads, kv heads, hidden features, rows of the vocabulary); one unit is on every rank. A kv head
is copied where there are more ranks than kv heads, and the latent projections of MLA always are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from polyhead.config import AttentionConfig, LatentAttentionConfig
from polyhead.errors import ConfigError
from polyhead.models.counts import ParameterCounts
from polyhead.planning.architecture import (
    Architecture,
    AttentionShape,
    FeedForwardShape,
    LayerShape,
)

Part = Literal["embedding", "attention", "feed_forward", "norms", "head"]


@dataclass(frozen=True)
class Piece:
    """Some parameters.

    Attributes:
        part: As in ``ParameterCounts``.
        units: What ranks share among them.
        size: Parameters of a unit.
        multiplied: Whether each parameter takes part in one multiply-add per token.
        experts: How many experts these are of (1: none), and
        visited: how many of them a token visits.
        looked_up: Whether a token reads one row of it alone.
    """

    part: Part
    units: int
    size: int
    multiplied: bool = True
    experts: int = 1
    visited: int = 1
    looked_up: bool = False

    @property
    def count(self) -> int:
        return self.units * self.size

    @property
    def active(self) -> int:
        """Parameters that one token meets."""
        return self.count * self.visited // self.experts

    def on_rank(self, ranks: int) -> int:
        """Parameters on the fullest of the ranks."""
        return -(-self.units // ranks) * self.size

    def touched(self, ranks: int, batch: int) -> float:
        """Parameters that a decode step of ``batch`` tokens reads on a rank.

        A mixture's tokens are taken to choose experts evenly and independently: n experts of which
        each token visits k are met by b tokens in n · (1 − (1 − k/n)^b) on average.
        """
        if self.looked_up:
            return batch * self.on_rank(ranks) / self.units
        unseen = (1 - self.visited / self.experts) ** batch
        return self.on_rank(ranks) * (1 - unseen)


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
    if isinstance(shape, LatentAttentionConfig):
        return list(_latent(shape, embed_dim))
    return list(_heads(shape, embed_dim))


def of_feed_forward(shape: FeedForwardShape, embed_dim: int) -> list[Piece]:
    """The pieces of one feed-forward network or mixture."""
    return list(_feed_forward(shape, embed_dim))


def check_ranks(model: Architecture, ranks: int) -> None:
    """Raises ConfigError where ``ranks`` cannot share the heads or the hidden features evenly."""
    for shape in {*model.layers, *model.encoder_layers}:
        for attention in (shape.attention, shape.cross_attention):
            if attention is None:
                continue
            H = attention.num_heads
            if H % ranks:
                raise ConfigError(f"tensor_parallel must divide num_heads={H}: got {ranks}")
            G = attention.num_kv_heads if isinstance(attention, AttentionConfig) else 1
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


def _heads(c: AttentionConfig, E: int) -> Iterator[Piece]:
    H, G, D = c.num_heads, c.num_kv_heads, c.head_dim
    V = D if c.v_head_dim is None else c.v_head_dim
    for units, size in ((H, D), (G, D), (G, V)):
        yield Piece("attention", units, size * E)
        if c.qkv_bias:
            yield Piece("attention", units, size, multiplied=False)
    yield Piece("attention", H, V * E)
    if c.out_bias:
        yield Piece("attention", 1, E, multiplied=False)
    if c.sinks:
        yield Piece("attention", H, 1, multiplied=False)
    if c.qk_norm is not None:
        weights = 1 + c.qk_norm.norm.bias
        full = c.qk_norm.place == "full_width"
        for units in (H, G):
            yield Piece("norms", units if full else 1, D * weights, multiplied=False)


def _latent(c: LatentAttentionConfig, E: int) -> Iterator[Piece]:
    H, R, V = c.num_heads, c.kv_lora_rank, c.v_head_dim
    if c.q_lora_rank is None:
        yield Piece("attention", H, c.qk_head_dim * E)
    else:
        yield Piece("attention", 1, c.q_lora_rank * E)
        yield Piece("norms", 1, c.q_lora_rank, multiplied=False)
        yield Piece("attention", H, c.qk_head_dim * c.q_lora_rank)
    yield Piece("attention", 1, c.latent_dim * E)
    yield Piece("norms", 1, R, multiplied=False)
    yield Piece("attention", H, (c.qk_nope_head_dim + V) * R)
    yield Piece("attention", H, V * E)
    if c.bias:
        yield Piece("attention", 1, (c.q_lora_rank or 0) + c.latent_dim + E, multiplied=False)


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
