"""``ph.attention`` on random shapes, layouts, kinds of tensors and meanings, against the oracle.

Every case is computed in float64 from the formula (``tests/oracle.py``). Arguments that contradict
each other are sentences; whatever else comes back must be the oracle's numbers within the rounding
of the dtype, whichever kernel ran.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

import polyhead as ph

sys.path.append(str(Path(__file__).parents[2] / "tests"))
oracle: Any = importlib.import_module("oracle")

CLOSE = {
    torch.float64: 1e-9,
    torch.float32: 2e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 6e-3,
}
KINDS = ("plain",) * 8 + (
    "parameter", "negated", "imaginary", "resized", "fake", "meta", "wrapped", "subclass",
    "distributed",
)  # fmt: skip
mesh: Any = None


class Wrapped(Tensor):
    """A tensor without memory around one that has some."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype
        )
        return made

    def __init__(self, inner: Tensor) -> None:
        self.held: Tensor = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda x: x.held, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, function(*args, **kwargs))


class Named(Tensor):
    """A subclass that changes nothing."""


def prepare() -> None:
    global mesh
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for number in range(300):  # kinds of tensors load parts of torch at first use
        try:
            case(Random(number))
        except Exception:
            continue


def case(random: Random) -> None:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    dtype = random.choice([torch.float32, *CLOSE])
    B, G = random.choice([0, 1, 1, 2, 3]), random.choice([1, 1, 2, 3])
    H, T = G * random.choice([1, 1, 2, 4, 5]), random.choice([1, 1, 2, 7, 17, 40])
    S = random.choice([0, 1, 3, 8, 16, 33, 64, 65, 130, 200])
    D, V = (random.choice([1, 3, 8, 16, 32, 64, 72]) for _ in range(2))
    q, k, v = (
        _layout(random, torch.randn(shape, generator=generator).to(dtype))
        for shape in ((B, H, T, D), (B, G, S, D), (B, G, S, V))
    )
    meaning = _Meaning(random, generator, (B, H, T, S))
    arguments = meaning.arguments
    if random.random() < 0.03:
        q = q[..., : (D + 1) // 2]  # and sizes that do not go together
    tensors = [q, k, v]
    exact = meaning.exact(q, k, v) if q.shape[-1] == D else None
    kind = random.choice(KINDS)
    which = set(random.choice([(0,), (1,), (2,), (1, 2), (0, 1, 2)]))
    if kind in ("fake", "meta", "wrapped", "distributed"):
        which = {0, 1, 2}
    if kind != "plain":
        tensors = [_as(kind, x) if i in which else x for i, x in enumerate(tensors)]
    if kind == "meta" and "sinks" in arguments and random.random() < 0.9:
        arguments["sinks"] = arguments["sinks"].to("meta")
    grad = random.random() < 0.3 and kind in ("plain", "parameter")
    if grad:
        tensors = [x.detach().requires_grad_() for x in tensors]
    kernel = random.choice(["auto"] * 6 + ["native", "tiled", "reference", "sdpa"])
    with torch.set_grad_enabled(grad):
        out, lse = ph.attention(*tensors, kernel=kernel, return_lse=True, **arguments)
    assert out.shape == (B, H, T, V), (out.shape, kind)
    if isinstance(out, FakeTensor) or out.is_meta:
        FakeTensorMode.cache_clear()  # torch keeps 30 KB of each new shape
        return
    assert exact is not None, "sizes that do not go together were accepted"
    given_back = kind == "resized" and any(tensors[i].numel() for i in which)
    assert not given_back, "memory that was given back was read"
    out, lse = (_plain(x) for x in (out, lse))
    _compare(out, exact["out"], CLOSE[dtype], "out")
    _compare(lse, exact["lse"], 4 * CLOSE[dtype], "lse")
    if grad and out.numel() and out.requires_grad:
        d_out = torch.randn(out.shape, generator=generator).to(dtype)
        d_lse = torch.zeros_like(lse)
        found = torch.autograd.grad(out, tensors, d_out, allow_unused=True)
        wanted = oracle.gradients(meaning.problem, d_out.double().numpy(), d_lse.double().numpy())
        for name, one in zip("qkv", found, strict=True):
            if one is not None:
                _compare(one, wanted[name], 20 * CLOSE[dtype], f"gradient of {name}")


class _Meaning:
    """A mask, bias, scale, softcap, sinks and positions, as arguments and drawn out."""

    def __init__(self, random: Random, generator: torch.Generator, sizes: tuple[int, ...]) -> None:
        B, H, T, S = self.sizes = sizes
        self.arguments: dict[str, Any] = {}
        shift = S - T
        rows, columns = torch.arange(shift, shift + T), torch.arange(S)
        if random.random() < 0.2:
            far = random.choice([0, 5, -3, 1 << 31, 1 << 40])
            rows = rows + far
            listed = rows if random.random() < 0.5 else rows.expand(max(1, B), T)
            self.arguments["q_positions"] = listed
            if random.random() < 0.5:
                columns = torch.randperm(S, generator=generator) + far
                self.arguments["kv_positions"] = columns
        apart = rows[:, None] - columns[None, :]
        self.visible = np.ones((B, H, T, S), bool)
        self.bias: np.ndarray | None = None
        if random.random() < 0.6:
            window, ahead = random.choice([1, 4, 30, 1 << 34]), random.choice([0, 3, 1 << 34])
            shape = [random.choice([1, size]) for size in (B, H, T)]
            keep = torch.rand(*shape, S, generator=generator) < 0.6
            mask, seen = random.choice(
                [
                    (ph.Causal(), apart >= 0),
                    (ph.Causal() & ph.Window(window), (apart >= 0) & (apart < window)),
                    (ph.Window(window, ahead=ahead), (apart < window) & (-apart <= ahead)),
                    (ph.Prefix(5) | ph.Causal(), (columns < 5)[None] | (apart >= 0)),
                    (ph.Keep(keep), keep),
                    (ph.Drop(keep) & ph.Causal(), ~keep & (apart >= 0)),
                    (~ph.Causal(), apart < 0),
                ]
            )  # fmt: skip
            self.arguments["mask"] = mask
            self.visible = self.visible & seen.numpy()
        kind = random.choice([None, None, "alibi", "tensor"])
        if kind == "alibi":
            farthest = int(apart.abs().max()) if apart.numel() else 1
            slopes = torch.rand(H, generator=generator) / max(1, farthest)
            self.arguments["bias"] = ph.ALiBi(slopes)
            self.bias = -slopes.double().numpy()[:, None, None] * apart.abs().double().numpy()
        elif kind == "tensor":
            shape = [random.choice([1, size]) for size in sizes]
            bias = torch.randn(shape, generator=generator)
            self.arguments["bias"] = torch._neg_view(-bias) if random.random() < 0.1 else bias
            self.bias = bias.double().numpy()
        if random.random() < 0.2:
            self.arguments["scale"] = random.choice([0.0, -0.3, 0.5])
        if random.random() < 0.2:
            self.arguments["softcap"] = random.choice([2.0, 30.0])
        if random.random() < 0.2:
            self.arguments["sinks"] = torch.randn(H, generator=generator)

    def exact(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        sinks = self.arguments.get("sinks")
        bias = self.bias
        self.problem: Any = oracle.Problem(
            *(x.detach().double().numpy() for x in (q, k, v)),
            visible=self.visible,
            bias=None if bias is None else np.broadcast_to(bias, self.sizes),
            scale=self.arguments.get("scale"),
            softcap=self.arguments.get("softcap"),
            sinks=None if sinks is None else sinks.double().numpy(),
        )
        exact: dict[str, Any] = oracle.attend(self.problem)
        return exact


def _layout(random: Random, x: Tensor) -> Tensor:
    """The same values as another view."""
    how = random.choice(["dense", "dense", "tokens first", "strided", "columns first", "offset"])
    if how == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "strided":
        return torch.stack((x, x.flip(-1)), dim=-1)[..., 0]
    if how == "columns first":
        return x.mT.contiguous().mT
    if how == "offset":
        return torch.nn.functional.pad(x, (3, 2, 1, 0))[..., 1:, 3 : 3 + x.shape[-1]]
    return x


def _as(kind: str, x: Tensor) -> Tensor:
    """The same values as another kind of tensor."""
    if kind == "parameter":
        return torch.nn.Parameter(x, requires_grad=False)
    if kind == "negated":
        return torch._neg_view(-x)
    if kind == "imaginary":
        if x.dtype not in (torch.float32, torch.float64):
            return x
        return torch.complex(x, -x).conj().imag
    if kind == "resized":
        x = x.clone()
        x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)
        return x
    if kind == "fake":
        return MODE.from_tensor(x)
    if kind == "meta":
        return x.to("meta")
    if kind == "wrapped":
        return Wrapped(x)
    if kind == "subclass":
        return x.as_subclass(Named)
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


MODE = FakeTensorMode(allow_non_fake_inputs=True)


def _plain(x: Tensor) -> Tensor:
    if isinstance(x, Wrapped):
        return x.held
    return x.to_local() if hasattr(x, "to_local") else x


def _compare(found: Tensor, wanted: np.ndarray, close: float, name: str) -> None:
    exact = torch.from_numpy(wanted)
    mine = found.detach().as_subclass(Tensor).double().resolve_neg()
    fine = torch.isclose(mine, exact, atol=close, rtol=close, equal_nan=True)
    some, right = mine[~fine][:3].tolist(), exact[~fine][:3].tolist()
    assert fine.all(), f"{name}: {some} where {right} is right"
