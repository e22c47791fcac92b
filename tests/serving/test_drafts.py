"""A draft guesses tokens: what is drawn stays the same, and its caches hold what the rows hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_requests import check_random, few_tokens, pages_back

import polyhead as ph
from generation.tiny import byte_tokenizer, decoder, lora
from polyhead import native
from polyhead.serving import drafts
from polyhead.serving.drafts import Drafts
from polyhead.serving.engine import Engine
from polyhead.serving.pace import Pace

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)

FEW: dict[str, Any] = {"rules": [few_tokens], "temperature": 1.0}
Likeliest = Callable[[], int]
Checked = list[bool]


@pytest.fixture(scope="module")
def model() -> ph.LanguageModel:
    return ph.LanguageModel(decoder(context=256), byte_tokenizer(), "tiny").eval()


@pytest.fixture
def draft(model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> ph.LanguageModel:
    """A model that often guesses right, and always guesses."""
    monkeypatch.setattr(Pace, "tokens", lambda pace, rows, most: most)
    made = copy.deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.transformer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return made


class Pauses:
    """A pace that pauses, or always guesses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paused = True
        monkeypatch.setattr(Pace, "tokens", lambda pace, rows, most: 0 if self.paused else most)


def run(engine: Engine) -> int:
    count = 0
    while engine.step():
        count += 1
    return count


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def test_a_draft_saves_steps_and_changes_nothing(
    model: ph.LanguageModel, draft: ph.LanguageModel
) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 60, "logprobs": 1}
    made, counts = [], []
    for each in (None, draft):
        engine = Engine(model, max_tokens=800, draft=each, draft_tokens=5)
        found = [engine.submit("ab" * n, seed=n, temperature=0.1 * n, **asked) for n in range(1, 5)]
        found.append(engine.submit("abc" * 20, **asked))
        counts.append(run(engine))
        made.append([request.result(0) for request in found])
        assert pages_back(engine)
    for one, other in zip(*made, strict=True):
        assert (one.ids, one.logprobs) == (other.ids, other.logprobs)  # the same bits
        assert other.accepted_tokens > 15
    stats = engine.stats
    assert stats.guessed_tokens == sum(each.guessed_tokens for each in made[1])
    assert stats.accepted_tokens == sum(each.accepted_tokens for each in made[1])
    assert counts[1] < 0.7 * counts[0]


def watch(monkeypatch: pytest.MonkeyPatch, likeliest: Callable[[list[int]], Likeliest]) -> Checked:
    """Whether each guess is the likeliest token.

    Args:
        likeliest: Of the tokens of a row, a function that gives the likeliest next one, again and
            again as if each was right.
    """
    checked: Checked = []
    guess = Drafts.guess

    def watched(self: Drafts, rows: Any, most: int, room: int) -> list[list[int]]:
        made = guess(self, rows, most, room)
        for row, tokens in zip(rows, made, strict=True):
            following = likeliest(row.all_ids)
            checked.extend(following() == token for token in tokens)
        return made

    monkeypatch.setattr(Drafts, "guess", watched)
    return checked


def by_draft(draft: ph.LanguageModel) -> Callable[[list[int]], Likeliest]:
    def of(ids: list[int]) -> Likeliest:
        def following() -> int:
            ids.append(int(draft.transformer(torch.tensor([ids]), last=1)[0, 0].argmax()))
            return ids[-1]

        return following

    return of


def by_predictor(predictor: ph.MultiTokenPredictor) -> Callable[[list[int]], Likeliest]:
    """By one call over the whole text."""

    def of(tokens: list[int]) -> Likeliest:
        ids = torch.tensor([tokens])
        hidden, behind = predictor.model.hidden_states(ids)[:, :-1], ids[:, 1:]

        def following() -> int:
            nonlocal hidden, behind
            states = predictor.hidden_states(behind, hidden)
            token = int(predictor.logits(states)[0, -1].argmax())
            hidden = torch.cat((hidden, states[:, -1:]), dim=1)
            behind = torch.cat((behind, torch.tensor([[token]])), dim=1)
            return token

        return following

    return of


def test_the_guesses_are_the_likeliest_tokens_of_the_draft(
    model: ph.LanguageModel, draft: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of texts of uneven lengths, whichever guesses were right before."""
    checked = watch(monkeypatch, by_draft(draft))
    engine = Engine(model, max_tokens=800, draft=draft, draft_tokens=3)
    found = [engine.submit("ab" * (7 * n + 1), max_new_tokens=30 - n) for n in range(5)]
    run(engine)
    late = engine.submit("ab" * 30, max_new_tokens=9)  # begins with pages that others read
    run(engine)
    assert late.result(0).cached_tokens > 30
    assert len(checked) > 100
    assert all(checked)
    assert 0 < sum(each.result(0).accepted_tokens for each in found) < len(checked)


def test_random_requests_with_a_draft_are_each_as_alone(
    model: ph.LanguageModel, draft: ph.LanguageModel, tmp_path: Path
) -> None:
    engine = check_random(model, 13, 8, prompt_chunk=32, draft=draft, draft_tokens=3)
    assert 0 < engine.stats.accepted_tokens < engine.stats.guessed_tokens
    options: dict[str, Any] = {"max_tokens": 192, "overcommit": True, "page_size": 4}
    folders = {"law": lora(tmp_path, model.transformer, "q_proj v_proj")}
    engine = check_random(
        model, 15, 9, prompt_chunk=64, draft=draft, draft_tokens=7, adapters=folders, **options
    )
    assert engine.stats.preemptions > 0
    assert engine.stats.accepted_tokens > 0
    kept: Any = engine._guesser
    assert not kept._members
    kept.forget_prefixes()
    assert kept._pool.free == kept._pool.pages


@pytest.fixture
def predictor(model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> ph.MultiTokenPredictor:
    """A random one, which always guesses tokens that ``few_tokens`` leaves."""
    monkeypatch.setattr(Pace, "tokens", lambda pace, rows, most: most)
    logits = ph.MultiTokenPredictor.logits
    monkeypatch.setattr(
        ph.MultiTokenPredictor,
        "logits",
        lambda self, hidden: few_tokens(None, logits(self, hidden)[:, -1])[:, None],
    )
    torch.manual_seed(3)
    config = model.config
    return ph.MultiTokenPredictor(replace(config, layers=config.layers[:1]), model.transformer)


def test_a_predictor_guesses_from_the_states_of_the_model(
    model: ph.LanguageModel, predictor: ph.MultiTokenPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = watch(monkeypatch, by_predictor(predictor))
    engine = Engine(model, max_tokens=800, prompt_chunk=24, draft=predictor, draft_tokens=3)
    found = [
        engine.submit(f"{n}" * (9 * n + 1), max_new_tokens=30 - n, seed=n, **FEW) for n in range(5)
    ]
    run(engine)
    assert len(checked) > 100
    assert all(checked)
    assert sum(each.result(0).accepted_tokens for each in found) > 5


def test_a_predictor_has_the_dtype_of_its_model(
    model: ph.LanguageModel, predictor: ph.MultiTokenPredictor
) -> None:
    half = copy.deepcopy(model).to(torch.bfloat16)
    own = ph.MultiTokenPredictor(predictor.config, half.transformer).to(torch.bfloat16)
    made = []
    for each in (None, own):
        engine = Engine(half, max_tokens=400, draft=each)
        request = engine.submit("ab" * 20, max_new_tokens=30, **FEW, seed=1)
        run(engine)
        made.append(request.result(0))
    assert made[0].ids == made[1].ids
    assert made[1].guessed_tokens > 20


@pytest.mark.parametrize("kind", ["draft", "predictor"])
def test_guesses_begin_again_after_a_pause(
    model: ph.LanguageModel,
    kind: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was not read meanwhile is read then; a predictor keeps no more states than it may."""
    made = request.getfixturevalue(kind)
    pace = Pauses(monkeypatch)
    checked = watch(monkeypatch, (by_draft if kind == "draft" else by_predictor)(made))
    monkeypatch.setattr(drafts, "KEPT", 30)
    engine = Engine(model, max_tokens=800, draft=made, draft_tokens=2)
    found = [engine.submit("ab" * n, max_new_tokens=90, seed=n, **FEW) for n in (3, 9, 30)]
    steps(engine, 25)
    assert not checked
    pace.paused = False
    steps(engine, 3)
    assert len(checked) == 18
    assert all(checked)
    pace.paused = True
    steps(engine, 33)
    pace.paused = False
    run(engine)
    assert all(checked)
    assert (len(checked) == 18) == (kind == "predictor")
    assert all(each.result(0).finish_reason == "length" for each in found)


def test_a_draft_has_the_room_that_its_rows_were_promised(
    model: ph.LanguageModel, draft: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that rows need once the draft reads on are not those of prefixes that are kept."""
    pace = Pauses(monkeypatch)
    engine = Engine(model, max_tokens=160, page_size=4, max_rows=3, draft=draft)
    engine.submit("x" * 120, max_new_tokens=4)
    run(engine)
    found = [engine.submit("ab" * 4, max_new_tokens=60)]
    steps(engine, 40)
    found.append(engine.submit("cd" * 4, max_new_tokens=40))
    steps(engine, 2)
    pace.paused = False
    run(engine)
    for each in found:
        made = each.result(0)
        assert (made.finish_reason, made.error) == ("length", None)
        assert made.guessed_tokens > 0
    assert pages_back(engine)


def test_random_requests_with_a_predictor_are_each_as_alone(
    model: ph.LanguageModel, predictor: ph.MultiTokenPredictor
) -> None:
    options = {"max_tokens": 192, "overcommit": True, "page_size": 4}
    for seed, more in ((21, {"prompt_chunk": 32}), (24, options)):
        engine = check_random(model, seed, 8, draft=predictor, draft_tokens=3, **more)
        assert 0 < engine.stats.accepted_tokens < engine.stats.guessed_tokens
        kept: Any = engine._guesser
        assert not kept._members
        assert kept._pool.free == kept._pool.pages


def test_rows_without_room_in_the_draft_have_no_guesses(
    model: ph.LanguageModel, draft: ph.LanguageModel
) -> None:
    short = ph.LanguageModel(decoder(context=40), byte_tokenizer(), "short")
    short.transformer.load_state_dict(draft.transformer.state_dict())
    engine = Engine(model, max_tokens=800, draft=short)
    found = [engine.submit("ab", max_new_tokens=n) for n in (36, 60)]
    run(engine)
    one, other = (request.result(0) for request in found)
    assert one.guessed_tokens > 0
    assert other.guessed_tokens == 0
    assert other.ids[:36] == one.ids


def test_a_step_that_fails_ends_one_request(
    model: ph.LanguageModel, draft: ph.LanguageModel
) -> None:
    engine = Engine(model, max_tokens=800, draft=draft)
    texts = "a", "bb", "ccc", "d" * 100
    found = [engine.submit(text, max_new_tokens=40) for text in texts[:3]]

    def fail(of: ph.LanguageModel) -> None:
        def refused(module: Any, inputs: Any) -> None:
            hook.remove()
            raise MemoryError("no memory")

        hook = of.transformer.layers[1].register_forward_pre_hook(refused)

    for failing in (model, draft):
        engine.step()
        fail(failing)
        engine.step()
    found.append(engine.submit(texts[3], max_new_tokens=40))
    hook = draft.transformer.layers[0].register_forward_pre_hook(lambda *_: fail(draft))
    engine.step()  # reads the prompt
    hook.remove()
    run(engine)
    made = [request.result(0) for request in found]
    assert [each.finish_reason for each in made] == ["length", "error", "error", "error"]
    single = Engine(model, max_tokens=64)
    request = single.submit("a", max_new_tokens=40)
    run(single)
    assert made[0].ids == request.result(0).ids
    assert pages_back(engine)


def test_memory_of_the_draft_is_counted(model: ph.LanguageModel, draft: ph.LanguageModel) -> None:
    alone, both = (Engine(model, max_tokens=320, draft=each) for each in (None, draft))
    spare = -(-(320 + 32 * (drafts.SPARE + 16)) // 16)
    assert both.stats.pool_bytes == alone.stats.pool_bytes // 20 * (20 + spare)


def test_drafts_that_cannot_guess_are_refused_by_name(model: ph.LanguageModel) -> None:
    with pytest.raises(ValueError, match=r"draft_tokens must be .*7: got 8"):
        Engine(model, max_tokens=64, draft=model, draft_tokens=8)
    with pytest.raises(ValueError, match="lookup_tokens or draft, not both"):
        Engine(model, max_tokens=64, draft=model, lookup_tokens=2)
    with pytest.raises(TypeError, match=r"draft must be a LanguageModel or a Multi.*: got str"):
        Engine(model, max_tokens=64, draft="smollm2")  # type: ignore[arg-type]
    other = copy.deepcopy(model)
    predictor = ph.MultiTokenPredictor(
        replace(model.config, layers=model.config.layers[:1]), other.transformer
    )
    with pytest.raises(ValueError, match="draft must be a predictor of the engine's own model"):
        Engine(model, max_tokens=64, draft=predictor)
    other.tokenizer.backend.add_tokens(["<more>"])
    with pytest.raises(ValueError, match=r"token '<more>' is 259 in the draft and None in the mo"):
        Engine(model, max_tokens=64, draft=other)


def test_the_number_of_guesses_is_the_one_that_pays() -> None:
    cheap, dear = Pace(0.05), Pace(1.0)
    assert cheap.tokens(1, 7) > 1
    few_bits = Pace(0.3)  # the model's own weights in 4 bits
    for _ in range(200):
        few_bits.count(4, 4)
    assert [few_bits.tokens(rows, 7) for rows in (1, 4, 8)] == [7, 7, 0]
    assert cheap.tokens(1, 1) == 1
    assert cheap.tokens(1, 0) == 0
    assert not any(dear.tokens(1, 7) for _ in range(700))  # even if all were right
    for _ in range(200):
        cheap.count(4, 0)
    tried = [step for step in range(700) if cheap.tokens(1, 7)]
    assert tried == [15, 47, 111, 239, 495]  # trials that fail are ever rarer
    for _ in range(200):
        cheap.count(4, 4)
    assert cheap.tokens(1, 7) == 7
    assert Pace(0.05).tokens(32, 7) < Pace(0.05).tokens(1, 7)  # there a token takes longer
