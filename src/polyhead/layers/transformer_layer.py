"""One Transformer layer: attention and a feed-forward network, each beside a residual path.

    pre        x + f(norm(x))               GPT-2, Llama
    post       norm(x + f(x))               Vaswani et al. 2017, BERT
    sandwich   x + norm(f(norm(x)))         Gemma 2 and 3
    after      x + norm(f(x))               OLMo 2
    parallel   x + a(norm(x)) + f(norm(x))  GPT-J, and with a norm for each GPT-NeoX

with f the self-attention, then (in an encoder-decoder) the attention to the encoder's output, then
the feed-forward network. With several residual streams x is read from them before the layer, or
before each f, and what is made is written back (``streams.py``).

Shape letters: B batch, T tokens, S tokens of the context, E embed size.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from polyhead._utils.checks import check_bool, check_probability
from polyhead.caches import KeyValueCache
from polyhead.caches.layer_cache import Packing
from polyhead.config import AttentionConfig, FeedForwardConfig, LayerConfig, NormConfig, RopeConfig
from polyhead.config.feed_forward import Activation
from polyhead.errors import ConfigError, UnsupportedError
from polyhead.layers.adapter import Adapter
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.attention_parts import default_head_dim
from polyhead.layers.causal_convolution import CausalConvolution, convolved_call
from polyhead.layers.convolution import Convolution
from polyhead.layers.decode_plan import LayerArgs, step
from polyhead.layers.exact import ExactType
from polyhead.layers.fixed import Fixed
from polyhead.layers.fused import dropped
from polyhead.layers.handed import SHORTCUT, Handed, given_by_layer_before
from polyhead.layers.laurel import Laurel
from polyhead.layers.native_layer import ATTENTION, CROSS_ATTENTION, LAYER_TYPES, NETWORK
from polyhead.layers.norm_gate import NormGate
from polyhead.layers.norms import build_norm
from polyhead.layers.per_layer import PerLayerInput
from polyhead.layers.positions import RoPE
from polyhead.layers.recurrent import real_tokens
from polyhead.layers.registry import build_attention, build_network
from polyhead.layers.streams import StreamMixer, WholeStreams, build_mixer
from polyhead.semantics import Bias, Mask
from polyhead.semantics.argument_hints import other_names, refuse


class TransformerLayer(Fixed):
    """Attention and feed-forward with norms and residuals; ``from_config`` has all options.

    Args:
        embed_dim: Embedding size E of the residual stream.
        num_heads: Number of query heads H.
        hidden_dim: Hidden features of the feed-forward network; default 4 · embed_dim.
        num_kv_heads: Key/value heads; default num_heads.
        activation: Activation of the feed-forward network.
        gated: Whether that network is gated (SwiGLU, GeGLU).
        norm: ``"layernorm"`` or ``"rmsnorm"``, or a ``NormConfig``.
        norm_placement: ``"pre"``, ``"post"``, ``"sandwich"`` or ``"after"``.
        rope: Rotary positions of the self-attention.
        cross_attention: Whether there is attention to a context.
        bias: Biases on all projections.
        dropout: On attention weights, hidden features and what joins the residual, when training.

    Raises:
        ConfigError: Sizes or numbers that do not go together.
    """

    feed_forward: nn.Module | None
    attention_norm: nn.Module
    cross_attention_norm: nn.Module
    feed_forward_norm: nn.Module
    attention_convolution: CausalConvolution
    feed_forward_convolution: CausalConvolution

    @other_names
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        hidden_dim: int | None = None,
        *,
        num_kv_heads: int | None = None,
        activation: Activation = "relu",
        gated: bool = False,
        norm: Literal["layernorm", "rmsnorm"] | NormConfig = "layernorm",
        norm_placement: Literal["pre", "post", "sandwich", "after"] = "pre",
        rope: RoPE | RopeConfig | None = None,
        cross_attention: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_bool("bias", bias, error=ConfigError)
        check_bool("cross_attention", cross_attention, error=ConfigError)
        attention = AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=default_head_dim(embed_dim, num_heads),
            qkv_bias=bias,
            out_bias=bias,
            rope=rope.config if isinstance(rope, RoPE) else rope,
            dropout=dropout,
        )
        if not isinstance(norm, NormConfig):
            norm = NormConfig(type=norm, bias=norm == "layernorm")
        config = LayerConfig(
            attention=attention,
            feed_forward=FeedForwardConfig(
                hidden_dim=4 * embed_dim if hidden_dim is None else hidden_dim,
                activation=activation,
                gated=gated,
                bias=bias,
                dropout=dropout,
            ),
            norm=norm,
            norm_placement=norm_placement,
            cross_attention=replace(attention, rope=None) if cross_attention else None,
            dropout=dropout,
        )
        self._build(embed_dim, config, rope if isinstance(rope, RoPE) else None)

    @classmethod
    def from_config(
        cls,
        embed_dim: int,
        config: LayerConfig,
        *,
        rope: RoPE | None = None,
        context_dim: int | None = None,
    ) -> Self:
        """The layer that ``config`` describes.

        Args:
            embed_dim: Embedding size E of the residual stream.
            config: Attention, network, norms and their order.
            rope: Rotary positions built from ``config.attention.rope`` already, to share tables.
            context_dim: Features of what the cross-attention reads; default E.

        Raises:
            ConfigError: Numbers that do not go together.
        """
        layer = cls.__new__(cls)
        Fixed.__init__(layer)
        layer._build(embed_dim, config, rope, context_dim)
        return layer

    def _build(
        self,
        embed_dim: int,
        config: LayerConfig,
        rope: RoPE | None,
        context_dim: int | None = None,
    ) -> None:
        check_probability("dropout", config.dropout, error=ConfigError)
        self.config = config
        self._post = config.norm_placement == "post"
        self._norms_in = config.norm_placement in ("pre", "sandwich")
        for part in config.parts:  # an attribute each, which the decode plan compares
            setattr(self, f"_{part}_mix", config.mix(part))
        self._hands = bool(config.attention.hands_on or config.attention.reads)
        self._merges = config.attention.of_context is not None
        network = config.feed_forward
        self._hands_network = network is not None and network.takes_handed
        self.attention = build_attention(embed_dim, config.attention, rope)
        self.cross_attention: MultiHeadAttention | None = None
        if config.cross_attention is not None:
            if config.cross_attention.rope is not None:
                raise ConfigError(
                    "cross_attention takes no rope: its keys stand in another sequence than its "
                    "queries"
                )
            self.cross_attention = MultiHeadAttention.from_config(
                embed_dim, config.cross_attention, kdim=context_dim, vdim=context_dim
            )
        module = None if network is None else build_network(embed_dim, network)
        self.add_module("feed_forward", module)
        if config.shortcut is not None:
            self.shortcut = build_network(embed_dim, config.shortcut)
        if config.per_layer_input is not None:
            self.per_layer_input = PerLayerInput(embed_dim, config.per_layer_input)
        if config.laurel_rank is not None:
            self.laurel = Laurel(embed_dim, config.laurel_rank, config.norm)
        if config.convolution is not None:
            self.convolution = Convolution(embed_dim, config.convolution, config.norm)
        if config.adapter is not None:
            self.adapter = Adapter(embed_dim, config.adapter, config.norm, config.dropout)
        self._mixes_parts = config.streams is not None and not config.streams.around_layer
        if config.streams is not None:
            apart = [f"{part}_streams" for part in config.mixed_parts]
            for name in apart if self._mixes_parts else ["streams"]:
                self.add_module(name, build_mixer(embed_dim, config.streams))
            if config.attention.reads_streams:
                self.attention_streams = WholeStreams()
        for part in config.parts if config.out_convolution is not None else ():
            made = CausalConvolution(embed_dim, config.out_convolution or 0, f"{part}_out")
            self.add_module(f"{part}_convolution", made)
        if config.feed_forward_scale:
            self.feed_forward_scale = nn.Parameter(torch.ones(1))
        if config.output_scale:
            self.output_scale = nn.Parameter(torch.ones(1))
        if config.residual_weights:
            for part in config.parts:
                self.register_parameter(f"{part}_residual", nn.Parameter(torch.ones(embed_dim)))
        for part in config.parts:
            before, behind = config.has_norm(part), config.has_out_norm(part)
            for name, there in (("norm", before), ("out_norm", behind)):
                norm = build_norm(embed_dim, config.norm) if there else None
                self.add_module(f"{part}_{name}", norm)
        if config.norm_gate is not None:
            for part in config.norm_gate.parts:
                self.add_module(f"{part}_norm_gate", NormGate(embed_dim, config.norm_gate))

    @property
    def takes_handed(self) -> bool:
        """Whether it hands something on to later layers, or reads it."""
        return self.config.takes_handed

    @property
    def rotates(self) -> bool:
        """Whether its attention has rotary positions."""
        return self.config.attention.rope is not None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | None = None,
        context_mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        context_cache: KeyValueCache | None = None,
        kernel: str = "auto",
        handed: Handed | None = None,
        **unknown: Any,
    ) -> Tensor:
        """``[B, T, E]`` to ``[B, T, E]``, or ``[B, T, n, E]`` of n residual streams to the same.

        Args:
            x: ``[B, T, E]`` or ``[B, T, n, E]``.
            context: ``[B, S, E]`` the encoder's output, for a layer with cross-attention.
            mask: Who may look at whom among ``x`` (and what the cache holds).
            context_mask: Who may look at which tokens of the context.
            bias: Added to the scores of the self-attention.
            positions: ``[T]`` or ``[B, T]``, or ``[C, B, T]`` of C coordinates, as of
                ``MultiHeadAttention``; default: they follow on from the cache.
            cache: Cache of the self-attention.
            context_cache: Cache of the cross-attention; filled by the first call.
            kernel: ``"auto"`` or the name of a kernel.
            handed: What layers of the same call hand on, for a self-attention that does.
            **unknown: Refused; the error says what polyhead calls an argument of torch's.

        Raises:
            ValueError: A context without cross-attention or the other way round, or shapes that
                do not fit.
            TypeError: An argument that there is not.
        """
        if unknown:
            refuse(type(self).__name__, unknown)
        if (context is None) != (self.config.crossing is None):
            raise ValueError(
                "this layer has cross-attention and needs a context: got none"
                if context is None
                else "this layer has no cross-attention: got a context"
            )
        done = 0
        if (
            cache is not None
            and positions is None
            and not self.training
            and kernel in ("auto", "native")
        ):
            stepped = step(
                self, x, LayerArgs(mask, bias, cache, context, context_mask, context_cache)
            )
            if stepped is not None:
                x, done = stepped
        return self.forward_from(
            x,
            done,
            context,
            mask=mask,
            context_mask=context_mask,
            bias=bias,
            positions=positions,
            cache=cache,
            context_cache=context_cache,
            kernel=kernel,
            handed=handed,
        )

    def forward_from(
        self,
        x: Tensor,
        done: int,
        context: Tensor | None = None,
        *,
        context_mask: Mask | None,
        context_cache: KeyValueCache | None,
        kernel: str,
        handed: Handed | None = None,
        **attention: Any,
    ) -> Tensor:
        """What the parts behind the first ``done`` make of ``x``, one module after the other.

        Args:
            x: ``[B, T, E]``.
            done: 0 or the last part that was computed, as ``layers.decode_plan`` counts them.
            context: As in a call, like all that follows.
            context_mask: Who may look at which tokens of it.
            context_cache: Cache of the cross-attention.
            kernel: ``"auto"`` or the name of a kernel.
            handed: What layers of the same call hand on.
            **attention: What only the self-attention is given.
        """
        given: dict[str, Any] = {
            "context_mask": context_mask, "context_cache": context_cache, "kernel": kernel,
            "handed": handed, **attention,
        }  # fmt: skip
        own = None if self.config.per_layer_input is None else self.per_layer_input
        entered = None if self.config.convolution is None else x
        if (mixer := self._around) is None:
            x = self._computed(x, done, context, **given)
            if own is not None:
                x = own(x, handed)
        else:
            x, kept = mixer.read(x)
            x = mixer.write(kept, self._computed(x, done, context, **given))
            del kept
            if own is not None:
                x = mixer.beside(x, partial(own.made, handed=handed))
        if entered is not None:
            x = self.convolution(entered, x, attention["mask"])
        return x * self.output_scale if self.config.output_scale else x

    def _computed(self, x: Tensor, done: int, context: Tensor | None, **given: Any) -> Tensor:
        """What attention and network behind the first ``done`` parts make of ``x``."""
        if self.config.out_convolution is None:
            return self._parts(x, done, context, **given)
        positions, cache = given["positions"], given["cache"]
        what = "a layer that convolves what its parts give"
        if positions is not None and positions.ndim == 3:
            raise UnsupportedError(f"{what} takes one position for each token, not coordinates")
        real_tokens(given["mask"], x, positions, cached=cache is not None, what=what)
        with convolved_call(x, positions, cache) as call:
            return self._parts(x, done, context, call=call, **given)

    def _parts(
        self,
        x: Tensor,
        done: int,
        context: Tensor | None,
        *,
        context_mask: Mask | None,
        context_cache: KeyValueCache | None,
        kernel: str,
        handed: Handed | None,
        call: Packing | None = None,
        **attention: Any,
    ) -> Tensor:
        """The same; ``call`` is what convolutions of outputs are given."""
        if done < ATTENTION:
            h, x = self._entered(x, "attention")
            normed = h if self.config.laurel_rank is not None else None
            if self._hands:
                attention["handed"] = handed
            if self._merges:
                attention |= {
                    "context": context, "context_mask": context_mask,
                    "context_cache": context_cache,
                }  # fmt: skip
            beside = self._beside(x, h) if self.config.parallel is not None else None
            h = self.attention(h, kernel=kernel, **attention)
            if call is not None:
                h = self.attention_convolution(h, call)
            if beside is not None:
                return self._joined(x, h + beside, "attention")
            x = self._joined(x, h, "attention")
            if normed is not None:
                x = self.laurel(x, normed)
            del normed
        if done < CROSS_ATTENTION and self.cross_attention is not None:
            h, x = self._entered(x, "cross_attention")
            h = self.cross_attention(
                h, context, mask=context_mask, cache=context_cache, kernel=kernel
            )
            x = self._joined(x, h, "cross_attention")
        if done < NETWORK and self.feed_forward is not None:
            h, x = self._entered(x, "feed_forward")
            if self.config.shortcut is not None and handed is not None:
                handed.hand_on(SHORTCUT, self.shortcut(h))
            h = self.feed_forward(h, handed) if self._hands_network else self.feed_forward(h)
            if self.config.feed_forward_scale:
                h = h * self.feed_forward_scale
            if call is not None:
                h = self.feed_forward_convolution(h, call)
            x = self._joined(x, h, "feed_forward")
        if self.config.joins_shortcut:
            x = x + given_by_layer_before(handed, SHORTCUT)
        return x

    def _beside(self, x: Tensor, normed: Tensor) -> Tensor:
        """The output of a feed-forward network that runs parallel to attention."""
        if self.config.parallel == "two norms":
            normed = self.feed_forward_norm(x)
        assert self.feed_forward is not None  # the configuration says so
        made: Tensor = self.feed_forward(normed)
        return made

    def _entered(self, x: Tensor, part: str) -> tuple[Tensor, Any]:
        """The input of a part, by the placement of norms, and what ``_joined`` adds to."""
        kept: Any = x
        if self._mixes_parts:
            x, kept = self._mixer(part).read(x)
        module = self._modules[f"{part}_norm"] if self._norms_in else None
        x = x if module is None else module(x)
        if self.config.norm_gate is not None and part in self.config.norm_gate.parts:
            x = getattr(self, f"{part}_norm_gate")(x)
        return x, kept

    def _mixer(self, part: str) -> StreamMixer:
        return cast(StreamMixer, self._modules[f"{part}_streams"])

    @property
    def _around(self) -> StreamMixer | None:
        """What reads and writes residual streams around the whole layer."""
        return cast("StreamMixer | None", self._modules.get("streams"))

    def _joined(self, x: Any, h: Tensor, part: str) -> Tensor:
        """Adds a part's output to the residual path ``x``, by the placement of norms."""
        h = self._added(h, part)
        p = self.config.dropout if self.training else 0.0
        if self._mixes_parts:
            return self._mixer(part).write(x, dropped(h, p) if p else h)
        if (kept := getattr(self, f"_{part}_mix")[0]) != 1.0:
            x = x * kept
        if self.config.residual_weights:
            x = x * self._parameters[f"{part}_residual"]
        joined: Tensor = dropped(h, p, plus=x) if p else x + h
        if part == "feed_forward" and self.config.adapter is not None:
            joined = self.adapter(joined, self.feed_forward_norm)
        if self._post:
            joined = getattr(self, f"{part}_norm")(joined)
        return joined

    def _added(self, h: Tensor, part: str) -> Tensor:
        """What joins the residual path of a part's output."""
        if (out_norm := self._modules[f"{part}_out_norm"]) is not None:
            h = out_norm(h)
        return h if (added := getattr(self, f"_{part}_mix")[1]) == 1.0 else h * added


LAYER_TYPES.append(ExactType(TransformerLayer))
