"""Small models of every kind and histories of their caches, drawn at random from a seed."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import polyhead as ph
from polyhead.caches import ModelCache, Quantized
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    CrossLayerAttentionConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    HeadLayout,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    Network,
    NormConfig,
    QKNormConfig,
    QueryTemperatureConfig,
    RelativeBiasConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.layers import (
    DifferentialAttentionConfig,
    GatedAttentionConfig,
    OffByOneAttentionConfig,
    ScalableSoftmaxAttentionConfig,
)

WORDS, LENGTH = 50, 160
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "xielu")


class Drawn:
    """Draws parts of a model.

    Args:
        seed: The same seed draws the same model and history.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def norm(self) -> NormConfig:
        if self.chance(0.3):
            return NormConfig("layernorm", bias=self.chance(0.5))
        if self.chance(0.1):
            return NormConfig(weight=False)
        return NormConfig(weight_offset=self.one(0.0, 0.0, 1.0))

    def rope(self, features: int) -> RopeConfig | None:
        if self.chance(0.25):
            return None
        return RopeConfig(
            theta=self.one(1e4, 50.0), dim=self.one(None, None, features // 2 // 2 * 2 or 2)
        )

    def latent(self, heads: int) -> HeadLayout:
        into = self.one(None, None, 12, 20)
        return LatentAttentionConfig(
            num_heads=heads,
            kv_lora_rank=self.one(4, 8, 24, 32),
            qk_nope_head_dim=self.one(0, 6, 8, 16),
            qk_rope_head_dim=self.one(2, 4, 8),
            v_head_dim=self.one(4, 7, 16),
            q_lora_rank=into,
            bias=self.chance(0.3),
            q_bias=into is None and self.chance(0.2),
            norm=None if self.chance(0.1) else NormConfig(eps=1e-6),
            rope=None if self.chance(0.1) else RopeConfig(),
        )

    def heads(self, heads: int, *, alibi: bool) -> HeadLayout:
        D = self.one(4, 8, 10, 16, 32)
        options: dict[str, Any] = {
            "rope": self.rope(D),
            "v_head_dim": self.one(None, None, None, 6, 16),
            "qkv_bias": self.chance(0.3),
            "out_bias": self.chance(0.3),
            "softcap": self.one(None, None, None, 5.0),
            "sinks": self.chance(0.2),
            "qkv_clip": self.one(None, None, None, None, 0.8),
        }
        kind = AttentionConfig
        drawn = self.random.random()
        if drawn < 0.15:
            kind = GatedAttentionConfig
            options["gate"] = self.one("sigmoid", "softplus")
            options["gate_per"] = self.one("feature", "head")
            options["gate_bias"] = self.one(None, False, True)
        elif drawn < 0.3 and heads % 2 == 0:
            kind = DifferentialAttentionConfig
            options |= {"sinks": False, "v_head_dim": None}
        elif drawn < 0.34:
            kind = ScalableSoftmaxAttentionConfig
        elif drawn < 0.38:
            kind = OffByOneAttentionConfig
            options["sinks"] = False
        pairs = 2 if kind is DifferentialAttentionConfig else 1
        divisors = [G for G in range(pairs, heads + 1, pairs) if heads % G == 0]
        G = self.random.choice(divisors)
        reach = self.random.random()
        if reach < 0.35:
            options["window"] = self.one(1, 3, 7, 16, 40)
        elif reach < 0.45 and kind is not ScalableSoftmaxAttentionConfig:
            options["chunk"] = self.one(1, 5, 16)
        if self.chance(0.25):
            place = self.one("before_rope", "after_rope", "full_width")
            per_head = place != "full_width" and self.chance(0.3)
            options["qk_norm"] = QKNormConfig(self.norm(), place, per_head)
        if self.chance(0.1):
            options["query_temperature"] = QueryTemperatureConfig(
                0.3, self.one(3, 16), self.one(0, 1)
            )
        if alibi and kind is not DifferentialAttentionConfig:
            options["alibi"] = ALiBiConfig(rounded=self.chance(0.3))
        return kind(heads, G, D, **options)

    def network(self) -> Network:
        plain = FeedForwardConfig(
            self.one(16, 30, 48),
            self.random.choice(ACTIVATIONS),
            gated=self.chance(0.6),
            bias=self.chance(0.3),
            clamp=self.one(None, None, None, 1.0),
        )
        if self.chance(0.75):
            return plain
        if self.chance(0.15):
            return MixtureConfig(plain, 4, self.one(1, 2), scoring="sparsemixer", jitter=0.01)
        groups = self.one(1, 1, 2)
        shared = replace(plain, hidden_dim=20) if self.chance(0.3) else None
        return MixtureConfig(
            plain,
            4,
            self.one(1, 2),
            shared=shared,
            scoring=self.one("softmax", "sigmoid"),
            choice_bias=self.chance(0.3),
            normalize=self.chance(0.5),
            scale=self.one(1.0, 1.5),
            groups=groups,
            groups_per_token=groups,
            router_bias=self.chance(0.3),
            weighs=self.one("output", "output", "input"),
            capacity=self.one(None, None, None, 2),
            shared_scale=1.0 if shared is None else self.one(1.0, 1.0, 0.5),
        )

    def layer(self, heads: int, *, biased: bool, alibi: bool, crosses: bool) -> LayerConfig:
        latent = not alibi and not biased and self.chance(0.25)
        placement = self.one("pre", "pre", "post", "sandwich", "after")
        parallel = None
        if placement == "pre" and not crosses and self.chance(0.25):
            parallel = self.one("one norm", "two norms")
        return LayerConfig(
            self.latent(heads) if latent else self.heads(heads, alibi=alibi),
            self.network(),
            norm=self.norm(),
            norm_placement=placement,
            cross_attention=AttentionConfig(heads, 1, 8) if crosses else None,
            parallel=parallel,
            residual_scale=self.one(1.0, 1.0, 0.5),
            feed_forward_out_norm=placement == "pre" and parallel is None and self.chance(0.2),
        )

    def sharing(self, layers: list[LayerConfig]) -> list[LayerConfig]:
        """The last layer reads the keys and values of the first, where that is of plain heads."""
        source = layers[0].attention
        if type(source) is not AttentionConfig:
            return layers
        own = {field.name: getattr(source, field.name) for field in fields(source)}
        source = replace(
            source,
            v_norm=self.one(None, NormConfig(weight=False)),
            values_from_keys=source.v_head_dim is None and self.chance(0.5),
            hands_on_keys=True,
        )
        reader = CrossLayerAttentionConfig(**own | {"qkv_clip": None}, keys_of=0)
        first, last = replace(layers[0], attention=source), replace(layers[-1], attention=reader)
        return [first, *layers[1:-1], last]

    def config(self) -> TransformerConfig:
        heads, crosses = self.one(1, 2, 3, 4, 6), self.chance(0.1)
        biased, alibi = self.chance(0.1), False
        if not biased:
            alibi = self.chance(0.15)
        made = {"biased": biased, "alibi": alibi}
        layers = [self.layer(heads, crosses=crosses, **made) for _ in range(self.one(1, 2, 2, 3))]
        if biased:
            layers = [
                replace(layer, attention=replace(layer.attention, rope=None)) for layer in layers
            ]
        if self.chance(0.3):
            layers = [layers[0]] * len(layers)
        if len(layers) > 1 and self.chance(0.3):
            layers = self.sharing(layers)
        encoder = tuple(
            replace(layer, cross_attention=None, attention=AttentionConfig(heads, heads, 8))
            for layer in layers[: 1 if crosses else 0]
        )
        return TransformerConfig(
            "encoder-decoder" if crosses else "decoder",
            WORDS,
            self.one(16, 24, 48),
            LENGTH,
            tuple(layers),
            encoder_layers=encoder,
            embedding=EmbeddingConfig(
                positions=self.one(None, None, None, "learned", "sinusoidal")
            ),
            relative_bias=RelativeBiasConfig(8, 20, self.chance(0.3)) if biased else None,
            logit_softcap=self.one(None, None, 20.0),
        )

    def cache(self) -> dict[str, Any]:
        """Arguments of ``new_cache``."""
        options: dict[str, Any] = {
            "kind": self.one("auto", "auto", "dense", "paged"),
            "spare": self.one(0, 0, 3, 8),
            "page_size": self.one(1, 4, 16),
            "capacity": self.one(0, 0, 0, 100),
        }
        if self.chance(0.4):
            group = self.one(2, 4, 8)
            options["quantized"] = Quantized(
                self.one(8, 4), self.one(8, 4), group, self.one(0, 2, 4), self.one(0, 3, 8)
            )
            options["page_size"] = group * self.one(1, 2)
        return options


@dataclass
class Rows:
    """A cache of a model, one of the same model's modules, and the tokens that both hold."""

    caches: list[ModelCache]
    tokens: list[list[int]]
    source: Tensor | None = None
    fresh: bool = True

    def fork(self) -> Rows:
        caches = [cache.fork() for cache in self.caches]
        return Rows(caches, [[*row] for row in self.tokens], self.source, self.fresh)


class Read(NamedTuple):
    """What a call gave of one row's new tokens.

    Attributes:
        step: ``[T, W]`` as the model computes it.
        modules: ``[T, W]`` with every module called.
        tokens: All of the row's tokens, the new ones last.
        source: What the encoder read, ``[1, S]``.
    """

    step: Tensor
    modules: Tensor
    tokens: list[int]
    source: Tensor | None


@dataclass
class History:
    """A model, and what it reads in which order.

    Args:
        seed: Determines everything.
    """

    seed: int
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        drawn = self.drawn = Drawn(self.seed)
        self.config = drawn.config()
        self.dtype = drawn.one(torch.float32, torch.float32, torch.bfloat16, torch.float16)
        self.options = drawn.cache()
        torch.manual_seed(self.seed)
        net = ph.Transformer(self.config).eval()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
        self.net = net.to(self.dtype)
        self.called = copy.deepcopy(self.net)
        for layer in self.called.layers:  # whose modules are then called one by one
            layer.attention.register_forward_hook(lambda *_: None)

    @property
    def is_exact(self) -> bool:
        """Whether caches hold what they were given."""
        return "quantized" not in self.options

    def __iter__(self) -> Iterator[Read]:
        """Plays it."""
        draw = self.drawn
        batch = draw.one(1, 1, 2, 3, 4)
        source = None
        if self.config.encoder_layers:
            source = torch.tensor([[draw.random.randrange(WORDS) for _ in range(7)]] * batch)
        caches = [net.new_cache(**self.options) for net in (self.net, self.called)]
        rows = Rows(caches, [[] for _ in range(batch)], source)
        yield from self.read(rows, draw.random.randint(1, 30), padded=draw.chance(0.3))
        for _ in range(draw.random.randint(3, 8)):
            longest = max(map(len, rows.tokens))
            act = draw.random.random()
            if longest > LENGTH - 40:
                break
            if act < 0.45:
                for _ in range(draw.random.randint(1, 6)):
                    yield from self.read(rows, 1)
            elif act < 0.7:
                yield from self.read(rows, draw.one(2, 3, 4, 8, 9, 17), padded=draw.chance(0.2))
            elif act < 0.85:
                self.roll_back(rows)
            elif act < 0.93:
                left, rows = rows, rows.fork()
                yield from self.read(left, draw.one(1, 2, 5))
            else:
                chosen = [draw.random.randrange(len(rows.tokens)) for _ in range(draw.one(1, 2, 4))]
                if source is None or len(chosen) == len(rows.tokens):
                    self.said.append(f"reorder({chosen})")
                    for cache in rows.caches:
                        cache.reorder(chosen)
                    rows.tokens = [[*rows.tokens[row]] for row in chosen]

    def roll_back(self, rows: Rows) -> None:
        most = min(min(cache.max_rollback for cache in rows.caches), *map(len, rows.tokens))
        if self.drawn.chance(0.5):
            counts = [self.drawn.random.randint(0, most) for _ in rows.tokens]
        else:  # to one length again, as speculative decoding does
            shortest = min(map(len, rows.tokens))
            counts = [min(most, len(row) - shortest) for row in rows.tokens]
        self.said.append(f"rollback({counts})")
        for cache in rows.caches:
            cache.rollback(counts)
        rows.tokens = [row[: len(row) - n] for row, n in zip(rows.tokens, counts, strict=True)]

    def read(self, rows: Rows, count: int, *, padded: bool = False) -> Iterator[Read]:
        """Reads tokens, of some rows fewer, behind padding."""
        draw, batch = self.drawn, len(rows.tokens)
        ids = torch.tensor(
            [[draw.random.randrange(WORDS) for _ in range(count)] for _ in rows.tokens]
        )
        lengths = [draw.random.randint(1, count) if padded else count for _ in rows.tokens]
        real = torch.arange(count) >= count - torch.tensor(lengths)[:, None]
        self.said.append(f"read({lengths} of {count})")
        call: dict[str, Any] = {}
        if rows.fresh and rows.source is not None:
            call["encoder_ids"] = rows.source
        rows.fresh = False
        found = []
        with torch.no_grad():
            for net, cache in zip((self.net, self.called), rows.caches, strict=True):
                if not bool(real.all()):
                    call["positions"] = cache.next_positions(real)
                found.append(net(ids, cache=cache, **call))
        for row in range(batch):
            rows.tokens[row] += ids[row][real[row]].tolist()
            source = None if rows.source is None else rows.source[row : row + 1]
            step, modules = (x[row][real[row]] for x in found)
            yield Read(step, modules, [*rows.tokens[row]], source)
