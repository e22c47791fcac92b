"""What every head looks at, with the fast kernels still running.

    with ph.probe(model) as seen:
        model(ids)
    seen[3].entropy                                 # [B, H, T]
    seen[3].rows(heads=[1], queries=slice(0, 64))   # exact weights [B, 1, 64, S]

A probe keeps the queries, the keys and the log-sum-exp of each layer's latest call, never the
weights. Any row is recomputed from them exactly, p_ij = exp(score_ij − lse_i), and statistics go
through the rows in blocks. The outputs of the model are bit-identical with and without a probe.

Letters: B batch, H query heads, G key/value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polyhead.layers.hooks import Hooked
from polyhead.semantics import Specification, TensorBias, Tokens
from polyhead.semantics.weights import weight_rows

if TYPE_CHECKING:
    from polyhead.layers.record import AttentionRecord

_BLOCK_NUMBERS = 1 << 21
"""Weights that statistics hold at a time, over all heads: 8 MB in float32."""

STATISTICS = (
    "entropy", "first_token", "previous_token", "self", "max_weight", "mean_distance",
)  # fmt: skip


@dataclass(frozen=True)
class HeadSummary:
    """One number per head ``[H]``: means over the queries that see something.

    The first query of each row of the batch is left out where there are others: what looks back
    can only look at itself there, which says nothing about the head. NaN where nothing is left.
    """

    entropy: Tensor
    first_token: Tensor
    previous_token: Tensor
    self_token: Tensor
    max_weight: Tensor
    mean_distance: Tensor


class AttentionView:
    """One attention layer's latest call, seen through its queries, keys and lse.

    Row statistics are float32 ``[B, H, T]``, 0 for a query that sees nothing:

    Attributes:
        layer: the layer's name or number.
        q: ``[B, H, T, D]`` as the scores used them (after rotary).
        k: ``[B, G, S, D]`` likewise.
        lse: ``[B, H, T]`` natural log-sum-exp, −∞ for a query that sees nothing.
    """

    def __init__(self, layer: int | str, record: AttentionRecord) -> None:
        self.layer = layer
        self.q = _own(record.q)
        self.k = _own(record.k)
        self.lse = _own(record.lse)
        queries, keys = self.q.shape[2], self.k.shape[2]
        positions, first = record.q_positions, record.first_place
        if positions is None and record.kv_positions is not None:
            positions = record.kv_positions[..., keys - queries :]
        self._q_tokens = Tokens.of(queries, shift=first + keys - queries, positions=positions)
        self._k_tokens = Tokens.of(keys, shift=first, positions=record.kv_positions)
        self._spec = Specification(
            scale=record.scale,
            mask=record.mask,
            bias=TensorBias(record.bias) if isinstance(record.bias, Tensor) else record.bias,
            softcap=record.softcap,
            sinks=None if record.sinks is None else record.sinks.detach(),
        )
        self._statistics: dict[str, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of q, k and lse, which is all that is kept."""
        return sum(x.numel() * x.element_size() for x in (self.q, self.k, self.lse))

    def rows(self, heads: Sequence[int] | None = None, queries: slice | None = None) -> Tensor:
        """The exact weights of some rows, float32 (float64 for float64) ``[B, heads, rows, S]``.

        Args:
            heads: query heads, counted from 0; None: all.
            queries: which queries; None: all. A row sums to 1 (less a sink's share), or to 0 where
                the query sees nothing.

        Raises:
            ValueError: a head that is not there, by name.
        """
        count, total = self.q.shape[1], self.q.shape[2]
        chosen = list(range(count)) if heads is None else list(heads)
        for head in chosen:
            if not 0 <= head < count:
                raise ValueError(f"heads must be from 0 to {count - 1}: got {head}")
        start, stop, step = (queries or slice(None)).indices(total)
        runs = [(start, stop)] if step == 1 else [(i, i + 1) for i in range(start, stop, step)]
        blocks = [weights[:, chosen] for run in runs for _, weights in self._blocks(*run)]
        if not blocks:
            return self.q.new_zeros(self.q.shape[0], len(chosen), 0, self.k.shape[2]).float()
        return torch.cat(blocks, dim=2)

    weights = rows

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Runs of rows of all heads: the first row's index and weights ``[B, H, run, S]``."""
        batch, heads, _, _ = self.q.shape
        size = max(1, _BLOCK_NUMBERS // max(1, batch * heads * self.k.shape[2]))
        for first in range(start, stop, size):
            last = min(first + size, stop)
            yield (
                first,
                weight_rows(
                    self.q[:, :, first:last],
                    self.k,
                    self.lse[:, :, first:last],
                    self._spec,
                    self._q_tokens.slice(first, last),
                    self._k_tokens,
                ),
            )

    @property
    def entropy(self) -> Tensor:
        """Entropy of each row in nats: 0 (one key) to ln S (all alike). A sink is one more key."""
        return self._statistic("entropy")

    @property
    def first_token(self) -> Tensor:
        """Weight on the token at position 0."""
        return self._statistic("first_token")

    @property
    def previous_token(self) -> Tensor:
        """Weight on the token one position before the query."""
        return self._statistic("previous_token")

    @property
    def self(self) -> Tensor:
        """Weight on the query's own position."""
        return self._statistic("self")

    @property
    def max_weight(self) -> Tensor:
        """Largest weight of each row."""
        return self._statistic("max_weight")

    @property
    def mean_distance(self) -> Tensor:
        """Weighted mean of |query position − key position|, in tokens."""
        return self._statistic("mean_distance")

    def summary(self) -> HeadSummary:
        """Each statistic as one number per head."""
        batch, _, total = self.lse.shape
        counted = ~self.lse.isneginf()
        if total > 1:
            first = self._q_tokens.position_tensor(self.q.device).expand(batch, total)
            counted = counted & (first > first.amin(dim=-1, keepdim=True))[:, None]
        number = counted.sum(dim=(0, 2))

        def mean(name: str) -> Tensor:
            summed = self._statistic(name).masked_fill(~counted, 0.0).sum(dim=(0, 2))
            return (summed / number).masked_fill(number == 0, torch.nan)

        return HeadSummary(*(mean(name) for name in STATISTICS))

    def _statistic(self, name: str) -> Tensor:
        if self._statistics is None:
            self._statistics = self._measure()
        return self._statistics[name]

    def _measure(self) -> dict[str, Tensor]:
        """All statistics in one pass over the rows."""
        found = {name: self.lse.new_zeros(self.lse.shape).float() for name in STATISTICS}
        device = self.q.device
        q_positions = self._q_tokens.position_tensor(device)[..., :, None]
        k_positions = self._k_tokens.position_tensor(device)[..., None, :]
        if self.k.shape[2] == 0:
            return found
        for first, weights in self._blocks(0, self.q.shape[2]):
            rows = slice(first, first + weights.shape[2])
            entropy = torch.special.entr(weights).sum(-1)
            if self._spec.sinks is not None:
                rest = (1.0 - weights.sum(-1)).clamp_min(0.0)
                entropy = entropy + torch.special.entr(rest)
            apart = q_positions[..., rows, :] - k_positions
            apart = apart[:, None] if apart.ndim == 3 else apart
            at_first = k_positions[..., None, :, :] if k_positions.ndim == 3 else k_positions
            found["entropy"][:, :, rows] = entropy
            found["first_token"][:, :, rows] = (weights * (at_first == 0)).sum(-1)
            found["previous_token"][:, :, rows] = (weights * (apart == 1)).sum(-1)
            found["self"][:, :, rows] = (weights * (apart == 0)).sum(-1)
            found["max_weight"][:, :, rows] = weights.amax(-1)
            found["mean_distance"][:, :, rows] = (weights * apart.abs()).sum(-1)
        return found

    def __repr__(self) -> str:
        batch, heads, queries, _ = self.q.shape
        return (
            f"AttentionView(layer {self.layer}: batch {batch}, {heads} query heads, "
            f"{self.k.shape[1]} kv heads, {queries} queries, {self.k.shape[2]} keys, "
            f"{self.nbytes:,} bytes)"
        )


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
        name = _name_of(self.modules, layer)
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

    def _keep(self, name: str, record: AttentionRecord) -> None:
        number = self._numbered.index(name) if name in self._numbered else name
        self._views[name] = AttentionView(number, record)

    def __repr__(self) -> str:
        return f"Probe({len(self)} of {len(self.modules)} attentions seen, {self.nbytes:,} bytes)"


@contextmanager
def probe(model: nn.Module, layers: Sequence[int | str] | None = None) -> Iterator[Probe]:
    """Watches the attention of ``model`` while the ``with`` block runs.

    Args:
        model: anything that holds ``polyhead.MultiHeadAttention`` or
            ``polyhead.MultiHeadLatentAttention`` modules. Queries and keys of the latter are those
            of the computation that ran: absorbed ones lie in the latent.
        layers: the layers to watch, counted from 0 or by their module's path; None: all.

    Yields:
        The probe; it can be read inside the block and after it.

    Raises:
        ValueError: the model has no attention layers, or not the one that is asked for.
    """
    modules = attention_modules(model)
    names = list(modules)
    if not names:
        raise ValueError(f"{type(model).__name__} has no attention of polyhead's to watch")
    wanted = names if layers is None else [_name_of(names, layer) for layer in layers]
    seen = Probe(names)
    with ExitStack() as hooks:
        for name in wanted:
            hooks.enter_context(modules[name].register_attention_hook(partial(seen._keep, name)))
        yield seen


def attention_modules(model: nn.Module) -> dict[str, Hooked]:
    """Every attention of a model by its module's path, in the order of the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Hooked)}


def numbered_layers(paths: Iterable[str]) -> list[str]:
    """The paths that a layer number means: all but cross-attention."""
    return [path for path in paths if not path.endswith("cross_attention")]


def _name_of(modules: Sequence[str], layer: int | str) -> str:
    if isinstance(layer, str):
        if layer not in modules:
            raise ValueError(f"no attention {layer!r}: the model has {', '.join(modules)}")
        return layer
    numbered = numbered_layers(modules)
    if not 0 <= layer < len(numbered):
        raise ValueError(f"layers are counted from 0 to {len(numbered) - 1}: got {layer!r}")
    return numbered[layer]


def _own(tensor: Tensor) -> Tensor:
    """The tensor without its history; copied if it lies in a larger store, such as a cache.

    A cache would overwrite it later, and would be kept alive by it.
    """
    tensor = tensor.detach()
    held = tensor.untyped_storage().nbytes()
    return tensor.clone() if held > tensor.numel() * tensor.element_size() else tensor
