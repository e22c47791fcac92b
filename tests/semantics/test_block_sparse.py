"""Block-sparse masks: on every kernel that can, forward and backward, through caches and files."""

import pytest
import torch

import polyhead as ph
from polyhead.caches import DenseCache, RingCache
from polyhead.semantics import Tokens, Visibility
from polyhead.semantics.masks import And

SIZE, T, S, H = 4, 18, 27, 4


def blocks(*shape, seed=0):
    return torch.rand(*shape, 7, 7, generator=torch.Generator().manual_seed(seed)) < 0.5


def drawn(table, queries=T, keys=S):
    """The pairs, written separately: which block each token is in."""
    k = torch.arange(keys)
    q = (k[-1:] - torch.arange(queries - 1, -1, -1)).clamp(min=0)
    whole = table.repeat_interleave(SIZE, -2).repeat_interleave(SIZE, -1)
    return whole[..., q[:, None], k].expand(2, H, queries, keys)


@pytest.mark.parametrize("table", [blocks(), blocks(H), blocks(2, 1)], ids=["", "heads", "rows"])
@pytest.mark.parametrize("queries", [T, 40])
def test_every_kernel_sees_the_blocks_of_the_table(table, queries, small_tiles):
    mask, explicit = ph.BlockSparse(table, SIZE), ph.Keep(drawn(table, queries))
    torch.manual_seed(0)
    tensors = [torch.randn(2, n, x, 8) for n, x in ((H, queries), (2, S), (2, S))]
    tensors = [x.requires_grad_() for x in tensors]
    for asked, wanted in ((mask, explicit), (mask & ph.Causal(), explicit & ph.Causal())):
        found = {}
        for kernel, one in (("reference", wanted), ("reference", asked), ("tiled", asked)):
            out = ph.attention(*tensors, mask=one, kernel=kernel)
            grads = torch.autograd.grad(out.cos().sum(), tensors)
            found.setdefault(kernel, []).append([out, *grads])
        for parts in (*found["reference"], *found["tiled"]):
            torch.testing.assert_close(parts, found["reference"][0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ph.UnsupportedError, match=r"'native' cannot do mask=BlockSparse"):
        ph.attention(*tensors, mask=mask, kernel="native")


@pytest.mark.parametrize("size", [5, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 2), (20, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 500), (7, 500), (200, 500), (330, 330)])
def test_native_code_visits_the_visible_blocks(size, heads, kv_heads, queries, keys):
    torch.manual_seed(size)
    count = -(-keys // size)
    q, k, v = (
        torch.randn(2, n, x, 32) for n, x in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    )
    for shape in ((), (heads,), (2, 1)):
        mask = ph.BlockSparse(torch.rand(*shape, count, count) < 0.4, size)
        for one in (mask, mask & ph.Causal(), mask & ph.Window(90)):
            assert ph.explain(q, k, v, mask=one).kernel == "native"
            found = ph.attention(q, k, v, mask=one, return_lse=True)
            want = ph.attention(q, k, v, mask=one, return_lse=True, kernel="reference")
            torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_rows_have_the_bits_that_they_have_alone():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 40, 32), torch.randn(1, 2, 60, 32), torch.randn(1, 2, 60, 32)
    mask = ph.BlockSparse(torch.rand(4, 4) < 0.5, 16) & ph.Causal()
    with ph.batch_invariant():
        whole = ph.attention(q, k, v, mask=mask)
        for t in range(40):
            keys = slice(0, 21 + t)
            alone = ph.attention(q[:, :, t : t + 1], k[:, :, keys], v[:, :, keys], mask=mask)
            assert torch.equal(alone, whole[:, :, t : t + 1])


def test_queries_before_the_first_key_belong_to_the_first_block():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 30, 16), torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    mask = ph.BlockSparse(torch.rand(5, 5) < 0.5, SIZE)
    want = ph.attention(q, k, v, mask=mask, kernel="reference")
    torch.testing.assert_close(ph.attention(q, k, v, mask=mask), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("first", [0, 8, 10])
def test_blocks_count_places_where_earlier_keys_were_forgotten(first):
    torch.manual_seed(first)
    q, k, v = (torch.randn(2, n, x, 32) for n, x in ((4, 5), (2, 30), (2, 30)))
    mask = ph.BlockSparse(torch.rand(10, 10) < 0.5, SIZE)
    source = ph.DenseSource(k, v, first_place=first)
    want = ph.attention(q, source, mask=mask, kernel="reference")
    assert (ph.explain(q, source, mask=mask).kernel == "native") == (first % SIZE == 0)
    torch.testing.assert_close(ph.attention(q, source, mask=mask), want, atol=1e-5, rtol=1e-5)


def test_blocks_that_nobody_sees_are_skipped_and_full_ones_not_drawn():
    table = torch.zeros(8, 8, dtype=torch.bool)
    table[2:4, 1:5] = True
    mask = ph.BlockSparse(table, SIZE)
    q, k = Tokens.of(32).split(8), Tokens.of(32).split(8)
    assert mask.classify(q[1], k[1]) is Visibility.ALL
    assert mask.classify(q[1], k[0]) is Visibility.SOME
    assert mask.classify(q[0], k[1]) is mask.classify(q[1], k[3]) is Visibility.NONE
    for rows in q:
        for keys in k:
            seen = mask.visible(rows, keys, torch.device("cpu"))
            kind = mask.classify(rows, keys)
            assert seen.all() == (kind is Visibility.ALL)
            assert (not seen.any()) == (kind is Visibility.NONE)


def test_through_a_cache_heads_rows_and_a_file(tmp_path):
    mask = ph.BlockSparse(blocks(2, H), SIZE)
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, n, S, 8) for n in (H, 2, 2))
    whole = ph.attention(q, k, v, mask=mask & ph.Causal())
    for cache in (DenseCache(), RingCache(window=S)):
        for a, b in ((0, 20), (20, 21), (21, S)):
            source = cache.append(k[:, :, a:b], v[:, :, a:b])
            part = ph.attention(q[:, :, a:b], source, mask=mask & ph.Causal())
            torch.testing.assert_close(part, whole[:, :, a:b], atol=1e-5, rtol=1e-5)
    one = mask.of_rows([1]).of_heads([2, 3])
    some = ph.attention(q[1:, 2:], k[1:, 1:], v[1:, 1:], mask=one & ph.Causal())
    torch.testing.assert_close(some, whole[1:, 2:], atol=1e-5, rtol=1e-5)

    layer = ph.MultiHeadAttention(32, H)
    with ph.probe(layer) as seen:
        layer(torch.randn(2, S, 32), mask=mask & ph.Causal())
    seen.save(tmp_path / "probe")
    again = ph.Probe.load(tmp_path / "probe")
    (view,), (kept,) = seen, again
    assert type(kept.call.spec.mask) is And
    assert torch.equal(kept.call.spec.mask.left.blocks, mask.blocks)
    torch.testing.assert_close(kept.rows(queries=slice(5, 6)), view.rows(queries=slice(5, 6)))
    assert not kept.rows(queries=slice(5, 6))[0, 0, 0][~drawn(mask.blocks[:1], S)[0, 0, 5]].any()


@pytest.mark.parametrize(
    ("error", "words", "make"),
    [
        (TypeError, "bool tensor: got torch.float32", lambda: ph.BlockSparse(torch.ones(2, 2), 4)),
        (ValueError, r"got shape \[3\]", lambda: ph.BlockSparse(torch.ones(3) > 0, 4)),
        (ValueError, "block_size", lambda: ph.BlockSparse(blocks(), 0)),
        (ValueError, "28 tok.*: got 29", lambda: ph.BlockSparse(blocks(), 4).check(1, 1, 1, 29)),
        (ValueError, "or 2 heads: got 1 ", lambda: ph.BlockSparse(blocks(4), 4).check(1, 2, 1, 5)),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(error, words, make):
    with pytest.raises(error, match=words):
        make()
