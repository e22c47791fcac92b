"""Transcriptions over the API are those of the model alone; what is no recording is refused."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import soundfile
import speech_recording as speech
from served_tiny import asking
from starlette.testclient import TestClient

import polyhead as ph
from polyhead.errors import ModelNotFoundError
from polyhead.generation import SpeechToText
from polyhead.serving.http import transcripts
from polyhead.serving.http.served import Models, Served

pytest.importorskip("python_multipart")
pytestmark = pytest.mark.model
PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def whisper() -> SpeechToText:
    try:
        return ph.load("whisper-tiny.en")
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def client(whisper: SpeechToText) -> Iterator[TestClient]:
    with asking(Models(Served.of("whisper", whisper))) as found:
        yield found


def recording(seconds: float) -> bytes:
    file = io.BytesIO()
    part = speech.samples()[: int(seconds * speech.RATE)]
    soundfile.write(file, part.numpy(), speech.RATE, format="FLAC", subtype="PCM_24")
    return file.getvalue()


@pytest.mark.slow
def test_a_recording_is_transcribed_as_by_the_model_alone(
    client: TestClient, whisper: SpeechToText
) -> None:
    sound = recording(4.0)
    alone = whisper.transcribe(samples_of(sound))
    files = {"file": ("speech.flac", sound)}
    answer = client.post(
        PATH,
        files=files,
        data={"response_format": "verbose_json", "timestamp_granularities[]": "segment"},
    ).json()
    assert "history" in alone.text
    assert answer["text"] == alone.text
    assert answer["segments"] == [{"id": 0, "start": 0.0, "end": 4.0, "text": alone.text}]
    assert (answer["duration"], answer["language"]) == (4.0, "en")


def samples_of(sound: bytes) -> Any:
    samples, rate = soundfile.read(io.BytesIO(sound), dtype="float32")
    assert rate == speech.RATE
    return samples


@pytest.mark.parametrize(
    ("files", "data", "words"),
    [
        ({"file": ("a.wav", b"no sound")}, {}, "file cannot be read as audio"),
        ({"other": ("a.wav", b"x")}, {}, "file is missing"),
        ({"file": ("a.wav", b"")}, {"prompt": "x"}, "prompt is not supported"),
        ({"file": ("a.wav", b"")}, {"temperature": "warm"}, "temperature must be a number"),
        ({"file": ("a.wav", b"")}, {"model": "tiny"}, "model 'tiny' is not served"),
        ({"file": ("a.wav", b"")}, {"response_format": "srt"}, "got 'srt'"),
        (
            {"file": ("a.wav", b"")},
            {"timestamp_granularities[]": ["segment"]},
            "needs verbose_json",
        ),
    ],
)
def test_what_is_no_recording_is_refused(
    files: Any, data: dict[str, Any], words: str, client: TestClient
) -> None:
    answer = client.post(PATH, files=files, data=data)
    assert answer.status_code == (404 if "model" in data else 400), answer.text
    assert words in answer.json()["error"]["message"]


def test_long_and_large_recordings_are_refused(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcripts, "MOST_SECONDS", 1.0)
    answer = client.post(PATH, files={"file": ("a.flac", recording(1.5))})
    assert "longer than 1 seconds" in answer.json()["error"]["message"]
    answer = client.post(PATH, files={"file": ("a.wav", bytes(26 << 20))})
    assert answer.status_code == 413
