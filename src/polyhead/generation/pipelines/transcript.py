"""What transcribing gives: segments of a recording, and their words."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.generation.decoding.batch import Generation


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


@dataclass(frozen=True)
class Segment:
    """The transcript of a part of a recording.

    Attributes:
        text: Text of the segment.
        start, end: Seconds from the beginning of the recording.
        generation: All that is known of the text.
        prompt_ids: The tokens that it begins with: the language, the task.
        words: With their times, if ``transcribe`` was asked for ``word_timestamps``.
    """

    text: str
    start: float
    end: float
    generation: Generation
    prompt_ids: tuple[int, ...]
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class Transcript:
    """The transcript of a recording.

    Attributes:
        text: The words of all segments.
        segments: In their order; one where the recording is as short as the model reads at once.
    """

    text: str
    segments: tuple[Segment, ...]
