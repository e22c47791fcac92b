"""A mixer with states that also reads what a block of attention and network makes.

    n   = norm([x | e])                    e what the embedding gave
    b   = network(norm(attention(n)))      scores of [x | e], the output of x's size
    out = mixer(norm(x + b Wb))

The block is no part of the residual stream and has no residual paths inside. Several layers may
share its weights; a layer's own are the mixer, W_b, and low-rank adapters beside projections of
the block, n Wq + (n A) B. Zamba (Glorioso et al. 2024, arXiv 2405.16712) and Zamba 2 (arXiv
2411.15242).

Shape letters: B batch, T tokens, E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyhead.config import AttentionConfig, SharedBlockConfig
from polyhead.config.layout import EMBEDDED
from polyhead.errors import UnsupportedError
from polyhead.layers import fused
from polyhead.layers.attention import Context, MultiHeadAttention
from polyhead.layers.attention_parts import check_input, check_layer_cache, ragged_positions
from polyhead.layers.feed_forward import FeedForward
from polyhead.layers.handed import Handed, handed_to
from polyhead.layers.linear import linear
from polyhead.layers.norms import build_norm
from polyhead.layers.recurrent import RecurrentLayer, real_tokens
from polyhead.layers.registry import build_attention, register_builder
from polyhead.semantics import Bias, DenseSource, Mask


class SharedBlock(MultiHeadAttention):
    """``MultiHeadAttention`` in a block before a mixer, made from its data; built by a model alone.

    A cache of it is a ``LayerCache`` of the layout's memories.

    Attributes:
        block_norm: Over ``[x | e]``.
        q_proj, k_proj, v_proj: ``[.., 2 E]``.
        feed_forward_norm, feed_forward: The block's network.
        adapters: By name, ``[rank, in]`` and ``[out, rank]``, the layer's own.
        out_proj: ``[E, E]`` W_b.
        mixer_norm, mixer: What the layer is with or without a block.
    """

    config_class: ClassVar[type[AttentionConfig]] = SharedBlockConfig
    config: SharedBlockConfig

    def _add_modules(self) -> None:
        c, E = self.config, self.embed_dim
        read = c.input_vectors * E
        self.block_norm, self.feed_forward_norm, self.mixer_norm = (
            build_norm(size, c.norm) for size in (read, E, E)
        )
        self.feed_forward = FeedForward.from_config(E, c.network)
        self.out_proj = nn.Linear(E, E, bias=False)
        self.mixer: RecurrentLayer = build_attention(E, c.mixer)  # type: ignore[assignment]
        sizes: dict[str, tuple[int, int]] = {}
        if c.head_adapters:
            sizes |= {f"{n}_proj": (read, s) for n, s in zip("qkv", c.projected, strict=True)}
        if c.adapter_rank is not None:
            sizes["feed_forward"] = E, 2 * c.network.hidden_dim
        self.adapters = nn.ModuleDict()
        rank = c.adapter_rank or 0
        for name, (into, out) in sizes.items():
            down, up = nn.Linear(into, rank, bias=False), nn.Linear(rank, out, bias=False)
            self.adapters[name] = nn.ModuleDict({"down": down, "up": up})

    def forward(
        self,
        x: Tensor,
        context: Context | None = None,
        *more: Tensor,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        cache: Any = None,
        kernel: str = "auto",
        handed: Handed | None = None,
        **unknown: Any,
    ) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``, as ``MultiHeadAttention`` and the mixer say.

        Args:
            x: ``[B, T, E]``, not normed.
            context: None: a state belongs to one sequence.
            *more: Refused.
            mask: ``Causal()``, also ``& KeyLengths(n)`` without a cache.
            bias: Added to the scores.
            positions: ``[T]`` or ``[B, T]``; below 0 is padding.
            context_positions: None.
            cache: A ``LayerCache`` of the memories of this layout.
            kernel: ``"auto"``, or the name of a kernel of ``attention``.
            handed: With what the embedding gave, ``[B, T, E]``.
            **unknown: Refused.

        Raises:
            ValueError: Shapes that do not fit, no causal mask, or a call outside a model.
            UnsupportedError: A context, or a mask that a state cannot respect.
            TypeError: A cache of another kind.
        """
        if context is not None or context_positions is not None or more or unknown:
            given = "a context" if context is not None else ", ".join(unknown) or "more tensors"
            raise UnsupportedError(f"a layer with a state takes x, mask and cache: got {given}")
        check_input(x, self.embed_dim)
        embedded = handed_to(handed, EMBEDDED, self.config.reads)
        calls = mask, bias, positions, kernel
        if cache is None:
            entered = self._entered(x, self._read_heads(x, embedded, *calls, 0, None))
            out: Tensor = self.mixer(entered, mask=mask, positions=positions)
            return out
        held = check_layer_cache(cache)
        if positions is None:
            positions = ragged_positions(held, x)
        real_tokens(mask, x, positions, cached=True)
        with held.step(x, positions) as step:
            heads = self._read_heads(x, embedded, *calls, held.length, step)
            entered = step.pack(self._entered(x, heads))
            return step.unpack(self.mixer._run(entered, step.real, "auto", step))

    def _read_heads(
        self,
        x: Tensor,
        embedded: Tensor,
        mask: Mask | None,
        bias: Bias | Tensor | None,
        positions: Tensor | None,
        kernel: str,
        start: int,
        step: Any,
    ) -> Tensor:
        """What the heads give, whose queries, keys and values are forgotten by then."""
        read = self.block_norm(torch.cat((x, embedded), dim=-1))
        q, k, v = self._project(read, start if positions is None else positions)
        source = DenseSource(k, v, positions) if step is None else step.append("kv", k, v)
        return self._answered(x, q, source, mask, bias, positions, kernel)

    def _project(self, x: Tensor, positions: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.config.head_adapters:
            return super()._project(x, positions)
        projected = fused.linears(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            each + self._adapted(x, f"{name}_proj")
            for name, each in zip("qkv", projected, strict=True)
        )
        return (
            self._queries(q, positions),
            self._placed(k, self.num_kv_heads, "k_norm", positions),
            self._values(v),
        )

    def _entered(self, x: Tensor, heads: Tensor) -> Tensor:
        """What the mixer reads: the stream and the block's result, normed."""
        read, network = self.feed_forward_norm(heads), self.feed_forward
        gate: nn.Module | None = network._modules["gate_proj"]
        if self.config.adapter_rank is None:
            made = network(read)
        else:
            changes = self._adapted(read, "feed_forward").chunk(2, dim=-1)
            gates = network._activated(linear(read, gate) + changes[0])
            values = network._clamped(linear(read, network.up_proj) + changes[1])
            del changes
            made = linear(gates * values, network.down_proj)
        entered: Tensor = self.mixer_norm(x + linear(made, self.out_proj))
        return entered

    def _adapted(self, x: Tensor, name: str) -> Tensor:
        """What an adapter adds to a projection of x."""
        pair: Any = self.adapters[name]
        return linear(linear(x, pair["down"]), pair["up"])


register_builder(SharedBlockConfig, SharedBlock.from_config)
