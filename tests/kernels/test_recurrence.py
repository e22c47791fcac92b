"""The recurrence: kernels against the oracle, laws of a state, gradients, padding, bad input."""

from __future__ import annotations

import itertools

import pytest
import torch

import polyhead as ph
from allocations import measured
from recurrence_oracle import check, check_draws, random_problem

DECAYS = (None, "head", "token", "feature")
KINDS = pytest.mark.parametrize(
    ("decay", "delta"), list(itertools.product(DECAYS, (False, True))), ids=str
)
KERNELS = pytest.mark.parametrize("kernel", ["reference", "chunked"])


def run(problem, kernel="auto", **changes):
    options = problem.options | {"return_state": True, "kernel": kernel} | changes
    return ph.recurrence(problem.q, problem.k, problem.v, **options)


def part(problem, tokens, state):
    """The arguments of some tokens, with the state before them."""
    q, k, v = (x[:, :, tokens] for x in (problem.q, problem.k, problem.v))
    options = dict(problem.options)
    for name in ("decay", "beta"):
        if name in options and options[name].ndim > 1:
            options[name] = options[name][:, :, tokens]
    if "real" in options:
        options["real"] = options["real"][:, tokens]
    return q, k, v, options | {"state": state}


@KINDS
@KERNELS
def test_float64_is_the_formula(kernel, decay, delta):
    for seed, heads in enumerate([(2, 2, 4), (4, 4, 4), (6, 2, 3), (1, 4, 2)]):
        problem = random_problem(
            seed, heads=heads, decay=decay, delta=delta, state=True, padded=seed % 2 == 0,
            sizes=(2, (70, 5, 64, 1)[seed], 16, 24),
        )  # fmt: skip
        check(problem, *run(problem, kernel))


@KINDS
def test_a_long_call_holds_the_numbers_of_some_tokens_and_equals_one_with_gradients(decay, delta):
    problem = random_problem(
        decay=decay, delta=delta, state=True, padded=True, sizes=(2, 1100, 8, 8)
    )
    used, found = measured(lambda: run(problem, "chunked"))
    problem.q.requires_grad_()
    most, wanted = measured(lambda: run(problem, "chunked"))
    torch.testing.assert_close(found, tuple(x.detach() for x in wanted), atol=1e-12, rtol=0)
    assert used < 0.8 * most


@pytest.mark.parametrize("key_dim", [16, 128])
@KINDS
def test_float32_stays_within_the_error_budget_beyond_several_chunks(decay, delta, key_dim):
    for strength in (0.02, 20.0):
        problems = [
            random_problem(
                seed, decay=decay, delta=delta, strength=strength, sizes=(1, 300, key_dim, 8),
                heads=(1, 1, 2), dtype=torch.float32,
            ) for seed in range(3)
        ]  # fmt: skip
        check_draws([(problem, *run(problem, "chunked")) for problem in problems])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_rounded_once(dtype):
    problem = random_problem(decay="feature", delta=True, state=True, dtype=dtype)
    out, state = run(problem, "chunked")
    assert out.dtype == dtype
    check(problem, out, state)


@pytest.mark.parametrize("decay", ["head", "token", "feature"])
def test_a_strong_decay_beside_weak_ones_loses_no_precision(decay):
    """The sum of strong log decays is large: differences of float32 sums would be wrong."""
    problem = random_problem(
        decay=decay, sizes=(1, 128, 8, 8), heads=(1, 1, 1), delta=True, dtype=torch.float32
    )
    if decay != "head":
        problem.options["decay"][:, :, ::3] = -20.0
        problem.options["decay"][:, :, 1::3] = -1e-3
        problem.options["decay"][:, :, 40] = -torch.inf
    else:
        problem.options["decay"][:] = -20.0
    check(problem, *run(problem, "chunked"))


@KINDS
@KERNELS
def test_uneven_parts_with_a_carried_state_equal_one_pass(kernel, decay, delta):
    problem = random_problem(
        decay=decay, delta=delta, state=True, padded=True, sizes=(2, 150, 8, 8)
    )
    whole, last = run(problem, kernel)
    state, outs = problem.options["state"], []
    for tokens in (slice(0, 1), slice(1, 66), slice(66, 67), slice(67, 67), slice(67, 150)):
        q, k, v, options = part(problem, tokens, state)
        out, state = ph.recurrence(q, k, v, **options, return_state=True, kernel=kernel)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, dim=2), whole, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(state, last, atol=1e-10, rtol=1e-10)


@KINDS
def test_gradients_are_those_of_finite_differences(decay, delta):
    problem = random_problem(
        decay=decay, delta=delta, state=True, padded=True, sizes=(1, 11, 3, 2), heads=(1, 1, 2)
    )
    names = [name for name in ("decay", "beta", "state") if name in problem.options]
    leaves = [problem.q, problem.k, problem.v, *(problem.options[name] for name in names)]
    leaves = [x.clone().requires_grad_() for x in leaves]

    def f(q, k, v, *rest):
        options = problem.options | dict(zip(names, rest, strict=True))
        return ph.recurrence(q, k, v, **options, return_state=True, kernel="chunked")

    assert torch.autograd.gradcheck(f, leaves, atol=1e-6)


@KINDS
def test_gradients_of_chunks_are_those_of_the_loop(decay, delta):
    problem = random_problem(
        decay=decay, delta=delta, strength=5.0, sizes=(1, 100, 8, 4), heads=(1, 1, 2)
    )
    found = []
    for kernel in ("reference", "chunked"):
        leaves = {name: getattr(problem, name).clone().requires_grad_() for name in "qkv"}
        options = {
            name: x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x
            for name, x in problem.options.items()
        }
        out, state = ph.recurrence(**leaves, **options, return_state=True, kernel=kernel)
        (out.sin().sum() + state.cos().sum()).backward()
        tensors = [*leaves.values(), *options.values()]
        found.append([x.grad for x in tensors if isinstance(x, torch.Tensor)])
    torch.testing.assert_close(found[1], found[0], atol=1e-9, rtol=1e-9)


@KERNELS
def test_ragged_rows_are_what_they_are_alone_and_padding_may_be_nan(kernel):
    for decay, delta in itertools.product(DECAYS, (False, True)):
        problem = random_problem(decay=decay, delta=delta, sizes=(3, 70, 8, 8))
        lengths = [70, 33, 0]
        tensors = [problem.q, problem.k, problem.v]
        tensors += [x for x in problem.options.values() if torch.is_tensor(x) and x.ndim > 1]
        alone = []
        for b, n in enumerate(lengths):
            q, k, v, options = part(problem, slice(0, n), None)
            rows = {
                name: x[b : b + 1] if torch.is_tensor(x) and x.ndim > 1 else x
                for name, x in options.items()
            }
            alone.append(
                ph.recurrence(
                    q[b : b + 1], k[b : b + 1], v[b : b + 1], **rows, return_state=True,
                    kernel=kernel,
                )
            )  # fmt: skip
            for x in tensors:
                x[b, :, n:] = torch.nan
        real = torch.tensor(lengths)
        out, state = run(problem, kernel, real=real)
        for b, n in enumerate(lengths):
            torch.testing.assert_close(out[b : b + 1, :, :n], alone[b][0], atol=1e-10, rtol=1e-10)
            torch.testing.assert_close(state[b : b + 1], alone[b][1], atol=1e-10, rtol=1e-10)
            assert not out[b, :, n:].any()


def test_gradients_of_padding_are_zero_though_it_is_nan():
    problem = random_problem(decay="feature", delta=True, sizes=(2, 9, 4, 4))
    problem.options["real"] = torch.tensor([9, 4])
    given = problem.q, problem.k, problem.v, *problem.options.values()
    leaves = [x for x in given if torch.is_tensor(x) and x.is_floating_point()]
    for x in leaves:
        x[1, :, 4:] = torch.nan
        x.requires_grad_()
    run(problem, "chunked")[0].sum().backward()
    for x in leaves:
        assert x.grad.isfinite().all()
        assert not x.grad[1, :, 4:].any()


@KINDS
def test_rows_of_weights_times_values_are_the_outputs(decay, delta):
    problem = random_problem(decay=decay, delta=delta, padded=True)
    rows = torch.tensor([0, 69, 3, -30, 3])
    weights = ph.recurrence_rows(problem.q, problem.k, problem.v, rows, **problem.options)
    assert weights.shape == (2, 4, 5, 70)
    out, _ = run(problem, "reference")
    torch.testing.assert_close(weights @ problem.v, out[:, :, rows], atol=1e-12, rtol=1e-12)
    ahead = torch.arange(70) > (rows % 70)[:, None]
    assert not weights[ahead.expand_as(weights)].any()
    assert not weights.mT[~problem.options["real"][:, None].expand(2, 4, 70)].any()


def test_without_decay_and_delta_it_is_attention_without_softmax():
    problem = random_problem(heads=(4, 4, 4))
    scores = problem.q @ problem.k.mT / 4
    wanted = scores.tril() @ problem.v
    torch.testing.assert_close(run(problem)[0], wanted, atol=1e-12, rtol=1e-12)


def test_a_state_is_overwritten_only_where_that_is_asked_for():
    problem = random_problem(decay="token", state=True)
    state = problem.options["state"]
    before = state.clone()
    _, last = run(problem, "chunked")
    assert torch.equal(state, before)
    _, same = run(problem, "chunked", in_place=True)
    assert same is state
    assert torch.equal(state, last)
    nothing = problem.q[:, :, :0], problem.k[:, :, :0], problem.v[:, :, :0]
    out, kept = ph.recurrence(*nothing, state=state, return_state=True, kernel="chunked")
    assert out.shape == (2, 4, 0, 24)
    assert torch.equal(kept, state)
    assert kept is not state


@KINDS
def test_every_tensor_is_made_on_the_device_of_q(decay, delta):
    """Asked of another device that every machine has: operations refuse to mix two."""
    problem = random_problem(
        decay=decay, delta=delta, state=delta, padded=True, dtype=torch.bfloat16
    )
    q, k, v = problem.q.to("meta"), problem.k.to("meta"), problem.v.to("meta")
    options = {
        name: x.to("meta") if torch.is_tensor(x) else x for name, x in problem.options.items()
    }
    assert ph.explain_recurrence(q, k, v, **options).kernel == "chunked"
    out, state = ph.recurrence(q, k, v, **options, return_state=True)
    options.pop("state", None)
    rows = torch.empty(3, dtype=torch.int64, device="meta")
    weights = ph.recurrence_rows(q, k, v, rows, **options)
    assert {x.device.type for x in (out, state, weights)} == {"meta"}
    assert (out.dtype, state.dtype, weights.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert (out.shape, state.shape, weights.shape) == (
        (2, 4, 70, 24),
        (2, 4, 16, 24),
        (2, 4, 3, 70),
    )


def test_autocast_lowers_q_k_v_and_nothing_inside():
    problem = random_problem(decay="token", delta=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, state = run(problem, "chunked")
    assert out.dtype == torch.bfloat16
    for name in "qkv":
        setattr(problem, name, getattr(problem, name).bfloat16())
    check(problem, out, state)


def test_explain_names_the_kernel_and_why_not_the_others():
    problem = random_problem(decay="token", delta=True, dtype=torch.float32)
    problem.q.requires_grad_()
    told = ph.explain_recurrence(problem.q, problem.k, problem.v, **problem.options)
    assert told.kernel == "chunked"
    assert told.refusals["reference"].startswith("supported, lower priority")
    text = str(told)
    assert "4 states of 16 × 24; batch 2, 70 tokens; float32 on cpu" in text
    assert "decay for each token; delta rule; beta" in text
    out, state = run(problem)
    assert told.bytes_written == out.nbytes + state.nbytes


X = torch.zeros(2, 4, 5, 8)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": 3}, TypeError, "q must be a floating-point tensor: got int"),
        ({"k": X.long()}, TypeError, "k must be a floating-point tensor: got a tensor"),
        ({"v": X[0]}, ValueError, r"v must be \[B, heads, T, size\]: got \[4, 5, 8\]"),
        ({"v": X[:, :0]}, ValueError, r"v must be \[B, heads, T, size\]"),
        ({"k": X.double()}, ValueError, "k must share dtype and device with q"),
        ({"k": X[:, :, :4]}, ValueError, "k must have the batch and the tokens of q, 2 and 5"),
        ({"k": X[..., :4]}, ValueError, "k must have the key size of q, 8: got 4"),
        ({"k": X[:, :3]}, ValueError, "heads of k must divide the largest .*, 4: got 3"),
        ({"decay": 0.5}, TypeError, "decay must be a floating-point tensor or None: got float"),
        ({"decay": torch.zeros(3)}, ValueError, r"decay must be \[H\] = \[4\] or \[B, H, T\]"),
        ({"beta": torch.zeros(2, 4)}, ValueError, r"beta must be \[B, H, T\] = \[2, 4, 5\]"),
        ({"delta": 1}, TypeError, "delta must be True or False"),
        ({"scale": float("nan")}, ValueError, "scale must be a finite number"),
        ({"state": X}, ValueError, r"state must be \[B, H, K, V\] = \[2, 4, 8, 8\]"),
        ({"state": torch.zeros(2, 4, 8, 8).double()}, ValueError, "state must be torch.float32"),
        ({"in_place": True}, ValueError, "in_place=True needs the state"),
        ({"real": torch.ones(2, 5)}, TypeError, "real must be a bool tensor"),
        ({"real": torch.tensor([6, 1])}, ValueError, r"real must be lengths from 0 to 5: got"),
        ({"real": torch.ones(2, dtype=torch.bool)}, ValueError, r"real must be \[B, T\] = "),
        ({"return_state": 0}, TypeError, "return_state must be True or False"),
        ({"kernel": "fast"}, ValueError, "kernel must be 'auto' or one of native, triton, chunked"),
        ({"causal": True}, TypeError, "recurrence has no argument 'causal'"),
    ],
)  # fmt: skip
def test_bad_input_is_named(changes, error, words):
    with pytest.raises(error, match=words):
        ph.recurrence(**{"q": X, "k": X, "v": X} | changes)


def test_bad_rows_are_named():
    with pytest.raises(TypeError, match="rows must be a tensor of whole numbers: got list"):
        ph.recurrence_rows(X, X, X, [0])
    with pytest.raises(ValueError, match=r"rows must be from -5 to 4: got \[5\]"):
        ph.recurrence_rows(X, X, X, torch.tensor([5]))
    with pytest.raises(ValueError, match=r"rows must be \[R\]"):
        ph.recurrence_rows(X, X, X, torch.tensor([[1]]))


def test_overwriting_what_gradients_need_is_refused():
    state = torch.zeros(2, 4, 8, 8)
    with pytest.raises(ValueError, match="in_place=True overwrites what gradients need"):
        ph.recurrence(X.clone().requires_grad_(), X, X, state=state, in_place=True)
