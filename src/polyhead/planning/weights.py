"""Every weight of a model as a piece of data: how many, of which part, how ranks share it.

The parts of a configuration say which pieces they are made of; here they are put together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from polyhead.config import EncoderConfig, LayerConfig, ParameterGroup, TransformerConfig
from polyhead.config.head import last_dim, transform_groups
from polyhead.errors import ConfigError
from polyhead.models.counts import ParameterCounts


def parameter_groups(config: TransformerConfig) -> Counter[ParameterGroup]:
    """All pieces of a model, each with how often it occurs."""
    E, encoder = config.embed_dim, config.encoder
    found = pieces_around(config)
    context = encoder_dim(config)
    stacks = (
        (config.layers, config.weights_of, E, context),
        (config.encoder_layers, encoder.weights_of, context, None),
    )
    for layers, weights_of, dim, context_dim in stacks:
        for layer, times in Counter(_owners(layers, weights_of)).items():
            for piece in layer.parameter_groups(dim, context_dim):
                found[piece] += times
    return Counter({piece: times for piece, times in found.items() if piece.count and piece.held})


def pieces_around(config: TransformerConfig) -> Counter[ParameterGroup]:
    """The pieces of a model that are in no layer."""
    found = Counter(_around(config))
    if config.encoder_layers:
        found.update(_around_encoder(config))
    return found


def encoder_dim(config: TransformerConfig) -> int:
    """Features of the encoder's output."""
    return config.encoder.embed_dim or config.embed_dim


def _owners(layers: tuple[LayerConfig, ...], weights_of: tuple[int, ...]) -> list[LayerConfig]:
    """The layers that have weights of their own."""
    return [layer for i, layer in enumerate(layers) if not weights_of or weights_of[i] == i]


def _around(config: TransformerConfig) -> Iterator[ParameterGroup]:
    """Weights outside a stack's layers, without the encoder's."""
    last = config.hidden_dim
    E, W, tied = config.embed_dim, config.vocab_size, config.head == "tied"
    yield from config.embedding.parameter_groups(W, E, config.max_positions, read_whole=tied)
    if config.per_layer_embedding is not None:
        yield from config.per_layer_embedding.parameter_groups(E, len(config.layers))
    if config.relative_embedding is not None:
        yield from config.relative_embedding.parameter_groups(E)
    if config.streams is not None:
        yield from config.streams.end_parameter_groups(E)
    if config.final_norm is not None:
        yield ParameterGroup("norms", 1, config.final_norm.parameters(last), multiplied=False)
    if config.relative_bias is not None:
        heads, prompt = config.layers[0].attention.num_heads, config.embedding.soft_prompt
        rows = config.relative_bias.num_buckets + (0 if prompt is None else prompt.num_segments**2)
        for _ in config.layers if config.relative_bias.per_layer else (0,):
            yield ParameterGroup("attention", heads, rows, multiplied=False)
    yield from transform_groups(last, config.head_transforms)
    size = last_dim(last, config.head_transforms)
    if own := size - config.head_beside if config.head == "untied" else 0:
        yield ParameterGroup("head", W, own, multiplied=False)
    if config.head_beside:
        yield ParameterGroup("head", W, config.head_beside, multiplied=False)
    if config.head_bias:
        yield ParameterGroup("head", W, 1, multiplied=False)
    if config.task is not None:
        yield from config.task.parameter_groups(last)


def _around_encoder(config: TransformerConfig) -> Iterator[ParameterGroup]:
    own: EncoderConfig = config.encoder
    E = encoder_dim(config)
    if own.embedding is not None:
        vocab_size = (own.vocab_size or config.vocab_size) if own.own_tokens else 0
        positions = own.max_positions or config.max_positions
        yield from own.embedding.parameter_groups(vocab_size, E, positions, read_whole=False)
    if config.final_norm is not None:
        yield ParameterGroup("norms", 1, config.final_norm.parameters(E), multiplied=False)
    if own.relative_bias is not None:
        heads = config.encoder_layers[0].attention.num_heads
        for _ in config.encoder_layers if own.relative_bias.per_layer else (0,):
            yield ParameterGroup(
                "attention", heads, own.relative_bias.num_buckets, multiplied=False
            )


def counts(found: Counter[ParameterGroup]) -> ParameterCounts:
    """Parameters by part."""
    parts: Counter[str] = Counter()
    for piece, times in found.items():
        parts[piece.part] += times * piece.count
    names = ("embedding", "attention", "feed_forward", "norms", "head")
    return ParameterCounts(**{name: parts[name] for name in names})


def check_ranks(config: TransformerConfig, ranks: int) -> None:
    """Raises ConfigError where ``ranks`` cannot share the heads or the hidden features evenly."""
    if ranks == 1:
        return
    for layer in {*config.layers, *config.encoder_layers}:
        for attention in (layer.attention, layer.cross_attention):
            if attention is None:
                continue
            H, G = attention.output_heads, attention.kv.num_kv_heads
            if H % ranks:
                raise ConfigError(f"tensor_parallel must divide num_heads={H}: got {ranks}")
            if G % ranks and ranks % G:
                raise ConfigError(
                    f"tensor_parallel must divide num_kv_heads={G} or be a multiple of it: got "
                    f"{ranks}"
                )
        widths = [each for network in layer.networks for each in network.widths().items()]
        for name, width in widths:
            if width % ranks:
                raise ConfigError(
                    f"tensor_parallel must divide the feed-forward {name}={width}: got {ranks}"
                )
