"""Norms, judged by float64 and by transformers' order of rounding."""

from __future__ import annotations

import pytest
import torch

from polyhead.config import NormConfig
from polyhead.layers import RMSNorm, build_norm


def of_llama(norm: RMSNorm) -> torch.nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(norm.dim, norm.eps).to(norm.weight.dtype)
    theirs.load_state_dict(norm.state_dict())
    return theirs


def of_gemma(norm: RMSNorm) -> torch.nn.Module:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    theirs = Gemma3RMSNorm(norm.dim, norm.eps).to(norm.weight.dtype)
    theirs.load_state_dict(norm.state_dict())
    return theirs


def random_norm(**fields) -> RMSNorm:
    norm = RMSNorm(48, 1e-6, **fields)
    torch.nn.init.normal_(norm.weight)
    return norm


def test_rmsnorm_is_the_formula():
    x, norm = torch.randn(3, 5, 48, dtype=torch.float64), random_norm().double()
    want = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_where_llama_does(dtype):
    norm = random_norm().to(dtype)
    x = torch.randn(64, 48).mul(3).to(dtype)
    off = (norm(x) != of_llama(norm)(x)).float().mean()
    # The float32 sums may differ in their last bit and move a tie; another order moves a third.
    assert off < 0.01


def test_low_precision_with_an_offset_rounds_where_gemma_does():
    norm = random_norm(weight_offset=1.0).bfloat16()
    x = torch.randn(64, 48).mul(3).bfloat16()
    assert (norm(x) != of_gemma(norm)(x)).float().mean() < 0.01


def test_offset_is_added_to_the_stored_weight():
    norm = random_norm(weight_offset=1.0)
    x = torch.randn(4, 48)
    torch.testing.assert_close(norm(x), of_gemma(norm)(x))


def test_a_row_of_zeros_has_finite_gradients():
    x = torch.zeros(2, 48, requires_grad=True)
    RMSNorm(48)(x).sum().backward()
    assert x.grad.isfinite().all()


def test_rmsnorm_gradients():
    norm = RMSNorm(6).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,)), (x, weight)
    )


@pytest.mark.parametrize(
    "config",
    [
        NormConfig("layernorm", bias=True),
        NormConfig("rmsnorm"),
        NormConfig("rmsnorm", 1e-6, False, 1.0),
    ],
)
def test_a_new_norm_scales_by_one(config):
    x = torch.randn(4, 16)
    y = build_norm(16, config)(x)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(4), atol=1e-3, rtol=0)


def test_combinations_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="rmsnorm has no bias"):
        build_norm(4, NormConfig("rmsnorm", bias=True))
    with pytest.raises(ValueError, match="without weight has no bias"):
        build_norm(4, NormConfig("layernorm", weight=False, bias=True))
    with pytest.raises(ValueError, match="'batchnorm'"):
        build_norm(4, NormConfig("batchnorm"))


@pytest.mark.parametrize("grad", [True, False])
def test_another_number_of_features_is_refused(grad):
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="x must have 8 features"):
        RMSNorm(8)(torch.randn(2, 16))
