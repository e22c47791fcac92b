"""Heads, hidden features and the vocabulary divided among the ranks of ``tensor``.

A *region* is a module of which every rank computes a part: an attention some heads, a feed-forward
network some hidden features. Its input is the same on all ranks, its output is summed: one exchange
forward and one backward for each region (Shoeybi et al. 2019). Inside it everything is an ordinary
smaller layer on plain tensors, so every kernel serves. Of a parameter of the region a rank uses

    rows, columns   the part that it holds: a DTensor that torch's ``distribute_tensor`` cuts
    slice           some rows of what every rank holds (kv heads where there are fewer than ranks)
    whole           all of it (norms of heads, routers, MLA's latents); gradients are summed
    once            all of it on the first rank, nothing on others (biases of what is summed)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from polyhead.layers import MultiHeadAttention, MultiHeadLatentAttention
from polyhead.layers.experts import Experts
from polyhead.layers.feed_forward import FeedForward
from polyhead.models import Transformer
from polyhead.parallel.collectives import copy_to_ranks, reduce_from_ranks
from polyhead.parallel.exchanges import head_shares
from polyhead.parallel.ranks import (
    Ranks,
    agreed,
    check_same,
    fingerprint,
    tell_backward,
    unsupported,
)
from polyhead.parallel.sequence import TokenShards, shard_tokens

Use = Literal["rows", "columns", "slice", "whole", "once"]


class ShardSpec(NamedTuple):
    """The part of a parameter that a rank uses.

    Attributes:
        use: One of the uses listed above.
        rows: With ``"slice"``, which rows.
    """

    use: Use
    rows: range | None = None


@dataclass(eq=False)
class Region:
    """A module's ``forward`` where ranks share its work.

    Attributes:
        module: The module of which every rank computes a part.
        ranks: Those of ``tensor``.
        parts: What of each parameter this rank uses, by name.
        shares: How tokens lie on the ranks between regions; None: all are on all.
    """

    module: nn.Module
    ranks: Ranks
    parts: Mapping[str, ShardSpec]
    shards: TokenShards | None = None

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        inputs = tuple(self._entered(x) for x in inputs)
        with self.local_parameters():
            made = type(self.module).forward(self.module, *inputs, **named)
        if self.shards is not None:
            return self.shards.reduce_scatter(made)
        return reduce_from_ranks(made, self.ranks)

    def _entered(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(self._entered(each) for each in x)
        if not isinstance(x, Tensor):
            return x
        return copy_to_ranks(x, self.ranks) if self.shards is None else self.shards.all_gather(x)

    @contextmanager
    def local_parameters(self) -> Iterator[None]:
        """The module's parameters are this rank's parts."""
        held = []
        for name, part in self.parts.items():
            owner, _, leaf = name.rpartition(".")
            owned = self.module.get_submodule(owner)._parameters
            parameter = owned[leaf]
            if parameter is not None:
                held.append((owned, leaf, parameter))
                owned[leaf] = self._local(parameter, part)  # type: ignore[assignment]
        try:
            yield
        finally:
            for owned, leaf, parameter in held:
                owned[leaf] = parameter

    def _local(self, parameter: Tensor, part: ShardSpec) -> Tensor:
        if isinstance(parameter, DTensor):
            return parameter.to_local()
        whole = copy_to_ranks(parameter, self.ranks)
        if part.use == "slice" and part.rows is not None:
            return whole[part.rows.start : part.rows.stop]
        return whole * 0 if part.use == "once" and self.ranks.rank else whole


class Alike(Region):
    """A module that ranks compute on tokens of their own: gradients of its weights are summed."""

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        with self.local_parameters():
            made: Tensor = type(self.module).forward(self.module, *inputs, **named)
        return made


class Placed(ParallelStyle):
    """Places the parameters of a module on the ranks; its computation is left as it is.

    Args:
        dims: By name the dimension along which a parameter is cut.
    """

    def __init__(self, dims: Mapping[str, int]) -> None:
        super().__init__()
        self.dims = dims

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for leaf, dim in self.dims.items():
            parameter = module._parameters[leaf]
            assert parameter is not None
            cut = distribute_tensor(parameter.detach(), device_mesh, [Shard(dim)])
            module.register_parameter(leaf, nn.Parameter(cut, parameter.requires_grad))
        return module


def shard_heads(
    model: nn.Module, ranks: Ranks, mesh: DeviceMesh, shards: TokenShards | None = None
) -> None:
    """Makes regions of all attentions and feed-forward networks, and with ``shards`` of norms.

    Raises:
        UnsupportedError: A layer that the ranks cannot share; nothing was changed then.
    """
    plans = planned(model, ranks)
    for module, (parts, finish) in plans.items():
        _place(module, parts, mesh)
        finish()
        module.forward = Region(module, ranks, parts, shards)
    if shards is None or not isinstance(model, Transformer):
        return
    shard_tokens(model, shards)
    for layer in model.layers:
        for name, module in layer.named_children():
            if name.endswith("_norm"):
                whole = {leaf: ShardSpec("whole") for leaf, _ in module.named_parameters()}
                module.forward = Alike(module, ranks, whole)


Finish = Callable[[], None]


def planned(model: nn.Module, ranks: Ranks) -> dict[nn.Module, tuple[dict[str, ShardSpec], Finish]]:
    """For every region its parts, and what makes it a smaller layer; changes nothing."""
    found: dict[nn.Module, tuple[dict[str, ShardSpec], Finish]] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        planner = _PLANNERS.get(type(module))
        if planner is None or module in inside:
            if planner is None and name.rpartition(".")[2] in ("attention", "feed_forward"):
                raise unsupported(f"{type(module).__name__} ({name}) on the dimension 'tensor'")
            continue
        inside.update(module.modules())
        parts, finish = planner(module, ranks)
        missing = {n for n, _ in module.named_parameters()} - parts.keys()
        if missing:
            raise unsupported(f"{', '.join(sorted(missing))} of {name} on the dimension 'tensor'")
        found[module] = parts, finish
    if not found:
        raise unsupported(f"a {type(model).__name__} without attention on the dimension 'tensor'")
    return found


def _place(module: nn.Module, parts: Mapping[str, ShardSpec], mesh: DeviceMesh) -> None:
    """Cuts the parameters, by torch's ``parallelize_module``."""
    dims: dict[str, dict[str, int]] = {}
    for name, part in parts.items():
        owner, _, leaf = name.rpartition(".")
        if part.use in ("rows", "columns") and not isinstance(
            module.get_submodule(owner)._parameters[leaf], DTensor
        ):
            dims.setdefault(owner, {})[leaf] = 0 if part.use == "rows" else 1
    styles: dict[str, ParallelStyle] = {owner: Placed(its) for owner, its in dims.items()}
    parallelize_module(module, mesh, styles)


def _of_heads(layer: MultiHeadAttention, ranks: Ranks) -> tuple[dict[str, ShardSpec], Finish]:
    H, G, N = layer.num_heads, layer.num_kv_heads, ranks.size
    heads, kv = head_shares(H, G, N)[ranks.rank]
    parts: dict[str, ShardSpec] = {}
    for name, parameter in layer.named_parameters():
        owner, _, leaf = name.partition(".")
        if owner == "q_proj":
            parts[name] = ShardSpec("rows")
        elif owner in ("k_proj", "v_proj"):
            D = len(parameter) // G
            rows = range(kv.start * D, kv.stop * D)
            parts[name] = ShardSpec("rows") if G % N == 0 else ShardSpec("slice", rows)
        elif owner == "o_proj":
            parts[name] = ShardSpec("columns") if leaf == "weight" else ShardSpec("once")
        elif owner in ("q_norm", "k_norm"):
            if layer.qk_norm_place == "full_width":
                raise unsupported("a norm over all heads at once on the dimension 'tensor'")
            each = heads if owner == "q_norm" else kv
            parts[name] = ShardSpec("slice", each) if parameter.ndim == 2 else ShardSpec("whole")
        elif name == "sinks":
            parts[name] = ShardSpec("slice", heads)

    def finish() -> None:
        vars(layer).update(num_heads=len(heads), num_kv_heads=len(kv))

    return parts, finish


def _of_latent(
    layer: MultiHeadLatentAttention, ranks: Ranks
) -> tuple[dict[str, ShardSpec], Finish]:
    H, N = layer.num_heads, ranks.size
    heads, _ = head_shares(H, H, N)[ranks.rank]
    cut = {"q_proj", "q_b_proj", "kv_b_proj"}
    parts: dict[str, ShardSpec] = {}
    for name, _ in layer.named_parameters():
        owner, _, leaf = name.partition(".")
        if owner in cut:
            parts[name] = ShardSpec("rows")
        elif owner == "o_proj":
            parts[name] = ShardSpec("columns") if leaf == "weight" else ShardSpec("once")
        else:
            parts[name] = ShardSpec("whole")

    def finish() -> None:
        config = replace(layer.config, num_heads=len(heads))
        vars(layer).update(num_heads=len(heads), config=config)

    return parts, finish


def _of_features(network: FeedForward, ranks: Ranks) -> tuple[dict[str, ShardSpec], Finish]:
    if network.hidden_dim % ranks.size:
        raise unsupported(
            f"{network.hidden_dim} hidden features on {ranks.size} ranks of 'tensor': they must be "
            "a multiple of the ranks"
        )
    if network.config.sparsity:
        raise unsupported("a network that is sparse by all its features on the dimension 'tensor'")
    parts: dict[str, ShardSpec] = {}
    for name, _ in network.named_parameters():
        owner, _, leaf = name.partition(".")
        if owner in ("gate_proj", "up_proj"):
            parts[name] = ShardSpec("rows")
        elif owner == "down_proj":
            parts[name] = ShardSpec("columns") if leaf == "weight" else ShardSpec("once")
        else:
            parts[name] = ShardSpec("whole")
    return parts, lambda: None


def _of_experts(experts: Experts, ranks: Ranks) -> tuple[dict[str, ShardSpec], Finish]:
    parts: dict[str, ShardSpec] = {}
    networks = [(f"experts.{i}", each) for i, each in enumerate(experts.experts)]
    if experts.shared is not None:
        networks.append(("shared", experts.shared))
    for prefix, network in networks:
        if isinstance(network, FeedForward):  # others are on other ranks of 'expert'
            its, _ = _of_features(network, ranks)
            parts.update({f"{prefix}.{name}": part for name, part in its.items()})
    for name, _ in experts.named_parameters():
        parts.setdefault(name, ShardSpec("whole"))
    return parts, lambda: None


_PLANNERS: dict[type[nn.Module], Callable[[Any, Ranks], tuple[dict[str, ShardSpec], Finish]]] = {
    MultiHeadAttention: _of_heads,
    MultiHeadLatentAttention: _of_latent,
    FeedForward: _of_features,
    Experts: _of_experts,
}


def shard_vocabulary(
    model: Transformer, ranks: Ranks, mesh: DeviceMesh, *, gathered: bool = True
) -> None:
    """Rows of the embedding and of the output matrix by rank, tied or not.

    Args:
        model: Model that is changed in place.
        ranks: Those of ``tensor``.
        mesh: Mesh of those ranks alone.
        gathered: Whether every rank gets the logits of the whole vocabulary.
    """
    tables = {
        module: name for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.endswith("tokens")
    }  # fmt: skip
    for module in tables:
        parallelize_module(module, mesh, Placed({"weight": 0}))
        module.__dict__["forward"] = _Looked(module, ranks)
    if model.head is None:
        return
    head = model.head
    if head.beside is not None:
        raise unsupported("a head with columns beside those of another matrix")
    if model.config.unused_ids:
        raise unsupported("ids without logits on the dimension 'tensor'")
    own = [name for name in ("weight", "bias") if getattr(head, name) is not None]
    if own:
        parallelize_module(head, mesh, Placed(dict.fromkeys(own, 0)))
    if model.head.weight is None and not isinstance(model.embedding.table, DTensor):
        raise unsupported("a tied head beside an embedding without tokens")
    model.logits = _Logits(model, ranks, gathered)  # type: ignore[method-assign]


def gathers_logits(model: Transformer) -> bool:
    """Whether every rank gets the logits of the whole vocabulary."""
    logits = vars(model).get("logits")
    return isinstance(logits, _Logits) and logits.gathered


@dataclass(eq=False)
class _Looked:
    """Rows of a table of which every rank holds some."""

    module: nn.Embedding
    ranks: Ranks

    def __call__(self, ids: Tensor) -> Tensor:
        weight = self.module.weight
        assert isinstance(weight, DTensor)
        rows = weight.to_local()
        first = _first_row(len(weight), self.ranks)
        here = (ids >= first) & (ids < first + len(rows))
        if len(rows):
            found = nn.functional.embedding(torch.where(here, ids - first, 0), rows)
        else:
            found = rows.new_zeros(*ids.shape, rows.shape[1])
        return reduce_from_ranks(found.masked_fill(~here[..., None], 0.0), self.ranks)


def _first_row(rows: int, ranks: Ranks) -> int:
    """Where the rows of this rank begin, as torch's ``Shard`` cuts them."""
    return min(rows, -(-rows // ranks.size) * ranks.rank)


@dataclass(eq=False)
class _Logits:
    """``Transformer.logits`` of a vocabulary by rank."""

    model: Transformer
    ranks: Ranks
    gathered: bool

    def __call__(self, hidden: Tensor) -> Tensor:
        model, ranks = self.model, self.ranks
        head = model.head
        assert head is not None
        if not torch.compiler.is_compiling():  # notes are read on the way, graphs are not
            facts = [fingerprint(hidden)]
            agreed([(ranks, self._check)], "logits of a model", facts)
        parts = {"head." + name: ShardSpec("whole") for name, _ in head.named_parameters()}
        if head.weight is None:
            parts["embedding.tokens.weight"] = ShardSpec("rows")
        region = Region(model, ranks, parts)
        with region.local_parameters():
            local = type(model).logits(model, copy_to_ranks(hidden, ranks))
        tell_backward([ranks], local)
        W = model.config.vocab_size
        table = model.embedding.table if head.weight is None else head.weight
        assert isinstance(table, DTensor)
        shape = torch.Size((*local.shape[:-1], W))
        stride = torch.empty(shape, device="meta", dtype=torch.float32).stride()
        spread = DTensor.from_local(
            local, table.device_mesh, [Shard(local.ndim - 1)], run_check=False,
            shape=shape, stride=stride,
        )  # fmt: skip
        if not self.gathered:
            return spread
        logits: Tensor = spread.redistribute(placements=[Replicate()]).to_local()
        return logits

    def _check(self, found: Sequence[Sequence[int]]) -> None:
        check_same(self.ranks, "the hidden states (shape, dtype)", [each for (each,) in found])
