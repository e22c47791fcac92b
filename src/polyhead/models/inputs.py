"""Checks of a Transformer's inputs, before anything is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.caches import Evicting, ModelCache, Quantized
from polyhead.config import LayerConfig, TransformerConfig
from polyhead.config.layout import EMBEDDING, GLOBAL_TOKENS, SEGMENTS
from polyhead.errors import ContextLengthError, InputError, UnsupportedError
from polyhead.layers.attention_parts import check_coordinates
from polyhead.layers.handed import Handed
from polyhead.native import batch_invariant
from polyhead.semantics.tokens import active_capture, is_of, is_traced


def check_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    """Raises unless ``ids`` are ``[B, T]`` whole numbers of the vocabulary, at least one of them.

    Raises:
        TypeError: Not a tensor of whole numbers.
        InputError: Another shape, no tokens, or an id outside the vocabulary.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{name} must be a tensor of int64 or int32: got {got}")
    if ids.ndim != 2 or not ids.numel():
        raise InputError(
            f"{name} must be [B, T] with at least one token: got shape {list(ids.shape)}"
        )
    if is_traced(ids) or active_capture() is not None:
        return
    if ids.numel() == 1:
        low = high = ids.item()
    else:
        low, high = torch.stack(ids.aminmax()).tolist()  # one transfer from a device
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"{name} must be 0 to {vocab_size - 1} (vocab_size={vocab_size}): got "
            f"{low if low < 0 else high}"
        )


def sent(x: Tensor, device: torch.device) -> Tensor:
    """x on a device, which is not waited for: ids that come from the CPU are checked there."""
    if x.device == device:
        return x
    if x.is_cpu and device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def check_caching(
    config: TransformerConfig, quantized: Quantized | None, evicting: Evicting | None = None
) -> None:
    """Raises unless a model can have a new cache.

    Raises:
        ValueError: An encoder.
        UnsupportedError: A layer that computes whole texts, or a cache that is quantized or evicts
            under ``batch_invariant()``.
    """
    if config.kind == "encoder":
        raise ValueError(NO_CACHE)
    for i, layer in enumerate(config.layers):
        if layer.attention.one_pass is not None:
            raise UnsupportedError(
                f"layer {i}, {layer.attention.layout}, has no cache: {layer.attention.one_pass}"
            )
    if batch_invariant.is_enabled() and quantized is not None:
        raise UnsupportedError(
            "batch_invariant() cannot keep the bits of a quantized cache: whether a key is exact "
            "when it is read depends on how the prompt is cut into chunks"
        )
    if batch_invariant.is_enabled() and evicting is not None:
        raise UnsupportedError(
            "batch_invariant() cannot keep the bits of a cache that evicts: which keys stay "
            "depends on how the prompt is cut into chunks"
        )


def check_cache(cache: object) -> None:
    """Raises TypeError unless ``cache`` is the cache of a model."""
    if not isinstance(cache, ModelCache):
        got = f"the class {cache.__name__}" if isinstance(cache, type) else type(cache).__name__
        raise TypeError(f"cache must be what new_cache() gives, or None: got {got}")


def check_positions(
    positions: Tensor | None,
    first: int,
    ids: Tensor,
    max_positions: int,
    padding: bool = False,
    *,
    several: bool = False,
) -> None:
    """Raises unless every token of ``ids`` stands at a position below ``max_positions``.

    Args:
        positions: ``[T]`` or ``[B, T]``, or None: they follow on from ``first``.
        first: The first token's position where there are no explicit ones.
        ids: ``[B, T]``.
        max_positions: Length of the model's context.
        padding: Whether positions below 0 are understood, as padding that a cache leaves out.
        several: Whether they are ``[C, B, T]`` of C coordinates, whose shape was checked.

    Raises:
        ContextLengthError: A position beyond the context.
        TypeError: Not a tensor of whole numbers.
        ValueError: Positions below 0 without ``padding``, or a shape that does not belong
            to ``ids``.
    """
    B, T = ids.shape
    if positions is None:
        if first + T > max_positions:
            before = f" after the {first} in the cache" if first else ""
            raise ContextLengthError(
                f"the model's context is {max_positions} tokens: got {T}{before}"
            )
        return
    if not isinstance(positions, Tensor) or positions.is_floating_point():
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"positions must be a tensor of whole numbers: got {got}")
    if not several and not is_of(positions, B, T):
        raise ValueError(
            f"positions must be [T] = [{T}] or [B, T] = [{B}, {T}]: got {list(positions.shape)}"
        )
    if is_traced(positions) or active_capture() is not None:
        return
    low, high = (int(end) for end in positions.aminmax())
    if low < 0 and not padding:
        raise ValueError(
            f"positions must be at least 0: got {low}; below 0 stands padding, which a cache "
            "leaves out and a call without one must hide by a mask"
        )
    if high >= max_positions:
        raise ContextLengthError(
            f"the model's context is {max_positions} tokens, positions 0 to {max_positions - 1}: "
            f"got position {high}"
        )


def global_tokens_of_call(layers: tuple[LayerConfig, ...], tokens: Tensor, ids: Tensor) -> Handed:
    """What a call hands on to an encoder's layers.

    Args:
        layers: Configurations of the layers.
        tokens: ``[B, T]`` bool, the global ones.
        ids: ``[B, T]``.

    Raises:
        TypeError: Not a tensor of bool.
        ValueError: No layer reads them, or a shape that does not belong to ``ids``.
    """
    if not any(GLOBAL_TOKENS in layer.attention.reads for layer in layers):
        raise ValueError("global_tokens belong to windows with global tokens: no layer has one")
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.bool:
        got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"global_tokens must be a tensor of bool: got {got}")
    if tokens.shape != ids.shape:
        raise ValueError(
            f"global_tokens must be [B, T] = {list(ids.shape)} as ids: got {list(tokens.shape)}"
        )
    return Handed(0, {(EMBEDDING, GLOBAL_TOKENS): sent(tokens, ids.device)})


def segments_of_call(segments: Tensor | None, ids: Tensor) -> Handed:
    """What a call hands on to layers that score segments.

    Args:
        segments: ``[B, T]`` whole numbers, equal for tokens of one segment; None: no such scores.
        ids: ``[B, T]``.

    Raises:
        ValueError: A shape that does not belong to ``ids``.
    """
    if segments is not None:
        if segments.shape != ids.shape:
            raise ValueError(
                f"segments must be [B, T] = {list(ids.shape)} as ids: got {list(segments.shape)}"
            )
        segments = sent(segments, ids.device)
    return Handed(0, {(EMBEDDING, SEGMENTS): segments})


NO_CACHE = "an encoder sees all tokens at once: it takes no cache"


def check_call(
    config: TransformerConfig,
    ids: Tensor,
    positions: Tensor | None,
    start: int,
    cache: ModelCache | None,
    last: int | None,
) -> None:
    """Checks the arguments of a model's call that do not concern an encoder.

    Args:
        config: Configuration of the model.
        ids: The tokens, or what the embedding's frontend reads.
        positions: Positions of the caller, or None.
        start: Tokens in the cache.
        cache: Cache of the caller, or None.
        last: Number of last tokens wanted, or None.

    Raises:
        InputError: No tokens, or an id outside the vocabulary.
        ContextLengthError: More tokens than the model's context holds.
        ValueError: A cache for another kind of model or number of layers, no last token,
            positions behind a soft prompt, or coordinates that the layers' rope does not have.
        UnsupportedError: Coordinates for a layer that takes one position of each token.
    """
    if positions is not None and config.embedding.soft_prompt is not None:
        raise ValueError(
            f"tokens behind a soft prompt follow on from it: got positions {list(positions.shape)}"
        )
    several = isinstance(positions, Tensor) and positions.ndim == 3
    if positions is not None and several:
        _check_coordinates(config, ids, positions)
    if cache is not None and cache.coordinates and cache.length:
        _check_goes_on(cache, positions)
    if config.embedding.frontend is None:
        check_ids("ids", ids, config.vocab_size)
        context = config.max_positions + (0 if cache is None else cache.lost_positions)
        padded = cache is not None and not several
        check_positions(positions, start, ids, context, padded, several=several)
    if last is not None and last < 1:
        raise ValueError(f"last must be at least 1 token, or None for all: got {last}")
    if cache is None:
        return
    if config.kind == "encoder":
        raise ValueError(NO_CACHE)
    if len(cache.layers) != len(config.layers):
        raise ValueError(
            f"the cache was made for {len(cache.layers)} layers, the model has {len(config.layers)}"
        )


def _check_coordinates(config: TransformerConfig, ids: Tensor, positions: Tensor) -> None:
    """Raises unless every layer that reads positions takes these, ``[C, B, T]``."""
    said = f"positions {list(positions.shape)} have several coordinates"
    turned = [layer for layer in config.layers if layer.attention.rope is not None]
    if not turned or ids.ndim != 2:
        raise ValueError(f"{said}: no layer of this model rotates tokens by them")
    read = {
        "learned or sinusoidal positions": config.embedding.positions,
        "relative_bias": config.relative_bias,
        "relative_embedding": config.relative_embedding,
        "a funnel": config.funnel,
        "out_convolution": next((each.out_convolution for each in turned), None),
    }
    for name, part in read.items():
        if part is not None:
            raise UnsupportedError(f"{said}: {name} of this model reads one of each token")
    for attention in (layer.attention for layer in config.layers):
        named = (getattr(attention, name, None) for name in ("rope", "alibi", "query_temperature"))
        if any(part is not None for part in named):
            check_coordinates(attention, positions, *ids.shape)


def _check_goes_on(cache: ModelCache, positions: Tensor | None) -> None:
    """Raises where tokens behind others at several coordinates have no such themselves."""
    if positions is None or positions.ndim != 3:
        got = "none" if positions is None else list(positions.shape)
        raise ValueError(
            f"this cache holds tokens at {cache.coordinates} coordinates, which do not count them: "
            f"give positions [{cache.coordinates}, B, T] in each call, also of text (equal "
            f"coordinates, from the greatest so far + 1): got {got}"
        )


def check_encoder_call(config: TransformerConfig, ids: Tensor, positions: Tensor | None) -> None:
    """The same of what an encoder-decoder's encoder reads."""
    encoder = config.encoder
    if (encoder.embedding or config.embedding).frontend is None:
        check_ids("encoder_ids", ids, encoder.vocab_size or config.vocab_size)
        check_positions(positions, 0, ids, encoder.max_positions or config.max_positions)
