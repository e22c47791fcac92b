"""Head layouts by name, and the decoder that each of them makes at equal parameters.

    mha          a key/value head for every query head
    gqa:G        G key/value heads (Ainslie et al. 2023)
    mqa          one key/value head (Shazeer 2019)
    mla:R+D      a latent of R features and a rotated key of D features (DeepSeek-V2, 2024)
    window:W     mha, and a query sees the W tokens up to its own
    heads:H      mha with H heads, each E / H features wide
    gated        mha whose outputs are gated (Qiu et al. 2025)
    diff         differential attention (Ye et al. 2024)
    nsa:N        mha that compresses blocks of keys and chooses N of 16 keys (Yuan et al. 2025)
    dsa:K        mla of 4 D + D / 2 features to the K keys that an indexer chooses (V3.2, 2025)
    gdn          gated DeltaNet (Yang et al. 2024)
    kda          Kimi delta attention (2025)
    mamba2       Mamba-2 (Dao & Gu 2024)
    hybrid:N+M   N layers of gated DeltaNet, then M of mha, and so on

Layouts differ in their parameters. What a variant has less than ``mha``, its feed-forward networks
have more: their hidden features are chosen so that the parameters of the whole decoder are as near
to those of ``mha`` as one feature in each layer allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polyhead._utils.checks import check_int
from polyhead.config import (
    AttentionConfig,
    DifferentialAttentionConfig,
    FeedForwardConfig,
    GatedAttentionConfig,
    GatedDeltaNetConfig,
    HeadLayout,
    IndexerConfig,
    KimiDeltaAttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    Mamba2Config,
    NativeSparseAttentionConfig,
    RopeConfig,
    SparseLatentAttentionConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError, InputError

REFERENCE = "mha"
"""The variant that all others are compared with."""


@dataclass(frozen=True)
class Sizes:
    """The decoder that all variants share.

    Attributes:
        heads: Query heads, each ``embed_dim / heads`` features wide.
        hidden_dim: Hidden features of the gated feed-forward network beside ``mha``.
        max_positions: Context of the models whose speed is measured.

    Raises:
        ConfigError: A number that is impossible, or heads that do not divide ``embed_dim``.
    """

    embed_dim: int = 128
    layers: int = 3
    heads: int = 8
    hidden_dim: int = 352
    vocab_size: int = 1024
    max_positions: int = 16_384

    def __post_init__(self) -> None:
        for name in ("embed_dim", "layers", "heads", "hidden_dim", "max_positions"):
            check_int(name, getattr(self, name), least=1, error=ConfigError)
        check_int("vocab_size", self.vocab_size, least=257, error=ConfigError)
        _head_dim(self, self.heads)


@dataclass(frozen=True)
class Variant:
    """A head layout by its name.

    Attributes:
        name: As it is written on the command line, such as ``"gqa:4"``.
        make: From the sizes of a decoder and ``numbers`` the layout, or one for each layer.
    """

    name: str
    make: Callable[..., HeadLayout | tuple[HeadLayout, ...]]
    numbers: tuple[int, ...]

    def layouts(self, sizes: Sizes) -> tuple[HeadLayout, ...]:
        """The attention of each layer of a decoder of these sizes."""
        made = self.make(sizes, *self.numbers)
        return made if isinstance(made, tuple) else (made,) * sizes.layers

    @property
    def slug(self) -> str:
        """The name as part of a file's name."""
        return re.sub("[^a-z0-9]+", "-", self.name)


def variant(name: str) -> Variant:
    """The variant of that name.

    Raises:
        InputError: There is none, or its number is impossible.
    """
    for pattern, make in _KINDS:
        found = re.fullmatch(pattern, name)
        if found is not None:
            numbers = tuple(int(text) for text in found.groups())
            if 0 in numbers:
                raise InputError(f"the numbers of a variant must be at least 1: got {name!r}")
            return Variant(name, make, numbers)
    raise InputError(
        f"no variant {name!r}: a variant is mha, mqa, gqa:G (key/value heads), mla:R+D (latent + "
        "rotated features), window:W (tokens), heads:H, gated, diff, nsa:N (blocks), "
        "dsa:K (keys), gdn, kda, mamba2 or hybrid:N+M (layers of gdn + layers of mha)"
    )


def variants(names: str | Sequence[str], sizes: Sizes) -> tuple[Variant, ...]:
    """Several variants, ``mha`` first whether it was named or not, each checked for ``sizes``.

    Raises:
        InputError: An unknown variant, one that is named twice, or only one.
    """
    given = names.split(",") if isinstance(names, str) else list(names)
    found = [variant(name.strip().lower()) for name in given]
    named = [each.name for each in found]
    if len(set(named)) < len(named):
        raise InputError(f"a variant is named twice: {', '.join(named)}")
    others = [each for each in found if each.name != REFERENCE]
    if not others:
        raise InputError(f"name a variant to compare with {REFERENCE}: got {named}")
    chosen = (variant(REFERENCE), *others)
    for each in chosen:
        decoder(each, sizes)
    return chosen


def decoder(which: Variant, sizes: Sizes) -> TransformerConfig:
    """The decoder with this layout, its feed-forward networks widened to equal parameters.

    Raises:
        ConfigError: A layout that these sizes do not allow, or one with so many parameters that
            nothing is left for the feed-forward networks.
    """
    wanted = parameters(_decoder(variant(REFERENCE).layouts(sizes), sizes, sizes.hidden_dim))
    layouts = which.layouts(sizes)
    least = parameters(_decoder(layouts, sizes, 1))
    each = parameters(_decoder(layouts, sizes, 2)) - least
    hidden = 1 + round((wanted - least) / each)
    if hidden < 1:
        raise ConfigError(
            f"{which.name} has so many parameters that nothing is left for its feed-forward "
            f"networks at {wanted:,} parameters: take fewer latent features"
        )
    return _decoder(layouts, sizes, hidden)


def parameters(config: TransformerConfig) -> int:
    """Parameters of a whole decoder with a tied head."""
    E = config.embed_dim
    positions = config.embedding.parameter_groups(
        config.vocab_size, E, config.max_positions, read_whole=True
    )
    found = [*positions, *(piece for layer in config.layers for piece in layer.parameter_groups(E))]
    norm = 0 if config.final_norm is None else config.final_norm.parameters(E)
    return sum(piece.count for piece in found) + norm


def _decoder(layouts: Sequence[HeadLayout], sizes: Sizes, hidden_dim: int) -> TransformerConfig:
    network = FeedForwardConfig(hidden_dim)
    layers = tuple(LayerConfig(each, network) for each in layouts)
    return TransformerConfig(
        "decoder", sizes.vocab_size, sizes.embed_dim, sizes.max_positions, layers
    )


def _head_dim(sizes: Sizes, heads: int) -> int:
    if sizes.embed_dim % heads or sizes.embed_dim // heads % 2:
        fitting = [h for h in range(1, sizes.embed_dim + 1) if sizes.embed_dim % (2 * h) == 0]
        raise ConfigError(
            f"heads must divide embed_dim={sizes.embed_dim} into even numbers of features: got "
            f"{heads}; use one of {fitting}"
        )
    return sizes.embed_dim // heads


def _grouped(sizes: Sizes, kv_heads: int, window: int | None = None) -> HeadLayout:
    size = _head_dim(sizes, sizes.heads)
    return AttentionConfig(sizes.heads, kv_heads, size, rope=RopeConfig(), window=window)


def _latent(sizes: Sizes, latent: int, rotated: int) -> HeadLayout:
    size = _head_dim(sizes, sizes.heads)
    return LatentAttentionConfig(sizes.heads, latent, size, rotated, size, rope=RopeConfig())


def _heads(sizes: Sizes, heads: int) -> HeadLayout:
    return AttentionConfig(heads, heads, _head_dim(sizes, heads), rope=RopeConfig())


def _differential(sizes: Sizes) -> HeadLayout:
    size = _head_dim(sizes, sizes.heads)
    return DifferentialAttentionConfig(sizes.heads, sizes.heads, size, rope=RopeConfig())


def _gated(sizes: Sizes) -> HeadLayout:
    size = _head_dim(sizes, sizes.heads)
    return GatedAttentionConfig(sizes.heads, sizes.heads, size, rope=RopeConfig())


def _chosen(sizes: Sizes, keys: int) -> HeadLayout:
    size = _head_dim(sizes, sizes.heads)
    rotated = max(2, size // 4 * 2)
    return SparseLatentAttentionConfig(
        sizes.heads, 4 * size, size, rotated, size, q_lora_rank=sizes.embed_dim // 2,
        rope=RopeConfig(), indexer=IndexerConfig(16, max(rotated, size), keys),
    )  # fmt: skip


def _branches(sizes: Sizes, blocks: int) -> HeadLayout:
    size = _head_dim(sizes, sizes.heads)
    return NativeSparseAttentionConfig(
        sizes.heads, sizes.heads, size, rope=RopeConfig(), block_size=8, stride=4,
        selected_size=16, top_k=blocks, last_keys=32,
    )  # fmt: skip


def _states(kind: Callable[..., HeadLayout]) -> Callable[[Sizes], HeadLayout]:
    def make(sizes: Sizes) -> HeadLayout:
        size = _head_dim(sizes, sizes.heads)
        return kind(sizes.heads, sizes.heads, size, size)

    return make


def _mamba2(sizes: Sizes) -> HeadLayout:
    return Mamba2Config(sizes.heads, 1, 2 * (size := _head_dim(sizes, sizes.heads)), size)


def _hybrid(sizes: Sizes, states: int, full: int) -> tuple[HeadLayout, ...]:
    state, heads = _states(GatedDeltaNetConfig)(sizes), _grouped(sizes, sizes.heads)
    each = states + full
    return tuple(state if i % each < states else heads for i in range(sizes.layers))


_KINDS: tuple[tuple[str, Callable[..., HeadLayout | tuple[HeadLayout, ...]]], ...] = (
    ("mha", lambda sizes: _grouped(sizes, sizes.heads)),
    (r"gqa:(\d{1,9})", _grouped),
    ("mqa", lambda sizes: _grouped(sizes, 1)),
    (r"mla:(\d{1,9})\+(\d{1,9})", _latent),
    (r"window:(\d{1,9})", lambda sizes, window: _grouped(sizes, sizes.heads, window)),
    (r"heads:(\d{1,9})", _heads),
    ("gated", _gated),
    ("diff", _differential),
    (r"nsa:(\d{1,9})", _branches),
    (r"dsa:(\d{1,9})", _chosen),
    ("gdn", _states(GatedDeltaNetConfig)),
    ("kda", _states(KimiDeltaAttentionConfig)),
    ("mamba2", _mamba2),
    (r"hybrid:(\d{1,9})\+(\d{1,9})", _hybrid),
)
