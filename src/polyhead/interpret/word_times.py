"""When each word of a transcript is spoken, from the heads that follow the sound.

found = model.transcribe("talk.wav")
for word in ph.word_times(model, "talk.wav", found):
    print(f"{word.start:6.2f} {word.text}")
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from polyhead.generation.pipelines.sound import HOP, RATE, samples_of
from polyhead.interpret.reading import align

if TYPE_CHECKING:
    from polyhead.generation.pipelines.speech_to_text import Segment, SpeechToText, Transcript

_PLACE = 2 * HOP / RATE
"""Seconds of a place that the decoder reads: two frames."""


@dataclass(frozen=True)
class Word:
    """A word of a transcript.

    Attributes:
        text: With the punctuation behind it.
        start: Seconds from the beginning of the recording.
        end: Where the next word begins; a pause belongs to the word before it.
    """

    text: str
    start: float
    end: float


def word_times(
    model: SpeechToText,
    sound: str | os.PathLike[str] | Tensor | Sequence[float],
    transcript: Transcript,
    *,
    rate: int | None = None,
) -> list[Word]:
    """When each word is spoken.

    In a text without spaces (Chinese, Japanese) every token of whole characters is a word.

    Args:
        model: That transcribed it.
        sound, rate: What ``transcribe`` was given.
        transcript: What it returned.

    Raises:
        InputError: What ``transcribe`` raises about the sound.
    """
    samples = samples_of(sound, rate)
    words: list[Word] = []
    for segment in transcript.segments:
        pieces = _pieces(model, segment)
        if not pieces:
            continue
        features = model.features(samples[round(segment.start * RATE) : round(segment.end * RATE)])
        prompt = segment.prompt_ids
        ids = [*prompt, *segment.generation.ids]
        places = align(model, features, ids, prompt=len(prompt)).monotone().tolist()
        starts = [segment.start + _PLACE * places[number] for number, _ in pieces]
        for (_, text), start, end in zip(pieces, starts, [*starts[1:], segment.end], strict=True):
            words.append(Word(text.strip(), start, max(start, end)))
    return words


def _pieces(model: SpeechToText, segment: Segment) -> list[tuple[int, str]]:
    """Words, and the number of the token that each begins with."""
    stream, marks = model.tokenizer.stream(), {*model.tokenizer.added_tokens.values()}
    spaced = " " in segment.text
    found: list[tuple[int, str]] = []
    begun: int | None = None
    for number, token in enumerate(segment.generation.ids):
        if token in marks:
            continue
        begun = number if begun is None else begun
        text = stream.push(token)
        if not text:
            continue  # half a character
        if found and spaced and not text.startswith(" "):
            found[-1] = (found[-1][0], found[-1][1] + text)
        else:
            found.append((begun, text))
        begun = None
    return [(number, text) for number, text in found if text.strip()]
