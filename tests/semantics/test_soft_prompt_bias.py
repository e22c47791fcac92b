"""A bias by distance within a prompt and within a text: formula and gradients in every kernel."""

import pytest
import torch

import polyhead as ph
from polyhead.semantics import SoftPromptBias, Tokens

P = 5


def test_the_bias_is_the_buckets_of_each_part_and_a_number_between_them(small_tiles):
    torch.manual_seed(1)
    T = P + 30
    table, apart = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (12, 2))
    within = ph.RelativeBias(table, max_distance=7).tile(Tokens.of(T), Tokens.of(T), table)
    of_text = torch.arange(T) >= P
    across = apart[of_text.long()].mT[:, :, None]
    drawn = torch.where(of_text[:, None] == of_text, within, across)
    q, k, v = (torch.randn(2, n, T, 8, dtype=torch.float64) for n in (4, 2, 2))
    wanted = ph.attention(q, k, v, bias=drawn, kernel="reference")
    gradients = torch.autograd.grad(wanted.cos().sum(), (table, apart))
    bias = SoftPromptBias(table, apart, length=P, max_distance=7)
    for kernel in ("reference", "tiled", "auto"):
        found = ph.attention(q, k, v, bias=bias, kernel=kernel)
        torch.testing.assert_close(found, wanted)
        found = torch.autograd.grad(found.cos().sum(), (table, apart))
        torch.testing.assert_close(found, gradients)
    some = bias.of_heads([2, 0])
    found = ph.attention(q[:, [2, 0]], k, v, bias=some)
    wanted = ph.attention(q[:, [2, 0]], k, v, bias=drawn[:, [2, 0]], kernel="reference")
    torch.testing.assert_close(found, wanted)
    with pytest.raises(ValueError, match=r"apart must be \[2, 4\]: got \[4, 2\]"):
        SoftPromptBias(table, apart.mT, length=P)
