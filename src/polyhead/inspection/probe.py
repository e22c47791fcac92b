"""What every head looks at, with the fast kernels still running.

    with ph.probe(model) as seen:
        model(ids)
    seen[3].entropy                                 # [B, H, T]
    seen[3].rows(heads=[1], queries=slice(0, 64))   # exact weights [B, 1, 64, S]

A probe keeps the queries, the keys and the log-sum-exp of each layer's latest call, never the
weights; or, where it is told which statistics are wanted, only those. The outputs of the model are
bit-identical with and without a probe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from polyhead.errors import InputError
from polyhead.inspection import files
from polyhead.inspection.kept import KeptCall, token_ids
from polyhead.inspection.view import AttentionView
from polyhead.layers.hooks import Hooked
from polyhead.models import Transformer
from polyhead.semantics import Documents

if TYPE_CHECKING:
    from polyhead.layers.record import AttentionRecord

Heads = Sequence[int] | Mapping[int, Sequence[int]]


class Probe:
    """The views of a model's attention layers, each of its latest call.

    Self-attention layers are counted from 0 in the order in which the model holds them (a
    Transformer's own layers first, then its encoder's); any attention, cross-attention too, goes
    by its module's path.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = tuple(modules)
        self._numbered = numbered_layers(modules)
        self._views: dict[str, AttentionView] = {}

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have run."""
        return tuple(i for i, name in enumerate(self._numbered) if name in self._views)

    @property
    def nbytes(self) -> int:
        """Bytes that all views keep."""
        return sum(view.nbytes for view in self._views.values())

    def __getitem__(self, layer: int | str) -> AttentionView:
        name = name_of(self.modules, layer)
        if name not in self._views:
            have = ", ".join(map(str, self.layers)) or "none"
            raise LookupError(
                f"nothing was seen of layer {layer!r}: layers seen are {have}; run the model "
                f"inside `with probe(model) as seen:`"
            )
        return self._views[name]

    def __iter__(self) -> Iterator[AttentionView]:
        return (self[layer] for layer in self.layers)

    def __len__(self) -> int:
        return len(self._views)

    def keep(self, name: str, view: AttentionView) -> None:
        """Puts the view of a module's latest call in the place of the one before."""
        self._views[name] = view

    def number(self, name: str) -> int | str:
        """The number of a module, or its path where it has none."""
        return self._numbered.index(name) if name in self._numbered else name

    def save(self, path: str | PathLike[str]) -> None:
        """Writes all views to one safetensors file, which ``Probe.load`` reads.

        Raises:
            UnsupportedError: A mask or bias of a class that is not polyhead's.
            OSError: The file cannot be written.
        """
        views = {name: view.state() for name, view in self._views.items()}
        files.write(path, {"modules": list(self.modules), "views": views})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """The probe that ``save`` wrote; it needs no model.

        Raises:
            CheckpointError: Not such a file, or a damaged one.
        """
        content = files.read(path)
        seen = cls(content["modules"])
        for name, state in content["views"].items():
            seen.keep(name, AttentionView.from_state(seen.number(name), state))
        return seen

    def __repr__(self) -> str:
        return f"Probe({len(self)} of {len(self.modules)} attentions seen, {self.nbytes:,} bytes)"


@contextmanager
def probe(
    model: nn.Module,
    layers: Sequence[int | str] | None = None,
    heads: Heads | None = None,
    statistics: Collection[str] | None = None,
    *,
    ids: Tensor | None = None,
    documents: Sequence[int] | None = None,
    top_k: int = 8,
) -> Iterator[Probe]:
    """Watches the attention of ``model`` while the ``with`` block runs.

    Args:
        model: A polyhead attention layer, or anything that holds some. Queries and keys of latent
            attention are those of the computation that ran: absorbed ones lie in the latent.
        layers: The layers to watch, counted from 0 or by their module's path; None: all.
        heads: The query heads to keep, the same for every layer or per layer; None: all.
        statistics: Measured as the layers run (names as in ``inspection/statistics.py``), and
            queries and keys let go; None: queries and keys are kept, and any statistic and any
            weight is there when it is asked for.
        ids: ``[1 or B, n]`` the tokens of the whole sequence, for the statistics that compare
            tokens. A ``Transformer`` called without a cache tells them itself.
        documents: Lengths of documents in the text, for ``document_mass``; default: those of a
            ``Documents`` mask in the call.
        top_k: Weights per row of ``top_weights`` and ``top_keys``.

    Yields:
        The probe; it can be read inside the block and after it.

    Raises:
        InputError: The model has no attention layers, or not the layer or head that is asked for.
    """
    modules = attention_modules(model)
    names = list(modules)
    if not names:
        raise InputError(f"{type(model).__name__} has no polyhead attention to watch")
    wanted = names if layers is None else [name_of(names, layer) for layer in layers]
    seen = Probe(names)
    packed = None if documents is None else Documents(documents)
    read = _IdsRead(ids)

    def watch(name: str, record: AttentionRecord) -> None:
        call = KeptCall.of(record)
        tokens = read.of(name)
        if tokens is not None and not name.endswith("cross_attention"):
            tokens = tokens.to(call.q.device)
            if ids is not None or tokens.shape[1] == call.k_tokens.length == call.q_tokens.length:
                call = replace(call, ids=token_ids(tokens, call))
        if packed is not None:
            call = replace(call, documents=packed)
        number = seen.number(name)
        chosen = _heads_of(heads, number, call.q.shape[1])
        seen.keep(name, AttentionView(number, call, chosen, statistics=statistics, top_k=top_k))

    with ExitStack() as hooks:
        for module in model.modules():
            if ids is None and isinstance(module, Transformer):
                before = module.register_forward_pre_hook(read.begin, with_kwargs=True)
                hooks.callback(before.remove)
                hooks.callback(module.register_forward_hook(read.end, always_call=True).remove)
        for name in wanted:
            hooks.enter_context(modules[name].register_attention_hook(partial(watch, name)))
        yield seen


class _IdsRead:
    """The tokens that a Transformer is reading, decoder and encoder apart."""

    def __init__(self, given: Tensor | None) -> None:
        self._own = None if given is None else given.reshape(-1, given.shape[-1])
        self._encoder: Tensor | None = None

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._own = args[0] if args else kwargs.get("ids")
        self._encoder = kwargs.get("encoder_ids")

    def end(self, *call: object) -> None:
        self._own = self._encoder = None

    def of(self, name: str) -> Tensor | None:
        return self._encoder if "encoder_layers." in name else self._own


def attention_modules(model: nn.Module) -> dict[str, Hooked]:
    """Every attention of a model by its module's path, in the order of the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Hooked)}


def numbered_layers(paths: Iterable[str]) -> list[str]:
    """The paths that a layer number means: all but cross-attention."""
    return [path for path in paths if not path.endswith("cross_attention")]


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


def _heads_of(heads: Heads | None, layer: int | str, count: int) -> Sequence[int] | None:
    chosen = heads.get(layer) if isinstance(heads, Mapping) else heads  # type: ignore[arg-type]
    for head in chosen or ():
        if not 0 <= head < count:
            raise InputError(f"heads must be from 0 to {count - 1}: got {head}")
    return chosen
