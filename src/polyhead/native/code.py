"""Finds the compiled code that this processor can run, tests it, and calls it with addresses.

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D key size, V value size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.native.coding import Coding
from polyhead.native.samples import samples

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOST_ROWS = 8
"""Rows of x that ``Code.product`` takes."""
MOST_WEIGHTS = 4
MOST_PIECES = 16
ACTIVATIONS = {"relu": 0, "silu": 1, "gelu_tanh": 2}

Weight = tuple[Tensor, Tensor | None]
"""A weight and its bias."""


class Piece(NamedTuple):
    """Keys ``[B, G, n, D]`` and values ``[B, G, n, V]``, last dimensions dense, other strides any.

    Attributes:
        k: Keys; in pages ``[pages, G, P, D]``.
        v: Values; in pages ``[pages, G, P, V]``.
        first: Position of the first; they count on from there unless ``positions`` is given.
        positions: ``[n]`` or ``[B, n]`` int64, dense, or None.
        pages: Where the tokens lie in pages: ``[B, m]`` int64, which page holds which P of them.
        skipped: Tokens of the first page that come before these.
        paged: How many tokens lie in pages.
        coding: What k and v stand for where they are codes of units of tokens; ``pages``,
            ``skipped`` and ``paged`` then count units.
    """

    k: Tensor
    v: Tensor
    first: int = 0
    positions: Tensor | None = None
    pages: Tensor | None = None
    skipped: int = 0
    paged: int = 0
    coding: Coding | None = None

    @property
    def unit(self) -> int:
        """Tokens in what k and v count: one, or a unit of codes."""
        return 1 if self.coding is None else self.coding.group

    @property
    def value_dim(self) -> int:
        return self.v.shape[-1] if self.coding is None else self.coding.value_dim

    @property
    def length(self) -> int:
        return (self.k.shape[2] if self.pages is None else self.paged) * self.unit


@dataclass(frozen=True)
class Extras:
    """What joins the plain softmax(Q Kᵀ · scale) V.

    Attributes:
        softcap: c of c · tanh(score / c); 0 is none.
        bounds: ``[1 or B, T]`` int64 low and high: a query sees positions low ≤ p < high.
        keep: ``[1 or B, 1 or H, T, S]`` bool, keys dense, columns in the order of the pieces.
        q_positions: ``[1 or B, T]`` int64 of the queries, beside ``slopes`` and ``by_distance``.
        slopes: ``[H]`` float32 of ALiBi, dense, or None.
        by_distance: ``[H, 2 n + 1]`` float32, dense: what is added for keys n and more places
            behind the query, …, n and more ahead of it; or None.
        bias: ``[1 or B, 1 or H, 1 or T, 1 or S]`` float32, any strides, or None.
    """

    softcap: float = 0.0
    bounds: tuple[Tensor, Tensor] | None = None
    keep: Tensor | None = None
    q_positions: Tensor | None = None
    slopes: Tensor | None = None
    by_distance: Tensor | None = None
    bias: Tensor | None = None

    @property
    def learned(self) -> Tensor | None:
        """The bias of whatever kind: what a gradient may be asked for."""
        kinds = self.slopes, self.by_distance, self.bias
        return next((kind for kind in kinds if kind is not None), None)


NO_EXTRAS = Extras()

Factor = tuple[int, int, int]
"""Address of a weight ``[out, in]`` and of its bias or 0, and out; without gaps."""

Norm = tuple[int, float, float]
"""Address of the weight of an RMS norm, its eps and its offset."""


class LayerWeights(NamedTuple):
    """What a pre-norm layer computes with, in one dtype; address 0 where it has no such part."""

    attention_norm: Norm
    q: Factor
    k: Factor
    v: Factor
    q_norm: Norm
    k_norm: Norm
    out: Factor
    attention_out_norm: Norm
    feed_forward_norm: Norm
    gate: Factor
    up: Factor
    down: Factor
    feed_forward_out_norm: Norm


class Heads(NamedTuple):
    """The attention of one token: H heads over G kv heads of D and V features.

    Attributes:
        rotation: cos and sin ``[D]`` of the token's position, as ``Code.rotate`` takes them.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float
    rotation: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class TileSums:
    """Sums over the rows ``[B, T]`` and columns ``[B, S]`` of attention weights; None: not wanted.

    All but ``received`` have one batch stride, and rows without gaps.

    Attributes:
        entropy: −Σ p log p.
        squares: Σ p².
        largest: The largest weight and the int64 index of its key.
        top: The largest weights ``[B, T, k]`` in order and the int64 indexes of their keys.
        received: Σ p over the rows.
    """

    entropy: Tensor | None = None
    squares: Tensor | None = None
    largest: tuple[Tensor, Tensor] | None = None
    top: tuple[Tensor, Tensor] | None = None
    received: Tensor | None = None


class Code:
    """One instruction set's code. Callers have checked dtypes, shapes and strides."""

    def __init__(self, module: ModuleType, index: int, name: str) -> None:
        self.name = name
        self._index = index
        self._product, self._attend = module.product, module.attend
        self._feed_forward, self._norm = module.feed_forward, module.norm
        self._rotate, self._gradients = module.rotate, module.gradients
        self._tile_sums, self._step = module.tile_sums, module.step

    def product(self, x: Tensor, weights: Sequence[Weight]) -> Tensor:
        """``[x W0ᵀ + b0 | x W1ᵀ + b1 | …]``, added up in float32.

        Args:
            x: ``[rows, in]``, at most ``MOST_ROWS`` rows, the last dimension dense.
            weights: At most ``MOST_WEIGHTS`` of ``[out, in]`` and ``[out]`` or None, dense, in the
                dtype of x.
        """
        rows, inputs = x.shape
        y = x.new_empty(rows, sum(weight.shape[0] for weight, _ in weights))
        arguments = [
            self._index, torch.get_num_threads(), DTYPES[x.dtype], x.data_ptr(), x.stride(0),
            rows, inputs, y.data_ptr(), y.shape[1],
        ]  # fmt: skip
        for weight in weights:
            arguments += *_addresses(weight), weight[0].shape[0]
        self._product(*arguments)
        return y

    def feed_forward(
        self, x: Tensor, gate: Weight | None, up: Weight, down: Weight, activation: str
    ) -> Tensor:
        """``down(activation(gate(x)) · up(x))``, or without a gate ``down(activation(up(x)))``.

        Args:
            x: ``[rows, E]``, at most ``MOST_ROWS`` rows, the last dimension dense.
            gate: ``[F, E]`` and ``[F]`` or None, dense, in the dtype of x, as the others.
            up: ``[F, E]`` and ``[F]`` or None.
            down: ``[E, F]`` and ``[E]`` or None.
            activation: One of ``ACTIVATIONS``.
        """
        y = x.new_empty(x.shape[0], down[0].shape[0])
        self._feed_forward(
            self._index, torch.get_num_threads(), DTYPES[x.dtype], ACTIVATIONS[activation],
            x.data_ptr(), x.stride(0), *x.shape, y.data_ptr(),
            *((0, 0) if gate is None else _addresses(gate)),
            *_addresses(up), up[0].shape[0], *_addresses(down), down[0].shape[0],
        )  # fmt: skip
        return y

    def norm(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """``x / √(mean(x²) + eps) · (weight + offset)`` along the rows of ``[rows, E]``."""
        y = x.new_empty(x.shape)
        self._norm(
            self._index, torch.get_num_threads(), DTYPES[x.dtype], x.data_ptr(), x.stride(0),
            *x.shape, weight.data_ptr(), eps, offset, y.data_ptr(),
        )  # fmt: skip
        return y

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x · cos + roll(x, D / 2) · sin`` of every head, a new dense tensor.

        Args:
            x: ``[B, T, N, D]``, the last dimension dense, other strides any.
            cos: ``T · D`` numbers, dense, in the dtype of x.
            sin: Likewise, the first half of D negative.
        """
        y = x.new_empty(x.shape)
        self._rotate(
            self._index, torch.get_num_threads(), DTYPES[x.dtype], x.data_ptr(), *x.shape,
            *x.stride()[:3], cos.data_ptr(), sin.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        return y

    def attend(
        self,
        q: Tensor,
        pieces: Sequence[Piece],
        scale: float,
        extras: Extras = NO_EXTRAS,
        *,
        lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of ``q [B, H, T, D]`` over all pieces: out and, if asked for, lse.

        Args:
            q: The last dimension dense, other strides any.
            pieces: One to ``MOST_PIECES``.
            scale: Factor of the scores.
            extras: Mask, bias, softcap.
            lse: Whether to return ``[B, H, T]`` float32.
        """
        out = q.new_empty(*q.shape[:3], pieces[0].value_dim)
        found = q.new_empty(q.shape[:3], dtype=torch.float32) if lse else None
        arguments = _attention(q, pieces, scale, extras, out, found)
        self._attend(self._index, torch.get_num_threads(), *arguments)
        return out, found

    def gradients(
        self,
        q: Tensor,
        piece: Piece,
        scale: float,
        extras: Extras,
        result: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor],
        *,
        of_bias: bool = False,
    ) -> list[Tensor]:
        """Gradients of q, k and v, dense, and of the bias in float32 if asked for.

        Args:
            q: As ``attend`` got it, and so the next three.
            piece: The keys and values, in one piece.
            scale: Factor of the scores.
            extras: Mask, bias, softcap.
            result: out and lse, as ``attend`` gave them.
            grads: Of out, the last dimension dense, and of lse ``[B, H, T]`` float32, dense.
            of_bias: Whether to return the gradient of ``extras.learned`` too.
        """
        grad_out, grad_lse = grads
        found = [q.new_empty(x.shape) for x in (q, piece.k, piece.v)]
        strides = [0] * 5
        if of_bias and extras.learned is not None:
            found.append(torch.zeros(extras.learned.shape))
            strides = _strided(found[3] if extras.bias is not None else _of_heads(found[3]), 4)
        self._gradients(
            self._index, torch.get_num_threads(), grad_out.data_ptr(), *grad_out.stride()[:3],
            grad_lse.data_ptr(), *(x.data_ptr() for x in found[:3]), *strides,
            *_attention(q, [piece], scale, extras, *result),
        )  # fmt: skip
        return found

    def step(
        self,
        x: Tensor,
        weights: LayerWeights,
        heads: Heads,
        held: tuple[Tensor, Tensor],
        activation: str,
    ) -> Tensor:
        """One token of every batch row behind a whole layer.

        Args:
            x: ``[B, 1, E]``, at most ``MOST_ROWS`` rows, dense.
            weights: Of the layer, in the dtype of x.
            heads: Of its attention.
            held: Keys ``[B, G, S, D]`` and values ``[B, G, S, V]``, last dimensions dense; those of
                the last token are written here.
            activation: One of ``ACTIVATIONS``.
        """
        y, (k, v) = x.new_empty(x.shape), held
        cos, sin = heads.rotation or (None, None)
        self._step(
            self._index, torch.get_num_threads(), DTYPES[x.dtype], x.shape[0], x.shape[2],
            *heads[:6], ACTIVATIONS[activation], x.data_ptr(), y.data_ptr(), _address(cos),
            _address(sin), k.data_ptr(), *k.stride()[:3], v.data_ptr(), *v.stride()[:3], k.shape[2],
            *chain.from_iterable(weights),
        )  # fmt: skip
        return y

    def weigh(self, logs: Tensor, first: int, sums: TileSums) -> None:
        """Turns logarithms of weights into weights, in place, and adds them to running sums.

        Args:
            logs: ``[B, rows, columns]`` float32, dense.
            first: Index of the first column's key.
            sums: Of these rows and these columns.
        """
        largest, top = sums.largest or (None, None), sums.top or (None, None)
        of_rows = (sums.entropy, sums.squares, *largest)
        strides = [x.stride(0) for x in of_rows if x is not None]
        strides += [x.stride(0) // x.shape[-1] for x in top if x is not None]
        if len(set(strides)) > 1:
            raise ValueError(f"sums of rows must have one batch stride: got {strides}")
        self._tile_sums(
            self._index, torch.get_num_threads(), logs.data_ptr(), *logs.shape, first,
            *map(_address, of_rows), strides[0] if strides else 0,
            *map(_address, top), 0 if top[0] is None else top[0].shape[-1],
            *_table(sums.received),
        )  # fmt: skip


def _attention(
    q: Tensor,
    pieces: Sequence[Piece],
    scale: float,
    extras: Extras,
    out: Tensor,
    lse: Tensor | None,
) -> list[float]:
    """The numbers that describe an attention to the module."""
    B, H, T, D = q.shape
    arguments = [
        DTYPES[q.dtype], B, H, pieces[0].k.shape[1], T, D, out.shape[-1], scale, extras.softcap,
        q.data_ptr(), *q.stride()[:3], out.data_ptr(), *out.stride()[:3],
        0 if lse is None else lse.data_ptr(),
    ]  # fmt: skip
    arguments += _NONE if extras is NO_EXTRAS else _extras(extras)
    for piece in pieces:
        k, v, positions = piece.k, piece.v, piece.positions
        arguments += k.data_ptr(), *k.stride()[:3], v.data_ptr(), *v.stride()[:3]
        if piece.pages is None:
            arguments += _IN_ONE_PIECE
        else:
            unit = piece.unit
            arguments += *_table(piece.pages), k.shape[2] * unit, piece.skipped * unit
        arguments += piece.length, piece.first, *_table(positions)
        if piece.coding is None:
            arguments.append(0)
        else:
            arguments += piece.coding.numbers(k, v)
    return arguments


def _addresses(weight: Weight) -> tuple[int, int]:
    return weight[0].data_ptr(), 0 if weight[1] is None else weight[1].data_ptr()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


_NONE = [0] * 17
_IN_ONE_PIECE = [0] * 4


def _extras(extras: Extras) -> list[int]:
    found = [0, 0, 0] if extras.bounds is None else [
        extras.bounds[0].data_ptr(), *_table(extras.bounds[1])
    ]  # fmt: skip
    found += _strided(extras.keep, 3)
    found.append(0 if extras.slopes is None else extras.slopes.data_ptr())
    if extras.by_distance is None:
        found += [0, 0]
    else:
        found += [extras.by_distance.data_ptr(), extras.by_distance.shape[1] // 2]
    return [*found, *_table(extras.q_positions), *_strided(extras.bias, 4)]


def _of_heads(x: Tensor) -> Tensor:
    """``[H]`` or ``[H, n]`` as ``[1, H, 1, 1]`` or ``[1, H, 1, n]``."""
    return x.view(1, len(x), 1, -1)


def _table(rows: Tensor | None) -> tuple[int, int]:
    """Address and batch stride of ``[n]``, ``[1, n]`` or ``[B, n]``."""
    if rows is None:
        return 0, 0
    return rows.data_ptr(), rows.stride(0) if rows.ndim == 2 and len(rows) > 1 else 0


def _strided(tensor: Tensor | None, dimensions: int) -> list[int]:
    """Address and strides, 0 along dimensions that broadcast."""
    if tensor is None:
        return [0] * (dimensions + 1)
    sizes = zip(tensor.shape[:dimensions], tensor.stride()[:dimensions], strict=True)
    return [tensor.data_ptr(), *(0 if size == 1 else stride for size, stride in sizes)]


def _module() -> ModuleType | None:
    try:
        from polyhead.native import _native  # type: ignore[attr-defined]
    except ImportError:
        return None
    module: ModuleType = _native
    return module


@cache
def all_codes() -> tuple[Code, ...]:
    """The codes that this processor can run, best first, tested or not."""
    module = _module()
    if module is None:
        return ()
    return tuple(
        Code(module, i, name) for i, (name, runs_here) in enumerate(module.codes()) if runs_here
    )


_forced: list[Code] = []


@cache
def _chosen() -> Code | None:
    for candidate in all_codes():
        if (wrong := _disagreement(candidate)) is None:
            return candidate
        warnings.warn(
            f"the native code for {candidate.name} is switched off: {wrong}", stacklevel=2
        )
    return None


def code() -> Code | None:
    """The code in use, or None where nothing was compiled."""
    return _forced[-1] if _forced else _chosen()


def code_for(x: Tensor) -> Code | None:
    """The code in use, if it may stand in for torch's operations on x.

    Nobody may record gradients, watch or transform them: autocast, dispatch modes, functorch,
    compilation.
    """
    if (
        torch.is_grad_enabled()
        or type(x) is not Tensor
        or not x.is_cpu
        or x.dtype not in DTYPES
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_autocast_enabled("cpu")
    ):
        return None
    return code()


def is_plain(parameter: Tensor, x: Tensor) -> bool:
    """Whether a parameter can be read beside x as it lies in memory."""
    return (
        type(parameter) in (torch.nn.Parameter, Tensor)
        and parameter.is_cpu
        and parameter.dtype is x.dtype
        and parameter.is_contiguous()
    )


@contextmanager
def using(chosen: Code) -> Iterator[None]:
    """Within the block, this code is used, whatever the processor would prefer."""
    _forced.append(chosen)
    try:
        yield
    finally:
        _forced.pop()


def unavailable() -> str | None:
    """Why there is no native code here and what would bring it, or None."""
    if code() is not None:
        return None
    if _module() is None:
        return "not compiled; install a C++ compiler (apt install g++), then install polyhead again"
    return "no code compiled for this processor gave right results"


# What torch.compiler.assume_constant_result would write, without importing the compiler.
unavailable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _disagreement(candidate: Code) -> str | None:
    """What a code computes wrongly on small inputs, or None: the test at first use."""
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        close = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]

        def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        x, weight, bias = random(3, 80), random(37, 80), random(37)
        y = candidate.product(x, [(weight, bias)])
        exact = x.double() @ weight.double().mT + bias.double()
        if not torch.allclose(y.double(), exact, atol=16 * close, rtol=close):
            return f"a product in {dtype} differs from float64"
        for queries in (1, 40):
            q, k, v = random(1, 4, queries, 32), random(1, 2, 150, 32), random(1, 2, 150, 48)
            high = torch.arange(150 - queries, 150)[None] + 1
            added = random(1, 4, 1, 150).float()
            extras = Extras(bounds=(torch.full_like(high, 3), high), bias=added)
            out, _ = candidate.attend(q, [Piece(k, v)], 0.2, extras)
            wide_k, wide_v = (t.double().repeat_interleave(2, dim=1) for t in (k, v))
            at = torch.arange(150)
            hidden = (at < 3) | (at >= high[0][:, None])
            scores = (q.double() @ wide_k.mT * 0.2 + added).masked_fill(hidden, -torch.inf)
            exact = scores.softmax(dim=-1) @ wide_v
            if not torch.allclose(out.double(), exact, atol=close, rtol=close):
                return f"attention in {dtype} differs from float64"
            grad = random(1, 4, queries, 48)
            out, lse = candidate.attend(q, [Piece(k, v)], 0.2, extras, lse=True)
            assert lse is not None
            found = candidate.gradients(
                q, Piece(k, v), 0.2, extras, (out, lse), (grad, torch.zeros_like(lse)), of_bias=True
            )
            weights, wide_grad = scores.softmax(dim=-1), grad.double()
            changes = wide_grad @ wide_v.mT - (wide_grad * exact).sum(dim=-1, keepdim=True)
            of_scores = weights * changes
            changes = 0.2 * of_scores
            of_bias = of_scores.sum(dim=2, keepdim=True)
            wanted = changes @ wide_k, changes.mT @ q.double(), weights.mT @ wide_grad, of_bias
            for mine, theirs in zip(found, wanted, strict=True):
                theirs = theirs.reshape(1, mine.shape[1], -1, *mine.shape[2:]).sum(dim=2)
                if not torch.allclose(mine.double(), theirs, atol=4 * close, rtol=close):
                    return f"a gradient in {dtype} differs from float64"
        for coded in samples(dtype):
            out, _ = candidate.attend(coded.q, [Piece(coded.k, coded.v, coding=coded.coding)], 0.2)
            if not torch.allclose(out.double(), coded.exact(0.2), atol=close, rtol=close):
                return f"attention over codes in {dtype} differs from float64"
    return None
