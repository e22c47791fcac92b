"""Activations of a running model by name, saved or changed, with the fast kernels still running.

    with ph.trace(model) as t:
        hidden = t.layers[5].mlp.out.save()
        t.layers[7].attention.heads.edit(lambda heads: heads * 0.5)
        model(ids)
    hidden.value  # [B, T, E]

Only what is named is looked at: a module that no name concerns runs as it does without a trace.
Where gradients are recorded, a saved tensor is part of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from polyhead.interpret.activations import points
from polyhead.interpret.activations.point import Install, Point
from polyhead.interpret.tables import ids_of
from polyhead.layers.scope import Scope
from polyhead.models.parts import device_of, transformer_of


class Trace:
    """A model's activations, while the block of ``trace`` runs.

    Attributes:
        hooks: What ends with the block.
        scope: The thread or task that opened it; others use the model as if there were no trace.
        transformer: The model, or what it holds.
        output: What the model returned, where ``trace`` was given its input.
    """

    def __init__(self, model: nn.Module) -> None:
        self.hooks, self.scope, self.is_open = ExitStack(), Scope(), True
        self.output: Any = None
        self.transformer = transformer_of(model)
        self._points: dict[str, Point] = {}

    @property
    def layers(self) -> points.Layers:
        """The layers of a decoder or an encoder, and those of an encoder-decoder's decoder."""
        return points.layers_of(self, self.transformer)

    @property
    def encoder(self) -> points.Encoder:
        """The encoder of an encoder-decoder, with ``layers`` and ``final``.

        Raises:
            AttributeError: A model of another kind.
        """
        return points.encoder_of(self, self.transformer)

    def __getattr__(self, name: str) -> Point:
        if name.startswith("_"):
            raise AttributeError(name)
        found: Point = getattr(points.model_points(self, self.transformer), name)
        return found

    def __getitem__(self, name: str) -> Point:
        """The activation of a name, ``t["layers.5.mlp.out"]``.

        Raises:
            AttributeError: There is none of this name; says which there are.
        """
        found: Any = self
        for part in name.split("."):
            found = found[int(part)] if part.isdecimal() else getattr(found, part)
        if not isinstance(found, Point):
            raise AttributeError(f"{name} is no activation: names are {', '.join(self.names())}")
        return found

    def names(self) -> list[str]:
        """The names of all activations of the model, in the order in which they are computed."""
        return [name for part in points.all_points(self, self.transformer) for name in part.names()]

    def point(self, name: str, install: Install) -> Point:
        """The point of a name, the same whenever it is asked for."""
        return self._points.setdefault(name, Point(self, name, install))

    def close(self) -> None:
        """Ends it."""
        self.is_open = False
        self.hooks.close()
        self.scope.close()


@contextmanager
def trace(model: nn.Module, *inputs: Any, **options: Any) -> Iterator[Trace]:
    """Names the activations of a model, to save or change them while it runs.

        with ph.trace(model) as t:
            stream = t.layers[5].resid_post.save()
            t.layers[2].attention.weights.edit(lambda weights: weights.roll(1, -1))
            model(ids)  # or model.generate(…), with a cache, several times
        stream.value

    Names of a layer: ``resid_pre``, ``resid_mid``, ``resid_post`` (the residual stream before,
    between and after attention and network); of ``attention`` (and ``cross_attention``):
    ``input``, ``q``, ``k``, ``v``, ``scores``, ``weights``, ``heads``, ``out``; of ``mlp``:
    ``input``, ``gate``, ``up``, ``hidden``, ``out``. Of the model: ``final``, ``logits``. What a
    layout does not have is an ``AttributeError`` that says what it has.

    It sees the calls of the thread or task that opened it; others use the model as if there were
    no trace.

    Args:
        model: A Transformer, or what holds one.
        *inputs: With inputs, the model runs on them at the end of the block, and ``t.output`` is
            what it returns. A string is split by the model's tokenizer.
        **options: For that run.

    Yields:
        The trace.

    Raises:
        InputError: The model holds no Transformer.
    """
    t = Trace(model)
    try:
        yield t
        if inputs or options:
            given = [ids_of(model, x).to(device_of(model)) if isinstance(x, str) else x
                     for x in inputs]  # fmt: skip
            t.output = model(*given, **options)
    finally:
        t.close()
