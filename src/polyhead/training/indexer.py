"""The loss of lightning indexers: their scores follow what the heads attend to.

    p[t, s] = Σ_h a_h[t, s] / H        L = mean over t of KL(p[t] ‖ softmax(I[t]))

over the keys that query t reads (DeepSeek-V3.2, 2025, arXiv 2512.02556, eqs. 3-4). The indexers'
inputs are detached, so this trains indexers alone, and the model's own loss all but them. For the
paper's dense warm-up let every layer read all keys: ``layer.attention.top_k = 1 << 40``.

Shape letters: B batch, J heads of an indexer, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyhead.errors import InputError
from polyhead.layers import AttentionRecord, LightningIndexer, SparseLatentAttention
from polyhead.semantics import Specification, index_scores
from polyhead.semantics.weights import weight_rows

_ROWS = 1 << 22
"""Scores of single heads that are held at a time."""


class IndexerLoss:
    """The losses of the calls within ``indexer_loss``.

    Attributes:
        by_layer: A scalar for each call of a layer with an indexer, by the layer's name.
    """

    def __init__(self) -> None:
        self.by_layer: dict[str, Tensor] = {}

    @property
    def total(self) -> Tensor:
        """The sum over all layers.

        Raises:
            InputError: No layer was called.
        """
        if not self.by_layer:
            raise InputError("no layer with an indexer was called within indexer_loss")
        return torch.stack([*self.by_layer.values()]).sum()


@contextmanager
def indexer_loss(model: nn.Module) -> Iterator[IndexerLoss]:
    """Computes the loss of every indexer of a model beside its calls, without a cache.

        with indexer_loss(model) as found:
            loss = cross_entropy(model(ids), labels)
        (loss + found.total).backward()

    Args:
        model: A model, or a layer, with ``SparseLatentAttention``.

    Raises:
        InputError: It has no indexer, or one that chooses pools of tokens.
    """
    found, known = IndexerLoss(), False
    with ExitStack() as stack:
        for name, layer in model.named_modules():
            if isinstance(layer, SparseLatentAttention) and layer.indexer is not None:
                known = True
                if not isinstance(layer.indexer, LightningIndexer):
                    raise InputError(
                        f"indexer_loss trains indexers that choose single keys: got {name}."
                        f"indexer, a {type(layer.indexer).__name__}"
                    )
                watch = _Watch(name or "attention", layer.indexer, found)
                stack.enter_context(layer.register_attention_hook(watch.attention))
                hook = layer.indexer.register_forward_pre_hook(watch.indexer)
                stack.callback(hook.remove)
        if not known:
            raise InputError(f"{type(model).__name__} has no layer with an indexer")
        yield found


class _Watch:
    """One layer's hooks: the inputs of its indexer, then its attention."""

    def __init__(self, name: str, indexer: LightningIndexer, found: IndexerLoss) -> None:
        self._name, self._indexer, self._found = name, indexer, found
        self._inputs: tuple[Any, ...] = ()

    def indexer(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._inputs = inputs

    def attention(self, record: AttentionRecord) -> None:
        if not torch.is_grad_enabled():
            return
        # ``forward`` itself: a call would be watched again.
        q, weights, k = self._indexer.forward(*self._inputs)
        if k.shape[2] != record.k.shape[2]:
            raise InputError("indexer_loss needs whole sequences: the call had a cache")
        T, pairs = q.shape[2], q.shape[0] * q.shape[1] * k.shape[2]
        rows = max(1, _ROWS // pairs)
        sums = [
            checkpoint(
                _divergence, q[:, :, at : at + rows], weights[:, :, at : at + rows], k[:, 0],
                record, at, use_reentrant=False,
            )
            for at in range(0, T, rows)
        ]  # fmt: skip
        total, seeing = (torch.stack(each).sum() for each in zip(*sums, strict=True))
        self._found.by_layer[self._name] = total / seeing.clamp(min=1)


def _divergence(
    q: Tensor, weights: Tensor, k: Tensor, record: AttentionRecord, first: int
) -> tuple[Tensor, Tensor]:
    """The sum of the divergences of some rows, and how many rows see a key."""
    rows = slice(first, first + q.shape[2])
    spec = Specification(record.scale, record.mask, None, record.softcap, record.sinks)
    asking = record.q_tokens.slice(rows.start, rows.stop)
    with torch.no_grad():
        given = record.q[:, :, rows], record.k, record.lse[:, :, rows]
        wanted = weight_rows(*given, spec, asking, record.kv_tokens).sum(dim=1)
        wanted = wanted / wanted.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(wanted.dtype).tiny)
        seen = torch.ones_like(wanted, dtype=torch.bool)
        if record.mask is not None:
            drawn = record.mask.visible(asking, record.kv_tokens, q.device)
            seen = drawn.any(dim=1).expand_as(wanted)
        rows_seen = seen.any(dim=-1)
    scores = index_scores(q, weights, k).masked_fill(~seen, -torch.inf)
    logs = scores.masked_fill(~rows_seen[..., None], 0.0).log_softmax(dim=-1)
    parts = torch.xlogy(wanted, wanted) - wanted * logs.masked_fill(~seen, 0.0)
    return parts.sum(), rows_seen.sum()
