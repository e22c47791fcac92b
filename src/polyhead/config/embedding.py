"""What enters a Transformer as plain data: tokens, image patches or sound, and where they stand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from polyhead.config.data import (
    Data,
    OneOfSeveral,
    check_choice,
    check_positive,
    check_share,
    check_whole,
)
from polyhead.config.norm import NormConfig
from polyhead.config.parameter_groups import ParameterGroup
from polyhead.errors import ConfigError


@dataclass(frozen=True)
class SinusoidConfig(Data):
    """How fixed positions lie in a vector: sin and cos of position · 10000^(-2i / E).

    ``layout``: ``"interleaved"`` sin, cos, sin, cos … (the 2017 paper), ``"halves"`` all sin, then
    all cos (Marian). ``spread``: exponents i / (E/2 - 1) instead of 2i / E, so that the last
    frequency is 1/10000 exactly (M2M-100, XGLM, tensor2tensor).
    """

    layout: Literal["interleaved", "halves"] = "interleaved"
    spread: bool = False

    def __post_init__(self) -> None:
        check_choice("sinusoid layout", self.layout, ("interleaved", "halves"))


@dataclass(frozen=True)
class EmbeddingProjectionConfig(Data):
    """An embedding of another size than the model's: a matrix ``[E, dim]`` makes one the other.

    Attributes:
        dim: Features of the token embedding.
        of: What is projected: the ``"sum"`` of tokens, positions and segments, normalized (ELECTRA,
            ALBERT), the ``"tokens"`` before the others are added (OPT-350m), or the ``"raw_sum"``,
            which is normalized afterwards (DeBERTa).
        bias: Whether the projection has a bias.
        neighbours: Of ``"tokens"``: so many on either side of a token are projected with it, side
            by side from the last to the first (MobileBERT); there are zeros beyond a text.
    """

    dim: int
    of: Literal["sum", "tokens", "raw_sum"] = "sum"
    bias: bool = True
    neighbours: int = 0

    def __post_init__(self) -> None:
        check_whole("embedding projection dim", self.dim)
        check_whole("embedding projection neighbours", self.neighbours, least=0)
        if self.neighbours and self.of != "tokens":
            raise ConfigError(
                f"neighbours are of an embedding projection of 'tokens': got of={self.of!r}"
            )
        check_choice("embedding projection of", self.of, ("sum", "tokens", "raw_sum"))


@dataclass(frozen=True)
class TokenDropoutConfig(Data):
    """Masked tokens count as dropped, in training and after it (ESM): their vectors are 0.

    The others are multiplied by (1 - share) / (1 - share of masked tokens among a row's), so that
    their sum is as great as in training.

    Attributes:
        token_id: The mask token's id.
        share: Share of masked tokens that the model was trained with.
    """

    token_id: int
    share: float = 0.12

    def __post_init__(self) -> None:
        check_whole("token dropout token_id", self.token_id, least=0)
        check_share("token dropout share", self.share)


@dataclass(frozen=True)
class Frontend(OneOfSeveral, ABC):
    """What a model reads in place of token ids."""

    where: ClassVar[Mapping[str, str]] = {
        "patches": "polyhead.config.embedding",
        "audio": "polyhead.config.embedding",
    }

    @abstractmethod
    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        """All parameters."""


@dataclass(frozen=True)
class PatchConfig(Frontend, kind="patches"):
    """An image cut into squares, each projected to a vector (ViT); in place of tokens.

    ``class_token``: a learned vector in front of the patches.
    """

    image_size: tuple[int, int]  # height, width
    patch_size: tuple[int, int]
    channels: int = 3
    class_token: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size"):
            value = getattr(self, name)
            if len(value) != 2:
                raise ConfigError(f"{name} must be height and width: got {value!r}")
            for number in value:
                check_whole(name, number)
        check_whole("channels", self.channels)
        if any(s % p for s, p in zip(self.image_size, self.patch_size, strict=True)):
            raise ConfigError(
                f"patch_size must divide image_size: got {self.patch_size} and {self.image_size}"
            )

    @property
    def tokens(self) -> int:
        """Vectors that an image becomes."""
        (height, width), (h, w) = self.image_size, self.patch_size
        return height // h * (width // w) + self.class_token

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        height, width = self.patch_size
        yield ParameterGroup(
            "embedding", 1, self.channels * height * width * embed_dim, multiplied=False
        )
        for vector in (self.bias, self.class_token):
            if vector:
                yield ParameterGroup("embedding", 1, embed_dim, multiplied=False)


@dataclass(frozen=True)
class AudioConfig(Frontend, kind="audio"):
    """Sound as mel features ``[B, num_mel_bins, frames]``; in place of tokens (Whisper).

    Two convolutions of width 3 with gelu, the second with stride 2, so that a token is two frames.
    """

    num_mel_bins: int

    def __post_init__(self) -> None:
        check_whole("num_mel_bins", self.num_mel_bins)

    def parameter_groups(self, embed_dim: int) -> Iterator[ParameterGroup]:
        for features in (self.num_mel_bins, embed_dim):
            yield ParameterGroup("embedding", 1, (3 * features + 1) * embed_dim, multiplied=False)


@dataclass(frozen=True)
class FirstRowConfig(Data):
    """A table of which every token of a text adds the first row.

    Its other rows are kept, and belong to what calls do not say: the task, a place on a page.

    Attributes:
        rows: Rows of the table.
        times: How many times the row is added: LayoutLM's table of columns is read for the left
            and for the right edge of a box.
        dim: Features of a row that is not added: it stands behind the token's vector in what a
            projection of ``"tokens"`` reads (RoCBert); None: it is added.
    """

    rows: int
    times: int = 1
    dim: int | None = None

    def __post_init__(self) -> None:
        check_whole("first row rows", self.rows)
        check_whole("first row times", self.times)
        if self.dim is not None:
            check_whole("first row dim", self.dim)
            if self.times != 1:
                raise ConfigError(f"a first row with a dim is not added: got times={self.times}")


@dataclass(frozen=True)
class SoftPromptConfig(Data):
    """Learned vectors in front of every text, which see its tokens and are seen by them (CPM-Ant).

    They are no part of the output; in what layers give, and in probes, they stand in front. The
    vectors of a prompt and those of tokens each add a row of a table of segments. Other prompts and
    segments are kept, and belong to what calls do not say.

    Attributes:
        length: Vectors of a prompt.
        num_prompts: Prompts of the table.
        chosen: Which stands in front of a text.
        num_segments: Rows of the table of segments.
        segments: The row that the prompt adds, and the row that tokens add.
    """

    length: int
    num_prompts: int = 1
    chosen: int = 0
    num_segments: int = 2
    segments: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        check_whole("soft prompt length", self.length)
        if len(self.segments) != 2 or self.segments[0] == self.segments[1]:
            raise ConfigError(
                f"soft prompt segments must be 2 different numbers: got {list(self.segments)}"
            )
        for row in (self.chosen, *self.segments):
            check_whole("soft prompt chosen and segments", row, least=0)
        check_whole("soft prompt num_prompts", self.num_prompts, least=self.chosen + 1)
        check_whole("soft prompt num_segments", self.num_segments, least=max(self.segments) + 1)


@dataclass(frozen=True)
class AxialConfig(Data):
    """Learned positions as rows and columns of a grid (Kitaev et al. 2020, Reformer).

    Position p has the vector of row p // columns beside that of column p % columns.

    Attributes:
        shape: Rows and columns.
        dims: Features of a row's vector and of a column's.
    """

    shape: tuple[int, int]
    dims: tuple[int, int]

    def __post_init__(self) -> None:
        for name in ("shape", "dims"):
            if len(value := getattr(self, name)) != 2:
                raise ConfigError(f"axial {name} must be 2 numbers: got {list(value)}")
            for number in value:
                check_whole(f"axial {name}", number)


@dataclass(frozen=True)
class EmbeddingConfig(Data):
    """Token embedding, with absolute positions and segments where the family has them.

    Attributes:
        positions: Learned, sinusoidal, or none here (rotary and biases belong to attention).
        axial: Learned positions in place of a table of them, where ``positions`` is ``"axial"``.
        position_offset: Position p is row p + offset of the table, or counts as p + offset (2 in
            OPT, BART, RoBERTa, M2M-100, XGLM). A learned table has max_positions + offset rows.
        sinusoid: How sinusoidal positions lie.
        num_segments: BERT's token types, XLM's languages.
        first_rows: ERNIE's task types, LayoutLM's edges of boxes, TAPAS's rows and columns,
            RoCBert's shapes and sounds.
        segments_optional: A call without segments adds none of them (XLM), not the first.
        norm: A norm over the sum (BERT, BLOOM, BART).
        norm_of: Or over the ``"tokens"`` before positions are added (Blenderbot's small decoder).
        scale: Factor of the tokens: √E in the 2017 paper and Gemma, Granite's multiplier.
        projection: Where the embedding has another size than the model.
        frontend: What there is in place of a token table.
        token_dropout: Of an encoder that scales tokens by how many of them are masked.
        dropout: Dropout of the result, when training.
        prefix: Learned vectors in front of what an encoder-decoder's encoder reads, which are no
            part of its output.
        soft_prompt: Learned vectors in front of what an encoder reads.
        own_vector: An id whose vector is a parameter of its own and not scaled; the row that it has
            in the table is for logits alone (T5Gemma 2's end of an image).
    """

    positions: Literal["learned", "sinusoidal", "axial"] | None = None
    num_segments: int = 0
    norm: NormConfig | None = None
    scale: float = 1.0
    dropout: float = 0.0
    position_offset: int = 0
    sinusoid: SinusoidConfig = SinusoidConfig()
    projection: EmbeddingProjectionConfig | None = None
    frontend: Frontend | None = None
    norm_of: Literal["sum", "tokens"] = "sum"
    first_rows: tuple[FirstRowConfig, ...] = ()
    token_dropout: TokenDropoutConfig | None = None
    segments_optional: bool = False
    prefix: int = 0
    axial: AxialConfig | None = None
    soft_prompt: SoftPromptConfig | None = None
    own_vector: int | None = None

    def __post_init__(self) -> None:
        if (self.positions == "axial") != (self.axial is not None):
            raise ConfigError(
                f"axial belongs to positions 'axial': got positions={self.positions!r}, "
                f"axial={self.axial}"
            )
        if self.segments_optional and not self.num_segments:
            raise ConfigError("segments_optional needs segments: got num_segments=0")
        check_choice("norm_of", self.norm_of, ("sum", "tokens"))
        check_choice("positions", self.positions, (None, "learned", "sinusoidal", "axial"))
        check_whole("position_offset", self.position_offset, least=0)
        if self.position_offset and self.positions is None:
            raise ConfigError("position_offset needs positions: got positions=None")
        check_whole("num_segments", self.num_segments, least=0)
        check_whole("embedding prefix", self.prefix, least=0)
        check_positive("embedding scale", self.scale)
        check_share("embedding dropout", self.dropout)
        if self.own_vector is not None:
            check_whole("embedding own_vector", self.own_vector, least=0)
            if self.frontend is not None or self.projection is not None:
                raise ConfigError(
                    f"own_vector is of an id, without projection: got own_vector={self.own_vector}"
                )
        if self.frontend is not None and (
            self.num_segments or self.first_rows or self.projection or self.token_dropout
        ):
            raise ConfigError(
                "an embedding of patches or sound has no segments, first_rows, projection or "
                "token_dropout"
            )

        beside = any(each.dim is not None for each in self.first_rows)
        if beside and (self.projection is None or self.projection.of != "tokens"):
            raise ConfigError(
                f"first_rows with a dim need a projection of 'tokens': got {self.projection}"
            )

    @property
    def projected_dim(self) -> int:
        """Features that the projection reads; 0 without one."""
        if self.projection is None:
            return 0
        tokens = (2 * self.projection.neighbours + 1) * self.projection.dim
        return tokens + sum(each.dim or 0 for each in self.first_rows)

    @property
    def reads_lengths(self) -> bool:
        """Whether a token's vector depends on which others are padding."""
        near = self.projection is not None and self.projection.neighbours > 0
        return near or self.token_dropout is not None

    def parameter_groups(
        self, vocab_size: int, embed_dim: int, max_positions: int, *, read_whole: bool
    ) -> Iterator[ParameterGroup]:
        """All parameters.

        Args:
            vocab_size: Rows of the table of tokens; 0: there is none, or it is another's.
            embed_dim: Embedding size E of the residual stream.
            max_positions: Tokens that there are positions for.
            read_whole: Whether a step reads the whole table: where logits are made with it.
        """
        E, dim, summed = embed_dim, embed_dim, embed_dim
        if self.projection is not None:
            dim = self.projection.dim
            summed = E if self.projection.of == "tokens" else dim
            size = (self.projected_dim + self.projection.bias) * E
            yield ParameterGroup("embedding", 1, size, multiplied=False)
        if self.frontend is not None:
            yield from self.frontend.parameter_groups(E)
        elif vocab_size:
            looked_up = not read_whole
            yield ParameterGroup(
                "embedding", vocab_size, dim, multiplied=False, looked_up=looked_up
            )
        rows = max_positions + self.position_offset if self.positions == "learned" else 0
        for count in (rows, self.num_segments):
            if count:
                yield ParameterGroup("embedding", 1, count * summed, multiplied=False)
        if self.axial is not None:
            for count, features in zip(self.axial.shape, self.axial.dims, strict=True):
                yield ParameterGroup("embedding", 1, count * features, multiplied=False)
        for each in self.first_rows:
            yield ParameterGroup("embedding", 1, each.rows * (each.dim or summed), multiplied=False)
        if self.prefix:
            yield ParameterGroup("embedding", self.prefix, E, multiplied=False)
        if (prompt := self.soft_prompt) is not None:
            rows = prompt.num_prompts * prompt.length + prompt.num_segments
            yield ParameterGroup("embedding", 1, rows * E, multiplied=False)
        if self.own_vector is not None:
            yield ParameterGroup("embedding", 1, E, multiplied=False)
        if self.norm is not None:
            normed = E if self.projection and self.projection.of == "raw_sum" else summed
            yield ParameterGroup("norms", 1, self.norm.parameters(normed), multiplied=False)
