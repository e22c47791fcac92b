"""TransformerLens's forms: ``run_with_cache`` and ``run_with_hooks``, with its names and shapes.

    logits, cache = run_with_cache(model, ids)
    cache["pattern", 5]                                    # or cache["blocks.5.attn.hook_pattern"]
    run_with_hooks(model, ids, fwd_hooks=[("blocks.5.attn.hook_z", hook)])   # hook(z, hook=…)

Nanda & Bloom 2022. Queries, keys, values and heads are ``[batch, position, head, size]`` there, as
they are here and nowhere else. What polyhead calls the same is in docs/migrating.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from polyhead.errors import InputError
from polyhead.interpret.activations.point import Point, Saved
from polyhead.interpret.activations.tracing import Trace, trace
from polyhead.layers.hooks import Hooked

_LAYER = {
    "hook_resid_pre": "resid_pre",
    "ln1.hook_normalized": "attention.input",
    "attn.hook_rot_q": "attention.q",
    "attn.hook_rot_k": "attention.k",
    "attn.hook_v": "attention.v",
    "attn.hook_attn_scores": "attention.scores",
    "attn.hook_pattern": "attention.weights",
    "attn.hook_z": "attention.heads",
    "hook_attn_out": "attention.out",
    "hook_resid_mid": "resid_mid",
    "ln2.hook_normalized": "mlp.input",
    "mlp.hook_post": "mlp.hidden",
    "hook_mlp_out": "mlp.out",
    "hook_resid_post": "resid_post",
}
"""Names below ``blocks.5.`` and below ``layers.5.``; some follow from the model (``_of_layer``)."""

_BY_HEAD = ("q", "k", "v", "heads")
"""Activations that are ``[B, heads, T, size]`` here and ``[B, T, heads, size]`` there."""

_SHORT = {"normalized1": "ln1.hook_normalized", "normalized2": "ln2.hook_normalized"}


class HookPoint(NamedTuple):
    """What a hook is given beside the activation.

    Attributes:
        name: ``blocks.5.attn.hook_z``.
    """

    name: str

    def layer(self) -> int:
        """The number of its layer.

        Raises:
            InputError: It is of no layer.
        """
        parts = self.name.split(".")
        if parts[0] != "blocks":
            raise InputError(f"{self.name} belongs to no layer")
        return int(parts[1])


class ActivationCache(Mapping[str, Tensor]):
    """Activations of one run by TransformerLens's names, made when they are asked for.

    ``cache["blocks.5.attn.hook_pattern"]``, or ``cache["pattern", 5]``; a negative layer counts
    from the last.
    """

    def __init__(self, saved: Mapping[str, tuple[Saved, _Site]], layers: int) -> None:
        self._saved, self._layers = saved, layers

    def __getitem__(self, name: str | tuple[str, int]) -> Tensor:
        if isinstance(name, tuple):
            name = self._long(*name)
        if name not in self._saved:
            raise KeyError(f"the cache has no {name!r}: it has {', '.join(self._saved)}")
        saved, site = self._saved[name]
        return site.theirs(saved.value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)

    def _long(self, short: str, layer: int) -> str:
        layer = layer % self._layers
        endings = (_SHORT.get(short, short), f"hook_{short}", f"attn.hook_{short}",
                   f"mlp.hook_{short}")  # fmt: skip
        names = [f"blocks.{layer}.{ending}" for ending in endings]
        return next((name for name in names if name in self._saved), names[0])


class _Site(NamedTuple):
    """An activation, and how its shape differs: heads, where they stand behind positions."""

    point: Point
    by_head: bool = False
    heads: int | None = None

    def theirs(self, x: Tensor) -> Tensor:
        if self.heads is not None:
            return x.reshape(*x.shape[:-1], self.heads, -1)
        return x.transpose(1, 2) if self.by_head else x

    def ours(self, x: Tensor) -> Tensor:
        if self.heads is not None:
            return x.flatten(-2)
        return x.transpose(1, 2) if self.by_head else x


def run_with_cache(
    model: nn.Module,
    *inputs: Any,
    names_filter: str | Sequence[str] | Callable[[str], bool] | None = None,
    **options: Any,
) -> tuple[Any, ActivationCache]:
    """What the model returns, and its activations.

    Args:
        model: A decoder or an encoder, or what holds one.
        *inputs: Inputs of the model; a string is split by its tokenizer.
        names_filter: A name, names, or what says of a name whether it is kept; None: all. Scores
            and patterns are made when they are read.
        **options: For the run.

    Raises:
        InputError: A name that the model does not have.
    """
    with trace(model, *inputs, **options) as t:
        sites = _sites(t)
        chosen = _chosen(names_filter, sites)
        saved = {name: (sites[name].point.save(), sites[name]) for name in chosen}
    return t.output, ActivationCache(saved, len(t.layers))


def run_with_hooks(
    model: nn.Module,
    *inputs: Any,
    fwd_hooks: Sequence[tuple[str | Callable[[str], bool], Callable[..., Tensor | None]]] = (),
    **options: Any,
) -> Any:
    """What the model returns if hooks change its activations.

    Args:
        model: A decoder or an encoder, or what holds one.
        *inputs: Inputs of the model; a string is split by its tokenizer.
        fwd_hooks: Names, or what says of a name whether it is meant, each with
            ``hook(activation, hook=HookPoint)``, which returns what takes its place, or None.
        **options: For the run.

    Raises:
        InputError: A name that the model does not have.
    """
    with trace(model, *inputs, **options) as t:
        sites = _sites(t)
        for wanted, hook in fwd_hooks:
            for name in _chosen(wanted, sites):
                _register(sites[name], name, hook)
    return t.output


def run_names(t: Trace) -> dict[str, str]:
    """By TransformerLens's names those of a trace."""
    return {name: site.point.name for name, site in _sites(t).items()}


def _register(site: _Site, name: str, hook: Callable[..., Tensor | None]) -> None:
    def change(x: Tensor) -> Tensor | None:
        changed = hook(site.theirs(x), hook=HookPoint(name))
        return None if changed is None else site.ours(changed)

    site.point.edit(change)


def _chosen(
    wanted: str | Sequence[str] | Callable[[str], bool] | None, sites: Mapping[str, _Site]
) -> list[str]:
    if wanted is None:
        return list(sites)
    if callable(wanted):
        return [name for name in sites if wanted(name)]
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    for name in names:
        if name not in sites:
            raise InputError(f"this model has no {name!r}: it has {', '.join(sites)}")
    return names


def _sites(t: Trace) -> dict[str, _Site]:
    """The activations that a model has, by TransformerLens's names."""
    known = set(t.names())
    sites: dict[str, _Site] = {}
    for number in range(len(t.layers)):
        for theirs, ours in _of_layer(t, number, known).items():
            name = f"layers.{number}.{ours}"
            if name in known:
                leaf = ours.rpartition(".")[2]
                heads = _heads_of(t, number, leaf)
                sites[f"blocks.{number}.{theirs}"] = _Site(t[name], leaf in _BY_HEAD, heads)
    if "final" in known:
        sites["ln_final.hook_normalized"] = _Site(t["final"])
    return sites


def _of_layer(t: Trace, number: int, known: set[str]) -> dict[str, str]:
    """Of one layer: before rotary, queries are what the projection returns; a gate is "pre"."""
    path = f"layers.{number}"
    gated = f"{path}.mlp.gate" in known
    named = {"attn.hook_q": "q_proj", "attn.hook_k": "k_proj"}
    if not cast(Hooked, t.transformer.layers[number].attention).projects_heads:
        named = {}
    found = {theirs: f"attention.{ours}" for theirs, ours in named.items()}
    found |= _LAYER | {"mlp.hook_pre": f"mlp.{'gate' if gated else 'up'}"}
    return found | ({"mlp.hook_pre_linear": "mlp.up"} if gated else {})


def _heads_of(t: Trace, number: int, leaf: str) -> int | None:
    """By how many heads a projection's output is to be divided; None: it is none."""
    config = t.transformer.config.layers[number].attention
    if leaf == "q_proj":
        return config.num_heads
    return getattr(config, "num_kv_heads", config.num_heads) if leaf == "k_proj" else None
