"""Steering: a vector that is added to the residual stream while the model runs.

v = mean over texts with a property − mean over texts without it      Rimsky et al. 2024
x ← x + scale · v                                                     Turner et al. 2023
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from polyhead.errors import InputError
from polyhead.interpret.activations.tracing import trace
from polyhead.interpret.tables import Text, ids_of
from polyhead.models.parts import device_of


def steering_vector(
    model: nn.Module,
    positive: Sequence[Text],
    negative: Sequence[Text],
    layer: int,
    position: int = -1,
) -> Tensor:
    """``[E]`` by how much the stream behind a layer differs between two groups of texts.

    Args:
        model: A Transformer, or what holds one.
        positive: Texts, or token ids ``[T]``, with the property.
        negative: Those without.
        layer: Index of the layer, from 0.
        position: Whose stream; −1 the last token.

    Raises:
        InputError: A group without texts.
    """
    means = []
    for name, texts in (("positive", positive), ("negative", negative)):
        if isinstance(texts, str) or not len(texts):
            raise InputError(f"{name} must be at least one text, in a list: got {texts!r}")
        found = []
        for text in texts:
            with torch.no_grad(), trace(model) as t:
                stream = t.layers[layer].resid_post.save()
                model(ids_of(model, text).to(device_of(model)))
            found.append(stream.value[0, position].float())
        means.append(torch.stack(found).mean(dim=0))
    return means[0] - means[1]


@contextmanager
def steer(model: nn.Module, vectors: Mapping[int, Tensor], scale: float = 1.0) -> Iterator[None]:
    """Adds vectors to the stream behind layers while the block runs, at every token.

        with steer(model, {12: vector}, scale=4.0):
            model.generate("I think that")

    Args:
        model: A Transformer, or what holds one.
        vectors: By layer what broadcasts to ``[B, T, E]``.
        scale: Factor of all of them.
    """
    with trace(model) as t:
        for layer, vector in vectors.items():

            def add(x: Tensor, vector: Tensor = vector) -> Tensor:
                return x + scale * vector.to(x)

            t.layers[layer].resid_post.edit(add)
        yield
