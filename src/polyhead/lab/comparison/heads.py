"""How many heads? A task that needs several, and what heads of a trained decoder are worth.

The task: name the tokens 1, 2, 3 and 4 places back, of random tokens. One layer, and the same
parameters whatever the number of heads, since each is E / H features wide. One head has a single
distribution over earlier tokens, so it must mix the four tokens that four heads read separately.

Shape letters: B batch, T tokens, E embed size, K offsets, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError
from polyhead.interpret.probe import probe
from polyhead.interpret.pruning import head_importance, prune
from polyhead.lab.comparison.runs import validation_loss
from polyhead.models import Transformer
from polyhead.models.parts import layer_of

HEADS = (1, 2, 4, 8, 16, 32)
OFFSETS = (1, 2, 3, 4)
IDLE = 0.005
"""Nats a token: a head whose removal costs less is counted as idle."""

_EMBED, _HIDDEN, _VOCABULARY, _TOKENS, _BATCH = 64, 64, 32, 16, 32
_STEPS, _RATE, _EXAMINED = 400, 5e-3, 512
_ABLATED_BLOCKS = 4


@dataclass(frozen=True)
class Outcome:
    """One model on the task.

    Attributes:
        seed: Seed of its initial values and its data.
        all: Fraction of places where all four are right.
    """

    heads: int
    seed: int
    parameters: int
    each: float
    all: float


class Namer(nn.Module):
    """One decoder layer, and for each offset a linear reader of its output.

    Raises:
        ConfigError: They do not divide the features into even numbers.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        if heads < 1 or _EMBED % (2 * heads):
            raise ConfigError(
                f"heads must divide {_EMBED} features into even numbers: got {heads}; use some of "
                f"{', '.join(map(str, HEADS))}"
            )
        attention = AttentionConfig(
            heads, heads, _EMBED // heads, qkv_bias=True, rope=RopeConfig(theta=100.0)
        )
        layer = LayerConfig(attention, FeedForwardConfig(_HIDDEN))
        config = TransformerConfig("decoder", _VOCABULARY, _EMBED, _TOKENS, (layer,), head=None)
        self.layer = Transformer(config)
        for parameter in self.layer.parameters():  # independent of a decoder's own initialization
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        self.read = nn.Linear(_EMBED, len(OFFSETS) * _VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """``[B, T − 4, K, V]`` logits for ``ids [B, T]``."""
        hidden = self.layer(ids)[:, max(OFFSETS) :]
        return self.read(hidden).unflatten(-1, (len(OFFSETS), _VOCABULARY))  # type: ignore[no-any-return]


def name_tokens(heads: int, seed: int, *, steps: int = _STEPS) -> Outcome:
    """Trains one model on the task and examines it on tokens it has not seen."""
    with torch.random.fork_rng(devices=[]):
        model = _trained(heads, seed, steps)
        ids, wanted = _drawn(_EXAMINED)
        with torch.no_grad():
            right = model(ids).argmax(-1) == wanted
    count = sum(p.numel() for p in model.parameters())
    each, together = right.float().mean().item(), right.all(-1).float().mean().item()
    return Outcome(heads, seed, count, each, together)


def where_heads_look(heads: int, seed: int) -> tuple[Tensor, Tensor]:
    """Trains one model on the task and looks at its heads on one row of random tokens.

    Returns:
        ``[T]`` the tokens, and ``[H, T, T]`` the weights.
    """
    with torch.random.fork_rng(devices=[]):
        model = _trained(heads, seed, _STEPS)
        ids, _ = _drawn(1)
        with probe(model.layer) as seen, torch.no_grad():
            model(ids)
    return ids[0], seen[0].rows()[0]


def heads_in_training(heads: int, seed: int, after: Sequence[int]) -> list[dict[str, Any]]:
    """Trains one model on the task and looks at it after some numbers of steps.

    Args:
        after: Numbers of steps, 0 to 400, ascending.

    Returns:
        For each of them ``step``, ``loss`` on 512 rows of new tokens, ``weights [H, T, T]`` on the
        first row, and ``w_q [E / H, E]`` of the first head.
    """
    found: list[dict[str, Any]] = []
    apart = torch.Generator().manual_seed(0)  # what is looked at does not change what is drawn
    ids, wanted = _drawn(_EXAMINED, apart)

    def look(step: int, model: Namer) -> None:
        if step not in after:
            return
        with torch.no_grad():
            loss = F.cross_entropy(model(ids).flatten(0, 2), wanted.flatten()).item()
            with probe(model.layer) as seen:
                model(ids[:1])
        attention: Any = layer_of(model.layer, 0).attention
        w_q = attention.q_proj.weight[: _EMBED // heads].detach().clone()
        found.append({"step": step, "loss": loss, "weights": seen[0].rows()[0], "w_q": w_q})

    with torch.random.fork_rng(devices=[]):
        look(_STEPS, _trained(heads, seed, _STEPS, look))
    return found


def _trained(
    heads: int,
    seed: int,
    steps: int,
    look: Callable[[int, Namer], None] = lambda step, model: None,
) -> Namer:
    """A model after its training; draws from torch's global generator, seeded here."""
    torch.manual_seed(seed)
    model = Namer(heads)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    for step in range(steps):
        look(step, model)
        warm, along = min(1.0, (step + 1) / 20), 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = _RATE * warm * along
        ids, wanted = _drawn(_BATCH)
        found = F.cross_entropy(model(ids).flatten(0, 2), wanted.flatten())
        optimizer.zero_grad()
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def _drawn(batch: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """``[B, T]`` random tokens, and ``[B, T − 4, K]`` those at each offset."""
    ids, most = torch.randint(_VOCABULARY, (batch, _TOKENS), generator=generator), max(OFFSETS)
    return ids, torch.stack([ids[:, most - k : _TOKENS - k] for k in OFFSETS], dim=-1)


def sweep(
    heads: Sequence[int],
    seeds: int,
    *,
    steps: int = _STEPS,
    advance: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Outcome]:
    """The task for each number of heads and each seed."""
    found = []
    for count in heads:
        for seed in range(seeds):
            found.append(name_tokens(count, seed, steps=steps))
            advance(f"{count} heads, seed {seed}", len(found), len(heads) * seeds)
    return found


def summary(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For each number of heads the mean over seeds, the worst and the best."""
    rows = []
    for heads in dict.fromkeys(each.heads for each in outcomes):
        own = [each for each in outcomes if each.heads == heads]
        alls = [each.all for each in own]
        rows.append(
            {
                "heads": heads,
                "parameters": own[0].parameters,
                "seeds": len(own),
                "each": mean(each.each for each in own),
                "all": mean(alls),
                "all_least": min(alls),
                "all_most": max(alls),
            }
        )
    return rows


def redundancy(model: Transformer, blocks: Tensor) -> dict[str, Any]:
    """What the heads of a trained decoder are worth on ``blocks [N, T]``.

    Returns:
        ``rises``: for each layer and head, nats a token that the loss rises without it
        (ablation). ``idle``: the fraction of heads below ``IDLE``. ``halved``: nats a token that it
        rises when the lesser half of each layer's heads is pruned, None with one head.
    """
    rises = head_importance(model, blocks[:_ABLATED_BLOCKS], method="leave-one-out")
    flat = torch.cat(rises)
    halved = None
    if all(len(layer) > 1 for layer in rises):
        least = {
            number: sorted(layer.argsort()[: len(layer) // 2].tolist())
            for number, layer in enumerate(rises)
        }
        whole, half = validation_loss(model, blocks), validation_loss(prune(model, least), blocks)
        halved = half - whole
    return {
        "rises": [[round(rise, 6) for rise in layer.tolist()] for layer in rises],
        "idle": (flat < IDLE).float().mean().item(),
        "halved": halved,
    }
