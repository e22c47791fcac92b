"""A ring keeps a window in constant memory, whatever the chunks, and says what it cannot undo."""

import pytest
import torch

import polyhead as ph
from polyhead.caches import DenseCache, QuantizedCache, Ring, RingCache

torch.manual_seed(0)
X = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))


def layer(window):
    torch.manual_seed(1)
    return ph.MultiHeadAttention(16, 4, 2, rope=ph.RoPE(), window=window).eval()


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("window", [1, 2, 5, 8, 39, 40, 64])
@pytest.mark.parametrize("chunk", [1, 2, 5, 7, 8, 9, 13, 40])
@torch.no_grad()
def test_any_chunks_over_any_window_equal_one_pass(window, chunk, spare):
    attn, cache = layer(window), RingCache(window, spare=spare)
    whole = attn(X, mask=ph.Causal())
    pieces = [attn(x, mask=ph.Causal(), cache=cache) for x in X.split(chunk, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-5, rtol=1e-5)
    assert cache.length == 40


@torch.no_grad()
def test_memory_is_constant_once_the_window_is_full():
    cache, k = RingCache(64), torch.randn(1, 2, 1, 8)
    seen = set()
    for step in range(300):
        cache.append(k, k)
        if step >= 64:
            seen.add((cache.bytes, cache.used_bytes))
    assert seen == {(64 * 2 * 16 * 4, 64 * 2 * 16 * 4)}


@torch.no_grad()
def test_decoding_reads_the_ring_where_it_lies():
    cache, k = RingCache(8), torch.randn(1, 2, 1, 4)
    for _ in range(11):
        source = cache.append(k, k)
    memory = cache._memories["tokens"].tensors[0]
    first, last = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    tiles = source.tiles(64)
    assert [tile.places for tile in tiles] == [(3, 7), (8, 10)]
    assert all(first <= source.read(tile)[0].data_ptr() < last for tile in tiles)


@torch.no_grad()
def test_a_long_chunk_is_read_where_it_was_given_if_its_rows_are_dense():
    k = torch.randn(1, 2, 9, 8)
    for given, same in ((k, True), (k.mT.contiguous().mT, False)):
        source = RingCache(4).append(given, given)
        (tile,) = source.tiles(64)
        for have in source.read(tile):
            assert torch.equal(have, k)
            assert have.stride(-1) == 1
            assert (have.data_ptr() == given.data_ptr()) is same


@torch.no_grad()
def test_a_chunk_leaves_what_an_earlier_one_pushed_out_visible_to_it_only():
    cache = RingCache(4)
    k = torch.arange(10.0).view(1, 1, 10, 1)
    cache.append(k[:, :, :6], k[:, :, :6])
    assert cache.source().gather()[0].flatten().tolist() == [2, 3, 4, 5]
    seen = cache.append(k[:, :, 6:], k[:, :, 6:])
    assert seen.gather()[0].flatten().tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert sorted(cache.source().gather()[0].flatten().tolist()) == [6, 7, 8, 9]
    assert cache.positions.tolist() == [6, 7, 8, 9]


@torch.no_grad()
def test_rollback_goes_as_far_as_the_next_query_still_finds_its_window():
    cache = RingCache(4, spare=2)
    k = torch.arange(10.0).view(1, 1, 10, 1)
    cache.append(k, k)
    assert cache.max_rollback == 3
    with pytest.raises(
        ValueError, match=r"at most 3 tokens now, or all 10: got 4; a ring of window=4"
    ):
        cache.rollback(4)
    cache.rollback(3)
    assert cache.positions.tolist() == [4, 5, 6]
    with pytest.raises(ValueError, match="at most 0 tokens"):
        cache.rollback(1)
    cache.rollback(7)
    assert cache.length == 0
    assert cache.append(k[:, :, :2], k[:, :, :2]).gather()[0].flatten().tolist() == [0, 1]


@torch.no_grad()
def test_rows_of_equal_length_that_forgot_differently_keep_what_each_still_needs():
    torch.manual_seed(4)
    k, v = torch.randn(2, 2, 2, 20, 8)
    q = torch.randn(2, 4, 1, 8)
    cache = RingCache(8, spare=5)
    real = torch.tensor([[True] * 17, [True] * 15 + [False] * 2])
    cache.append(k[:, :, :17], v[:, :, :17], cache.next_positions(real))
    cache.rollback([5, 3])
    assert cache.lengths == [12, 12]
    cache.rollback([0, 2])
    positions = cache.next_positions(torch.tensor([[True, False], [True, True]]))
    cache.append(k[:, :, 17:19], v[:, :, 17:19], positions)
    assert cache.lengths == [13, 12]
    cache.rollback([1, 0])
    assert cache.lengths == [12, 12]
    with pytest.raises(ValueError, match="positions must be given"):
        cache.append(k[:, :, :1], v[:, :, :1])
    positions = cache.next_positions(torch.ones(2, 1, dtype=torch.bool))
    source = cache.append(k[:, :, 19:], v[:, :, 19:], positions)
    mask = ph.Causal() & ph.Window(8)
    out = ph.attention(q, source, mask=mask, q_positions=positions)
    for b, kept in enumerate(([*range(12), 19], [*range(10), 17, 18, 19])):
        alone = ph.attention(
            q[b : b + 1], k[b : b + 1][:, :, kept], v[b : b + 1][:, :, kept], mask=mask
        )
        torch.testing.assert_close(out[b : b + 1], alone, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_quantised_ring_holds_its_window_in_constant_memory():
    window = 64
    cache = QuantizedCache(group=8, recent=8, layout=Ring(window))
    exact = DenseCache()
    torch.manual_seed(2)
    sizes, q = set(), torch.randn(1, 2, 1, 16)
    mask = ph.Causal() & ph.Window(window)
    for step in range(400):
        k, v = torch.randn(2, 1, 2, 1, 16)
        out = ph.attention(q, cache.append(k, v), mask=mask)
        torch.testing.assert_close(
            out, ph.attention(q, exact.append(k, v), mask=mask), atol=2e-2, rtol=0
        )
        if step >= 2 * window:
            sizes.add(cache.bytes)
    assert len(sizes) == 1
    assert sizes.pop() < window * 2 * 32 * 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RingCache(0), "window must be a whole number of at least 1: got 0"),
        (lambda: RingCache(4, spare=-1), "spare must be a whole number of at least 0: got -1"),
        (
            lambda: RingCache(4, capacity=-1),
            "capacity must be a whole number of at least 0",
        ),
        (
            lambda: QuantizedCache(layout=Ring(64), sink_tokens=4),
            "sink_tokens must be 0 in a ring, which forgets its first tokens: got 4",
        ),
    ],
)
def test_impossible_rings_are_refused_by_name(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert words in str(error.value)
