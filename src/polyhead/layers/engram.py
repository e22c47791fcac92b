"""Engram: vectors of runs of tokens, looked up by a hash and gated by the residual streams.

    e = [table_1[hash_1] | table_2[hash_2] …]         of the last 2, 3, … tokens, by several hashes
    g = norm(e Wk)_i · norm(s_i) / √E                 for each stream s_i
    v = σ(sign(g) √|g|) (e Wv)
    s_i = s_i + v_i + silu(conv(norm(v_i)))           a convolution of each feature

A hash is the xor of ids times odd multipliers, modulo the table's prime number of rows. A run does
not reach beyond the end of a text: the token that ends it stands for all before. Cheng et al. 2026,
arXiv 2601.07372, section 2; multipliers, primes and the ends of texts are Qwen4-Exp's (2026).

Shape letters: B batch, T tokens, L tokens of the longest run, n streams, E features of each,
D features of e, J tables.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.caches.layer_cache import Step
from polyhead.config import EngramConfig, HeadLayout
from polyhead.config.layout import TOKENS
from polyhead.errors import ConfigError
from polyhead.layers.handed import Handed, handed_to
from polyhead.layers.linear import linear
from polyhead.layers.norms import HeadNorm
from polyhead.layers.positions import RoPE
from polyhead.layers.recurrent import RecurrentLayer, convolve, with_tail
from polyhead.layers.registry import register_builder


class Engram(RecurrentLayer):
    """What runs of tokens add to all streams ``[B, T, n · E]``; built from its config, by a model.

    Attributes:
        table: ``[rows, D / J]``, all tables one after the other.
        k_proj, v_proj: ``[n · E, D]`` and ``[E, D]``.
        k_norm, q_norm, conv_norm: Over the E features of each stream.
        conv_weight: ``[n · E, conv_kernel]``.
    """

    config: EngramConfig

    def _begin(self, embed_dim: int, config: HeadLayout) -> None:
        assert isinstance(config, EngramConfig)
        if embed_dim != config.width:
            raise ConfigError(f"width must be embed_dim={embed_dim}: got {config.width}")
        super()._begin(config.channels, config)

    def _build(self, rope: RoPE | None) -> None:
        c = self.config
        self.table = nn.Embedding(c.rows, c.dim // c.tables)
        self.k_proj = nn.Linear(c.dim, c.channels, bias=False)
        self.v_proj = nn.Linear(c.dim, c.width, bias=False)
        self.k_norm, self.q_norm, self.conv_norm = (
            HeadNorm(c.streams, c.width, c.norm) for _ in range(3)
        )
        self.conv_weight = nn.Parameter(torch.empty(c.channels, c.conv_kernel))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the convolution to 0, as at first. Table, projections and norms stay."""
        nn.init.zeros_(self.conv_weight)

    def _ids(self, handed: Handed | None) -> Tensor:
        ids: Tensor = handed_to(handed, TOKENS, self.config.reads)
        return ids

    def _run(self, x: Tensor, real: Tensor | None, kernel: str, step: Step | None) -> NoReturn:
        raise NotImplementedError("an engram reads the ids of tokens: _run_with")

    def _run_with(
        self, x: Tensor, ids: Tensor | None, real: Tensor | None, kernel: str, step: Step | None
    ) -> Tensor:
        c = self.config
        assert ids is not None  # ``_ids`` gives them
        # Where nothing was, the tail has zeros: there a text has ended.
        counted = (ids.long() - c.end_token_id)[..., None]
        tokens = with_tail("tokens", counted, c.longest - 1, step)[..., 0] + c.end_token_id
        looked_up: Tensor = self.table(self._rows(tokens)).flatten(-2)
        values = linear(looked_up, self.v_proj)[:, :, None]
        gated = self._gates(looked_up, x) * values
        tail = (c.conv_kernel - 1) * c.longest
        inputs = with_tail("conv", self.conv_norm(gated).flatten(2), tail, step)
        mixed = F.silu(convolve(inputs, self.conv_weight, dilation=c.longest))
        return self._edited((gated.flatten(2) + mixed)[:, None])[:, 0]

    def _gates(self, looked_up: Tensor, x: Tensor) -> Tensor:
        """``[B, T, n, 1]`` how much of its values each stream takes."""
        c = self.config
        streams = c.streams, c.width
        keys = self.k_norm(linear(looked_up, self.k_proj).view(*x.shape[:2], *streams))
        queries = self.q_norm(x.reshape(*x.shape[:2], *streams))
        scores = (keys * queries).sum(dim=-1, keepdim=True) / math.sqrt(c.width)
        return torch.sigmoid(scores.abs().clamp_min(1e-6).sqrt() * scores.sign())

    def _rows(self, tokens: Tensor) -> Tensor:
        """``[B, T, J]`` rows of the table, of runs in ids ``[B, L − 1 + T]``."""
        c, T = self.config, tokens.shape[1] - self.config.longest + 1
        sizes = torch.tensor(c.sizes, device=tokens.device).view(-1, c.heads)
        firsts = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)
        first, *others = c.multipliers
        mixed, found = tokens[:, -T:] * first, []
        over = torch.zeros_like(mixed, dtype=torch.bool)
        for back, (factor, size, start) in enumerate(zip(others, sizes, firsts, strict=True), 1):
            at = c.longest - 1 - back
            run = tokens[:, at : at + T].masked_fill(over, c.end_token_id)
            over = run == c.end_token_id
            mixed = mixed ^ (run * factor)
            found.append(mixed[..., None] % size + start)
        return torch.cat(found, dim=-1)


register_builder(EngramConfig, Engram.from_config)
