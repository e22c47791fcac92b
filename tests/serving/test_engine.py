"""Rows of a batch have the bits that they have alone, and give back what they took."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_requests import alone, check_random, few_tokens, pages_back

import polyhead as ph
from arrangements import model as arranged
from generation.tiny import byte_tokenizer, decoder, lora
from polyhead import native
from polyhead.config import GatedDeltaNetConfig
from polyhead.errors import InputError, UnsupportedError
from polyhead.models import Transformer
from polyhead.serving.engine import Engine
from polyhead.serving.pace import Pace
from polyhead.serving.requests import Completion

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)

CHANGED = {"law": "q_proj v_proj o_proj", "all": "k_proj gate_proj up_proj down_proj"}
"""Adapters, and what they change."""


@pytest.fixture(scope="module")
def model() -> ph.LanguageModel:
    return ph.LanguageModel(decoder(context=256), byte_tokenizer(), "tiny").eval()


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_random_requests_are_each_as_alone(model: ph.LanguageModel) -> None:
    engine = check_random(model, 1, 30, prompt_chunk=32)
    assert engine.stats.cached_tokens > 200
    assert engine.stats.preemptions == 0
    engine = check_random(model, 2, 16, prompt_chunk=64, max_tokens=192, overcommit=True)
    assert engine.stats.preemptions > 0


def test_random_requests_with_adapters_are_each_as_alone(
    model: ph.LanguageModel, tmp_path: Path
) -> None:
    folders = {name: lora(tmp_path / name, model.transformer, CHANGED[name]) for name in CHANGED}
    engine = check_random(model, 5, 7, prompt_chunk=32, adapters=folders)
    assert engine.stats.cached_tokens > 50
    options = {"lookup_tokens": 3, "adapters": folders, "max_tokens": 192, "overcommit": True}
    engine = check_random(model, 10, 6, prompt_chunk=64, **options)
    assert engine.stats.guessed_tokens > 0
    assert engine.stats.preemptions > 0
    with pytest.raises(InputError, match=r"adapter must be one of .*law, all.*got 'poems'"):
        engine.submit("a", max_new_tokens=3, adapter="poems")


def test_random_requests_with_guesses_are_each_as_alone(model: ph.LanguageModel) -> None:
    engine = check_random(model, 3, 6, prompt_chunk=32, lookup_tokens=3)
    assert 0 < engine.stats.accepted_tokens < engine.stats.guessed_tokens
    options = {"max_tokens": 192, "overcommit": True, "page_size": 4}
    engine = check_random(model, 4, 6, prompt_chunk=64, lookup_tokens=7, **options)
    assert engine.stats.preemptions > 0
    assert engine.stats.guessed_tokens > 0


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_hundreds_of_random_requests_are_each_as_alone(
    model: ph.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 requests; POLYHEAD_REQUESTS sets another number. Memory is as before.

    POLYHEAD_REQUESTS=10000 python -m pytest tests/serving -m slow -k hundreds
    """
    count = int(os.environ.get("POLYHEAD_REQUESTS", "500"))
    sizes = 160, 640, 320, 2000
    folders = {name: lora(tmp_path / name, model.transformer, CHANGED[name]) for name in CHANGED}
    monkeypatch.setattr(Pace, "tokens", lambda pace, rows, most: min(most, rows % 4))
    config = model.config
    layer = replace(config, layers=config.layers[:1])
    drafts = [
        ph.LanguageModel(Transformer(layer), model.tokenizer, "one layer").eval(),
        ph.MultiTokenPredictor(layer, model.transformer),
    ]
    for draft in drafts:  # what is allocated once
        check_random(model, 9, 50, adapters=folders, draft=draft)
    before = resident()
    for seed in range(-(-count // 100)):
        overcommit, chunk = bool(seed % 2), (16, 100, 256)[seed % 3]
        check_random(
            model,
            10 + seed,
            min(100, count - 100 * seed),
            overcommit=overcommit,
            prompt_chunk=chunk,
            max_tokens=sizes[seed % 4],
            lookup_tokens=(0, 7, 0)[seed % 3],
            draft=None if seed % 3 < 2 else drafts[seed // 3 % 2],
            draft_tokens=1 + seed % 7,
            adapters={} if seed % 5 else folders,
        )
    if before is not None:
        assert abs(resident() - before) < 20 << 20


def resident() -> Any:
    """Bytes of memory that this process has now; None where the system does not say."""
    gc.collect()
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def test_memory_is_given_back_with_the_prefixes(model: ph.LanguageModel) -> None:
    engine = Engine(model, max_tokens=512)
    pool = engine._budget.pool
    assert pool is not None
    promised = engine.stats.pool_bytes

    def asked() -> Completion:
        request = engine.submit("x" * 100, max_new_tokens=3)
        while engine.step():
            pass
        return request.result(0)

    first = asked()
    assert pool.bytes == promised == 32 * pool.page_bytes
    engine.forget_prefixes()
    assert (pool.bytes, pool.free, engine.stats.pool_bytes) == (0, 32, promised)
    assert asked().ids == first.ids  # in pages that are allocated again
    assert 0 < pool.bytes < promised


def test_guesses_save_steps_and_change_nothing(model: ph.LanguageModel) -> None:
    asked = {"max_new_tokens": 60, "rules": [few_tokens], "logprobs": 1, "temperature": 0.01}
    made, steps = [], []
    for lookup_tokens in (0, 7):
        engine = Engine(model, max_tokens=400, lookup_tokens=lookup_tokens)
        found = [engine.submit("ab", seed=seed, **asked) for seed in range(3)]
        steps.append(0)
        while engine.step():
            steps[-1] += 1
        made.append([request.result(0) for request in found])
        guessed, right = engine.stats.guessed_tokens, engine.stats.accepted_tokens
        assert guessed == sum(each.guessed_tokens for each in made[-1])
        assert right == sum(each.accepted_tokens for each in made[-1])
        assert engine.stats.output_tokens == 180
        assert pages_back(engine)
    for one, other in zip(*made, strict=True):
        assert (one.ids, one.logprobs) == (other.ids, other.logprobs)  # the same bits
    assert right > 20
    assert steps[1] < steps[0] - right // 4


def test_the_rest_of_a_prompt_is_read_beside_rows_that_decode(
    model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[Any] = []
    call = model.transformer.hidden_states
    monkeypatch.setattr(
        model.transformer,
        "hidden_states",
        lambda ids, **options: (
            sizes.append(options.get("counts") or [*ids.shape]) or call(ids, **options)
        ),
    )
    engine = Engine(model, max_tokens=800, prompt_chunk=80, prompt_seconds=None)
    first = {"prompt": "ab", "max_new_tokens": 30, "logprobs": 1, "temperature": 1.0, "seed": 1}
    other = {**first, "prompt": "x" * 63, "seed": 2}
    longer = {**first, "prompt": "y" * 120, "seed": 3}
    found = [engine.submit(**first)]
    for _ in range(3):
        engine.step()
    sizes.clear()
    found += [engine.submit(**each) for each in (other, longer, first)]
    rounds: list[list[Any]] = []
    for _ in range(4):
        engine.step()
        rounds.append([*sizes])
        sizes.clear()
    assert rounds[0] == [[1, 63], [1, 17]]  # what does not fit beside them: apart, in chunks
    assert rounds[1] == [[2, 1], [1, 80]]
    assert rounds[2] == [[1, 1, 23, 2]]
    assert rounds[3] == [[4, 1]]
    assert engine.stats.prompt_tokens == 2 + 63 + 120 + 2
    while engine.step():
        pass
    made = [request.result(0) for request in found]
    for each, asked in zip(made, (first, other, longer, first), strict=True):
        single = alone(model, asked)
        assert (each.ids, each.logprobs) == (single.ids, single.logprobs)
    again = engine.submit(**longer)
    while engine.step():
        pass
    assert again.result(0).cached_tokens == 112  # of a prompt that was read beside others
    assert pages_back(engine)


def test_guesses_are_refused_by_name_where_they_cannot_be(model: ph.LanguageModel) -> None:
    with pytest.raises(ValueError, match=r"lookup_tokens must be .*7: got 8"):
        Engine(model, max_tokens=64, lookup_tokens=8)


def test_a_row_has_the_bits_of_generate(model: ph.LanguageModel) -> None:
    asked = [(f"{'long ' * n}text", 6 + n, {"temperature": 1.0, "seed": n}) for n in range(12)]
    with Engine(model, max_tokens=2000) as engine:
        found = [engine.submit(text, max_new_tokens=n, **drawn) for text, n, drawn in asked]
        made = [request.result() for request in found]
    with ph.batch_invariant():
        for (text, n, drawn), completion in zip(asked, made, strict=True):
            assert completion.ids == model.generate(text, max_new_tokens=n, **drawn).ids


def test_prefixes_are_read_once_and_only_shared_within_a_name(model: ph.LanguageModel) -> None:
    engine = Engine(model, max_tokens=512)
    text = "x" * 100

    def asked(name: str) -> Completion:
        request = engine.submit(text, max_new_tokens=3, share_with=name)
        while engine.step():
            pass
        return request.result(0)

    assert [asked(name).cached_tokens for name in ("a", "b", "a")] == [0, 0, 96]
    assert engine.stats.prompt_tokens == 100 + 100 + 4
    engine.forget_prefixes()
    assert asked("a").cached_tokens == 0
    assert pages_back(engine)


def test_prefixes_make_room_for_requests(model: ph.LanguageModel) -> None:
    engine = Engine(model, max_tokens=128)
    for number in range(6):
        request = engine.submit(f"{number}" * 90, max_new_tokens=30)
        while engine.step():
            pass
        assert request.result(0).finish_reason == "length"
    assert pages_back(engine)


def test_a_step_that_fails_ends_one_request(model: ph.LanguageModel) -> None:
    engine = Engine(model, max_tokens=512)
    found = [engine.submit(text, max_new_tokens=8) for text in ("a", "bb", "ccc")]
    engine.step()

    def refused(module: Any, inputs: Any) -> None:
        hook.remove()
        raise MemoryError("no memory")

    hook = model.transformer.layers[1].register_forward_pre_hook(refused)
    while engine.step():
        pass
    made = [request.result(0) for request in found]
    assert [each.finish_reason for each in made] == ["length", "length", "error"]
    assert isinstance(made[2].error, MemoryError)
    with ph.batch_invariant():
        assert made[0].ids == model.generate("a", max_new_tokens=8).ids
    assert pages_back(engine)


def test_a_step_that_fails_keeps_the_other_prompts_that_it_would_have_read(
    model: ph.LanguageModel,
) -> None:
    engine = Engine(model, max_tokens=512)
    found = [engine.submit("a", max_new_tokens=12)]
    engine.step()
    engine.step()
    found += [engine.submit(text, max_new_tokens=8) for text in ("bbbb", "ccc")]

    def refused(module: Any, inputs: Any) -> None:
        hook.remove()
        raise MemoryError("no memory")

    hook = model.transformer.layers[1].register_forward_pre_hook(refused)
    engine.step()
    assert engine.stats.prompt_tokens == 1  # none of the two
    while engine.step():
        pass
    made = [request.result(0) for request in found]
    assert [each.finish_reason for each in made] == ["length", "length", "error"]
    with ph.batch_invariant():
        assert made[1].ids == model.generate("bbbb", max_new_tokens=8).ids
    assert pages_back(engine)


@pytest.mark.parametrize("name", ["gemma", "deepseek", "states"])
def test_other_layers_have_the_bits_of_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and latents in pages; states, which are computed row by row."""
    with torch.no_grad():
        transformer = arranged("llama" if name == "states" else name, torch.float32)
        if name == "states":
            first, *rest = (config := transformer.config).layers
            states = GatedDeltaNetConfig(4, 2, head_k_dim=8, head_v_dim=6)
            layers = (replace(first, attention=states), *rest)
            torch.manual_seed(0)
            transformer = Transformer(replace(config, layers=layers)).eval()
    model = ph.LanguageModel(transformer, byte_tokenizer(), name)
    prompts = [[(7 * row + i) % 90 + 1 for i in range(5 + 19 * row)] for row in range(3)]
    guessing: list[dict[str, Any]] = [{}]
    if name == "states":
        with pytest.raises(UnsupportedError, match="lookup_tokens must be 0"):
            Engine(model, max_tokens=400, lookup_tokens=3)
        with pytest.raises(UnsupportedError, match="draft must be None"):
            Engine(model, max_tokens=400, draft=model)
    else:
        config = replace(transformer.config, layers=transformer.config.layers[:1])
        predictor = ph.MultiTokenPredictor(config, transformer)
        guessing += [{"lookup_tokens": 3}, {"draft": predictor, "draft_tokens": 2}]
        monkeypatch.setattr(Pace, "tokens", lambda pace, rows, most: most)
    for options in guessing:
        engine = Engine(model, max_tokens=400, prompt_chunk=8, **options)
        found = [engine.submit(ids, max_new_tokens=24, eos_token_ids=(0,)) for ids in prompts]
        while engine.step():
            pass
        with ph.batch_invariant():
            for ids, request in zip(prompts, found, strict=True):
                alone = model.generate(torch.tensor(ids), max_new_tokens=24, eos_token_ids=(0,))
                assert request.result(0).ids == alone.ids
        assert (engine._budget.pool is None) == (name == "states")
        assert "draft" not in options or engine.stats.guessed_tokens > 0


def test_as_many_rows_as_native_code_steps_together_are_one_call(
    model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, max_rows=70)
    asked = [engine.submit(f"text {n}", max_new_tokens=9) for n in range(70)]
    while engine.stats.queued:
        engine.step()
    sizes: list[int] = []
    call = model.transformer.hidden_states
    monkeypatch.setattr(
        model.transformer,
        "hidden_states",
        lambda ids, **options: sizes.append(len(ids)) or call(ids, **options),
    )
    engine.step()
    assert sorted(sizes) == [6, 64]
    while engine.step():
        pass
    assert all(request.result().finish_reason == "length" for request in asked)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of the process")
def test_a_thread_that_waits_keeps_no_team(model: ph.LanguageModel, three_threads: None) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    torch.ones(1 << 20).exp()  # by a team
    before = threads()
    with Engine(model) as engine:
        assert engine.submit("a", max_new_tokens=3).result().ids
        for _ in range(1000):
            if threads() <= before - 1:  # without the two beside this thread, with the engine's
                break
            time.sleep(0.01)
        assert threads() == before - 1
