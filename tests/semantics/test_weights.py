"""Exact weights of chosen rows: what is masked is not read, autocast or not."""

import math

import pytest
import torch

import polyhead as ph
from polyhead.semantics import Specification, Tokens
from polyhead.semantics.weights import weight_rows

SCALE = 0.5
POISON = [math.nan, math.inf, -math.inf]


def heads(T=6, S=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, T, 4), (2, 2, S, 4), (2, 2, S, 4))
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def weights_of(q, k, v, mask):
    _, lse = ph.attention(q, k, v, mask=mask, scale=SCALE, return_lse=True)
    T, S = q.shape[2], k.shape[2]
    spec = Specification(scale=SCALE, mask=mask)
    return weight_rows(q, k, lse, spec, Tokens.of(T, shift=S - T), Tokens.of(S))


@pytest.mark.parametrize("poison", POISON)
def test_masked_keys_reach_neither_weights_nor_gradients(poison):
    q, k, v = heads()
    mask = ph.KeyLengths([0, 5])
    bad = k.clone()
    bad[0], bad[1, :, 5:] = poison, poison

    def run(k):
        leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
        found = weights_of(*leaves, v, mask)
        return found, *torch.autograd.grad(found.square().sum(), leaves)

    for clean, poisoned in zip(run(k), run(bad), strict=True):
        assert torch.equal(clean, poisoned)
    assert (run(bad)[0][0] == 0).all()


@pytest.mark.parametrize("poison", POISON)
def test_rows_that_see_a_poisoned_key_are_nan_and_no_other(poison):
    q, k, v = heads(T=8)
    bad = k.clone()
    bad[:, 1, 4, 2] = poison
    clean, spoiled = (weights_of(q, keys, v, ph.Causal()) for keys in (k, bad))
    assert torch.equal(clean[:, :2], spoiled[:, :2])
    assert torch.equal(clean[:, 2:, :4], spoiled[:, 2:, :4])
    assert spoiled[:, 2:, 4:].isnan().all()


def test_queries_that_see_nothing_are_not_read():
    q, k, v = heads(T=8)
    q[:, :, :3] = math.nan
    leaves = [q.requires_grad_(), k.requires_grad_()]
    found = weights_of(*leaves, v, ph.Causal() & ~ph.Prefix(3))
    assert (found[:, :, :3] == 0).all()
    for gradient in torch.autograd.grad(found.square().sum(), leaves):
        assert gradient.isfinite().all()


def test_autocast_does_not_round_the_scores():
    q, k, v = heads()
    _, lse = ph.attention(q, k, v, scale=SCALE, return_lse=True)
    arguments = (q, k, lse, Specification(scale=SCALE), Tokens.of(6, shift=2), Tokens.of(8))
    with torch.autocast("cpu", torch.bfloat16):
        found = weight_rows(*arguments)
    assert found.dtype == torch.float32
    assert torch.equal(found, weight_rows(*arguments))
