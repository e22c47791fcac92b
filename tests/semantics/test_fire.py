"""FIRE, a bias of several tensors: formula, gradients in every kernel, files and compile."""

import pytest
import torch
from torch import nn

import polyhead as ph
from polyhead.semantics import Tokens

H, WIDTH, T, S = 4, 6, 9, 21


def leaves(dtype=torch.float64):
    torch.manual_seed(0)
    shapes = [(WIDTH, 1), (WIDTH,), (H, WIDTH), (H,)]
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    tensors += [torch.tensor(0.1, dtype=dtype), torch.tensor(15.0, dtype=dtype)]
    return [x.requires_grad_() for x in tensors]


def formula(weight, bias, out, out_bias, c, threshold, queries=T, keys=S):
    """As the paper's appendix writes it."""
    mlp = nn.Sequential(nn.Linear(1, WIDTH), nn.ReLU(), nn.Linear(WIDTH, H))
    made = {"0.weight": weight, "0.bias": bias, "2.weight": out, "2.bias": out_bias}
    positions = torch.arange(keys, dtype=c.dtype)
    apart = positions[:, None] - positions[None, :]
    longest = torch.max(positions, threshold.abs())[:, None]
    x = torch.log((c * apart).abs() + 1) / (torch.log((c * longest).abs() + 1) + 1e-6)
    drawn = torch.func.functional_call(mlp, made, (x[..., None],))
    return drawn.permute(2, 0, 1)[None, :, keys - queries :]


def qkv(dtype=torch.float64):
    torch.manual_seed(1)
    return [torch.randn(2, n, x, 8, dtype=dtype) for n, x in ((H, T), (2, S), (2, S))]


def test_every_kernel_computes_the_formula_and_the_gradients_of_all_tensors(small_tiles):
    q, k, v = qkv()
    tensors = leaves()
    wanted = ph.attention(q, k, v, mask=ph.Causal(), bias=formula(*tensors), kernel="reference")
    gradients = torch.autograd.grad(wanted.cos().sum(), tensors)
    # What all keys of a query share changes no weight; all else does.
    assert [bool(x.abs().sum() > 1e-9) for x in gradients] == [True] * 3 + [False] + [True] * 2
    for kernel in ("reference", "tiled", "auto"):
        found = ph.attention(q, k, v, mask=ph.Causal(), bias=ph.FIRE(*tensors), kernel=kernel)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found.cos().sum(), tensors), gradients)
    for kernel in ("native", "flex", "sdpa"):
        if kernel not in ph.explain(q, k, v).refusals.get(kernel, "not available"):
            said = ph.explain(q.float(), k.float(), v.float(), bias=ph.FIRE(*leaves(torch.float32)))
            assert "FIRE([4], width=6)" in said.refusals[kernel] or "not" in said.refusals[kernel]


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_only_some_tensors_learn_in_half_precision(small_tiles, compiled):
    q, k, v = qkv(torch.bfloat16)
    tensors = [x.detach().bfloat16() for x in leaves()]
    tensors[2].requires_grad_()
    tensors[4].requires_grad_()

    def gradients(kernel):
        out = ph.attention(q, k, v, mask=ph.Causal(), bias=ph.FIRE(*tensors), kernel=kernel)
        return torch.autograd.grad(out.float().cos().sum(), [tensors[2], tensors[4]])

    wanted = gradients("reference")
    call = torch.compile(gradients, backend="eager") if compiled else gradients
    torch.testing.assert_close(call("tiled"), wanted, atol=0.05, rtol=0.05)


def test_heads_a_file_and_positions_of_rows(tmp_path):
    bias = ph.FIRE(*leaves(torch.float32))
    positions = torch.tensor([[5, 3, 9], [2, 2, 30]])
    q, k = Tokens.of(3, positions=positions), Tokens.of(S)
    drawn = bias.tile(q, k, torch.empty(0))
    assert drawn.shape == (2, H, 3, S)
    for row in range(2):
        alone = bias.tile(Tokens.of(3, positions=positions[row]), k, torch.empty(0))
        torch.testing.assert_close(drawn[row : row + 1], alone)
    torch.testing.assert_close(bias.of_heads([3, 1]).tile(q, k, torch.empty(0)), drawn[:, [3, 1]])
    layer = ph.MultiHeadAttention(32, H)
    with ph.probe(layer) as seen:
        layer(torch.randn(2, T, 32), mask=ph.Causal(), bias=bias)
    seen.save(tmp_path / "probe")
    (kept,) = ph.Probe.load(tmp_path / "probe")
    (view,) = seen
    torch.testing.assert_close(kept.rows(queries=slice(5, 6)), view.rows(queries=slice(5, 6)))


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (r"hidden_weight must be floating point of shape \[6, 1\]", {0: torch.ones(6)}),
        (r"output_weight must .* \[4, 6\]: .* of shape \[6, 4\]", {2: torch.ones(6, 4)}),
        ("c must be floating point .* got torch.int64", {4: torch.tensor(1)}),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(words, change):
    tensors = [change.get(i, x) for i, x in enumerate(leaves(torch.float32))]
    with pytest.raises(ValueError, match=words):
        ph.FIRE(*tensors)
    with pytest.raises(ValueError, match=r"\[H\] = \[8\]: got \[4\]"):
        ph.FIRE(*leaves()).check(1, 8, 1, 1)
