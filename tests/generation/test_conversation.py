"""A conversation reads what is new, and answers as if it had read everything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import byte_tokenizer, decoder

import polyhead as ph
from polyhead.errors import CheckpointError, ContextLengthError, InputError
from polyhead.generation import Conversation


@pytest.fixture
def model() -> ph.LanguageModel:
    return ph.LanguageModel(decoder(context=400), byte_tokenizer(), "tiny")


def _read(model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call that reads several, from now on."""
    lengths: list[int] = []
    forward = model.transformer.forward

    def counted(ids: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        if ids.shape[1] > 1:
            lengths.append(ids.shape[1])
        return forward(ids, *rest, **options)

    monkeypatch.setattr(model.transformer, "forward", counted)
    return lengths


def _afresh(model: ph.LanguageModel, talk: Conversation, text: str) -> str:
    """The answer of a model that reads the whole conversation at once."""
    system = [{"role": "system", "content": talk.system}] if talk.system else []
    said = [*system, *talk.messages, {"role": "user", "content": text}]
    return model.generate(said, max_new_tokens=12).text


def test_turns_are_those_of_the_whole_conversation_and_read_their_own_tokens(
    model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Conversation(model, "Be brief.", max_new_tokens=12)
    answers, wanted = [], []
    for text in ("What is it?", "Größer?", "Why?"):
        wanted.append(_afresh(model, talk, text))
        lengths = _read(model, monkeypatch)
        answers.append("".join(talk.say(text)))
        monkeypatch.undo()
        assert len(lengths) == 1
    assert answers == wanted
    assert lengths[0] < 60 < talk.stats.prompt_tokens
    # Taken back, it is said again to the same effect.
    assert talk.undo()
    assert "".join(talk.say("Why?")) == wanted[-1]
    talk.system = "Another."
    assert "".join(talk.say("So?")) == _afresh(model, _without_last(talk), "So?")
    talk.clear()
    assert talk.messages == []
    assert not talk.undo()


def _without_last(talk: Conversation) -> Conversation:
    talk.undo()
    return talk


def test_an_answer_that_is_given_up_counts_as_far_as_it_came(model: ph.LanguageModel) -> None:
    talk = Conversation(model, max_new_tokens=30)
    answer = talk.say("What is it?")
    began = next(answer) + next(answer)
    answer.close()
    assert talk.messages == [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": began},
    ]
    wanted = model.generate(
        [*talk.messages, {"role": "user", "content": "And?"}], max_new_tokens=30
    ).text
    assert "".join(talk.say("And?")) == wanted
    talk.say("never read")  # a turn counts when its answer begins
    assert len(talk.messages) == 4


def test_the_oldest_exchanges_go_when_the_context_is_full(model: ph.LanguageModel) -> None:
    talk = Conversation(model, "S", max_new_tokens=20)
    left_out = []
    for turn in range(16):
        "".join(talk.say("x" * (1 + turn % 7)))
        left_out.append(talk.left_out)
        assert talk.stats.prompt_tokens + 20 <= 400
        assert talk.stats.stop_reason == "max_new_tokens"
    assert left_out[0] == 0 < left_out[-1]
    assert left_out == sorted(left_out)
    assert all(count % 2 == 0 for count in left_out)
    assert len(talk.messages) == 32
    kept = [{"role": "system", "content": "S"}, *talk.messages[talk.left_out : -1]]
    assert model.generate(kept, max_new_tokens=20).text == talk.messages[-1]["content"]


def test_a_window_that_forgot_reads_again() -> None:
    small = decoder(context=400)
    config = replace(small.config, layers=tuple(
        replace(layer, attention=replace(layer.attention, window=16))
        for layer in small.config.layers
    ))  # fmt: skip
    torch.manual_seed(3)
    windowed = ph.Transformer(config)
    windowed.load_state_dict(small.state_dict())
    model = ph.LanguageModel(windowed.eval(), byte_tokenizer())
    talk = Conversation(model, max_new_tokens=12)
    for text in ("What is it?", "Why?"):
        wanted = _afresh(model, talk, text)
        assert "".join(talk.say(text)) == wanted
    talk.undo()
    wanted = _afresh(model, talk, "No")
    assert "".join(talk.say("No")) == wanted


def test_what_cannot_be_said_is_refused_and_changes_nothing(model: ph.LanguageModel) -> None:
    talk = Conversation(model, max_new_tokens=5)
    with pytest.raises(InputError, match="the message is empty"):
        talk.say(" \n")
    with pytest.raises(ContextLengthError, match="the model's context holds 400"):
        talk.say("x" * 500)
    assert talk.messages == []
    with pytest.raises(ValueError, match="max_new_tokens"):
        Conversation(model, max_new_tokens=-1)
    model.tokenizer.chat_template = None
    with pytest.raises(CheckpointError, match="no chat template"):
        Conversation(model)
