"""Linear layers with gradients: native products where they are faster, torch's everywhere else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as everywhere

import polyhead as ph
from polyhead import native
from polyhead.layers import FeedForward
from polyhead.layers.fused import linears
from polyhead.layers.linear import linear, product
from polyhead.native import tensor_check
from polyhead.native.code import Code

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture
def native_products(monkeypatch):
    """How many products each kind of native call has made."""
    made = {"product": 0, "matmul": 0}

    def counted(name):
        plain = getattr(Code, name)

        def call(*args, **kwargs):
            made[name] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(Code, name, call)

    for name in made:
        counted(name)
    monkeypatch.setattr(Code, "matmul_dtypes", frozenset(CLOSE))
    return made


def close(found, wanted, dtype):
    size = wanted.abs().max().item()
    torch.testing.assert_close(
        found.double(), wanted, atol=CLOSE[dtype] * max(1.0, size), rtol=CLOSE[dtype]
    )


@pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_many_rows(native_products, code, dtype, bias):
    """Of 2 · 70 rows: x with gaps between its rows, and gradients that are broadcast."""
    torch.manual_seed(0)
    modules = [nn.Linear(80, n, bias=bias).to(dtype) for n in (96, 70, 3)]
    x = torch.randn(2, 70, 99).to(dtype).requires_grad_()
    parts = [x, *(p for m in modules for p in m.parameters())]
    doubles = [part.detach().double().requires_grad_() for part in parts]
    each = iter(doubles[1:])
    pairs = [(next(each), next(each) if bias else None) for _ in modules]
    exact = [F.linear(doubles[0][..., :80], *pair) for pair in pairs]
    with native.using(code):
        found = linears(x[..., :80], *modules)
        for mine, wanted in zip(found, exact, strict=True):
            close(mine, wanted.detach(), dtype)
        assert native_products == {"product": 3, "matmul": 0}
        loss, of_exact = (outs[0].sum() + (outs[1] * outs[1]).sum() for outs in (found, exact))
        grads = torch.autograd.grad(loss, parts, allow_unused=True)
    wanted = torch.autograd.grad(of_exact, doubles, allow_unused=True)
    assert native_products["matmul"] == 4  # of x and of the weight, for two modules
    for mine, theirs in zip(grads, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            close(mine, theirs, dtype)


def test_a_single_product_and_a_network_take_them_too(native_products):
    torch.manual_seed(0)
    x, module = torch.randn(100, 80, requires_grad=True), nn.Linear(80, 70)
    for run in (lambda: linear(x, module), lambda: product(x, module.weight, module.bias)):
        before = dict(native_products)
        found = torch.autograd.grad(run().square().sum(), [x, *module.parameters()])
        assert native_products["product"] == before["product"] + 1
        assert native_products["matmul"] == before["matmul"] + 2
        wanted = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-5)
    FeedForward(80, 96, "silu")(x).sum().backward()
    assert native_products == {"product": 5, "matmul": 10}


def test_second_derivatives_are_torchs(native_products):
    torch.manual_seed(0)
    x, module = torch.randn(100, 80, requires_grad=True), nn.Linear(80, 70)

    def second(y):
        (first,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *module.parameters()])

    for mine, theirs in zip(second(linear(x, module)), second(module(x)), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert native_products["product"] == 1  # none in the graph of the first derivative


def test_torch_multiplies_what_native_code_may_not(native_products):
    module, x = nn.Linear(80, 70), torch.randn(100, 80, requires_grad=True)
    hooked, double = nn.Linear(80, 70), nn.Linear(80, 70).double()
    hooked.register_full_backward_hook(lambda *_: None)
    few, narrow = x[:64], nn.Linear(80, 3)
    linear(few, module).sum().backward()
    linear(x, hooked).sum().backward()
    linear(x.double(), double).sum().backward()
    torch.func.grad(lambda x: linear(x, module).sum())(x.detach())
    assert native_products == {"product": 0, "matmul": 0}
    with ph.batch_invariant():  # whose own products are native, and in one order
        linear(x, module).sum().backward()
    assert native_products["matmul"] == 0
    before = native_products["product"]
    linear(x, narrow).sum().backward()  # the gradient of a weight of three rows is torch's
    assert native_products == {"product": before + 1, "matmul": 1}


@pytest.mark.parametrize(
    "register",
    [
        lambda module, hook: module.register_full_backward_pre_hook(hook),
        lambda _, hook: everywhere.register_module_forward_pre_hook(hook),
        lambda _, hook: everywhere.register_module_full_backward_pre_hook(hook),
        lambda _, hook: everywhere.register_module_full_backward_hook(hook),
    ],
)
def test_every_hook_sees_its_module(native_products, register):
    module, x, seen = nn.Linear(80, 70), torch.randn(100, 80, requires_grad=True), []
    handle = register(module, lambda of, *_: seen.append(of))
    try:
        linear(x, module).sum().backward()
    finally:
        handle.remove()
    assert seen == [module]
    assert native_products == {"product": 0, "matmul": 0}


@pytest.mark.parametrize("rows", [100, 3])
def test_frozen_weights_and_autocast(native_products, rows):
    torch.manual_seed(0)
    module, x = nn.Linear(80, 70).requires_grad_(False), torch.randn(rows, 80, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, module)
    assert y.dtype is torch.bfloat16
    (grad,) = torch.autograd.grad(y.float().square().sum(), x)
    with torch.autocast("cpu", torch.bfloat16):
        (wanted,) = torch.autograd.grad(module(x).float().square().sum(), x)
    torch.testing.assert_close(grad, wanted, atol=0.1, rtol=0.05)
    assert native_products == (
        {"product": 1, "matmul": 1} if rows > 64 else {"product": 0, "matmul": 0}
    )


@pytest.mark.parametrize("name", ["avx512_amx", "avx512_bf16", "avx512", "avx2", "portable"])
def test_which_dtypes_are_multiplied(name):
    """Before anything is measured."""
    fast = Code(tensor_check.MODULE, 0, name).matmul_dtypes
    assert (torch.bfloat16 in fast) == (name == "avx2")
    assert (torch.float16 in fast) == (name != "portable")


def test_inputs_that_do_not_fit_get_torchs_error(native_products):
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        linear(torch.randn(100, 79, requires_grad=True), nn.Linear(80, 70))
    assert native_products["product"] == 0
