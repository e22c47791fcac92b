"""``parallel.attention``: one attention whose tokens lie on the ranks of a mesh.

    out = parallel.attention(q, k, v, mesh, mask=ph.Causal() & ph.Window(4096))

Every rank passes its own tokens and gets the outputs of its own queries. The call means what
``polyhead.attention`` means for the whole sequence: masks and biases are those of one process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyhead._utils.checks import check_bool, check_number, check_one_of
from polyhead.parallel.blocks import Job
from polyhead.parallel.exchanges import EXCHANGES, Exchange, exchanged, head_shares
from polyhead.parallel.latents import Latents
from polyhead.parallel.order import ORDERS, Order, Spread
from polyhead.parallel.ranks import (
    Ranks,
    check_mesh,
    check_same,
    check_spread,
    fingerprint,
    tell_backward,
    unsupported,
)
from polyhead.semantics import (
    Bias,
    DenseSource,
    KeyValueSource,
    Mask,
    Specification,
    State,
    add_sinks,
)
from polyhead.semantics.arguments import dropout_seed
from polyhead.semantics.biases import TensorBias
from polyhead.semantics.masks import bare_tensor_message
from polyhead.semantics.sources import are_first_features

ANY_BLOCK = "auto", "tiled", "reference"
"""Kernels that can be named where tokens are spread."""


@dataclass(eq=False)
class Meaning:
    """The arguments of ``polyhead.attention`` besides its tensors."""

    mask: Mask | None = None
    bias: Bias | Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    generator: torch.Generator | None = None
    kernel: str = "auto"
    heads: tuple[int, int] | None = None

    def checked(self, q: Tensor, k: Tensor, v: Tensor) -> Specification:
        """The specification without sinks and seed; raises for arguments that no rank supports."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor) or x.ndim != 4:
                got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name} must be a tensor of 4 dimensions: got {got}")
        if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            raise ValueError(
                "q must be [B, H, T, D], k [B, G, S, D] and v [B, G, S, V]: got "
                f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
            )
        if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
            raise ValueError(
                f"q, k and v must share a floating-point dtype: got {q.dtype}, {k.dtype}, {v.dtype}"
            )
        H, G = q.shape[1], k.shape[1]
        if G == 0 or H % G:
            raise ValueError(f"kv heads G must divide query heads H: got H = {H}, G = {G}")
        mask, bias = self.mask, self.bias
        if isinstance(mask, Tensor):
            raise TypeError(bare_tensor_message("mask is a bare tensor"))
        if mask is not None and not isinstance(mask, Mask):
            raise TypeError(f"mask must be a mask expression or None: got {type(mask).__name__}")
        if bias is not None and not isinstance(bias, Tensor | Bias):
            raise TypeError(f"bias must be a Bias, a tensor or None: got {type(bias).__name__}")
        if self.sinks is not None and self.sinks.shape != (H,):
            raise ValueError(f"sinks must be [H] = [{H}]: got shape {list(self.sinks.shape)}")
        if self.scale is not None:
            check_number("scale", self.scale)
        if self.softcap is not None:
            check_number("softcap", self.softcap, above=0, hint=", or None for off")
        return self.spec(q.shape[-1])

    def spec(self, key_dim: int) -> Specification:
        """The specification without sinks and seed."""
        bias = TensorBias(self.bias) if isinstance(self.bias, Tensor) else self.bias
        return Specification(
            1.0 / math.sqrt(key_dim) if self.scale is None else self.scale,
            self.mask, bias, self.softcap, None, self.dropout_p, None,
            torch.are_deterministic_algorithms_enabled(), self.heads,
        )  # fmt: skip


def check_kernel(kernel: str) -> None:
    """Raises for a kernel that might compute the calls of some ranks and not those of others.

    Raises:
        UnsupportedError: Names it.
    """
    if kernel not in ANY_BLOCK:
        raise unsupported(
            f"kernel={kernel!r} by name where tokens are spread, because ranks differ in what they "
            f"need of it: {', '.join(ANY_BLOCK)} do all"
        )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh,
    *,
    exchange: Exchange = "ring",
    order: Order = "zigzag",
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    q_positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a sequence whose tokens are spread over the ranks of the dimension ``context``.

    Gradients of q, k and v are those of one process. Of what every rank holds whole (sinks, a
    bias), a rank gets the share of its own queries: their sum over the ranks is the gradient.

    Args:
        q: ``[B, H, T, D]`` queries of this rank, as ``parallel.shard`` deals them out.
        k: ``[B, G, S, D]`` keys of this rank.
        v: ``[B, G, S, V]`` values of this rank.
        mesh: A DeviceMesh with a dimension named ``context``.
        exchange: ``"ring"``: keys go round; ``"gather"``: all keys at once; ``"heads"``: tokens are
            traded for heads.
        order: ``"contiguous"``, ``"zigzag"`` or ``"striped"``: which rank holds which tokens.
        mask: As of the whole sequence, ``Keep`` and ``Documents`` included.
        bias: As of the whole sequence.
        scale: Factor of the scores; default 1/√D.
        softcap: c in c · tanh(score / c); None is off.
        sinks: ``[H]``.
        q_positions: ``[T]`` or ``[B, T]`` of this rank's queries; default: their places.
        kv_positions: ``[S]`` or ``[B, S]`` of this rank's keys; default: their places.
        dropout_p: Dropout probability of the weights; the same weights as in one process.
        generator: Where the seed is drawn from; that of the first rank counts.
        return_lse: Also return the log-sum-exp of each row.
        kernel: The kernel of each block: ``"auto"``, ``"tiled"`` or ``"reference"``.

    Returns:
        ``out [B, H, T, V]`` of this rank's queries; with ``return_lse`` also ``lse [B, H, T]``.

    Raises:
        RankError: A rank has other arguments, other shapes, or is gone; names it. On all ranks.
        ValueError: Shapes or numbers that do not fit; the other ranks raise RankError.
        UnsupportedError: Heads that the ranks cannot share, or what a named kernel cannot do.
    """
    ranks = Ranks.of(mesh, "context")
    refused: Exception | None = None
    spec, seed, facts = None, None, [0] * 8
    try:
        check_one_of("exchange", exchange, EXCHANGES)
        check_one_of("order", order, ORDERS)
        check_bool("return_lse", return_lse)
        check_kernel(kernel)
        spec = Meaning(mask, bias, scale, softcap, sinks, dropout_p, generator, kernel).checked(
            q, k, v
        )
        seed = dropout_seed(q, dropout_p, generator)
        for name, x, given in (("q", q, q_positions), ("kv", k, kv_positions)):
            if given is not None and given.shape not in ((x.shape[2],), (len(x), x.shape[2])):
                raise ValueError(
                    f"{name}_positions must be of the {x.shape[2]} tokens of this rank: got "
                    f"{list(given.shape)}"
                )
        if q_positions is None and kv_positions is not None:
            raise ValueError("kv_positions need q_positions where tokens are spread: got none")
        if exchange == "heads":
            head_shares(q.shape[1], k.shape[1], ranks.size)
        learns = [torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)]
        call_fields = (
            exchange, order, spec.mask, spec.bias, scale, softcap, sinks, dropout_p, kernel,
            [None if x is None else x.ndim for x in (q_positions, kv_positions)], return_lse,
            str(q.dtype), learns, torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        facts = [
            q.shape[2], k.shape[2], q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3],
            fingerprint(*call_fields),
        ]  # fmt: skip
    except Exception as error:  # whatever it is, other ranks must not wait
        refused = error
    drawn = 0 if seed is None else int(seed)
    notes = ranks.agree("parallel.attention", [*facts, drawn], refused)
    told_by = list(zip(*notes, strict=True))
    assert spec is not None
    names = ("B", "H", "G", "D", "V", "the rest of the call (mask, bias, numbers, dtype)")
    for name, values in zip(names, told_by[2:8], strict=True):
        check_same(ranks, name, values)
    T, S = sum(told_by[0]), sum(told_by[1])
    queries = Spread(order, T, ranks.size, shift=S - T)
    keys = Spread(order, S, ranks.size)
    for name, spread, lengths in (("q", queries, told_by[0]), ("k", keys, told_by[1])):
        check_spread(ranks, name, lengths, [spread.length(rank) for rank in range(ranks.size)])
    queries, keys = (
        spread if given is None else explicit_positions(ranks, spread, given)
        for spread, given in ((queries, q_positions), (keys, kv_positions))
    )
    if seed is not None:
        seed = torch.tensor(told_by[8][0], device=q.device)
    spec.seed = seed
    wanted = return_lse or sinks is not None
    state = attend(
        ranks, exchange, spec, queries, keys, q, DenseSource(k, v), kernel, sinks, wanted
    )
    out = tell_backward([ranks], state.out)
    if not return_lse:
        return out
    assert state.lse is not None
    return out, state.lse


def attend(
    ranks: Ranks,
    exchange: Exchange,
    spec: Specification,
    queries: Spread,
    keys: Spread,
    q: Tensor,
    source: KeyValueSource,
    kernel: str,
    sinks: Tensor | None,
    needs_lse: bool,
) -> State:
    """The state of a rank's queries, of arguments on which the ranks have agreed."""
    if type(source) not in (DenseSource, Latents):
        raise unsupported(f"a {type(source).__name__} beside tokens that are spread over ranks")
    if source.mask is not None:
        raise unsupported("rows that differ in what they hold beside tokens spread over ranks")
    k, v = source.gather()
    B, H = q.shape[:2]
    if spec.mask is not None:
        spec.mask.check(B, H, queries.total, keys.total)
    if spec.bias is not None:
        spec.bias.check(B, H, queries.total, keys.total)
    expansion = source.expansion if isinstance(source, Latents) else None
    latent = expansion is not None or (v.shape[1] == k.shape[1] == 1 and are_first_features(v, k))
    job = Job(
        spec, queries, keys, ranks.rank, kernel, source.value_dim, latent,
        (B, k.shape[1], k.shape[3]), needs_lse, expansion,
    )  # fmt: skip
    state = exchanged(exchange, ranks, job, q, k, v)
    return state if sinks is None else add_sinks(state, sinks)


def explicit_positions(ranks: Ranks, spread: Spread, positions: Tensor) -> Spread:
    """The same tokens at explicit positions, which every rank is told."""
    rows = positions.long()
    rows = rows[None] if rows.ndim == 1 else rows
    padded = rows.new_zeros(len(rows), spread.longest)
    padded[:, : rows.shape[1]] = rows
    padded = padded.contiguous()
    found = [torch.empty_like(padded) for _ in range(ranks.size)]
    with ranks.watched("an exchange of positions"):
        dist.all_gather(found, padded, group=ranks.group)
    parts = [part[:, : spread.length(rank)] for rank, part in enumerate(found)]
    whole = spread.joined(parts, 1)
    return Spread(
        spread.order, spread.total, spread.ranks, whole[0] if positions.ndim == 1 else whole,
        spread.shift,
    )  # fmt: skip


def shard(x: Tensor, mesh: DeviceMesh, *, order: Order = "zigzag", dim: int = 1) -> Tensor:
    """The tokens of this rank from a tensor of the whole sequence.

    Args:
        x: Ids ``[B, T]`` or anything else with a dimension of tokens, the same on all ranks.
        mesh: With a dimension ``context``; without one x comes back as it is.
        order: As of ``parallelize``.
        dim: The dimension of tokens.

    Raises:
        ValueError: Fewer tokens than the ranks can share, or an unknown order.
    """
    check_one_of("order", order, ORDERS)
    ranks = _context(mesh)
    if ranks is None:
        return x
    spread = Spread(order, x.shape[dim], ranks.size)
    return spread.taken(x, ranks.rank, dim)


def gather(x: Tensor, mesh: DeviceMesh, *, order: Order = "zigzag", dim: int = 1) -> Tensor:
    """The whole sequence, on every rank, from the slices of all ranks; the inverse of ``shard``.

    Not differentiable: losses are summed over ranks instead (``parallel.cross_entropy``).

    Args:
        x: This rank's slice, ``[B, T, ...]``.
        mesh: As of ``shard``.
        order: As of ``shard``.
        dim: The dimension of tokens.

    Raises:
        RankError: Ranks hold other numbers of tokens than ``shard`` gives them.
    """
    ranks = _context(mesh)
    if ranks is None:
        check_one_of("order", order, ORDERS)
        return x
    refused, facts = None, [0, 0]
    try:
        check_one_of("order", order, ORDERS)
        shape = [x.shape[i] for i in range(x.ndim) if i != dim % x.ndim]
        facts = [x.shape[dim], fingerprint(shape, x.dtype, dim % x.ndim, order)]
    except Exception as error:  # whatever it is, other ranks must not wait
        refused = error
    found = ranks.agree("parallel.gather", facts, refused)
    x = x.detach()
    lengths, shapes = (list(each) for each in zip(*found, strict=True))
    check_same(ranks, "the rest of the call (other dimensions of x, its dtype, dim, order)", shapes)
    spread = Spread(order, sum(lengths), ranks.size)
    check_spread(ranks, "x", lengths, [spread.length(rank) for rank in range(ranks.size)])
    first = x.movedim(dim, 0)
    padded = first.new_zeros(spread.longest, *first.shape[1:])
    padded[: len(first)] = first
    parts = [torch.empty_like(padded) for _ in range(ranks.size)]
    with ranks.watched("a gathering"):
        dist.all_gather(parts, padded.contiguous(), group=ranks.group)
    parts = [part[: spread.length(rank)] for rank, part in enumerate(parts)]
    return spread.joined(parts, 0).movedim(0, dim)


def _context(mesh: DeviceMesh) -> Ranks | None:
    check_mesh(mesh)
    return Ranks.of(mesh, "context") if "context" in (mesh.mesh_dim_names or ()) else None
