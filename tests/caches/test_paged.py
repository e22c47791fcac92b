"""Pages: where they lie changes nothing, shared ones are never written, free ones never read."""

import copy
import random

import pytest
import torch
from test_state_machine import check_pools

import polyhead as ph
from polyhead.caches import Latent, Paged, PagedCache, Plain, Quantized, StoredCache


def tokens(count, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, count, 8, generator=generator)


def pool_of(cache):
    return next(m.pool for m in cache._memories.values() if hasattr(m, "pool"))


KERNELS = ("tiled", "auto")
STORAGES = {
    "plain": (Plain(), 8),
    "latent": (Latent(6, 2), 6),
    "quantized": (Quantized(group=4, sink_tokens=2, recent=4), 8),
}


@pytest.mark.parametrize("storage", STORAGES)
@torch.no_grad()
def test_fifty_physical_orders_of_pages_are_bit_identical(storage):
    kind, V = STORAGES[storage]
    G = 1 if storage == "latent" else 2
    k, q = tokens(50)[:, :G], torch.randn(2, 4, 5, 8)
    outs = []
    for seed in range(50):
        cache = StoredCache(Paged(8), kind, capacity=64)
        cache.append(k[:, :, :1], k[:, :, :1, :V])
        cache.reset()
        random.Random(seed).shuffle(pool_of(cache).free)
        for part in k.split(13, dim=2):
            source = cache.append(part, part[..., :V])
        outs.append([ph.attention(q, source, mask=ph.Causal(), kernel=k) for k in KERNELS])
    tables = next(m.table for m in cache._memories.values() if hasattr(m, "table"))
    assert tables[0] != sorted(tables[0])
    assert all(torch.equal(*pair) for out in outs for pair in zip(out, outs[0], strict=True))


@torch.no_grad()
def test_forks_share_pages_until_one_of_them_writes():
    cache = PagedCache(4)
    cache.append(tokens(10, batch=1), tokens(10, batch=1))
    fork = cache.fork()
    pool = pool_of(cache)
    assert pool is pool_of(fork)
    assert len(pool.references) - len(pool.free) == 3
    before = cache.source().gather()[0].clone()
    fork.append(tokens(1, batch=1, seed=1), tokens(1, batch=1, seed=1))
    assert len(pool.references) - len(pool.free) == 4
    assert sorted(pool.references, reverse=True)[:4] == [2, 2, 1, 1]
    assert torch.equal(cache.source().gather()[0], before)
    check_pools([cache, fork])


@torch.no_grad()
def test_a_prefix_is_reused_without_copying_it():
    cache = PagedCache(4, capacity=32)
    cache.append(tokens(16, batch=1), tokens(16, batch=1))
    used = cache.used_bytes
    fork = cache.fork()
    fork.crop(8)
    fork.reorder([0, 0, 0])
    pool = pool_of(cache)
    assert len(pool.references) - len(pool.free) == 4
    assert fork.used_bytes == used // 2
    fork.append(tokens(1, batch=3, seed=1), tokens(1, batch=3, seed=1))
    assert len(pool.references) - len(pool.free) == 7
    keys = fork.source().gather()[0]
    assert torch.equal(keys[:, :, :8], tokens(16, batch=1)[:, :, :8].expand(3, -1, -1, -1))


@torch.no_grad()
def test_pages_come_back_when_a_fork_is_dropped_and_when_tokens_are_taken_back():
    cache = PagedCache(4)
    cache.append(tokens(16), tokens(16))
    fork = cache.fork()
    fork.append(tokens(9, seed=1), tokens(9, seed=1))
    pool = pool_of(cache)
    taken = len(pool.references) - len(pool.free)
    assert taken == 8 + 6
    del fork
    assert len(pool.references) - len(pool.free) == 8
    cache.rollback(9)
    assert len(pool.references) - len(pool.free) == 4
    cache.reset()
    assert len(pool.references) == len(pool.free)


@torch.no_grad()
def test_garbage_in_free_pages_and_behind_short_rows_is_never_seen():
    cache = PagedCache(4)
    cache.append(tokens(20), tokens(20))
    cache.reset()
    check_pools([cache])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [-1, -1, 0, -1, 1, -1, -1]])
    k, q = tokens(7), torch.randn(2, 4, 7, 8)
    source = cache.append(k, k, positions)
    check_pools([cache])
    out = ph.attention(q, source, mask=ph.Causal(), q_positions=positions)
    assert out.isfinite().all()
    assert (out[1, :, [0, 1, 3, 5, 6]] == 0).all()


@torch.no_grad()
def test_views_of_the_pages_are_made_anew_when_these_move_and_only_then():
    cache = PagedCache(4)
    cache.append(tokens(3), tokens(3))
    for count in (1, 1, 30, 1):
        memory, fork = cache._memories["tokens"], cache.fork()
        tensors, before = [*memory.tensors], memory.as_views()
        cache.append(tokens(count), tokens(count))
        moved = [x is not y for x, y in zip(tensors, memory.tensors, strict=True)]
        assert [x is not y for x, y in zip(before, memory.as_views(), strict=True)] == moved
        for view, tensor in zip(memory.as_views(), memory.tensors, strict=True):
            assert view.is_set_to(tensor.transpose(0, 1))
    fork.append(tokens(1), tokens(1), torch.tensor([50]))  # another fork stores positions
    assert [len(c._memories["tokens"].as_views()) for c in (cache, fork)] == [2, 3]


@torch.no_grad()
@torch.no_grad()
def test_the_table_is_made_anew_where_pages_are_given_back_and_only_then():
    cache = PagedCache(4)
    cache.append(tokens(7), tokens(7))
    pages = cache.pages
    table = pages.page_index()
    cache.rollback(2)
    assert pages.page_index() is table
    cache.append(tokens(1), tokens(1))
    cache.rollback([2, 1])  # the first row's second page is free now
    assert pages.page_index() is not table
    assert [*map(len, pages.table)] == [1, 2]
    assert pages.page_index()[1, :2].tolist() == pages.table[1]


@pytest.mark.parametrize("page", [16, 48])
def test_tiles_of_pages_are_small_and_cover_every_key_once(page):
    cache = PagedCache(page)
    source = cache.append(tokens(3000, batch=1), tokens(3000, batch=1))
    tiles = source.tiles(1 << 20)
    assert 1024 - page < max(tile.length for tile in tiles) <= 1024
    assert all(tile.start % page == 0 for tile in tiles)
    assert [i for t in tiles for i in range(t.start, t.start + t.length)] == list(range(3000))
    assert source.gather_bytes == 3000 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PagedCache(0), "page_size must be a whole number from 1 to 1,048,576: got 0"),
        (lambda: PagedCache(2.5), "page_size must be a whole number from 1 to 1,048,576: got 2.5"),
        (
            lambda: PagedCache(48, storage=Quantized(group=32)),
            "page_size must be a multiple of group=32: got 48",
        ),
    ],
)
def test_impossible_pages_are_refused_by_name(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert words in str(error.value)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(6))
def test_slots_are_reserved_in_pages_of_ones_own(seed):
    """As the native step writes: reserve, then fill; beside forks that share the last pages."""
    draw = random.Random(seed)
    cache = PagedCache(4)
    k = tokens(draw.randint(1, 9), batch=3, seed=seed)
    cache.append(k, k)
    alive = [(cache, [[*row.unbind(1)] for row in k])]
    for step in range(60):
        held, rows = alive[draw.randrange(len(alive))]
        act = draw.random()
        if act < 0.12 and len(alive) < 4:
            alive.append((held.fork(), [[*row] for row in rows]))
        elif act < 0.16:
            alive.append((copy.deepcopy(held), [[*row] for row in rows]))
        elif act < 0.22 and held is not cache:
            alive[:] = [each for each in alive if each[0] is not held]
        elif act < 0.3:
            back = [draw.randint(0, min(3, len(row) - 1)) for row in rows]
            held.rollback(back)
            for row, count in zip(rows, back, strict=True):
                del row[len(row) - count :]
        elif act < 0.36:
            order = [draw.randrange(len(rows)) for _ in rows]
            held.reorder(order)
            rows[:] = [[*rows[i]] for i in order]
        else:
            counts = [draw.randint(1, 3) if draw.random() < 0.3 else 1 for _ in rows]
            with held.in_use:
                ((pages, _, _, stop, table, *_),) = held.reserve_slots(None, counts)
                if draw.random() < 0.1:
                    held.release_slots()
                    continue
                for b, count in enumerate(counts):
                    for _ in range(count):
                        token, place = tokens(1, 1, 100 * step + b)[0, :, 0], len(rows[b])
                        pages[table[b, place // 4], :, place % 4] = token
                        rows[b].append(token)
            assert stop == max(map(len, rows))
        for other, expected in alive:
            assert other.lengths == [*map(len, expected)]
            keys = other.source().gather()[0]
            for b, row in enumerate(expected):
                assert torch.equal(keys[b, :, : len(row)], torch.stack(row, dim=1))
    check_pools([other for other, _ in alive if pool_of(other) is pool_of(cache)])


@torch.no_grad()
def test_a_fork_ends_what_a_cache_knows_to_be_its_own():
    cache = PagedCache(8)
    cache.append(tokens(3), tokens(3))
    with cache.in_use:
        cache.reserve_slots(None, 1)
    fork = cache.fork()
    with cache.in_use:
        cache.reserve_slots(None, 1)
    pages, shared = (c._memories["tokens"].table for c in (cache, fork))
    assert all(a != b for a, b in zip(pages, shared, strict=True))
    check_pools([cache, fork])
