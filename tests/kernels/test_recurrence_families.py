"""The recurrence against transformers' own functions, to float32 rounding.

Each kind is the call that ``docs/recurrence.md`` gives for it.
"""

from __future__ import annotations

import pytest
import torch

import polyhead as ph
from recurrence_oracle import random_problem

every_kernel = pytest.mark.parametrize("kernel", ["auto", "chunked", "reference"])


def close(found, wanted):
    """Within the rounding of sums of a few hundred float32 numbers."""
    error, size = (found - wanted).abs().max(), wanted.abs().max()
    assert error <= 2e-6 * max(size, 1.0), (error, size)


def by_tokens(*tensors):
    """``[B, H, T, …]`` as ``[B, T, H, …]``, which transformers takes."""
    return [x.transpose(1, 2) for x in tensors]


@every_kernel
def test_gated_delta_net_is_that_of_qwen3_next(kernel):
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    problem = random_problem(
        decay="token", delta=True, state=True, sizes=(2, 150, 16, 24), dtype=torch.float32
    )
    given = problem.options
    state = given["state"]
    out, last = ph.recurrence(
        problem.q, problem.k, problem.v, **given, return_state=True, kernel=kernel
    )
    arguments = by_tokens(problem.q, problem.k, problem.v, given["decay"], given["beta"])
    for function in (theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule):
        wanted, wanted_last = function(
            *arguments, initial_state=state.clone(), output_final_state=True
        )
        close(out, wanted.transpose(1, 2))
        close(last, wanted_last)


@every_kernel
def test_kimi_delta_attention_is_that_of_kimi_linear(kernel):
    theirs = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    problem = random_problem(
        decay="feature", delta=True, state=True, sizes=(2, 100, 16, 24), heads=(3, 3, 3),
        dtype=torch.float32,
    )  # fmt: skip
    given = problem.options
    out, last = ph.recurrence(
        problem.q, problem.k, problem.v, **given, return_state=True, kernel=kernel
    )
    arguments = by_tokens(problem.q, problem.k, problem.v, given["decay"], given["beta"])
    for function in (theirs.recurrent_kimi_delta_attention, theirs.chunk_kimi_delta_attention):
        wanted, wanted_last = function(
            *arguments, initial_state=given["state"].clone(), output_final_state=True
        )
        close(out, wanted.transpose(1, 2))
        close(last, wanted_last)


@every_kernel
def test_mamba2_is_a_recurrence_whose_values_are_x_times_dt(kernel):
    from transformers.models.mamba2 import modeling_mamba2 as theirs

    random = torch.Generator().manual_seed(0)
    batch, T, heads, groups, P, N = 2, 100, 4, 2, 24, 16
    x = torch.randn(batch, T, heads, P, generator=random)
    B, C = (torch.randn(batch, T, groups, N, generator=random) for _ in range(2))
    dt = torch.rand(batch, T, heads, generator=random)
    A = -torch.rand(heads, generator=random) * 4
    first = torch.randn(batch, heads, N, P, generator=random)

    out, last = ph.recurrence(
        *by_tokens(C, B, x * dt[..., None]), decay=(A * dt).transpose(1, 2), scale=1.0,
        state=first, return_state=True, kernel=kernel,
    )  # fmt: skip
    wanted, wanted_last = theirs.mamba2_chunk_scan(
        x, dt, A, B, C, chunk_size=32, initial_states=first.mT, return_final_states=True
    )
    close(out, wanted.transpose(1, 2))
    close(last, wanted_last.mT)


@every_kernel
def test_lightning_attention_is_that_of_minimax(kernel):
    from transformers.models.minimax import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = MiniMaxConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, num_hidden_layers=2, block_size=32,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    layer = MiniMaxLightningAttention(config, layer_idx=0).eval()
    caught = []
    layer.norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    x = torch.randn(2, 100, 32) * 3
    with torch.no_grad():
        _, wanted_last = layer(x, (None, None), None)
        qkv = layer.act_fn(layer.qkv_proj(x)).view(2, 100, 4, 24)
    out, last = ph.recurrence(
        *by_tokens(*qkv.split(8, dim=-1)), decay=-layer.slope_rate.flatten(), scale=1.0,
        return_state=True, kernel=kernel,
    )  # fmt: skip
    close(out.transpose(1, 2).flatten(2), caught[0])
    close(last, wanted_last)


@every_kernel
def test_retnet_is_its_parallel_form(kernel):
    """Sun et al. 2023, eq. 5: (Q Kᵀ ∘ D) V with D_nm = γ^(n − m)."""
    problem = random_problem(heads=(4, 4, 4), dtype=torch.float32)
    gamma = 1 - 2.0 ** (-5 - torch.arange(4.0))
    out = ph.recurrence(problem.q, problem.k, problem.v, decay=gamma.log(), kernel=kernel)
    apart = torch.arange(70)[:, None] - torch.arange(70)
    decays = (gamma.double()[:, None, None] ** apart).tril()
    q, k, v = (x.double() for x in (problem.q, problem.k, problem.v))
    close(out, (q @ k.mT * decays / 4 @ v).float())


@every_kernel
def test_gla_is_its_parallel_form(kernel):
    """Yang et al. 2023, eq. 4: (((Q ∘ B) (K / B)ᵀ) ∘ M) V with B the products of the gates."""
    problem = random_problem(decay="feature", heads=(4, 4, 4), dtype=torch.float32)
    decay = problem.options["decay"]
    out = ph.recurrence(problem.q, problem.k, problem.v, decay=decay, kernel=kernel)
    q, k, v = (x.double() for x in (problem.q, problem.k, problem.v))
    products = decay.double().cumsum(dim=2).exp()
    close(out, (((q * products) @ (k / products).mT).tril() / 4 @ v).float())
