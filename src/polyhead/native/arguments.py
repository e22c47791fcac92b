"""Arguments of native code: tensors with their meaning.

The tuples here are those of csrc/module/interface.h; ``interface.py`` compares them when the
module loads.

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D key size, V value size.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NewType

import torch
from torch import Tensor

from polyhead.native.coding import Coding
from polyhead.native.dropout import Dropout

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_GEMV_ROWS = 8
"""Rows of x that are multiplied as GEMV; more are GEMM. Tokens of a batch row that a step takes."""
MAX_STEP_ROWS = 64
"""Tokens of all batch rows that a step takes."""
INT8_ACTIVATIONS = 256
"""Added to the number of a type of blocks: x is rounded to 8 bits."""
MAX_INT8_INPUTS = 1 << 15
"""Most inputs of such a weight."""
MAX_WEIGHTS = 4
"""Most weights of one ``Code.product``."""
MAX_SEGMENTS = 16
"""Most segments of keys and values of one attention."""
ACTIVATIONS = {
    "relu": 0, "silu": 1, "gelu_tanh": 2, "relu2": 3, "gelu": 4, "quick_gelu": 5, "xielu": 6,
}  # fmt: skip
SCORINGS = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
"""What makes scores of a router's numbers: ``MixtureConfig.scoring``."""
DIFFERENTIATED = ("relu", "silu", "gelu_tanh")
"""The activations that ``Code.gated`` and its gradients know."""


class Scales(NamedTuple):
    """Scales of blocks that have none: number k of row n has those at [n / rows, k / numbers].

    Attributes:
        scales: ``[groups of rows, groups of numbers]``, dense.
        zeros: The codes that stand for 0, bytes of the same shape; None: the middle one.
        numbers: Of a row that share a scale, a multiple of 32; the last group may be smaller.
        rows: That share scales; the last group may be smaller.
    """

    scales: Tensor
    zeros: Tensor | None
    numbers: int
    rows: int


class Weight(NamedTuple):
    """A weight ``[out, in]`` and its bias ``[out]`` or None, dense.

    Attributes:
        weight: In the dtype of what it multiplies; or blocks as a file has them, bytes
            ``[out, bytes of a row]``.
        type: Number of the blocks' type, plus ``INT8_ACTIVATIONS`` where x is rounded to 8 bits; 0:
            there are no blocks.
        scales: Of blocks that have none of their own.
    """

    weight: Tensor
    bias: Tensor | None
    type: int = 0
    scales: Scales | None = None


class KVSegment(NamedTuple):
    """Keys ``[B, G, n, D]`` and values ``[B, G, n, V]``, last dimensions dense, other strides any.

    Attributes:
        k: Keys; in pages ``[pages, G, P, D]``.
        v: Values; in pages ``[pages, G, P, V]``.
        first: Position of the first; they count on from there unless ``positions`` is given.
        positions: ``[n]`` or ``[B, n]`` int64, dense, or None.
        pages: Where the tokens lie in pages: ``[B, m]`` int64, which page holds which P of them.
        skipped: Tokens of the first page that come before these.
        paged: How many tokens lie in pages.
        coding: What k and v stand for where they are codes of units of tokens; ``pages``,
            ``skipped`` and ``paged`` then count units.
    """

    k: Tensor
    v: Tensor
    first: int = 0
    positions: Tensor | None = None
    pages: Tensor | None = None
    skipped: int = 0
    paged: int = 0
    coding: Coding | None = None

    @property
    def unit(self) -> int:
        """Tokens in what k and v count: one, or a unit of codes."""
        return 1 if self.coding is None else self.coding.group

    @property
    def value_dim(self) -> int:
        return self.v.shape[-1] if self.coding is None else self.coding.value_dim

    @property
    def length(self) -> int:
        return (self.k.shape[2] if self.pages is None else self.paged) * self.unit


class ScoreMods(NamedTuple):
    """Features beside plain softmax(Q Kᵀ · scale) V.

    Attributes:
        softcap: c of c · tanh(score / c); 0 is none.
        bounds: ``[1 or B, T]`` int64 low and high: a query sees positions low ≤ p < high.
        keep: ``[1 or B, 1 or H, T, S]`` bool, keys dense, columns in the order of the segments.
        q_positions: ``[1 or B, T]`` int64 of the queries, beside ``slopes`` and ``by_distance``.
        slopes: ``[H]`` float32 of ALiBi, dense, or None.
        by_distance: ``[H, 2 n + 1]`` float32, dense: what is added for keys n and more places
            behind the query, …, n and more ahead of it; or None.
        bias: ``[1 or B, 1 or H, 1 or T, 1 or S]`` float32, any strides, or None.
        dropout: Dropout of the weights, or None.
        batch_invariant: A row's bits do not depend on the batch, on chunks of the prompt or on the
            number of threads: they are those of the row as the only query.
        rounded: Not 0: slopes add bfloat16(slope · key position) times this (``RoundedALiBi``).
        chosen: ``[1 or B, 1 or n, 1 or lists, m]`` int64 blocks of keys, the last dimension dense:
            all that queries see, for each n-th of the heads. Each block once, in ascending order;
            behind the last key there is none. Without ``keep``, ``bias`` and dropout.
        chosen_size: Keys of such a block.
        chosen_queries: Queries that share a list, one after another, and how many of the first list
            come before those of the call.
    """

    softcap: float = 0.0
    bounds: tuple[Tensor, Tensor] | None = None
    keep: Tensor | None = None
    q_positions: Tensor | None = None
    slopes: Tensor | None = None
    by_distance: Tensor | None = None
    bias: Tensor | None = None
    dropout: Dropout | None = None
    batch_invariant: bool = False
    rounded: float = 0.0
    chosen: Tensor | None = None
    chosen_size: int = 1
    chosen_queries: tuple[int, int] = (1, 0)

    @property
    def learned(self) -> Tensor | None:
        """The bias, of whatever kind, that a gradient may be requested of."""
        kinds = self.slopes, self.by_distance, self.bias
        return next((kind for kind in kinds if kind is not None), None)


NO_SCORE_MODS = ScoreMods()


class NormWeight(NamedTuple):
    """The weight ``[features]`` of an RMS norm, or of a LayerNorm (``centred``) with its bias.

    Without a weight nothing is multiplied. With ``[heads, features]`` rows take them in turn.
    """

    weight: Tensor | None
    eps: float
    offset: float
    bias: Tensor | None = None
    centred: bool = False


class Latent(NamedTuple):
    """What absorbed latent attention has besides other attention.

    Attributes:
        rank: R, features of the latent.
        plain: N, features of a head's query that are not rotated.
        rotated: P, those that are.
        value: V, features of a head's value.
        q: From the latent of queries ``[H(N + P), q_lora_rank]``; None: straight from x.
        q_norm: The norm of that latent, or None.
        norm: Norm of the latent of keys and values, or None.
        up: ``[H(N + V), R]``, what keys and values would be made with.
    """

    rank: int
    plain: int
    rotated: int
    value: int
    q: Weight | None
    q_norm: NormWeight | None
    norm: NormWeight | None
    up: Tensor


class Network(NamedTuple):
    """``down(activation(gate(x)) · up(x))``, or ``down(activation(up(x)))`` without a gate.

    Attributes:
        gate: ``[F, E]`` and ``[F]``, or None.
        up: ``[F, E]`` and ``[F]``.
        down: ``[E, F]`` and ``[E]``.
        activation: One of ``ACTIVATIONS``.
        clamp: What is activated is at most this, and what a gate multiplies within ± it; infinity
            is no limit.
        offset: Added to what a gate multiplies.
        alphas: Of xielu its two learned numbers ``[1]``, in the dtype of the weights.
    """

    gate: Weight | None
    up: Weight
    down: Weight
    activation: int
    clamp: float = math.inf
    offset: float = 0.0
    alphas: tuple[Tensor, Tensor] | None = None


class Routing(NamedTuple):
    """How tokens choose experts: the fields of ``MixtureConfig``, with the weights they need.

    Attributes:
        router: ``[X, E]`` and ``[X]`` or None.
        choice_bias: ``[X]`` in float32 or the dtype of x, or None.
        shared_gate: ``[1, E]``, or None.
        visited: Experts K of each token.
        scoring: One of ``SCORINGS``.
        normalise: Weights sum to 1.
        scale: Factor of the weights.
        groups: Groups of experts.
        groups_per_token: Those that a token chooses from.
        best_two: A group is as good as its best two experts together, else as its best.
        jitter: Jitter of sparsemixer.
    """

    router: Weight
    choice_bias: Tensor | None
    shared_gate: Weight | None
    visited: int
    scoring: int
    normalise: bool
    scale: float
    groups: int
    groups_per_token: int
    best_two: bool
    jitter: float


class Experts(NamedTuple):
    """A mixture of experts, all of one size.

    Attributes:
        routing: How tokens choose.
        networks: The network of every expert.
        watched: What must be unchanged for each expert's network to hold, as ``Code.guard`` takes
            it: looked at where the expert is visited.
        shared: The network that every token visits, or None.
        weighs_input: Weights multiply what experts read, not what they give.
    """

    routing: Routing
    networks: tuple[Network, ...]
    watched: tuple[tuple[Any, ...], ...]
    shared: Network | None
    weighs_input: bool


class LayerWeights(NamedTuple):
    """What a layer computes with, in one dtype; None where it has no such part.

    Of latent attention ``q`` makes queries or their latent, ``k`` the latent and the rotated key.
    Without ``network`` and ``experts`` a step ends before them. ``slopes`` ``[H]`` are ALiBi's, in
    float32; ``sinks`` ``[H]`` in float32 or the dtype; ``temperatures`` ``[periods]`` in float32
    multiply queries, by period of their positions.
    """

    attention_norm: NormWeight | None
    q: Weight
    k: Weight
    v: Weight | None
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    latent: Latent | None
    out: Weight
    attention_out_norm: NormWeight | None
    feed_forward_norm: NormWeight | None
    network: Network | None
    experts: Experts | None
    feed_forward_out_norm: NormWeight | None
    slopes: Tensor | None
    cross: Cross | None
    sinks: Tensor | None
    temperatures: Tensor | None


NORM_PLACES = {"before_rope": 0, "after_rope": 1, "full_width": 2}
"""Where norms of queries and keys stand."""
PARALLEL = {None: 0, "one norm": 1, "two norms": 2}
"""Whether the feed-forward network reads what the attention reads."""


class Heads(NamedTuple):
    """The attention of one token: H heads over G kv heads of D and V features, as a cache has them.

    Attributes:
        rotary: Features of a head that are rotated, from the first; of latent attention P.
        norm_place: One of ``NORM_PLACES``.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float
    rotary: int
    norm_place: int


class Cross(NamedTuple):
    """Attention to a context whose keys and values are cached: its weights and norms."""

    heads: Heads
    norm: NormWeight | None
    q: Weight
    q_norm: NormWeight | None
    out: Weight
    out_norm: NormWeight | None


class LayerForm(NamedTuple):
    """How the parts of a layer are put together.

    Attributes:
        dtype: One of ``DTYPES``, of all weights.
        parallel: One of ``PARALLEL``.
        post: The norms stand behind the sums.
        residual_scale: Factor of what joins the residual path.
        window: Keys that a query sees, itself included; None: all before it.
        clip: Queries, keys and values lie within ± this.
        chunk: Positions are cut into runs of so many, of which a query sees its own; None: no runs.
        rounded: As in ``ScoreMods``, of the layer's slopes.
        every: Positions in a period of ``temperatures``.
        offset: Added to positions before they are counted in periods.
        block_size: Keys of a block, where queries choose blocks (``Code.choose_blocks``).
        top_k: Blocks that they choose, while there are more; 0: they see all keys.
    """

    dtype: int
    embed_dim: int
    heads: Heads
    parallel: int
    post: bool
    residual_scale: float
    window: int | None = None
    clip: float = math.inf
    chunk: int | None = None
    rounded: float = 0.0
    every: int = 1
    offset: int = 0
    block_size: int = 1
    top_k: int = 0


class CacheSegment(NamedTuple):
    """Slots ``first`` to ``first + length`` of a cache; a slot is a token, or a unit of codes.

    Attributes:
        k: ``[B, G, n, D]``, the last dimension dense; in pages ``[pages, G, P, D]``.
        v: ``[B, G, n, V]``; None: the first columns of k.
        pages: ``[B, m]`` int64, as in ``KVSegment``; ``first`` then counts from the first of them.
        coding: As in ``KVSegment``.
        positions: ``[B, n]`` int64 of all tokens, where rows differ in what they hold; later than
            any query where a row has no token. The last segment is then a ring of exact tokens.
        firsts: The first token that each row holds in the only segment, a ring of exact tokens:
            rows are read one by one in the order of position, with the bits that each has alone.
    """

    k: Tensor
    v: Tensor | None
    first: int
    length: int
    pages: Tensor | None = None
    coding: Coding | None = None
    positions: Tensor | None = None
    firsts: list[int] | None = None


Guard = NewType("Guard", object)
"""What ``Code.guard`` returns, owned by the compiled module."""
Layer = NewType("Layer", object)
"""What ``Code.layer`` returns: a layer as data, owned by the compiled module."""
Run = NewType("Run", object)
"""What ``Code.run`` returns, owned by the compiled module."""


class LayerCall(NamedTuple):
    """What a layer is given in a step, besides x.

    Attributes:
        layer: What ``Code.layer`` returned.
        rotation: cos and sin of the tokens' positions, as ``Code.rotate`` takes them; of rows of
            different lengths, or with numbers of tokens of their own, for all of them.
        segments: One to six, of the cache, in order; keys and values of the last T tokens are
            written there.
        by_distance: As in ``ScoreMods``.
        memory: Of the context, for a layer with ``cross``; its rows divide B. None: such a layer
            ends behind its self-attention.
        entries: ``[B, n, 2 G D]`` of whole blocks, for a layer that chooses: as in
            ``Code.choose_blocks``. Such a step takes one token of rows of equal length.
    """

    layer: Layer
    rotation: tuple[Tensor, Tensor] | None
    segments: list[CacheSegment]
    by_distance: Tensor | None = None
    memory: CacheSegment | None = None
    entries: Tensor | None = None


class TileSums(NamedTuple):
    """Sums over the rows ``[B, T]`` and columns ``[B, S]`` of attention weights; None: not wanted.

    All but ``received`` have one batch stride, and rows without gaps.

    Attributes:
        entropy: −Σ p log p.
        squares: Sum of the squared weights.
        largest: The largest weight and the int64 index of its key.
        top: The largest weights ``[B, T, k]`` in order and the int64 indexes of their keys.
        received: Σ p over the rows.
    """

    entropy: Tensor | None = None
    squares: Tensor | None = None
    largest: tuple[Tensor, Tensor] | None = None
    top: tuple[Tensor, Tensor] | None = None
    received: Tensor | None = None
