"""``torchrun --nproc-per-node=4 -m polyhead.parallel.check``: what a cluster computes and sends.

Every exchange in every order, and every kind of head layout, forward and backward, against one
process; then the rate of each rank's link to the next. Ends with 0 where all is equal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyhead.errors import PolyheadError, UnsupportedError
from polyhead.kernels.dispatch import attention as one_process
from polyhead.parallel.attention import attention, shard
from polyhead.parallel.exchanges import EXCHANGES, Exchange
from polyhead.parallel.order import ORDERS, Order
from polyhead.semantics import Causal, Window

LAYOUTS = {"MHA": 0, "GQA": 2, "MQA": 1, "MLA": 1}
"""Kv heads by layout; 0: as many as query heads. MLA: values are the first features of keys."""

LATENT = 12
"""Features of a key of MLA that are its value."""

BOUND = 1e-5
"""Greatest difference from one process, of float32 numbers of about 1."""

MESSAGE = 1 << 24
"""Bytes of a message whose time is measured."""


def checks(mesh: DeviceMesh) -> Iterator[tuple[str, str]]:
    """What was checked, and what was found: ``"equal"``, or what is not."""
    for exchange in EXCHANGES:
        for order in ORDERS:
            for layout in LAYOUTS:
                yield f"{exchange}, {order}, {layout}", _checked(mesh, exchange, order, layout)


def _checked(mesh: DeviceMesh, exchange: Exchange, order: Order, layout: str) -> str:
    ranks = mesh.size()
    heads = 2 * ranks
    num_kv_heads = LAYOUTS[layout] or heads
    tokens = 32 * ranks + 5
    generator = torch.Generator().manual_seed(0)
    device = mesh.device_type
    shapes = (heads, num_kv_heads, num_kv_heads, heads)
    q, k, v, weight = (
        torch.randn(
            1, count, tokens, 16, generator=generator, dtype=torch.float32, device="cpu"
        ).to(device)
        for count in shapes
    )
    mask = Causal() & Window(tokens // 2)

    latent = layout == "MLA"
    if latent:
        weight = weight[..., :LATENT]

    def gradients(call: Callable[..., Tensor], cut: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in ((q, k) if latent else (q, k, v))]
        here = [cut(x) for x in leaves]
        out = call(*here, *([here[1][..., :LATENT]] if latent else []))
        (out * cut(weight)).sum().backward()  # type: ignore[no-untyped-call]
        grads = [x.grad for x in leaves if x.grad is not None]
        return [out.detach(), *grads]

    def cut(x: Tensor) -> Tensor:
        return shard(x, mesh, order=order, dim=2)

    def over_ranks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v, mesh, exchange=exchange, order=order, mask=mask)
        assert isinstance(out, Tensor)
        return out

    try:
        found = gradients(over_ranks, cut)
    except UnsupportedError as error:
        return f"refused: {error}"
    wanted = gradients(lambda *parts: one_process(*parts, mask=mask), lambda x: x)
    # A rank's gradients are those of its own tokens; the rows of others are 0.
    own = [found[0], *map(cut, found[1:])]
    worst = max(float((a - cut(b)).abs().max()) for a, b in zip(own, wanted, strict=True))
    apart = torch.tensor(worst, device=device)
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    return "equal" if apart.item() <= BOUND else f"differs by {apart.item():.1e}"


def link_rate(mesh: DeviceMesh) -> float:
    """Bytes per second from this rank to the next while all send."""
    x = torch.zeros(MESSAGE, dtype=torch.uint8, device=mesh.device_type)
    y = torch.empty_like(x)
    rank, ranks = dist.get_rank(), mesh.size()
    times = []
    for _ in range(4):
        dist.barrier()
        began = time.perf_counter()
        following, before = (rank + 1) % ranks, (rank - 1) % ranks
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, following), dist.P2POp(dist.irecv, y, before)]
        ):
            work.wait()
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return MESSAGE / min(times)


def main() -> int:
    """Runs all checks; every rank returns 0, 1 where something differs, 2 without torchrun."""
    if not dist.is_torchelastic_launched():
        start = "torchrun --nproc-per-node=2 -m polyhead.parallel.check"
        print(f"error: this check is started by torchrun: {start}", file=sys.stderr)
        return 2
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("context",))
        first, failed = dist.get_rank() == 0, 0
        for what, found in checks(mesh):
            failed += found.startswith("differs")
            if first:
                print(f"{what:28}{found}", flush=True)
        rates = torch.zeros(mesh.size(), dtype=torch.float64, device=kind)
        if mesh.size() > 1:
            rates[dist.get_rank()] = link_rate(mesh)
            dist.all_reduce(rates)
        if first and mesh.size() > 1:
            slowest = int(rates.argmin())
            print(
                f"links: {rates.mean() / 1e9:.2f} GB/s, slowest {rates.min() / 1e9:.2f} GB/s from "
                f"rank {slowest} to {(slowest + 1) % mesh.size()}"
            )
        if first:
            print("all equal" if not failed else f"{failed} differ")
        return int(failed > 0)
    except PolyheadError as error:
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
