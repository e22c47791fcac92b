"""Scores of one tile, and the care that a tile needs: folding, non-finite numbers, dropout.

Shape letters: B batch, G kv heads, R query heads per kv head (H = G · R), T queries, S keys.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from polyhead.errors import UnsupportedError
from polyhead.native.dropout import Dropout, kept
from polyhead.semantics.call import Specification
from polyhead.semantics.masks import Visibility
from polyhead.semantics.tokens import Tokens, active_capture, is_traced


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fold(x_BHTD: Tensor, num_kv_heads: int) -> Tensor:
    """``[B, H, T, D]`` as ``[B, G, R·T, D]``: the query rows that share a kv head.

    Query head h uses kv head h // R, so the R heads of a group are neighbours: MHA, GQA and MQA
    are one matrix product per kv head with R·T rows, and K and V are never expanded.
    """
    B, H, T, D = x_BHTD.shape
    return x_BHTD.reshape(B, num_kv_heads, H // num_kv_heads * T, D)


def unfold(x_BGND: Tensor, num_heads: int) -> Tensor:
    """``[B, G, R·T, D]`` back as ``[B, H, T, D]``."""
    B, G, N, D = x_BGND.shape
    return x_BGND.reshape(B, num_heads, N * G // num_heads, D)


def tile_scores(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    spec: Specification,
    q: Tokens,
    k: Tokens,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The masked scores of a tile: (scale →) softcap → bias → mask.

    Args:
        q_BHTD: Queries in the accumulation dtype, times the scale: q is smaller than the scores.
        k_BGSD: Keys in the accumulation dtype.
        spec: The attention specification.
        q: The tile's queries.
        k: The tile's keys.

    Returns:
        Scores ``[B, H, T, S]``, −∞ where masked; the softcapped scores before bias and mask (None
        without softcap), which its derivative needs; and the mask drawn (None where all is
        visible).
    """
    scores = unfold(fold(q_BHTD, k_BGSD.shape[1]) @ k_BGSD.mT, q_BHTD.shape[1])
    capped = None
    if spec.softcap is not None:
        scores = capped = torch.tanh(scores / spec.softcap) * spec.softcap
    if spec.bias is not None:
        scores = scores + spec.bias.tile(q, k, scores)
    visible = None
    if spec.mask is not None and spec.mask.classify(q, k) is not Visibility.ALL:
        visible = spec.mask.visible(q, k, scores.device)
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores, capped, visible


def zero_nonfinite(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values with every NaN and Inf replaced by 0, and which keys had any.

    What is masked must not reach arithmetic: 0 · NaN is NaN, so a masked key with garbage in it
    would poison rows that may not see it. Rows that may see it are made NaN (``sees_nonfinite``),
    and take no part in gradients. Without a mask nothing is hidden, and nothing is replaced.

    Returns:
        k, v, and ``[B, G, S]`` True for keys with content that is not finite; None where all is.
    """
    # A sum is finite only if every term is: one cheap pass answers for nearly every call.
    if k.is_cpu and not (is_traced(k) or is_traced(v) or active_capture()):
        wide = accumulation_dtype(k.dtype)  # float16's own sum could overflow
        sums = k.detach().sum(dtype=wide) + v.detach().sum(dtype=wide)
        if math.isfinite(sums.item()):
            return k, v, None
    good_k, good_v = k.isfinite(), v.isfinite()
    bad = ~(good_k.all(dim=-1) & good_v.all(dim=-1))
    return k.where(good_k, 0.0), v.where(good_v, 0.0), bad


def autocast_enabled(x: Tensor) -> bool:
    """Whether autocast is on for the device of ``x``."""
    if x.is_cpu:  # reading a device's name takes longer than this check
        return torch.is_autocast_enabled("cpu")
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def full_precision(x: Tensor) -> AbstractContextManager[None]:
    """No autocast inside: a kernel chooses its own precision."""
    if autocast_enabled(x):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


def is_distributed(*tensors: Tensor | None) -> bool:
    """Whether one of these is a DTensor."""
    if torch.compiler.is_compiling() or all(type(x) is Tensor for x in tensors):
        return False
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, done where one exists
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def implicit_replication(*tensors: Tensor | None) -> AbstractContextManager[None]:
    """Enables DTensor implicit replication if any argument is a DTensor.

    Raises:
        UnsupportedError: One has no elements: torch's reshape of an empty DTensor never returns.
            Inside: heads are sharded, and torch is older than 2.12.
    """
    if not is_distributed(*tensors):
        return nullcontext()
    if not all(x is None or x.numel() for x in tensors):
        raise UnsupportedError("a DTensor without elements cannot be reshaped by torch: got one")
    return _replicating()


@contextmanager
def _replicating() -> Iterator[None]:
    from torch.distributed.tensor.experimental import implicit_replication

    try:
        with implicit_replication():
            yield
    except RuntimeError as error:
        if "Attempted to flatten multiple dimensions" not in str(error):
            raise
        raise UnsupportedError(
            "DTensors whose heads are sharded need torch 2.12 or newer, which flattens them: this "
            f"is torch {torch.__version__}"
        ) from error


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes on one thread: sums divided among threads round by the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def reproducibly(spec: Specification, x: Tensor) -> AbstractContextManager[None]:
    """The same bits for any number of threads, where the specification asks for that.

    Threads cannot be set inside a graph: what is compiled keeps those that it runs with.
    """
    if spec.deterministic and x.is_cpu and not torch.compiler.is_compiling():
        return one_thread()
    return nullcontext()


def sees_nonfinite(visible: Tensor | None, bad_BGS: Tensor, num_heads: int) -> Tensor:
    """``[B, H, 1 or T]`` True for query rows that see a key with content that is not finite."""
    bad_BHS = bad_BGS.repeat_interleave(num_heads // bad_BGS.shape[1], dim=1)
    if visible is None:
        return bad_BHS.any(dim=-1, keepdim=True)
    return (visible & bad_BHS[:, :, None, :]).any(dim=-1)


def dropout_of(spec: Specification, q: Tokens, k: Tokens) -> Dropout:
    """The dropout of the weights of these queries and keys."""
    if spec.seed is None:
        raise ValueError("dropout needs a seed")
    first = 0 if spec.heads is None else spec.heads[0]
    return Dropout(spec.dropout_p, (spec.seed + first).view(1), q.places.low, k.places.low)


def keep_weights(spec: Specification, shape: torch.Size, q: Tokens, k: Tokens) -> Tensor:
    """Which weights of a tile dropout keeps, ``[B, H, T, S]`` (``native.dropout.kept``)."""
    p, seed, _, _ = dropout_of(spec, q, k)
    places = q.place_tensor(seed.device), k.place_tensor(seed.device)
    all_heads = shape[1] if spec.heads is None else spec.heads[1]
    return kept(p, seed, (shape[0], shape[1]), *places, all_heads=all_heads)
