"""The recurrence in Triton equals the oracle, interpreted on a CPU or compiled on a GPU.

TRITON_INTERPRET=1 pytest tests/kernels/test_triton_recurrence.py
"""

import itertools

import pytest
import torch

pytest.importorskip("triton")

import polyhead as ph
from polyhead.errors import UnsupportedError
from polyhead.kernels.recurrence import KERNELS
from polyhead.kernels.triton import blocks, self_test
from recurrence_oracle import check, check_draws, random_problem

if (_why := KERNELS["triton"].unavailable()) is not None:
    pytest.skip(_why, allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DECAYS = (None, "head", "token", "feature")
KINDS = pytest.mark.parametrize(
    ("decay", "delta"), list(itertools.product(DECAYS, (False, True))), ids=str
)


def run(problem, kernel="triton", **changes):
    def moved(x):
        return x.to(DEVICE) if torch.is_tensor(x) else x

    options = problem.options | {"return_state": True, "kernel": kernel} | changes
    options = {name: moved(x) for name, x in options.items()}
    out, state = ph.recurrence(*map(moved, (problem.q, problem.k, problem.v)), **options)
    return out.cpu(), state.cpu()


@KINDS
def test_it_stays_within_the_error_budget(decay, delta):
    sizes = itertools.cycle([(2, 33, 17, 77), (1, 1, 16, 64), (2, 16, 1, 3), (1, 70, 32, 20)])
    heads = itertools.cycle([(2, 2, 4), (6, 2, 3), (1, 1, 1)])
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float32)):
        problem = random_problem(
            seed, decay=decay, delta=delta, dtype=dtype, state=seed != 1, padded=seed % 2 == 0,
            heads=next(heads), sizes=next(sizes),
        )  # fmt: skip
        check(problem, *run(problem))


@pytest.mark.parametrize("key_dim", [16, 100, 256])
@KINDS
def test_several_chunks_stay_within_it_whatever_the_strength_of_decays(decay, delta, key_dim):
    for strength in (0.02, 20.0):
        problems = [
            random_problem(
                seed, decay=decay, delta=delta, strength=strength, sizes=(1, 80, key_dim, 8),
                heads=(1, 1, 1), dtype=torch.float32,
            ) for seed in range(2 if key_dim < 200 else 1)
        ]  # fmt: skip
        check_draws([(problem, *run(problem)) for problem in problems])


@pytest.mark.parametrize("decay", ["token", "feature"])
def test_a_strong_decay_beside_weak_ones_loses_no_precision(decay):
    problem = random_problem(
        decay=decay, sizes=(1, 128, 32, 8), heads=(1, 1, 1), delta=True, dtype=torch.float32
    )
    problem.options["decay"][:, :, ::3] = -20.0
    problem.options["decay"][:, :, 1::3] = -1e-3
    problem.options["decay"][:, :, 40] = -torch.inf
    check(problem, *run(problem))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, of 0 times infinity
@KINDS
def test_parts_with_a_carried_state_equal_one_pass_and_padding_may_be_nan(decay, delta):
    problem = random_problem(
        decay=decay, delta=delta, state=True, padded=True, sizes=(2, 60, 20, 18),
        dtype=torch.float32,
    )  # fmt: skip
    whole, last = run(problem)
    hidden = ~problem.options["real"][:, None]
    tensors = [problem.q, problem.k, problem.v]
    by_token = [x for name, x in problem.options.items() if name in ("decay", "beta")]
    for x in (*tensors, *(x for x in by_token if x.ndim > 1)):
        x[hidden.expand(x.shape[:3])] = torch.nan
    state, outs = problem.options["state"], []
    for tokens in (slice(0, 1), slice(1, 38), slice(38, 60)):
        options = {
            name: x[:, tokens] if name == "real" else x[:, :, tokens]
            for name, x in problem.options.items()
            if torch.is_tensor(x) and x.ndim > 1 and name != "state"
        }
        options = problem.options | options | {"state": state.to(DEVICE), "return_state": True}
        out, state = ph.recurrence(
            *(x[:, :, tokens].to(DEVICE) for x in tensors), kernel="triton",
            **{name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in options.items()},
        )  # fmt: skip
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, dim=2).cpu(), whole, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state.cpu(), last, atol=2e-5, rtol=2e-5)
    state = torch.full_like(problem.options["state"], torch.inf)
    for tokens in (5, 60):
        real = torch.arange(60)[:tokens] % 3 > 0
        given = (x[:, :, :tokens].to(DEVICE) for x in (whole[..., :1], whole[..., :1], whole))
        out = ph.recurrence(
            *given, state=state[:, :, :1].to(DEVICE), real=real.expand(2, -1).to(DEVICE),
            kernel="triton",
        )  # fmt: skip
        for found in (whole[hidden.expand(whole.shape[:3])], out[:, :, (~real).to(DEVICE)]):
            assert not found.any()


@pytest.mark.parametrize("tokens", [3, 40])
def test_any_strides_and_a_state_in_place(tokens):
    problem = random_problem(
        decay="feature", delta=True, state=True, sizes=(2, tokens, 16, 24), dtype=torch.float32
    )
    out, last = run(problem)
    state = problem.options["state"].to(DEVICE).transpose(2, 3).contiguous().mT  # K innermost
    options = {
        name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in problem.options.items()
    }
    options |= {"state": state, "in_place": True, "return_state": True}
    options["beta"] = options["beta"].transpose(1, 2).contiguous().transpose(1, 2)
    options["decay"] = options["decay"].mT.contiguous().mT
    given = (x.to(DEVICE).transpose(1, 2).contiguous() for x in (problem.q, problem.k, problem.v))
    found, same = ph.recurrence(*(x.transpose(1, 2) for x in given), kernel="triton", **options)
    assert same is state
    assert torch.equal(found.cpu(), out)
    assert torch.equal(state.cpu(), last)


def test_what_it_cannot_do_is_named():
    problem = random_problem(decay="token")
    q, k, v, options = problem.q, problem.k, problem.v, problem.options
    wide = torch.zeros(1, 1, 2, 257)
    cases = [
        ((q, k, v), options, "float64"),
        ((q.float().requires_grad_(), k.float(), v.float()), {}, "gradients"),
        ((wide, wide, wide), {}, "a key size of 257"),
        ((wide[:, :, :0, :9],) * 3, {}, "no batch rows or no tokens"),
    ]
    for given, named, feature in cases:
        with pytest.raises(UnsupportedError, match=f"'triton' cannot do {feature}; can: "):
            ph.recurrence(*given, **named, kernel="triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="of a CPU")
def test_interpreted_kernels_run_only_where_they_are_named():
    problem = random_problem(decay="token", dtype=torch.float32)
    told = ph.explain_recurrence(problem.q, problem.k, problem.v, **problem.options)
    assert told.kernel != "triton"
    assert "only when named explicitly: on a CPU it is interpreted" in told.refusals["triton"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_test_at_first_use_passes_and_sees_a_wrong_kernel(monkeypatch, dtype):
    from polyhead.kernels.triton import recurrence

    parts, device = blocks.state_parts(20, 5), torch.device(DEVICE)
    kinds = [self_test.States("token", True), self_test.States("feature", False)]
    for kind in kinds:
        assert self_test.disagreement_of_states(device, dtype, parts, kind) is None
    own = recurrence.recur

    def late(call):
        out, state = own(call)
        if call.q.shape[2] > recurrence.FEW:  # wrong only from chunk to chunk
            state = state * 1.1
        return out, state

    monkeypatch.setattr(recurrence, "recur", late)
    for kind in kinds:
        assert "differs" in self_test.disagreement_of_states(device, dtype, parts, kind)
