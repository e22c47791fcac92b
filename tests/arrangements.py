"""Models and texts arranged at random: batches, chunks, threads, caches, beams."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

import polyhead as ph
from polyhead.config import (
    ALiBiConfig,
    AttentionConfig,
    FeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    QKNormConfig,
    RelativeBiasConfig,
    RopeConfig,
    TransformerConfig,
)

WORDS, TEXTS, LENGTH = 96, 12, 320
LLAMA = LayerConfig(AttentionConfig(6, 2, 32, rope=RopeConfig()), FeedForwardConfig(80))
GEMMA = LayerConfig(
    AttentionConfig(
        4,
        1,
        40,
        rope=RopeConfig(),
        softcap=5.0,
        qk_norm=QKNormConfig(NormConfig(weight_offset=1.0)),
    ),
    FeedForwardConfig(80, "gelu_tanh"),
    norm=NormConfig(weight_offset=1.0),
    norm_placement="sandwich",
)
LAYERNORM = NormConfig("layernorm", bias=True)
WIDE = FeedForwardConfig(64, "gelu", gated=False, bias=True)
EXPERTS = MixtureConfig(FeedForwardConfig(32), 6, 2)
LATENT = LatentAttentionConfig(
    num_heads=5, kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=12
)
T5 = LayerConfig(
    AttentionConfig(4, 4, 16, scale=1.0),
    FeedForwardConfig(80, "relu", gated=False),
    cross_attention=AttentionConfig(4, 4, 16, scale=1.0),
)
LAYERS: dict[str, tuple[LayerConfig, ...]] = {
    "llama": (LLAMA, LLAMA),
    "gemma": (GEMMA, replace(GEMMA, attention=replace(GEMMA.attention, window=37))),
    "gpt2": (LayerConfig(AttentionConfig(3, 3, 16, qkv_bias=True), WIDE, norm=LAYERNORM),),
    "bloom": (replace(LLAMA, attention=AttentionConfig(6, 6, 16, alibi=ALiBiConfig())),) * 2,
    "mixtral": (replace(LLAMA, feed_forward=replace(EXPERTS, normalize=True)),) * 2,
    "deepseek": (
        replace(LLAMA, attention=LATENT),
        LayerConfig(
            replace(LATENT, q_lora_rank=20),
            replace(
                EXPERTS, shared=FeedForwardConfig(48), scoring="sigmoid", choice_bias=True,
                groups=3, groups_per_token=2, scale=1.5,
            ),
        ),
    ),
    "gpt-oss": (
        LayerConfig(
            AttentionConfig(6, 2, 32, rope=RopeConfig(), sinks=True, window=30, qkv_bias=True),
            replace(EXPERTS, router_bias=True, normalize=True),
        ),
    ),
    "falcon": (replace(LLAMA, attention=AttentionConfig(20, 1, 24, rope=RopeConfig())),),
    "twelve heads of a kv head": (
        replace(LLAMA, attention=AttentionConfig(12, 1, 32, rope=RopeConfig())),
    ),
    "t5": (T5, T5),
}  # fmt: skip


@cache
def model(name: str, dtype: torch.dtype) -> ph.Transformer:
    torch.manual_seed(0)
    layers = LAYERS[name]
    config = TransformerConfig("decoder", WORDS, 48, LENGTH, layers)
    if name == "t5":
        reader = tuple(replace(layer, cross_attention=None) for layer in layers)
        config = replace(
            config,
            kind="encoder-decoder",
            encoder_layers=reader,
            relative_bias=RelativeBiasConfig(),
        )
    elif name == "gemma":
        config = replace(config, logit_softcap=30.0, head="untied")
    net = ph.Transformer(config).eval()
    for parameter in net.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    return net.to(dtype)


def texts(length: int) -> Tensor:
    drawn = torch.randint(WORDS, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(1))
    return drawn[:, :length]


def alone(net: ph.Transformer, text: Tensor) -> Tensor:
    """Logits ``[T, W]`` of one text ``[1, T]``, at once and by itself."""
    torch.set_num_threads(1)
    source = {"encoder_ids": text.flip(1)} if net.config.encoder_layers else {}
    with ph.batch_invariant():
        logits: Tensor = net(text, **source)[0]
    return logits


def steps(draw: random.Random, length: int) -> Iterator[tuple[int, int]]:
    """First and last token of every piece that is read: long chunks, short ones, single tokens."""
    first = 0
    while first < length:
        count, times = draw.choice(((1, 6), (draw.randint(2, 8), 2), (draw.randint(9, length), 1)))
        for _ in range(times):
            last = min(length, first + count)
            if first < last:
                yield first, last
            first = last


def arranged(net: ph.Transformer, length: int, seed: int) -> Iterator[tuple[int, int, int, Tensor]]:
    """Texts together: of every row and piece the text, its first and last token, logits.

    Rows are of one length or begin at different tokens behind padding, and change as beams do.
    """
    draw = random.Random(seed)
    torch.set_num_threads(draw.randint(1, 5))
    rows = [draw.randrange(TEXTS) for _ in range(draw.randint(1, TEXTS))]
    shorter = [0] * len(rows)
    if draw.random() < 0.5:
        shorter = [draw.randrange(length // 2) for _ in rows]
        shorter[draw.randrange(len(rows))] = 0
    kind, page_size = draw.choice(("auto", "dense", "paged")), draw.choice((16, 5))
    source = {"encoder_ids": texts(length)[rows].flip(1)} if net.config.encoder_layers else {}
    with ph.batch_invariant():
        held = net.new_cache(kind=kind, page_size=page_size, spare=draw.choice((0, 0, 3)))
        for first, last in steps(draw, length):
            if first and draw.random() < 0.1:
                beams = [draw.randrange(len(rows)) for _ in range(draw.randint(1, TEXTS))]
                held.reorder(beams)
                rows, shorter = ([each[i] for i in beams] for each in (rows, shorter))
            behind = torch.tensor(shorter)[:, None]
            places = torch.arange(first, last) - behind
            piece = texts(length)[torch.tensor(rows)[:, None], places.clamp(min=0)]
            even = not any(shorter)
            logits = net(piece, positions=None if even else places, cache=held, **source)
            source = {}
            for row, back, found in zip(rows, shorter, logits, strict=True):
                if last > back:
                    start = max(first, back)
                    yield row, start - back, last - back, found[start - first :]


def packed(net: ph.Transformer, length: int, seed: int) -> Iterator[tuple[int, int, int, Tensor]]:
    """The same of rows that take numbers of tokens of their own in one call, few or many."""
    draw = random.Random(seed)
    torch.set_num_threads(draw.randint(1, 3))
    rows, read = [draw.randrange(TEXTS) for _ in range(draw.randint(1, 7))], [0] * 7
    with ph.batch_invariant():
        held = net.new_cache(kind=draw.choice(("auto", "dense", "paged")), page_size=5)
        while max(read[: len(rows)]) < length:
            most = draw.choice((1, 5, 9, 40))
            counts = [draw.randint(1, min(most, length)) for _ in rows]
            if draw.random() < 0.3:
                counts = [most] * len(rows)
            ends = [min(length, first + count) for first, count in zip(read, counts, strict=False)]
            going = [place for place, end in enumerate(ends) if end > read[place]]
            if len(going) < len(rows):
                held.reorder(going)
                rows, read, ends = ([each[i] for i in going] for each in (rows, read, ends))
            pieces = [*zip(rows, read, ends, strict=False)]
            ids = torch.cat([texts(length)[row, first:end] for row, first, end in pieces])
            logits = net(ids[None], cache=held, counts=[end - first for _, first, end in pieces])
            found = logits[0].split([end - first for _, first, end in pieces])
            for (row, first, end), each in zip(pieces, found, strict=True):
                yield row, first, end, each
            read = ends


def check(
    net: ph.Transformer,
    length: int,
    seeds: Iterable[int],
    arrange: Callable[..., Iterator[tuple[int, int, int, Tensor]]] = arranged,
) -> int:
    """How many arrangements have the bits of each text alone: all, or an error tells where not."""
    known: dict[int, Tensor] = {}
    count = 0
    for seed in seeds:
        for row, first, last, found in arrange(net, length, seed):
            if row not in known:
                threads = torch.get_num_threads()
                known[row] = alone(net, texts(length)[row : row + 1])
                torch.set_num_threads(threads)
            assert torch.equal(found, known[row][first:last]), (seed, row, first, last)
        count += 1
    return count
