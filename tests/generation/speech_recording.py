"""Half a minute of speech, and what is true of it.

``speech.adpcm.gz`` was made by espeak-ng 1.51 (``espeak-ng -v en-us -s 150 -f text -w speech.wav``
with ``TEXT``), brought to 16,000 samples a second, and packed to 4 bits a sample by ``packed``.
``ONSETS`` are the word events of the same synthesis.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

RATE = 16_000
TEXT = (
    "The history of the world is the history of a few men who had faith in themselves. A small "
    "boat left the harbor early in the morning, and nobody knew when it would come back. Twelve "
    "people were waiting on the shore with bread, cheese and coffee. In the afternoon the wind "
    "became stronger, and the waves were as high as a house. The captain told his crew to remain "
    "calm, and at last they saw the light of the old tower. Then everybody went home and slept "
    "until noon."
)
_STEPS = (
    7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 19, 21, 23, 25, 28, 31, 34, 37, 41, 45, 50, 55, 60, 66,
    73, 80, 88, 97, 107, 118, 130, 143, 157, 173, 190, 209, 230, 253, 279, 307, 337, 371, 408, 449,
    494, 544, 598, 658, 724, 796, 876, 963, 1060, 1166, 1282, 1411, 1552, 1707, 1878, 2066, 2272,
    2499, 2749, 3024, 3327, 3660, 4026, 4428, 4871, 5358, 5894, 6484, 7132, 7845, 8630, 9493,
    10442, 11487, 12635, 13899, 15289, 16818, 18500, 20350, 22385, 24623, 27086, 29794, 32767,
)  # fmt: skip
"""Of IMA ADPCM, whose codes are a sign and three bits of the difference in steps."""
_MOVES = (-1, -1, -1, -1, 2, 4, 6, 8)


def packed(samples: Iterable[int]) -> bytes:
    """Samples of 16 bits in 4 bits each."""
    codes, value, index = [], 0, 0
    for sample in samples:
        step, rest = _STEPS[index], abs(sample - value)
        code = 8 if sample < value else 0
        for bit, part in ((4, step), (2, step >> 1), (1, step >> 2)):
            if rest >= part:
                code, rest = code | bit, rest - part
        value, index = _after(value, index, code)
        codes.append(code)
    codes += [0] * (len(codes) % 2)
    pairs = zip(codes[::2], codes[1::2], strict=True)
    return bytes(low | high << 4 for low, high in pairs)


def _unpacked(data: bytes) -> Iterator[int]:
    value, index = 0, 0
    for pair in data:
        for code in (pair & 15, pair >> 4):
            value, index = _after(value, index, code)
            yield value


def _after(value: int, index: int, code: int) -> tuple[int, int]:
    step = _STEPS[index]
    difference = step >> 3
    for bit, part in ((4, step), (2, step >> 1), (1, step >> 2)):
        difference += part if code & bit else 0
    value += -difference if code & 8 else difference
    return max(-32768, min(32767, value)), max(0, min(88, index + _MOVES[code & 7]))


@cache
def samples() -> Tensor:
    """``[N]`` from −1 to 1, 29.9 s."""
    data = gzip.decompress((Path(__file__).parent / "speech.adpcm.gz").read_bytes())
    return torch.tensor(list(_unpacked(data)), dtype=torch.float32) / 32768


ONSETS = (
    (0, 0), (129, 1), (634, 2), (902, 4), (1263, 5), (1411, 6), (1529, 7), (2025, 8), (2208,
    10), (2496, 11), (2970, 12), (3180, 13), (3455, 14), (3810, 15), (3956, 16), (5147, 17),
    (5230, 18), (5621, 19), (5966, 20), (6299, 21), (6426, 22), (6872, 23), (7107, 24), (7351,
    26), (8078, 17), (8091, 27), (8300, 28), (8789, 29), (8993, 30), (9132, 31), (9324, 32),
    (9521, 33), (9888, 34), (10686, 35), (11152, 36), (11541, 37), (11696, 38), (12049, 39),
    (12355, 41), (12677, 42), (12892, 43), (13515, 44), (13838, 45), (14050, 46), (14972, 44),
    (14983, 47), (15216, 49), (15850, 50), (15981, 51), (16322, 52), (16756, 53), (17668, 54),
    (17876, 55), (18002, 56), (18452, 57), (18594, 58), (18778, 59), (19029, 60), (19177, 61),
    (19241, 62), (20099, 54), (20112, 63), (20242, 64), (20839, 65), (21300, 66), (21538, 67),
    (21825, 68), (21975, 69), (22393, 70), (23110, 71), (23293, 72), (23477, 73), (23816, 74),
    (23986, 75), (24272, 76), (24400, 77), (24709, 78), (24950, 80), (25318, 81), (26172, 82),
    (26402, 83), (27114, 84), (27411, 85), (27938, 86), (28161, 87), (28647, 88), (29073, 89),
)  # fmt: skip
"""Milliseconds and the number of the word; two unstressed words are sometimes one event."""
