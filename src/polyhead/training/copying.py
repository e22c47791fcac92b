"""Weights that copy the source, to begin with where what is written is nearly what is read.

Attention learns last where to look. Here it looks from the first step as an induction head does
(Olsson et al. 2022), built by hand from parts of the residual stream that begin apart:

    features        hold at first
    [0, P)          the fastest sines of positions        (and their cosines, half a model on)
    [P, E/2)        a random vector for each token
    [E/2 + P, E)    nothing; the encoder's first layer puts the token before here, by position

The decoder's last cross-attention looks for the source token whose predecessor is the token that
was written last, near the same position, and adds it to the residual stream in place of that one.
The tied head then foretells it. All of it is trained as everything else.

Shape letters: E embed size, D head size, P positions' pairs of features, N token features.
"""

from __future__ import annotations

import math

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
"""Likewise where a match is sought near the same position: ten tokens on are worth 3."""
_ALIKE = 1.5
"""Likewise where tokens are compared."""
_OVER = 4.0
"""How much more the copied token counts than the token written last."""
_USUAL = 48
"""Tokens of a usual text."""
_SLOW = 8
"""Pairs of features, the slowest of the fast ones, that say what is near."""


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
        and all(each.norm_placement == "pre" for each in (*config.layers, *config.encoder_layers))
    )
    cross, reads = model.layers[-1].cross_attention, model.encoder_layers[0].attention
    if not fits or type(cross) is not MultiHeadAttention or type(reads) is not MultiHeadAttention:
        raise ConfigError(
            "copying needs an encoder-decoder with norms first, sinusoids in halves and a tied "
            "head: model_type pegasus has them"
        )
    attention = layer.cross_attention
    assert attention is not None
    D, P = attention.head_dim, attention.head_dim // 2
    N = E // 2 - P
    heads = math.ceil(N / (D - 2 * _SLOW)) if D > 2 * _SLOW else 0
    if not 0 < heads <= attention.num_heads or N < 2 * _SLOW or P < _SLOW:
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
    table = model.embedding.table
    table.zero_()
    # All of one mean and length: a norm would turn other differences into noise of the positions.
    drawn = nn.functional.layer_norm(torch.randn(len(table), N), (N,))
    table[:, P : E // 2] = drawn * (_TOKEN / embedding.scale)
    _without_slow_sinusoids(table, P, embedding.scale)
    slices = torch.arange(N).tensor_split(heads)
    speeds = _speeds(E, P)
    for head, part in enumerate(slices):
        tokens, free = part + P, part + E // 2 + P
        rows = slice(head * D, (head + 1) * D)
        _look_back(reads, rows, speeds, E)
        _carry(reads, rows, tokens, free, 1.0)
        _match(cross, rows, tokens, free, P, E)
        _carry(cross, rows, tokens, tokens, _OVER)


def _speeds(E: int, P: int) -> Tensor:
    """``[P]`` radians that a position turns the fastest sinusoids by."""
    return 10_000.0 ** (-2.0 * torch.arange(P) / E)


def _without_slow_sinusoids(table: Tensor, P: int, scale: float) -> None:
    """Takes what slow sinusoids are on the average out of all tokens."""
    E = table.shape[1]
    angles = torch.arange(_USUAL)[:, None] * _speeds(E, E // 2)
    for half, mean in ((0, angles.sin().mean(0)), (E // 2, angles.cos().mean(0))):
        table[:, half + P : half + E // 2] -= mean[P:] / scale


def _look_back(attention: MultiHeadAttention, rows: slice, speeds: Tensor, E: int) -> None:
    """A head that looks at the token before: queries are turned back by one position."""
    P = len(speeds)
    at = torch.arange(P)
    q, k = torch.zeros(2 * P, E), torch.zeros(2 * P, E)
    # sin(w(t − 1)) = sin(wt) cos w − cos(wt) sin w, and cos(w(t − 1)) alike
    q[at, at], q[at, at + E // 2] = speeds.cos(), -speeds.sin()
    q[at + P, at + E // 2], q[at + P, at] = speeds.cos(), speeds.sin()
    k[at, at] = k[at + P, at + E // 2] = 1.0
    attention.q_proj.weight[rows][: 2 * P] = _SHARP * q
    attention.k_proj.weight[rows][: 2 * P] = _SHARP * k


def _match(
    attention: MultiHeadAttention, rows: slice, tokens: Tensor, before: Tensor, P: int, E: int
) -> None:
    """A head that looks for a predecessor that is the query's own token, near its position."""
    q, k = attention.q_proj.weight[rows], attention.k_proj.weight[rows]
    q.zero_(), k.zero_()
    at, count = torch.arange(len(tokens)), len(tokens)
    q[at, tokens] = k[at, before] = _ALIKE
    for half in (0, E // 2):
        slow = torch.arange(P - _SLOW, P) + half
        place = torch.arange(_SLOW) + count + (_SLOW if half else 0)
        q[place, slow] = k[place, slow] = _NEAR


def _carry(
    attention: MultiHeadAttention, rows: slice, read: Tensor, written: Tensor, factor: float
) -> None:
    """A head's values: features ``read`` of what it looks at, added to features ``written``."""
    value, out = attention.v_proj.weight[rows], attention.o_proj.weight[:, rows]
    value.zero_(), out.zero_()
    at = torch.arange(len(read))
    value[at, read] = 1.0
    out[written, at] = factor
