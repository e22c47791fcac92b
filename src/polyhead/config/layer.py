"""One Transformer layer as plain data: which attention, which feed-forward network, which norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from polyhead.config.adapter import AdapterConfig
from polyhead.config.attention import AttentionConfig
from polyhead.config.convolution import ConvolutionConfig
from polyhead.config.data import Data, check_choice, check_whole
from polyhead.config.layout import HeadLayout, Network
from polyhead.config.memories import Memory, Tail
from polyhead.config.norm import NormConfig
from polyhead.config.norm_gate import NormGateConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.config.per_layer import PerLayerInputConfig
from polyhead.config.streams import StreamsConfig
from polyhead.errors import ConfigError

_SUM = (1.0, 1.0)


@dataclass(frozen=True)
class LayerConfig(Data):
    """One Transformer layer.

    Attributes:
        feed_forward: None: the layer is its attention alone (Mamba-2's models).
        norm_placement: ``"pre"`` x + f(norm(x)); ``"post"`` norm(x + f(x)) (the 2017 paper, BERT);
            ``"sandwich"`` x + norm(f(norm(x))) (Gemma 2 and 3, GLM-4); ``"after"`` x + norm(f(x))
            (OLMo 2, EXAONE 4).
        parallel: Attention and feed-forward network read the same x, and both are added to it:
            ``"one norm"`` x + a(n) + f(n), n = norm(x) (GPT-J, Phi, Cohere, Falcon-7B);
            ``"two norms"`` x + a(norm(x)) + f(norm'(x)) (GPT-NeoX, Falcon-40B); None: one after
            the other.
        residual_scale: Factor of what attention and feed-forward network add to x (Granite,
            MiniCPM).
        attention_mix: Factors (a, b) beside it: a · x + b · f(x), with f the attention (DeepNorm,
            Wang et al. 2022; MiniMax-Text-01).
        feed_forward_mix: The same, with f the feed-forward network.
        attention_norm: False: this layer's attention reads x as it is (ModernBERT's first layer).
        per_layer_input: How it reads a vector of every token that is its own (Gemma 3n and 4).
        output_scale: Whether what it gives is multiplied by a learned number (Gemma 4).
        feed_forward_out_norm: True: with norms before the parts, the feed-forward network's output
            has one too (A.X K1's layers with experts).
        laurel_rank: Rank r of a learned augmented residual layer (LAuReL, Menghani et al. 2024,
            arXiv 2411.07501; Gemma 3n): with n the attention's input, attention gives
            (x + f(n) + n + norm(W W' n)) / √2, W' to r features and W from them; None: x + f(n).
        streams: How it reads and writes several residual streams; None: there is one.
        convolution: Of an encoder's layer, beside all of it, with a norm over the sum (DeBERTa-v2).
        shortcut: A second network, which reads what ``feed_forward`` reads and joins the stream
            behind the next layer: while that computes, tokens may travel to experts
            (shortcut-connected mixtures, Cai et al. 2024, arXiv 2404.05019; LongCat-Flash).
        joins_shortcut: Whether what the layer before gave by its ``shortcut`` is added at last.
        adapter: Of what the feed-forward network gave, after it joined the stream (X-MOD).
        norm_gate: Of what the norms before the parts give (A.X K2).
        residual_weights: Whether x is multiplied by a learned number for each feature where a part
            joins it: w · x + f(x) (Doge).
        out_convolution: Tokens, the current one included, that a causal convolution of what
            attention and network give sees: f + c(f) joins the stream (Inkling). The layer
            remembers its inputs; None: there is none.
        feed_forward_scale: Whether what the network gives is multiplied by a learned number
            (Inkling).
    """

    attention: HeadLayout
    feed_forward: Network | None
    norm: NormConfig = field(default_factory=NormConfig)
    norm_placement: Literal["pre", "post", "sandwich", "after"] = "pre"
    cross_attention: AttentionConfig | None = None
    dropout: float = 0.0
    parallel: Literal["one norm", "two norms"] | None = None
    residual_scale: float = 1.0
    attention_norm: bool = True
    per_layer_input: PerLayerInputConfig | None = None
    output_scale: bool = False
    feed_forward_out_norm: bool = False
    attention_mix: tuple[float, float] = _SUM
    feed_forward_mix: tuple[float, float] = _SUM
    laurel_rank: int | None = None
    streams: StreamsConfig | None = None
    convolution: ConvolutionConfig | None = None
    shortcut: Network | None = None
    joins_shortcut: bool = False
    adapter: AdapterConfig | None = None
    norm_gate: NormGateConfig | None = None
    residual_weights: bool = False
    out_convolution: int | None = None
    feed_forward_scale: bool = False

    def __post_init__(self) -> None:
        check_choice("norm_placement", self.norm_placement, ("pre", "post", "sandwich", "after"))
        check_choice("parallel", self.parallel, (None, "one norm", "two norms"))
        if self.parallel is not None and self.norm_placement != "pre":
            raise ConfigError(
                f"parallel attention and feed-forward need norm_placement 'pre': got "
                f"{self.norm_placement!r}"
            )
        for name in ("attention_mix", "feed_forward_mix"):
            if len(mix := getattr(self, name)) != 2:
                raise ConfigError(f"{name} must be 2 factors, of x and of f(x): got {list(mix)}")
        if self.parallel is not None and (self.attention_mix, self.feed_forward_mix) != (_SUM,) * 2:
            raise ConfigError(
                "parallel attention and feed-forward are added without factors: got attention_mix="
                f"{self.attention_mix}, feed_forward_mix={self.feed_forward_mix}"
            )
        if self.parallel is not None and self.feed_forward is None:
            raise ConfigError("parallel attention and feed-forward need feed_forward: got None")
        if self.parallel is not None and self.cross_attention is not None:
            raise ConfigError("parallel attention and feed-forward have no cross_attention between")
        if self.parallel is not None and (self.per_layer_input is not None or self.output_scale):
            raise ConfigError(
                "per_layer_input and output_scale need parallel=None: got parallel="
                f"{self.parallel!r}"
            )
        norms_input = self.feed_forward is not None and self.feed_forward.norms_input
        placed = self.norm_placement in ("pre", "sandwich") and self.parallel is None
        if norms_input and not placed:
            raise ConfigError(
                f"a {type(self.feed_forward).__name__} norms what it reads, which belongs to "
                "norm_placement 'pre' or 'sandwich' without parallel: got "
                f"{self.norm_placement!r}, parallel={self.parallel!r}"
            )
        if not self.attention_norm and (self.norm_placement != "pre" or self.parallel is not None):
            raise ConfigError(
                "attention_norm=False belongs to norm_placement 'pre' without parallel: got "
                f"{self.norm_placement!r}, parallel={self.parallel!r}"
            )
        if self.cross_attention is not None and self.attention.of_context is not None:
            raise ConfigError(f"{self.attention.described} goes without cross_attention: got one")
        self._check_streams()
        self._check_shortcut(norms_input)
        self._check_adapter(norms_input)
        self._check_norm_gate()
        if self.residual_weights and (self.parallel is not None or self.streams is not None):
            raise ConfigError(
                "residual_weights need parts one after the other and one residual stream: got "
                f"parallel={self.parallel!r}, streams={type(self.streams).__name__}"
            )
        self._check_out()
        if self.feed_forward_out_norm and (
            self.norm_placement != "pre" or self.parallel is not None
        ):
            raise ConfigError(
                "feed_forward_out_norm belongs to norm_placement 'pre' without parallel: got "
                f"{self.norm_placement!r}, parallel={self.parallel!r}"
            )

    @property
    def crossing(self) -> AttentionConfig | None:
        """The attention to the encoder's output, by itself or within ``attention``."""
        return self.cross_attention or self.attention.of_context

    def _check_streams(self) -> None:
        """Raises where LAuReL or streams do not go with the other fields."""
        if (count := self.attention.reads_streams) and (
            self.streams is None
            or self.streams.around_layer
            or self.streams.count != count
            or self.norm_placement != "pre"
        ):
            raise ConfigError(
                f"{type(self.attention).__name__} reads all of {count} residual streams, around "
                f"each part and without a norm behind it: got streams={self.streams}, "
                f"norm_placement={self.norm_placement!r}"
            )
        if self.laurel_rank is not None:
            check_whole("laurel_rank", self.laurel_rank)
            if self.norm_placement not in ("pre", "sandwich") or self.parallel is not None:
                raise ConfigError(
                    "laurel_rank belongs to norm_placement 'pre' or 'sandwich' without parallel: "
                    f"got {self.norm_placement!r}, parallel={self.parallel!r}"
                )
        if self.streams is None or self.streams.around_layer:
            return
        plain: dict[str, object] = {
            "laurel_rank": None,
            "per_layer_input": None,
            "output_scale": False,
            "convolution": None,
        }
        plain |= {"parallel": None, "attention_mix": _SUM, "feed_forward_mix": _SUM}
        changed = [name for name, value in plain.items() if getattr(self, name) != value]
        if changed or self.norm_placement == "post":
            raise ConfigError(
                f"{type(self.streams).__name__} is around each part of a layer, which goes with "
                f"norms before or behind the parts and without {', '.join(plain)}: got "
                f"{', '.join(changed) or 'norm_placement=post'}"
            )

    def _check_shortcut(self, norms_input: bool) -> None:
        """Raises where a shortcut, or what networks are handed, do not go with the other fields."""
        apart = self.parallel is not None or self.feed_forward is None
        taking = [each for each in self.networks if each.takes_handed]
        if taking and (apart or self.shortcut in taking):
            read = "ids" if taking[0].reads_tokens else "what layers hand on"
            raise ConfigError(
                f"a {type(taking[0]).__name__} reads {read} as the feed_forward network behind "
                f"attention: got parallel={self.parallel!r}, shortcut={self.shortcut}"
            )
        if self.shortcut is None and not self.joins_shortcut:
            return
        reads = self.feed_forward is not None and not norms_input and self.parallel is None
        if not reads or self.streams is not None or self.output_scale:
            raise ConfigError(
                "shortcut and joins_shortcut need a feed_forward network behind attention, which "
                "does not norm what it reads, one residual stream and output_scale=False: got "
                f"feed_forward={type(self.feed_forward).__name__}, parallel={self.parallel!r}, "
                f"streams={type(self.streams).__name__}, output_scale={self.output_scale}"
            )

    def _check_adapter(self, norms_input: bool) -> None:
        """Raises where an adapter does not go with the other fields."""
        plain = self.norm_placement in ("pre", "post") and self.parallel is None
        behind = self.feed_forward is not None and not norms_input and self.streams is None
        if self.adapter is not None and not (plain and behind):
            raise ConfigError(
                "an adapter is behind a feed_forward network with a norm before it or behind its "
                "sum, and one residual stream: got "
                f"feed_forward={type(self.feed_forward).__name__}, norm_placement="
                f"{self.norm_placement!r}, parallel={self.parallel!r}, "
                f"streams={type(self.streams).__name__}"
            )

    def _check_norm_gate(self) -> None:
        """Raises where gates of norms do not go with the other fields."""
        if self.norm_gate is None:
            return
        before = self.norm_placement in ("pre", "sandwich") and self.parallel is None
        if not before or not all(map(self.has_norm, self.norm_gate.parts)):
            raise ConfigError(
                "norm_gate needs norms before attention and, with feed_forward=True, the network, "
                f"one part after the other: got norm_placement={self.norm_placement!r}, parallel="
                f"{self.parallel!r}, attention_norm={self.attention_norm}, "
                f"feed_forward={type(self.feed_forward).__name__}"
            )

    def has_norm(self, part: str) -> bool:
        """Whether a part has a norm before it, besides the one over its output.

        Args:
            part: ``"attention"``, ``"cross_attention"`` or ``"feed_forward"``.
        """
        if self.norm_placement == "after" or part not in self.parts:
            return False
        if self.streams is not None and self.streams.norms_input:
            return False
        if part != "feed_forward":
            whole = self.attention.reads_streams > 0
            return part != "attention" or (self.attention_norm and not whole)
        assert self.feed_forward is not None  # one of the layer's parts
        return not self.feed_forward.norms_input and self.parallel != "one norm"

    def has_out_norm(self, part: str) -> bool:
        """Whether a part has a norm over its output, before it joins the residual stream.

        Args:
            part: ``"attention"``, ``"cross_attention"`` or ``"feed_forward"``.
        """
        own = part == "feed_forward" and self.feed_forward_out_norm
        return own or self.norm_placement in ("sandwich", "after")

    def _check_out(self) -> None:
        """Raises where what changes the parts' outputs does not go with the other fields."""
        if self.out_convolution is None and not self.feed_forward_scale:
            return
        plain = self.parallel is None and self.streams is None and self.cross_attention is None
        if not plain or self.feed_forward is None:
            raise ConfigError(
                "out_convolution and feed_forward_scale need a feed_forward network behind "
                "attention, one residual stream and no cross_attention: got feed_forward="
                f"{type(self.feed_forward).__name__}, parallel={self.parallel!r}, "
                f"streams={type(self.streams).__name__}"
            )
        if self.out_convolution is None:
            return
        check_whole("out_convolution", self.out_convolution, least=2)
        kept = self.attention.memories
        if len(kept) == 1 and kept[0].keys_and_values is not None:
            raise ConfigError(
                "out_convolution needs a causal attention that remembers more than keys and "
                f"values: got {self.attention.described}"
            )

    def out_memories(self, embed_dim: int) -> tuple[Memory, ...]:
        """What the layer remembers beside its attention's memories."""
        if self.out_convolution is None:
            return ()
        before = self.out_convolution - 1
        return tuple(Tail(f"{part}_out", embed_dim, before) for part in self.parts)

    def mix(self, part: str) -> tuple[float, float]:
        """Factors of the residual path and of what a part adds to it.

        Args:
            part: ``"attention"``, ``"cross_attention"`` or ``"feed_forward"``.
        """
        kept, added = getattr(self, f"{part}_mix", _SUM)
        return kept, added * self.residual_scale

    @property
    def only_adds(self) -> bool:
        """Whether all that it does is to add its parts' outputs to one residual stream."""
        if self.convolution is not None or self.adapter is not None:
            return False
        if self.out_convolution is not None or self.feed_forward_scale:
            return False
        mixes = any(self.mix(part)[0] != 1.0 for part in self.parts) or self.laurel_rank is not None
        scaled = self.norm_placement == "post" or self.output_scale or self.residual_weights
        beside = self.streams is not None or self.shortcut is not None or self.joins_shortcut
        return not mixes and not scaled and not beside

    @property
    def parts(self) -> tuple[str, ...]:
        """What the layer consists of, in the order of a call."""
        parts = "attention", "cross_attention", "feed_forward"
        return tuple(part for part in parts if getattr(self, part) is not None)

    @property
    def mixed_parts(self) -> tuple[str, ...]:
        """Those that read one vector of each token from residual streams."""
        return self.parts[1:] if self.attention.reads_streams else self.parts

    @property
    def takes_handed(self) -> bool:
        """Whether it hands something on to later layers of a call, or reads it."""
        attention, beside = self.attention, self.per_layer_input or self.shortcut
        handed = self.joins_shortcut or any(each.takes_handed for each in self.networks)
        return bool(attention.hands_on or attention.reads or beside or handed)

    @property
    def reads_tokens(self) -> bool:
        """Whether its feed-forward network reads the ids of the call."""
        return self.feed_forward is not None and self.feed_forward.reads_tokens

    @property
    def networks(self) -> tuple[Network, ...]:
        """``feed_forward`` and ``shortcut``, as far as there are."""
        return tuple(each for each in (self.feed_forward, self.shortcut) if each is not None)

    @property
    def norms(self) -> int:
        """Norms over the residual stream."""
        return sum(map(self.has_norm, self.parts)) + sum(map(self.has_out_norm, self.parts))

    def parameter_groups(
        self, embed_dim: int, context_dim: int | None = None
    ) -> Iterator[ParameterGroup]:
        """All parameters.

        Args:
            embed_dim: Embedding size E of the residual stream.
            context_dim: Features of the encoder's output; None: E.
        """
        yield from self.attention.parameter_groups(embed_dim)
        if self.cross_attention is not None:
            yield from self.cross_attention.parameter_groups(embed_dim, context_dim)
        for network in self.networks:
            yield from network.parameter_groups(embed_dim)
        yield from self.residual_parameter_groups(embed_dim)
        norm = ParameterGroup("norms", 1, self.norm.parameters(embed_dim), multiplied=False)
        yield from [norm] * self.norms

    def residual_parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        """The parameters of what changes the residual stream beside attention and network."""
        if self.per_layer_input is not None:
            yield from self.per_layer_input.parameter_groups(embed_dim)
        if self.laurel_rank is not None:
            yield ParameterGroup("feed_forward", 1, 2 * self.laurel_rank * embed_dim)
            yield ParameterGroup("norms", 1, self.norm.parameters(embed_dim), multiplied=False)
        if self.convolution is not None:
            yield from self.convolution.parameter_groups(embed_dim)
            yield ParameterGroup("norms", 1, self.norm.parameters(embed_dim), multiplied=False)
        if self.norm_gate is not None:
            yield from self.norm_gate.parameter_groups(embed_dim)
        if self.out_convolution is not None:
            size = len(self.parts) * self.out_convolution * embed_dim
            yield ParameterGroup("feed_forward", 1, size, as_numbers=True)
        if self.feed_forward_scale:
            yield ParameterGroup("feed_forward", 1, 1, multiplied=False)
        if self.adapter is not None:
            yield from self.adapter.parameter_groups(embed_dim, self.norm)
        if self.streams is not None:
            for _ in (0,) if self.streams.around_layer else self.mixed_parts:
                yield from self.streams.parameter_groups(embed_dim)
        if self.output_scale:
            yield ParameterGroup("norms", 1, 1, multiplied=False)
        if self.residual_weights:
            yield ParameterGroup("norms", len(self.parts), embed_dim, multiplied=False)
