"""The recurrence: the meaning of heads that remember a state of fixed size, beside the formula.

    S_t = D_t S_{t−1} + k_t u_tᵀ                D_t = exp(decay_t)
    u_t = β_t (v_t − (D_t S_{t−1})ᵀ k_t)        with delta; without: u_t = β_t v_t
    o_t = S_tᵀ q_t · scale

S is ``[K, V]``: what keys are to be answered with. D decays it, as a number for each head, for each
head and token, or for each key feature too (a diagonal). The delta rule first takes out what the
state already answers to k (Schlag et al. 2021, eq. 24; Yang et al. 2024, arXiv 2412.06464, eq. 10).
``docs/recurrence.md`` lists which arguments are linear attention, RetNet, Lightning attention, GLA,
Mamba-2, gated DeltaNet and Kimi Delta Attention.

It goes from token to token, works in float64 for float64 and in float32 for everything else, and
rounds once, at the end. Every other kernel is judged against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.semantics.recurrence_call import RecurrenceCall


def recur(call: RecurrenceCall) -> tuple[Tensor, Tensor]:
    """Computes ``out [B, H, T, V]`` in q's dtype and the last state ``[B, H, K, V]``."""
    q, k, v, decay, beta = call.precise()
    state, outs = call.first_state(), []
    for t in range(q.shape[2]):
        k_t, u = k[:, :, t, :, None], v[:, :, t, None, :]
        if decay is not None:
            state = decay[:, :, t, :, None].exp() * state
        if call.delta:
            u = u - k_t.mT @ state
        if beta is not None:
            u = beta[:, :, t, None, None] * u
        state = state + k_t * u
        outs.append(q[:, :, t, None, :] @ state)
    return call.rounded(torch.cat(outs, dim=2) if outs else v), state


def weight_rows(call: RecurrenceCall, rows: Tensor) -> Tensor:
    """The weights of chosen rows: what the state makes each output a sum of values of.

        o_t = Σ_s w_ts v_s      w_ts = β_s k_sᵀ a_s
        a_t = q_t · scale       a_{s−1} = D_s (a_s − k_s w_ts) with delta; without: D_s a_s

    a goes back through the products that the state went through. Weights may be negative and do
    not add up to 1. An initial state is no token: its part of o_t is in no weight.

    Args:
        call: What was computed.
        rows: ``[R]`` indexes of queries, in the range 0 to T − 1.

    Returns:
        ``[B, H, R, T]`` in float32 (float64 for float64); 0 for tokens behind t.
    """
    q, k, _, decay, beta = call.precise()
    chosen = q[:, :, rows]
    back, found = torch.zeros_like(chosen), []
    for s in reversed(range(q.shape[2])):
        back = torch.where((rows == s)[:, None], chosen, back)
        weights = back @ k[:, :, s, :, None]
        if beta is not None:
            weights = beta[:, :, s, None, None] * weights
        found.append(weights)
        if call.delta:
            back = back - weights * k[:, :, s, None, :]
        if decay is not None:
            back = back * decay[:, :, s, None, :].exp()
    return torch.cat(found[::-1], dim=-1)
