"""``/v1/audio/transcriptions``: what is said in a recording."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.generation import SpeechToText
from polyhead.generation.pipelines.sound import decoded_audio
from polyhead.generation.pipelines.transcript import Transcript
from polyhead.serving.http.errors import refused

MOST_BYTES = 25 << 20
"""Largest recording, as OpenAI's."""

MOST_SECONDS = 3_600.0
"""Longest recording."""


def transcription(
    model: SpeechToText, sound: bytes, options: Mapping[str, Any]
) -> dict[str, Any] | str:
    """The answer to a request; runs the model. A text where ``response_format`` is ``"text"``.

    Raises:
        ApiError: options that contradict each other.
        InputError: what cannot be read as a recording, or an unknown language.
    """
    form = options.get("response_format", "json")
    if "timestamp_granularities" in options and form != "verbose_json":
        raise refused("timestamp_granularities", "timestamp_granularities needs verbose_json")
    samples, rate = decoded_audio(sound, "file", most_seconds=MOST_SECONDS)
    found = model.transcribe(
        samples,
        rate=rate,
        language=options.get("language"),
        temperature=options.get("temperature") or None,
    )
    if form == "text":
        return found.text + "\n"
    if form == "json":
        return {"text": found.text}
    return {
        "task": "transcribe",
        "language": _language(model, found),
        "duration": found.segments[-1].end if found.segments else 0.0,
        "text": found.text,
        "segments": [
            {"id": number, "start": each.start, "end": each.end, "text": each.text}
            for number, each in enumerate(found.segments)
        ],
    }


def _language(model: SpeechToText, found: Transcript) -> str:
    """The code of the language that the first segment is in."""
    told = found.segments[0].prompt_ids if found.segments else ()
    return next((code for code, token in model.tokens.languages.items() if token in told), "en")
