"""Heads that remember a state: validate, choose a kernel, run.

out, state = recurrence(q, k, v, decay=decay, beta=beta, delta=True, return_state=True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from polyhead._utils.checks import check_bool
from polyhead.errors import UnsupportedError
from polyhead.kernels.base import Refusal, SwitchedOffError
from polyhead.kernels.dispatch import Explanation
from polyhead.kernels.recurrence import KERNELS, RecurrenceKernel
from polyhead.native import batch_invariant
from polyhead.semantics.argument_hints import refuse
from polyhead.semantics.recurrence import weight_rows
from polyhead.semantics.recurrence_call import RecurrenceCall, recurrence_call_of
from polyhead.semantics.scores import full_precision
from polyhead.semantics.storage import check_storage
from polyhead.semantics.tokens import is_traced

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Integer


@overload
def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = ...,
    beta: Tensor | None = ...,
    delta: bool = ...,
    scale: float | None = ...,
    state: Tensor | None = ...,
    real: Tensor | None = ...,
    in_place: bool = ...,
    return_state: Literal[False] = ...,
    kernel: str = ...,
) -> Tensor: ...


@overload
def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = ...,
    beta: Tensor | None = ...,
    delta: bool = ...,
    scale: float | None = ...,
    state: Tensor | None = ...,
    real: Tensor | None = ...,
    in_place: bool = ...,
    return_state: Literal[True],
    kernel: str = ...,
) -> tuple[Tensor, Tensor]: ...


def recurrence(
    q: Float[Tensor, "B Hq T K"],
    k: Float[Tensor, "B Hk T K"],
    v: Float[Tensor, "B Hv T V"],
    *,
    decay: Float[Tensor, ...] | None = None,
    beta: Float[Tensor, "B H T"] | None = None,
    delta: bool = False,
    scale: float | None = None,
    state: Float[Tensor, "B H K V"] | None = None,
    real: Integer[Tensor, ...] | None = None,
    in_place: bool = False,
    return_state: bool = False,
    kernel: str = "auto",
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Heads that remember a state of fixed size: linear attention, with decay and delta rule.

        S_t = D_t S_{t−1} + k_t u_tᵀ            D_t = exp(decay_t)
        u_t = β_t (v_t − (D_t S_{t−1})ᵀ k_t)    with delta; without: u_t = β_t v_t
        o_t = S_tᵀ q_t · scale

    Causal by nature. ``docs/recurrence.md`` lists the arguments of RetNet,
    Lightning attention, GLA, Mamba-2, gated DeltaNet and Kimi Delta Attention. H, the number of
    states, is the largest number of heads among q, k and v; each of them may have fewer, a divisor
    of H, and head h then uses head h // (H / heads) of it.

    Args:
        q: ``[B, H or fewer, T, K]`` queries: float64, float32, bfloat16 or float16, any strides.
        k: ``[B, H or fewer, T, K]`` keys.
        v: ``[B, H or fewer, T, V]`` values.
        decay: Natural logarithms of what the state is multiplied with before a token is written,
            at most 0: ``[H]`` for each head, ``[B, H, T]`` for each token too, ``[B, H, T, K]`` for
            each key feature too. −∞ forgets everything. None: nothing is forgotten.
        beta: ``[B, H, T]`` how much of a token is written; None: 1.
        delta: Whether a token replaces what the state answers to its key (the delta rule); keys
            should then have a length of about 1.
        scale: Factor of the outputs; default 1/√K.
        state: ``[B, H, K, V]`` what was remembered before the first token, in float32 (float64
            beside float64); None: zeros.
        real: Which tokens are no padding: ``[B, T]`` bool, or ``[B]`` lengths. A token that is not
            real leaves the state as it is, is not read, and its output is 0.
        in_place: Whether ``state`` is overwritten with the state after the last token.
        return_state: Also return that state.
        kernel: ``"auto"`` or a kernel's name; a kernel that is named never falls back.
        **unknown: Refused.

    Returns:
        ``out [B, H, T, V]`` in q's dtype; with ``return_state`` also the state after the last
        token, ``[B, H, K, V]`` in float32 (float64 for float64).

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: Shapes, dtypes or numbers that do not fit, or an unknown kernel.
        UnsupportedError: The kernel that was named cannot do what is asked; names the feature.
    """
    if unknown:
        refuse("recurrence", unknown)
    check_bool("return_state", return_state)
    call = recurrence_call_of(q, k, v, decay, beta, delta, scale, state, real, in_place)
    out, last = run_recurrence(call, kernel)
    return (out, last) if return_state else out


def run_recurrence(call: RecurrenceCall, kernel: str = "auto") -> tuple[Tensor, Tensor]:
    """Computes a call that was checked: ``out`` and the last state, as ``recurrence`` does."""
    chosen = _choose(call, kernel)
    for name, x in call.tensors().items():
        check_storage(name, x)
    try:
        with full_precision(call.q):
            out, last = chosen.run(call)
    except SwitchedOffError:
        if kernel != "auto":
            raise
        return run_recurrence(call)
    if last is call.state:
        return out, last if call.in_place else last.clone()  # there was no token
    if call.in_place and call.state is not None:
        last = call.state.copy_(last)
    return out, last


def recurrence_rows(
    q: Float[Tensor, "B Hq T K"],
    k: Float[Tensor, "B Hk T K"],
    v: Float[Tensor, "B Hv T V"],
    rows: Int[Tensor, " R"],
    *,
    decay: Float[Tensor, ...] | None = None,
    beta: Float[Tensor, "B H T"] | None = None,
    delta: bool = False,
    scale: float | None = None,
    real: Integer[Tensor, ...] | None = None,
) -> Tensor:
    """What chosen tokens look at through the state: the weights of all values in their outputs.

    ``recurrence_rows(q, k, v, rows, …) @ v`` are rows ``rows`` of ``recurrence(q, k, v, …)``, which
    never computes these weights. Without decay and delta, ``w_ts = β_s k_sᵀ q_t · scale``. They may
    be negative and do not add up to 1.

    Args:
        q: As ``recurrence`` takes it, and so k, v, decay, beta, delta, scale and real.
        k: Keys.
        v: Values, of which only the shape is read.
        rows: ``[R]`` indexes of queries, whole numbers; negative ones count from the last.
        decay: Log decays.
        beta: How much of a token is written.
        delta: Whether by the delta rule.
        scale: Factor of the outputs.
        real: Which tokens are no padding.

    Returns:
        ``[B, H, R, T]`` in float32 (float64 for float64), differentiable; 0 behind the row itself
        and for tokens that are not real.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: Shapes or rows that do not fit.
    """
    call = recurrence_call_of(q, k, v, decay, beta, delta, scale, None, real, False)
    T = call.q.shape[2]
    if not isinstance(rows, Tensor) or rows.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"rows must be a tensor of whole numbers: got {type(rows).__name__}")
    if rows.ndim != 1:
        raise ValueError(f"rows must be [R]: got shape {list(rows.shape)}")
    rows = rows.to(call.q.device)
    if not is_traced(rows) and len(rows) and not -T <= int(rows.min()) <= int(rows.max()) < T:
        raise ValueError(f"rows must be from {-T} to {T - 1}: got {rows.tolist()}")
    with full_precision(call.q):
        return weight_rows(call, rows % max(T, 1))


def explain_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    delta: bool = False,
    scale: float | None = None,
    state: Tensor | None = None,
    real: Tensor | None = None,
    in_place: bool = False,
    return_state: bool = False,
    kernel: str = "auto",
) -> Explanation:
    """Shows which kernel ``recurrence`` would run for these arguments, and why not the others.

    Takes the arguments of ``recurrence``, computes nothing, and raises the same errors."""
    check_bool("return_state", return_state)
    call = recurrence_call_of(q, k, v, decay, beta, delta, scale, state, real, in_place)
    chosen, refusals = _choose(call, kernel), {}
    for other in KERNELS.values():
        if other is chosen:
            continue
        if (why := other.unavailable()) is not None:
            refusals[other.name] = f"not available: {why}"
        elif (refused := other.plan(call)) is not None:
            refusals[other.name] = f"cannot do {refused.feature}"
        elif (why := other.auto_skip_reason(call)) is not None:
            refusals[other.name] = f"only when named explicitly: {why}; {other.summary}"
        else:
            refusals[other.name] = f"supported, lower priority: {other.summary}"
    B, _, T, K = call.q.shape
    of_column = T * call.q.itemsize + K * call.dtype.itemsize  # of the outputs and of the state
    return Explanation(
        kernel=chosen.name,
        summary=chosen.summary,
        refusals=refusals,
        call=_describe(call),
        bytes_read=sum(x.nbytes for x in call.tensors().values()),
        bytes_written=B * call.heads * call.v.shape[3] * of_column,
        gather_bytes=0,
    )


def _choose(call: RecurrenceCall, name: str) -> RecurrenceKernel:
    """The kernel named, or the first that can do all of the call."""
    if name == "auto":
        if batch_invariant.is_enabled():
            if isinstance(refused := KERNELS["native"].plan(call), Refusal):
                raise UnsupportedError(
                    f"batch_invariant() cannot keep the bits of {refused.feature}"
                )
            return KERNELS["native"]
        return next(
            each
            for each in KERNELS.values()
            if each.unavailable() is None
            and each.plan(call) is None
            and each.auto_skip_reason(call) is None
        )
    named = KERNELS.get(name) if isinstance(name, str) else None
    if named is None:
        raise ValueError(f"kernel must be 'auto' or one of {', '.join(KERNELS)}: got {name!r}")
    if batch_invariant.is_enabled() and name != "native":
        raise UnsupportedError(f"batch_invariant() needs kernel='native' or 'auto': got {name!r}")
    if (why := named.unavailable()) is not None:
        raise UnsupportedError(f"kernel {name!r} is not available: {why}")
    if (refused := named.plan(call)) is not None:
        able = [
            other.name
            for other in KERNELS.values()
            if other.unavailable() is None and other.plan(call) is None
        ]
        raise UnsupportedError(
            f"kernel {name!r} cannot do {refused.feature}; can: {', '.join(able)}"
        )
    return named


def _describe(call: RecurrenceCall) -> str:
    B, _, T, K = call.q.shape
    kinds = {1: "each head", 3: "each token", 4: "each key feature"}
    decay = "none" if call.decay is None else f"for {kinds[call.decay.ndim]}"
    words = [
        f"{call.heads} states of {K} × {call.v.shape[3]}",
        f"batch {B}, {T} tokens",
        f"{str(call.q.dtype).removeprefix('torch.')} on {call.q.device}",
        f"decay {decay}",
    ]
    words += ["delta rule"] if call.delta else []
    words += ["beta"] if call.beta is not None else []
    words += ["padding"] if call.real is not None else []
    return "; ".join(words)
