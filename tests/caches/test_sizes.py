"""Planned bytes are the bytes of the tensors that exist, and growth takes no more than it says."""

import gc
import random
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyhead.caches import (
    Dense,
    Latent,
    Paged,
    Plain,
    Quantized,
    Ring,
    StoredCache,
    cache_bytes,
)
from polyhead.errors import ConfigError


def draw(seed):
    """A random cache as data, and tokens for it."""
    rng = random.Random(seed)
    group = rng.choice([2, 8, 32])
    latent = Latent(rng.choice([8, 33]), rng.choice([0, 4])) if rng.random() < 0.4 else None
    layout = [
        Dense(),
        Ring(rng.randint(1, 150), rng.choice([0, 7])),
        Paged(group * rng.randint(1, 4)),
    ][seed % 3]
    storage = latent or Plain()
    if rng.random() < 0.5:
        sinks = 0 if isinstance(layout, Ring) else rng.choice([0, 4])
        bits = rng.choice([(8, 8), (8, 4), (4, 4)])
        storage = Quantized(*bits, group, sinks, rng.choice([0, 16, 40]), latent)
    heads, key, value = rng.choice([1, 3]), rng.choice([8, 40, 64]), rng.choice([8, 33, 64])
    if latent:
        heads, key, value = 1, latent.kv_lora_rank + latent.qk_rope_head_dim, latent.kv_lora_rank
    return {
        "layout": layout,
        "storage": storage,
        "tokens": rng.choice([0, 1, 63, 64, 65, 200, 333]),
        "batch_size": rng.randint(1, 3),
        "num_kv_heads": heads,
        "key_dim": key,
        "value_dim": value,
        "dtype": rng.choice([torch.float32, torch.bfloat16, torch.float16]),
    }


def tensors_of(case, count):
    shape = (case["batch_size"], case["num_kv_heads"], count)
    k = torch.randn(*shape, case["key_dim"]).to(case["dtype"])
    if isinstance(case["storage"], Latent) or getattr(case["storage"], "latent", None):
        return k, k[..., : case["value_dim"]]
    return k, torch.randn(*shape, case["value_dim"]).to(case["dtype"])


@pytest.fixture(scope="module", autouse=True)
def _only_what_these_tests_make_is_looked_at() -> Iterator[None]:
    """Other tests leave a million objects, which take a second to go through."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def alive():
    """Bytes of the memory of all tensors made here, each store counted once."""
    gc.collect()
    stores = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):
            continue
        try:
            storage = thing.untyped_storage()
            stores[storage.data_ptr()] = storage.nbytes()
        except (RuntimeError, NotImplementedError):
            continue  # left over from a transform: it has no memory of its own
    return sum(stores.values())


@pytest.mark.parametrize("seed", range(30))
@torch.no_grad()
def test_planned_bytes_are_allocated_bytes(seed):
    case = draw(seed)
    planned = cache_bytes(**case)
    k, v = tensors_of(case, case["tokens"])
    before = alive()
    at_once = StoredCache(case["layout"], case["storage"])
    at_once.append(k, v)
    assert alive() - before == at_once.bytes == planned
    reserved = StoredCache(case["layout"], case["storage"], capacity=case["tokens"])
    for part_k, part_v in zip(k.split(50, 2), v.split(50, 2), strict=True):
        reserved.append(part_k, part_v)
    if case["tokens"]:
        assert reserved.bytes == planned


@torch.no_grad()
def test_stored_positions_are_counted_too():
    for storage in (Plain(), Quantized(group=8)):
        cache = StoredCache(Paged(8), storage)
        k = torch.randn(2, 3, 100, 16)
        cache.append(k, k, torch.arange(100) * 2)
        assert cache.bytes == cache_bytes(
            Paged(8),
            storage,
            tokens=100,
            batch_size=2,
            num_kv_heads=3,
            key_dim=16,
            value_dim=16,
            dtype=torch.float32,
            positions=True,
        )


class Peak(TorchDispatchMode):
    """The most bytes that a cache and the memory it asks for took at once."""

    def __init__(self, cache):
        super().__init__()
        self.cache, self.peak, self.calls = cache, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.empty.memory_format:
            self.calls += 1
            self.peak = max(self.peak, self.cache.bytes + result.nbytes)
        return result


@pytest.mark.parametrize(
    ("layout", "storage"),
    [
        *product([Dense(), Paged(16), Ring(3000)], [Plain(), Latent(12, 4)]),
        (Dense(), Quantized()),
        (Paged(32), Quantized(4, 4)),
        (Ring(3000), Quantized(sink_tokens=0)),
        (Paged(32), Quantized(latent=Latent(12, 4))),
    ],
)
@torch.no_grad()
def test_growth_reallocates_log2_times_peaks_at_half_more_and_gives_all_back(layout, storage):
    k = torch.randn(1, 1, 1, 16)
    v = k[..., :12]
    before = alive()
    cache = StoredCache(layout, storage)
    sizes = []
    with Peak(cache) as watch:
        for _ in range(2048):
            cache.append(k, v)
            if cache.bytes not in sizes:
                sizes.append(cache.bytes)
    assert 5 <= len(sizes) <= 12
    assert watch.calls >= len(sizes)
    assert cache.bytes < watch.peak <= 1.5 * cache.bytes
    assert alive() - before == cache.bytes
    del cache, watch
    assert alive() == before


def test_the_arithmetic_of_known_models():
    bf16 = torch.bfloat16
    gemma = {"num_kv_heads": 16, "key_dim": 128, "value_dim": 128, "dtype": bf16}
    tokens = 131_072
    full = cache_bytes(Dense(), Plain(), tokens=tokens, batch_size=1, **gemma)
    local = cache_bytes(Ring(1024), Plain(), tokens=tokens, batch_size=1, **gemma)
    assert round((10 * full + 52 * local) / 2**30, 2) == 10.41
    llama = {"num_kv_heads": 8, "key_dim": 128, "value_dim": 128, "dtype": bf16}
    assert cache_bytes(Dense(), Plain(), tokens=64, batch_size=1, **llama) * 32 == 131_072 * 64
    deepseek = {"num_kv_heads": 1, "key_dim": 576, "value_dim": 512, "dtype": bf16}
    assert (
        cache_bytes(Dense(), Latent(512, 64), tokens=64, batch_size=1, **deepseek) * 61
        == 70_272 * 64
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": -1}, "tokens must be a whole number of at least 0: got -1"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1: got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be a whole number of at least 1: got 0"),
        ({"key_dim": 2.0}, "key_dim must be a whole number of at least 1: got 2.0"),
        ({"storage": Latent(4, 4)}, "holds kv heads, key size and value size (1, 8, 4)"),
    ],
)
def test_impossible_sizes_are_refused_by_name(change, words):
    case = {
        "layout": Dense(),
        "storage": Plain(),
        "tokens": 4,
        "batch_size": 1,
        "num_kv_heads": 2,
        "key_dim": 8,
        "value_dim": 8,
        "dtype": torch.float32,
    }
    with pytest.raises(ConfigError) as error:
        cache_bytes(**case | change)
    assert words in str(error.value)
