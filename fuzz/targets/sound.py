"""Audio files: what is read of them becomes features, or a sentence."""

from __future__ import annotations

import struct
import tempfile
from io import BytesIO
from pathlib import Path
from random import Random

import soundfile
import torch

from fuzz import mutation
from polyhead.generation.pipelines.sound import log_mel, samples_of

path = Path()
compressed: list[bytes] = []
KINDS = ((1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64), (6, 8), (0xFFFE, 16))


def prepare() -> None:
    global path
    path = Path(tempfile.mkdtemp()) / "sound.wav"
    tone = 0.5 * torch.sin(torch.arange(8_000) * 0.05).numpy()
    for form in ("FLAC", "OGG", "MP3", "AIFF", "CAF", "W64"):
        file = BytesIO()
        soundfile.write(file, tone, 16_000, format=form)
        compressed.append(file.getvalue())


def written(kind: int, bits: int, channels: int, rate: int, data: bytes) -> bytes:
    width = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * width, width, bits)
    if kind == 0xFFFE:
        form += struct.pack("<HHIH14s", 22, bits, 0, 1, bytes(14))
    chunks = b"".join(
        name + struct.pack("<I", len(content)) + content
        for name, content in ((b"fmt ", form), (b"data", data))
    )
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def _samples(random: Random, kind: int, bits: int) -> bytes:
    """Of floats, what samples are; any bits are whole numbers."""
    if kind != 3:
        return random.randbytes(4_000)
    values = [random.uniform(-1, 1) for _ in range(500)]
    return struct.pack(f"<500{'f' if bits == 32 else 'd'}", *values)


def content(random: Random) -> bytes:
    if random.random() < 0.4:
        return mutation.data(random, random.choice(compressed))
    kind, bits = random.choice(KINDS)
    rate = random.choice((1_000, 8_000, 11_025, 16_000, 44_100, 383_987))
    good = written(kind, bits, random.choice((1, 2)), rate, _samples(random, kind, bits))
    return good if random.random() < 0.2 else mutation.data(random, good[:60]) + good[60:]


def case(random: Random) -> None:
    path.write_bytes(content(random))
    samples = samples_of(path, None)
    assert samples.ndim == 1
    assert torch.isfinite(log_mel(samples, 80, 20)).all()
