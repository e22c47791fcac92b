"""The way of a token through the layers: what each adds, and the guess that each would make.

    x ← x + attention(x)        x ← x + network(x)         (placements: layers/transformer_layer.py)

x is the residual stream. After every layer the model's own final norm and head say which token it
would name if it ended there: the logit lens (nostalgebraist 2020). The guess after the last layer
is the model's prediction. Of several residual streams this is what the model's end joins them to.

Letters: L layers, T tokens, E embed size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_int
from polyhead.errors import InputError
from polyhead.layers.scope import Scope
from polyhead.models import Transformer
from polyhead.models.parts import layer_of

MOST_BYTES = 64 << 20
"""Bytes of the stream that are kept; of a longer text only the last tokens are kept."""

PARTS = ("attention", "cross_attention", "feed_forward")
"""What a layer adds, in order; ``sizes`` has those that the layers have."""


class Stream:
    """The residual stream of the first text of one run, at each of a model's own layers.

    Attributes:
        sizes: By part, and ``"stream"`` (after the layer): ``[L, T]`` lengths of vectors, float32;
            0 where a layer lacks the part.
        states: ``[L + 1, kept, E]`` the stream of the last tokens, before the first layer and after
            each.
        first: The first token whose states are kept.
    """

    def __init__(self, model: Transformer, most_bytes: int = MOST_BYTES) -> None:
        self._model, self._most_bytes = model, most_bytes
        self._states: list[Tensor] = []
        self._sizes: dict[str, list[Tensor]] = {}
        self._parts = {part for layer in model.config.layers for part in layer.parts}
        self.first = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records the run of the model inside the block."""
        here = Scope()
        with ExitStack() as hooks:
            hooks.callback(here.close)
            model = self._model
            hooks.callback(model.register_forward_pre_hook(here.only(self._begin)).remove)
            known: set[nn.Module] = set()
            for number, layer in enumerate(model.layers):
                if layer in known:
                    continue  # ALBERT's layers are one module
                known.add(layer)
                config = layer_of(model, number).config
                before = here.only(self._enter)
                hooks.callback(layer.register_forward_pre_hook(before).remove)
                absent = self._parts - {*config.parts}
                after = here.only(partial(self._layer, absent))
                hooks.callback(layer.register_forward_hook(after).remove)
                for part in PARTS:
                    module = _adds(layer, part)
                    if module is not None:
                        hook = here.only(partial(self._part, part, config.mix(part)[1]))
                        hooks.callback(module.register_forward_hook(hook).remove)
            yield

    @property
    def sizes(self) -> dict[str, Tensor]:
        return {name: torch.stack(rows) for name, rows in self._sizes.items()}

    @property
    def states(self) -> Tensor:
        return torch.stack(self._states)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        kept = [*self._states, *(row for rows in self._sizes.values() for row in rows)]
        return sum(tensor.nbytes for tensor in kept)

    @property
    def guesses_work(self) -> int:
        """Multiplications of the guesses of one token; 0 for a model that has no logits."""
        config = self._model.config
        if self._model.head is None:
            return 0
        return 2 * len(self._states) * config.vocab_size * config.embed_dim

    @torch.inference_mode()
    def guesses(self, token: int) -> Tensor:
        """``[L + 1, W]`` logits of the model if it ended before its first layer, or after each.

        Args:
            token: Whose next token is guessed, from ``first`` on.

        Raises:
            InputError: The model has no logits, or nothing is kept of this token.
        """
        if self._model.head is None:
            raise InputError("this model has no output head, so it has no logits")
        last = self.first + len(self._states[0]) - 1
        place = check_int("token", token, least=self.first, most=last) - self.first
        rows = torch.stack([state[place] for state in self._states])
        if self._model.final_norm is not None:
            rows = self._model.final_norm(rows)
        return self._model.logits(rows[None])[0].float()

    def _begin(self, *call: object) -> None:
        self._states, self._sizes = [], {}

    def _enter(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._states:
            return
        x = self._joined(inputs[0])
        tokens, row = x.shape[1], x.shape[-1] * x.element_size() * (len(self._model.layers) + 1)
        self.first = max(0, tokens - max(1, self._most_bytes // row))
        self._keep(x)

    def _layer(self, absent: Iterable[str], layer: nn.Module, inputs: Any, x: Tensor) -> None:
        x = self._joined(x)
        self._keep(x)
        for part in absent:
            self._measure(part, torch.zeros_like(x))
        self._measure("stream", x)

    def _part(self, name: str, scale: float, module: nn.Module, inputs: Any, x: Tensor) -> None:
        self._measure(name, x * scale if scale != 1.0 else x)

    def _joined(self, x: Tensor) -> Tensor:
        streams = self._model.streams
        return x if streams is None else streams.leave(x)

    def _keep(self, x: Tensor) -> None:
        self._states.append(x[0, self.first :].detach().clone())

    def _measure(self, name: str, x: Tensor) -> None:
        self._sizes.setdefault(name, []).append(x[0].detach().float().norm(dim=-1).cpu())


def _adds(layer: nn.Module, part: str) -> nn.Module | None:
    """The module whose output a layer adds to the stream for one of its parts."""
    norm = layer._modules.get(f"{part}_out_norm")
    return layer._modules.get(part) if norm is None else norm
