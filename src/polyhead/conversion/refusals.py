"""What a conversion cannot carry over, refused by name."""

from __future__ import annotations

from polyhead.config import AttentionConfig
from polyhead.conversion.draft import Draft
from polyhead.errors import UnsupportedError


def refuse_latent(draft: Draft, layer: int) -> None:
    """Raises UnsupportedError for features that latent attention cannot express."""
    config = draft.heads(layer, "latent attention")
    refuse_linear(config, layer, "latent attention")
    lacks = {
        "a window": config.window is not None,
        "chunks": config.chunk is not None,
        "a softcap": config.softcap is not None,
        "sinks": config.sinks,
        "ALiBi": config.alibi is not None,
        "a factor of values": config.value_scale != 1.0,
        "a temperature of queries": config.query_temperature is not None,
    }
    for what, there in lacks.items():
        if there:
            raise UnsupportedError(f"layer {layer} has {what}, which latent attention does not")
    if config.rope is not None and config.rope.type in ("dynamic", "longrope"):
        raise UnsupportedError(
            f"layer {layer}: frequencies of rope type {config.rope.type!r} change with the length "
            "of a text, and latent attention here has one frequency for each pair"
        )


def refuse_linear(config: AttentionConfig, layer: int, what: str) -> None:
    """Raises UnsupportedError where keys are not a linear function of a layer's input."""
    if config.qkv_clip is not None:
        raise UnsupportedError(
            f"{what}: layer {layer} clips queries, keys and values (qkv_clip), so keys are not a "
            "linear function of the layer's input"
        )
    if config.qk_norm is not None:
        raise UnsupportedError(
            f"{what}: layer {layer} normalizes queries and keys after they are projected, so keys "
            "are not a linear function of the layer's input"
        )


def rotated_dim(config: AttentionConfig) -> int:
    """Features of a head that pairs are made of: the rotated ones; all where nothing rotates."""
    if config.rope is None or config.rope.dim is None:
        if config.head_dim % 2:
            raise UnsupportedError(f"a head of {config.head_dim} features has no pairs")
        return config.head_dim
    return config.rope.dim


def refuse_full_width(config: AttentionConfig, layer: int, what: str) -> None:
    if config.qk_norm is not None and config.qk_norm.place == "full_width":
        raise UnsupportedError(
            f"{what}: layer {layer} normalizes all heads together (qk_norm full_width), so each "
            "depends on the others"
        )
