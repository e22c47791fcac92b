"""A combination of features, judged against the oracle.

``judge`` computes a cell of ``axes`` with every registered kernel, forward and gradients, and says
for each kernel whether it matched within the error budget, refused by name, or is wrong (then it
raises AssertionError).

    |kernel − exact| ≤ 2 · |same formula rounded at every step − exact| + a rounding band

Shape letters: B batch, H query heads, G kv heads, T queries, S keys.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import oracle
import polyhead as ph
from axes import show
from polyhead.kernels import KERNELS

SWIFT = [name for name in KERNELS if name not in ("flex", "triton")]
"""Kernels that compile nothing; ``test_flex.py`` and ``test_triton.py`` judge the others."""


@dataclass
class Built:
    """A cell made concrete."""

    tensors: dict[str, Tensor]
    arguments: dict[str, Any]
    problem: oracle.Problem
    drawn_bias: Any
    """From the tensor behind the bias to ``[B, H, T, S]``, or None."""


def _lay_out(values: Tensor, memory: str) -> Tensor:
    """The same values as another view; ``expanded`` repeats the first batch row."""
    B, N, L, D = values.shape
    if memory == "permuted":
        view = values.transpose(1, 2).contiguous().transpose(1, 2)
    elif memory == "expanded":
        view = values[:1].clone().expand(B, -1, -1, -1)
    elif memory == "sliced":
        room = torch.full((B, N + 1, L + 3, D + 5), torch.nan, dtype=values.dtype)
        room[:, 1:, 2:-1, 3:-2] = values
        view = room[:, 1:, 2:-1, 3:-2]
    elif memory == "offset":
        room = torch.full((values.numel() + 7,), torch.nan, dtype=values.dtype)
        room[7:] = values.reshape(-1)
        view = room[7:].view(B, N, L, D)
    elif memory == "strided":
        room = torch.full((B, N, L, 2 * D), torch.nan, dtype=values.dtype)
        room[..., ::2] = values
        view = room[..., ::2]
    else:
        view = values.clone()
    return view


def _mask(
    name: str, dice: np.random.Generator, B: int, H: int, T: int, S: int, at: dict[str, Any]
) -> tuple[ph.Mask | None, np.ndarray]:
    """A mask expression and, written separately, the pairs that it allows."""
    q, k = at["q"][:, None, :, None], at["k"][:, None, None, :]
    q_place = (np.arange(T) + S - T)[None, None, :, None]
    k_place = np.arange(S)[None, None, None, :]
    everything = np.ones((B, H, T, S), bool)
    causal = (k <= q) & everything
    lengths = [[S // 3, S - S // 3 - S // 2, 0, S // 2], [S - 5, 2, 3]]
    document = np.zeros((2, 2, 1, 4096), int)
    for row, parts in enumerate(lengths):
        for side, places in enumerate((q_place, k_place)):
            ends = np.cumsum(parts)
            ids = [sum(int(p) >= end for end in ends) for p in places.reshape(-1)]
            document[row, side, 0, : len(ids)] = ids
    same = (
        np.stack([document[r, 0, 0, :T, None] == document[r, 1, 0, None, :S] for r in range(2)])[
            :, None
        ]
        & everything
    )
    short = np.array([0, S - 3])
    real = (k_place < short[:, None, None, None]) & everything
    some = dice.random((B, 1, T, S)) < 0.5
    per_key = dice.random((H, 1, S)) < 0.3
    tensor = torch.from_numpy
    if name == "none":
        return None, everything
    if name == "causal":
        return ph.Causal(), causal
    if name == "window":
        return ph.Window(5, ahead=3), (q - k < 5) & (k - q <= 3) & everything
    if name == "causal & window":
        return ph.Causal() & ph.Window(6), causal & (q - k < 6)
    if name == "prefix | causal":
        bound = np.array([3, 7])[:, None, None, None]
        return ph.Prefix([3, 7]) | ph.Causal(), causal | (k < bound)
    if name == "documents":
        return ph.Documents(lengths), same
    if name == "causal & documents":
        return ph.Documents(lengths) & ph.Causal(), same & causal
    if name == "key lengths":
        return ph.KeyLengths(torch.tensor([0, S - 3])), real
    if name == "keep":
        return ph.Keep(tensor(some)), some & everything
    if name == "drop":
        return ph.Drop(tensor(per_key)), ~per_key[None] & everything
    if name == "not":
        return ~(ph.Causal() | ph.Prefix(2)), ~(causal | (k < 2))
    mask = (ph.Causal() & ph.Window(7) | ph.Prefix(2)) & ph.KeyLengths([S - 2, S])
    allowed = (causal & (q - k < 7) | (k < 2)) & (
        k_place < np.array([S - 2, S])[:, None, None, None]
    )
    return mask & ~ph.Drop(tensor(some)) & ph.Keep(tensor(~per_key)), allowed & some & ~per_key[
        None
    ]


def build(cell: dict[str, Any]) -> Built:
    number = zlib.crc32(show(cell).encode())
    dice, generator = np.random.default_rng(number), torch.Generator().manual_seed(number)
    _, H, G, D, V = cell["heads"]
    (T, S), B, dtype = cell["sizes"], 2, cell["dtype"]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = {
        "q": _lay_out(draw(B, H, T, D), cell["memory"]),
        "k": _lay_out(draw(B, G, S, D), cell["memory"]),
    }
    shared = cell["heads"][0].endswith("slice of keys")
    tensors["v"] = tensors["k"][..., :V] if shared else _lay_out(draw(B, G, S, V), cell["memory"])
    arguments: dict[str, Any] = {}
    at = {
        "q": np.broadcast_to(np.arange(S - T, S), (B, T)),
        "k": np.broadcast_to(np.arange(S), (B, S)),
    }
    if cell["positions"] != "default":
        rows = 1 if cell["positions"] == "shared" else B
        at = {
            "q": dice.integers(0, S + 9, (rows, T)),
            "k": np.stack([dice.permutation(S + 9)[:S] for _ in range(rows)]),
        }
        for side, name in (("q", "q_positions"), ("k", "kv_positions")):
            positions = torch.from_numpy(at[side])
            arguments[name] = positions[0] if rows == 1 else positions
            at[side] = np.broadcast_to(at[side], (B, at[side].shape[1]))
    mask, visible = _mask(cell["mask"], dice, B, H, T, S, at)
    arguments |= {"mask": mask, "softcap": cell["softcap"], "scale": cell["scale"]}

    drawn_bias = None
    if cell["bias"] == "ALiBi":
        tensors["bias"] = draw(H).abs()
        apart = torch.from_numpy(-oracle.alibi(np.ones(H), at["q"], at["k"]))

        def drawn_bias(slopes: Tensor) -> Tensor:
            return -slopes[:, None, None] * apart.to(slopes.dtype)

        arguments["bias"] = ph.ALiBi
    elif cell["bias"].startswith("T5"):
        both = cell["bias"] == "T5"
        tensors["bias"] = draw(12, H)
        buckets = torch.from_numpy(
            oracle.t5_buckets(at["q"], at["k"], 12, bidirectional=both, max_distance=20)
        )

        def drawn_bias(table: Tensor) -> Tensor:
            return table[buckets].permute(0, 3, 1, 2)

        arguments["bias"] = lambda table: ph.RelativeBias(
            table, bidirectional=both, max_distance=20
        )
    elif cell["bias"].startswith("content"):
        # One tensor with the rows of the queries, then of the keys.
        far, heads = (20, 1) if cell["bias"] == "content, logarithmic" else (None, H)
        tensors["bias"] = draw(B if far else 1, heads, T + (S if far else 0), 12)
        columns = oracle.content_columns(at["q"], at["k"], 12, far)

        def drawn_bias(tables: Tensor) -> Tensor:
            of_key = tables[:, :, T:] if far else None
            return oracle.content_bias(tables[:, :, :T], of_key, columns, H)

        arguments["bias"] = lambda tables: ph.RelativeContentBias(
            tables[:, :, :T], tables[:, :, T:] if far else None, max_distance=far
        )
    elif cell["bias"].startswith("tensor"):
        tensors["bias"] = draw(B, H, T, S) if cell["bias"] == "tensor" else draw(H, 1, S)

        def drawn_bias(tensor: Tensor) -> Tensor:
            return tensor.expand(B, H, T, S)

        arguments["bias"] = lambda tensor: tensor
    if cell["sinks"]:
        tensors["sinks"] = draw(H)

    keep = None
    if cell["dropout"]:
        arguments |= {"dropout_p": cell["dropout"], "seed": number}
        seed = torch.randint(1 << 31, (), generator=torch.Generator().manual_seed(number))
        keep = oracle.dropout_keep(int(seed), cell["dropout"], B, H, T, S, S - T)
    exact = {name: x.double().numpy() for name, x in tensors.items()}
    problem = oracle.Problem(
        exact["q"],
        exact["k"],
        exact["v"],
        visible,
        bias=None if drawn_bias is None else drawn_bias(tensors["bias"].double()).numpy(),
        scale=cell["scale"],
        softcap=cell["softcap"],
        sinks=exact.get("sinks"),
        keep=keep,
        rate=cell["dropout"],
    )
    return Built(tensors, arguments, problem, drawn_bias)


def moved(x: Tensor, device: str) -> Tensor:
    """The same view of the same memory on another device."""
    count = x.untyped_storage().size() // x.element_size()
    memory = x.detach().as_strided((count,), (1,), 0).to(device)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def run(
    built: Built, kernel: str, *, grads: bool, lse: bool, device: str = "cpu"
) -> dict[str, Tensor]:
    """Everything that ``attention`` returns, and the gradients of Σ d_out out + Σ d_lse lse."""
    tensors = {
        n: x.detach() if device == "cpu" else moved(x, device) for n, x in built.tensors.items()
    }
    leaves = {n: x.requires_grad_(grads) for n, x in tensors.items()}
    arguments = dict(built.arguments)
    if "bias" in leaves:
        arguments["bias"] = arguments["bias"](leaves["bias"])
    if "seed" in arguments:
        arguments["generator"] = torch.Generator().manual_seed(arguments.pop("seed"))
    out = ph.attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        sinks=leaves.get("sinks"),
        return_lse=lse,
        kernel=kernel,
        **arguments,
    )
    found = dict(zip(("out", "lse"), out, strict=True)) if lse else {"out": out}
    if grads:
        total = loss(found["out"], found.get("lse"))
        pieces = torch.autograd.grad(total, list(leaves.values()))
        found |= {f"d_{name}": piece for name, piece in zip(leaves, pieces, strict=True)}
    return {name: x.detach().cpu() for name, x in found.items()}


def upstream(out: Any, lse: Any) -> tuple[np.ndarray, np.ndarray]:
    """Fixed gradients of the loss by out and lse."""
    d_out = np.cos(np.arange(np.prod(out.shape))).reshape(out.shape)
    return d_out, np.sin(np.arange(np.prod(lse.shape))).reshape(lse.shape)


def loss(out: Tensor, lse: Tensor | None) -> Tensor:
    d_out, d_lse = upstream(out, out[..., 0] if lse is None else lse)
    # In out's own precision: the upstream gradient must be one that the dtype can hold.
    total = (out * torch.from_numpy(d_out).to(out)).sum(dtype=torch.float64)
    if lse is not None:
        seen = torch.where(lse.isneginf(), 0.0, lse)
        total = total + (seen * torch.from_numpy(d_lse).to(lse)).sum(dtype=torch.float64)
    return total


def expected(built: Built, *, lse: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The oracle's answer and its magnitudes, taken back to the tensors behind a bias."""
    state = oracle.attend(built.problem)
    dtype = built.tensors["q"].dtype
    d_out, d_lse = upstream(state["out"], state["lse"])
    d_out = torch.from_numpy(d_out).to(dtype).double().numpy()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    d_lse = torch.from_numpy(d_lse).to(wide).double().numpy() * lse
    answers = []
    for function in (oracle.gradients, oracle.magnitudes):
        grads = function(built.problem, d_out, d_lse)
        if built.drawn_bias is not None:
            tensor = built.tensors["bias"].double().requires_grad_()
            drawn = built.drawn_bias(tensor)
            (piece,) = torch.autograd.grad(drawn, tensor, torch.from_numpy(grads["bias"]))
            grads["bias"] = piece.numpy()
        answers.append({f"d_{name}": grads[name] for name in built.tensors})
        out_size = grads.get("out")
    exact, sizes = answers
    finite = np.where(np.isneginf(state["lse"]), 0.0, state["lse"])
    return (
        exact | {"out": state["out"], "lse": state["lse"]},
        sizes | {"out": out_size, "lse": 1.0 + np.abs(finite)},
    )


def rounded(built: Built, *, lse: bool) -> dict[str, Tensor]:
    """The formula rounded at every step, with its gradients."""
    leaves = {n: x.detach().requires_grad_() for n, x in built.tensors.items()}
    drawn = dict(leaves)
    if built.drawn_bias is not None:
        drawn["bias"] = built.drawn_bias(leaves["bias"])
    out, lse_ = oracle.rounded(built.problem, drawn, built.tensors["q"].dtype)
    pieces = torch.autograd.grad(
        loss(out, lse_ if lse else None), list(leaves.values()), allow_unused=True
    )
    found = {"out": out.detach(), "lse": lse_.detach()}
    for (name, leaf), piece in zip(leaves.items(), pieces, strict=True):
        found[f"d_{name}"] = torch.zeros_like(leaf) if piece is None else piece
    return found


def worst(found: Any, exact: np.ndarray) -> float:
    """Largest absolute difference; where exact is −∞ found must be −∞ too."""
    values = found.double().numpy()
    empty = np.isneginf(exact)
    if not (np.isneginf(values) == empty).all() or np.isnan(values).any():
        return float("inf")
    return float(np.abs(np.where(empty, 0, values) - np.where(empty, 0, exact)).max(initial=0.0))


def band(name: str, size: np.ndarray, dtype: torch.dtype) -> float:
    """What rounding alone may add, in ulps of the sum of the absolute terms.

    Some dozen roundings lie between the inputs and a result; a narrow dtype is only rounded to at
    the end.
    """
    if name == "lse" and dtype != torch.float64:
        dtype = torch.float32
    ulps = 16 if dtype in (torch.float32, torch.float64) else 1
    return float(ulps * torch.finfo(dtype).eps * np.abs(size).max(initial=0.0))


def shares(
    built: Built,
    found: dict[str, Tensor],
    exact: dict[str, np.ndarray],
    sizes: dict[str, np.ndarray],
    same: dict[str, Tensor],
) -> dict[str, float]:
    """The error of each result as a share of its budget; above 1 it is wrong."""
    dtype, errors = built.tensors["q"].dtype, {}
    for part, value in found.items():
        error, cost = worst(value, exact[part]), worst(same[part], exact[part])
        errors[part] = error / max(2 * cost + band(part, sizes[part], dtype), 1e-300)
    return errors


def judge(
    cell: dict[str, Any],
    ratios: dict[Any, list[float]] | None = None,
    kernels: Sequence[str] = SWIFT,
    device: str = "cpu",
) -> dict[str, str]:
    """By kernel: "match", "forward only: why" or "refused: why"; raises where one is wrong."""
    built = build(cell)
    exact, sizes = expected(built, lse=cell["lse"])
    same = rounded(built, lse=cell["lse"])
    verdicts = {}
    for name in kernels:
        if (why := KERNELS[name].unavailable()) is not None:
            verdicts[name] = f"unavailable: {why}"
            continue
        verdict = "match"
        try:
            found = run(built, name, grads=True, lse=cell["lse"], device=device)
        except ph.UnsupportedError as error:
            check_refusal(name, str(error))
            try:
                found = run(built, name, grads=False, lse=cell["lse"], device=device)
                verdict = f"forward only: {error}"
            except ph.UnsupportedError as again:
                check_refusal(name, str(again))
                verdicts[name] = f"refused: {again}"
                continue
        for part, share in shares(built, found, exact, sizes, same).items():
            assert share <= 1.0, (
                f"{name}: {part} is off {share:.3g} times what it may: {show(cell)}"
            )
            if ratios is not None:
                ratios.setdefault((name, cell["dtype"]), []).append(share)
        verdicts[name] = verdict
    return verdicts


def uncompile_flex(set_attribute: Callable[[object, str, Any], None] = setattr) -> None:
    """Lets flex compute with the same mask and score functions, but without its compiler."""
    from torch.nn.attention import flex_attention as module

    from polyhead.kernels import flex

    set_attribute(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    set_attribute(flex, "_flex", lambda device_type, structure: module.flex_attention)
    set_attribute(flex, "_compiles_for_cpu", lambda: True)


def check_refusal(kernel: str, message: str) -> None:
    """A refusal names the kernel, the feature, and a kernel that can."""
    start, _, able = message.partition("; can: ")
    assert start.startswith(f"kernel {kernel!r} cannot do "), message
    assert len(start) > len(f"kernel {kernel!r} cannot do "), message
    assert any(name in able.split(", ") for name in KERNELS if name != kernel), message
