"""Names of a model's attentions, and of the calls of one that runs repeatedly.

A number means a self-attention, in the model's order. A module that one run of the model calls
several times (ALBERT's twelve layers are one) is ``path``, ``path#1``, …, and each of its calls has
a number, in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from polyhead.errors import InputError
from polyhead.layers.scope import Scope
from polyhead.layers.third_party import is_attention

_CROSS = {"cross_attention", "crossattention", "encoder_attn", "EncDecAttention"}
"""Names that cross-attention goes by, in polyhead and in transformers."""


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every attention of a model by its module's path, in the order of the model."""
    return {name: module for name, module in model.named_modules() if is_attention(module)}


def is_cross(path: str) -> bool:
    """Whether a path is that of a cross-attention."""
    return not _CROSS.isdisjoint(path.partition("#")[0].split("."))


def is_encoder(path: str) -> bool:
    """Whether a path is that of an attention in an encoder."""
    return not {"encoder", "encoder_layers"}.isdisjoint(path.partition("#")[0].split("."))


def numbered_layers(paths: Iterable[str]) -> list[str]:
    """The paths that a layer number means: all but cross-attention."""
    return [path for path in paths if not is_cross(path)]


def name_of(modules: Sequence[str], layer: int | str) -> str:
    """The path of a layer that is given by number or by path.

    Raises:
        InputError: There is no such layer.
    """
    if isinstance(layer, str):
        if layer not in modules:
            raise InputError(f"no attention {layer!r}: the model has {', '.join(modules)}")
        return layer
    numbered = numbered_layers(modules)
    if not 0 <= layer < len(numbered):
        raise InputError(f"layers are counted from 0 to {len(numbered) - 1}: got {layer!r}")
    return numbered[layer]


class Repeats:
    """Tells the calls of one attention in one run of its model apart."""

    def __init__(self) -> None:
        self._depth = 0
        self._calls: Counter[str] = Counter()

    @contextmanager
    def watching(self, model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
        """While the block runs, a run begins where the outermost module around a path is called."""
        around = {path[:i] for path in paths for i in range(len(path)) if path[i] == "."}
        modules = dict(model.named_modules())
        here = Scope()
        with ExitStack() as hooks:
            hooks.callback(here.close)
            for name in {"", *around} & modules.keys() - set(paths):
                module = modules[name]
                enter, leave = here.only(self._enter), here.only(self._leave)
                hooks.callback(module.register_forward_pre_hook(enter).remove)
                hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield

    def name(self, path: str) -> str:
        """The name of a path's next call."""
        if not self._depth:
            self._calls.clear()
        number = self._calls[path]
        self._calls[path] += 1
        return f"{path}#{number}" if number else path

    def _enter(self, *call: object) -> None:
        if not self._depth:
            self._calls.clear()
        self._depth += 1

    def _leave(self, *call: object) -> None:
        self._depth -= 1
