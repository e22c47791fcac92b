"""Calls that ranks make differently: rank 1 makes another call than the others.

Each function of ``ODD`` takes whether this rank is the odd one. Whatever the odd rank does, every
rank must raise within seconds, and the next call of all must work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cases_of_attention import mesh_of
from cases_of_layers import _made as made_layer
from cases_of_models import E, W, batch, made

import polyhead as ph
from polyhead import parallel

_MADE: dict[tuple[str, str, str], Any] = {}


def _model(dimension: str, family: str = "Llama", use: str = "") -> ph.Transformer:
    key = dimension, family, use
    if key not in _MADE:
        model = made(family, torch.float64)
        _MADE[key] = parallel.parallelize(model, mesh_of(dimension), training=False)
    model = _MADE[key].train()
    model.requires_grad_(True)
    return model


def _layer(dimension: str, name: str, use: str = "") -> Any:
    if (dimension, name, use) not in _MADE:
        _MADE[dimension, name, use] = parallel.parallelize(made_layer(name), mesh_of(dimension))
    return _MADE[dimension, name, use]


def _ids(dimension: str, tokens: int = 12) -> torch.Tensor:
    ids = torch.arange(2 * tokens).view(2, tokens) % W
    return parallel.shard(ids, mesh_of(dimension)) if dimension == "context" else ids


def _x(dimension: str, tokens: int = 12, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.linspace(-1, 1, 2 * tokens * E, dtype=dtype).view(2, tokens, E)
    return parallel.shard(x, mesh_of(dimension)) if dimension == "context" else x


def _called(dimension: str, odd: bool, **of_the_odd: Any) -> None:
    """A model's call with other arguments on the odd rank."""
    _model(dimension)(_ids(dimension), **(of_the_odd if odd else {}))


def _hooked(dimension: str, odd: bool) -> None:
    """A model with a hook of its own from before, which raises where it meets the odd argument."""
    key = dimension, "Llama", "hooked"
    if key not in _MADE:
        model = made("Llama", torch.float64)
        model.register_forward_pre_hook(_only_ids, with_kwargs=True)
        _MADE[key] = parallel.parallelize(model, mesh_of(dimension), training=False)
    _MADE[key](_ids(dimension), **({"masks": None} if odd else {}))


def _only_ids(module: torch.nn.Module, ids: object, more: dict[str, Any]) -> None:
    if more:
        raise RuntimeError("the hook takes ids alone")


def _without_gradients(dimension: str, odd: bool) -> None:
    with torch.set_grad_enabled(not odd):
        out = _model(dimension)(_ids(dimension))
    if not odd:
        out.sum().backward()


def _one_backward(dimension: str, odd: bool) -> None:
    model = _model(dimension)
    out = model(_ids(dimension))
    if odd:
        model(_ids(dimension))
    else:
        out.sum().backward()


def _frozen(dimension: str, odd: bool) -> None:
    model = _model(dimension)
    model.layers[0].requires_grad_(not odd)
    model(_ids(dimension)).sum().backward()


def _mode(dimension: str, odd: bool) -> None:
    _model(dimension).train(not odd)(_ids(dimension))


def _autocast(dimension: str, odd: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=odd):
        _model(dimension, use="float32").float()(_ids(dimension))


def _dtype(dimension: str, odd: bool) -> None:
    model = _model(dimension, use="half" if odd else "whole")
    (model.bfloat16() if odd else model)(_ids(dimension))


def _cache(dimension: str, odd: bool) -> None:
    model = _model(dimension)
    with torch.inference_mode():
        model(_ids("tensor"), cache=None if odd else model.new_cache())


def _another_cache(dimension: str, odd: bool) -> None:
    model = _model(dimension)
    with torch.inference_mode():
        cache = model.new_cache(kind="paged" if odd and dimension == "tensor" else "dense")
        model(_ids("tensor"), cache=cache)
        fork = cache.fork()
        model(torch.full((2, 1), 3), cache=cache)
        model(torch.full((2, 1), 4), cache=fork)
        model(torch.full((2, 1), 5), cache=fork if odd else cache)


def _chunks(dimension: str, odd: bool) -> None:
    model = _model(dimension)
    with torch.inference_mode():
        cache = model.new_cache()
        for part in _ids("tensor").split(4 if odd else 6, dim=1):
            model(part, cache=cache)


def _changed(dimension: str, odd: bool, method: str, argument: Any, other: Any) -> None:
    model = _model(dimension)
    with torch.inference_mode():
        cache = model.new_cache()
        model(_ids("tensor"), cache=cache)
        getattr(cache, method)(other if odd else argument)
        model(torch.full((2, 1), 3), cache=cache)


def _not_spread(dimension: str, odd: bool) -> None:
    model = _model(dimension)
    with torch.inference_mode():
        own = ph.ModelCache.for_config(model.config)
        model(_ids("tensor"), cache=own if odd else model.new_cache())


def _encoded(dimension: str, odd: bool) -> None:
    model = _model(dimension, "T5")
    source = batch("T5")[2]["encoder_ids"]
    hidden = model.encode(_cut(dimension, source))
    if odd:
        hidden = hidden[:, 1:]
    model(_ids(dimension), encoder_hidden=hidden)


def _cut(dimension: str, x: torch.Tensor) -> torch.Tensor:
    return parallel.shard(x, mesh_of(dimension)) if dimension == "context" else x


def _encoder(dimension: str, odd: bool) -> None:
    model = _model(dimension, "T5")
    source = _cut(dimension, batch("T5")[2]["encoder_ids"])
    if odd:
        model.encode(source)
    model(_ids(dimension), encoder_ids=source)


def _hidden(dimension: str, odd: bool) -> None:
    model = _model(dimension)
    (model.hidden_states if odd else model)(_ids(dimension))
    model(_ids(dimension)).sum().backward()


def _other_kind(dimension: str, odd: bool) -> None:
    if odd:
        x = _x(dimension)
        parallel.cross_entropy(x, x[..., 0].long() * 0, mesh_of(dimension))
    else:
        _model(dimension)(_ids(dimension))


def _attention_or_model(dimension: str, odd: bool) -> None:
    x = torch.zeros(1, 2, 6, 8)
    if odd:
        parallel.attention(x, x, x, mesh_of(dimension))
    else:
        _model(dimension)(_ids(dimension))


def _of_layer(dimension: str, odd: bool, **of_the_odd: Any) -> None:
    _layer(dimension, "attention with ALiBi")(_x(dimension), **(of_the_odd if odd else {}))


def _other_layer(dimension: str, odd: bool) -> None:
    name = "attention with ALiBi"
    first, second = (_layer(dimension, name, use) for use in ("first", "second"))
    (second if odd else first)(_x(dimension))


def _layer_or_model(dimension: str, odd: bool) -> None:
    if odd:
        _layer(dimension, "attention with ALiBi")(_x(dimension))
    else:
        _model(dimension)(_ids(dimension))


def _layer_dtype(dimension: str, odd: bool) -> None:
    dtype = torch.float32 if odd else torch.float64
    _layer(dimension, "a network")(_x(dimension, dtype=dtype))


def _layer_gradient(dimension: str, odd: bool) -> None:
    x = _x(dimension).requires_grad_(not odd)
    _layer(dimension, "attention with ALiBi")(x).sum().backward()


def _attended(_: str, odd: bool, **of_the_odd: Any) -> None:
    """``parallel.attention`` with other arguments on the odd rank."""
    x = torch.linspace(-1, 1, 2 * 4 * 6 * 8).view(2, 4, 6, 8)
    parallel.attention(x, x, x, mesh_of("context"), **(of_the_odd if odd else {}))


def _attended_gradient(_: str, odd: bool) -> None:
    x = torch.linspace(-1, 1, 2 * 4 * 6 * 8).view(2, 4, 6, 8)
    parallel.attention(x.clone().requires_grad_(not odd), x, x, mesh_of("context")).sum().backward()


def _keep(dimension: str, odd: bool) -> None:
    keep = torch.ones(12, 12, dtype=torch.bool)
    keep[3, 3] = odd
    _model(dimension)(_ids(dimension), mask=ph.Keep(keep))


def _gathered(_: str, odd: bool, **of_the_odd: Any) -> None:
    parallel.gather(_x("context"), mesh_of("context"), **(of_the_odd if odd else {}))


def _labels(dimension: str, odd: bool) -> None:
    logits = torch.zeros(2, 6, W)
    labels = torch.full((2, 6), W if odd else 3)
    parallel.cross_entropy(logits, labels, mesh_of(dimension))


def _clipped(dimension: str, odd: bool) -> None:
    model = _model(dimension)
    model(_ids(dimension)).sum().backward()
    parallel.clip_grad_norm(model, -1.0 if odd else 1.0)


def _clipped_or_model(dimension: str, odd: bool) -> None:
    model = _model(dimension)
    model(_ids(dimension)).sum().backward()
    if odd:
        model(_ids(dimension))
    else:
        parallel.clip_grad_norm(model, 1.0)


def _whole_or_model(dimension: str, odd: bool) -> None:
    model = _model(dimension)
    if odd:
        parallel.whole_state(model)
    else:
        model(_ids(dimension))


def _parallelized(dimension: str, odd: bool, **of_the_odd: Any) -> None:
    model = made("Llama", torch.float64)
    parallel.parallelize(model, mesh_of(dimension), **(of_the_odd if odd else {}))


Odd = Callable[[str, bool], None]
BOTH = "tensor", "context"
ODD: dict[str, tuple[tuple[str, ...], Odd]] = {
    "fewer tokens": (BOTH, lambda d, odd: void(_model(d)(_ids(d, 8 if odd else 12)))),
    "fewer rows": (BOTH, lambda d, odd: void(_model(d)(_ids(d)[int(odd) :]))),
    "ids of another dtype": (
        BOTH, lambda d, odd: void(_model(d)(_ids(d).int() if odd else _ids(d)))
    ),
    "ids that are no tensor": (
        BOTH, lambda d, odd: void(_model(d)([[1, 2]] if odd else _ids(d)))  # type: ignore[arg-type]
    ),
    "an id outside": (BOTH, lambda d, odd: void(_model(d)(_ids(d) + 99 * odd))),
    "no argument": (BOTH, lambda d, odd: void(_model(d)(*([] if odd else [_ids(d)])))),
    "an unknown argument": (BOTH, lambda d, odd: _called(d, odd, masks=None)),
    "an unknown argument beside a hook": (BOTH, _hooked),
    "one argument too many": (
        BOTH, lambda d, odd: void(_model(d)(_ids(d), *([None] if odd else [])))
    ),
    "another mask": (BOTH, lambda d, odd: _called(d, odd, mask=ph.Window(3))),
    "a mask of other content": (BOTH, _keep),
    "a mask that is a tensor": (BOTH, lambda d, odd: _called(d, odd, mask=torch.ones(12, 12))),
    "another kernel": (BOTH, lambda d, odd: _called(d, odd, kernel="reference")),
    "an unknown kernel": (BOTH, lambda d, odd: _called(d, odd, kernel="fast")),
    "positions": (BOTH, lambda d, odd: _called(d, odd, positions=torch.arange(6))),
    "positions that are a list": (BOTH, lambda d, odd: _called(d, odd, positions=[0, 1, 2])),
    "positions by row": (
        ("context",),
        lambda d, odd: _model(d)(_ids(d), positions=torch.arange(6).view((1, 6)[int(odd) :])),
    ),
    "segments": (BOTH, lambda d, odd: _called(d, odd, segments=torch.zeros(2, 12).long())),
    "last": (BOTH, lambda d, odd: _called(d, odd, last=1)),
    "no gradients": (BOTH, _without_gradients),
    "a backward pass beside a call": (BOTH, _one_backward),
    "frozen weights": (BOTH, _frozen),
    "training": (BOTH, _mode),
    "autocast": (BOTH, _autocast),
    "weights of another dtype": (BOTH, _dtype),
    "no cache": (BOTH, _cache),
    "a cache that is none": (BOTH, lambda d, odd: _called(d, odd, cache=[1])),
    "a cache that was not spread": (("context",), _not_spread),
    "another fork": (BOTH, _another_cache),
    "other chunks": (BOTH, _chunks),
    "another rollback": (BOTH, lambda d, odd: _changed(d, odd, "rollback", 1, 2)),
    "too long a rollback": (BOTH, lambda d, odd: _changed(d, odd, "rollback", 1, 99)),
    "a rollback of a word": (BOTH, lambda d, odd: _changed(d, odd, "rollback", 1, "all")),
    "other rows": (("context",), lambda d, odd: _changed(d, odd, "reorder", [0, 1], [1, 0])),
    "rows that are not there": (
        BOTH, lambda d, odd: _changed(d, odd, "reorder", [0, 1], [0, 7])
    ),
    "another crop": (BOTH, lambda d, odd: _changed(d, odd, "crop", 5, 4)),
    "another encoder's output": (BOTH, _encoded),
    "one encoder call more": (BOTH, _encoder),
    "hidden states": (("tensor",), _hidden),
    "a loss beside a call": (BOTH, _other_kind),
    "an attention beside a call": (("context",), _attention_or_model),
    "another layer": (BOTH, _other_layer),
    "a layer beside a model": (BOTH, _layer_or_model),
    "a layer's input of another dtype": (BOTH, _layer_dtype),
    "a layer's input with a gradient": (BOTH, _layer_gradient),
    "a layer's mask": (BOTH, lambda d, odd: _of_layer(d, odd, mask=ph.Causal())),
    "a layer's unknown argument": (BOTH, lambda d, odd: _of_layer(d, odd, masks=1)),
    "a layer's context": (BOTH, lambda d, odd: _of_layer(d, odd, context=_x("tensor"))),
    "a layer's bias": (BOTH, lambda d, odd: _of_layer(d, odd, bias=torch.zeros(4, 1, 12))),
    "an attention's exchange": (("context",), lambda d, odd: _attended(d, odd, exchange="gather")),
    "an unknown exchange": (("context",), lambda d, odd: _attended(d, odd, exchange="rings")),
    "an unknown order": (("context",), lambda d, odd: _attended(d, odd, order="random")),
    "lse": (("context",), lambda d, odd: _attended(d, odd, return_lse=True)),
    "lse that is a word": (("context",), lambda d, odd: _attended(d, odd, return_lse="yes")),
    "dropout": (("context",), lambda d, odd: _attended(d, odd, dropout_p=0.2)),
    "sinks": (("context",), lambda d, odd: _attended(d, odd, sinks=torch.zeros(4))),
    "sinks that are a list": (("context",), lambda d, odd: _attended(d, odd, sinks=[0.0])),
    "a bias of another shape": (
        ("context",), lambda d, odd: _attended(d, odd, bias=torch.zeros(4, 1, 5))
    ),
    "an attention's gradients": (("context",), _attended_gradient),
    "key positions alone": (
        ("context",), lambda d, odd: _attended(d, odd, kv_positions=torch.arange(6))
    ),
    "a gathering of another dimension": (("context",), lambda d, odd: _gathered(d, odd, dim=2)),
    "a gathering of no dimension": (("context",), lambda d, odd: _gathered(d, odd, dim=7)),
    "a gathering in no order": (("context",), lambda d, odd: _gathered(d, odd, order="any")),
    "a label outside": (BOTH, _labels),
    "another norm": (BOTH, _clipped),
    "a norm beside a call": (BOTH, _clipped_or_model),
    "whole weights beside a call": (("tensor",), _whole_or_model),
    "an unknown option": (BOTH, lambda d, odd: _parallelized(d, odd, reshard_after_forward=True)),
}  # fmt: skip


def void(_: object) -> None:
    """Nothing."""


def prepared(dimension: str, all_of_them: bool) -> None:
    """Makes models and layers, on all ranks in one order."""
    for use in ("", "works", *(("half", "whole", "float32") if all_of_them else ())):
        _model(dimension, use=use)
    for use in ("", "first", "second"):
        _layer(dimension, "attention with ALiBi", use)
    if all_of_them:
        _model(dimension, "T5")
        _layer(dimension, "a network")


def refused(name: str, dimension: str) -> str:
    """What a rank raises; raises itself where the call is not refused, or not soon."""
    began = time.monotonic()
    try:
        ODD[name][1](dimension, dist.get_rank() == 1)
    except Exception as error:
        took = time.monotonic() - began
        if took > 10:
            raise AssertionError(f"{name} on {dimension} took {took:.0f} s") from error
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{name} on {dimension} is not refused on rank {dist.get_rank()}")


def works(dimension: str) -> None:
    """The next call of all ranks works."""
    _model(dimension, use="works")(_ids(dimension)).sum().backward()
