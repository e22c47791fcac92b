"""Multi-head attention as a layer: MHA, GQA and MQA; self- and cross-attention; cached or not.

    head_h = Attention(x Wq_h, c Wk_g, c Wv_g), g = h // (H / G)        c = x, or a context
    out    = concat(head_1 … head_H) Wo

Vaswani et al. 2017, §3.2.2; Shazeer 2019 (MQA); Ainslie et al. 2023 (GQA).

Shape letters: B batch, H query heads, G kv heads, T queries, S keys, D head size, V value size,
E embed size.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

from torch import Tensor, nn

from polyhead._utils.checks import check_bool
from polyhead.caches import EvictingCache, KeyValueCache
from polyhead.config import AttentionConfig, QKNormConfig, RopeConfig
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers import fused
from polyhead.layers.attention_parts import (
    alibi_of,
    check_cache,
    check_coordinates,
    check_input,
    default_head_dim,
    ragged_positions,
)
from polyhead.layers.handed import Handed
from polyhead.layers.head_projections import HeadProjections
from polyhead.layers.hooks import Hooked
from polyhead.layers.linear import linear
from polyhead.layers.positions import RoPE
from polyhead.layers.registry import register_builder
from polyhead.semantics import Bias, Causal, Chunk, DenseSource, KeyValueSource, Mask, Window
from polyhead.semantics.argument_hints import other_names, refuse
from polyhead.semantics.arguments import AttentionOptions

Context = Tensor | tuple[Tensor, Tensor]


class MultiHeadAttention(HeadProjections):
    """Projects to queries, keys and values, attends, projects back.

    ``from_config`` has more options than this constructor: separate biases, ``scale``, ``sinks``,
    ``v_head_dim``.

    Args:
        embed_dim: E, features of ``x`` and of the output.
        num_heads: H, query heads.
        num_kv_heads: G, a divisor of H; default H (MHA), 1 is MQA.
        head_dim: D; default embed_dim / num_heads.
        kdim: Features that keys are made from; default embed_dim.
        vdim: Features that values are made from; default embed_dim.
        bias: Biases on all four projections; default True, as in torch.
        rope: Rotary positions for queries and keys.
        qk_norm: Normalized queries and keys.
        window: Keys that a query sees under a causal mask, itself included; None: all.
        softcap: c in c · tanh(score / c); None is off.
        dropout: Dropout probability of the attention weights, when training.

    Attributes:
        config: Everything above as data; it cannot be assigned, nor can the sizes.
        scale, softcap, dropout, rope: As the next call takes them; they may be assigned.
        q_proj, k_proj, v_proj, o_proj: The projections.
        q_norm, k_norm: With ``qk_norm``.
        v_norm: With ``config.v_norm``.
        sinks: ``[H]`` learned scores that join the denominator only, or None.

    Raises:
        ConfigError: Sizes or numbers that do not go together.
    """

    config_class: ClassVar[type[AttentionConfig]] = AttentionConfig

    @other_names
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        rope: RoPE | RopeConfig | None = None,
        qk_norm: QKNormConfig | None = None,
        window: int | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_bool("bias", bias, error=ConfigError)
        config = self.config_class(
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=default_head_dim(embed_dim, num_heads) if head_dim is None else head_dim,
            qkv_bias=bias,
            out_bias=bias,
            rope=rope.config if isinstance(rope, RoPE) else rope,
            qk_norm=qk_norm,
            window=window,
            softcap=softcap,
            dropout=dropout,
        )
        self._build(embed_dim, config, kdim, vdim, rope if isinstance(rope, RoPE) else None)

    @classmethod
    def from_config(
        cls,
        embed_dim: int,
        config: AttentionConfig,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        rope: RoPE | None = None,
    ) -> Self:
        """The layer that ``config`` describes.

        Args:
            embed_dim: Embedding size E of the residual stream.
            config: Heads, biases, positions, masks.
            kdim: Features that keys are made from; default embed_dim.
            vdim: Features that values are made from; default embed_dim.
            rope: Rotary positions built from ``config.rope`` already, to share their tables.

        Raises:
            ConfigError: Numbers that do not go together, or a ``rope`` of another configuration.
        """
        layer = cls.__new__(cls)
        Hooked.__init__(layer)
        layer._build(embed_dim, config, kdim, vdim, rope)
        return layer

    def _build(
        self,
        embed_dim: int,
        config: AttentionConfig,
        kdim: int | None,
        vdim: int | None,
        rope: RoPE | None,
    ) -> None:
        super()._build(embed_dim, config, kdim, vdim, rope)
        self._window: Mask | None = None
        if config.window is not None:
            self._window = Window(config.window, config.window_ahead)
        elif config.chunk is not None:
            self._window = Chunk(config.chunk, config.chunks_before)
        self._causal_window = None if self._window is None else Causal() & self._window
        self._alibi = None if config.alibi is None else alibi_of(self.num_heads, config.alibi)
        self._add_modules()

    def _add_modules(self) -> None:
        """Makes the parameters that only a subclass has, after all others."""

    def reset_parameters(self) -> None:
        """Sets the sinks to 0, as at first. Projections and norms stay."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        x: Tensor,
        context: Context | None = None,
        *more: Tensor,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        context_positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        kernel: str = "auto",
        handed: Handed | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Self-attention of ``x``, or its cross-attention to ``context``.

        With a cache, self-attention appends the keys and values of ``x`` and attends to all that
        are held. Cross-attention fills an empty cache from ``context`` and afterwards reads the
        cache alone: for another context, reset it. A filled cache of B rows serves a batch of
        B · K: rows b · K to b · K + K − 1 share row b (the beams of a sentence).

        Args:
            x: ``[B, T, E]``.
            context: ``[B, S, kdim]``, or a pair of it and ``[B, S, vdim]``; None: self-attention.
            *more: Refused: torch's query, key and value are ``x`` and ``(key, value)`` here. The
                old ONNX exporter (``dynamo=False``) gives all arguments by position.
            mask: Who may look at whom; None: everything is visible. The window is added to it.
            bias: Added to the scores: ``ALiBi``, ``RelativeBias`` or ``[B, H, T, S]``.
            positions: ``[T]`` or ``[B, T]`` of ``x``; default: they follow on from the cache, and
                in cross-attention they are 0 … T − 1. Or ``[C, B, T]`` of C coordinates, for a rope
                with ``sections``: they rotate queries and keys, while masks, biases, windows and
                the cache go by the order of the tokens, as without positions. Later calls with
                the cache then need positions too: a token behind a picture follows on from the
                greatest coordinate, not from the number of tokens.
            context_positions: ``[S]`` or ``[B, S]`` of ``context``; default 0 … S − 1.
            cache: What is remembered from earlier calls.
            kernel: ``"auto"`` or the name of a kernel.
            handed: What layers of the same call of a model hand on, where the configuration says
                that this one does or reads it.
            **unknown: Refused; the error says what polyhead calls an argument of torch's.

        Returns:
            ``[B, T, E]`` in the dtype of ``x``.

        Raises:
            ValueError: Shapes that do not fit, named.
            TypeError: An argument of another kind, such as the class of a cache.
        """
        if more:
            raise TypeError(
                f"{type(self).__name__} takes x and a context by position, all else by name: got "
                f"{2 + len(more)} arguments; torch's (query, key, value) is (query, (key, value)), "
                "self-attention takes x alone"
            )
        if unknown:
            refuse(type(self).__name__, unknown)
        if cache is not None:
            self._check_cache(cache)
        check_input(x, self.embed_dim)
        if context is not None and cache is not None and 0 < len(cache.lengths) < x.shape[0]:
            if x.shape[0] % len(cache.lengths) or bias is not None or positions is not None:
                raise ValueError(
                    f"rows that share a context are a multiple of its {len(cache.lengths)}, "
                    f"without bias and positions: got {x.shape[0]} rows"
                )
            folded = x.reshape(len(cache.lengths), -1, self.embed_dim)
            # Not ``self(...)``: hooks, and what ranks share, are about the whole call.
            y = type(self).forward(self, folded, context, mask=mask, cache=cache, kernel=kernel)
            return y.reshape(x.shape)
        coordinates = None
        if isinstance(positions, Tensor) and positions.ndim == 3:
            if context is not None:
                raise ValueError("cross-attention takes no coordinates: got positions [C, B, T]")
            check_coordinates(self.config, positions, x.shape[0], x.shape[1], cache)
            coordinates, positions = positions, None
        if context is None:
            if context_positions is not None:
                raise ValueError("context_positions need a context: got none")
            if positions is None and cache is not None:
                positions = ragged_positions(cache, x)
            if coordinates is None:
                q, source, own = self._self_attention(x, positions, cache, handed)
            else:
                own = None
                q, source = self._rotated_at(x, coordinates, positions, cache, handed)
            if isinstance(own, Bias):
                bias = own
            elif own is not None:
                mask = own if mask is None else mask & own
            if handed is not None and self.config.hands_on_keys:
                handed.hand_on("keys", source)
        else:
            q, source = self._cross_attention(x, context, positions, context_positions, cache)
        return self._answered(x, q, source, mask, bias, positions, kernel)

    def _answered(
        self,
        x: Tensor,
        q: Tensor,
        source: KeyValueSource,
        mask: Mask | None,
        bias: Bias | Tensor | None,
        positions: Tensor | None,
        kernel: str,
    ) -> Tensor:
        """``[B, T, E]`` what queries make of a source; the rest is as in ``forward``."""
        if self._window is not None:
            mask = self._with_window(mask)
        if self._alibi is not None:
            if bias is not None:
                raise ValueError("this layer has a bias of its own (alibi): got another")
            bias = self._alibi
        options: AttentionOptions = {
            "mask": mask,
            "bias": bias,
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": self._parameters["sinks"],
            "q_positions": positions,
            "dropout_p": self.dropout if self.training else 0.0,
            "kernel": kernel,
        }
        heads = self._attend(q, source, **self._with_own(q, options))
        heads = self._edited(self._finished(x, heads))  # those before need not outlive this line
        return self._output(x, heads)

    def _with_own(self, q: Tensor, options: AttentionOptions) -> AttentionOptions:
        """The options of ``attention``, to which other layouts add here."""
        return options

    def _output(self, x: Tensor, heads: Tensor) -> Tensor:
        """``[B, T, E]`` what the output projection makes of the heads' outputs ``[B, H, T, V]``."""
        B, _, T, _ = heads.shape
        joined = heads.transpose(1, 2).reshape(B, T, -1)
        return linear(joined, self._modules["o_proj"])

    def _check_cache(self, cache: Any) -> None:
        """Raises TypeError unless ``cache`` is one that this layer can use."""
        check_cache(cache, self.config)

    def _finished(self, x: Tensor, heads: Tensor) -> Tensor:
        """The heads' outputs ``[B, H, T, V]`` before ``o_proj``; other layouts change them here."""
        return heads

    def _self_attention(
        self,
        x: Tensor,
        positions: Tensor | None,
        cache: KeyValueCache | None,
        handed: Handed | None,
    ) -> tuple[Tensor, KeyValueSource, Mask | Bias | None]:
        """Queries, the source that they read, and the keys of it that they choose, or a bias of
        the layer's own; None: all, as they are."""
        at: int | Tensor = 0 if cache is None else cache.length
        at = at if positions is None else positions
        return *self._rotated_at(x, at, positions, cache, handed), None

    def _rotated_at(
        self,
        x: Tensor,
        at: int | Tensor,
        positions: Tensor | None,
        cache: KeyValueCache | None,
        handed: Handed | None,
    ) -> tuple[Tensor, KeyValueSource]:
        """Queries and a source of tokens, rotated by ``at`` and ordered by ``positions``."""
        if self.kdim != self.embed_dim or self.vdim != self.embed_dim:
            raise ValueError(
                f"self-attention needs kdim and vdim equal to embed_dim={self.embed_dim}: got "
                f"kdim={self.kdim}, vdim={self.vdim}; pass a context"
            )
        if cache is not None and cache.rotates_late:
            return self._rotated_late(x, at, positions, cache)
        q, k, v = self._project(x, at)
        v = self._with_handed(v, handed)
        return q, DenseSource(k, v, positions) if cache is None else cache.append(k, v, positions)

    def _rotated_late(
        self, x: Tensor, at: int | Tensor, positions: Tensor | None, cache: KeyValueCache
    ) -> tuple[Tensor, KeyValueSource]:
        """Queries and a source, both rotated by places in the cache (``StreamingLLM``)."""
        q, k, v = self._project_apart(x, cache.places(at), None)
        source = cache.append(k, v, positions)
        rope = self.rope
        if rope is None:
            return q, source
        where = cache.places(source.tokens.position_tensor(x.device))
        return q, DenseSource.remade(source, lambda k, v: (rope.apply(k, where), v))

    def _with_handed(self, v: Tensor, handed: Handed | None) -> Tensor:
        """The values ``[B, G, T, V]`` that are attended to and remembered."""
        return v

    def _cross_attention(
        self,
        x: Tensor,
        context: Context,
        positions: Tensor | None,
        context_positions: Tensor | None,
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, KeyValueSource]:
        q = self._queries(linear(x, self.q_proj), 0 if positions is None else positions)
        at = 0 if context_positions is None else context_positions
        return q, self._context_source(context, len(x), at, context_positions, cache)

    def _context_source(
        self,
        context: Context,
        batch: int,
        rotated: int | Tensor | None,
        positions: Tensor | None,
        cache: KeyValueCache | None,
    ) -> KeyValueSource:
        """Keys and values of a context, of the call's or those that the cache holds.

        Args:
            context: As in ``forward``.
            batch: Rows of the call.
            rotated: By which positions keys are rotated; None: they are not.
            positions: Of the keys.
            cache: As in ``forward``.
        """
        if isinstance(cache, EvictingCache):
            raise UnsupportedError("an EvictingCache is for self-attention: got a context")
        for_k, for_v = context if isinstance(context, tuple) else (context, context)
        if cache is not None and cache.length:
            if for_k.shape[1] != cache.length:
                raise ValueError(
                    f"the cache holds a context of {cache.length} tokens: got one of "
                    f"{for_k.shape[1]}; reset the cache for another context"
                )
            return cache.source()
        for name, c, dim in (("kdim", for_k, self.kdim), ("vdim", for_v, self.vdim)):
            if c.ndim != 3 or c.shape[0] != batch or c.shape[2] != dim:
                raise ValueError(
                    f"context must be [B={batch}, S, {name}={dim}]: got {list(c.shape)}"
                )
        if self.config.values_from_keys:
            k = v = linear(for_k, self.k_proj)
        elif for_k is for_v:
            k, v = fused.linears(for_k, self.k_proj, self.v_proj)
        else:
            k, v = linear(for_k, self.k_proj), linear(for_v, self.v_proj)
        k = self._placed(k, self.num_kv_heads, "k_norm", rotated)
        v = self._values(v)
        return DenseSource(k, v, positions) if cache is None else cache.append(k, v, positions)

    def _with_window(self, mask: Mask | None) -> Mask | None:
        if type(mask) is Causal:
            return self._causal_window
        if mask is None or self._window is None:
            return self._window
        return self._window & mask

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}, heads={self.num_heads}/{self.num_kv_heads}×{self.head_dim}"]
        if self.rope is not None:
            parts.append(repr(self.rope))
        parts += [
            f"{name}={value}"
            for name in ("window", "softcap", "dropout")
            if (value := getattr(self.config, name))
        ]
        return ", ".join(parts)


register_builder(AttentionConfig, MultiHeadAttention.from_config)
