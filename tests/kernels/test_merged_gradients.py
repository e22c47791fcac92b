"""Gradients of a part of the keys, given the result over all of them, add up to autograd's."""

from __future__ import annotations

import pytest
import torch

import polyhead as ph
from polyhead import native
from polyhead.kernels.dispatch import gradients
from polyhead.semantics import State
from polyhead.semantics.arguments import call_of

BIASES = {
    "none": lambda: None,
    "T5": lambda: ph.RelativeBias(torch.randn(32, 4)),
    "ALiBi": lambda: ph.ALiBi(4),
    "a number for each pair": lambda: torch.randn(1, 4, 9, 12),
}


@pytest.mark.skipif(native.unavailable() is not None, reason="no native code here")
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("name", BIASES)
def test_parts_of_the_keys_add_up_to_the_gradients_of_all(name: str, learns: bool):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 12, 16), torch.randn(2, 2, 12, 16)
    bias = BIASES[name]()
    if isinstance(bias, ph.Bias):
        bias = bias.with_tensors([x.detach().requires_grad_(learns) for x in bias.tensors])
    elif bias is not None:
        bias.requires_grad_(learns)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    numbers = [] if bias is None or not learns else [*getattr(bias, "tensors", [bias])]
    mask, at = ph.Window(9, ahead=2), torch.arange(12)
    places = {"q_positions": at[3:], "kv_positions": at}
    out, lse = ph.attention(
        q, k, v, mask=mask, bias=bias, kernel="reference", return_lse=True, **places
    )
    grads = torch.randn_like(out), torch.randn_like(lse)
    wanted = torch.autograd.grad([out, lse], [*leaves, *numbers], grads)
    result = State(out.detach(), lse.detach())
    found = []
    for first, last in ((0, 5), (5, 12)):
        part = bias[..., first:last] if isinstance(bias, torch.Tensor) else bias
        call = call_of(
            q, k[:, :, first:last], v[:, :, first:last], mask, part, None, None, None,
            at[3:], at[first:last], None, 0.0, True,
        )  # fmt: skip
        made = gradients(call, result, grads, kernel="native")
        assert made is not None
        found.append(made)
        assert len(made) == 3 + len(numbers)
    ours = [
        found[0][0] + found[1][0],
        *(torch.cat(parts, 2) for parts in list(zip(*found, strict=True))[1:3]),
    ]
    if numbers:
        of_bias = [made[3] for made in found]
        whole = isinstance(bias, torch.Tensor)
        ours.append(torch.cat(of_bias, -1) if whole else of_bias[0] + of_bias[1])
    for mine, theirs in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
