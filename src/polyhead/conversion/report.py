"""The report of a conversion: what was done, what was measured, and warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyhead._utils.notebook import lines, panel
from polyhead.conversion.measure import DomainFigures, Speed
from polyhead.conversion.proof import ExactStep

_SUSPICIOUS = 2.0
"""Warn if KL on unseen texts is more than this many times that on calibrated ones."""

_SLOWER = 0.97


@dataclass(frozen=True)
class LayerFigures:
    """What a step did to one layer.

    Attributes:
        layer: Index of the layer.
        was: Head layout before, such as ``"GQA-3"``.
        now: Head layout after.
        price: Expected KL divergence, nats per token; 0 for exact steps.
        alone: Measured KL divergence with only this layer converted; None: not measured.
    """

    layer: int
    was: str
    now: str
    price: float
    alone: float | None


@dataclass(frozen=True)
class Report:
    """The report of a conversion; print it.

    Attributes:
        source: Name of the converted model.
        steps: Exact steps with their errors in float64.
        layers: Figures of each layer.
        domains: Figures of each domain of texts.
        speed_before, speed_after: Measured on this machine.
        elements_before, elements_after: Numbers of cache per token, all layers.
        calibration_tokens: Tokens calibrated on; 0 for exact conversions.
        calibration_hash: Hash of those tokens (first 16 digits of SHA-256).
        seconds: Wall-clock seconds of the conversion, without measurements.
        sum_of_layers: Sum of the KL divergences of the layers alone; None: not measured.
        together: KL divergence of all layers together on the same tokens.
    """

    source: str
    steps: tuple[ExactStep, ...]
    layers: tuple[LayerFigures, ...]
    domains: tuple[DomainFigures, ...]
    speed_before: Speed
    speed_after: Speed
    elements_before: int
    elements_after: int
    calibration_tokens: int
    calibration_hash: str
    seconds: float
    sum_of_layers: float | None
    together: float | None

    @property
    def warnings(self) -> list[str]:
        """Warnings for users of the model."""
        found = []
        seen = [each.kl for each in self.domains if each.calibrated]
        least = min(seen, default=math.inf)
        found += [
            f"KL on {domain.name!r}, which was not calibrated on, is {domain.kl / least:.1f} times "
            "that on calibrated texts: more may be lost than figures on calibrated texts say"
            for domain in self.domains
            if not domain.calibrated and domain.kl > _SUSPICIOUS * least
        ]
        if self.calibration_tokens and all(each.calibrated for each in self.domains):
            found.append(
                "no domain was kept from calibration: give unseen texts, or results are optimistic"
            )
        for name in ("prefill", "decode"):
            before, after = (
                getattr(speed, name) for speed in (self.speed_before, self.speed_after)
            )
            if after < _SLOWER * before:
                found.append(f"{name} is slower: {after / before:.2f} of the original's rate")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON's types."""
        return asdict(self) | {"warnings": self.warnings}

    def __str__(self) -> str:
        before, after = self.speed_before, self.speed_after
        lines = [
            f"{self.source}: cache {self.elements_before:,} → {self.elements_after:,} numbers per "
            f"token ({self.elements_after / self.elements_before:.3f})",
            f"allocated for {after.cache_tokens} tokens: {before.cache_bytes:,} → "
            f"{after.cache_bytes:,} bytes",
            f"prefill {before.prefill:,.0f} → {after.prefill:,.0f} tokens/s, decode "
            f"{before.decode:,.1f} → {after.decode:,.1f} tokens/s",
        ]
        if self.calibration_tokens:
            lines.append(
                f"calibrated on {self.calibration_tokens:,} tokens ({self.calibration_hash}), "
                f"converted in {self.seconds:.0f} s"
            )
        lines += ["", "exact steps, greatest difference of float64 logits"]
        lines += [f"  {step}" for step in self.steps]
        lines += ["", *domain_table(self.domains)]
        lines += ["", *_table(self._layer_rows())]
        if self.sum_of_layers is not None and self.together is not None:
            lines.append(
                f"each layer alone adds up to KL {self.sum_of_layers:.4f}, all together "
                f"{self.together:.4f}"
            )
        lines += [f"warning: {each}" for each in self.warnings]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return panel(f"Conversion of {self.source}", lines(str(self)))

    def _layer_rows(self) -> list[list[str]]:
        rows = [["layer", "was", "now", "price", "KL alone"]]
        rows += [
            [
                str(each.layer),
                each.was,
                each.now,
                f"{each.price:.4f}",
                "" if each.alone is None else f"{each.alone:.4f}",
            ]
            for each in self.layers
        ]
        return rows


def domain_table(domains: Sequence[DomainFigures]) -> list[str]:
    """The lines of the table."""
    rows = [["texts", "", "tokens", "perplexity", "ratio", "KL", "by quarter of a window", "top-1"]]
    rows += [
        [
            each.name,
            "calibrated" if each.calibrated else "unseen",
            f"{each.tokens:,}",
            f"{each.before:.2f} → {each.after:.2f}",
            f"{each.ratio:.3f}",
            f"{each.kl:.4f}",
            " ".join(f"{kl:.3f}" for kl in each.by_position),
            f"{each.top1:.3f}",
        ]
        for each in domains
    ]
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
