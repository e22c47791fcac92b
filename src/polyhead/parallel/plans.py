"""``parallel.plan``: what ``parallelize`` would do with a model, before anything is changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from polyhead.models import Transformer
from polyhead.parallel.model import check_model
from polyhead.parallel.ranks import Ranks, check_mesh
from polyhead.parallel.regions import planned
from polyhead.planning import plan as plan_of_mesh
from polyhead.planning.mesh import MeshPlan

_WORDS = {
    "rows": "rows by rank",
    "columns": "columns by rank",
    "slice": "held whole, the rank's heads are used",
    "whole": "held whole, gradients are summed",
    "once": "held whole, added on the first rank",
}


@dataclass(frozen=True)
class ParallelPlan:
    """What each rank would hold, do and send; print it.

    Attributes:
        figures: Bytes held and sent, of one rank.
        parts: What becomes of the parameters of regions, by their name without the layer's number.
        layers: The model's layers, both stacks.
    """

    figures: MeshPlan
    parts: dict[str, str]
    layers: int

    def __str__(self) -> str:
        figures = self.figures
        sizes = ", ".join(f"{name} {size}" for name, size in figures.mesh)
        lines = [
            f"{figures.ranks} ranks: {sizes}",
            f"  tokens of a sequence   {figures.tokens:,}",
            f"  bytes of weights       {figures.weight_bytes:,}",
            f"  bytes of cache         {figures.cache_bytes:,}",
        ]
        width = max(map(len, self.parts), default=0)
        lines += [f"  {name:<{width}}  {words}" for name, words in self.parts.items()]
        for each in figures.sent:
            forward, backward = (count // self.layers for count in (each.forward, each.backward))
            lines.append(f"  {each.what:<9}sends a layer {forward:,} B, backward {backward:,} B")
        return "\n".join(lines)


def plan(
    model: Transformer,
    mesh: DeviceMesh,
    *,
    tokens: int | None = None,
    batch_size: int = 1,
    dtype: str = "float32",
    **figures: Any,
) -> ParallelPlan:
    """What ``parallelize(model, mesh)`` would do; changes nothing and exchanges nothing.

    Args:
        model: As for ``parallelize``.
        mesh: As for ``parallelize``.
        tokens: Tokens of each sequence, on all ranks together; default: all that the model reads.
        batch_size: Sequences of one rank.
        dtype: Dtype of the weights.
        **figures: As of ``ph.plan``: ``link``, ``flops``, ``kv_dtype``, ``page``.

    Raises:
        UnsupportedError: What the mesh cannot share, as ``parallelize`` raises it.
        ConfigError: Numbers that cannot be.
    """
    check_mesh(mesh)
    names = mesh.mesh_dim_names or ()
    check_model(model, mesh)
    parts: dict[str, str] = {}
    if "tensor" in names:
        ranks = Ranks.of(mesh, "tensor")
        modules = {module: name for name, module in model.named_modules()}
        found = Counter(
            (".".join(p for p in f"{modules[module]}.{name}".split(".") if not p.isdigit()),
             _WORDS[part.use])
            for module, (its, _) in planned(model, ranks).items()
            for name, part in its.items()
        )  # fmt: skip
        parts = {f"{count} × {name}": words for (name, words), count in found.items()}
        parts["embedding and head"] = "rows of the vocabulary by rank"
    if "expert" in names:
        parts["experts"] = "some of each layer's by rank, tokens travel"
    sizes = {name: mesh[name].size() for name in names}
    made = plan_of_mesh(
        model.config, tokens=tokens, batch_size=batch_size, dtype=dtype, mesh=sizes, **figures
    )
    assert made.mesh is not None
    layers = len(model.layers) + len(model.encoder_layers)
    return ParallelPlan(made.mesh, parts, layers)
