"""The oracle of the recurrence: a loop in NumPy from the formula, without the package.

    S = D S + k uᵀ      u = β (v − δ (D S)ᵀ k)      o = Sᵀ q · scale

``recur(problem)`` is float64; ``recur(problem, np.float32)`` rounds every step to float32, the
dtype of a state: its distance from float64 is the error that float32 costs, and twice that is what
a kernel may err, beside the rounding of its output. The largest error of one draw is a matter of
chance, so that kernels which add in another order are compared over several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass
class Problem:
    """Arguments of ``ph.recurrence``; tensors are drawn by ``random_problem``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)


def random_problem(
    seed: int = 0,
    *,
    heads: tuple[int, int, int] = (2, 2, 4),
    sizes: tuple[int, int, int, int] = (2, 70, 16, 24),
    decay: str | None = None,
    strength: float = 0.3,
    delta: bool = False,
    state: bool = False,
    padded: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Random arguments.

    Args:
        seed: Of everything.
        heads: Heads of q, k and v.
        sizes: B, T, K, V.
        decay: None, ``"head"``, ``"token"`` or ``"feature"``.
        strength: Decays are drawn from −strength to 0.
        delta: With the delta rule and β.
        state: With a state before the first token.
        padded: With tokens that are not real.
        dtype: Of q, k and v.
    """
    random = torch.Generator().manual_seed(seed)
    (B, T, K, V), H = sizes, max(heads)
    q, k, v = (
        torch.randn(B, n, T, size, generator=random, dtype=torch.float64)
        for n, size in zip(heads, (K, K, V), strict=True)
    )
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    options: dict[str, Any] = {"delta": delta}
    if decay is not None:
        shape = {"head": (H,), "token": (B, H, T), "feature": (B, H, T, K)}[decay]
        drawn = torch.rand(shape, generator=random, dtype=torch.float64)
        options["decay"] = (-strength * drawn).to(precise)
    if delta:
        k = torch.nn.functional.normalize(k, dim=-1)
        options["beta"] = torch.rand(B, H, T, generator=random, dtype=torch.float64).to(precise)
    if state:
        drawn = torch.randn(B, H, K, V, generator=random, dtype=torch.float64)
        options["state"] = drawn.to(precise)
    if padded:
        options["real"] = torch.rand(B, T, generator=random) > 0.25
    return Problem(q.to(dtype), k.to(dtype), v.to(dtype), options)


def recur(problem: Problem, dtype: type = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """The outputs ``[B, H, T, V]`` and the last state ``[B, H, K, V]``."""
    q, k, v = (x.double().numpy().astype(dtype) for x in (problem.q, problem.k, problem.v))
    given = {
        name: x.numpy() if name == "real" else x.double().numpy().astype(dtype)
        for name, x in problem.options.items()
        if isinstance(x, torch.Tensor)
    }
    (B, _, T, K), V = q.shape, v.shape[3]
    H = max(x.shape[1] for x in (q, k, v))
    q, k, v = (np.repeat(x, H // x.shape[1], axis=1) for x in (q, k, v))
    scale = dtype(problem.options.get("scale", 1 / np.sqrt(K)))
    out = np.zeros((B, H, T, V), dtype)
    last = np.zeros((B, H, K, V), dtype)
    for b in range(B):
        for h in range(H):
            S = given["state"][b, h].copy() if "state" in given else np.zeros((K, V), dtype)
            for t in range(T):
                if "real" in given and not given["real"][b, t]:
                    continue
                if "decay" in given:
                    g = given["decay"]
                    log = g[h] if g.ndim == 1 else g[b, h, t]
                    S = (np.exp(log)[:, None] if g.ndim == 4 else np.exp(log)) * S
                u = v[b, h, t]
                if problem.options.get("delta"):
                    u = u - _weighted(S, k[b, h, t])
                if "beta" in given:
                    u = given["beta"][b, h, t] * u
                S = S + np.outer(k[b, h, t], u)
                out[b, h, t] = _weighted(S, q[b, h, t] * scale)
            last[b, h] = S
    return out, last


def _weighted(S: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Sᵀ x, added up term after term: BLAS rounds in another order on every processor."""
    return np.cumsum(S * x[:, None], axis=0)[-1]


def check(problem: Problem, out: torch.Tensor, state: torch.Tensor) -> None:
    """A result is within the error budget; the outputs of tokens that are not real are 0."""
    check_draws([(problem, out, state)])


def check_draws(draws: Sequence[tuple[Problem, torch.Tensor, torch.Tensor]]) -> None:
    """Results of several problems are within the error budget, that of the worst among them."""
    exact = [recur(problem) for problem, *_ in draws]
    rounded = [recur(problem, np.float32) for problem, *_ in draws]
    for part in range(2):
        costs = [np.abs(a[part] - b[part]).max() for a, b in zip(rounded, exact, strict=True)]
        for (_, *results), pair in zip(draws, exact, strict=True):
            found, wanted = results[part], pair[part]
            error = np.abs(found.double().numpy() - wanted)
            budget = 2 * max(costs) + np.zeros_like(error)
            if found.dtype == torch.float64:
                budget[:] = 1e-10 * max(1.0, np.abs(wanted).max())
            elif part == 0 and found.dtype != torch.float32:  # a state is not rounded
                budget += torch.finfo(found.dtype).eps * np.abs(wanted)
            assert (error <= budget).all(), (error.max(), budget.max())
    for _, out, state in draws:
        assert state.dtype == (torch.float64 if out.dtype == torch.float64 else torch.float32)
