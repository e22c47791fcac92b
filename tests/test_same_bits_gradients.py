"""``ph.batch_invariant()`` in training: gradients of a row, and of parts summed outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import polyhead as ph
from arrangements import LAYERS, model, texts
from polyhead import native
from polyhead.errors import UnsupportedError

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
BOTH = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def gradients(
    net: ph.Transformer, rows: list[int], threads: int, *, exactly: bool = True
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Of what the embedding gives, and of all weights, where each row's loss is its own."""
    torch.set_num_threads(threads)
    ids, seen = texts(140)[rows], []
    net.zero_grad()

    def keep(module: nn.Module, given: object, made: Tensor) -> None:
        made.retain_grad()
        seen.append(made)

    hook = net.embedding.register_forward_hook(keep)
    with ph.batch_invariant() if exactly else nullcontext():
        source = {"encoder_ids": ids.flip(1)} if net.config.encoder_layers else {}
        logits = net(ids, **source).float().log_softmax(-1)
        loss = -logits[:, :-1].gather(-1, ids[:, 1:, None]).sum(dim=(1, 2))
        loss.sum().backward()
    hook.remove()
    of_weights = {name: w.grad for name, w in net.named_parameters() if w.grad is not None}
    return [x.grad for x in seen], of_weights


def check(name: str, dtype: torch.dtype) -> None:
    with torch.no_grad():
        net = model(name, dtype)
    of_rows, of_weights = gradients(net, [0, 1, 2, 3], 3)
    assert of_rows
    for rows, threads in ([2], 1), ([3, 0], 5), ([1, 2, 2, 4, 1], 2):
        found, _ = gradients(net, rows, threads)
        for one, whole in zip(found, of_rows, strict=True):
            for i, row in enumerate(rows):
                assert row > 3 or torch.equal(one[i], whole[row]), (name, dtype, row)
    _, again = gradients(net, [0, 1, 2, 3], 1)
    for key, gradient in of_weights.items():
        assert torch.equal(again[key], gradient), (name, dtype, key)
    if dtype is torch.float32:
        _, otherwise = gradients(net, [0, 1, 2, 3], 2, exactly=False)
        # A bias of keys shifts all scores of a row alike: its gradient is 0 but for rounding.
        rounding = 1e-6 * max(x.abs().max().item() for x in otherwise.values())
        for key, gradient in of_weights.items():
            near = 1e-4 * otherwise[key].abs().max().item() + rounding
            assert torch.allclose(gradient, otherwise[key], rtol=1e-4, atol=near), key


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_gradients_of_a_row_have_the_same_bits_beside_any_others(name):
    check(name, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_a_row_have_the_same_bits_in_every_layer(name, dtype):
    check(name, dtype)


def test_gradients_of_parts_add_up_to_the_same_bits_in_one_order():
    """A batch in two parts, computed in either order, among other threads, summed outside."""
    with torch.no_grad():
        net = model("gpt2", torch.float32)

    def part(rows: list[int], threads: int) -> dict[str, Tensor]:
        return {key: x.clone() for key, x in gradients(net, rows, threads)[1].items()}

    first, second = part([0, 1, 2], 1), part([3, 4], 3)
    second_again, first_again = part([3, 4], 1), part([0, 1, 2], 5)
    for key in first:
        assert torch.equal(first[key] + second[key], first_again[key] + second_again[key]), key


def test_derivatives_have_the_same_bits_in_any_place():
    """Of functions that layers leave to torch: alone, among others, in other shapes and threads."""
    torch.manual_seed(0)
    x, grad = torch.randn(700, 61), torch.randn(700, 61)
    weight = torch.linspace(0.5, 1.5, 61)
    formulas = {
        "gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
        "silu": nn.functional.silu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "relu": torch.relu,
        "softplus": nn.functional.softplus,
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "layer_norm": lambda x: nn.functional.layer_norm(x, (61,), weight),
        "matmul": lambda x: x @ torch.linspace(0, 1, 61 * 61).view(61, 61),
        "repeated": lambda x: x[:, [*range(60), 3]],
    }

    def derivative(formula, x: Tensor, grad: Tensor, threads: int) -> Tensor:
        torch.set_num_threads(threads)
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(formula(x), x, grad)
        return found

    for name, formula in formulas.items():
        exact = None
        if name not in ("matmul", "layer_norm"):
            exact = derivative(formula, x.double(), grad.double(), 1)
        with ph.batch_invariant():
            wanted = derivative(formula, x, grad, 1)
            for threads, first, last in ((3, 0, 700), (2, 13, 14), (2, 699, 700), (5, 1, 600)):
                found = derivative(formula, x[first:last], grad[first:last], threads)
                assert torch.equal(found, wanted[first:last]), (name, first)
        if exact is None:
            exact = derivative(formula, x, grad, 1)
        assert torch.allclose(wanted.double(), exact.double(), rtol=1e-4, atol=1e-4), name


def test_derivatives_of_long_sums_have_the_same_bits_for_any_threads():
    draw = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, 3, 70_001, generator=draw)
    for formula in (torch.softmax, torch.log_softmax):
        x[..., 0] = 12.0 if formula is torch.log_softmax else 0.0  # the sum of grad is seen there
        with ph.batch_invariant():
            torch.set_num_threads(1)
            whole = x.clone().requires_grad_()
            formula(whole, -1).backward(grad)
            torch.set_num_threads(3)
            for i in range(3):
                one = x[i].clone().requires_grad_()
                formula(one, -1).backward(grad[i])
                assert torch.equal(one.grad, whole.grad[i]), formula


def test_additions_to_one_place_have_one_order():
    y = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    places = torch.arange(200_000) % 2
    with ph.batch_invariant():
        torch.set_num_threads(1)
        wanted = torch.zeros(2).index_put((places,), y, accumulate=True)
        torch.set_num_threads(3)
        for _ in range(3):
            assert torch.equal(torch.zeros(2).index_put((places,), y, accumulate=True), wanted)
            assert torch.equal(torch.zeros(2).index_add(0, places, y), wanted)
    assert torch.allclose(wanted, y.view(-1, 2).double().sum(0).float(), rtol=1e-3, atol=1e-2)


def test_without_native_code_there_is_no_such_block(monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: "switched off by a test")
    with pytest.raises(UnsupportedError, match="switched off by a test"), ph.batch_invariant():
        pass
