"""One layer on a mesh: an attention, a network, or both with their norms, without a model around.

layer = parallel.parallelize(MultiHeadAttention.from_config(512, config), mesh)
y = layer(parallel.shard(x, mesh), mask=ph.Causal())
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from polyhead.errors import InputError, UnsupportedError
from polyhead.layers import MultiHeadAttention, MultiHeadLatentAttention, TransformerLayer
from polyhead.layers.experts import Experts
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.hooks import Hooked
from polyhead.parallel.attention import check_kernel
from polyhead.parallel.calls import NAMES, agree_alike, facts_of
from polyhead.parallel.context import Context, LayerAttention, check_parts, install_one
from polyhead.parallel.ranks import Ranks, unsupported

LAYERS = MultiHeadAttention, MultiHeadLatentAttention, FeedForward, Experts, TransformerLayer
"""Layers that ``parallelize`` takes alone."""


def check_layer(layer: nn.Module) -> None:
    """Raises for a layer that needs more than a slice of the tokens.

    Raises:
        UnsupportedError: Names what.
    """
    for module in layer.modules():
        if isinstance(module, Hooked | Experts):
            check_parts(module.config, module.config)
        if getattr(module, "cross_attention", None) is not None:
            raise unsupported("a layer with cross-attention alone on the dimension 'context'")


def tell_layer(
    layer: nn.Module,
    tensor: Ranks | None,
    heads: Mapping[Hooked, tuple[range, int]],
    context: Context | None,
) -> None:
    """From now on ranks agree on every call of a layer, which knows where its tokens stand."""
    for module in layer.modules():
        if isinstance(module, Hooked):
            install_one(module, LayerAttention(heads.get(module), tensor, context))
    layer.register_forward_pre_hook(_Told(tensor, context), prepend=True, with_kwargs=True)


@dataclass(eq=False)
class _Told:
    """Runs before ``forward``."""

    tensor: Ranks | None
    context: Context | None

    def __call__(
        self, layer: nn.Module, given: tuple[Any, ...], call: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = {name: each for name, each in call.items() if name not in ("positions", "cache")}
        positions = call.get("positions")
        told = (*given[1:], *rest, *rest.values())
        if self.context is None:
            if self.tensor is not None:
                agree_alike([self.tensor], given[0], positions, *told)
            return given, call
        refused: Exception | None = None
        facts = [0] * len(NAMES)
        try:
            check_kernel(call.get("kernel", "auto"))
            if len(given) > 1 or call.get("context") is not None or call.get("cache") is not None:
                raise unsupported("cross-attention or a cache of a layer alone on 'context'")
            facts = facts_of(given[0], positions, *told)
        except (InputError, UnsupportedError) as error:
            refused = error
        device = given[0].device if isinstance(given[0], Tensor) else None
        at = self.context.settle("tokens", facts, refused, positions, device, None)
        if isinstance(layer, FeedForward | Experts):
            return given, call
        return given, call | {"positions": at}
