"""Of several codes the fastest is chosen, by times that the tests invent."""

import json

import pytest
import torch

from polyhead import native
from polyhead.native import batch_invariant, fastest, selection
from polyhead.native.arguments import DTYPES, NO_SCORE_MODS, KVSegment, Network, ScoreMods, Weight
from polyhead.native.fastest import TORCH, choose

WORKS = ("prefill", "decode", "chunk", "gemv", "gemm")
CODES = native.all_codes()
several = pytest.mark.skipif(len(CODES) < 2, reason="needs two codes that run here")


def times(gemm_of_torch=1.0, **of_codes):
    return {name: dict(zip(WORKS, seconds, strict=True)) for name, seconds in of_codes.items()} | {
        TORCH: {"gemm": gemm_of_torch}
    }


@pytest.mark.parametrize(
    ("second", "steps", "prompts"),
    [
        ((1.0, 1.0, 1.0, 1.0, 1.0), "pairs", "pairs"),
        ((0.93, 0.93, 0.93, 0.93, 0.93), "pairs", "pairs"),  # too little to give up the first
        ((0.8, 0.8, 0.8, 0.8, 0.8), "wide", "wide"),
        ((0.5, 1.0, 1.0, 1.0, 1.0), "pairs", "wide"),
        ((0.5, 2.0, 1.0, 1.1, 1.0), "pairs", "wide"),
        ((0.5, 1.0, 1.0, 1.0, 3.0), "pairs", "pairs"),
        ((9.0, 0.8, 0.8, 0.9, 9.0), "wide", "pairs"),
        ((1.0, 0.7, 1.9, 0.9, 1.0), "pairs", "pairs"),  # slower with four queries
    ],
)
def test_the_first_is_kept_unless_another_is_faster_by_a_tenth(second, steps, prompts):
    found = choose(times(9.0, pairs=(1.0,) * 5, wide=second))
    assert (found.steps, found.prompts) == (steps, prompts)


def test_a_slow_product_does_not_count_where_torch_multiplies():
    found = choose(times(1.0, pairs=(1.0,) * 5, wide=(0.8, 1.0, 1.0, 1.0, 9.0)))
    assert (found.prompts, found.gemm) == ("wide", False)
    assert choose(times(1.0, pairs=(1.0, 1.0, 1.0, 1.0, 0.9), wide=(1.0,) * 5)).gemm


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """How often each dtype was measured; the second code is the faster one in bfloat16."""
    monkeypatch.setenv("POLYHEAD_CACHE", str(tmp_path))
    done = []

    def measure(codes, dtype):
        done.append(dtype)
        second = 0.5 if dtype == torch.bfloat16 else 1.0
        names = [code.name for code in codes]
        return times(**{names[0]: (1.0,) * 5, names[1]: (second,) * 4 + (2.0,)})

    monkeypatch.setattr(fastest, "measure", measure)
    return done


@several
def test_times_are_measured_once_and_kept(measured, tmp_path):
    found = fastest.fastest(CODES[:2])
    assert measured == [*DTYPES]
    names = {dtype: choice.steps for dtype, choice in found.items()}
    first, second = CODES[0].name, CODES[1].name
    assert names == dict.fromkeys(DTYPES, first) | {torch.bfloat16: second}
    assert fastest.fastest(CODES[:2]) == found
    assert measured == [*DTYPES]
    assert len(json.loads((tmp_path / "native" / "fastest.json").read_text())) == 1


@several
@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: "[1]",
        lambda text: "[" * 100_000,
        lambda text: text.replace("0.5", "-1"),
        lambda text: text.replace("0.5", '"fast"'),
        lambda text: text.replace("0.5", "NaN"),
        lambda text: text.replace('"decode"', '"other"'),
        lambda text: text.replace('"float16"', '"float17"'),
    ],
)
def test_what_does_not_read_as_times_is_measured_again(measured, tmp_path, change):
    found = fastest.fastest(CODES[:2])
    place = tmp_path / "native" / "fastest.json"
    text = place.read_text()
    assert change(text) != text
    place.write_text(change(text))
    assert fastest.fastest(CODES[:2]) == found
    assert measured == [*DTYPES] * 2
    assert place.read_text() == text


@several
def test_a_cache_directory_that_cannot_be_written_is_no_error(measured, tmp_path):
    (tmp_path / "native").write_text("a file where the folder would be")
    assert fastest.fastest(CODES[:2])[torch.bfloat16].steps == CODES[1].name


@several
def test_measured_times_are_complete(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYHEAD_CACHE", str(tmp_path))
    found = fastest.fastest(CODES[:2])[torch.float32].times
    assert {name: [*works] for name, works in found.items()} == {
        CODES[0].name: [*WORKS], CODES[1].name: [*WORKS], TORCH: ["gemm"],
    }  # fmt: skip
    assert all(seconds > 0 for works in found.values() for seconds in works.values())


@several
def test_the_fastest_is_used_but_not_where_bits_must_not_depend_on_it(monkeypatch):
    first, second = CODES[:2]
    for each in (first, second):
        monkeypatch.setattr(each, "dtypes", frozenset({torch.bfloat16}))
    choice = fastest.Choice(second.name, second.name, False, {})
    monkeypatch.setattr(selection, "choices", lambda: {torch.bfloat16: choice})
    selection._fastest.cache_clear()
    try:
        assert native.code() is first
        assert native.code(torch.float32) is first
        assert native.code(torch.bfloat16) is second
        with torch.no_grad():
            assert native.code_for(torch.zeros(1, dtype=torch.bfloat16)) is second
        assert (first.dtypes, second.dtypes) == ({torch.bfloat16}, set())
        with batch_invariant.enabled():
            assert native.code(torch.bfloat16) is first
        with native.using(first):
            assert native.code(torch.bfloat16) is first
    finally:
        selection._fastest.cache_clear()


@several
def test_steps_and_prompts_have_codes_of_their_own(monkeypatch):
    first, second = CODES[:2]
    called = []

    class Recorder:
        def __getattr__(self, name):
            return lambda index, *_: called.append((name, index))

    monkeypatch.setattr(first, "_native", Recorder())
    monkeypatch.setattr(second, "dtypes", frozenset({torch.float16}))
    choice = fastest.Choice(first.name, second.name, True, {})
    monkeypatch.setattr(selection, "choices", lambda: {torch.float32: choice})
    selection._fastest.cache_clear()
    try:
        both = native.code(torch.float32)
    finally:
        selection._fastest.cache_clear()
    assert both.name == f"{first.name}, {second.name} for prompts"
    assert both.dtypes == second.dtypes | {torch.float32}
    assert (first.prompts, second.prompts) == (first, second)

    few, many = torch.zeros(64, 8), torch.zeros(65, 8)
    weight = Weight(torch.zeros(8, 8), None)
    network = Network(None, weight, weight, "silu")
    for x in (few, many):
        heads = x.view(1, 1, -1, 8)
        segment = KVSegment(heads, heads)
        both.product(x, [weight], batch_invariant=False)
        both.matmul(x, torch.zeros(8, 8))
        both.feed_forward(x, network, batch_invariant=False)
        both.attend(heads, [segment], 1.0)
        both.gradients(heads, segment, 1.0, NO_SCORE_MODS, (heads, heads), (heads, heads))
    names = ["product", "matmul", "feed_forward", "attend", "gradients"]
    assert called == [(name, each._index) for each in (first, second) for name in names]

    called.clear()
    for x in (few, many):
        heads = x.view(1, 1, -1, 8)
        both.product(x, [weight], batch_invariant=True)
        both.feed_forward(x, network, batch_invariant=True)
        both.attend(heads, [KVSegment(heads, heads)], 1.0, ScoreMods(batch_invariant=True))
    assert called == [(name, first._index) for name in ("product", "feed_forward", "attend")] * 2


@several
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_a_variable_names_the_code(monkeypatch, code):
    monkeypatch.setenv("POLYHEAD_NATIVE", code.name)
    found = selection._chosen.__wrapped__()
    assert found is code
    assert selection.choices.__wrapped__() == {}


@pytest.mark.skipif(not CODES, reason="needs native code")
def test_a_name_that_does_not_run_here_is_refused(monkeypatch):
    monkeypatch.setenv("POLYHEAD_NATIVE", "sse2")
    with pytest.raises(ValueError, match=r"POLYHEAD_NATIVE must be first or one of .*: got sse2"):
        selection._chosen.__wrapped__()
