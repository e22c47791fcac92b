"""The recurrence in native code: every instruction set against the oracle, equal bits, refusals."""

from __future__ import annotations

import itertools

import pytest
import torch

import polyhead as ph
from polyhead import native
from polyhead.errors import NotPlainError, UnsupportedError
from recurrence_oracle import check, random_problem

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
every_code = pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
DECAYS = (None, "head", "token", "feature")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(problem, **changes):
    options = problem.options | {"return_state": True, "kernel": "native"} | changes
    return ph.recurrence(problem.q, problem.k, problem.v, **options)


@every_code
def test_it_stays_within_the_error_budget(code):
    kinds = itertools.product(DECAYS, (False, True), DTYPES)
    sizes = itertools.cycle([(2, 33, 17, 77), (1, 1, 16, 64), (2, 5, 1, 3), (1, 70, 32, 144)])
    heads = itertools.cycle([(2, 2, 4), (6, 2, 3), (1, 1, 1)])
    with native.using(code):
        for seed, (decay, delta, dtype) in enumerate(kinds):
            problem = random_problem(
                seed, decay=decay, delta=delta, dtype=dtype, state=seed % 3 > 0,
                padded=seed % 2 == 0, heads=next(heads), sizes=next(sizes),
            )  # fmt: skip
            check(problem, *run(problem))


@every_code
@pytest.mark.parametrize("strength", [0.01, 20.0])
def test_long_sequences_and_strong_decays_stay_within_it(code, strength):
    for decay, delta in (("token", True), ("feature", True), ("token", False)):
        problem = random_problem(
            decay=decay, delta=delta, strength=strength, sizes=(1, 400, 16, 16), heads=(1, 1, 2),
            dtype=torch.float32,
        )  # fmt: skip
        check(problem, *run(problem))


@every_code
def test_each_part_of_a_state_is_taken_once_by_threads_that_keep_theirs(code):
    """Of few tokens; the states are large enough for threads, and their parts no multiple."""
    problem = random_problem(
        5, decay="token", delta=True, dtype=torch.float32, state=True, padded=False,
        heads=(5, 5, 5), sizes=(1, 4, 128, 192),
    )  # fmt: skip
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        try:
            with native.using(code):
                found.append(run(problem))
        finally:
            torch.set_num_threads(threads)
    check(problem, *found[0])
    for out, state in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(state, found[0][1])


@every_code
def test_bits_do_not_depend_on_batch_parts_or_threads(code):
    problem = random_problem(
        decay="token", delta=True, state=True, sizes=(3, 90, 32, 100), dtype=torch.bfloat16
    )
    q, k, v, given = problem.q, problem.k, problem.v, problem.options
    with native.using(code):
        out, last = run(problem)
        threads = torch.get_num_threads()
        torch.set_num_threads(3)
        again, _ = run(problem)
        torch.set_num_threads(threads)
        assert torch.equal(again, out)
        state, outs = given["state"][1:2], []
        for tokens in (slice(0, 1), slice(1, 50), slice(50, 90)):
            few = {name: given[name][1:2, :, tokens] for name in ("decay", "beta")}
            with ph.batch_invariant():
                one, state = ph.recurrence(
                    *(x[1:2, :, tokens] for x in (q, k, v)), **few, delta=True, state=state,
                    return_state=True,
                )  # fmt: skip
            outs.append(one)
    assert torch.equal(torch.cat(outs, dim=2), out[1:2])
    assert torch.equal(state, last[1:2])


def test_a_step_updates_the_state_in_place():
    problem = random_problem(decay="token", delta=True, state=True, dtype=torch.float32)
    state = problem.options["state"]
    before, address = state.clone(), state.data_ptr()
    _, last = run(problem)
    assert torch.equal(state, before)
    _, same = run(problem, in_place=True)
    assert same is state
    assert state.data_ptr() == address
    assert torch.equal(state, last)
    # One that lies with gaps is written too.
    gaps = torch.zeros(2, 4, 16, 48)[..., ::2].copy_(before)
    _, same = run(problem, state=gaps, in_place=True)
    assert same is gaps
    assert torch.equal(gaps, last)


def test_any_strides_and_padding_that_is_nan():
    problem = random_problem(decay="feature", delta=True, padded=True, dtype=torch.float32)
    wanted = run(problem)
    real = problem.options["real"]
    for name in "qkv":
        x = getattr(problem, name)
        x[~real[:, None].expand(x.shape[:3])] = torch.nan
        setattr(problem, name, x.transpose(1, 2).contiguous().transpose(1, 2))
    problem.v = problem.v.mT.contiguous().mT
    problem.options["decay"] = problem.options["decay"].mT.contiguous().mT
    for found, other in zip(run(problem), wanted, strict=True):
        assert torch.equal(found, other)


def test_auto_takes_it_and_it_refuses_by_name():
    problem = random_problem(decay="token", dtype=torch.float32)
    q, k, v = problem.q, problem.k, problem.v
    assert ph.explain_recurrence(q, k, v).kernel == "native"
    for arguments, words in (
        ((q.double(), k.double(), v.double()), "cannot do float64"),
        ((q.clone().requires_grad_(), k, v), "cannot do gradients; can: chunked, reference"),
        ((q.to("meta"), k.to("meta"), v.to("meta")), "cannot do tensors on meta"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            ph.recurrence(*arguments, kernel="native")
    with pytest.raises(UnsupportedError, match=r"cannot do torch\.func"):
        torch.func.vmap(lambda x: ph.recurrence(x, x, x, kernel="native"))(
            torch.ones(2, 1, 1, 3, 4)
        )
    with ph.batch_invariant(), pytest.raises(UnsupportedError, match=r"needs kernel='native'"):
        ph.recurrence(q, k, v, kernel="chunked")
    with (
        ph.batch_invariant(),
        pytest.raises(UnsupportedError, match="cannot keep the bits of gradients"),
    ):
        ph.recurrence(q.clone().requires_grad_(), k, v)


def test_mapped_calls_are_chunked():
    problem = random_problem(decay="token", delta=True, dtype=torch.float32, sizes=(2, 9, 4, 4))
    mapped = torch.func.vmap(
        lambda q, k, v, decay, beta: ph.recurrence(
            q[None], k[None], v[None], decay=decay[None], beta=beta[None], delta=True
        )[0]
    )
    options = problem.options
    found = mapped(problem.q, problem.k, problem.v, options["decay"], options["beta"])
    torch.testing.assert_close(found, run(problem)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_compiled_calls_are_one_graph_of_chunks():
    problem = random_problem(decay="token", delta=True, dtype=torch.float32, sizes=(2, 9, 4, 4))
    compiled = torch.compile(ph.recurrence, backend="eager", fullgraph=True)
    found = compiled(problem.q, problem.k, problem.v, **problem.options)
    torch.testing.assert_close(found, run(problem)[0], atol=1e-5, rtol=1e-5)


@every_code
def test_the_module_refuses_what_does_not_fit(code):
    q, state = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 4, 5)
    v = torch.zeros(1, 2, 3, 5)
    good = {"q": q, "k": q, "v": v, "scale": 1.0, "decay": None, "beta": None, "real": None}
    code.recur(**good, state=state, delta=False)
    for changes, words in (
        ({"state": state.double()}, "state"),
        ({"state": state[0]}, "state must be"),
        ({"state": state.mT}, "state must be"),
        ({"q": torch.zeros(1, 3, 3, 4)}, "q must be"),
        ({"q": q.bfloat16()}, "q, k and v must share"),
        ({"k": torch.zeros(1, 2, 4, 4)}, "q, k and v must share"),
        ({"v": q}, "v its value size"),
        ({"v": v.mT.contiguous().mT}, "v must be"),
        ({"decay": torch.zeros(1, 2, 3)}, "decay must be"),
        ({"decay": torch.zeros(1, 2, 3, 2)}, "decay must be"),
        ({"beta": torch.zeros(1, 2, 4)}, "beta must be"),
        ({"real": torch.zeros(1, 3)}, "real must be"),
    ):
        with pytest.raises((ValueError, NotPlainError), match=words):
            code.recur(**{**good, "state": state, "delta": True} | changes)
