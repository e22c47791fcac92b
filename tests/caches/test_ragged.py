"""Rows of different lengths: padded on either side or packed, each attends as it would alone."""

import pytest
import torch

import polyhead as ph
from polyhead.caches import (
    Dense,
    DenseCache,
    Latent,
    LatentCache,
    Paged,
    PagedCache,
    Plain,
    Quantized,
    QuantizedCache,
    Ring,
    RingCache,
    StoredCache,
    memory,
    pages,
)
from polyhead.caches.source import NO_POSITION

WINDOW = 6
CACHES = {
    "dense": (lambda: DenseCache(), None),
    "ring": (lambda: RingCache(WINDOW), WINDOW),
    "ring with spare": (lambda: RingCache(WINDOW, spare=20), WINDOW),
    "paged": (lambda: PagedCache(4), None),
    "quantized": (lambda: QuantizedCache(group=4, sink_tokens=2, recent=3), None),
    "paged × quantized": (
        lambda: StoredCache(Paged(4), Quantized(group=4, sink_tokens=2, recent=3)),
        None,
    ),
}
PROMPTS = [5, 11, 1, 8]


def layer(window):
    torch.manual_seed(1)
    return ph.MultiHeadAttention(16, 4, 2, rope=ph.RoPE(), window=window, bias=False).eval()


def padded(side, lengths, generator):
    """``[B, T]`` True for tokens, with padding on one side or scattered."""
    width = max(lengths) + 2
    rows = []
    for n in lengths:
        places = {"left": range(width - n, width), "right": range(n)}.get(side)
        if places is None:
            places = torch.randperm(width, generator=generator)[:n].tolist()
        rows.append([i in places for i in range(width)])
    return torch.tensor(rows)


@pytest.mark.parametrize("side", ["left", "right", "scattered"])
@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_every_row_of_a_padded_batch_equals_its_solo_run(kind, side):
    make, window = CACHES[kind]
    attn, cache = layer(window), make()
    alone = [make() for _ in PROMPTS]
    generator = torch.Generator().manual_seed(0)
    # A prompt, a second turn of other lengths, and decoding past the window.
    turns = [PROMPTS, [4, 1, 9, 2], *[[1, 1, 1, 1]] * 9]
    for lengths in turns:
        real = padded(side, lengths, generator) if max(lengths) > 1 else torch.ones(4, 1).bool()
        x = torch.randn(*real.shape, 16, generator=generator)
        x[~real] = 1e3
        positions = cache.next_positions(real)
        out = attn(x, mask=ph.Causal(), positions=positions, cache=cache)
        for row, solo in enumerate(alone):
            expected = attn(x[row][real[row]][None], mask=ph.Causal(), cache=solo)[0]
            torch.testing.assert_close(out[row][real[row]], expected, atol=1e-5, rtol=1e-5)
        assert (out[~real] == 0).all()
    assert cache.lengths == [cache.length for cache in alone]


ROWS = CACHES | {
    "quantized ring": (
        lambda: StoredCache(Ring(WINDOW), Quantized(group=4, sink_tokens=0, recent=3)),
        WINDOW,
    )
}


def in_order(source, row=0):
    """Positions, keys and values that a row of a source holds, in the order of position."""
    where = source.tokens.position_tensor(torch.device("cpu")).expand(source.batch, -1)[row]
    held = (where < NO_POSITION).nonzero()[:, 0]
    held = held[where[held].argsort()]
    return [where[held, None], *(x[row][:, held] for x in source.gather())]


@pytest.mark.parametrize("own", [False, True], ids=["places", "own positions"])
@pytest.mark.parametrize("kind", ROWS)
@torch.no_grad()
def test_each_row_of_a_source_is_the_source_of_that_row_alone(kind, own):
    generator = torch.Generator().manual_seed(5)
    make, window = ROWS[kind]
    cache, alone = make(), [make() for _ in range(3)]
    for lengths in ([5, 9, 1], [4, 0, 2], [3, 30, 12], [1, 1, 1], [2, 2, 7], [9, 1, 8]):
        real = padded("scattered", lengths, generator)
        k, v = torch.randn(2, 3, 2, real.shape[1], 8, generator=generator)
        positions = cache.next_positions(real)
        if own:
            positions = torch.where(real, 3 * positions + torch.tensor([[7], [100], [0]]), -1)
        source = cache.append(k, v, positions)
        for row, solo in enumerate(alone):
            new = [x[row : row + 1, :, real[row]] for x in (k, v)]
            expected = in_order(solo.append(*new, positions[row, real[row]]))
            found = [in_order(source, row)]
            if source.of_row is not None:
                one = source.of_row(row)
                found.append(in_order(one))
                assert torch.equal(one.gather()[0], found[-1][1][None])  # in the order of place
            # A ring may hold more than the first new query sees, alone or beside others.
            seen = min(solo.length, (window or solo.length) + lengths[row] - 1)
            for have in found:
                most = min(len(have[0]), len(expected[0]))
                assert most >= seen
                assert window or len(have[0]) == len(expected[0])
                for x, y in zip(have, expected, strict=True):
                    assert torch.equal(x[..., -most:, :], y[..., -most:, :])


@pytest.mark.parametrize("layout", [Dense(), Paged(8), Ring(WINDOW)], ids=repr)
@pytest.mark.parametrize(
    "storage", [Plain(), Quantized(group=8, sink_tokens=0, recent=3)], ids=repr
)
@torch.no_grad()
def test_what_memory_held_before_changes_no_bits(layout, storage, monkeypatch):
    torch.manual_seed(0)
    attn = ph.MultiHeadAttention(32, 1, rope=ph.RoPE()).eval()
    mask = ph.Causal() & ph.Window(WINDOW)
    real = torch.arange(26) < torch.tensor([6, 26, 20])[:, None]
    x = [torch.randn(3, count, 32) for count in (26, *[1] * 9)]
    made = memory.empty

    def run(before):
        def empty(shape, dtype, device):
            return made(shape, dtype, device).fill_(before if dtype.is_floating_point else 77)

        monkeypatch.setattr(memory, "empty", empty)
        monkeypatch.setattr(pages, "empty", empty)
        cache = StoredCache(layout, storage)
        first = attn(x[0], mask=mask, positions=cache.next_positions(real), cache=cache)
        rest = [attn(part, mask=mask, cache=cache) for part in x[1:]]
        return [first.masked_fill(~real[..., None], 0.0), *rest]

    assert all(map(torch.equal, run(0.0), run(torch.nan)))


@pytest.mark.parametrize(("layout", "window"), [(Dense(), None), (Ring(WINDOW), WINDOW)])
@torch.no_grad()
def test_padding_is_not_remembered_so_it_takes_no_room(layout, window):
    cache = StoredCache(layout, Plain())
    k = torch.randn(2, 1, 6, 4)
    real = torch.tensor([[False] * 4 + [True] * 2, [True] * 3 + [False] * 3])
    cache.append(k, k, cache.next_positions(real))
    assert cache.lengths == [2, 3]
    assert cache.used_bytes == (2 + 3) * 2 * 4 * 4
    keys = cache.source().gather()[0]
    assert torch.equal(keys[0, :, :2], k[0, :, 4:])
    assert torch.equal(keys[1, :, :3], k[1, :, :3])


def uneven():
    """A source whose second row holds 3 of 7 tokens, its k and v, and queries."""
    cache = PagedCache(4)
    k, v = torch.randn(2, 2, 2, 7, 8, generator=torch.Generator().manual_seed(0))
    real = torch.tensor([[True] * 7, [True] * 3 + [False] * 4])
    source = cache.append(k, v, cache.next_positions(real))
    q = torch.randn(2, 4, 1, 8, generator=torch.Generator().manual_seed(1))
    return source, q, k, v, torch.tensor([[6], [2]])


@pytest.mark.parametrize("kernel", ["reference", "tiled", "auto"])
@pytest.mark.parametrize(
    "mask",
    [None, ph.Window(3, ahead=5), ph.Prefix(5), ~ph.Prefix(1), ph.Causal() | ph.Prefix(6)],
    ids=repr,
)
@torch.no_grad()
def test_a_call_that_is_not_causal_never_sees_what_a_row_does_not_hold(mask, kernel):
    source, q, k, v, q_positions = uneven()
    out = ph.attention(q, source, mask=mask, q_positions=q_positions, kernel=kernel)
    for row, held in ((0, 7), (1, 3)):
        one = slice(row, row + 1)
        alone = ph.attention(q[one], k[one, :, :held], v[one, :, :held], mask=mask)
        torch.testing.assert_close(out[one], alone)
    if mask is None:
        torch.testing.assert_close(out, ph.attention(q, source, kernel=kernel))
        torch.testing.assert_close(out, ph.attention(q, source, mask=source.mask, kernel=kernel))


def test_what_uneven_rows_cannot_answer_is_refused_by_name():
    source, q, *_, q_positions = uneven()
    for options in ({"mask": ph.Causal()}, {"mask": ph.Window(3)}, {"bias": ph.ALiBi(4)}):
        with pytest.raises(ValueError, match="q_positions is needed with a source whose rows dif"):
            ph.attention(q, source, **options)
    for mask in (ph.KeyLengths([7, 3]), ph.Causal() & ~ph.Documents([4, 3])):
        with pytest.raises(ValueError, match=r"(KeyLengths|Documents)\(.*counts places.*Prefix"):
            ph.attention(q, source, mask=mask, q_positions=q_positions)


@pytest.mark.parametrize("make", [lambda: DenseCache(), lambda: PagedCache(4)])
@pytest.mark.parametrize("chunk", [1, 4, 17])
@torch.no_grad()
def test_packed_documents_through_a_cache_equal_their_solo_runs(make, chunk):
    attn, cache = layer(None), make()
    lengths = [5, 9, 3]
    x = torch.randn(1, 17, 16)
    positions = ph.Documents(lengths).positions()
    outs, done = [], 0
    for part in x.split(chunk, dim=1):
        where = positions[done : done + part.shape[1]]
        done += part.shape[1]
        so_far = [n for n in (5, min(9, done - 5), min(3, done - 14)) if n > 0]
        so_far[0] = min(5, done)
        mask = ph.Causal() & ph.Documents(so_far)
        outs.append(attn(part, mask=mask, positions=where, cache=cache))
    out = torch.cat(outs, dim=1)
    for document, packed in zip(x.split(lengths, dim=1), out.split(lengths, dim=1), strict=True):
        alone = attn(document, mask=ph.Causal())
        torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    assert cache.positions.tolist() in (positions.tolist(), [positions.tolist()])


@pytest.mark.parametrize("kind", [*CACHES, "latent"])
@torch.no_grad()
def test_positions_of_the_callers_own_are_remembered_through_everything(kind):
    make = CACHES[kind][0] if kind in CACHES else lambda: LatentCache(6, 2)
    G, V = (1, 6) if kind == "latent" else (2, 8)
    cache = make()
    k = torch.randn(2, G, 20, 8)
    own = torch.arange(20) * 3 + torch.tensor([[7], [100]])
    for part, where in zip(k[:, :, :12].split(5, 2), own[:, :12].split(5, 1), strict=True):
        cache.append(part, part[..., :V], where)
    held = cache.source().tokens.length
    assert torch.equal(cache.positions, own[:, 12 - held : 12])
    cache.reorder([1, 0])
    fork = cache.fork()
    fork.append(k[:, :, 12:13], k[:, :, 12:13, :V], own[[1, 0], 12:13])
    assert torch.equal(fork.positions[:, -1], own[[1, 0], 12])
    held = cache.source().tokens.length
    assert torch.equal(cache.positions, own[[1, 0], 12 - held : 12])
    with pytest.raises(ValueError, match="positions must be given at every append"):
        cache.append(k[:, :, :1], k[:, :, :1, :V])


@torch.no_grad()
def test_a_fork_that_starts_to_store_positions_leaves_the_others_as_they_were():
    cache = PagedCache(4)
    k = torch.randn(1, 2, 6, 8)
    cache.append(k, k)
    fork = cache.fork()
    fork.append(k[:, :, :1], k[:, :, :1], torch.tensor([50]))
    assert fork.positions.tolist() == [[0, 1, 2, 3, 4, 5, 50]]
    cache.append(k[:, :, :2], k[:, :, :2])
    assert cache.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    cache.append(k[:, :, :1], k[:, :, :1], torch.tensor([70]))
    assert cache.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 70]]


@torch.no_grad()
def test_uneven_rows_need_positions_and_say_so():
    cache = DenseCache()
    k = torch.randn(2, 1, 4, 8)
    cache.append(k, k)
    cache.rollback([0, 2])
    assert cache.lengths == [4, 2]
    with pytest.raises(ValueError, match=r"positions must be given .* differ in length .*\[4, 2\]"):
        cache.append(k, k)
    assert cache.lengths == [4, 2]
    with pytest.raises(ValueError, match=r"positions must be \[T\] = \[4\] or \[B, T\] = \[2, 4\]"):
        cache.append(k, k, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"whole numbers: got torch.float32"):
        cache.append(k, k, torch.zeros(2, 4))
    late = torch.tensor([[4, 5, 6, 7], [2**40 - 2, 2**40 - 1, 2**40, -1]])
    with pytest.raises(ValueError, match="below 1,099,511,627,776: got 1,099,511,627,776"):
        cache.append(k, k, late)
    assert cache.lengths == [4, 2]
    source = cache.append(k[:, :, :2], k[:, :, :2], late[:, :2])
    assert torch.equal(in_order(source, 1)[1], k[1][:, [0, 1, 0, 1]])
    with pytest.raises(ValueError, match=r"real must be bool \[B, T\]"):
        cache.next_positions(torch.ones(2, 4))
    with pytest.raises(ValueError, match="real must have batch 2, as the cache: got 3"):
        cache.next_positions(torch.ones(3, 4).bool())


def test_gradients_are_refused_where_they_would_be_lost():
    k = torch.randn(2, 1, 4, 8, requires_grad=True)
    for cache in (RingCache(4), PagedCache(4), QuantizedCache()):
        with pytest.raises(ValueError, match=r"requires a gradient, which a \w+Cache cannot carry"):
            cache.append(k, k)
        assert cache.length == 0
    cache = DenseCache()
    cache.append(k, k)
    cache.rollback([0, 1])
    with pytest.raises(ValueError, match="rows that differ in length cannot carry"):
        cache.append(k, k, cache.next_positions(torch.ones(2, 4).bool()))


def test_a_quantised_latent_ring_takes_a_padded_chunk_longer_than_its_window():
    with torch.no_grad():
        storage = Quantized(group=2, sink_tokens=0, recent=2, latent=Latent(6, 2))
        cache = StoredCache(Ring(WINDOW), storage)
        k = torch.randn(2, 1, 15, 8)
        real = torch.ones(2, 15).bool()
        real[1, ::3] = False
        positions = cache.next_positions(real)
        q = torch.randn(2, 4, 15, 8)
        mask = ph.Causal() & ph.Window(WINDOW)
        source = cache.append(k, k[..., :6], positions)
        out = ph.attention(q, source, mask=mask, q_positions=positions)
        alone = k[1:, :, real[1]]
        expected = ph.attention(q[1:, :, real[1]], alone, alone[..., :6], mask=mask)
        torch.testing.assert_close(out[1:, :, real[1]], expected)


@pytest.mark.parametrize("kernel", ["reference", "tiled", "auto"])
@torch.no_grad()
def test_a_call_that_is_not_causal_sees_of_a_chunk_what_each_row_keeps_of_it(kernel):
    """The first row's chunk pushes its own tokens out of the ring, the second row's does not."""
    counts, k = (15, 5), torch.randn(2, 2, 15, 8)
    real = torch.arange(15) < torch.tensor(counts)[:, None]
    q = torch.randn(2, 4, 1, 8)

    def attended(rows, width):
        cache = StoredCache(Ring(WINDOW), Quantized(group=2, sink_tokens=0, recent=2))
        few = k[rows, :, :width]
        source = cache.append(few, -few, cache.next_positions(real[rows, :width]))
        last = torch.tensor(counts)[rows, None] - 1
        return ph.attention(q[rows], source, q_positions=last, kernel=kernel)

    out = attended(slice(0, 2), 15)
    for row, count in enumerate(counts):
        one = slice(row, row + 1)
        torch.testing.assert_close(out[one], attended(one, count))


def test_a_first_chunk_longer_than_a_ring_is_read_where_it_lies():
    k = torch.randn(1, 2, 15, 8)
    with torch.no_grad():
        source = RingCache(WINDOW).append(k, k)
    assert source.gather_bytes == 0
    assert source.gather()[0].data_ptr() == k.data_ptr()


@torch.no_grad()
def test_what_a_ring_overwrote_does_not_come_back_when_the_overwriting_is_taken_back():
    cache = RingCache(4, spare=4)
    k = torch.arange(10.0).view(1, 1, 10, 1).expand(2, 1, 10, 1)
    cache.append(k, k)
    cache.rollback([0, 2])
    positions = cache.positions
    assert sorted(positions[0].tolist()) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert sorted(positions[1].tolist())[:6] == [2, 3, 4, 5, 6, 7]
    assert (positions[1] >= NO_POSITION).sum() == 2
    assert torch.equal(cache.source().gather()[0][0, 0, :, 0].long(), positions[0])


@torch.inference_mode()
def test_rows_of_different_lengths_are_written_at_once_as_row_by_row():
    """Also where rows share a page that both are going to write."""
    torch.manual_seed(0)
    cache, apart = StoredCache(Paged(4)), []
    first = torch.randn(2, 1, 2, 6, 8)
    cache.append(*first)
    cache.reorder([0, 0, 0])
    cache.rollback([0, 3, 5])
    for length in (6, 3, 1):
        apart.append(StoredCache(Paged(4)))
        apart[-1].append(*first[:, :, :, :length])
    for count in (1, 6, 1):
        k, v = torch.randn(2, 3, 2, count, 8)
        cache.append(k, v)
        for row, single in enumerate(apart):
            single.append(k[row : row + 1], v[row : row + 1])
    assert cache.lengths == [14, 11, 9]
    found = cache.state()[0]
    for row, single in enumerate(apart):
        for name, tensor in single.state()[0].items():
            assert torch.equal(found[name][row : row + 1, :, : tensor.shape[2]], tensor)
