"""Calls drawn at random, with the pairs that each mask shows written out a second time.

Masks are trees of ``&``, ``|`` and ``~`` over every kind; keys are one tensor or what a cache
holds, of rows of one length or of several. ``drawn`` returns what ``matrix`` judges.

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import matrix
import oracle
import polyhead as ph

HEADS = [(1, 1), (2, 2), (4, 2), (6, 2), (3, 1), (8, 1)]
SIZES = [(16, 16), (32, 32), (64, 64), (24, 16), (40, 40), (80, 80), (128, 128)]
QUERIES = [1, 1, 3, 8, 17, 33, 70]
KEYS = [5, 17, 33, 64, 70, 129, 257, 300]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16]
CACHES: dict[str, Callable[[], Any]] = {
    "dense": ph.DenseCache,
    "paged": lambda: ph.PagedCache(16),
    "ring": lambda: ph.RingCache(512),
}


class Axes(NamedTuple):
    """Positions ``[B, T]`` and ``[B, S]``, and places ``[T]`` and ``[S]``."""

    q: np.ndarray
    k: np.ndarray
    q_place: np.ndarray
    k_place: np.ndarray


Drawn = tuple[ph.Mask, np.ndarray]
"""A mask and, written separately, the pairs ``[B or 1, H or 1, T, S]`` that it shows."""


@dataclass
class RandomCall:
    """A call, and what it means.

    Attributes:
        built: Its tensors, arguments and meaning.
        words: What it is, for messages.
        cache: Stores keys and values in parts, or None.
        positions: ``[B, S]`` of the keys in a cache; -1: not a token of the row.
    """

    built: matrix.Built
    words: str
    cache: Any = None
    positions: Tensor | None = None


def drawn(seed: int) -> RandomCall:
    """The call of a number."""
    dice, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)

    def one(values: Any) -> Any:
        return values[int(dice.integers(len(values)))]

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    (H, G), (D, V), T, S = one(HEADS), one(SIZES), one(QUERIES), one(KEYS)
    B, dtype = int(dice.integers(1, 3)), one(DTYPES)
    cache = one([None, None, None, *CACHES])
    if cache is not None:
        T = min(T, S)
    tensors = {"q": numbers(B, H, T, D), "k": numbers(B, G, S, D), "v": numbers(B, G, S, V)}
    arguments: dict[str, Any] = {
        "softcap": one([None, None, 4.0]), "scale": one([None, None, 0.3]),
    }  # fmt: skip
    q_place, k_place = np.arange(S - T, S), np.arange(S)
    at = Axes(np.tile(q_place, (B, 1)), np.tile(k_place, (B, 1)), q_place, k_place)
    real, stored = np.ones((B, S), bool), None
    if cache is not None and one([False, True]):  # rows of different lengths
        lengths = np.array([S, *dice.integers(max(1, S // 3), S + 1, B - 1)])
        real = k_place < lengths[:, None]
        k = np.where(real, k_place, -1)
        at = at._replace(k=k, q=lengths[:, None] - T + np.arange(T))
        arguments["q_positions"], stored = torch.from_numpy(at.q), torch.from_numpy(k)
    elif cache is None and one([False, False, True]):
        rows = one([1, B])
        q = dice.integers(0, S + 9, (rows, T))
        k = np.stack([dice.permutation(S + 9)[:S] for _ in range(rows)])
        for name, x in (("q_positions", q), ("kv_positions", k)):
            arguments[name] = torch.from_numpy(x[0] if rows == 1 else x)
        at = at._replace(q=np.broadcast_to(q, (B, T)), k=np.broadcast_to(k, (B, S)))
    mask, seen = (None, np.ones((1, 1, T, S), bool))
    if one([True] * 7 + [False]):
        mask, seen = _tree(dice, at, H, int(dice.integers(4)), by_place=cache is None)
    arguments["mask"] = mask
    visible = np.broadcast_to(seen & real[:, None, None, :], (B, H, T, S)).copy()
    kind = one(["none", "none", "slopes", "by distance", "of pairs", "of keys"])
    if kind == "of pairs" and seed % 2:
        kind = "of content"
    if cache is not None and kind.startswith("of"):
        kind = "none"  # caches have keys in an order of their own
    drawn_bias = _bias(kind, tensors, arguments, numbers, at, H)
    if one([False, False, True]):
        tensors["sinks"] = numbers(H)
    keep, rate = None, one([0.0, 0.0, 0.0, 0.25]) if cache is None else 0.0
    if rate:
        arguments |= {"dropout_p": rate, "seed": seed}
        key = torch.randint(1 << 31, (), generator=torch.Generator().manual_seed(seed))
        keep = oracle.dropout_keep(int(key), rate, B, H, T, S, S - T)
    exact = {name: x.double().numpy() for name, x in tensors.items()}
    bias = None if drawn_bias is None else drawn_bias(tensors["bias"].double()).numpy()
    problem = oracle.Problem(
        exact["q"], exact["k"], exact["v"], visible, bias, arguments["scale"],
        arguments["softcap"], exact.get("sinks"), keep, rate,
    )  # fmt: skip
    words = (
        f"{seed=} {B=} {H=} {G=} {T=} {S=} {D=} {V=} {dtype} {mask=} bias={kind} {rate=} "
        f"softcap={arguments['softcap']} sinks={'sinks' in tensors} {cache=} "
        f"positions={'q_positions' in arguments}"
    )
    built = matrix.Built(tensors, arguments, problem, drawn_bias)
    return RandomCall(built, words, cache and CACHES[cache](), stored)


def _bias(
    kind: str, tensors: dict[str, Tensor], arguments: dict[str, Any],
    numbers: Callable[..., Tensor], at: Axes, H: int,
) -> Any:  # fmt: skip
    """Adds a bias to the call; what draws it from its tensor, as ``matrix.Built`` has it."""
    B, (T, S) = len(at.q), (at.q.shape[1], at.k.shape[1])
    if kind == "slopes":
        tensors["bias"], arguments["bias"] = numbers(H).abs() * 0.1, ph.ALiBi
        apart = torch.from_numpy(np.abs(at.q[:, None, :, None] - at.k[:, None, None, :]))
        return lambda slopes: -slopes[:, None, None] * apart.to(slopes.dtype)
    if kind == "by distance":
        tensors["bias"] = numbers(12, H)
        arguments["bias"] = lambda table: ph.RelativeBias(table, max_distance=20)
        buckets = torch.from_numpy(
            oracle.t5_buckets(at.q, at.k, 12, bidirectional=True, max_distance=20)
        )
        return lambda table: table[buckets].permute(0, 3, 1, 2)
    if kind == "of content":
        tensors["bias"] = numbers(B, H, T + S, 12)
        arguments["bias"] = lambda tables: ph.RelativeContentBias(
            tables[:, :, :T], tables[:, :, T:], max_distance=20
        )
        columns = oracle.content_columns(at.q, at.k, 12, 20)
        return lambda x: oracle.content_bias(x[:, :, :T], x[:, :, T:], columns, H)
    if kind != "none":
        tensors["bias"] = numbers(B, H, T, S) if kind == "of pairs" else numbers(H, 1, S)
        arguments["bias"] = lambda tensor: tensor
        return lambda tensor: tensor.expand(B, H, T, S)
    return None


def _tree(dice: np.random.Generator, at: Axes, H: int, depth: int, *, by_place: bool) -> Drawn:
    """A mask of so many levels of operators."""
    if depth == 0:
        return _leaf(dice, at, H, by_place=by_place)
    mask, seen = _tree(dice, at, H, depth - 1, by_place=by_place)
    operator = dice.integers(3)
    if operator == 0:
        return ~mask, ~seen
    other, others = _tree(dice, at, H, int(dice.integers(depth)), by_place=by_place)
    return (mask & other, seen & others) if operator == 1 else (mask | other, seen | others)


def _leaf(dice: np.random.Generator, at: Axes, H: int, *, by_place: bool) -> Drawn:
    q, k = at.q[:, None, :, None], at.k[:, None, None, :]
    B, (T, S) = len(at.q), (at.q.shape[1], at.k.shape[1])
    size = int(dice.integers(1, S + 1))
    kind = int(dice.integers(11 if by_place else 4))
    if kind == 0:
        return ph.Causal(), k <= q
    if kind == 1:
        ahead = int(dice.integers(S))
        return ph.Window(size, ahead), (q - k < size) & (k - q <= ahead)
    if kind == 2:
        before = int(dice.integers(3)) if size > 1 else 0
        apart = q // size - k // size
        return ph.Chunk(size, before), (apart >= 0) & (apart <= before)
    lengths = dice.integers(0, S + 1, B)
    if kind == 3:
        return ph.Prefix(lengths.tolist()), k < lengths[:, None, None, None]
    q_place, k_place = at.q_place[:, None], at.k_place
    if kind == 4:
        return ph.KeyLengths(lengths.tolist()), k_place < lengths[:, None, None, None]
    if kind == 5:
        ends = np.sort(dice.integers(0, S + 1, (B, 2)), axis=1)
        parts = np.diff(ends, axis=1, prepend=0, append=S)
        q_id, k_id = ((x[..., None] >= ends[:, None, None]).sum(-1) for x in (q_place, k_place))
        return ph.Documents(parts.tolist()), (q_id == k_id)[:, None]
    if kind == 6:
        blocks = dice.random((H, -(-S // size), -(-S // size))) < 0.5
        rows, columns = np.maximum(q_place, 0) // size, k_place // size
        return ph.BlockSparse(torch.from_numpy(blocks), size), blocks[None, :, rows, columns]
    if kind == 7:
        group = int(dice.choice([n for n in range(1, H + 1) if H % n == 0]))
        shape = [(B, H // group, T, 3), (1, T, 5), (H // group, 1, 2), (4,)][int(dice.integers(4))]
        blocks = dice.integers(-1, -(-S // size) + 1, shape)
        seen = (blocks[..., None, :] == (np.arange(S) // size)[:, None]).any(-1)
        seen = seen.reshape((1,) * (4 - seen.ndim) + seen.shape)
        heads = np.repeat(seen, group, axis=1) if seen.shape[1] > 1 else seen
        return ph.Chosen(torch.from_numpy(blocks), size, group), heads
    shape = [(B, 1, T, S), (H, T, S), (H, 1, S), (B, 1, 1, S)][int(dice.integers(4))]
    chosen = dice.random(shape) < dice.choice([0.1, 0.5, 0.9])
    seen = chosen.reshape((1,) * (4 - len(shape)) + shape)
    tensor = torch.from_numpy(chosen)
    return (ph.Keep(tensor), seen) if kind < 10 else (ph.Drop(tensor), ~seen)


def worst_share(
    call: RandomCall, kernel: str, device: str, *, grads: bool = True
) -> tuple[float, str]:
    """The largest error of a kernel's results as a share of its budget, and which result it is."""
    built = call.built
    exact, sizes = matrix.expected(built, lse=True)
    same = matrix.rounded(built, lse=True)
    if call.cache is None:
        found = matrix.run(built, kernel, grads=grads, lse=True, device=device)
    else:
        found = _through_a_cache(call, kernel, device)
    shares = matrix.shares(built, found, exact, sizes, same)
    return max((share, part) for part, share in shares.items())


def _through_a_cache(call: RandomCall, kernel: str, device: str) -> dict[str, Tensor]:
    """Out and lse over what the cache holds, stored in three parts."""
    tensors = {name: x.to(device) for name, x in call.built.tensors.items()}
    S = tensors["k"].shape[2]
    cuts = [0, S // 2, S - S // 4, S]
    cache = call.cache.fork()  # a call may be computed again
    for start, stop in pairwise(cuts):
        if start == stop:
            continue
        at = None if call.positions is None else call.positions[:, start:stop].to(device)
        source = cache.append(
            tensors["k"][:, :, start:stop], tensors["v"][:, :, start:stop], positions=at
        )
    arguments = dict(call.built.arguments)
    if "bias" in tensors:
        arguments["bias"] = arguments["bias"](tensors["bias"])
    out, lse = ph.attention(
        tensors["q"], source, sinks=tensors.get("sinks"), return_lse=True, kernel=kernel,
        **arguments,
    )  # fmt: skip
    return {"out": out.cpu(), "lse": lse.cpu()}
