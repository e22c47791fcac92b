"""Runs an encoder's layers as a funnel: blocks of which each reads half as many tokens.

    x_1 = block_1(x)     x_b = block_b(pairs of x_(b−1))     out = decoder(x_n of groups + x_1)

Dai et al. 2020, "Funnel-Transformer" (arXiv 2006.03236). Padding is in no pair, so that a text has
the result that it has alone.

Shape letters: B batch, T tokens, P pairs, E embed size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyhead.config import FunnelConfig
from polyhead.config.layout import EMBEDDING, SEGMENTS
from polyhead.errors import UnsupportedError
from polyhead.layers.funnel_attention import Level
from polyhead.layers.handed import Handed
from polyhead.models.heads import lengths_of
from polyhead.semantics import KeyLengths, Mask


def run_funnel(
    config: FunnelConfig,
    layers: nn.ModuleList,
    x: Tensor,
    *,
    mask: Mask | None,
    positions: Tensor | None,
    handed: Handed,
    kernel: str,
    recompute: bool,
) -> Tensor:
    """``x`` behind all layers, ``[B, T, E]``; without a decoder ``[B, P, E]``.

    Args:
        config: Which layers make a block.
        layers: Of all blocks and the decoder.
        x: ``[B, T, E]``.
        mask: ``KeyLengths`` or None.
        positions: None.
        handed: With the segments of the call.
        kernel: ``"auto"`` or the name of a kernel.
        recompute: Whether what layers compute is computed again for gradients.

    Raises:
        UnsupportedError: Another mask, or positions.
    """
    if positions is not None:
        raise UnsupportedError("a funnel counts tokens from 0: got positions")
    T, lengths = x.shape[1], lengths_of(mask, x, "a funnel")
    segments: Tensor | None = handed.values[EMBEDDING, SEGMENTS]
    if segments is None:
        segments = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
    whole, numbers = (lengths, segments), iter(range(len(layers)))

    def layer(x: Tensor, level: Level, lengths: Tensor) -> Tensor:
        at = next(numbers)
        call: dict[str, Any] = {
            "mask": None if mask is None else KeyLengths(lengths),
            "kernel": kernel,
            "handed": Handed(at, {(EMBEDDING, SEGMENTS): level}),
        }
        if recompute and torch.is_grad_enabled():
            made: Tensor = checkpoint(layers[at], x, use_reentrant=False, **call)
        else:
            made = layers[at](x, **call)
        return made

    first, stride, apart = x, 1, config.first_apart
    for block, count in enumerate(config.blocks):
        left = count
        if block and x.shape[1] > 1 + apart:
            pairs, fewer, kinds = _pooled(config, x, lengths, segments)
            if config.queries_only:
                x = layer(pairs, Level(kinds, segments, x, stride, apart), lengths)
                left -= 1
            else:
                x = pairs
            lengths, segments, stride = fewer, kinds, 2 * stride
        for _ in range(left):
            x = layer(x, Level(segments, segments, None, stride, apart), lengths)
        if not block:
            first = x
    if config.decoder is None:
        return x
    x = _spread(config, x, lengths, T) + first
    lengths, segments = whole
    for _ in range(config.decoder):
        x = layer(x, Level(segments, segments, None, 1, apart), lengths)
    return x


def _pooled(
    config: FunnelConfig, x: Tensor, lengths: Tensor, segments: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What stands for pairs ``[B, P, E]``, how many there are of each text, and their segments."""
    B, T, E = x.shape
    # Of each text the last token that is in a pair; two tokens stay as they are.
    last = lengths - 1
    if config.truncate:
        last = torch.minimum((last - 1).clamp(min=1), last)
    begin = int(config.first_apart)
    rest = x[:, begin : T - config.truncate]
    odd = rest.shape[1] % 2
    rest = F.pad(rest, (0, 0, 0, odd)).view(B, -1, 2, E)
    paired = torch.arange(begin, begin + 2 * rest.shape[1], device=x.device) <= last[:, None]
    paired = paired.view(B, -1, 2, 1)
    if config.pooling == "mean":
        total = rest.masked_fill(~paired, 0.0).sum(dim=2)
        made = total / paired.sum(dim=2).clamp(min=1)
    else:
        made = rest.masked_fill(~paired, -torch.inf).amax(dim=2)
        made = made.masked_fill(~paired.any(dim=2), 0.0)
    made = torch.cat((x[:, :begin], made), dim=1)
    kinds = torch.cat((segments[:, :begin], segments[:, begin::2]), dim=1)[:, : made.shape[1]]
    return made, begin + (last + 2 - begin) // 2, kinds


def _spread(config: FunnelConfig, x: Tensor, lengths: Tensor, T: int) -> Tensor:
    """``[B, T, E]`` what was made of the group that each token is in; 0 for those left out."""
    begin, size = int(config.first_apart), 2 ** (len(config.blocks) - 1)
    groups = begin + torch.arange(T - begin, device=x.device) // size
    out = (groups >= lengths[:, None])[..., None]
    made = x[:, groups.clamp(max=x.shape[1] - 1)].masked_fill(out, 0.0)
    return torch.cat((x[:, :begin], made), dim=1)
