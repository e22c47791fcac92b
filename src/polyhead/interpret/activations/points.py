"""The names of a model's activations, and where each of them is in its modules.

    layers[i]        resid_pre → attention → resid_mid → mlp → resid_post
    .attention       input → q, k, v → scores → weights → heads → out
    .mlp             input → gate, up → hidden → out

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head size, V value size,
E embed size, F hidden size, W vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from polyhead.errors import InputError, UnsupportedError
from polyhead.interpret.activations.pattern import Pattern
from polyhead.interpret.activations.wrapping import wrapped
from polyhead.layers import TransformerLayer
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.hooks import Hooked
from polyhead.layers.recurrent import RecurrentLayer
from polyhead.models import Transformer
from polyhead.semantics import DenseSource, KeyValueSource

if TYPE_CHECKING:
    from polyhead.interpret.activations.point import Install, Point
    from polyhead.interpret.activations.tracing import Trace

_OF_CALLS = ("q", "k", "v", "scores", "weights")


class Points:
    """Activations of one part of a model, as attributes.

    Args:
        trace: Whose they are.
        path: Name of the part, ``layers.5.mlp``.
        what: What the part is, for errors.
        sites: By name how each is reached, or the activations of a part of it, in the order of the
            computation.
    """

    def __init__(
        self, trace: Trace, path: str, what: str, sites: Mapping[str, Install | Points]
    ) -> None:
        self._trace, self._path, self._what, self._sites = trace, path, what, sites

    def names(self) -> Iterator[str]:
        """The names of all its activations."""
        for name, site in self._sites.items():
            if isinstance(site, Points):
                yield from site.names()
            else:
                yield self._named(name)

    def _named(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        site = self._sites.get(name)
        if site is None:
            raise AttributeError(
                f"{self._path or 'the model'} has no {name!r}: {self._what} has "
                f"{', '.join(self._sites) or 'nothing'}"
            )
        return site if isinstance(site, Points) else self._trace.point(self._named(name), site)

    def __dir__(self) -> list[str]:
        return [*self._sites, "names"]

    def __repr__(self) -> str:
        return f"Points({self._path or 'model'}: {', '.join(self._sites)})"


class Layers(Sequence[Points]):
    """The layers of a stack, by number."""

    def __init__(self, trace: Trace, layers: nn.ModuleList, path: str) -> None:
        self._trace, self._layers, self._path = trace, layers, path

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Points]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        count = len(self._layers)
        if isinstance(index, slice):
            return [self[i] for i in range(count)[index]]
        if not -count <= index < count:
            raise InputError(f"layers are counted from 0 to {count - 1}: got {index!r}")
        layer = cast(TransformerLayer, self._layers[index])
        return _layer_points(self._trace, layer, f"{self._path}.{index % count}")


class Encoder(Points):
    """The encoder of an encoder-decoder.

    Attributes:
        layers: Its layers.
    """

    layers: Layers


def layers_of(trace: Trace, model: Transformer) -> Layers:
    """A model's own layers."""
    return Layers(trace, model.layers, "layers")


def encoder_of(trace: Trace, model: Transformer) -> Encoder:
    """The encoder of an encoder-decoder.

    Raises:
        AttributeError: It is none.
    """
    if not len(model.encoder_layers):
        raise AttributeError("encoder")  # Trace.__getattr__ says what there is
    norm = model.encoder_final_norm
    sites: dict[str, Install | Points] = {} if norm is None else {"final": _output(norm)}
    found = Encoder(trace, "encoder", "this encoder", sites)
    found.layers = Layers(trace, model.encoder_layers, "encoder.layers")
    return found


def model_points(trace: Trace, model: Transformer) -> Points:
    """``final`` ``[B, T, E]``, what logits are made from, and ``logits`` ``[B, T, W]``."""
    sites: dict[str, Install | Points] = {}
    if model.final_norm is not None:
        sites["final"] = _output(model.final_norm)
    if model.head is not None:
        sites["logits"] = _result(model, "logits")
    return Points(trace, "", f"this model of kind {model.config.kind!r}", sites)


def all_points(trace: Trace, model: Transformer) -> Iterator[Points]:
    """Every part of a model that has activations, in the order of the computation."""
    if len(model.encoder_layers):
        encoder = encoder_of(trace, model)
        yield from encoder.layers
        yield encoder
    yield from layers_of(trace, model)
    yield model_points(trace, model)


def _layer_points(trace: Trace, layer: TransformerLayer, path: str) -> Points:
    """``resid_pre``, ``resid_mid`` and ``resid_post``, all ``[B, T, E]``, and its parts.

    ``resid_mid`` is what stands on the residual path between attention and network; a layer with
    cross-attention has ``resid_cross`` before that. A parallel layer has neither.
    """
    config = layer.config
    parallel = config.parallel is not None
    sites: dict[str, Install | Points] = {"resid_pre": _input(layer)}
    sites["attention"] = _attention_points(trace, layer, "attention", f"{path}.attention")
    if config.cross_attention is not None:
        sites["resid_cross"] = _result(layer, "_joined", "attention")
        name = "cross_attention"
        sites[name] = _attention_points(trace, layer, name, f"{path}.{name}")
    if layer.feed_forward is not None:
        if not parallel:
            before = "attention" if config.cross_attention is None else "cross_attention"
            sites["resid_mid"] = _result(layer, "_joined", before)
        sites["mlp"] = _mlp_points(trace, layer, layer.feed_forward, f"{path}.mlp")
    sites["resid_post"] = _output(layer)
    what = "a parallel layer" if parallel else f"a layer of {type(layer.attention).__name__}"
    return Points(trace, path, what, sites)


def _out(layer: TransformerLayer, part: str, module: nn.Module) -> Install:
    """What a part adds to the residual stream, ``[B, T, E]``."""
    return _output(module) if layer.config.parallel else _result(layer, "_added", part)


def _attention_points(trace: Trace, layer: TransformerLayer, part: str, path: str) -> Points:
    """Of ``[B, T, E]``: ``input``, ``out``; ``q [B, H, T, D]``, ``k [B, G, S, D]``,
    ``v [B, G, S, V]``, ``scores`` and ``weights [B, H, T, S]``, ``heads [B, H, T, V]``.

    q and k are those that meet in the scores, behind norms and rotary; the outputs of projections
    ``[B, T, H · D]`` go by the projections' names.
    """
    module = cast(Hooked, layer._modules[part])
    sites: dict[str, Install | Points] = {"input": _input(module)}
    for name in ("q_proj", "k_proj", "v_proj"):
        if (leaf := module._modules.get(name)) is not None:
            sites[name] = _output(leaf, inside=module)
    if not isinstance(module, RecurrentLayer):
        sites |= {name: _of_call(module, path) for name in _OF_CALLS}
    sites["heads"] = _heads(module)
    sites["out"] = _out(layer, part, module)
    return Points(trace, path, type(module).__name__, sites)


def _mlp_points(trace: Trace, layer: TransformerLayer, module: nn.Module, path: str) -> Points:
    """``input`` and ``out`` ``[B, T, E]``; ``up``, of gated networks ``gate``, and ``hidden``
    ``[B, T, F]``: projections before the activation, and what the last projection reads."""
    sites: dict[str, Install | Points] = {"input": _input(module)}
    if isinstance(module, FeedForward):
        gate = module._modules["gate_proj"]
        if gate is not None:
            sites["gate"] = _output(gate, inside=module)
        sites["up"] = _output(module.up_proj, inside=module)
        sites["hidden"] = _input(module.down_proj, inside=module)
    sites["out"] = _out(layer, "feed_forward", module)
    return Points(trace, path, type(module).__name__, sites)


def _input(module: nn.Module, inside: nn.Module | None = None) -> Install:
    """What a module reads first; of a module that several share, within calls of ``inside``."""

    def install(trace: Trace, point: Point) -> None:
        here = _Inside(trace, inside)

        def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
            return (point.passed(given[0]), *given[1:]) if here.is_now else None

        trace.hooks.callback(module.register_forward_pre_hook(before).remove)

    return install


def _output(module: nn.Module, inside: nn.Module | None = None) -> Install:
    """What a module returns; of a module that several share, within calls of ``inside``."""

    def install(trace: Trace, point: Point) -> None:
        here = _Inside(trace, inside)

        def after(_: nn.Module, given: tuple[Any, ...], made: Tensor) -> Tensor | None:
            return point.passed(made) if here.is_now else None

        trace.hooks.callback(module.register_forward_hook(after).remove)

    return install


def _result(module: nn.Module, method: str, last: str | None = None) -> Install:
    """What a method returns; with ``last``, of calls whose last argument it is."""

    def install(trace: Trace, point: Point) -> None:
        def around(call: Any, *given: Any) -> Tensor:
            made: Tensor = call(*given)
            return point.passed(made) if last is None or given[-1] == last else made

        trace.hooks.enter_context(wrapped(module, method, trace.scope, around))

    return install


def _heads(module: Hooked) -> Install:
    def install(trace: Trace, point: Point) -> None:
        trace.hooks.enter_context(module.register_head_edit(point.passed))

    return install


def _of_call(module: Hooked, path: str) -> Install:
    """Queries, keys, values, scores or weights: one wrapper sees to all five."""

    def install(trace: Trace, point: Point) -> None:
        names = {name: trace.point(f"{path}.{name}", install) for name in _OF_CALLS}
        if any(each.is_asked for each in names.values()):
            return  # the wrapper is there already

        def around(call: Any, q: Tensor, source: KeyValueSource, **options: Any) -> Tensor:
            return _attend(names, module, call, q, source, options)

        trace.hooks.enter_context(wrapped(module, "_attend", trace.scope, around))

    return install


def _attend(
    points: Mapping[str, Point],
    module: Hooked,
    call: Any,
    q: Tensor,
    source: KeyValueSource,
    options: dict[str, Any],
) -> Tensor:
    """The heads' outputs of a call: by its kernel, unless its scores or weights are changed."""
    if module.is_split:
        raise UnsupportedError(
            "a trace needs all heads and tokens: this layer's are spread over processes"
        )
    q = points["q"].passed(q)
    if points["k"].is_asked or points["v"].is_asked:
        k, v = source.gather()
        new_k, new_v = points["k"].passed(k), points["v"].passed(v)
        if new_k is not k or new_v is not v:
            source = DenseSource.made_from(source, new_k, new_v)
    scores, weights = points["scores"], points["weights"]
    if scores.is_asked or weights.is_asked:
        pattern = Pattern(q, source, **options)
        if scores.edits or weights.edits:
            return pattern.out(weights.passed(pattern.weights(scores.passed(pattern.scores()))))
        kept = pattern.kept()
        scores.keep(kept.scores)
        weights.keep(kept.weights)
    out: Tensor = call(q, source, **options)
    return out


class _Inside:
    """Whether a trace's thread is inside a call of a module; without one, whether it is its own."""

    def __init__(self, trace: Trace, module: nn.Module | None) -> None:
        self._scope, self._module, self._depth = trace.scope, module, 0
        if module is not None:
            enter, leave = trace.scope.only(self._enter), trace.scope.only(self._leave)
            trace.hooks.callback(module.register_forward_pre_hook(enter).remove)
            trace.hooks.callback(module.register_forward_hook(leave, always_call=True).remove)

    @property
    def is_now(self) -> bool:
        return self._scope.is_here and (self._module is None or self._depth > 0)

    def _enter(self, *call: object) -> None:
        self._depth += 1

    def _leave(self, *call: object) -> None:
        self._depth -= 1
