"""An attention together with its weights: the output as always, the weights recomputed from lse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.kernels.dispatch import attention
from polyhead.semantics import Bias, Specification, TensorBias, Tokens
from polyhead.semantics.scores import keep_weights
from polyhead.semantics.weights import weight_rows


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    q_positions: Tensor | None = None,
    dropout_p: float = 0.0,
    kernel: str = "auto",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """``attention`` and the weights ``[B, H, T, S]`` it applied, dropout included.

    Args:
        q: ``[B, H, T, D]``.
        k: ``[B, G, S, D]``.
        v: ``[B, G, S, V]``.
        dropout_p: As in ``attention``; the weights returned are those after dropout.
        options: ``mask``, ``bias``, ``softcap`` and ``sinks`` as in ``attention``.

    Returns:
        ``out [B, H, T, V]`` and the weights, both in q's dtype and differentiable. They are the
        T×S matrix: it is computed only on request.
    """
    generator = None
    if dropout_p:
        # Drawn from torch's global generator once, then repeated for the weights.
        start = int(torch.randint(1 << 31, ()))
        generator = torch.Generator().manual_seed(start)
    out, lse = attention(
        q, k, v, scale=scale, q_positions=q_positions, dropout_p=dropout_p, generator=generator,
        return_lse=True, kernel=kernel, **options,
    )  # fmt: skip
    seed = None
    if generator is not None:
        seed = torch.randint(1 << 31, (), generator=generator.manual_seed(start)).to(q.device)
    bias = options.get("bias")
    spec = Specification(
        scale=scale,
        mask=options.get("mask"),
        bias=bias if bias is None or isinstance(bias, Bias) else TensorBias(bias),
        softcap=options.get("softcap"),
        dropout_p=dropout_p,
        seed=seed,
    )
    T, S = q.shape[2], k.shape[2]
    rows, columns = Tokens.of(T, shift=S - T, positions=q_positions), Tokens.of(S)
    weights = weight_rows(q, k, lse, spec, rows, columns)
    if dropout_p:
        kept = keep_weights(spec, weights.shape, rows, columns)
        weights = torch.where(kept, weights / (1.0 - dropout_p), 0.0)
    return out, weights.to(q.dtype)
