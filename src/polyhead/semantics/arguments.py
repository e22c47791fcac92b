"""Turns a caller's arguments into a ``Call``; every argument is checked, and errors name it."""

from __future__ import annotations

import math
from typing import TypedDict

import torch
from torch import Tensor

from polyhead._utils.checks import check_bool, check_number, check_probability, is_finite
from polyhead.semantics.biases import Bias, TensorBias
from polyhead.semantics.call import Call, Specification, simplify_mask
from polyhead.semantics.masks import Mask, bare_tensor_message
from polyhead.semantics.masks.algebra import called
from polyhead.semantics.normalizer import Normalizer
from polyhead.semantics.scores import autocast_enabled
from polyhead.semantics.sources import DenseSource, KeyValueSource
from polyhead.semantics.tokens import Tokens, is_of


class AttentionOptions(TypedDict, total=False):
    """What ``attention`` takes besides q, k, v and ``return_lse``, for callers that pass it on."""

    mask: Mask | None
    bias: Bias | Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    q_positions: Tensor | None
    kv_positions: Tensor | None
    dropout_p: float
    generator: torch.Generator | None
    normalizer: Normalizer | None
    kernel: str


def call_of(
    q: Tensor,
    k: Tensor | KeyValueSource,
    v: Tensor | None,
    mask: Mask | None,
    bias: Bias | Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    q_positions: Tensor | None,
    kv_positions: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    return_lse: bool,
    normalizer: Normalizer | None = None,
) -> Call:
    """Checks every argument and puts them into a call."""
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a tensor: got {type(q).__name__}")
    if autocast_enabled(q):
        q, k, v = _lowered(q, k, v)
    source = _source(k, v, kv_positions)
    _check_shapes(q, source)
    B, H, T, D = q.shape
    S = source.tokens.length
    if mask is not None:
        if not isinstance(mask, Mask):
            raise TypeError(_no_mask(mask))
        mask.check(B, H, T, S)
    if bias is not None:
        if isinstance(bias, Tensor):
            bias = TensorBias(bias)
        elif not isinstance(bias, Bias):
            raise TypeError(f"bias must be a Bias, a tensor or None: got {_named(bias)}")
        elif not q.is_cpu:
            bias = bias.on(q.device)
        bias.check(B, H, T, S)
    if scale is None:
        scale = 1.0 / math.sqrt(D)
    elif type(scale) is not float or not is_finite(scale):
        check_number("scale", scale)
    if softcap is not None:
        check_number("softcap", softcap, above=0, hint=", or None for off")
    if sinks is not None:
        if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
            raise TypeError(f"sinks must be a floating-point tensor or None: got {_named(sinks)}")
        if sinks.shape not in ((H,), (1, H, T), (B, H, T)):
            raise ValueError(
                f"sinks must be [H] = [{H}] or [1 or B, H, T] with B = {B}, T = {T}: got shape "
                f"{list(sinks.shape)}"
            )
        if sinks.device != q.device:
            raise ValueError(f"sinks must be on the device of q, {q.device}: got {sinks.device}")
    if return_lse is not False:
        check_bool("return_lse", return_lse)
    if normalizer is not None:
        _check_normalizer(normalizer, q, sinks, return_lse)
    mask = with_source_mask(mask, source)
    positional = mask is not source.mask or bias is not None
    if source.mask is not None and q_positions is None and positional:
        raise ValueError(
            "q_positions is needed with a source whose rows differ in what they hold (a padded or "
            "ragged batch): got None, and its keys stand in no order that a default could follow"
        )
    q_tokens = query_tokens(q, source, q_positions)
    mask, visibility = simplify_mask(mask, q_tokens, source.tokens)
    spec = Specification(
        scale, mask, bias, softcap, sinks, dropout_p, seed,
        torch.are_deterministic_algorithms_enabled(), None, normalizer,
    )  # fmt: skip
    requires_grad = torch.is_grad_enabled() and (
        q.requires_grad
        or source.requires_grad
        or (bias is not None and any(x.requires_grad for x in bias.tensors))
        or (sinks is not None and sinks.requires_grad)
        or (normalizer is not None and any(x.requires_grad for x in normalizer.tensors))
    )
    return Call(
        q, source, spec, q_tokens, return_lse or sinks is not None, visibility, requires_grad
    )


def _check_normalizer(
    normalizer: Normalizer, q: Tensor, sinks: Tensor | None, return_lse: bool
) -> None:
    if not isinstance(normalizer, Normalizer):
        said = "normalizer must be a Normalizer or None (the softmax)"
        raise TypeError(f"{said}: got {_named(normalizer)}")
    if sinks is not None:
        raise ValueError(f"sinks join the softmax's denominator: got them with {normalizer!r}")
    if return_lse:
        raise ValueError(f"a log-sum-exp is the softmax's: got return_lse=True with {normalizer!r}")
    for x in normalizer.tensors:
        if x.device != q.device:
            raise ValueError(
                f"{normalizer!r} must be on the device of q, {q.device}: got {x.device}"
            )
    normalizer.check(*q.shape[:3])


def _no_mask(mask: object) -> str:
    if isinstance(mask, Tensor):
        return bare_tensor_message("mask is a bare tensor")
    said = "mask must be a mask expression or None"
    if isinstance(mask, type) and issubclass(mask, Mask):
        return f"{said}: got the class {mask.__name__}; {called(mask)}"
    return f"{said}: got {type(mask).__name__}"


def _named(value: object) -> str:
    """The argument's type, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def with_source_mask(mask: Mask | None, source: KeyValueSource) -> Mask | None:
    """A call's mask, and the source's own, which hides keys that are not tokens of a batch row.

    Raises:
        ValueError: A mask that counts places, of which such a source keeps no order.
    """
    if source.mask is None or mask is source.mask:
        return mask
    if mask is None:
        return source.mask
    counting = next((part for part in mask.walk() if part.compares == "places"), None)
    if counting is not None:
        raise ValueError(
            f"mask={counting!r} counts places, and the rows of this source differ in what they "
            "hold (a padded or ragged batch), so its keys are in no order of place; use masks over "
            "positions: Causal, Window, Prefix"
        )
    # Such keys have positions after any query, so causal order hides them already.
    return mask if mask.is_causal() else mask & source.mask


def _lowered(
    q: Tensor, k: Tensor | KeyValueSource, v: Tensor | None
) -> tuple[Tensor, Tensor | KeyValueSource, Tensor | None]:
    """Under autocast q, k and v take its dtype, as for torch's own attention; float64 stays.

    A key/value source keeps what it holds, and q follows it.
    """
    if isinstance(k, KeyValueSource):
        return q.to(k.dtype), k, v
    dtype = torch.get_autocast_dtype(q.device.type)

    def lowered(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype)

    return lowered(q), lowered(k), None if v is None else lowered(v)


def _source(
    k: Tensor | KeyValueSource, v: Tensor | None, positions: Tensor | None
) -> KeyValueSource:
    # Tensors are asked for first: isinstance of an abstract class is slow.
    if not isinstance(k, Tensor) and isinstance(k, KeyValueSource):
        if v is not None or positions is not None:
            raise TypeError(
                "a key/value source brings its own values and positions: leave out v and "
                "kv_positions"
            )
        return k
    if not isinstance(k, Tensor) or not isinstance(v, Tensor):
        raise TypeError(
            f"k and v must be tensors, or k a key/value source: got {type(k).__name__} and "
            f"{type(v).__name__}"
        )
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k must be [B, G, S, D] and v [B, G, S, V] with the same B, G, S: got {list(k.shape)} "
            f"and {list(v.shape)}"
        )
    if k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            f"k and v must share dtype and device: got {k.dtype} on {k.device} and {v.dtype} on "
            f"{v.device}"
        )
    if positions is not None:
        _check_positions("kv_positions", positions, k.shape[0], k.shape[2], "S")
    return DenseSource(k, v, positions)


def _check_shapes(q: Tensor, source: KeyValueSource) -> None:
    if q.ndim != 4:
        raise ValueError(f"q must be [B, H, T, D]: got shape {list(q.shape)}")
    B, H, _, D = q.shape
    G = source.num_kv_heads
    if source.batch != B:
        raise ValueError(f"q and k must share the batch B: got {B} and {source.batch}")
    if source.key_dim != D or D == 0:
        raise ValueError(f"q and k must share a head size D ≥ 1: got {D} and {source.key_dim}")
    if G == 0 or H % G:
        raise ValueError(
            f"kv heads G must divide query heads H: got H = {H} in q and G = {G} in k and v"
        )
    if not q.is_floating_point() or q.element_size() < 2:
        raise ValueError(f"q must be float64, float32, bfloat16 or float16: got {q.dtype}")
    if q.dtype != source.dtype or q.device != source.device:
        raise ValueError(
            f"q, k and v must share dtype and device: got q {q.dtype} on {q.device}, k and v "
            f"{source.dtype} on {source.device}"
        )


def _check_positions(name: str, positions: Tensor, batch: int, length: int, letter: str) -> None:
    if not isinstance(positions, Tensor) or positions.is_floating_point():
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"{name} must be a tensor of whole numbers: got {got}")
    if not is_of(positions, batch, length):
        raise ValueError(
            f"{name} must be [{letter}] = [{length}] or [B, {letter}] = [{batch}, {length}]: got "
            f"{list(positions.shape)}"
        )


def query_tokens(q: Tensor, source: KeyValueSource, positions: Tensor | None) -> Tokens:
    """The queries: the last stands at the place, and by default the position, of the last key."""
    B, _, T, _ = q.shape
    keys = source.tokens
    shift = keys.start + keys.shift + keys.length - T
    if positions is not None:
        _check_positions("q_positions", positions, B, T, "T")
    elif keys.positions is not None:
        if keys.length < T:
            raise ValueError(
                f"q_positions is needed with kv_positions where there are more queries (T = {T}) "
                f"than keys (S = {keys.length})"
            )
        positions = keys.positions[..., keys.length - T :]
    return Tokens.of(T, shift=shift, positions=positions)


def dropout_seed(q: Tensor, dropout_p: float, generator: torch.Generator | None) -> Tensor | None:
    if type(dropout_p) is not float or not 0.0 <= dropout_p < 1.0:
        check_probability("dropout_p", dropout_p)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None: got {_named(generator)}")
    if dropout_p == 0.0:
        return None
    device = generator.device if generator is not None else q.device
    return torch.randint(1 << 31, (), generator=generator, device=device).to(q.device)
