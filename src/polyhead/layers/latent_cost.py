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
from typing import Literal

from polyhead.config import LatentAttentionConfig

Computation = Literal["absorbed", "expanded"]
COMPUTATIONS: tuple[Computation, ...] = ("absorbed", "expanded")


@dataclass(frozen=True)
class ComputationCost:
    """One way to compute.

    Attributes:
        flops: Floating-point operations (2 per multiply-add) beside the projections that both ways
            share.
        elements: Elements of the keys and values that attention reads, those made for it included.
    """

    flops: int
    elements: int


@dataclass(frozen=True)
class LatentExplanation:
    """Which computation runs for some shapes, and why; print it.

    Attributes:
        computation: The one that runs.
        forced: Whether the caller chose it.
        costs: Of both, by name.
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


def cost(
    config: LatentAttentionConfig, computation: Computation, batch: int, queries: int, keys: int
) -> ComputationCost:
    """The cost of one call; every query is counted with every key."""
    H, R = config.num_heads, config.kv_lora_rank
    pairs = batch * H * queries * keys
    up = R * H * (config.qk_nope_head_dim + config.v_head_dim)
    if computation == "expanded":
        per_token = H * (config.qk_head_dim + config.v_head_dim)
        per_pair = config.qk_head_dim + config.v_head_dim
        return ComputationCost(2 * (batch * keys * up + pairs * per_pair), batch * keys * per_token)
    per_pair = config.latent_dim + R
    return ComputationCost(
        2 * (batch * queries * up + pairs * per_pair), batch * keys * config.latent_dim
    )


def choose(config: LatentAttentionConfig, batch: int, queries: int, keys: int) -> Computation:
    """The computation with fewer operations; on a tie the one that makes fewer tensors."""
    absorbed, expanded = (cost(config, name, batch, queries, keys) for name in COMPUTATIONS)
    return "expanded" if expanded.flops < absorbed.flops else "absorbed"


def explain_choice(
    config: LatentAttentionConfig,
    batch: int,
    queries: int,
    keys: int,
    forced: Computation | None = None,
) -> LatentExplanation:
    """Both costs, and which computation runs."""
    return LatentExplanation(
        computation=forced or choose(config, batch, queries, keys),
        forced=forced is not None,
        costs={name: cost(config, name, batch, queries, keys) for name in COMPUTATIONS},
        shapes=(
            f"MLA {config.num_heads} heads, latent {config.kv_lora_rank} + "
            f"{config.qk_rope_head_dim} rotary; batch {batch}, {queries} queries, {keys} keys"
        ),
    )
