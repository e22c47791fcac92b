"""Modules that ranks cannot divide: classes of a user's own, and methods that were replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cases_of_attention import mesh_of
from cases_of_models import E, made
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import polyhead as ph
from polyhead import parallel
from polyhead.layers import MultiHeadAttention, TransformerLayer
from polyhead.layers.experts import Experts
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.lora import LoraLinear
from polyhead.layers.norms import RMSNorm
from polyhead.models.heads import Head


class Mixer(nn.Module):
    """Adds the mean of all tokens."""

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        return x + x.mean(dim=1, keepdim=True)


class MixingLayer(TransformerLayer):
    def forward(self, x: Tensor, *more: Any, **call: Any) -> Tensor:
        return super().forward(x, *more, **call) + x.mean(dim=1, keepdim=True)


class MixingAttention(MultiHeadAttention):
    def forward(self, x: Tensor, *more: Any, **call: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x.roll(1, dims=1), *more, **call)


class MixingNetwork(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cumsum(dim=1))


class MixingNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=1, keepdim=True))


class MixingLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(dim=-1)


class MixingHead(Head):
    pass


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) / ids.shape[1]


class Averaging(ph.Transformer):
    def logits(self, hidden: Tensor) -> Tensor:
        return F.log_softmax(super().logits(hidden), dim=-1)


class OwnExperts(Experts):
    pass


class OwnExpert(FeedForward):
    pass


def _of_class(path: str, kind: type[nn.Module]) -> Callable[[nn.Module], None]:
    """The module at a path, of a class of one's own."""

    def change(model: nn.Module) -> None:
        model.get_submodule(path).__class__ = kind

    return change


def _replaced(model: nn.Module) -> None:
    norm = model.get_submodule("layers.0.feed_forward_norm")
    norm.forward = lambda x: x - x.mean(dim=1, keepdim=True)  # type: ignore[method-assign]


def _adapter(model: Any) -> None:
    base = model.layers[0].attention.q_proj
    down, up = (nn.Parameter(torch.zeros(n, m)) for n, m in ((2, E), (len(base.weight), 2)))
    model.layers[0].attention.q_proj = LoraLinear(base, down, up, 1.0)


def _set(path: str, module: Callable[[], nn.Module]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, module())

    return change


BOTH = "context", "tensor"
CHANGES: dict[str, tuple[tuple[str, ...], Callable[[Any], None]]] = {
    "Mixer": (BOTH, _set("layers.0.feed_forward", Mixer)),
    "Mixer ": (BOTH, lambda model: model.layers.__setitem__(1, Mixer())),
    "MixingLayer": (BOTH, _of_class("layers.0", MixingLayer)),
    "MixingAttention": (BOTH, _of_class("layers.1.attention", MixingAttention)),
    "MixingNetwork": (BOTH, _of_class("layers.1.feed_forward", MixingNetwork)),
    "MixingNorm": (BOTH, _of_class("layers.0.attention_norm", MixingNorm)),
    "MixingLinear": (BOTH, _of_class("layers.0.feed_forward.up_proj", MixingLinear)),
    "MixingHead": (BOTH, _of_class("head", MixingHead)),
    "ScaledEmbedding": (BOTH, _of_class("embedding.tokens", ScaledEmbedding)),
    "Averaging": (BOTH, _of_class("", Averaging)),
    "RMSNorm whose methods were replaced": (BOTH, _replaced),
    "LoraLinear": (("tensor",), _adapter),
    "OwnExperts": (("context", "tensor", "expert"), _of_class("layers.0.feed_forward", OwnExperts)),
    "OwnExpert": (
        ("context", "tensor", "expert"), _of_class("layers.0.feed_forward.experts.1", OwnExpert)
    ),
}  # fmt: skip


def refused_all() -> None:
    """Every change is refused by its name on every dimension, and nothing is divided."""
    for name, (dimensions, change) in CHANGES.items():
        for dimension in dimensions:
            model = made("Mixtral" if "Own" in name else "Llama", torch.float32)
            change(model)
            words = "it was not refused"
            try:
                parallel.parallelize(model, mesh_of(dimension))
            except ph.UnsupportedError as error:
                words = str(error)
            assert f"{name.strip()} (" in words, f"{name} on {dimension}: {words}"
            assert not any(isinstance(x, DTensor) for x in model.parameters())
