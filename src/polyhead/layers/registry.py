"""Which module each configuration of attention or of a feed-forward network builds.

The module's file calls ``register_builder``; nothing else tests the class of a configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from polyhead._utils.extensions import extensions
from polyhead.config import HeadLayout, Network
from polyhead.errors import ConfigError
from polyhead.layers.hooks import Hooked
from polyhead.layers.positions import RoPE

_BUILDERS: dict[type[Any], Callable[..., Any]] = {}


def register_builder(
    config: type[HeadLayout] | type[Network], build: Callable[..., nn.Module]
) -> None:
    """From now on ``build`` makes the module of a configuration of exactly this class.

    Args:
        config: Class of configuration to register.
        build: Called as ``build(embed_dim, config, rope=rope)`` for attention, returning a
            ``Hooked``; as ``build(embed_dim, config)`` for a network.
    """
    _BUILDERS[config] = build


def build_attention(embed_dim: int, config: HeadLayout, rope: RoPE | None = None) -> Hooked:
    """The self-attention that ``config`` describes.

    Args:
        embed_dim: Embedding size E of the residual stream.
        config: Any head layout.
        rope: Rotary positions built from ``config.rope`` already, to share their tables.

    Raises:
        ConfigError: Numbers that do not go together, or a class that no module was made for.
    """
    made = _builder(config)(embed_dim, config, rope=rope)
    if not isinstance(made, Hooked):
        raise ConfigError(f"attention must be a Hooked module: {type(config).__name__} builds none")
    return made


def build_network(embed_dim: int, config: Network) -> nn.Module:
    """The feed-forward network that ``config`` describes.

    Raises:
        ConfigError: As ``build_attention``.
    """
    made: nn.Module = _builder(config)(embed_dim, config)
    return made


def _builder(config: HeadLayout | Network) -> Callable[..., Any]:
    build = _BUILDERS.get(type(config))
    if build is None:
        extensions()
        build = _BUILDERS.get(type(config))
    if build is None:
        known = ", ".join(sorted(each.__name__ for each in _BUILDERS))
        raise ConfigError(
            f"no module is made from a {type(config).__name__}: known configurations are {known}"
        )
    return build
