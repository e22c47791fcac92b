"""The inverse frequencies of rotary embedding, for every way of stretching them.

Pair i of d rotated features turns by position · θ^(−2i/d) (Su et al. 2021, eq. 15). The scaling
types change those frequencies so that a model reads further than it was trained for:

    linear     positions divided by a factor (Chen et al. 2023)
    dynamic    a greater θ once the sequence outgrows the training length (NTK-aware)
    llama3     low frequencies divided, high ones kept, a ramp between (Llama 3.1)
    yarn       the same with a ramp over pairs, and a temperature (Peng et al. 2023, eqs. 18-25)
    longrope   a factor per pair, one set for short and one for long sequences (Ding et al. 2024)
    proportional   the first pairs alone turn, with the exponents of all (Gemma 4)
    explicit   given one by one (converted models, whose pairs stand in another order)

Everything is float32, operation by operation as in Hugging Face transformers: at position 60,000
a rounding of a frequency in its last bit moves the angle by thousandths, so the checkpoints' own
arithmetic is the definition.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from polyhead.config import RopeConfig
from polyhead.errors import ConfigError

_T = TypeVar("_T")


def inverse_frequencies(config: RopeConfig, dim: int, length: int = 0) -> tuple[Tensor, float]:
    """The frequencies for ``dim`` rotated features.

    Args:
        config: Type and numbers of the scaling.
        dim: Rotated features, even.
        length: Greatest position of the call plus 1; only ``dynamic`` and ``longrope`` read it.

    Returns:
        ``[dim / 2]`` float32 on the CPU, and the factor by which cos and sin are multiplied
        (the "attention factor" of yarn and longrope, 1 elsewhere).
    """
    if config.type == "linear":
        return _default(config.theta, dim) / _of(config.factor), 1.0
    if config.type == "dynamic":
        return _default(_dynamic_theta(config, dim, length), dim), 1.0
    if config.type == "llama3":
        return _llama3(config, dim), 1.0
    if config.type == "yarn":
        return _yarn(config, dim)
    if config.type == "longrope":
        return _longrope(config, dim, length)
    if config.type == "proportional":
        kept = _default(config.theta, dim) / (config.factor or 1.0)
        pairs = torch.arange(dim // 2, device="cpu")
        rotated = dim if config.rotated is None else config.rotated
        return kept.where(pairs < rotated // 2, 0.0), 1.0
    if config.type == "explicit":
        return _explicit(config, dim)
    return _default(config.theta, dim), 1.0


def coordinates_of_pairs(config: RopeConfig, pairs: int) -> list[int]:
    """Which coordinate of a token turns each of so many pairs (M-RoPE; Wang et al. 2024, §2.1).

    Raises:
        ConfigError: No sections, or sections of another number of pairs.
    """
    sections = _of(config.sections)
    if sum(sections) != pairs:
        raise ConfigError(
            f"rope sections must count each rotated pair once, {pairs} in all: got {sections}"
        )
    count = len(sections)
    if config.interleaved_sections:
        return [i % count if i < count * sections[i % count] else 0 for i in range(pairs)]
    return [coordinate for coordinate in range(count) for _ in range(sections[coordinate])]


def regime(config: RopeConfig, length: int) -> int:
    """A number that is equal for two lengths exactly when their frequencies are."""
    if config.type == "dynamic":
        return max(length, _of(config.original_max_positions))
    if config.type == "longrope":
        return int(length > _of(config.original_max_positions))
    return 0


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim


def _default(theta: float | Tensor, dim: int) -> Tensor:
    return 1.0 / theta ** _exponents(dim)


def _dynamic_theta(config: RopeConfig, dim: int, length: int) -> float | Tensor:
    factor, trained = _of(config.factor), _of(config.original_max_positions)
    if length <= trained:
        return config.theta
    # A float32 tensor, because transformers takes the length from a tensor of positions.
    stretch = torch.tensor(length, dtype=torch.float32, device="cpu") * factor / trained - (
        factor - 1
    )
    theta: Tensor = config.theta * stretch ** (dim / (dim - 2))
    return theta


def _llama3(config: RopeConfig, dim: int) -> Tensor:
    factor, trained = _of(config.factor), _of(config.original_max_positions)
    low, high = _of(config.low_freq_factor), _of(config.high_freq_factor)
    kept = _default(config.theta, dim)
    wavelength = 2 * math.pi / kept
    divided = torch.where(wavelength > trained / low, kept / factor, kept)
    ramp = (trained / wavelength - low) / (high - low)
    between = ~(wavelength < trained / high) & ~(wavelength > trained / low)
    return torch.where(between, (1 - ramp) * divided / factor + ramp * divided, divided)


def _yarn(config: RopeConfig, dim: int) -> tuple[Tensor, float]:
    factor, trained = _of(config.factor), _of(config.original_max_positions)

    def pair_that_turns(times: float) -> float:
        turns = trained / (times * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(config.theta))

    low = pair_that_turns(config.beta_fast or 32)
    high = pair_that_turns(config.beta_slow or 1)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    kept_share = 1 - ((pairs - low) / (high - low)).clamp(0, 1)

    wavelengths = config.theta ** _exponents(dim)
    kept, divided = 1.0 / wavelengths, 1.0 / (factor * wavelengths)
    frequencies = divided * (1 - kept_share) + kept * kept_share
    return frequencies, _yarn_attention_factor(config, factor)


def _yarn_attention_factor(config: RopeConfig, factor: float) -> float:
    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return temperature(config.mscale) / temperature(config.mscale_all_dim)
    return temperature(1.0)


def _longrope(config: RopeConfig, dim: int, length: int) -> tuple[Tensor, float]:
    trained = _of(config.original_max_positions)
    factors = _of(config.long_factor if length > trained else config.short_factor)
    if len(factors) != dim // 2:
        raise ConfigError(
            f"rope short_factor and long_factor need one number per rotated pair, {dim // 2}: got "
            f"{len(factors)}"
        )
    stretched = torch.tensor(factors, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / (stretched * config.theta ** _exponents(dim))
    if config.attention_factor is not None:
        return frequencies, config.attention_factor
    factor = _of(config.factor)
    if factor <= 1:
        return frequencies, 1.0
    return frequencies, math.sqrt(1 + math.log(factor) / math.log(trained))


def _explicit(config: RopeConfig, dim: int) -> tuple[Tensor, float]:
    frequencies = _of(config.frequencies)
    if len(frequencies) != dim // 2:
        raise ConfigError(
            f"rope frequencies need one number per rotated pair, {dim // 2}: got {len(frequencies)}"
        )
    factor = 1.0 if config.attention_factor is None else config.attention_factor
    return torch.tensor(frequencies, dtype=torch.float32, device="cpu"), factor


def _of(value: _T | None) -> _T:
    """A field that RopeConfig has already checked to be there."""
    if value is None:
        raise ConfigError("this rope type needs a field that is None")
    return value
