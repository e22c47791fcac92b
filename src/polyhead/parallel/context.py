"""A Transformer whose tokens lie on the ranks of ``context``.

``hidden_states`` and ``encode`` learn first how many tokens each rank has, and so which positions
this one's stand at; each attention then asks here where its queries and keys stand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyhead.caches import ModelCache
from polyhead.errors import ContextLengthError, UnsupportedError
from polyhead.functional import run
from polyhead.layers import MultiHeadLatentAttention
from polyhead.layers.hooks import Hooked
from polyhead.models import Transformer
from polyhead.models.inputs import check_ids, check_positions
from polyhead.parallel.attention import Meaning, attend, check_kernel, explicit_positions
from polyhead.parallel.cache import HeldByRanks, SpreadCache
from polyhead.parallel.collectives import entered
from polyhead.parallel.exchanges import Exchange
from polyhead.parallel.latents import Unexpanded
from polyhead.parallel.order import Order, Spread
from polyhead.parallel.ranks import Ranks, check_same, check_spread, fingerprint, unsupported
from polyhead.semantics import Bias, KeyValueSource, Mask, add_sinks
from polyhead.semantics.arguments import call_of, dropout_seed
from polyhead.semantics.biases import TensorBias


@dataclass(eq=False)
class Context:
    """How tokens are spread, and where those of the current call stand.

    Attributes:
        ranks: Those of ``context``.
        exchange: How keys get to queries.
        order: Which rank holds which tokens.
        spreads: Of the tokens that a stack of layers reads, by its name.
        latents: The latent attentions of a stack.
    """

    ranks: Ranks
    exchange: Exchange
    order: Order
    spreads: dict[str, Spread] = field(default_factory=dict)
    latents: dict[str, list[MultiHeadLatentAttention]] = field(default_factory=dict)

    def place(
        self,
        stack: str,
        ids: Tensor,
        positions: Tensor | None,
        sizes: tuple[int, int],
        *told: object,
        kernel: str,
    ) -> Tensor:
        """Learns where the tokens of all ranks stand; the positions of this rank's.

        Args:
            stack: Whose tokens these are.
            ids: Of this rank.
            positions: Of this rank, or None: their places.
            sizes: Of the vocabulary and of the model's context.
            *told: What must be the same on all ranks.
            kernel: ``"auto"`` or a kernel's name.

        Raises:
            RankError: A rank makes another call, or holds other tokens than its order gives it.
        """
        refused = _refused(ids, positions, sizes, kernel)
        T = 0 if refused else ids.shape[1]
        B = 0 if refused else ids.shape[0]
        facts = [T, B, fingerprint(stack, positions is None, kernel, *told)]
        lengths, rows, calls = zip(*self.ranks.agree(facts, refused), strict=True)
        check_same(self.ranks, "B, the batch rows of ids,", rows)
        check_same(self.ranks, "the call (mask, kernel, positions)", calls)
        if positions is None and sum(lengths) > sizes[1]:
            raise ContextLengthError(
                f"the model's context is {sizes[1]} tokens: got {sum(lengths)} on all ranks"
            )
        spread = Spread(self.order, sum(lengths), self.ranks.size)
        wanted = [spread.length(rank) for rank in range(self.ranks.size)]
        check_spread(self.ranks, "ids", lengths, wanted)
        if positions is None:
            positions = spread.indexes(self.ranks.rank, ids.device)
        else:
            spread = explicit_positions(self.ranks, spread, positions)
        self.spreads[stack] = spread
        for module in self.latents.get(
            stack, ()
        ):  # by numbers that all ranks know: all choose alike
            module.preferred = module.config.choose(rows[0], spread.longest, spread.total)
        return positions


def _refused(
    ids: Tensor, positions: Tensor | None, sizes: tuple[int, int], kernel: str
) -> Exception | None:
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
        got = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        return ValueError(f"ids must be [B, T] with at least one token on every rank: got {got}")
    if positions is not None and positions.shape[-1] != ids.shape[1]:
        return ValueError(
            f"positions must be of the {ids.shape[1]} tokens of this rank: got "
            f"{list(positions.shape)}"
        )
    try:
        check_kernel(kernel)
        check_ids("ids", ids, sizes[0])
        if positions is not None:
            check_positions(positions, 0, ids, sizes[1])
    except (TypeError, ValueError, UnsupportedError) as error:
        return error
    return None


@dataclass(eq=False)
class LayerAttention:
    """What a layer computes its heads by, where heads or tokens are spread over ranks.

    Attributes:
        heads: Query heads of this rank and of all, where they are shared.
        tensor: The ranks that share heads.
        context: Where tokens stand, where they are spread.
        queries: The stack whose tokens the queries are.
        keys: The stack whose tokens the keys are.
    """

    heads: tuple[range, int] | None
    tensor: Ranks | None
    context: Context | None
    queries: str = "tokens"
    keys: str = "tokens"

    def __call__(
        self,
        q: Tensor,
        source: KeyValueSource | HeldByRanks,
        *,
        mask: Mask | None,
        bias: Bias | Tensor | None,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
        q_positions: Tensor | None,
        dropout_p: float,
        kernel: str,
    ) -> Tensor:
        if isinstance(bias, Tensor):
            bias = TensorBias(bias)
        share = None
        if self.heads is not None and self.tensor is not None:
            mine, count = self.heads
            share = mine.start, count
            mask = None if mask is None else mask.of_heads(mine)
            if bias is not None:
                whole = [entered(x, self.tensor) for x in bias.tensors]
                bias = bias.with_tensors(whole).of_heads(mine)
        if isinstance(source, HeldByRanks):
            state = source.attend(
                q, kernel, dropout_p, mask=mask, bias=bias, scale=scale, softcap=softcap,
                q_positions=q_positions,
            )  # fmt: skip
            return (state if sinks is None else add_sinks(state, sinks)).out
        seed = dropout_seed(q, dropout_p, None)
        if seed is not None:
            for ranks in (self.tensor, None if self.context is None else self.context.ranks):
                if ranks is not None:
                    dist.broadcast(seed, ranks.global_rank(0), group=ranks.group)
        if self.context is None:
            call = call_of(
                q, source, None, mask, bias, scale, softcap, sinks, q_positions, None,
                seed, dropout_p, False,
            )  # fmt: skip
            call.spec.heads = share
            state = run(call, kernel)
            return (state if sinks is None else add_sinks(state, sinks)).out
        return self._over_ranks(
            q, source, Meaning(mask, bias, scale, softcap, sinks, dropout_p, None, kernel, share),
            seed,
        )  # fmt: skip

    def _over_ranks(
        self, q: Tensor, source: KeyValueSource, meaning: Meaning, seed: Tensor | None
    ) -> Tensor:
        context = self.context
        assert context is not None
        spreads = context.spreads
        if self.queries not in spreads or self.keys not in spreads:
            raise unsupported("a layer alone: call the model, which tells ranks apart")
        queries, keys = spreads[self.queries], spreads[self.keys]
        if queries is not keys:
            queries = Spread(
                queries.order, queries.total, queries.ranks, queries.positions,
                keys.total - queries.total,
            )  # fmt: skip
        spec = meaning.spec(q.shape[-1])
        spec.seed = seed
        state = attend(
            context.ranks, context.exchange, spec, queries, keys, q, source, meaning.kernel,
            meaning.sinks, meaning.sinks is not None,
        )  # fmt: skip
        return state.out


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
        if cache is not None:
            return self._decoded(ids, positions, mask, cache, kernel, call)
        if call.get("last") is not None:
            raise unsupported("last= where tokens are spread over ranks")
        if encoder_ids is not None and encoder_hidden is None:
            encoder_hidden = model.encode(encoder_ids, mask=encoder_mask, kernel=kernel)
        elif encoder_hidden is not None and "encoder" not in context.spreads:
            raise unsupported("encoder_hidden that this model's encode did not make")
        sizes = model.config.vocab_size, model.config.max_positions
        positions = context.place(
            "tokens", ids, positions, sizes, mask, encoder_mask, kernel=kernel
        )
        made: Tensor = type(model).hidden_states(
            model, ids, positions=positions, mask=mask, encoder_hidden=encoder_hidden,
            encoder_mask=encoder_mask, kernel=kernel, **call,
        )  # fmt: skip
        return made

    def _decoded(
        self,
        ids: Tensor,
        positions: Tensor | None,
        mask: Mask | None,
        cache: ModelCache,
        kernel: str,
        call: dict[str, Any],
    ) -> Tensor:
        """The same tokens on all ranks, their keys spread."""
        if not all(isinstance(each, SpreadCache) for each in cache.layers):
            raise ValueError(
                "cache must be of this model's new_cache() after parallelize: it was not spread"
            )
        if positions is None:
            positions = torch.arange(cache.length, cache.length + ids.shape[1], device=ids.device)
        for module in self.context.latents.get("tokens", ()):
            module.preferred = "absorbed"  # what the cache holds
        model = self.model
        made: Tensor = type(model).hidden_states(
            model, ids, positions=positions, mask=mask, cache=cache, kernel=kernel, **call
        )
        return made


@dataclass(eq=False)
class _NewCache:
    """``Transformer.new_cache`` whose layers are spread."""

    model: Transformer
    context: Context

    def __call__(self, capacity: int = 0, **options: Any) -> ModelCache:
        model, ranks = self.model, self.context.ranks
        if model.encoder_layers:
            raise unsupported("a cache of an encoder-decoder that is spread over ranks")
        cache = type(model).new_cache(model, -(-capacity // ranks.size), **options)
        cache.layers = tuple(SpreadCache(each, ranks) for each in cache.layers)
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


def install(
    model: Transformer, tensor: Ranks | None, heads: dict[Hooked, tuple[range, int]],
    context: Context | None,
) -> None:  # fmt: skip
    """Gives every attention of a model its ``LayerAttention``."""
    for stack, layers in (("tokens", model.layers), ("encoder", model.encoder_layers)):
        for layer in layers:
            for name, keys in (("attention", stack), ("cross_attention", "encoder")):
                module = getattr(layer, name)
                if module is None:
                    continue
                module._computed = LayerAttention(heads.get(module), tensor, context, stack, keys)
                if context is not None and isinstance(module, MultiHeadLatentAttention):
                    module._expanded = Unexpanded(module)  # type: ignore[method-assign]
                    context.latents.setdefault(stack, []).append(module)


def check_context(model: Transformer) -> None:
    """Raises for what a model reads that a slice of the tokens does not tell.

    Raises:
        UnsupportedError: Names it.
    """
    config = model.config
    frontends = [config.embedding.frontend]
    if config.encoder.embedding is not None:
        frontends.append(config.encoder.embedding.frontend)
    if any(each is not None for each in frontends):
        raise unsupported("patches or sound on the dimension 'context'")
    if config.task is not None and config.task.pooling is not None:
        raise unsupported("pooled states on the dimension 'context'")
    for layer in (*config.layers, *config.encoder_layers):
        rope = layer.attention.rope
        if rope is not None and rope.type in ("dynamic", "longrope"):
            raise unsupported(
                f"rope type {rope.type!r} on the dimension 'context': its frequencies follow the "
                "greatest position of the call"
            )
        if getattr(layer.feed_forward, "capacity", None) is not None:
            raise unsupported("experts with a capacity per sequence on the dimension 'context'")


def same_on_all(ranks: Ranks, config: str, parameters: int) -> None:
    """Raises on every rank where one was given another model.

    Raises:
        RankError: Names the rank.
    """
    configs, counts = zip(*ranks.agree([fingerprint(config), parameters]), strict=True)
    check_same(ranks, "the model's configuration", configs)
    check_same(ranks, "the number of parameters", counts)
