"""Sound as Whisper reads it: samples of a WAV file, resampled, as mel features.

A spectrum every 10 ms is summed in bands that are equally wide to the ear (mels), and its logarithm
is taken; the loudest band of a recording sets the scale. Source: Radford et al. 2022, §2.2, and the
feature extractor published with the models.

Shape letters: N samples, M mels, F frames.
"""

from __future__ import annotations

import math
import os
import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from polyhead._utils.checks import check_int, shown
from polyhead._utils.paths import size_of
from polyhead.errors import InputError

RATE = 16_000
"""Samples of a second."""
HOP = 160
"""Samples from one frame to the next."""
_WINDOW = 400
_TOP = 8_000.0  # Hz
_RANGE = 8.0  # powers of ten between the loudest and the quietest power that is kept

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_TYPES = {
    (_PCM, 16): torch.int16,
    (_PCM, 32): torch.int32,
    (_FLOAT, 32): torch.float32,
    (_FLOAT, 64): torch.float64,
}
_RATES = 1_000, 384_000  # a damaged file may claim more and become many times its size
_MOST = 100.0  # loud recordings are a little beyond 1; whole numbers of 16 bits are far beyond
_EDGE = 0.1  # seconds of silence, so that the ends of a recording do not meet when it is resampled


def read_wav(path: str | os.PathLike[str]) -> tuple[Tensor, int]:
    """Samples ``[N]`` of a WAV file from −1 to 1, its channels mixed, and their rate.

    Args:
        path: RIFF WAVE with whole numbers of 8, 16, 24 or 32 bits, or floats of 32 or 64.

    Raises:
        InputError: the file cannot be read, is damaged, compressed or empty.
    """
    where = Path(path)
    size_of(where, error=InputError)
    try:
        data = where.read_bytes()
    except OSError as error:
        raise InputError(f"{where} cannot be read: {error.strerror or error}") from error
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise InputError(f"{where} is not a WAV file: it must begin with RIFF and WAVE")
    found: dict[bytes, bytes] = {}
    at = 12
    while at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        found.setdefault(name, data[at + 8 : at + 8 + size])  # a recording cut short ends early
        at += 8 + size + size % 2
    form = found.get(b"fmt ", b"")
    if len(form) < 16 or b"data" not in found:
        raise InputError(f"{where} is damaged: it has no complete 'fmt ' and 'data'")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", form)
    if kind == _EXTENSIBLE and len(form) >= 26:
        kind = int.from_bytes(form[24:26], "little")
    low, high = _RATES
    if channels < 1 or not low <= rate <= high:
        raise InputError(
            f"{where} has {channels} channels and {rate:,} samples a second; one at least and "
            f"{low:,} to {high:,} can be read"
        )
    samples = _decoded(found[b"data"], kind, bits, where)
    samples = samples[: len(samples) // channels * channels].reshape(-1, channels)
    if not len(samples):
        raise InputError(f"{where} holds no samples")
    return samples.mean(dim=1), rate


def _decoded(data: bytes, kind: int, bits: int, where: Path) -> Tensor:
    if (kind, bits) not in ((_PCM, 8), (_PCM, 24), *_TYPES):
        raise InputError(
            f"{where} holds samples of format {kind} with {bits} bits; whole numbers (1) of 8, "
            f"16, 24, 32 bits and floats (3) of 32, 64 can be read"
        )
    raw = bytearray(data[: len(data) // (bits // 8) * (bits // 8)])
    if not raw:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    if kind == _PCM and bits == 8:  # without a sign
        return (torch.frombuffer(raw, dtype=torch.uint8).float() - 128) / 128
    if kind == _PCM and bits == 24:
        octets = torch.frombuffer(raw, dtype=torch.uint8).reshape(-1, 3)
        wide = torch.zeros(len(octets), 4, dtype=torch.uint8, device="cpu")
        wide[:, 1:] = octets
        return wide.view(torch.int32)[:, 0].float() / 2**31
    samples = torch.frombuffer(raw, dtype=_TYPES[kind, bits]).float()
    return samples if kind == _FLOAT else samples / 2 ** (bits - 1)


def samples_of(sound: object, rate: int | None) -> Tensor:
    """Samples ``[N]`` at 16,000 a second.

    Args:
        sound: the path of a WAV file, or samples ``[N]`` from −1 to 1: a tensor, an array or a
            list.
        rate: samples per second, 1,000 to 384,000; default 16,000. A file says its own.

    Raises:
        InputError: no samples, another shape, numbers beyond ±100, or a damaged file.
        TypeError: samples that are not numbers.
        ValueError: a rate out of range, or one beside a file.
    """
    if isinstance(sound, str | os.PathLike):
        if rate is not None:
            raise ValueError(f"rate belongs to samples, a file says its own: got rate={rate!r}")
        samples, rate = read_wav(sound)
        return resampled(_bounded(samples), rate)
    low, high = _RATES
    rate = RATE if rate is None else check_int("rate", rate, least=low, most=high, error=ValueError)
    try:
        samples = torch.as_tensor(sound).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"sound must be the path of a WAV file or samples as numbers: got {shown(sound)}"
        ) from error
    if samples.ndim != 1 or not samples.numel():
        raise InputError(f"samples must be [N], at least one: got shape {list(samples.shape)}")
    if not samples.is_floating_point():
        raise TypeError(f"samples must be floats from -1 to 1: got {samples.dtype}")
    return resampled(_bounded(samples.float()), rate)


def _bounded(samples: Tensor) -> Tensor:
    """Raises InputError unless all samples are numbers of the size that samples have."""
    greatest = float(samples.abs().max())
    if not greatest <= _MOST:  # NaN is not
        raise InputError(
            f"samples must lie between -1 and 1 (up to {_MOST:g} is taken): got {greatest:g}"
        )
    return samples


def resampled(samples: Tensor, rate: int) -> Tensor:
    """Samples ``[N]`` at 16,000 a second: the same spectrum, cut or filled with zeros."""
    if rate == RATE:
        return samples
    common = math.gcd(rate, RATE)
    unit, wanted_unit = rate // common, RATE // common  # samples of the same time
    edge = -(-round(_EDGE * rate) // unit) * unit
    end = edge + -len(samples) % unit
    padded = torch.nn.functional.pad(samples.double(), (edge, end))
    count = len(padded) // unit * wanted_unit
    spectrum = torch.fft.rfft(padded)
    kept = torch.zeros(count // 2 + 1, dtype=spectrum.dtype, device="cpu")
    both = min(len(kept), len(spectrum))
    kept[:both] = spectrum[:both]
    found: Tensor = torch.fft.irfft(kept, n=count) * (count / len(padded))
    first, length = edge // unit * wanted_unit, max(1, round(len(samples) * RATE / rate))
    return found[first : first + length].float()


def log_mel(samples: Tensor, mels: int, frames: int) -> Tensor:
    """``[M, F]`` features of a recording.

    Args:
        samples: ``[N]`` at 16,000 a second; cut, or filled with silence, to ``frames``.
        mels: Number of mel bands M.
        frames: Number of frames F.
    """
    count = frames * HOP
    samples = torch.nn.functional.pad(samples[:count], (0, max(0, count - len(samples))))
    window = torch.hann_window(_WINDOW)
    spectrum = torch.stft(samples, _WINDOW, HOP, window=window, return_complex=True)
    power = spectrum[:, :-1].abs() ** 2
    bands = (mel_filters(mels) @ power).clamp(min=1e-10).log10()
    return (bands.clamp(min=float(bands.max()) - _RANGE) + 4.0) / 4.0


@cache
def mel_filters(mels: int) -> Tensor:
    """``[M, 201]`` triangles over the spectrum, each of area 1 (Slaney 1998)."""
    linear = torch.linspace(0.0, _mel_of(_TOP), mels + 2, dtype=torch.float64, device="cpu")
    log_step = torch.log(torch.tensor(6.4, dtype=torch.float64, device="cpu")) / 27.0
    corners = torch.where(
        linear < 15.0, linear * 200.0 / 3.0, 1_000.0 * torch.exp(log_step * (linear - 15.0))
    )
    bins = torch.linspace(0.0, RATE / 2, _WINDOW // 2 + 1, dtype=torch.float64, device="cpu")
    width = corners.diff()
    slopes = corners[:, None] - bins
    falling, rising = -slopes[:-2] / width[:-1, None], slopes[2:] / width[1:, None]
    triangles = torch.minimum(falling, rising).clamp(min=0.0)
    return (triangles * (2.0 / (corners[2:] - corners[:-2]))[:, None]).float()


def _mel_of(hertz: float) -> float:
    """Slaney's scale: linear to 1,000 Hz, logarithmic above."""
    ratio = torch.log(torch.tensor(hertz / 1_000.0, dtype=torch.float64, device="cpu"))
    return 15.0 + float(
        ratio * 27.0 / torch.log(torch.tensor(6.4, dtype=torch.float64, device="cpu"))
    )


def cuts(samples: Tensor, most: int) -> list[int]:
    """Where a recording ``[N]`` is cut into parts of at most ``most`` samples: 0, ..., N.

    A cut is in the softest fifth of a second among the last sixth of what is left to choose.
    """
    places = [0]
    width = RATE // 5
    while len(samples) - places[-1] > most:
        end = places[-1] + most
        start = end - most // 6
        heard = samples[start:end].double().square()
        if len(heard) > width:
            means = torch.nn.functional.avg_pool1d(heard[None], width, stride=HOP)[0]
            end = start + int(means.argmin()) * HOP + width // 2
        places.append(end)
    return [*places, len(samples)]
