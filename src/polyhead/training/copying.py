"""Initial weights that copy the source, for tasks whose output is nearly the input.

Where to look is what attention learns last. Here it looks from the first step as an induction head
does (Olsson et al. 2022), built by hand from parts of the residual stream that begin apart:

    features        hold at first
    2 · P           the fastest sinusoids of positions
    N               a random vector for each token
    N               nothing; the first layers put the token before here, by position
    N               nothing; the encoder's first layer puts the one before that here

The decoder's last cross-attention looks for the source token whose two predecessors are the two
tokens written last, near the same position, and adds it to the residual stream over the token
written last. The tied head then predicts it. It looks for two, because one of them may be written
otherwise than it was read. All of it is trained as everything else.

Shape letters: E embed size, D head size, P positions' pairs of features, N token features.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import ConfigError
from polyhead.layers import MultiHeadAttention
from polyhead.models import Transformer

_TOKEN = 2.0
"""Size of a token's features, beside positions of size 1."""
_SHARP = 7.0
"""Factor of queries and keys by position: neighbours differ by 10 in the score."""
_NEAR = 2.8
"""Likewise where a match is sought near the same position: all others are worth 3 less."""
_ALIKE = 1.5
"""Likewise where tokens are compared."""
_OVER = 4.0
"""The weight of the copied token relative to the token written last."""
_USUAL = 48
"""Tokens of a usual text."""
_PLACES = 8
"""Pairs of features, some of the fastest, that say what is near."""
_START = 15.0
"""How much more being near counts for the token that texts start with."""


@torch.no_grad()
def begin_with_copying(model: Transformer) -> None:
    """Draws new weights that copy; all heads and networks that are not needed begin small.

    Args:
        model: An encoder-decoder whose norms stand first, with sinusoids in halves and a tied
            head, as Pegasus has them.

    Raises:
        ConfigError: Another architecture, or heads too few or too small to carry a token.
    """
    config = model.config
    E, layer = config.embed_dim, config.layers[-1]
    embedding = config.embedding
    fits = (
        config.kind == "encoder-decoder"
        and config.head == "tied"
        and embedding.positions == "sinusoidal"
        and embedding.sinusoid.layout == "halves"
        and all(
            each.norm_placement == "pre" and each.only_adds
            for each in (*config.layers, *config.encoder_layers)
        )
    )
    cross = model.layers[-1].cross_attention
    reads, writes = model.encoder_layers[0].attention, model.layers[0].attention
    exact = all(type(each) is MultiHeadAttention for each in (cross, reads, writes))
    if not fits or not exact:
        raise ConfigError(
            "copying needs an encoder-decoder with norms first, sinusoids in halves and a tied "
            "head: model_type pegasus has them"
        )
    attention = layer.cross_attention
    assert attention is not None
    D, P = attention.head_dim, attention.head_dim // 2
    N = (E - 2 * P) // 3
    carriers, seekers = math.ceil(N / D), max(attention.num_heads // 2, math.ceil(N / D))
    compared = (D - 2 * _PLACES) // 2
    if compared < 1 or compared > N or 2 * carriers > attention.num_heads:
        raise ConfigError(
            f"copying needs heads that carry a token: got embed_dim={E}, head_dim={D}, "
            f"num_heads={attention.num_heads}"
        )
    model.reset_parameters()
    depth = len(config.layers) + len(config.encoder_layers)
    for module in model.modules():
        for name in ("o_proj", "down_proj"):
            part = getattr(module, name, None)
            if isinstance(part, nn.Linear):
                part.weight.mul_(1 / math.sqrt(2 * depth))
    rest = torch.cat(
        (torch.arange(P, E // 2, device="cpu"), torch.arange(E // 2 + P, E, device="cpu"))
    )
    token, before, earlier = (rest[k * N : (k + 1) * N] for k in range(3))
    table = model.embedding.table
    table.zero_()
    # All of one mean and length: a norm would turn other differences into noise of the positions.
    drawn = nn.functional.layer_norm(
        torch.randn(len(table), N - 1, dtype=torch.float32, device="cpu"), (N - 1,)
    )
    drawn = nn.functional.pad(drawn, (1, 0))  # the first feature tells the start from all others
    start = config.bos_token_id if config.bos_token_id is not None else config.pad_token_id
    if start is not None:
        drawn[start] = 0.0
        drawn[start, 0] = math.sqrt(N)
    table[:, token] = drawn * (_TOKEN / embedding.scale)
    _without_slow_sinusoids(table, P, embedding.scale)
    speeds = _speeds(E, P)
    for carrier, back, written, first in (
        (reads, 1, before, 0),
        (reads, 2, earlier, carriers),
        (writes, 1, before, 0),
    ):
        for head, part in enumerate(
            torch.arange(N, device="cpu").tensor_split(carriers), start=first
        ):
            rows = slice(head * D, (head + 1) * D)
            _look_back(carrier, rows, speeds, E, back)
            _carry(carrier, rows, token[part], written[part], 1.0)
    for head, part in enumerate(torch.arange(N, device="cpu").tensor_split(seekers)):
        rows = slice(head * D, (head + 1) * D)
        at = (torch.arange(compared, device="cpu") + head * compared) % N
        _match(cross, rows, [(token[at], before[at]), (before[at], earlier[at])], P, E)
        _carry(cross, rows, token[part], token[part], _OVER)
        near = slice(rows.start + 2 * compared + _PLACES, rows.start + 2 * (compared + _PLACES))
        _begin_at_0(cross, near, int(token[0]), N)


def _speeds(E: int, P: int) -> Tensor:
    """``[P]`` radians that a position turns the fastest sinusoids by."""
    return 10_000.0 ** (-2.0 * torch.arange(P, device="cpu") / E)


def _without_slow_sinusoids(table: Tensor, P: int, scale: float) -> None:
    """Subtracts the mean of slow sinusoids from all tokens."""
    E = table.shape[1]
    angles = torch.arange(_USUAL, device="cpu")[:, None] * _speeds(E, E // 2)
    for half, mean in ((0, angles.sin().mean(0)), (E // 2, angles.cos().mean(0))):
        table[:, half + P : half + E // 2] -= mean[P:] / scale


def _look_back(attention: Any, rows: slice, speeds: Tensor, E: int, back: int) -> None:
    """A head that looks at the token ``back`` before: queries are turned back so many positions."""
    P = len(speeds)
    at = torch.arange(P, device="cpu")
    q, k = (
        torch.zeros(2 * P, E, dtype=torch.float32, device="cpu"),
        torch.zeros(2 * P, E, dtype=torch.float32, device="cpu"),
    )
    # sin(w(t − b)) = sin(wt) cos wb − cos(wt) sin wb, and cos(w(t − b)) alike
    cos, sin = (back * speeds).cos(), (back * speeds).sin()
    q[at, at], q[at, at + E // 2] = cos, -sin
    q[at + P, at + E // 2], q[at + P, at] = cos, sin
    k[at, at] = k[at + P, at + E // 2] = 1.0
    attention.q_proj.weight[rows][: 2 * P] = _SHARP * q
    attention.k_proj.weight[rows][: 2 * P] = _SHARP * k


def _match(
    attention: Any, rows: slice, compared: list[tuple[Tensor, Tensor]], P: int, E: int
) -> None:
    """A head that compares features of the query with those of keys, near the same position."""
    q, k = attention.q_proj.weight[rows], attention.k_proj.weight[rows]
    q.zero_(), k.zero_()
    first = 0
    for ours, theirs in compared:
        at = torch.arange(len(ours), device="cpu") + first
        q[at, ours] = k[at, theirs] = _ALIKE
        first += len(ours)
    for half in (0, E // 2):
        fast = torch.linspace(0, P - 1, _PLACES, dtype=torch.float32, device="cpu").long() + half
        place = torch.arange(_PLACES, device="cpu") + first
        q[place, fast] = k[place, fast] = _NEAR
        first += _PLACES


def _begin_at_0(attention: Any, near: slice, start: int, N: int) -> None:
    """A text begins where its source does: cosines of position 0 are 1, its sines 0."""
    attention.q_proj.weight[near, start] = _NEAR * _START / math.sqrt(N)


def _carry(attention: Any, rows: slice, read: Tensor, written: Tensor, factor: float) -> None:
    """A head's values: features ``read`` of what it looks at, added to features ``written``."""
    value, out = attention.v_proj.weight[rows], attention.o_proj.weight[:, rows]
    value.zero_(), out.zero_()
    at = torch.arange(len(read), device="cpu")
    value[at, read] = 1.0
    out[written, at] = factor
