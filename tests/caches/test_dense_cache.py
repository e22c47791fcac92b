"""The dense cache, judged by a list of the tokens it should hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import polyhead as ph
from allocations import measured
from polyhead import Causal, DenseCache, attention
from polyhead.caches import KeyValueCache, ModelCache, RingCache


def tokens(count: int, batch: int = 2, heads: int = 3, k: int = 4, v: int = 5):
    return torch.randn(batch, heads, count, k), torch.randn(batch, heads, count, v)


class AppendAndRollback(RuleBasedStateMachine):
    """Any series of appends and rollbacks holds what concatenation would hold."""

    def __init__(self):
        super().__init__()
        self.cache = DenseCache()
        self.k, self.v = tokens(0)

    @rule(count=st.integers(0, 90), in_inference_mode=st.booleans())
    def append(self, count, in_inference_mode):
        with torch.inference_mode(in_inference_mode):
            k, v = tokens(count)
            source = self.cache.append(k, v)
        held = source.gather()
        self.k, self.v = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
        assert torch.equal(held[0], self.k)
        assert torch.equal(held[1], self.v)

    @rule(data=st.data())
    def rollback(self, data):
        count = data.draw(st.integers(0, self.cache.length))
        self.cache.rollback(count)
        keep = self.k.shape[2] - count
        self.k, self.v = self.k[:, :, :keep], self.v[:, :, :keep]

    @rule()
    def reset(self):
        self.cache.reset()
        self.k, self.v = tokens(0)

    @precondition(lambda self: self.cache.length)
    @rule()
    def attend(self):
        q = torch.randn(2, 6, 1, 4)
        have = attention(q, self.cache.source(), mask=Causal())
        torch.testing.assert_close(have, attention(q, self.k, self.v, mask=Causal()))

    @precondition(lambda self: self.cache.length)
    @rule(
        wrong=st.sampled_from(
            [("batch", {"batch": 1}), ("kv heads", {"heads": 1}), ("head size", {"k": 3}),
             ("head size", {"v": 4})]
        ),
        in_inference_mode=st.booleans(),
    )  # fmt: skip
    def refuse(self, wrong, in_inference_mode):
        words, sizes = wrong
        with torch.inference_mode(in_inference_mode), pytest.raises(ValueError, match=words):
            self.cache.append(*tokens(2, **sizes))

    @invariant()
    def counts_are_right(self):
        assert self.cache.length == self.k.shape[2] <= max(self.cache.capacity, 0)
        if self.cache.length:
            k, v = self.cache.source().gather()
            assert torch.equal(k, self.k)
            assert torch.equal(v, self.v)
            assert self.cache.used_bytes == self.k.nbytes + self.v.nbytes <= self.cache.bytes


TestAppendAndRollback = AppendAndRollback.TestCase
TestAppendAndRollback.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_bytes_are_those_of_the_tensors_allocated():
    cache = DenseCache()
    assert (cache.bytes, cache.used_bytes, cache.capacity) == (0, 0, 0)
    k, v = tokens(70)
    cache.append(k, v)
    assert cache.bytes == (k.nbytes + v.nbytes) // 70 * cache.capacity
    assert cache.used_bytes == k.nbytes + v.nbytes


def test_growth_reallocates_a_logarithmic_number_of_times():
    cache, capacities = DenseCache(), set()
    for _ in range(3000):
        cache.append(*tokens(1, batch=1, heads=1))
        capacities.add(cache.capacity)
    assert len(capacities) <= math.log2(3000)
    assert cache.capacity < 2 * 3000


@pytest.mark.parametrize("how", ["append", "tiled", "auto"])
@pytest.mark.parametrize("make", [DenseCache, lambda: RingCache(20_000)])
@torch.no_grad()
def test_growth_peaks_at_a_quarter_more_than_the_new_capacity(make, how):
    layer = ph.TransformerLayer(64, 4, 8).eval()
    k, one = torch.randn(1, 4, 2047, 16), torch.randn(1, 1, 64)

    def run():
        cache = make()
        cache.append(k, k)
        for _ in range(2):
            if how == "append":
                cache.append(k[:, :, :1], k[:, :, :1])
            else:  # a native step, or modules
                layer(one, mask=ph.Causal(), cache=cache, kernel=how)
        return cache

    peak, cache = measured(run)
    assert cache.capacity == 4096
    assert 1.2 * cache.bytes < peak < 1.26 * cache.bytes


def test_room_that_was_asked_for_is_made_once():
    cache = DenseCache(capacity=1000)
    cache.append(*tokens(1))
    address, capacity = cache.source().gather()[0].data_ptr(), cache.capacity
    cache.append(*tokens(999))
    assert cache.capacity == capacity >= 1000
    assert cache.source().gather()[0].data_ptr() == address


def test_a_reset_keeps_memory_for_what_fits_and_follows_what_does_not():
    cache = DenseCache()
    cache.append(*tokens(5))
    address = cache.source().gather()[0].data_ptr()
    cache.reset()
    assert cache.length == 0
    cache.append(*tokens(3))
    assert cache.source().gather()[0].data_ptr() == address
    cache.reset()
    k, v = tokens(3, batch=1, k=8)
    held, _ = cache.append(k.double(), v.double()).gather()
    assert (held.dtype, held.shape) == (torch.float64, (1, 3, 3, 8))


def test_more_than_is_held_cannot_be_rolled_back():
    cache = DenseCache()
    cache.append(*tokens(3))
    for count in (4, -1):
        with pytest.raises(ValueError, match=f"got {count}"):
            cache.rollback(count)
    assert cache.length == 3


def test_the_source_of_an_empty_cache_is_refused():
    with pytest.raises(ValueError, match="holds no tokens"):
        DenseCache().source()


def test_one_number_counts_for_all_rows_and_others_for_their_own():
    for count, lengths in ((2, [3] * 3), ([2], [3] * 3), ([0, 2, 1], [5, 3, 4])):
        for given in (count, torch.tensor(count)):
            cache = DenseCache()
            cache.append(*tokens(5, batch=3))
            cache.rollback(given)
            assert cache.lengths == lengths
            # In rows of exact tokens nothing but their length differs.
            assert cache.even is KeyValueCache.even.fget(cache) is (len(set(lengths)) == 1)
    for wrong in ([1, 1], [], [1, 1, 1, 1]):
        with pytest.raises(ValueError, match="one number or one per row of 3"):
            cache.rollback(wrong)


@pytest.mark.parametrize(("of_k", "of_v"), [(3, 4), (4, 3), (3, 3), (5, 4), (4, 5)])
def test_keys_and_values_without_four_dimensions_are_refused(of_k, of_v):
    shape = (2, 3, 4, 5, 6)
    with pytest.raises(ValueError, match=r"k must be \[B, G, T, D\] and v \[B, G, T, V\]"):
        DenseCache().append(torch.zeros(shape[:of_k]), torch.zeros(shape[:of_v]))


@pytest.mark.parametrize("gradients", [True, False])
def test_what_does_not_fit_is_refused_and_leaves_the_cache_as_it_was(gradients):
    k, v = tokens(3)
    wrong = [
        ("same B, G, T", k, tokens(4)[1]),
        ("share dtype", k.double(), v),
        ("share dtype", k, v.double()),
        ("share dtype and device", k.to("meta"), v),
        ("share dtype and device", k, v.to("meta")),
    ]
    with torch.set_grad_enabled(gradients):
        cache = DenseCache()
        for words, *pair in wrong:
            with pytest.raises(ValueError, match=words):
                cache.append(*pair)
        cache.append(k, v)
        for words, *pair in [
            *wrong,
            (r"dtype torch\.float32, got torch\.float64", k.double(), v.double()),
            ("device cpu, got meta", k.to("meta"), v.to("meta")),
        ]:
            with pytest.raises(ValueError, match=words):
                cache.append(*pair)
        assert cache.lengths == [3, 3]
        assert all(map(torch.equal, cache.source().gather(), (k, v)))


def test_positions_are_kept_per_row_and_must_go_on():
    cache = DenseCache()
    cache.append(*tokens(2))
    rows = torch.tensor([[5, 6, 9], [2, 3, 4]])
    held = cache.append(*tokens(3), rows).tokens.positions
    assert held.tolist() == [[0, 1, 5, 6, 9], [0, 1, 2, 3, 4]]
    held = cache.append(*tokens(1), torch.tensor([[10], [5]])).tokens.positions
    assert held[:, -1].tolist() == [10, 5]
    cache.rollback(2)
    held = cache.append(*tokens(1), torch.tensor([[7], [8]])).tokens.positions
    assert held.tolist() == [[0, 1, 5, 6, 7], [0, 1, 2, 3, 8]]
    with pytest.raises(ValueError, match=r"positions"):
        cache.append(*tokens(2), torch.arange(3))
    assert cache.length == 5


@pytest.mark.parametrize("make", [DenseCache, lambda: RingCache(3000)])
@torch.no_grad()
def test_one_run_is_one_tile_and_gathered_without_a_copy(make):
    cache = make()
    source = cache.append(*tokens(2500, heads=1))
    rows = cache._memories["tokens"].tensors
    assert source.gather_bytes == 0
    assert [x.data_ptr() for x in source.gather()] == [x.data_ptr() for x in rows]
    (tile,) = source.tiles(2500)
    assert [x.data_ptr() for x in source.read(tile)] == [x.data_ptr() for x in rows]


@torch.no_grad()
def test_what_lies_in_one_piece_is_told_and_nothing_else():
    k, v = tokens(5)
    cache = DenseCache(capacity=20)
    assert cache.held() is None
    for part in (k[:, :, :3], k[:, :, 3:]):
        cache.append(part, v[:, :, : part.shape[2]])
        keys, values, first, count, *others = cache.held()
        assert others == [None] * 4
        for have, want in zip((keys, values), cache.source().gather(), strict=True):
            assert torch.equal(have[:, :, first : first + count], want)
    own, uneven = cache.fork(), cache.fork()
    own.append(k[:, :, :1], v[:, :, :1], torch.tensor([9]))
    uneven.rollback([1, 0])
    cache.reset()
    ring = RingCache(8)
    ring.append(k, v)
    assert [c.held() for c in (own, uneven, cache, ring)] == [None] * 4


def test_gradients_reach_every_token():
    cache, parts = DenseCache(), [tokens(n) for n in (3, 1, 4)]
    for k, v in parts:
        cache.append(k.requires_grad_(), v.requires_grad_())
    k, v = cache.source().gather()
    (k.sum() + 2 * v.sum()).backward()
    for k, v in parts:
        assert torch.equal(k.grad, torch.ones_like(k))
        assert torch.equal(v.grad, torch.full_like(v, 2))
    with torch.no_grad():
        cache.append(*tokens(1))
    assert not cache.source().gather()[0].requires_grad


def test_a_model_cache_moves_its_layers_together():
    cache = ModelCache([DenseCache(), DenseCache()], [DenseCache(), DenseCache()])
    for layer in (*cache.layers, *cache.cross):
        layer.append(*tokens(6))
    cache.rollback(2)
    assert [layer.length for layer in cache.layers] == [4, 4]
    assert [layer.length for layer in cache.cross] == [6, 6]
    assert cache.length == 4
    assert cache.bytes == sum(layer.bytes for layer in (*cache.layers, *cache.cross))
    with pytest.raises(ValueError, match="got 5"):
        cache.rollback(5)
    assert cache.length == 4
    cache.layers[0].append(*tokens(3))
    cache.truncate(4)
    assert [layer.length for layer in cache.layers] == [4, 4]
    cache.reset()
    assert cache.length == cache.cross[0].length == cache.used_bytes == 0


def test_a_model_cache_needs_a_layer():
    with pytest.raises(ValueError, match="at least one layer"):
        ModelCache([])


@pytest.mark.parametrize("make", [DenseCache, lambda: RingCache(4), lambda: RingCache(4, spare=3)])
def test_a_source_tells_where_all_its_keys_lie(make):
    cache = make()
    for count in (3, 5, 1):
        source = cache.append(*tokens(count))
        assert source.in_place
        segments = source.segments()
        for i, whole in enumerate(source.gather()):
            assert torch.equal(torch.cat([(s.k, s.v)[i] for s in segments], dim=2), whole)
        assert [s.tokens.length for s in segments] == [s.k.shape[2] for s in segments]
