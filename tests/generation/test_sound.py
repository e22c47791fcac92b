"""Audio files, resampling and mel features; what is damaged is a sentence."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from polyhead.errors import InputError
from polyhead.generation.pipelines import sound


def _wav(kind: int, bits: int, data: bytes, *, channels: int = 1, rate: int = 16_000) -> bytes:
    width = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * width, width, bits)
    chunks = b"".join(
        name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)
        for name, content in ((b"fmt ", form), (b"LIST", b"odd"), (b"data", data))
    )
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def _tone(count: int = 1600) -> Tensor:
    return 0.5 * torch.sin(torch.arange(count) * 0.05)


def test_every_kind_of_samples_is_read(tmp_path: Path) -> None:
    tone = _tone().numpy()
    wide = np.rint(tone * 2**23).astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3]
    for kind, bits, data in (
        (1, 8, np.rint(tone * 128 + 128).astype(np.uint8).tobytes()),
        (1, 16, np.rint(tone * 2**15).astype("<i2").tobytes()),
        (1, 24, np.ascontiguousarray(wide).tobytes()),
        (1, 32, np.rint(tone.astype(float) * 2**31).astype("<i4").tobytes()),
        (3, 32, tone.astype("<f4").tobytes()),
        (3, 64, tone.astype("<f8").tobytes()),
    ):
        path = tmp_path / "tone.wav"
        path.write_bytes(_wav(kind, bits, data))
        samples, rate = sound.read_audio(path)
        assert rate == 16_000
        # A sample is rounded to the nearest step, of which 8 bits have 128.
        torch.testing.assert_close(
            samples, torch.from_numpy(tone), atol=0.51 / 2 ** (min(bits, 24) - 1), rtol=1e-6
        )
    stereo = np.stack((tone, -tone / 2), axis=1).astype("<f4")
    path.write_bytes(_wav(3, 32, stereo.tobytes(), channels=2, rate=8_000))
    samples, rate = sound.read_audio(path)
    torch.testing.assert_close(samples, torch.from_numpy(tone) / 4)
    assert len(sound.samples_of(path, None)) == 2 * len(tone)


DAMAGED = {
    "nothing": (b"", "read as audio: Format not recognised"),
    "another": (b"OggS" + bytes(40), "read as audio: .* unimplemented format"),
    "no data": (_wav(1, 16, b"")[:36], "No 'data' chunk"),
    "empty": (_wav(1, 16, b""), "holds no samples"),
    "compressed": (_wav(2, 4, b"1234"), "Malformed 'fmt ' chunk"),
    "no channels": (_wav(1, 16, b"12", channels=0), "Channel count is zero"),
    "slow": (_wav(1, 16, b"12", rate=1), r"rate must be .* from 1,000 to 384,000: got 1$"),
    "fast": (_wav(1, 16, b"12", rate=2**30), "got 1073741824"),
}


@pytest.mark.parametrize("name", list(DAMAGED))
def test_damaged_files_are_sentences(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(DAMAGED[name][0])
    with pytest.raises(InputError, match=DAMAGED[name][1]):
        sound.read_audio(path)


def test_samples_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        sound.samples_of(tmp_path / "none.wav", None)
    with pytest.raises(ValueError, match="a file says its own"):
        sound.samples_of(tmp_path / "none.wav", 8_000)
    for wrong, error, words in (
        (torch.zeros(2, 3), InputError, r"samples must be \[N\]"),
        (torch.zeros(0), InputError, "at least one"),
        ([0.0, math.nan], InputError, "between -1 and 1 .*: got nan"),
        (torch.full((9,), 20_000.0), InputError, "got 20000"),
        (torch.ones(3, dtype=torch.int16), TypeError, "floats from -1 to 1"),
        ({"a": 1}, TypeError, "path of an audio file or samples"),
    ):
        with pytest.raises(error, match=words):
            sound.samples_of(wrong, None)
    with pytest.raises(ValueError, match="rate"):
        sound.samples_of(_tone(), 0)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_a_tone_stays_the_same_tone_at_another_rate(rate: int) -> None:
    def tone(rate: int) -> Tensor:
        return torch.sin(2 * math.pi * 440.0 * torch.arange(rate).double() / rate).float()

    found = sound.resampled(tone(rate), rate)
    assert len(found) == sound.RATE
    inside = slice(800, -800)  # it begins and ends suddenly
    torch.testing.assert_close(found[inside], tone(sound.RATE)[inside], atol=1e-6, rtol=0)


def test_compressed_files_are_read_by_their_content(tmp_path: Path) -> None:
    tone = _tone(sound.RATE)
    for form, subtype, tolerance in (
        ("FLAC", "PCM_24", 1e-6),
        ("OGG", "VORBIS", 0.1),
        ("MP3", "MPEG_LAYER_III", 0.1),
    ):
        path = tmp_path / "a.raw"  # a name says nothing
        soundfile.write(path, tone.numpy(), sound.RATE, format=form, subtype=subtype)
        samples, rate = sound.read_audio(path)
        assert rate == sound.RATE
        assert abs(len(samples) - len(tone)) < 2 * 1152, form  # MP3 holds whole frames
        inside = slice(2000, 14_000)
        error = samples[inside] - tone[inside]
        assert error.norm() < tolerance * tone[inside].norm(), form


def test_a_long_file_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tone = _tone()
    path = tmp_path / "a.wav"
    soundfile.write(path, torch.stack((tone, tone), 1).numpy(), 8_000, subtype="FLOAT")
    monkeypatch.setattr(sound, "_BLOCK", 999)
    assert torch.equal(sound.read_audio(path)[0], tone)


def test_a_recording_over_the_limit_is_read_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, torch.zeros(8_000 * 4).numpy(), 8_000)
    monkeypatch.setattr(sound, "_BLOCK", 999)
    content = path.read_bytes()
    assert len(sound.decoded_audio(content, "file", most_seconds=4)[0]) == 32_000
    with pytest.raises(InputError, match=r"file: the recording is longer than 3\.5 seconds"):
        sound.decoded_audio(content, "file", most_seconds=3.5)


def test_the_shortest_recordings_keep_a_sample() -> None:
    for count, rate in ((1, 384_000), (1, 8_000), (30, 383_987), (16_000, 15_999)):
        found = sound.resampled(torch.ones(count), rate)
        assert len(found) == max(1, round(count * sound.RATE / rate))


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_a_package_that_is_missing_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(_wav(1, 16, bytes(64), rate=8_000))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"{package}: pip install 'polyhead\[audio\]'"):
        sound.samples_of(path, None)
    assert len(sound.samples_of([0.0, 0.5], None)) == 2  # needs neither


@pytest.mark.parametrize("mels", [80, 128])
def test_features_are_those_of_transformers(mels: int) -> None:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=mels)
    noise = torch.randn(40_000, generator=torch.Generator().manual_seed(0)) * 0.1
    wanted = extractor(noise.numpy(), sampling_rate=16_000, return_tensors="pt")["input_features"]
    assert torch.equal(sound.log_mel(noise, mels, 3000), wanted[0])
    many = torch.cat((noise, torch.zeros(500_000)))
    assert torch.equal(sound.log_mel(many, mels, 3000), wanted[0])  # cut to 30 s
