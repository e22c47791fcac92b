"""Streams of text: what they say, where they end, what they measure, what they refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny import CONTEXT, VOCABULARY, byte_tokenizer, decoder, encoder

from polyhead.caches import H2O, SnapKV, StreamingLLM
from polyhead.errors import ConfigError, ContextLengthError, InputError, UnsupportedError
from polyhead.generation import Generation, LanguageModel

PROMPT = "The animal didn't"


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()


def _recomputed(model: LanguageModel, prompt: str, count: int) -> list[int]:
    """Greedy tokens by running the whole text again for every token, without a cache."""
    ids = model.tokenizer.encode(prompt)
    start = len(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
            if ids[-1] in model.tokenizer.stop_ids:
                break
    return ids[start:]


def _favour(model: LanguageModel, monkeypatch: pytest.MonkeyPatch, text: bytes | list[int]) -> None:
    """Makes the model write ``text``, whatever its weights say."""
    ids = model.tokenizer.encode(text.decode()) if isinstance(text, bytes) else text
    plan = iter(ids)

    def forward(ids: torch.Tensor, *, cache: Any, last: int) -> torch.Tensor:
        for layer in cache.layers:
            layer.append(torch.zeros(1, 2, ids.shape[1], 8), torch.zeros(1, 2, ids.shape[1], 8))
        logits = torch.zeros(1, last, VOCABULARY)
        logits[..., next(plan)] = 1.0
        return logits

    monkeypatch.setattr(model.transformer, "forward", forward)


def test_greedy_stream_equals_recomputing_everything_for_each_token(model: LanguageModel) -> None:
    wanted = _recomputed(model, PROMPT, 40)
    stream = model.stream(PROMPT, max_new_tokens=40)
    text = "".join(stream)
    assert stream.ids == wanted
    assert text == model.tokenizer.decode(wanted)


def test_generate_returns_what_the_stream_gives(model: LanguageModel) -> None:
    done = model.generate(PROMPT, max_new_tokens=12, temperature=1.0, seed=5)
    stream = model.stream(PROMPT, max_new_tokens=12, temperature=1.0, seed=5)
    assert done.text == "".join(stream)
    assert list(done.ids) == stream.ids
    assert done.stats.seed == 5


def test_seed_fixes_a_sampled_text_and_another_seed_changes_it(model: LanguageModel) -> None:
    def write(seed: int) -> str:
        return model.generate(PROMPT, max_new_tokens=20, temperature=1.5, seed=seed).text

    assert write(1) == write(1)
    assert write(1) != write(2)


def test_text_never_ends_inside_a_character(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "é→注意力🦊!"
    _favour(model, monkeypatch, text.encode())
    pieces = list(model.stream(PROMPT, max_new_tokens=len(text.encode())))
    assert "".join(pieces) == text
    assert pieces == list(text)


def test_unfinished_character_at_the_end_is_marked(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _favour(model, monkeypatch, "a🦊".encode())
    assert "".join(model.stream(PROMPT, max_new_tokens=3)) == "a\N{REPLACEMENT CHARACTER}"


def test_stop_token_ends_the_text_and_is_not_shown(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = VOCABULARY - 1
    _favour(model, monkeypatch, [*model.tokenizer.encode("ab"), end])
    done = model.generate(PROMPT, max_new_tokens=50)
    assert done.text == "ab"
    assert done.ids[-1] == end
    assert done.stats.stop_reason == "stop token"
    assert done.stats.new_tokens == 3


def test_stop_tokens_of_the_configuration_count_too(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    letter = model.tokenizer.encode("c")[0]
    config = dataclasses.replace(model.config, eos_token_ids=(letter,))
    monkeypatch.setitem(vars(model.transformer), "config", config)
    _favour(model, monkeypatch, b"abcd")
    assert model.generate(PROMPT, max_new_tokens=4).text == "ab"


def test_stop_text_ends_the_text_before_it(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _favour(model, monkeypatch, b"one END two")
    done = model.generate(PROMPT, max_new_tokens=50, stop=["END", "two"])
    assert done.text == "one "
    assert done.stats.stop_reason == "stop text"


def test_max_new_tokens_ends_the_text(model: LanguageModel) -> None:
    done = model.generate(PROMPT, max_new_tokens=3)
    assert (done.stats.new_tokens, done.stats.stop_reason) == (3, "max_new_tokens")


def test_no_new_tokens_give_no_text(model: LanguageModel) -> None:
    done = model.generate(PROMPT, max_new_tokens=0)
    assert (done.text, done.ids, done.stats.stop_reason) == ("", (), "max_new_tokens")


def test_generation_stops_at_the_contexts_end(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _favour(model, monkeypatch, b"x" * 200)
    done = model.generate("p" * (CONTEXT - 5), max_new_tokens=100)
    assert done.text == "xxxxx"
    assert done.stats.stop_reason == "context"
    full = model.generate("p" * CONTEXT, max_new_tokens=100)
    assert (full.text, full.stats.stop_reason) == ("", "context")


def test_real_model_runs_up_to_the_contexts_end(model: LanguageModel) -> None:
    stream = model.stream("p" * (CONTEXT - 4), max_new_tokens=100, temperature=3.0, seed=0)
    list(stream)
    assert stream.stats.stop_reason in ("context", "stop token")
    assert len(stream.ids) <= 4


def test_statistics_count_tokens_time_and_cache(model: LanguageModel) -> None:
    stream = model.stream(PROMPT, max_new_tokens=9, temperature=1.0, seed=3)
    before = stream.stats
    assert (before.new_tokens, before.cache_bytes, before.tokens_per_second) == (0, 0, None)
    next(stream)
    assert stream.stats.new_tokens == 1
    assert stream.stats.stop_reason is None
    list(stream)
    stats = stream.stats
    assert stats.prompt_tokens == len(PROMPT)
    assert stats.cache_tokens == len(PROMPT) + stats.new_tokens - 1
    # 2 layers, keys and values, 2 kv heads of 8 float32 numbers per token.
    assert stats.cache_used_bytes == stats.cache_tokens * 2 * 2 * 2 * 8 * 4
    assert stats.cache_bytes >= stats.cache_used_bytes
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0
    assert stats.tokens_per_second == pytest.approx((stats.new_tokens - 1) / stats.decode_seconds)


def test_time_of_the_reader_is_not_counted(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyhead.generation.decoding import stream as module

    clock = iter(range(1000))
    monkeypatch.setattr(module, "perf_counter", lambda: next(clock))
    stream = model.stream(PROMPT, max_new_tokens=5)
    for _ in stream:
        next(clock)
    assert (stream.stats.prefill_seconds, stream.stats.decode_seconds) == (1, 4)


def test_chat_wraps_the_prompt_in_the_models_template(model: LanguageModel) -> None:
    text = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    ids = model.prompt_ids(PROMPT, chat=True)
    assert ids == model.tokenizer.encode(text, add_special=False)
    assert ids == model.prompt_ids([{"role": "user", "content": PROMPT}])
    assert ids.count(VOCABULARY - 1) == 1


def test_chat_adds_no_special_tokens_beside_those_of_the_template(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def encode(text: str, add_special: bool = True) -> list[int]:
        asked.append(add_special)
        return [1]

    monkeypatch.setattr(model.tokenizer, "encode", encode)
    model.prompt_ids(PROMPT)
    model.prompt_ids(PROMPT, chat=True)
    assert asked == [True, False]


def test_training_mode_is_left_as_it_was(model: LanguageModel) -> None:
    model.train()
    try:
        list(model.stream(PROMPT, max_new_tokens=2))
        assert model.transformer.training
        assert model.transformer.layers[0].training
    finally:
        model.eval()
    stream = model.stream(PROMPT, max_new_tokens=5)
    next(stream)
    stream.close()
    assert not model.transformer.training


def test_dropout_is_off_while_text_is_written(model: LanguageModel) -> None:
    model.train()
    try:
        stream = model.stream(PROMPT, max_new_tokens=5)
        next(stream)
        assert not model.transformer.layers[0].training
    finally:
        stream.close()
        model.eval()


def test_gradients_can_be_on_around_a_stream(model: LanguageModel) -> None:
    stream = model.stream(PROMPT, max_new_tokens=3)
    next(stream)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("chat", [False, True])
def test_empty_prompt_is_refused(model: LanguageModel, chat: bool) -> None:
    with pytest.raises(InputError, match="prompt is empty"):
        model.stream("", chat=chat)


def test_prompt_beyond_the_context_is_refused_with_both_numbers(model: LanguageModel) -> None:
    with pytest.raises(ContextLengthError, match=rf"{CONTEXT + 1} tokens.*holds {CONTEXT}"):
        model.stream("p" * (CONTEXT + 1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("top_k", 0),
        ("top_p", 2.0),
        ("seed", -1),
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.5),
        ("stop", ""),
    ],
)
def test_bad_value_is_refused_before_anything_runs(
    model: LanguageModel, name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=name):
        model.stream(PROMPT, **{name: value})


def test_an_encoder_is_no_language_model() -> None:
    with pytest.raises(ConfigError, match="made of kind='decoder': got kind='encoder'"):
        LanguageModel(encoder(), byte_tokenizer())


@pytest.mark.parametrize("layout", [H2O, SnapKV, StreamingLLM])
@pytest.mark.parametrize("beams", [1, 2])
def test_texts_of_a_cache_that_evicts_are_those_of_all_keys_while_the_budget_holds_them(
    model: LanguageModel, layout: Any, beams: int
) -> None:
    prompts = ["Once upon a time there was a house", "Hello"]
    options = {"max_new_tokens": 12, "num_beams": beams, "min_new_tokens": 12}
    wanted = model.generate(prompts, **options)
    found = model.generate(prompts, cache={"evicting": layout(80)}, **options)
    assert [each.ids for each in found] == [each.ids for each in wanted]
    small = layout(9, window=4) if layout is SnapKV else layout(9)
    less = model.generate(prompts, cache={"evicting": small}, **options)
    assert [len(each.ids) for each in less] == [12, 12]
    assert less[0].stats.cache_used_bytes < wanted[0].stats.cache_used_bytes


def test_streams_go_on_beyond_the_context(model: LanguageModel) -> None:
    context, endless = model.config.max_positions, {"evicting": StreamingLLM(9)}
    far: dict[str, Any] = {"max_new_tokens": context + 20, "min_new_tokens": context + 20}
    for prompts in ("Hello", ["Hello", "Once upon a time"]):
        found = model.generate(prompts, cache=endless, **far)
        assert {len(each.ids) for each in (found if isinstance(found, list) else [found])} == {
            context + 20
        }
    assert len(model.generate("Hello", cache={"evicting": H2O(9)}, **far).ids) < context
    unbound = {"max_new_tokens": None, "min_new_tokens": context}
    assert len(model.generate("Hello", cache=endless, **unbound).ids) < context


def _assert_told(model: LanguageModel, prompt: str, done: Generation, count: int) -> None:
    """One for each token: those of the logits of the whole text, in float64."""
    start = model.tokenizer.encode(prompt)
    with torch.no_grad():
        logits = model(torch.tensor([[*start, *done.ids]]))[0, len(start) - 1 : -1]
    wanted = logits.double() - logits.double().exp().sum(dim=-1, keepdim=True).log()
    assert done.logprobs is not None
    for token, told, row in zip(done.ids, done.logprobs, wanted, strict=True):
        assert told.token == token
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best, tokens = row.sort(descending=True)
        assert [each for each, _ in told.top] == tokens[:count].tolist()
        assert [value for _, value in told.top] == pytest.approx(best[:count].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.5, "seed": 3, "repetition_penalty": 1.3},
        {"temperature": 1.5, "seed": 3, "num_return_sequences": 2},
        {"num_beams": 3, "num_return_sequences": 2, "no_repeat_ngram_size": 2},
        {"num_beams": 2, "temperature": 1.5, "seed": 3},
    ],
    ids=["greedy", "drawn", "two drawn", "beams", "drawn beams"],
)
def test_log_probabilities_are_those_of_the_logits_before_rules(
    model: LanguageModel, options: dict[str, Any]
) -> None:
    prompts, options = [PROMPT, "Yes", "one of"], {"max_new_tokens": 7, **options}
    stop = model.generate("Yes", **options).text[4:6]  # one row ends before the others
    for prompt, done in zip(
        prompts, model.generate(prompts, stop=stop, logprobs=3, **options), strict=True
    ):
        for each in (done, *done.others):
            _assert_told(model, prompt, each, 3)
    if "num_beams" not in options:
        assert len(model.generate("Yes", stop=stop, logprobs=0, **options).ids) < 7
    for count in (0, 2):
        done = model.generate(PROMPT, logprobs=count, **options)
        assert done.ids == model.generate(PROMPT, **options).ids
        _assert_told(model, PROMPT, done, count)
    assert model.generate(PROMPT, **options).logprobs is None


def test_the_score_of_a_beam_is_the_mean_of_its_log_probabilities(model: LanguageModel) -> None:
    best = model.generate(PROMPT, max_new_tokens=9, num_beams=4, num_return_sequences=3, logprobs=0)
    for done in (best, *best.others):
        told = [each.logprob for each in done.logprobs or ()]
        assert [each.token for each in done.logprobs or ()] == [*done.ids]
        assert sum(told) / len(told) == pytest.approx(done.score, abs=1e-5)
    assert model.generate(PROMPT, max_new_tokens=0, num_beams=2, logprobs=0).logprobs == ()


def test_a_stream_tells_the_log_probabilities_so_far(model: LanguageModel) -> None:
    stream = model.stream(PROMPT, max_new_tokens=9, logprobs=1)
    for _ in stream:
        assert stream.logprobs is not None
        assert [each.token for each in stream.logprobs] == stream.ids
    done = model.generate(PROMPT, max_new_tokens=9, logprobs=1)
    assert done.logprobs == tuple(stream.logprobs or ())
    assert model.stream(PROMPT).logprobs is None


def test_log_probabilities_that_cannot_be_told_are_refused(model: LanguageModel) -> None:
    for wrong in (-1, VOCABULARY + 1, 1.5):
        with pytest.raises(ValueError, match="logprobs must be"):
            model.generate(PROMPT, logprobs=wrong)  # type: ignore[call-overload]
    for prompts in (PROMPT, ["a", "b"]):
        with pytest.raises(UnsupportedError, match="log-probabilities are told"):
            model.generate(prompts, logprobs=1, graph=True)
    assert model.generate(PROMPT, logprobs=1).stats.no_graph is not None
