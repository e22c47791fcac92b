"""What the two computations of latent attention cost, and which is cheaper.

    expanded   S · R · H(N + V)   the past made into keys and values
               P · H(N + P' + V)  scores and weighted values over P pairs
    absorbed   T · R · H(N + V)   queries taken to the latent, outputs brought back
               P · H(2R + P')     scores and weighted values on the latent itself

in multiply-adds, N features without and P' with rotation. A prompt of its own (T = S) is cheaper
expanded, a decode step over a past by far cheaper absorbed, and a chunk of T queries on a long past
crosses over near T = R(N + V) / (2R − N − V), 170 tokens for DeepSeek's sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.config import LatentAttentionConfig
from polyhead.config.latent import COMPUTATIONS, Computation, ComputationCost


@dataclass(frozen=True)
class LatentExplanation:
    """Which computation runs for some shapes, and why; print it.

    Attributes:
        computation: The one that runs.
        forced: Whether the caller chose it.
        costs: Cost of both ways, by name.
        shapes: The shapes in words.
    """

    computation: Computation
    forced: bool
    costs: dict[str, ComputationCost]
    shapes: str

    def __str__(self) -> str:
        lines = [self.shapes]
        for name, cost in self.costs.items():
            mark = ""
            if name == self.computation:
                mark = "  ← runs, as asked" if self.forced else "  ← runs, fewer operations"
            lines.append(
                f"  {name}  {cost.flops / 1e9:>12,.3f} GFLOP"
                f"  {cost.elements:>15,} elements of keys and values{mark}"
            )
        return "\n".join(lines)


def explain_choice(
    config: LatentAttentionConfig,
    batch_size: int,
    queries: int,
    keys: int,
    forced: Computation | None = None,
) -> LatentExplanation:
    """Both costs, and which computation runs."""
    return LatentExplanation(
        computation=forced or config.choose(batch_size, queries, keys),
        forced=forced is not None,
        costs={name: config.cost(name, batch_size, queries, keys) for name in COMPUTATIONS},
        shapes=(f"{config.described} rotary; batch {batch_size}, {queries} queries, {keys} keys"),
    )
