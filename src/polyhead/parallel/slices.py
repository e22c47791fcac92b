"""A Transformer's methods where each rank has a slice of the tokens, or of those remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.caches import ModelCache, Quantized
from polyhead.caches.choice import Kind
from polyhead.models import Transformer
from polyhead.parallel.cache import CrossCache, SpreadCache
from polyhead.parallel.calls import agree_alike
from polyhead.parallel.context import Context
from polyhead.parallel.order import Spread
from polyhead.parallel.ranks import unsupported
from polyhead.semantics import Mask


@dataclass(eq=False)
class _HiddenStates:
    """``Transformer.hidden_states`` of a slice of the tokens."""

    model: Transformer
    context: Context

    def __call__(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        encoder_ids: Tensor | None = None,
        encoder_hidden: Tensor | None = None,
        encoder_mask: Mask | None = None,
        cache: ModelCache | None = None,
        kernel: str = "auto",
        **call: Any,
    ) -> Tensor:
        model, context = self.model, self.context
        encoder = {
            "encoder_ids": encoder_ids, "encoder_hidden": encoder_hidden,
            "encoder_mask": encoder_mask,
        }  # fmt: skip
        if cache is not None:
            return self._decoded(ids, positions, mask, cache, kernel, call | encoder)
        if call.get("last") is not None:
            raise unsupported("last= where tokens are spread over ranks")
        if encoder_ids is not None and encoder_hidden is None:
            encoder_hidden = model.encode(encoder_ids, mask=encoder_mask, kernel=kernel)
        self._check_encoded(encoder_hidden)
        sizes = model.config.vocab_size, model.config.max_positions
        positions = context.place(
            "tokens", ids, positions, sizes, mask, encoder_mask, kernel=kernel
        )
        made: Tensor = type(model).hidden_states(
            model, ids, positions=positions, mask=mask, encoder_hidden=encoder_hidden,
            encoder_mask=encoder_mask, kernel=kernel, **call,
        )  # fmt: skip
        return made

    def _check_encoded(self, encoder_hidden: Tensor | None) -> None:
        if encoder_hidden is not None and "encoder" not in self.context.spreads:
            raise unsupported("encoder_hidden that this model's encode did not make")

    def _decoded(
        self,
        ids: Tensor,
        positions: Tensor | None,
        mask: Mask | None,
        cache: ModelCache,
        kernel: str,
        call: dict[str, Any],
    ) -> Tensor:
        """The same tokens on all ranks, their keys spread; of an encoder's tokens a slice each."""
        model, context = self.model, self.context
        refused = None
        if not all(isinstance(each, SpreadCache) for each in cache.layers):
            refused = ValueError(
                "cache must be of this model's new_cache() after parallelize: it was not spread"
            )
        alike = [*([] if context.tensor is None else [context.tensor]), context.ranks]
        source = call["encoder_ids"]
        agree_alike(
            alike, ids, positions, kernel, mask, cache.lengths, call["encoder_mask"], source,
            refused=refused,
        )  # fmt: skip
        if positions is None:
            first = torch.tensor(cache.lengths or [0], device=ids.device)[:, None]
            positions = first + torch.arange(ids.shape[1], device=ids.device)
            positions = positions if len(set(cache.lengths)) > 1 else positions[0]
        if source is not None and cache.context is None and call["encoder_hidden"] is None:
            spread = Spread(context.order, source.shape[1], context.ranks.size)
            call["encoder_hidden"] = model.encode(
                spread.taken(source, context.ranks.rank, 1), mask=call["encoder_mask"],
                kernel=kernel,
            )  # fmt: skip
            call["encoder_ids"] = None
        self._check_encoded(call["encoder_hidden"])
        for module in context.latents.get("tokens", ()):
            module.preferred = "absorbed"  # what the cache holds
        made: Tensor = type(model).hidden_states(
            model, ids, positions=positions, mask=mask, cache=cache, kernel=kernel, **call
        )
        return made


@dataclass(eq=False)
class _NewCache:
    """``Transformer.new_cache`` whose layers are spread."""

    model: Transformer
    context: Context

    def __call__(
        self,
        capacity: int = 0,
        *,
        kind: Kind = "auto",
        page_size: int = 16,
        quantized: Quantized | None = None,
        spare: int = 0,
    ) -> ModelCache:
        model, context = self.model, self.context
        ranks = context.ranks
        cache = type(model).new_cache(
            model, -(-capacity // ranks.size), kind=kind, page_size=page_size,
            quantized=quantized, spare=spare,
        )  # fmt: skip
        cache.layers = tuple(SpreadCache(each, ranks) for each in cache.layers)
        cache.cross = tuple(CrossCache(each, ranks, context.spreads) for each in cache.cross)
        return cache


@dataclass(eq=False)
class _Encode:
    """``Transformer.encode`` of a slice of the tokens."""

    model: Transformer
    context: Context

    def __call__(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        mask: Mask | None = None,
        kernel: str = "auto",
    ) -> Tensor:
        model = self.model
        if model.encoder_layers:
            config, own = model.config, model.config.encoder
            sizes = (
                own.vocab_size or config.vocab_size,
                own.max_positions or config.max_positions,
            )
            positions = self.context.place("encoder", ids, positions, sizes, mask, kernel=kernel)
        return type(model).encode(
            model, ids, positions=positions, segments=segments, mask=mask, kernel=kernel
        )


def spread_tokens(model: Transformer, context: Context) -> None:
    """From now on ``model`` reads a slice of the tokens on each rank of the context."""
    model.hidden_states = _HiddenStates(model, context)  # type: ignore[method-assign]
    model.encode = _Encode(model, context)  # type: ignore[method-assign]
    model.new_cache = _NewCache(model, context)  # type: ignore[method-assign]
