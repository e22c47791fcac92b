"""One attention over ranks against the same attention in one process: every feature, both passes.

``FEATURES`` is the list of rows of the table in docs/parallel.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import polyhead as ph
from polyhead import parallel
from polyhead.parallel import blocks

B, H, G, D, T = 2, 4, 2, 8, 37


def _mask(make: Callable[[], ph.Mask]) -> dict[str, Any]:
    return {"mask": make}


_KEEP = torch.rand(2, 1, T, T, generator=torch.Generator().manual_seed(5)) > 0.4
_BLOCKS = torch.rand(4, 4, 4, generator=torch.Generator().manual_seed(6)) > 0.3
_CHOSEN = torch.randint(-1, 8, (2, 2, T, 3), generator=torch.Generator().manual_seed(7))

FEATURES: dict[str, dict[str, Any]] = {
    "everything visible": {},
    "MHA": {"shape": {"G": 4}},
    "MQA": {"shape": {"G": 1}},
    "causal": _mask(ph.Causal),
    "window": _mask(lambda: ph.Causal() & ph.Window(9)),
    "chunks": _mask(lambda: ph.Causal() & ph.Chunk(8)),
    "prefix": _mask(lambda: ph.Causal() | ph.Prefix([5, 11])),
    "documents": _mask(lambda: ph.Causal() & ph.Documents([9, 20, 8])),
    "ragged lengths": _mask(lambda: ph.KeyLengths([T, 13])),
    "block-sparse": _mask(lambda: ph.BlockSparse(_BLOCKS, 10) & ph.Causal()),
    "chosen keys": _mask(lambda: ph.Chosen(_CHOSEN, 5, group=H // 2) & ph.Causal()),
    "explicit tensor": _mask(lambda: ph.Keep(_KEEP) & ~ph.Prefix(3)),
    "ALiBi": {"mask": ph.Causal, "bias": lambda x: ph.ALiBi(x), "learned": (H,)},
    "T5's bias": {"bias": lambda x: ph.RelativeBias(x, max_distance=20), "learned": (8, H)},
    "tensor bias": {"mask": ph.Causal, "bias": lambda x: x, "learned": (1, H, T, T)},
    "bias by content": {
        "mask": ph.Causal,
        "bias": lambda x: ph.RelativeContentBias(x[:, :, :T], x[:, :, T:], max_distance=20),
        "learned": (2, H, 2 * T, 12),
    },
    "softcap": {"mask": ph.Causal, "softcap": 2.0},
    "sinks": {"mask": ph.Causal, "sinks": True},
    "dropout": {"mask": ph.Causal, "dropout_p": 0.3},
    "T ≠ S": {"shape": {"S": 50}, "mask": ph.Causal},
    "positions": {"mask": ph.Causal, "positions": True},
    "latent keys": {"shape": {"G": 1, "D": 12, "V": 8}, "latent": True, "mask": ph.Causal},
    "nothing visible": _mask(lambda: ~ph.Prefix(T)),
}

_MESHES: dict[tuple[str, ...], DeviceMesh] = {}


def mesh_of(*names: str, sizes: tuple[int, ...] | None = None) -> DeviceMesh:
    """A mesh over all processes, made once."""
    sizes = (dist.get_world_size(),) if sizes is None else sizes
    key = (*names, *map(str, sizes))
    if key not in _MESHES:
        _MESHES[key] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return _MESHES[key]


def equal_all(
    exchange: str, order: str, dtype: str, features: list[str], kernel: str = "auto"
) -> None:
    """Raises where one of the features differs."""
    for feature in features:
        try:
            equal(exchange, order, dtype, feature, kernel)
        except AssertionError as error:
            raise AssertionError(f"{feature} by {exchange}, {order}, {dtype}: {error}") from None


def in_pieces(exchange: str, order: str, dtype: str, features: list[str]) -> None:
    """As ``equal_all``, in pieces of a few tokens."""
    with mock.patch.object(blocks, "PIECE", 5):
        equal_all(exchange, order, dtype, features)


def equal(exchange: str, order: str, dtype_name: str, feature: str, kernel: str) -> None:
    case, dtype = FEATURES[feature], getattr(torch, dtype_name)
    torch.manual_seed(3)
    sizes = {"G": G, "D": D, "S": T, "V": D, **case.get("shape", {})}
    q = torch.randn(B, H, T, sizes["D"], dtype=dtype)
    k = torch.randn(B, sizes["G"], sizes["S"], sizes["D"], dtype=dtype)
    v = torch.randn(B, sizes["G"], sizes["S"], sizes["V"], dtype=dtype)
    learned = torch.randn(case["learned"], dtype=dtype) * 0.3 if "learned" in case else None
    sinks = torch.randn(H, dtype=dtype) if "sinks" in case else None
    of_out, of_lse = (
        torch.randn(B, H, T, sizes["V"], dtype=dtype),
        torch.randn(B, H, T, dtype=dtype),
    )
    mesh = mesh_of("context")

    def call(
        attend: Callable[..., Any], cut: Callable[..., Tensor], **options: Any
    ) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        more = [
            None if x is None else x.detach().clone().requires_grad_() for x in (learned, sinks)
        ]
        here = [cut(x, dim=2) for x in leaves]
        if case.get("latent"):
            here[2] = here[1][..., : sizes["V"]]
        named: dict[str, Any] = {
            "softcap": case.get("softcap"), "dropout_p": case.get("dropout_p", 0.0),
            "generator": torch.Generator().manual_seed(11), "sinks": more[1], "return_lse": True,
        }  # fmt: skip
        if "mask" in case:
            named["mask"] = case["mask"]()
        if "bias" in case:
            named["bias"] = case["bias"](more[0])
        if "positions" in case:
            at = (torch.arange(T) * 3 + torch.tensor([[0], [4]])) % 53
            named["q_positions"] = cut(at, dim=1)
            named["kv_positions"] = cut(at.flip(1), dim=1)
        out, lse = attend(*here, *options.pop("mesh", ()), **named, **options)
        loss = (out * cut(of_out, dim=2)).sum()
        seen = lse.isfinite()
        loss = loss + (lse.masked_fill(~seen, 0.0) * cut(of_lse, dim=2)).sum()
        loss.backward()
        grads = [x.grad for x in (*leaves, *more) if x is not None and x.grad is not None]
        return [out.detach(), lse.detach(), *grads]

    wanted = call(ph.attention, lambda x, dim: x, kernel="reference")
    found = call(
        parallel.attention, lambda x, dim: parallel.shard(x, mesh, order=order, dim=dim),
        mesh=(mesh,), exchange=exchange, order=order, kernel=kernel,
    )  # fmt: skip
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if i < 2:
            ours = parallel.gather(ours, mesh, order=order, dim=2)
        else:
            # Every rank has the gradient of its own queries and keys; of what is whole, a share.
            dist.all_reduce(ours)
        same = torch.allclose(ours, theirs, rtol=bound, atol=bound)
        worst = (ours - theirs).abs().nan_to_num().max().item()
        assert same, f"number {i} differs by {worst:.1e}"


def rounded_once(exchange: str, dtype_name: str) -> None:
    """In 16 bits, out and gradients are as near to the exact ones as those of one process.

    One process: ``tiled``, which adds up in float32 and rounds at the end. Rounded block by block,
    errors of out would be half as large again.
    """
    dtype, mesh = getattr(torch, dtype_name), mesh_of("context")
    torch.manual_seed(4)
    q, k, v, weight = (torch.randn(1, heads, 96, 16).to(dtype) for heads in (4, 2, 2, 4))
    bias = (torch.randn(1, 4, 96, 96) * 0.3).to(dtype)

    def call(attend: Callable[..., Any], cut: Callable[..., Tensor], to: torch.dtype) -> Any:
        leaves = [x.to(to).requires_grad_() for x in (q, k, v, bias)]
        here = [cut(x, dim=2) for x in leaves[:3]]
        out = attend(*here, mask=ph.Causal() & ph.Window(60), bias=leaves[3])
        out.backward(cut(weight.to(to), dim=2))
        return [out.detach(), *(x.grad for x in leaves)]

    exact = call(ph.attention, lambda x, dim: x, torch.float64)
    one = call(partial(ph.attention, kernel="tiled"), lambda x, dim: x, dtype)
    found = call(
        partial(_over_ranks, mesh, exchange), lambda x, dim: parallel.shard(x, mesh, dim=dim), dtype
    )
    for i, (ours, theirs, right) in enumerate(zip(found, one, exact, strict=True)):
        if i == 0:
            ours = parallel.gather(ours, mesh, dim=2)
        else:
            dist.all_reduce(ours)  # every rank has rows of its own; the others' are 0
        error, least = ((x.double() - right).abs().mean() for x in (ours, theirs))
        assert error <= 1.02 * least, f"number {i}: error {error:.3e} for {least:.3e}"


def _over_ranks(mesh: DeviceMesh, exchange: Any, *x: Tensor, **call: Any) -> Any:
    return parallel.attention(*x, mesh, exchange=exchange, **call)
