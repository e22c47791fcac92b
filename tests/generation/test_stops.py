"""Stop texts: found across pieces, never shown in part, nothing lost when none appears."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from generation.tiny import byte_tokenizer, decoder
from polyhead.generation import LanguageModel
from polyhead.generation.decoding.stops import StopTexts


def _run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    watch = StopTexts(stops)
    shown = "".join(watch.feed(piece) for piece in pieces)
    return shown + watch.flush(), watch.found


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=3), max_size=12),
)
@example(stops=["b", "a"], pieces=["cab"])
@example(stops=["abb", "ba"], pieces=["ca", "b", "a"])
def test_text_ends_before_the_first_stop_however_it_is_cut(
    stops: list[str], pieces: list[str]
) -> None:
    text = "".join(pieces)
    shown, found = _run(stops, pieces)
    # The stream must act on the first stop that is complete, so the oracle reads letter by letter.
    for length in range(len(text) + 1):
        ends = [place for stop in stops if (place := text[:length].find(stop)) >= 0]
        if ends:
            break
    else:
        assert (shown, found) == (text, False)
        return
    assert found
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert any(text[len(shown) :].startswith(stop) for stop in stops)


def test_half_a_stop_is_held_back_and_given_when_it_does_not_come() -> None:
    watch = StopTexts("END")
    assert watch.feed("one E") == "one "
    assert watch.feed("N") == ""
    assert watch.feed("ough") == "ENough"
    assert watch.flush() == ""
    assert not watch.found


def test_without_stops_everything_passes() -> None:
    assert _run([], ["a", "", "b"]) == ("ab", False)


def test_nothing_passes_after_a_stop() -> None:
    watch = StopTexts(["."])
    assert watch.feed("a.b") == "a"
    assert watch.feed("c") == ""
    assert watch.flush() == ""


@pytest.mark.parametrize("bad", ["", [""], ["a", ""]])
def test_empty_stop_text_is_refused(bad: str | list[str]) -> None:
    with pytest.raises(ValueError, match="stop must be a text of at least one character"):
        StopTexts(bad)


def test_texts_of_a_batch_end_at_a_stop_as_each_alone():
    model = LanguageModel(decoder(), byte_tokenizer(), "tiny")
    prompts, letters = ["ab", "a longer prompt", "zz"], model.generate("ab", max_new_tokens=9).text
    options = {"max_new_tokens": 30, "stop": letters[4]}
    for text, single in zip(
        model.generate(prompts, **options),
        [model.generate(prompt, **options) for prompt in prompts],
        strict=True,
    ):
        assert (text.text, text.ids) == (single.text, single.ids)
        assert text.stats.stop_reason == single.stats.stop_reason
    assert len(model.generate(prompts, **options)[0].ids) < 30
