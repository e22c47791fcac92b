"""Sound as Whisper reads it: samples of an audio file, resampled, as mel features.

A spectrum every 10 ms is summed in bands that are equally wide to the ear (mels), and its logarithm
is taken; the loudest band of a recording sets the scale. Source: Radford et al. 2022, §2.2, and the
feature extractor published with the models.

Shape letters: N samples, M mels, F frames.
"""

from __future__ import annotations

import math
import os
from functools import cache
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from polyhead._utils.checks import check_int, needed, shown
from polyhead._utils.paths import size_of
from polyhead.errors import InputError

RATE = 16_000
"""Samples of a second."""
HOP = 160
"""Samples from one frame to the next."""
_WINDOW = 400
_TOP = 8_000.0  # Hz
_RANGE = 8.0  # powers of ten between the loudest and the quietest power that is kept

_LEAST_RATE, _MOST_RATE = 1_000, 384_000  # samples a second, of which a damaged file may claim more
_BLOCK = 1 << 20  # samples of all channels that are read at once
_MOST = 100.0  # loud recordings are a little beyond 1; whole numbers of 16 bits are far beyond


def read_audio(path: str | os.PathLike[str]) -> tuple[Tensor, int]:
    """Samples ``[N]`` of an audio file from −1 to 1, its channels mixed, and their rate.

    Args:
        path: What libsndfile reads: WAV, FLAC, Ogg Vorbis and Opus, MP3, AIFF and others. A file
            that was cut short ends early.

    Raises:
        InputError: the file cannot be read, is damaged, unknown or empty, or soundfile is not
            installed.
    """
    where = Path(path)
    size_of(where, error=InputError)
    try:
        # Without its name, so that the content alone decides what it is.
        return decoded_audio(where.read_bytes(), str(where))
    except OSError as error:
        raise InputError(f"{where} cannot be read: {error.strerror or error}") from error


def decoded_audio(
    content: bytes, name: str, *, most_seconds: float = math.inf
) -> tuple[Tensor, int]:
    """As ``read_audio``, of the bytes of a file.

    Args:
        content: The bytes.
        name: Of the file, for messages.
        most_seconds: Longest recording that is read: compressed silence of hours is a small file.

    Raises:
        InputError: As ``read_audio``, or the recording is longer.
    """
    soundfile = needed("soundfile", "polyhead[audio]")
    try:
        with soundfile.SoundFile(BytesIO(content)) as file:
            rate = _checked_rate(file.samplerate, InputError)
            found, left = [], most_seconds * rate
            # To the end of what is there: a damaged file may claim more.
            while len(block := file.read(_BLOCK // file.channels, "float32", always_2d=True)):
                if (left := left - len(block)) < 0:
                    raise InputError(f"the recording is longer than {most_seconds:g} seconds")
                found.append(torch.from_numpy(block).mean(dim=1))
    except soundfile.SoundFileError as error:
        raise InputError(f"{name} cannot be read as audio: {_reason(error)}") from error
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    if not found:
        raise InputError(f"{name} holds no samples")
    return torch.cat(found), rate


def _checked_rate(rate: int, error: type[Exception]) -> int:
    return check_int("rate", rate, least=_LEAST_RATE, most=_MOST_RATE, error=error)


def _reason(error: Exception) -> str:
    return str(getattr(error, "error_string", error)).rstrip(".")


def samples_of(sound: object, rate: int | None) -> Tensor:
    """Samples ``[N]`` at 16,000 a second.

    Args:
        sound: the path of an audio file, or samples ``[N]`` from −1 to 1: a tensor, an array or a
            list.
        rate: samples per second, 1,000 to 384,000; default 16,000. A file says its own.

    Raises:
        InputError: no samples, another shape, numbers beyond ±100, a damaged file, or a package of
            ``polyhead[audio]`` that is not installed.
        TypeError: samples that are not numbers.
        ValueError: a rate out of range, or one beside a file.
    """
    if isinstance(sound, str | os.PathLike):
        if rate is not None:
            raise ValueError(f"rate belongs to samples, a file says its own: got rate={rate!r}")
        samples, rate = read_audio(sound)
        return resampled(_bounded(samples), rate)
    rate = RATE if rate is None else _checked_rate(rate, ValueError)
    try:
        samples = torch.as_tensor(sound).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"sound must be the path of an audio file or samples as numbers: got {shown(sound)}"
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
    """Samples ``[N]`` at 16,000 a second, by soxr.

    Raises:
        InputError: soxr is not installed.
    """
    if rate == RATE:
        return samples
    soxr = needed("soxr", "polyhead[audio]")
    found = torch.from_numpy(soxr.resample(samples.numpy(), rate, RATE, quality="VHQ"))
    missing = max(1, round(len(samples) * RATE / rate)) - len(found)
    return torch.nn.functional.pad(found, (0, missing))


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
