"""The same bits everywhere: what a row of a batch gives depends on its own tokens alone.

Sums of numbers depend on their order, and libraries choose it by the shape of a call, the number of
threads and the place of a number in memory. Within ``reproducible()`` every operation of torch that
polyhead's layers leave to it passes here, and goes one of five ways:

    exact          one rounding or none (additions, comparisons, copies): torch's own
    by element     functions such as exp, whose vectors and remainders round differently: in whole
                   vectors alone
    products       native code, which adds up every row in one order
    reductions     sums along a dimension, halved again and again: an order of its length alone
    anything else  refused by name

Attention, norms and feed-forward networks go to native code without passing here, and attention by
rows (``Extras.by_row``). What batch-invariant kernels do on GPUs (Thinking Machines, "Defeating
nondeterminism in LLM inference", 2025), on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyhead import native
from polyhead.errors import UnsupportedError
from polyhead.native import by_row
from polyhead.native.arguments import DTYPES, Weight

_PIECE = 16_384
"""Numbers that torch computes in one thread."""
_VECTORS = 128
"""A multiple of the numbers that a step of torch's loops takes, for every dtype."""

_EXACT_NAMES = """
    abs alias all amax amin any arange argmax argmin argsort as_strided bitwise_and bitwise_not
    bitwise_or bitwise_xor bucketize cat ceil clamp clamp_max clamp_min clone constant_pad_nd
    copy count_nonzero cummax cummin detach diagonal div embedding empty empty_like
    empty_strided eq equal expand expand_as exponential eye fill flatten flip floor floor_divide
    fmod full full_like gather ge gt index index_copy index_fill index_put index_select isfinite
    isin isinf isnan isneginf isposinf le lift_fresh linspace logical_and logical_not logical_or
    logical_xor lt masked_fill masked_scatter masked_select max maximum min minimum mul
    multinomial narrow ne neg new_empty new_empty_strided new_full new_ones new_zeros nonzero
    normal one_hot ones ones_like permute rand rand_like randint randn randn_like random
    randperm reciprocal relu remainder repeat repeat_interleave reshape resize roll round
    scalar_tensor scatter searchsorted select select_scatter set sgn sign signbit slice
    slice_scatter sort split split_with_sizes sqrt squeeze stack t take topk transpose tril triu
    trunc unbind unfold uniform unique_consecutive unsafe_split unsqueeze view view_as_complex
    view_as_real where zero zeros zeros_like _index_put_impl _local_scalar_dense _reshape_alias
    _to_copy _unsafe_index _unsafe_view
"""
_BY_ELEMENT_NAMES = """
    acos acosh addcdiv addcmul asin asinh atan atan2 atanh celu cos cosh elu erf erfc erfinv exp
    exp2 expm1 gelu hardsigmoid hardswish hardtanh leaky_relu lerp log log10 log1p log2 logaddexp
    logit mish pow rsqrt sigmoid silu sin sinc sinh softplus square tan tanh threshold xlogy
"""
_EXACT = frozenset(_EXACT_NAMES.split())
_BY_ELEMENT = frozenset(_BY_ELEMENT_NAMES.split())

_Way = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def reproducible() -> Iterator[None]:
    """Within the block, the same tokens give the same bits, whatever surrounds them.

    The logits of a row do not depend on its neighbours in the batch, on how a prompt is cut into
    chunks, on whether a token was read or decoded, on the number of threads, on pages. It holds for
    this thread, for inference on a CPU (gradients are refused) in float32, bfloat16 and float16,
    on one instruction set. Rings are refused: ``new_cache`` makes dense caches here.

    Example:
        >>> with ph.reproducible():
        ...     alone = model(ids[:1])
        ...     assert torch.equal(model(ids)[:1], alone)

    Raises:
        UnsupportedError: On entering, where there is no native code; within the block, for what
            cannot keep its bits, by name.
    """
    if (why := native.unavailable()) is not None:
        raise UnsupportedError(f"reproducible() needs polyhead's native code: {why}")
    with by_row.asked(), _OneOrder():  # type: ignore[no-untyped-call]
        yield


class _OneOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends every operation one of the ways above."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        way = _ways.get(func)
        if way is None:
            way = _ways[func] = _way_of(func)
        return way(func, args, kwargs or {})


_ways: dict[Any, _Way] = {}


def _way_of(func: Any) -> _Way:
    name = func.overloadpacket.__name__
    if func.namespace in ("aten", "prims", "prim"):
        plain = name if name.startswith("__") else name.rstrip("_")
        if plain in _EXACT:
            return _as_it_is
        if plain in _BY_ELEMENT:
            return _by_element
        if plain in _OWN:
            return _own(plain, in_place=name != plain)
    if func._can_decompose():
        return _decomposed
    return _only_whole_numbers


def _as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _decomposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _OneOrder():  # type: ignore[no-untyped-call]
        return func.decompose(*args, **kwargs)


def _only_whole_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whole numbers are added up exactly in any order; all else is not known to keep its bits."""
    given = torch.utils._pytree.tree_leaves((args, kwargs))
    if any(isinstance(x, Tensor) and x.is_floating_point() for x in given):
        raise UnsupportedError(
            f"reproducible() cannot keep the bits of {func}: the order in which it adds depends "
            "on more than the row; compute it outside the block"
        )
    return func(*args, **kwargs)


def _own(name: str, *, in_place: bool) -> _Way:
    compute = _OWN[name]

    def way(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = compute(func, args, kwargs)
        return args[0].copy_(made) if in_place and made is not args[0] else made

    return way


def _by_element(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of single numbers, called on whole vectors alone: each goes the same way."""
    if func._schema.is_mutable:
        plain = getattr(torch.ops.aten, func.overloadpacket.__name__.rstrip("_"))
        kwargs = dict(kwargs)
        out = kwargs.pop("out", args[0])
        return out.copy_(_in_vectors(plain, args, kwargs))
    return _in_vectors(func, args, kwargs)


def _in_vectors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensors = [x for x in args if isinstance(x, Tensor)]
    many = [x for x in tensors if x.ndim] or tensors
    shape = torch.broadcast_tensors(*many)[0].shape  # type: ignore[no-untyped-call]
    count = math.prod(shape)
    if not count:
        empty: Tensor = func(*args, **kwargs)
        return empty
    room = -count % _VECTORS
    flat = {id(x): _padded(x.expand(shape).reshape(-1), room) for x in many}
    parts = [[flat.get(id(x), x) for x in args]]
    if count + room > _PIECE:
        parts = [
            [flat[id(x)][first : first + _PIECE] if id(x) in flat else x for x in args]
            for first in range(0, count, _PIECE)
        ]
    made = [func(*part, **kwargs) for part in parts]
    return (made[0] if len(made) == 1 else torch.cat(made))[:count].view(shape)


def _padded(x: Tensor, room: int) -> Tensor:
    return torch.cat((x, x.new_ones(room))) if room else x.contiguous()


def _halved(x: Tensor) -> Tensor:
    """Sums along the last dimension, in an order that depends on its length alone."""
    if not x.shape[-1]:
        return x.new_zeros(x.shape[:-1])
    while (n := x.shape[-1]) > 1:
        half = n // 2
        y = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((y, x[..., 2 * half :]), dim=-1) if n % 2 else y
    return x[..., 0]


def _sums(x: Tensor, dims: Any, keep: bool) -> Tensor:
    """Over some dimensions, in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    chosen = range(x.ndim) if dims is None or dims == [] else [d % x.ndim for d in dims]
    rest = [d for d in range(x.ndim) if d not in chosen]
    found = _halved(wide.permute(*rest, *chosen).reshape(*(x.shape[d] for d in rest), -1))
    return found.view([1 if d in chosen else x.shape[d] for d in range(x.ndim)]) if keep else found


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not x.is_floating_point():
        return func(*args, **kwargs)
    dims = args[1] if len(args) > 1 else None
    keep = args[2] if len(args) > 2 else False
    return _sums(x, dims, keep).to(kwargs.get("dtype") or x.dtype)


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    dims = args[1] if len(args) > 1 else None
    keep = args[2] if len(args) > 2 else False
    total = _sums(x, dims, keep)
    count = x.numel() // max(1, total.numel())
    return (total / count).to(kwargs.get("dtype") or x.dtype)


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, order = args[0], args[1] if len(args) > 1 else 2
    if order != 2:
        return _only_whole_numbers(func, args, kwargs)
    dims = args[2] if len(args) > 2 else None
    keep = args[3] if len(args) > 3 else False
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return _sums(wide * wide, dims, keep).sqrt().to(kwargs.get("dtype") or x.dtype)


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim = args[0], args[1]
    weights, total = _exponentials(x, dim)
    return (weights / total).to(torch.float32 if len(args) > 2 and args[2] else x.dtype)


def _log_softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim = args[0], args[1]
    _, total = _exponentials(x, dim)
    wide = x.to(total.dtype)
    found = wide - wide.amax(dim, keepdim=True) - _by_element(_LOG, (total,), {})
    return found.to(torch.float32 if len(args) > 2 and args[2] else x.dtype)


def _logsumexp(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dims = args[0], args[1]
    keep = args[2] if len(args) > 2 else False
    most = x.amax(dims, keepdim=True)
    most = torch.where(most.isfinite(), most, torch.zeros_like(most))
    total = _sums(_by_element(_EXP, (x - most,), {}), dims, keep)
    return (_by_element(_LOG, (total,), {}) + most.view(total.shape)).to(x.dtype)


def _exponentials(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not wide.numel():
        return wide, wide.new_ones(())
    weights = _by_element(_EXP, (wide - wide.amax(dim, keepdim=True),), {})
    return weights, _sums(weights, [dim], True)


_EXP, _LOG = torch.ops.aten.exp.default, torch.ops.aten.log.default


def _layer_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, shape, weight, bias, eps = args
    dims, wide = range(-len(shape), 0), x.to(torch.promote_types(x.dtype, torch.float32))
    count = math.prod(shape)
    mean = _sums(wide, dims, True) / count
    centred = wide - mean
    scale = 1.0 / (_sums(centred * centred, dims, True) / count + eps).sqrt()
    y = centred * scale
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype), mean, scale


def _added(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x + alpha · y``: one rounding, unless alpha is another one."""
    if kwargs.get("alpha", 1) == 1:
        return func(*args, **kwargs)
    return _by_element(func, args, kwargs)


def _index_added(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each place once, as experts are added up: there is no order."""
    index = args[2]
    if index.numel() != index.unique().numel() or kwargs.get("alpha", 1) != 1:
        return _only_whole_numbers(func, args, kwargs)
    return func(*args, **kwargs)


def _along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One after another along a dimension: cumulative sums have no other order."""
    return func(*args, **kwargs)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + b``, every row with the bits that it has alone."""
    code = native.code()
    if code is None or x.dtype not in DTYPES or not x.is_cpu or weight.dtype is not x.dtype:
        raise UnsupportedError(
            "reproducible() multiplies float32, bfloat16 and float16 on a CPU: got "
            f"{x.dtype} and {weight.dtype} on {x.device}".replace("torch.", "")
        )
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if not rows.numel() or not weight.numel():
        return torch.nn.functional.linear(x, weight, bias)
    y = code.product(
        rows, [Weight(weight.contiguous(), None if bias is None else bias.contiguous())]
    )
    return y.view(*x.shape[:-1], len(weight))


def _mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _product(args[0], args[1].mT)


def _mv(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _product(args[1][None], args[0])[0]


def _dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _sums(args[0] * args[1], None, False).to(args[0].dtype)


def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _product(*args)


def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias, x, weight = args
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1:
        return _only_whole_numbers(func, args, kwargs)
    if bias.ndim == 1 and bias.shape[0] == weight.shape[1]:
        return _product(x, weight.mT, bias)
    return bias + _product(x, weight.mT)


def _bmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, y = args
    if not len(x):
        return func(*args, **kwargs)
    return torch.stack([_product(a, b.mT) for a, b in zip(x.unbind(), y.unbind(), strict=True)])


def _baddbmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1:
        return _only_whole_numbers(func, args, kwargs)
    return args[0] + _bmm(func, args[1:], {})


def _convolution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product of each window ``[C · k]`` with the weight, as patches and sound are read."""
    x, weight, bias, strides, padding, dilation, transposed, _, groups = args
    if transposed or groups != 1 or any(d != 1 for d in dilation) or weight.ndim < 3:
        return _only_whole_numbers(func, args, kwargs)
    spatial = weight.ndim - 2
    by, room = (list(sizes) * (spatial if len(sizes) == 1 else 1) for sizes in (strides, padding))
    windows = torch.constant_pad_nd(x, [side for each in reversed(room) for side in (each, each)])
    for d in range(spatial):
        windows = windows.unfold(2 + d, weight.shape[2 + d], by[d])
    places = range(2, 2 + spatial)
    rows = windows.permute(0, *places, 1, *(2 + spatial + d for d in range(spatial)))
    y = _product(rows.reshape(*rows.shape[: 1 + spatial], -1), weight.flatten(1), bias)
    return y.movedim(-1, 1)


_OWN: dict[str, _Way] = {
    "add": _added,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "bmm": _bmm,
    "convolution": _convolution,
    "cumsum": _along,
    "dot": _dot,
    "index_add": _index_added,
    "linalg_vector_norm": _vector_norm,
    "linear": _linear,
    "logsumexp": _logsumexp,
    "mean": _mean,
    "mm": _mm,
    "mv": _mv,
    "native_layer_norm": _layer_norm,
    "rsub": _added,
    "sub": _added,
    "sum": _sum,
    "_log_softmax": _log_softmax,
    "_softmax": _softmax,
}
