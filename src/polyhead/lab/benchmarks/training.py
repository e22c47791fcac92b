"""Cases of a training step: loss, gradients and AdamW, with the same weights in every model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyhead.training as ours_in
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import DisagreementError
from polyhead.kernels.dispatch import attention
from polyhead.lab.benchmarks import memory
from polyhead.lab.benchmarks.case import Case, Contestant, Settings, close
from polyhead.lab.benchmarks.limits import matrix_rate
from polyhead.lab.benchmarks.peers import in_transformers, installed
from polyhead.lab.benchmarks.plain import PlainDecoder, TorchTransformer
from polyhead.models import Transformer
from polyhead.semantics import Causal

TRANSFORMERS, PLAIN, TORCH = "transformers", "plain SDPA", "nn.Transformer"
DROPOUT = 0.1
_FIRST_STEPS = 3


@dataclass
class Training:
    """A model, its optimizer, and the batch that it learns.

    Attributes:
        model: The model, in float32.
        dtype: float32, or that of autocast.
    """

    model: nn.Module
    loss: Callable[[], Tensor]
    dtype: torch.dtype
    _optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> Tensor:
        """One training step; returns the loss before it."""
        with torch.enable_grad():
            with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
                found = self.loss()
            found.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return found.detach()

    def first_losses(self) -> Tensor:
        """Losses of the first steps without dropout; all but the first depend on gradients."""
        self.model.eval()
        found = torch.stack([self.step() for _ in range(_FIRST_STEPS)])
        self.model.train()
        return found


def cases(settings: Settings) -> Iterator[Case]:
    """A training step: Llama, and the Transformer of 2017; its time, and the memory it takes.

    Models hold float32; bfloat16 is autocast. And what dropout adds to attention and its gradients.
    """
    for dtype in settings.dtypes:
        if dtype == torch.float16:
            continue
        for tokens in (64,) if settings.quick else (256, 1024):
            yield from _two("Llama, tokens in a row:", tokens, _llama(settings, tokens, dtype))
        tokens = 16 if settings.quick else 64
        yield from _two("Transformer base, tokens:", tokens, _base(settings, tokens, dtype))
        yield _dropout(64 if settings.quick else 512, dtype)


def _two(group: str, tokens: int, models: Mapping[str, Training]) -> Iterator[Case]:
    """The time and the memory of a step, once the first losses have been compared."""
    (_, ours), *others = models.items()
    expected, differs = ours.first_losses(), close(ours.dtype)
    for name, other in others:
        if (why := differs(expected, other.first_losses())) is not None:
            raise DisagreementError(f"{group} {tokens}, {ours.dtype}: losses of {name}: {why}")
    peers = {name: Contestant(other.step, None) for name, other in others}
    operations = 6.0 * tokens * _rows(tokens) * sum(p.numel() for p in ours.model.parameters())
    limits = (matrix_rate(ours.dtype, operations),)
    case = Case(group, tokens, ours.dtype, ours.step, peers, limits, operations)
    yield case
    if memory.MEASURED:
        yield replace(
            case, group=f"memory, {group}", limits=(), work=0.0, unit="", gauge=memory.taken
        )


def _dropout(tokens: int, dtype: torch.dtype) -> Case:
    """Causal attention of two rows of 8 heads of 64 and its gradients, with dropout and without."""
    q, k, v = (torch.randn(2, 8, tokens, 64, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = Causal()

    def gradients(attend: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.enable_grad():
                return torch.cat(torch.autograd.grad(attend().sum(), (q, k, v)))

        return run

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=DROPOUT)

    peers = {
        "without dropout": Contestant(gradients(lambda: attention(q, k, v, mask=mask)), None),
        "torch SDPA": Contestant(gradients(sdpa), None),  # random numbers differ
    }
    ours = gradients(lambda: attention(q, k, v, mask=mask, dropout_p=DROPOUT))
    operations = 3.5 * 4.0 * 16 * 64 * tokens * (tokens + 1) / 2
    return Case("attention with dropout, tokens:", tokens, dtype, ours, peers, (), operations)


def _rows(tokens: int) -> int:
    return max(1, 1024 // tokens) if tokens > 64 else 8


def _llama(settings: Settings, tokens: int, dtype: torch.dtype) -> dict[str, Training]:
    """A decoder of 32 million parameters, 1,024 tokens a step."""
    E, heads, layers, vocabulary = (64, 2, 2, 512) if settings.quick else (512, 8, 8, 16_384)
    attention = AttentionConfig(heads, heads // 2, E // heads, rope=RopeConfig())
    network = FeedForwardConfig(E * 11 // 4, "silu", gated=True)
    layer = LayerConfig(attention, network, NormConfig(eps=1e-6))
    config = TransformerConfig(
        "decoder", vocabulary, E, max(tokens, 64), (layer,) * layers,
        final_norm=NormConfig(eps=1e-6),
    )  # fmt: skip
    ours = Transformer(config)
    ids = _ids(vocabulary, tokens)
    models = {"polyhead": Training(ours, lambda: ours_in.loss(ours, ids, ids), dtype)}
    plain = PlainDecoder(ours)
    models[PLAIN] = Training(plain, lambda: plain.loss(ids), dtype)
    if installed("transformers"):
        options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
        theirs = in_transformers(ours, "AutoModelForCausalLM", **options)
        models[TRANSFORMERS] = Training(theirs, lambda: theirs(ids, labels=ids).loss, dtype)
    return models


def _base(settings: Settings, tokens: int, dtype: torch.dtype) -> dict[str, Training]:
    """The base model of Vaswani et al. 2017, with nn.Transformer's dropout."""
    sizes = (512, 64, 2, 2, 128) if settings.quick else (32_000, 512, 6, 8, 2048)
    config = TransformerConfig.vanilla(*sizes, max_positions=tokens, dropout=DROPOUT)
    ours = Transformer(
        replace(
            config,
            layers=tuple(map(_with_dropout, config.layers)),
            encoder_layers=tuple(map(_with_dropout, config.encoder_layers)),
        )
    )
    source, target, labels = (_ids(sizes[0], tokens) for _ in range(3))
    theirs = TorchTransformer(ours, DROPOUT)
    return {
        "polyhead": Training(
            ours, lambda: ours_in.loss(ours, target, labels, encoder_ids=source), dtype
        ),
        TORCH: Training(theirs, lambda: theirs.loss(source, target, labels), dtype),
    }


def _with_dropout(layer: LayerConfig) -> LayerConfig:
    """Dropout of weights and hidden features too."""
    attention: Any = layer.attention
    network: Any = layer.feed_forward
    cross = layer.cross_attention
    return replace(
        layer,
        attention=replace(attention, dropout=DROPOUT),
        feed_forward=replace(network, dropout=DROPOUT),
        cross_attention=None if cross is None else replace(cross, dropout=DROPOUT),
    )


def _ids(vocabulary: int, tokens: int) -> Tensor:
    return torch.randint(vocabulary, (_rows(tokens), tokens))
