"""Quantized tokens: how far they may be off, which stay exact, and that none is encoded twice."""

import itertools

import pytest
import torch

import polyhead as ph
from polyhead.caches import Latent, LatentCache, QuantizedCache
from polyhead.caches.codecs import Codes, KVChunk
from polyhead.caches.sizes import Quantized


def spread(count, width, dtype=torch.float32, heads=2):
    """Keys whose channels differ in offset and in scale by orders of magnitude, as real ones do."""
    torch.manual_seed(0)
    offset = torch.randn(1, heads, 1, width) * 10
    return (torch.randn(2, heads, count, width) * torch.logspace(-3, 2, width) + offset).to(dtype)


def worst_step(x, bits, dim):
    """The widest step that outward rounding of scale and zero to bfloat16 allows, per group."""
    low, high = x.double().amin(dim, keepdim=True), x.double().amax(dim, keepdim=True)
    return (high - low + low.abs() * 2**-7) * (1 + 2**-7) / (2**bits - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [8, 33, 64])
def test_every_number_is_within_half_a_step_of_its_group(bits, width, dtype):
    storage = Quantized(bits, bits, group=32)
    k, v = spread(64, width, dtype), spread(64, width, dtype) * 0.1
    codec = Codes(storage, width, width, dtype)
    back_k, back_v = codec.decode(codec.encode(KVChunk(k, v)))
    rounding = torch.finfo(dtype).eps
    groups = k.reshape(2, 2, 2, 32, width)
    bound = worst_step(groups, bits, 3) / 2 + (groups.abs().double() + 1e-3) * (rounding + 2**-22)
    assert ((back_k - k).double().abs().reshape(groups.shape) <= bound).all()
    channels = 32 if width % 32 == 0 else width
    groups = v.reshape(2, 2, 64, -1, channels)
    bound = worst_step(groups, bits, 4) / 2 + (groups.abs().double() + 1e-3) * (rounding + 2**-22)
    assert ((back_v - v).double().abs().reshape(groups.shape) <= bound).all()
    assert not torch.equal(back_k, k)


def test_a_group_of_equal_numbers_that_bfloat16_holds_comes_back_exactly():
    k = torch.full((1, 1, 32, 4), 1.5)
    codec = Codes(Quantized(4, 4), 4, 4, k.dtype)
    assert all(torch.equal(x, k) for x in codec.decode(codec.encode(KVChunk(k, k))))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_comes_back_as_nan_in_its_group_only(bad):
    k = spread(64, 8)
    k[0, 1, 40, 3] = bad
    codec = Codes(Quantized(), 8, 8, k.dtype)
    back = codec.decode(codec.encode(KVChunk(k, spread(64, 8))))[0]
    assert back[0, 1, 32:, 3].isnan().all()
    back[0, 1, 32:, 3] = 0
    assert back.isfinite().all()


@torch.no_grad()
def test_first_and_recent_tokens_are_exact_and_the_rest_is_encoded_once():
    cache = QuantizedCache(8, 4, group=8, sink_tokens=4, recent=16)
    k = spread(100, 16)
    history = []
    for token in k.split(1, dim=2):
        keys = cache.append(token, token).gather()[0]
        n = keys.shape[2]
        exact = (keys == k[:, :, :n]).flatten(0, 1).all(dim=2).all(dim=0)
        assert exact[:4].all()
        assert exact[max(0, n - 16) :].all()
        old = [place for place in range(n) if not exact[place]]
        history.append((old, keys[:, :, old].clone()))
    assert len(history[-1][0]) == 80
    for (old, before), (_, after) in itertools.pairwise(history):
        now = after[:, :, : len(old)]
        assert torch.equal(now, before)


@torch.no_grad()
def test_chunks_make_no_difference_to_what_is_remembered():
    k, v = spread(150, 16), spread(150, 32)
    kept = []
    for chunk in (1, 7, 32, 150):
        cache = QuantizedCache(4, 8, group=16, recent=10)
        for part_k, part_v in zip(k.split(chunk, 2), v.split(chunk, 2), strict=True):
            source = cache.append(part_k, part_v)
        kept.append(source.gather())
    assert all(torch.equal(k, kept[0][0]) and torch.equal(v, kept[0][1]) for k, v in kept)


@torch.no_grad()
def test_the_past_is_decoded_a_tile_at_a_time():
    k = torch.randn(1, 2, 5000, 16)
    cache = QuantizedCache()
    cache.append(k, k)
    tiles = cache.source().tiles(1 << 20)
    assert max(tile.length for tile in tiles) <= 1024
    whole = cache.source().gather()[0]
    for tile in tiles:
        part = cache.source().read(tile)[0]
        assert torch.equal(part, whole[:, :, tile.start : tile.start + tile.length])


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
def test_attention_stays_near_the_exact_one(bits):
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 2, 2, 300, 64)
    cache = QuantizedCache(bits, bits)
    out = ph.attention(q, cache.append(k, v), mask=ph.Causal())
    exact = ph.attention(q, k, v, mask=ph.Causal())
    error = (out - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    assert 0 < error < {8: 0.01, 4: 0.15}[bits]


@torch.no_grad()
def test_rollback_stops_at_what_is_quantised():
    cache = QuantizedCache(group=8, sink_tokens=2, recent=4)
    k = spread(30, 8)
    cache.append(k, k)
    assert cache.max_rollback == 4
    with pytest.raises(ValueError, match=r"at most 4 .* quantized in groups of 8 and stay so"):
        cache.crop(20)
    cache.crop(26)
    assert cache.lengths == [26, 26]
    cache.rollback(26)
    assert torch.equal(cache.append(k[:, :, :6], k[:, :, :6]).gather()[0], k[:, :, :6])


@torch.no_grad()
def test_quantised_latents_share_one_memory_and_stay_near_the_exact_ones():
    torch.manual_seed(4)
    latent, q = torch.randn(2, 1, 200, 40), torch.randn(2, 8, 1, 40)
    cache = QuantizedCache(8, latent=Latent(32, 8), group=16)
    k, v = cache.append(latent, latent[..., :32]).gather()
    assert torch.equal(k[..., :32], v)
    exact = LatentCache(32, 8)
    source = exact.append(latent, latent[..., :32])
    assert cache.bytes < exact.bytes / 2
    out = ph.attention(q, cache.source(), mask=ph.Causal())
    torch.testing.assert_close(out, ph.attention(q, source, mask=ph.Causal()), atol=2e-2, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"k_bits": 3}, "k_bits must be 8 or 4: got 3"),
        ({"v_bits": 16}, "v_bits must be 8 or 4: got 16"),
        ({"group": 0}, "group must be a whole number of at least 2: got 0"),
        ({"group": 5}, "group must be even"),
        ({"sink_tokens": -1}, "sink_tokens must be a whole number of at least 0: got -1"),
        ({"recent": -1}, "recent must be a whole number of at least 0: got -1"),
    ],
)
def test_impossible_quantisations_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError) as error:
        QuantizedCache(**arguments)
    assert words in str(error.value)


def test_by_default_4_first_and_32_last_tokens_stay_exact_and_groups_of_32_become_codes():
    cache, k, v = QuantizedCache(), torch.randn(1, 2, 140, 64), torch.randn(1, 2, 140, 64)
    for n in range(1, 141):
        cache.append(k[:, :, n - 1 : n], v[:, :, n - 1 : n])
        coded = 32 * max(0, (n - 4 - 32) // 32)
        for found, given in zip(cache.source().gather(), (k, v), strict=True):
            same = (found == given[:, :, :n]).all(-1).all(1)[0]
            assert (~same).nonzero()[:, 0].tolist() == [*range(4, 4 + coded)]
