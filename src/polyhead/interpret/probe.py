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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from polyhead._utils.checks import check_int
from polyhead._utils.notebook import panel, table
from polyhead._utils.texts import Texts
from polyhead.errors import InputError
from polyhead.interpret import files, saved
from polyhead.interpret.kept import KeptCall, token_ids
from polyhead.interpret.kept_rows import KeptRecurrence, kept_of
from polyhead.interpret.view import AttentionView
from polyhead.layers.hooks import Hooked
from polyhead.layers.record import AttentionHook, RecurrenceHook
from polyhead.layers.recurrent import RecurrentLayer
from polyhead.layers.scope import Scope
from polyhead.layers.third_party import register_attention_hook
from polyhead.models import Transformer
from polyhead.models.naming import (
    Repeats,
    attention_modules,
    is_cross,
    is_encoder,
    name_of,
    numbered_layers,
)
from polyhead.semantics import Documents
from polyhead.semantics.recurrence_call import RecurrenceCall

if TYPE_CHECKING:
    from polyhead.layers.record import AttentionRecord

Heads = Sequence[int] | Mapping[int, Sequence[int]]

_SHOWN = ("entropy", "first_token", "previous_token")
"""Statistics in a notebook's table."""


class Probe:
    """The views of a model's attention layers, each of its latest call.

    Self-attention layers are counted from 0 in the order in which the model holds them (a
    Transformer's own layers first, then its encoder's); any attention, cross-attention too, goes
    by its module's path. ``encoder``, ``decoder`` and ``cross`` list those of an encoder-decoder. A
    module that one run calls several times (ALBERT's layers are one) is counted as often: ``path``,
    ``path#1``, ….
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = tuple(modules)
        self._views: dict[str, AttentionView] = {}

    @property
    def _numbered(self) -> list[str]:
        return numbered_layers(self.modules)

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have run."""
        return tuple(i for i, name in enumerate(self._numbered) if name in self._views)

    @property
    def encoder(self) -> tuple[AttentionView, ...]:
        """The views of an encoder-decoder's encoder."""
        return self._of(lambda name: is_encoder(name) and not is_cross(name))

    @property
    def decoder(self) -> tuple[AttentionView, ...]:
        """The views of self-attention in an encoder-decoder's decoder."""
        return self._of(lambda name: not is_encoder(name) and not is_cross(name))

    @property
    def cross(self) -> tuple[AttentionView, ...]:
        """The views of an encoder-decoder's cross-attention."""
        return self._of(is_cross)

    def _of(self, belongs: Callable[[str], bool]) -> tuple[AttentionView, ...]:
        return tuple(
            self._views[name] for name in self.modules if name in self._views and belongs(name)
        )

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
        """The number of a module, or its path where it has none; a new name is listed."""
        if name not in self.modules:
            self.modules = (*self.modules, name)
        return name if is_cross(name) else self._numbered.index(name)

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
        modules, views = saved.read(path)
        seen = cls(modules)
        for name, state in views.items():
            seen.keep(name, AttentionView.from_state(seen.number(name), state))
        return seen

    def _repr_html_(self) -> str:
        """What a notebook shows: a line for each attention, with the means of its heads."""
        rows = []
        for layer, view in zip(self.layers, self, strict=True):
            try:
                about = view.summary()
            except InputError:  # only other statistics were kept
                means = ["–"] * len(_SHOWN)
            else:
                means = [f"{float(about.means[name].nanmean()):.3f}" for name in _SHOWN]
            rows.append([layer, len(view.heads), view.lse.shape[-1], *means])
        said = Texts("en", "statistics")
        columns = ["layer", "heads", "queries", *(said(f"stat.{name}") for name in _SHOWN)]
        return panel(repr(self), table(columns, rows))

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
    requires_grad: bool = False,
) -> Iterator[Probe]:
    """Watches the attention of ``model`` while the ``with`` block runs.

    It sees the calls of the thread or task that opened it (and of tasks that this one starts);
    other threads use the model as if there were no probe.

    Args:
        model: A polyhead attention layer, or anything that holds some, or a transformers model with
            ``attn_implementation="polyhead"``. Queries and keys of latent attention are those of
            the computation that ran: absorbed ones lie in the latent.
        layers: The layers to watch, counted from 0 or by their module's path; None: all.
        heads: The query heads to keep, the same for every layer or per layer; None: all.
        statistics: Measured as the layers run (names as in ``interpret/statistics.py``), and
            queries and keys let go; None: queries and keys are kept, and any statistic and any
            weight is there when it is asked for.
        ids: ``[1 or B, n]`` the tokens of the whole sequence, for the statistics that compare
            tokens. A ``Transformer``, or a transformers model that is given ``input_ids``, tells
            them itself unless a cache holds some.
        documents: Lengths of documents in the text, for ``document_mass``; default: those of a
            ``Documents`` mask in the call.
        top_k: Weights per row of ``top_weights`` and ``top_keys``.
        requires_grad: Whether the graph of each call is kept with it, for
            ``rows(requires_grad=True)``; it stays in memory as long as the probe.

    Yields:
        The probe; it can be read inside the block and after it.

    Raises:
        InputError: The model has no attention layers, or not the layer or head that is asked for.
        ValueError: A ``top_k`` below 1.
    """
    check_int("top_k", top_k, least=1)
    modules = attention_modules(model)
    names = list(modules)
    if not names:
        raise InputError(f"{type(model).__name__} has no polyhead attention to watch")
    wanted, chosen = _wanted(modules, layers)
    seen = Probe(names)
    packed = None if documents is None else Documents(documents)
    read = _IdsRead(ids)
    repeats = Repeats()

    def watch(path: str, record: AttentionRecord) -> None:
        graph = None if record.normalizer is not None else (record.q, record.k)
        keep(path, kept_of(record), graph)

    def watch_state(path: str, module: nn.Module, call: RecurrenceCall) -> None:
        keep(path, KeptRecurrence.of_state(call), None)

    def keep(path: str, call: KeptCall, graph: tuple[Tensor, Tensor] | None) -> None:
        name = repeats.name(path)
        number = seen.number(name)
        if chosen is not None and not chosen & {number, name}:
            return
        tokens = read.of(name)
        if tokens is not None and not is_cross(name):
            tokens = tokens.to(call.q.device)
            if ids is not None or tokens.shape[1] == call.k_tokens.length == call.q_tokens.length:
                call = replace(call, ids=token_ids(tokens, call))
        if packed is not None:
            call = replace(call, documents=packed)
        kept = _heads_of(heads, number, call.q.shape[1])
        view = AttentionView(number, call, kept, statistics=statistics, top_k=top_k)
        if requires_grad and graph is not None:
            view.keep_graph(*graph)
        seen.keep(name, view)

    with ExitStack() as hooks:
        hooks.enter_context(repeats.watching(model, names))
        if ids is None:
            hooks.enter_context(read.watching(model))
        for name in wanted:
            hook: AttentionHook = partial(watch, name)
            if isinstance(module := modules[name], RecurrentLayer):
                hook = RecurrenceHook(partial(watch_state, name))
                if layers is None and not module.reads_by_heads:
                    continue
            hooks.enter_context(register_attention_hook(module, hook))
        yield seen


def _wanted(
    modules: Mapping[str, nn.Module], layers: Sequence[int | str] | None
) -> tuple[Sequence[str], set[int | str] | None]:
    """The modules to watch, and which of their calls to keep (None: all)."""
    names = list(modules)
    if layers is None:
        return names, None
    shared = [name for name, module in modules.items() if not isinstance(module, Hooked)]
    if shared and any(layer not in range(len(names)) for layer in layers):
        # A foreign module that runs more than once has numbers that only its calls will tell.
        return names, set(layers)
    return [name_of(names, layer) for layer in layers], None


class _IdsRead:
    """The tokens that a model is reading, decoder and encoder apart."""

    def __init__(self, given: Tensor | None) -> None:
        self._own = self._encoder = None if given is None else given.reshape(-1, given.shape[-1])

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """While the block runs, each Transformer in a model (or else the model) tells its ids."""
        own: list[nn.Module] = [part for part in model.modules() if isinstance(part, Transformer)]
        here = Scope()
        begin, end = here.only(self._begin if own else self._begin_foreign), here.only(self._end)
        with ExitStack() as hooks:
            hooks.callback(here.close)
            for module in own or [model]:
                hooks.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(end, always_call=True).remove)
            yield

    def of(self, name: str) -> Tensor | None:
        """The tokens that an attention sees, if they are known."""
        return self._encoder if is_encoder(name) else self._own

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._own = args[0] if args else kwargs.get("ids")
        self._encoder = kwargs.get("encoder_ids")

    def _begin_foreign(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        given = args[0] if args else kwargs.get("input_ids")
        if isinstance(given, Tensor) and given.ndim == 2 and not given.is_floating_point():
            self._own = self._encoder = given
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            self._own = kwargs.get("decoder_input_ids")

    def _end(self, *call: object) -> None:
        self._own = self._encoder = None


def _heads_of(heads: Heads | None, layer: int | str, count: int) -> Sequence[int] | None:
    chosen = heads.get(layer) if isinstance(heads, Mapping) else heads  # type: ignore[arg-type]
    for head in chosen or ():
        if not 0 <= head < count:
            raise InputError(f"heads must be from 0 to {count - 1}: got {head}")
    return chosen
