"""Layers one after the other, and what they share: rotary tables, weights, a bias by distance.

Shape letters: B batch, T tokens, E embed size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyhead.caches import SequenceCache
from polyhead.config import LayerConfig, RelativeBiasConfig, RopeConfig, SoftPromptConfig
from polyhead.errors import UnsupportedError
from polyhead.layers.decode_plan import DecodePlan, steps
from polyhead.layers.fixed import Fixed
from polyhead.layers.handed import Handed
from polyhead.layers.packed import PackedRows
from polyhead.layers.positions import RoPE
from polyhead.layers.transformer_layer import TransformerLayer
from polyhead.semantics import Mask, RelativeBias, SoftPromptBias


def stack(
    embed_dim: int,
    configs: tuple[LayerConfig, ...],
    ropes: dict[tuple[RopeConfig, int], RoPE],
    *,
    weights_of: tuple[int, ...] = (),
    context_dim: int | None = None,
) -> nn.ModuleList:
    """Layers that share the tables of equal rotary embeddings.

    Args:
        embed_dim: Embedding size E of the residual stream.
        configs: A layer for each.
        ropes: Tables made so far; more are added.
        weights_of: As of ``TransformerConfig``.
        context_dim: Features of what cross-attention reads; default E.
    """
    layers = []
    for config in configs:
        rope = None
        if (data := config.attention.rope) is not None:
            dim = config.attention.rope_head_dim
            rope = ropes.setdefault((data, dim), RoPE.from_config(data, dim))
        layers.append(
            TransformerLayer.from_config(embed_dim, config, rope=rope, context_dim=context_dim)
        )
    made = nn.ModuleList(layers)
    owners = {str(i): str(owner) for i, owner in enumerate(weights_of) if owner != i}
    for i, config in enumerate(configs):
        for name, owner in config.attention.shared_weights.items():
            owners[f"{i}.attention.{name}"] = f"{owner}.attention.{name}"
    if owners:
        _share(made, owners)
    return made


def _share(layers: nn.ModuleList, owners: dict[str, str]) -> None:
    """Gives modules the weights of others; a state dict then holds those of the owners alone.

    Layers stay separate modules, so that each can be hooked; they share the projections and norms
    inside, also if parameters are replaced later.

    Args:
        layers: All of a stack.
        owners: By the name of a layer or of a module in it, whose weights it has.
    """
    for place, owner in owners.items():
        for name, module in [*layers.get_submodule(owner).named_modules(prefix=place)]:
            if not [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                continue
            parent, _, leaf = name.rpartition(".")
            if [*module.children()]:
                raise UnsupportedError(
                    f"layers share weights in plain projections and norms only: {name} has weights "
                    "and parts"
                )
            layers.get_submodule(parent).add_module(leaf, module)

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
        gone = tuple(f"{prefix}{place}." for place in owners)
        for name in [name for name in state if name.startswith(gone)]:
            del state[name]

    def fill_in(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for place, owner in owners.items():
            its = f"{prefix}{owner}."
            for name in [name for name in state if name.startswith(its)]:
                state.setdefault(f"{prefix}{place}.{name.removeprefix(its)}", state[name])

    layers.register_state_dict_post_hook(leave_out)  # type: ignore[no-untyped-call]
    layers.register_load_state_dict_pre_hook(fill_in)  # type: ignore[no-untyped-call]


def run_layers(
    layers: nn.ModuleList,
    x: Tensor,
    context: Tensor | None = None,
    *,
    mask: Mask | None,
    biases: Sequence[RelativeBias | None],
    positions: Tensor | None,
    kernel: str,
    caches: Sequence[SequenceCache | None],
    context_mask: Mask | None = None,
    context_caches: Sequence[SequenceCache | None],
    recompute: bool = False,
    plan: DecodePlan | None = None,
    handed: Handed | None = None,
    rows: PackedRows | None = None,
) -> Tensor:
    """``x`` behind all layers: those that can take a step together in one call, others alone.

    Args:
        layers: One behind the other.
        x: ``[B, T, E]``.
        context: As in a call of a layer, and so ``mask``, ``positions``, ``kernel`` and
            ``context_mask``.
        mask: Who may look at whom.
        biases: What is added to the scores of each layer.
        positions: They belong to no cache; None: they follow on from each layer's. Those of several
            coordinates are given to layers that rotate; others, too, go by the order of tokens.
        kernel: ``"auto"`` or the name of a kernel.
        caches: Of each layer, or None.
        context_mask: Who may look at which tokens of the context.
        context_caches: Of each layer, or None.
        recompute: Whether what layers without a cache compute is computed again for gradients.
        plan: How they take a few tokens together; None: they do not.
        handed: What the embedding hands on, where it does.
        rows: Of ``x [1, N, E]``, and without ``positions``; None: T tokens each.
    """
    counts = None if rows is None else rows.counts
    together = plan is not None and positions is None and kernel in ("auto", "native")
    parts = [*zip(layers, biases, caches, context_caches, strict=True)]
    coordinates = positions is not None and positions.ndim == 3
    at = part = 0
    while at < len(parts):
        if together and plan is not None:
            x, whole, part = steps(
                parts, x, mask, context, context_mask, plan=plan, first=at, counts=counts
            )
            at += whole
        if at < len(parts):
            layer, bias, cache, context_cache = parts[at]
            call: dict[str, Any] = {
                "mask": mask,
                "context_mask": context_mask,
                "bias": bias,
                "positions": positions if rows is None else rows.padded_positions,
                "cache": cache,
                "context_cache": context_cache,
                "kernel": kernel,
            }
            if isinstance(layer, TransformerLayer) and layer.takes_handed:
                handed = Handed(at) if handed is None else handed.at(at)
                call["handed"] = handed
            if coordinates and isinstance(layer, TransformerLayer) and not layer.rotates:
                call["positions"] = None
            if rows is not None:
                x = rows.padded(x)
            if part and isinstance(layer, TransformerLayer):
                x = layer.forward_from(x, part, context, **call)
            elif recompute and cache is None and torch.is_grad_enabled():
                x = checkpoint(layer, x, context, use_reentrant=False, **call)
            else:
                x = layer(x, context, **call)
            if rows is not None:
                x = rows.packed(x)
            at += 1
    return x


class RelativeTable(Fixed):
    """T5's learned bias by distance, for all layers of a stack or for one.

    Args:
        config: Number of buckets and largest distance.
        num_heads: Number of query heads H.
        bidirectional: Whether keys ahead have buckets of their own.
        prompt: In front of the text, or None.

    Attributes:
        weight: ``[num_buckets, H]``, with S² rows more for a prompt with S segments.
    """

    def __init__(
        self,
        config: RelativeBiasConfig,
        num_heads: int,
        *,
        bidirectional: bool,
        prompt: SoftPromptConfig | None = None,
    ) -> None:
        super().__init__()
        self.config, self.bidirectional, self.prompt = config, bidirectional, prompt
        rows = config.num_buckets + (0 if prompt is None else prompt.num_segments**2)
        self.weight = nn.Parameter(torch.empty(rows, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    @property
    def bias(self) -> RelativeBias:
        """What is added to scores."""
        weight: Tensor = self.weight
        count, far, prompt = self.config.num_buckets, self.config.max_distance, self.prompt
        if prompt is None:
            return RelativeBias(weight, bidirectional=self.bidirectional, max_distance=far)
        own, text = prompt.segments
        pairs = [count + q * prompt.num_segments + k for q, k in ((own, text), (text, own))]
        return SoftPromptBias(weight[:count], weight[pairs], length=prompt.length, max_distance=far)


def relative_table(
    config: RelativeBiasConfig | None,
    layers: tuple[LayerConfig, ...],
    *,
    bidirectional: bool,
    prompt: SoftPromptConfig | None = None,
) -> RelativeTable | nn.ModuleList | None:
    """The table that ``config`` describes, one for each layer, or None."""
    if config is None:
        return None
    heads, count = layers[0].attention.num_heads, len(layers) if config.per_layer else 1
    tables = [
        RelativeTable(config, heads, bidirectional=bidirectional, prompt=prompt)
        for _ in range(count)
    ]
    return nn.ModuleList(tables) if config.per_layer else tables[0]


def biases(
    table: RelativeTable | nn.ModuleList | None, count: int
) -> Sequence[RelativeBias | None]:
    """What is added to the scores of each of so many layers, in this call."""
    if isinstance(table, nn.ModuleList):
        return [each.bias for each in table if isinstance(each, RelativeTable)]
    if table is None:
        return (None,) * count
    # One object for all layers, which without gradients share what compiled code reads.
    return (table.bias if torch.is_grad_enabled() else table.bias.prepared(),) * count
