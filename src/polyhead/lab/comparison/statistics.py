"""Paired differences: their mean, its interval, and how many pairs would tell it from 0.

    d̄ ± t(0.975, n − 1) · s / √n                (Student 1908, on the differences of pairs)
    n ≥ ((t(0.975, n − 1) + t(0.8, n − 1)) · s / d̄)²          (for a power of 80 %)

Quantiles of Student's t come from its distribution function, an incomplete beta function that is
summed as a continued fraction (Abramowitz & Stegun 1964, 26.5.8 and 26.7.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean, stdev

from polyhead._utils.checks import number, whole

CONFIDENCE = 0.95
POWER = 0.8
MOST_PAIRS = 1000
"""The search for a number of pairs ends there."""


@dataclass(frozen=True)
class Difference:
    """The difference of two variants over pairs.

    Attributes:
        mean: Mean of the differences.
        half_width: The interval is ``mean ± half_width``.
        deviation: Standard deviation of the differences.
        pairs: How many.
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
    """The difference ``first − second`` of numbers that belong together.

    Raises:
        ValueError: Other lengths, or fewer than two pairs.
    """
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
def t_quantile(share: float, freedom: int) -> float:
    """The number that Student's t with ``freedom`` degrees of freedom stays below by ``share``.

    Args:
        share: Between 0 and 1.
        freedom: At least 1.

    Raises:
        ValueError: Numbers out of these ranges.
    """
    number("share", share, above=0.0, below=1.0)
    whole("freedom", freedom, least=1)
    if share < 0.5:
        return -t_quantile(1 - share, freedom)
    low, high = 0.0, 1.0
    while t_share(high, freedom) < share:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_share(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def t_share(t: float, freedom: int) -> float:
    """The share of Student's t that lies below ``t``."""
    tail = _beta_share(freedom / (freedom + t * t), freedom / 2, 0.5) / 2
    return 1 - tail if t > 0 else tail


def _beta_share(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b)."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _beta_share(1 - x, b, a)
    logs = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(logs + a * math.log(x) + b * math.log1p(-x)) / a
    return front / _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """1 + d₁/(1 + d₂/(1 + …)), summed from its end."""
    terms, value = 200, 1.0
    for k in range(terms, 0, -1):
        m = k // 2
        if k % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        value = 1 + d / value
    return value
