"""How many parameters each part of a model has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from polyhead.layers.quantized import QuantizedMatrix


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters per part; a tensor that two parts share is counted once, in the first.

    Attributes:
        embedding: Tokens, learned positions, segments, frontends; an encoder's own too; what makes
            several residual streams and joins them.
        attention: All projections and sinks; 4 · E² per layer of plain MHA without biases.
        feed_forward: All projections, routers and their choice biases (which are not trained);
            what layers add to the residual stream beside attention, and mixes of several.
        norms: Every norm, those of queries and keys and of the embedding included.
        head: An untied output matrix, the output bias, a task's transforms and classifier.
        total: All of them.
    """

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.feed_forward + self.norms + self.head

    def __str__(self) -> str:
        rows = [*vars(self).items(), ("total", self.total)]
        return "\n".join(f"{name:<14}{count:>16,}" for name, count in rows)


_PARTS = {
    "embedding": "embedding",
    "encoder_embedding": "embedding",
    "per_layer_embedding": "embedding",
    "relative_embedding": "embedding",
    "streams": "embedding",
    "head": "head",
    "task": "head",
}
"""The part of a parameter outside the layers, by the first word of its name."""

_BESIDE = {
    "adapter",
    "feed_forward",
    "per_layer_input",
    "laurel",
    "convolution",
    "shortcut",
    "streams",
    "attention_streams",
    "cross_attention_streams",
    "feed_forward_streams",
    "attention_norm_gate",
    "feed_forward_norm_gate",
    "attention_convolution",
    "feed_forward_convolution",
    "feed_forward_scale",
}
"""Parts of layers whose parameters count as those of networks."""


def count_parameters(model: nn.Module) -> ParameterCounts:
    """Counts the parameters of a Transformer by the part that their names begin with."""
    counts = dict.fromkeys(("embedding", "attention", "feed_forward", "norms", "head"), 0)
    quantized = {
        f"{name}.{leaf}": module.out_features * module.in_features if leaf == "blocks" else 0
        for name, module in model.named_modules()
        if isinstance(module, QuantizedMatrix)
        for leaf in ("blocks", "scales", "zeros")
    }
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        counts[_part(name)] += quantized.get(name, tensor.numel())
    return ParameterCounts(**counts)


def held_bytes(model: nn.Module) -> ParameterCounts:
    """Bytes of a Transformer's parameters by part, as it holds them: numbers, blocks and scales."""
    sizes = dict.fromkeys(("embedding", "attention", "feed_forward", "norms", "head"), 0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        sizes[_part(name)] += tensor.nbytes
    return ParameterCounts(**sizes)


def _part(name: str) -> str:
    places = name.split(".")
    if any(
        place in ("norm", "input_scale", "output_scale") or place.endswith(("_norm", "_residual"))
        for place in places
    ):
        return "norms"
    if places[0] in _PARTS:
        return _PARTS[places[0]]
    network = not _BESIDE.isdisjoint(places)
    return "feed_forward" if network else "attention"
