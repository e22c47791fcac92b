"""A Transformer's methods where each rank has a slice of the tokens, or of those remembered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.caches import Evicting, KeyValueCache, ModelCache, Quantized, SequenceCache
from polyhead.caches.choice import Kind
from polyhead.models import Transformer
from polyhead.models.inputs import check_ids
from polyhead.parallel.cache import CrossCache, SpreadCache
from polyhead.parallel.calls import Bound, agree_alike
from polyhead.parallel.context import Context
from polyhead.parallel.model_cache import RanksCache
from polyhead.parallel.order import Spread
from polyhead.parallel.ranks import refuse, tell_backward, unsupported
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
        refused: Exception | None = None
        if call.get("last") is not None:
            refuse(context.dimensions, unsupported("last= where tokens are spread over ranks"))
        if encoder_ids is not None and encoder_hidden is None:
            encoder_hidden = model.encode(encoder_ids, mask=encoder_mask, kernel=kernel)
        try:
            self._check_encoded(encoder_hidden)
            self._check_segments(ids, call.get("segments"))
        except Exception as error:  # whatever it is, other ranks must not wait
            refused = error
        sizes = model.config.vocab_size, model.config.max_positions
        given = [name for name, value in call.items() if value is not None]
        positions = context.place(
            "tokens", model, ids, positions, sizes, mask, encoder_mask, encoder_hidden is None,
            given, kernel=kernel, refused=refused,
        )  # fmt: skip
        made: Tensor = type(model).hidden_states(
            model, ids, positions=positions, mask=mask, encoder_hidden=encoder_hidden,
            encoder_mask=encoder_mask, kernel=kernel, **call,
        )  # fmt: skip
        return tell_backward(context.dimensions, made)

    def _check_encoded(self, encoder_hidden: Tensor | None) -> None:
        spread = self.context.spreads.get("encoder")
        if encoder_hidden is None:
            return
        mine = None if spread is None else spread.length(self.context.ranks.rank)
        if encoder_hidden.ndim != 3 or encoder_hidden.shape[1] != mine:
            raise unsupported(
                "encoder_hidden that the last encode of this model did not make: got "
                f"{list(encoder_hidden.shape)}, and this rank holds {mine or 0} of its tokens"
            )

    def _check_segments(self, ids: Tensor, segments: Tensor | None) -> None:
        embedding = self.model.config.embedding
        if segments is not None and embedding.num_segments:
            check_ids("segments", segments, embedding.num_segments)
            if segments.shape != ids.shape:
                raise ValueError(
                    f"segments must be [B, T] = {list(ids.shape)} as ids: got "
                    f"{list(segments.shape)}"
                )

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
        refused: Exception | None = None
        held: list[object] = []
        if isinstance(cache, RanksCache) and isinstance(cache.layers[0], SpreadCache):
            held = [cache.lengths, cache.history]
        else:
            refused = ValueError(
                "cache must be of this model's new_cache() after parallelize: it was not spread"
            )
        source, encoded = call["encoder_ids"], call["encoder_hidden"]
        try:
            self._check_encoded(encoded)
        except Exception as error:  # whatever it is, other ranks must not wait
            refused = error
        if isinstance(positions, Tensor) and positions.ndim == 3:
            refused = unsupported("positions of several coordinates where tokens are spread")
        whole = {name: value for name, value in call.items() if name != "encoder_hidden"}
        agree_alike(
            context.dimensions, "a call with a cache", model, ids, positions, kernel, mask,
            encoded is None, *held, *whole, *whole.values(), refused=refused,
        )  # fmt: skip
        if isinstance(cache, RanksCache):
            cache.note(ids, positions)
        if positions is None:
            first = torch.tensor(cache.lengths or [0], device=ids.device)[:, None]
            positions = first + torch.arange(ids.shape[1], device=ids.device)
            positions = positions if len(set(cache.lengths)) > 1 else positions[0]
        if source is not None and cache.context is None and encoded is None:
            spread = Spread(context.order, source.shape[1], context.ranks.size)
            call["encoder_hidden"] = model.encode(
                spread.taken(source, context.ranks.rank, 1), mask=call["encoder_mask"],
                kernel=kernel,
            )  # fmt: skip
            call["encoder_ids"] = None
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
        evicting: Evicting | None = None,
    ) -> ModelCache:
        if evicting is not None:
            raise unsupported("a cache that evicts keys: ranks hold different ones")
        model, context = self.model, self.context
        ranks = context.ranks
        cache = type(model).new_cache(
            model, -(-capacity // ranks.size), kind=kind, page_size=page_size,
            quantized=quantized, spare=spare,
        )  # fmt: skip
        return RanksCache(
            [SpreadCache(_of_tokens(each), ranks) for each in cache.layers],
            [CrossCache(each, ranks, context.spreads) for each in cache.cross],
            cache.owner, context.dimensions,
        )  # fmt: skip


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
        global_tokens: Tensor | None = None,
    ) -> Tensor:
        model = self.model
        if model.encoder_layers:
            config, own = model.config, model.config.encoder
            sizes = (
                own.vocab_size or config.vocab_size,
                own.max_positions or config.max_positions,
            )
            positions = self.context.place(
                "encoder", model, ids, positions, sizes, mask, segments is None, kernel=kernel
            )
        made = type(model).encode(
            model, ids, positions=positions, segments=segments, mask=mask, kernel=kernel,
            global_tokens=global_tokens,
        )  # fmt: skip
        return tell_backward(self.context.dimensions, made) if model.encoder_layers else made


def _of_tokens(cache: SequenceCache) -> KeyValueCache:
    """A cache whose tokens can be spread over ranks."""
    if isinstance(cache, KeyValueCache):
        return cache
    raise unsupported(f"a {type(cache).__name__} on the dimension 'context'")


def spread_tokens(model: Transformer, context: Context) -> None:
    """From now on ``model`` reads a slice of the tokens on each rank of the context."""
    model.hidden_states = _HiddenStates(model, context)  # type: ignore[method-assign]
    model.encode = _Encode(model, context)  # type: ignore[method-assign]
    model.new_cache = _NewCache(model, context)  # type: ignore[method-assign]
    model.register_forward_pre_hook(Bound(context.dimensions), prepend=True, with_kwargs=True)
