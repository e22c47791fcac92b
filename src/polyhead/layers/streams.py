"""Several residual streams: what reads one vector of each token from them, and writes it back.

    AltUp     s̃_i = s_i + Σ_j P_ij s_j           before a layer f, with P made of s_a
              s_i = s̃_i + (1 + c_i) (f(s̃_a) − s̃_a)       after it, with c made of f(s̃_a)

P and c are linear in r = tanh(W norm(x) / E), n numbers of a token (Baykal et al. 2023, arXiv
2301.13310, §3; Gemma 3n). Between layers the streams are ``[B, T, n, E]``.

A mixer has ``read``, from the streams to what a part computes and what is kept of them, and
``write``, from that and the part's output to the streams. Ends make streams of the embedding
(``enter``) and one vector of the streams (``leave``).

Shape letters: B batch, T tokens, n streams, a the active one, E embed size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.config import AltUpConfig, StreamsConfig
from polyhead.errors import ConfigError
from polyhead.layers.fixed import Fixed
from polyhead.layers.linear import linear, product
from polyhead.layers.norms import build_norm


class StreamMixer(Fixed, ABC):
    """Reads and writes streams around a layer or a part of one."""

    @abstractmethod
    def read(self, streams: Tensor) -> tuple[Tensor, Any]:
        """``[B, T, n, E]`` to ``[B, T, E]``, and what ``write`` needs of the streams."""

    @abstractmethod
    def write(self, kept: Any, made: Tensor) -> Tensor:
        """What ``read`` kept, and what was made ``[B, T, E]``, to ``[B, T, n, E]``."""

    def beside(self, streams: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """The streams with a layer's own vector added, which ``make`` makes of one of them."""
        raise ConfigError(f"{type(self).__name__} has no stream for a layer's own vector")


class WholeStreams(StreamMixer):
    """Of a part that reads all streams side by side ``[B, T, n · E]``, and adds to each."""

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        return streams.flatten(2), streams

    def write(self, kept: Tensor, made: Tensor) -> Tensor:
        return kept + made.reshape(kept.shape)


class StreamEnds(Fixed, ABC):
    """Makes streams of the embedding, and one vector of each token of the streams."""

    @abstractmethod
    def enter(self, x: Tensor) -> Tensor:
        """``[B, T, E]`` to ``[B, T, n, E]``."""

    @abstractmethod
    def leave(self, streams: Tensor) -> Tensor:
        """``[..., n, E]`` to ``[..., E]``."""


class AltUp(StreamMixer):
    """Predicts all streams before a layer and corrects them after it; see the module.

    Args:
        embed_dim: Embedding size E of each stream.
        config: Number of streams, the active one, norm.

    Attributes:
        router: ``[n, E]`` W.
        predict: ``[n², n]`` P as a function of r.
        correct: ``[n, n]`` c as a function of r.
    """

    def __init__(self, embed_dim: int, config: AltUpConfig) -> None:
        super().__init__()
        self.config, n = config, config.count
        self.router_norm = build_norm(embed_dim, config.norm)
        self.router = nn.Linear(embed_dim, n, bias=False)
        self.predict = nn.Linear(n, n * n, bias=False)
        self.correct = nn.Linear(n, n, bias=False)

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        n, active = self.config.count, self.config.active
        factors = self._factors(streams[:, :, active], self.predict).view(*streams.shape[:2], n, n)
        predicted = torch.matmul(factors, streams)
        predicted = predicted.add_(streams)
        return predicted[:, :, active], predicted

    def write(self, kept: Tensor, made: Tensor) -> Tensor:
        factors = self._factors(made, self.correct) + 1.0
        changed = made - kept[:, :, self.config.active]
        written = changed[:, :, None] * factors[..., None]
        return written.add_(kept)

    def beside(self, streams: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        added = make(streams[:, :, self.config.active])
        # Of all but the first, whichever is active, as Gemma 3n was trained.
        return torch.cat((streams[:, :, :1], streams[:, :, 1:] + added[:, :, None]), dim=2)

    def _factors(self, x: Tensor, module: nn.Linear) -> Tensor:
        routed = linear(self.router_norm(x) * x.shape[-1] ** -1.0, self.router)
        routed = torch.tanh(routed.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
        if self.training and self.config.clip is not None:
            return product(routed, module.weight.clamp(-self.config.clip, self.config.clip), None)
        return linear(routed, module)


class AltUpEnds(StreamEnds):
    """All streams but the first are projections of the embedding, of the embedding's size; at last
    they are projected back, to the size of the first, and averaged.

    Args:
        embed_dim: Embedding size E of each stream.
        config: Number of streams.

    Attributes:
        enter_projs, leave_projs: n − 1 matrices ``[E, E]``.
    """

    def __init__(self, embed_dim: int, config: AltUpConfig) -> None:
        super().__init__()
        self.config, others = config, range(1, config.count)
        self.enter_projs, self.leave_projs = (
            nn.ModuleList(nn.Linear(embed_dim, embed_dim, bias=False) for _ in others)
            for _ in range(2)
        )

    def enter(self, x: Tensor) -> Tensor:
        size = _size(x)
        others = [_resized(linear(x, each), size) for each in self.enter_projs]
        return torch.stack((x, *others), dim=-2)

    def leave(self, streams: Tensor) -> Tensor:
        first, *others = streams.unbind(dim=-2)
        size, total = _size(first), first
        for each, module in zip(others, self.leave_projs, strict=True):
            total = total + _resized(linear(each, module), size)
        return total / self.config.count


def _size(x: Tensor) -> Tensor:
    """Root of the mean square of each vector, ``[..., 1]``."""
    return x.square().mean(dim=-1, keepdim=True).sqrt()


def _resized(x: Tensor, size: Tensor) -> Tensor:
    own = x.square().mean(dim=-1, keepdim=True).clamp(min=1e-5).sqrt()
    return x * size / own


_KINDS: dict[type[StreamsConfig], tuple[Callable[..., Any], Callable[..., Any]]] = {}


def register_streams(
    config: type[StreamsConfig],
    mixer: Callable[..., StreamMixer],
    ends: Callable[..., StreamEnds],
) -> None:
    """From now on these make the modules of a configuration of exactly this class.

    Args:
        config: Class of configuration to register.
        mixer: Called as ``mixer(embed_dim, config)``.
        ends: Called as ``ends(embed_dim, config)``.
    """
    _KINDS[config] = mixer, ends


def build_mixer(embed_dim: int, config: StreamsConfig) -> StreamMixer:
    """What reads and writes the streams of ``config``."""
    made: StreamMixer = _kind(config)[0](embed_dim, config)
    return made


def build_ends(embed_dim: int, config: StreamsConfig) -> StreamEnds:
    """What makes the streams of ``config``, and one vector of them."""
    made: StreamEnds = _kind(config)[1](embed_dim, config)
    return made


def _kind(config: StreamsConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
    found = _KINDS.get(type(config))
    if found is None:
        known = ", ".join(sorted(each.__name__ for each in _KINDS))
        raise ConfigError(
            f"no streams are made from a {type(config).__name__}: known configurations are {known}"
        )
    return found


register_streams(AltUpConfig, AltUp, AltUpEnds)
