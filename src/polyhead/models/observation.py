"""The outputs of all layers while a model runs: shape, mean and standard deviation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyhead.layers.scope import Scope


class LayerOutput(NamedTuple):
    """One layer's output.

    Attributes:
        layer: Counted from 0.
        shape: ``(B, T, E)``.
        mean: Mean of all elements.
        std: Standard deviation of all elements (with n − 1).
    """

    layer: int
    shape: torch.Size
    mean: float
    std: float


class Observation(list[LayerOutput]):
    """The layers' outputs in the order they came; print it.

    Attributes:
        encoder: The encoder's layers of an encoder-decoder; empty elsewhere.
        final_shape: Shape of what the model returned, or None before it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder: list[LayerOutput] = []
        self.final_shape: torch.Size | None = None

    def __str__(self) -> str:
        return self.text()

    def text(self, language: str = "en") -> str:
        """One line per layer, in English (``"en"``) or Chinese (``"zh"``)."""
        if language not in ("en", "zh"):
            raise ValueError(f"language must be 'en' or 'zh': got {language!r}")
        zh = language == "zh"
        encoder, final = ("编码器", "最终输出") if zh else ("encoder ", "final output")
        line = (
            "第{n}层输出 shape: {shape} 均值={mean:.4f} std={std:.4f}"
            if zh
            else "layer {n} output shape: {shape} mean={mean:.4f} std={std:.4f}"
        )
        lines = [
            prefix + line.format(n=out.layer + 1, shape=out.shape, mean=out.mean, std=out.std)
            for prefix, outputs in ((encoder, self.encoder), ("", self))
            for out in outputs
        ]
        if self.final_shape is not None:
            lines.append(f"{final} shape: {self.final_shape}")
        return "\n".join(lines)


@contextmanager
def observe(
    model: nn.Module, layers: nn.ModuleList, encoder_layers: nn.ModuleList
) -> Iterator[Observation]:
    """Collects the outputs of layers, by hooks that are removed at the end of the block.

    They see the calls of the thread or task that opens it.
    """
    seen = Observation()

    def watch(outputs: list[LayerOutput], index: int) -> Any:
        def hook(module: nn.Module, inputs: Any, out: Tensor) -> None:
            x = out.detach().float()
            mean = float(x.mean())
            outputs.append(LayerOutput(index, out.shape, mean, float(x.std())))

        return hook

    def finished(module: nn.Module, inputs: Any, out: Tensor) -> None:
        seen.final_shape = out.shape

    here = Scope()
    with ExitStack() as handles:
        handles.callback(here.close)
        for outputs, stack in ((seen.encoder, encoder_layers), (seen, layers)):
            for index, layer in enumerate(stack):
                handles.callback(
                    layer.register_forward_hook(here.only(watch(outputs, index))).remove
                )
        handles.callback(model.register_forward_hook(here.only(finished)).remove)
        yield seen
