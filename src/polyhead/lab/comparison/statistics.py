"""Paired differences: their mean, its interval, and how many pairs would tell it from 0.

d̄ ± t(0.975, n − 1) · s / √n                (Student 1908, on the differences of pairs)
n ≥ ((t(0.975, n − 1) + t(0.8, n − 1)) · s / d̄)²          (for a power of 80 %)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean, stdev

from polyhead._utils.checks import check_int, check_number

CONFIDENCE = 0.95
POWER = 0.8
MOST_PAIRS = 1000
"""The search for a number of pairs ends there."""


@dataclass(frozen=True)
class Difference:
    """The difference of two variants over pairs.

    Attributes:
        needed: Pairs that would tell a difference as large as ``mean`` from 0 with a power of 80 %;
            None: more than ``MOST_PAIRS``.
    """

    mean: float
    half_width: float
    deviation: float
    pairs: int
    needed: int | None

    @property
    def distinguishable(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.mean) > self.half_width


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The difference ``first − second`` of numbers that belong together."""
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(
            "an interval needs two pairs or more, and as many of both: got "
            f"{len(first)} and {len(second)}"
        )
    found = [a - b for a, b in zip(first, second, strict=True)]
    n, middle, deviation = len(found), mean(found), stdev(found)
    half = t_quantile((1 + CONFIDENCE) / 2, n - 1) * deviation / math.sqrt(n)
    return Difference(middle, half, deviation, n, pairs_needed(middle, deviation))


def pairs_needed(difference: float, deviation: float) -> int | None:
    """Pairs that tell ``difference`` from 0 with a power of 80 %; None: more than MOST_PAIRS."""
    if deviation == 0:
        return 2 if difference else None
    ratio = deviation / abs(difference) if difference else math.inf
    normal = 1.959964 + 0.841621  # the limit of both quantiles: a lower bound
    start = max(2, math.ceil((normal * ratio) ** 2)) if ratio < MOST_PAIRS else MOST_PAIRS + 1
    for n in range(start, MOST_PAIRS + 1):
        sums = t_quantile((1 + CONFIDENCE) / 2, n - 1) + t_quantile(POWER, n - 1)
        if n >= (sums * ratio) ** 2:
            return n
    return None


@lru_cache(maxsize=4096)
def t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t with ``freedom`` degrees of freedom, by bisection.

    Raises:
        ValueError: A probability outside (0, 1), or ``freedom`` below 1.
    """
    check_number("probability", probability, above=0.0, below=1.0)
    check_int("freedom", freedom, least=1)
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while _t_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, freedom: int) -> float:
    """Student's distribution function, a finite sum (Abramowitz & Stegun 1964, 26.7.3-4)."""
    angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k + 1) / (k + 2)
    inside = total * math.sin(angle)
    return 0.5 + ((angle + inside) / math.pi if odd else inside / 2)
