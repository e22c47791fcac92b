"""The mode of torch's dispatcher that sends every operation its way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from polyhead import native
from polyhead.errors import UnsupportedError
from polyhead.kernels.batch_invariant import additions, products, reductions
from polyhead.kernels.batch_invariant.elements import Way, as_it_is, by_element, only_whole_numbers
from polyhead.native.batch_invariant import enabled

_EXACT_NAMES = """
    abs alias all amax amin any arange argmax argmin argsort as_strided bitwise_and bitwise_not
    bitwise_or bitwise_xor bucketize cat ceil clamp clamp_max clamp_min clone constant_pad_nd
    copy count_nonzero cummax cummin detach diagonal div embedding empty empty_like
    empty_strided eq equal expand expand_as exponential eye fill flatten flip floor floor_divide
    fmod full full_like gather ge gt index index_copy index_fill index_select isfinite
    isin isinf isnan isneginf isposinf le lift_fresh linspace logical_and logical_not logical_or
    logical_xor lt masked_fill masked_scatter masked_select max maximum min minimum mul
    multinomial narrow ne neg new_empty new_empty_strided new_full new_ones new_zeros nonzero
    normal one_hot ones ones_like permute rand rand_like randint randn randn_like random
    randperm reciprocal relu remainder repeat repeat_interleave reshape resize roll round
    scalar_tensor scatter searchsorted select select_backward select_scatter set sgn sign signbit
    slice slice_backward slice_scatter sort split split_with_sizes sqrt squeeze stack t take
    topk transpose tril triu
    trunc unbind unfold uniform unique_consecutive unsafe_split unsqueeze view view_as_complex
    view_as_real where zero zeros zeros_like _local_scalar_dense _reshape_alias
    _to_copy _unsafe_index _unsafe_view
"""
_BY_ELEMENT_NAMES = """
    elu_backward gelu_backward hardtanh_backward leaky_relu_backward mish_backward sigmoid_backward
    silu_backward softplus_backward tanh_backward threshold_backward
    acos acosh addcdiv addcmul asin asinh atan atan2 atanh celu cos cosh elu erf erfc erfinv exp
    exp2 expm1 gelu hardsigmoid hardswish hardtanh leaky_relu lerp log log10 log1p log2 logaddexp
    logit mish pow rsqrt sigmoid silu sin sinc sinh softplus square tan tanh threshold xlogy
"""
_MOVED_NAMES = """
    allgather all_gather_into_tensor alltoall_base broadcast wait_tensor _allgather_base
    _wrap_tensor_autograd
"""
_EXACT = frozenset(_EXACT_NAMES.split())
_MOVED = frozenset(_MOVED_NAMES.split())
"""Collectives of ``c10d`` and ``_c10d_functional`` that move numbers and add none."""
_BY_ELEMENT = frozenset(_BY_ELEMENT_NAMES.split())


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Within the block, the same tokens give the same bits, whatever surrounds them.

    The logits of a row do not depend on its neighbours in the batch, on how a prompt is cut into
    chunks, on whether a token was read or decoded, on the number of threads, on rings or pages.
    It holds for this thread, on a CPU in float32, bfloat16 and float16, on one instruction set.
    Quantized caches are refused.

    Gradients, where ``backward`` runs within the block too: those of a row's activations do not
    depend on its neighbours and threads, those of weights on nothing but the rows of the batch, so
    a batch cut into given parts whose gradients are added up outside in one order gives one result.

    Example:
        >>> with ph.batch_invariant():
        ...     alone = model(ids[:1])
        ...     assert torch.equal(model(ids)[:1], alone)

    Raises:
        UnsupportedError: On entering, where there is no native code; within the block, for what
            cannot keep its bits, by name.
    """
    if (why := native.unavailable()) is not None:
        raise UnsupportedError(f"batch_invariant() needs polyhead's native code: {why}")
    with enabled(), _OneOrder():  # type: ignore[no-untyped-call]
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


_ways: dict[Any, Way] = {}


def _way_of(func: Any) -> Way:
    name = func.overloadpacket.__name__
    if func.namespace in ("aten", "prims", "prim"):
        plain = name if name.startswith("__") else name.rstrip("_")
        if plain in _EXACT:
            return as_it_is
        if plain in _BY_ELEMENT:
            return by_element
        if plain in _OWN:
            return _own(plain, in_place=name != plain)
    if func.namespace in ("c10d", "_c10d_functional") and name.rstrip("_") in _MOVED:
        return as_it_is
    if func.namespace == "polyhead" and name in ("attention", "attention_backward"):
        return as_it_is  # native code, which was told
    if func._can_decompose():
        return _decomposed
    return only_whole_numbers


def _decomposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _OneOrder():  # type: ignore[no-untyped-call]
        return func.decompose(*args, **kwargs)


def _own(name: str, *, in_place: bool) -> Way:
    compute = _OWN[name]

    def way(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = compute(func, args, kwargs)
        return args[0].copy_(made) if in_place and made is not args[0] else made

    return way


_OWN: dict[str, Way] = {
    "add": additions.added,
    "addmm": products.addmm,
    "baddbmm": products.baddbmm,
    "bmm": products.bmm,
    "convolution": products.convolution,
    "cumsum": reductions.along,
    "dot": products.dot,
    "embedding_dense_backward": reductions.along,
    "index_add": additions.index_added,
    "index_put": additions.index_put,
    "linalg_vector_norm": reductions.vector_norm,
    "linear": products.linear,
    "logsumexp": reductions.logsumexp,
    "mean": reductions.average,
    "mm": products.mm,
    "mv": products.mv,
    "native_layer_norm": reductions.layer_norm,
    "native_layer_norm_backward": reductions.layer_norm_backward,
    "rsub": additions.added,
    "scatter_add": reductions.along,
    "sub": additions.added,
    "sum": reductions.total,
    "_index_put_impl": additions.index_put,
    "_log_softmax": reductions.log_softmax,
    "_log_softmax_backward_data": reductions.log_softmax_backward,
    "_softmax": reductions.softmax,
    "_softmax_backward_data": reductions.softmax_backward,
}
