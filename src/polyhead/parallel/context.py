"""A Transformer whose tokens lie on the ranks of ``context``.

``hidden_states`` and ``encode`` learn first how many tokens each rank has, and so which positions
this one's stand at; each attention then gets the positions of its queries and keys from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyhead.errors import ContextLengthError
from polyhead.kernels.dispatch import run
from polyhead.layers import MultiHeadLatentAttention
from polyhead.layers.hooks import Hooked
from polyhead.models import Transformer
from polyhead.models.inputs import check_ids, check_positions
from polyhead.parallel.attention import Meaning, attend, check_kernel, explicit_positions
from polyhead.parallel.cache import HeldByRanks
from polyhead.parallel.calls import NAMES, call_signature, check_alike
from polyhead.parallel.collectives import copy_to_ranks
from polyhead.parallel.exchanges import Exchange
from polyhead.parallel.latents import Unexpanded
from polyhead.parallel.order import Order, Spread
from polyhead.parallel.ranks import (
    Check,
    Ranks,
    agreed,
    check_same,
    check_spread,
    unsupported,
)
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
        tensor: Those of ``tensor``, which hold the same tokens, or None.
        spreads: How the tokens that a stack of layers reads are spread, by its name.
        latents: The latent attentions of a stack.
    """

    ranks: Ranks
    exchange: Exchange
    order: Order
    tensor: Ranks | None = None
    spreads: dict[str, Spread] = field(default_factory=dict)
    latents: dict[str, list[MultiHeadLatentAttention]] = field(default_factory=dict)

    @property
    def dimensions(self) -> list[Ranks]:
        """Whose ranks agree on calls: those first that make the same ones."""
        return [self.ranks] if self.tensor is None else [self.tensor, self.ranks]

    @property
    def _alike(self) -> list[tuple[Ranks, Check]]:
        """The dimension over which all calls are the same."""
        return [] if self.tensor is None else [(self.tensor, partial(check_alike, self.tensor))]

    def place(
        self,
        stack: str,
        module: nn.Module,
        ids: Tensor,
        positions: Tensor | None,
        sizes: tuple[int, int],
        *call_fields: object,
        kernel: str,
        refused: Exception | None = None,
    ) -> Tensor:
        """Learns where the tokens of all ranks stand; the positions of this rank's.

        Args:
            stack: Whose tokens these are.
            module: Model to parallelize.
            ids: Ids of this rank.
            positions: Positions of this rank's tokens; None: their places.
            sizes: Sizes of the vocabulary and of the model's context.
            *call_fields: What must be the same on all ranks.
            kernel: ``"auto"`` or a kernel's name.
            refused: What this rank will not do.

        Raises:
            RankError: A rank makes another call, or holds other tokens than its order gives it.
        """
        facts = [0] * len(NAMES)
        try:
            _check(ids, positions, sizes, kernel)
            facts = call_signature(module, ids, positions, stack, kernel, *call_fields)
        except Exception as error:  # whatever it is, other ranks must not wait
            refused = refused or error
        device = ids.device if isinstance(ids, Tensor) else None
        return self.settle(stack, facts, refused, positions, device, sizes[1])

    def settle(
        self,
        stack: str,
        facts: Sequence[int],
        refused: Exception | None,
        positions: Tensor | None,
        device: torch.device | None,
        most: int | None,
    ) -> Tensor:
        """As ``place``, of facts about the call and at most so many tokens."""
        found: list[Sequence[int]] = []

        def check(facts: Sequence[Sequence[int]]) -> None:
            found.extend(zip(*facts, strict=True))
            check_same(self.ranks, "B, the batch rows of ids,", found[0])
            check_same(self.ranks, "the call (mask, kernel, positions)", found[2])
            check_same(self.ranks, NAMES[5][0], found[5])

        what = "a call on 'context'"
        agreed([*self._alike, (self.ranks, check)], what, facts, refused)
        rows, lengths = found[:2]
        if positions is None and most is not None and sum(lengths) > most:
            raise ContextLengthError(
                f"the model's context is {most} tokens: got {sum(lengths)} on all ranks"
            )
        spread = Spread(self.order, sum(lengths), self.ranks.size)
        wanted = [spread.length(rank) for rank in range(self.ranks.size)]
        check_spread(self.ranks, "ids", lengths, wanted)
        if positions is None:
            positions = spread.indexes(self.ranks.rank, device)
        else:
            spread = explicit_positions(self.ranks, spread, positions)
        self.spreads[stack] = spread
        for module in self.latents.get(stack, ()):  # by numbers that all ranks know
            module.preferred = module.config.choose(rows[0], spread.longest, spread.total)
        return positions


def _check(ids: Tensor, positions: Tensor | None, sizes: tuple[int, int], kernel: str) -> None:
    """Raises for what no rank computes."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
        got = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"ids must be [B, T] with at least one token on every rank: got {got}")
    if isinstance(positions, Tensor) and positions.shape[-1:] != ids.shape[1:]:
        raise ValueError(
            f"positions must be of the {ids.shape[1]} tokens of this rank: got "
            f"{list(positions.shape)}"
        )
    check_kernel(kernel)
    check_ids("ids", ids, sizes[0])
    if positions is not None:
        check_positions(positions, 0, ids, sizes[1])


@dataclass(eq=False)
class LayerAttention:
    """Computes a layer's heads if heads or tokens are spread over ranks.

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
                whole = [copy_to_ranks(x, self.tensor) for x in bias.tensors]
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
                install_one(module, LayerAttention(heads.get(module), tensor, context, stack, keys))


def install_one(module: Any, computed: LayerAttention) -> None:
    """Gives an attention its ``LayerAttention``."""
    module._computed, context = computed, computed.context
    if context is not None and isinstance(module, MultiHeadLatentAttention):
        module._expanded = Unexpanded(module)  # type: ignore[method-assign]
        context.latents.setdefault(computed.queries, []).append(module)


def check_context(model: Transformer) -> None:
    """Raises for a model that needs more than a slice of the tokens.

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
    if config.embedding.reads_lengths:
        raise unsupported(
            "an embedding that reads a token's neighbours, or token_dropout, on the dimension "
            "'context'"
        )
    for layer in (*config.layers, *config.encoder_layers):
        check_parts(layer.attention, layer.feed_forward)


_ROPE_TYPES = "default", "linear", "llama3", "yarn", "explicit"
"""Types of rotary positions whose frequencies are the same in every call."""


def check_parts(attention: Any, network: Any) -> None:
    """Raises for configurations of an attention and a network that need all tokens at once.

    Raises:
        UnsupportedError: Names what.
    """
    rope = getattr(attention, "rope", None)
    if rope is not None and rope.type not in _ROPE_TYPES:
        raise unsupported(
            f"rope type {rope.type!r} on the dimension 'context': its frequencies follow the "
            "greatest position of the call"
        )
    if getattr(network, "capacity", None) is not None:
        raise unsupported("experts with a capacity per sequence on the dimension 'context'")
