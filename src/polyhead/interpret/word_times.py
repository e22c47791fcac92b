"""When each word of a transcript is spoken, from the heads that follow the sound.

for segment in model.transcribe("talk.wav", word_timestamps=True).segments:
    for word in segment.words:
        print(f"{word.start:6.2f} {word.text}")
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from polyhead.generation.pipelines.sound import HOP, RATE, samples_of
from polyhead.generation.pipelines.transcript import Segment, Transcript, Word
from polyhead.interpret.source_alignment import align

if TYPE_CHECKING:
    from polyhead.generation.pipelines.speech_to_text import SpeechToText

_PLACE = 2 * HOP / RATE
"""Seconds of a place that the decoder reads: two frames."""


def with_words(model: SpeechToText, samples: Tensor, segment: Segment) -> Segment:
    """A segment with the times of its words.

    In a text without spaces (Chinese, Japanese) every token of whole characters is a word.

    Args:
        model: The model that made the transcript.
        samples: ``[N]`` samples of the whole recording at 16 kHz.
        segment: A segment of its transcript.
    """
    pieces = _pieces(model, segment)
    if not pieces:
        return segment
    features = model.features(samples[round(segment.start * RATE) : round(segment.end * RATE)])
    ids = [*segment.prompt_ids, *segment.generation.ids]
    places = align(model, features, ids, prompt=len(segment.prompt_ids)).monotone().tolist()
    starts = [segment.start + _PLACE * places[number] for number, _ in pieces]
    words = [
        Word(text.strip(), start, max(start, end))
        for (_, text), start, end in zip(pieces, starts, [*starts[1:], segment.end], strict=True)
    ]
    return replace(segment, words=tuple(words))


def word_times(
    model: SpeechToText,
    sound: str | os.PathLike[str] | Tensor | Sequence[float],
    transcript: Transcript,
    *,
    rate: int | None = None,
) -> list[Word]:
    """``transcribe(word_timestamps=True)`` of version 0.1; takes a finished transcript."""
    samples = samples_of(sound, rate)
    found = (with_words(model, samples, segment) for segment in transcript.segments)
    return [word for segment in found for word in segment.words]


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
