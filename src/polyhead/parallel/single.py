"""One layer on a mesh: an attention, a network, or both with their norms, without a model around.

layer = parallel.parallelize(MultiHeadAttention.from_config(512, config), mesh)
y = layer(parallel.shard(x, mesh), mask=ph.Causal())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import Tensor, nn

from polyhead.layers import MultiHeadAttention, MultiHeadLatentAttention, TransformerLayer
from polyhead.layers.experts import Experts
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.hooks import Hooked
from polyhead.parallel.attention import check_kernel
from polyhead.parallel.calls import NAMES, Bound, agree_alike, call_signature
from polyhead.parallel.context import Context, LayerAttention, check_parts, install_one
from polyhead.parallel.ranks import Ranks, tell_backward, unsupported

LAYERS = MultiHeadAttention, MultiHeadLatentAttention, FeedForward, Experts, TransformerLayer
"""Layers that ``parallelize`` takes alone."""

_OF_ANOTHER = "context", "more", "context_positions", "context_cache"
"""Arguments of cross-attention."""


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
    number: int,
) -> None:
    """From now on ranks agree on every call of a layer, which knows where its tokens stand.

    Args:
        layer: Layer that is changed in place.
        tensor: The ranks of ``tensor``, or None.
        heads: By attention the query heads of this rank and of all.
        context: How tokens are spread, or None.
        number: Tells this layer from others that ranks call.
    """
    for module in layer.modules():
        if isinstance(module, Hooked):
            install_one(module, LayerAttention(heads.get(module), tensor, context))
    dimensions = [] if tensor is None else [tensor]
    if context is not None:
        dimensions = context.dimensions
    layer.register_forward_pre_hook(
        _Told(dimensions, context, number), prepend=True, with_kwargs=True
    )
    layer.register_forward_pre_hook(Bound(dimensions), prepend=True, with_kwargs=True)
    layer.register_forward_hook(lambda _, __, out: tell_backward(dimensions, out))


@dataclass(eq=False)
class _Told:
    """Runs before ``forward``."""

    dimensions: Sequence[Ranks]
    context: Context | None
    number: int

    def __call__(
        self, layer: nn.Module, given: tuple[Any, ...], call: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = dict(signature(type(layer).forward).bind(layer, *given, **call).arguments)
        _, x, *_ = named.values()
        rest = [*named.items()][2:]
        cache = named.get("cache")
        positions = named.get("positions")
        call_fields = [(name, each) for name, each in rest if name not in ("positions", "cache")]
        call_fields.append(("cache", getattr(cache, "lengths", type(cache).__name__)))
        facts = [0] * len(NAMES)
        refused: Exception | None = None
        if self.context is None:
            agree_alike(self.dimensions, self.what, layer, x, positions, *call_fields)
            return given, call
        try:
            check_kernel(named.get("kernel", "auto"))
            given_context = [each for name, each in rest if name in _OF_ANOTHER]
            if any(each is not None for each in (cache, *given_context)):
                raise unsupported("cross-attention or a cache of a layer alone on 'context'")
            facts = call_signature(layer, x, positions, self.number, *call_fields)
        except Exception as error:  # whatever it is, other ranks must not wait
            refused = error
        device = x.device if isinstance(x, Tensor) else None
        at = self.context.settle("tokens", facts, refused, positions, device, None)
        if isinstance(layer, FeedForward | Experts):
            return given, call
        return given, call | {"positions": at}

    @property
    def what(self) -> str:
        """The kind of call, as other ranks are told."""
        return f"a call of layer {self.number} of those that were parallelized"
