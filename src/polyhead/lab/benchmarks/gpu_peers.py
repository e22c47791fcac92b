"""Attention of other libraries on a GPU; like ``peers``, each returns None for what it cannot do.

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyhead.lab.benchmarks.case import Call
from polyhead.lab.benchmarks.problem import Problem

Prepare = Callable[[Problem, Tensor, Tensor, Tensor], Call | None]


def backend_of_sdpa(backend: SDPBackend, prepare: Prepare) -> Prepare:
    """Torch's attention by one of its backends, where that takes the call."""

    def prepared(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call | None:
        call = prepare(problem, q, k, v)
        if call is None:
            return None

        def run() -> Any:
            with sdpa_kernel(backend):
                return call()

        try:
            run()
        except RuntimeError:  # "No available kernel"
            return None
        return run

    return prepared


def flash_attn(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call | None:
    """The flash-attn package: windows, softcap and ALiBi too."""
    if problem.documents or problem.sinks or problem.latent or not _is_half(q):
        return None
    attend = import_module("flash_attn").flash_attn_func
    behind = -1 if problem.window is None else problem.window - 1
    options = {
        "causal": problem.causal,
        "window_size": (behind, 0 if problem.causal else -1),
        "softcap": problem.softcap or 0.0,
        "alibi_slopes": problem.slopes.to(q.device) if problem.alibi else None,
    }
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return lambda: attend(q, k, v, **options).transpose(1, 2)


def flashinfer(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call | None:
    """FlashInfer on one sequence: prefill, or the decoding of one query."""
    special = problem.documents or problem.sinks or problem.latent or problem.alibi
    if special or problem.batch > 1 or not _is_half(q):
        return None
    library = import_module("flashinfer")
    options: dict[str, Any] = {"logits_soft_cap": problem.softcap}
    if problem.window is not None:
        options["window_left"] = problem.window - 1
    q_THD, k_SGD, v_SGD = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    if problem.queries == 1:
        one, decode = q_THD[0], library.single_decode_with_kv_cache
        return lambda: decode(one, k_SGD, v_SGD, **options)[None, :, None]
    prefill = library.single_prefill_with_kv_cache
    options["causal"] = problem.causal
    return lambda: prefill(q_THD, k_SGD, v_SGD, **options).transpose(0, 1)[None]


def xformers(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call | None:
    """xformers' memory-efficient attention, full or causal."""
    plain = not (problem.window or problem.documents or problem.alibi or problem.sinks)
    if not plain or problem.softcap or problem.latent or problem.heads != problem.kv_heads:
        return None
    if problem.causal and problem.queries not in (1, problem.keys):
        return None
    library = import_module("xformers.ops")
    causal = problem.causal and problem.queries > 1
    mask = library.LowerTriangularMask() if causal else None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend = library.memory_efficient_attention
    return lambda: attend(q, k, v, attn_bias=mask).transpose(1, 2)


def _is_half(q: Tensor) -> bool:
    return q.dtype in (torch.float16, torch.bfloat16)


BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LIBRARIES: dict[str, Prepare] = {
    "flash-attn": flash_attn,
    "FlashInfer": flashinfer,
    "xformers": xformers,
}
NAMES = (*BACKENDS, *LIBRARIES)
"""What every case of attention meets on a GPU, beside the peers that it names itself."""
