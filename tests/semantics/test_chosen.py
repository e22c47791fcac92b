"""Chosen keys: one meaning on every kernel, forward and backward, over caches and their files."""

import pytest
import torch

import polyhead as ph
from polyhead.caches import DenseCache, Paged, PagedCache, QuantizedCache, RingCache
from polyhead.kernels.score_mods import score_mods_of
from polyhead.layers import MultiHeadAttention
from polyhead.semantics import Tokens
from polyhead.semantics.arguments import call_of
from polyhead.semantics.masks import Or

B, H, G, T, S = 2, 4, 2, 9, 150
SHAPES = [(B, G, T, 5), (1, 1, T, 5), (B, H, 1, 5), (B, G, 1, 1), (B, H, T, 40)]


def chosen(shape, size, seed=0):
    """Blocks with repeats, empty entries and some behind the last key."""
    blocks = torch.randint(
        -1, -(-S // size) + 2, shape, generator=torch.Generator().manual_seed(seed)
    )
    return ph.Chosen(blocks, size, 1 if shape[1] == 1 else H // shape[1])


def pairs(mask, keys=S):
    """The same pairs, written a second time."""
    held = torch.zeros(*mask.blocks.shape[:3], keys, dtype=torch.bool)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, mask.blocks.shape[:3])).tolist():
        for block in mask.blocks[b, h, t].tolist():
            if block >= 0:
                held[b, h, t, block * mask.size : (block + 1) * mask.size] = True
    return ph.Keep(held.repeat_interleave(mask.group, 1) if held.shape[1] > 1 else held)


def tensors(dim=16, value=16, dtype=torch.float32, queries=T):
    generator = torch.Generator().manual_seed(1)
    shapes = (B, H, queries, dim), (B, G, S, dim), (B, G, S, value)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel_sees_the_chosen_keys(shape, size, small_tiles):
    mask, explicit = chosen(shape, size), pairs(chosen(shape, size))
    inputs = tensors(dim=40, value=24)
    for asked, wanted in (
        (mask, explicit),
        (mask & ph.Causal(), explicit & ph.Causal()),
        (~mask | ph.Window(20), ~explicit | ph.Window(20)),
    ):
        for options in ({}, {"softcap": 3.0, "bias": ph.ALiBi(torch.tensor([0.1, 0.2, 0.3, 0.4]))}):
            learnt = [x.clone().requires_grad_() for x in inputs]
            out, lse = ph.attention(
                *inputs, mask=wanted, kernel="reference", return_lse=True, **options
            )
            for kernel in ("native", "tiled", "reference"):
                if kernel == "native" and isinstance(asked, Or):  # no list of blocks
                    continue
                found = ph.attention(*inputs, mask=asked, kernel=kernel, return_lse=True, **options)
                torch.testing.assert_close(found, (out, lse), atol=1e-5, rtol=1e-5)
            a, b = (
                torch.autograd.grad(ph.attention(*learnt, mask=m, **options).cos().sum(), learnt)
                for m in (asked, wanted)
            )
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_native_bits_depend_on_the_query_alone(dtype, threads):
    """Neither on other queries and rows, nor on threads, order and repeats of the blocks."""
    before = torch.get_num_threads()
    q, k, v = tensors(64, 64, dtype)
    mask = chosen((B, G, T, 6), 16)
    whole = ph.attention(q, k, v, mask=mask & ph.Causal())
    try:
        torch.set_num_threads(threads)
        for t in range(T):
            blocks = mask.blocks[1:, :, t : t + 1].flip(-1)
            one = ph.Chosen(torch.cat([blocks, torch.full_like(blocks, -1)], -1), 16, H // G)
            at = torch.tensor([S - T + t])
            alone = ph.attention(
                q[1:, :, t : t + 1], k[1:], v[1:], mask=one & ph.Causal(), q_positions=at
            )
            with ph.batch_invariant():
                same = ph.attention(
                    q[1:, :, t : t + 1], k[1:], v[1:], mask=one & ph.Causal(), q_positions=at
                )
            assert torch.equal(same, alone)
            assert torch.equal(alone, whole[1:, :, t : t + 1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "cache",
    [DenseCache, lambda: PagedCache(16), lambda: RingCache(256), QuantizedCache,
     lambda: QuantizedCache(4, 4, layout=Paged(32))],
    ids=["dense", "paged", "ring", "8 bits", "4 bits paged"],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 16, 64])
def test_chosen_keys_are_read_where_a_cache_holds_them(cache, size):
    q, k, v = tensors(32, 32)
    held = cache()
    for a, b in ((0, 70), (70, 71), (71, S)):
        source = held.append(k[:, :, a:b], v[:, :, a:b])
    mask = chosen((B, G, T, 7), size) & ph.Causal()
    seen = source.gather()
    want = ph.attention(q, *seen, mask=pairs(mask.left) & ph.Causal(), kernel="reference")
    assert ph.explain(q, source, mask=mask).kernel == "native"
    torch.testing.assert_close(ph.attention(q, source, mask=mask), want, atol=1e-5, rtol=1e-5)


def test_keys_of_a_ring_that_has_turned_stand_in_another_order_by_rows():
    q, k, v = tensors(32, 32)
    held = RingCache(64)
    held.append(k[:, :, :100], v[:, :, :100])
    source, mask = held.append(k[:, :, 100:], v[:, :, 100:]), ph.Chosen(torch.arange(3), 16)
    torch.testing.assert_close(
        ph.attention(q, source, mask=mask),
        ph.attention(q, source, mask=mask, kernel="reference"), atol=1e-5, rtol=1e-5,
    )  # fmt: skip
    with ph.batch_invariant(), pytest.raises(ph.UnsupportedError, match="keys of a ring"):
        ph.attention(q, source, mask=mask)


@pytest.mark.parametrize("heads", [3, 32])
def test_latents_of_many_heads_share_what_was_copied(heads):
    """Values that are the first columns of the keys: with few heads, and in packed tiles."""
    torch.manual_seed(2)
    q, k = torch.randn(1, heads, 3, 48), torch.randn(1, 1, S, 48)
    mask = ph.Chosen(torch.randint(0, S, (3, 70)))
    for v in (k[..., :32], k[..., :32].clone()):
        want = ph.attention(q, k, v, mask=pairs(mask), kernel="reference")
        torch.testing.assert_close(
            ph.attention(q, k, v, mask=mask, kernel="native"), want, atol=1e-5, rtol=1e-5
        )


def test_keys_that_are_not_chosen_have_no_effect():
    q, k, v = tensors(32, 32)
    mask = ph.Chosen(torch.tensor([0, 2, 5]), 16)
    want = ph.attention(q, k, v, mask=mask & ph.Causal())
    k[:, :, 16:32], v[:, :, 100:] = torch.nan, torch.inf
    assert torch.equal(ph.attention(q, k, v, mask=mask & ph.Causal()), want)
    k[:, :, 40] = torch.nan
    assert ph.attention(q, k, v, mask=mask & ph.Causal()).isnan().all()


def test_what_was_chosen_has_no_bounds_that_native_code_would_check_pair_by_pair():
    q, k, v = tensors(queries=1)
    mask = chosen((B, G, 1, 5), 64)
    for each, unbounded in ((mask, True), (mask & ph.Window(9), False)):
        call = call_of(q, k, v, each, *[None] * 7, 0.0, False)
        assert (score_mods_of(call, inference=True).bounds is None) is unbounded


def test_the_highest_scores_are_chosen_and_the_first_of_equal_ones(monkeypatch):
    generator = torch.Generator().manual_seed(4)
    scores = torch.randint(0, 4, (B, G, T, 12), generator=generator).double()
    scores[0, 0, 2, 3:] = -torch.inf
    scores[1, 1, 4, :5] = torch.nan
    for count in (1, 3, 12, 20):
        mask = ph.Chosen.top(scores.requires_grad_(), count, 7, 2)
        assert (mask.size, mask.group) == (7, 2)
        for row, found in zip(
            scores.flatten(0, 2).tolist(), mask.blocks.flatten(0, 2), strict=True
        ):
            real = [i for i in range(12) if row[i] > -torch.inf]
            want = sorted(sorted(real, key=lambda i: -row[i])[:count])
            assert [i for i in found.tolist() if i >= 0] == want
        monkeypatch.setattr("polyhead.semantics.masks.chosen._SCORES", 12)
    assert not ph.Chosen.top(torch.ones(3, 0), 2).blocks.numel()


def test_no_choice_gives_nothing():
    q, k, v = tensors()
    for blocks in (torch.full((3,), -1), torch.empty(0, dtype=torch.int64), torch.tensor([900])):
        out, lse = ph.attention(q, k, v, mask=ph.Chosen(blocks), return_lse=True)
        assert not out.any()
        assert lse.isneginf().all()


def test_what_native_code_does_not_take_goes_elsewhere():
    q, k, v = tensors()
    mask, everyone = chosen((B, G, T, 5), 16), torch.ones(T, S) > 0
    for options in (
        {"mask": mask & ph.Keep(everyone)}, {"mask": mask, "bias": torch.zeros(T, S)},
        {"mask": mask, "dropout_p": 0.1}, {"mask": mask & ph.Chosen(torch.arange(9), 16)},
    ):  # fmt: skip
        found = ph.explain(q, k, v, **options)
        assert found.kernel == "tiled"
        assert "Chosen" in found.refusals["native"]
    assert ph.explain(q.requires_grad_(), k, v, mask=mask).kernel == "tiled"
    both = mask & ph.Chosen(torch.arange(9), 16)
    want = ph.attention(q, k, v, mask=pairs(mask) & pairs(both.right), kernel="reference")
    torch.testing.assert_close(ph.attention(q, k, v, mask=both), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 8])
def test_parts_of_a_call_have_their_part_of_the_choice(size):
    mask = chosen((B, G, T, 6), size)
    whole = pairs(mask).mask

    def drawn(part, queries, keys):
        seen = part.visible(Tokens.of(queries), Tokens.of(keys), torch.device("cpu"))
        return seen.expand(-1, -1, queries, keys)

    for heads in ([0, 1], [2, 3, 0, 1], [1, 2], [3]):
        part = drawn(mask.of_heads(heads), T, S)
        assert torch.equal(part.expand(B, len(heads), T, S), whole[:, heads])
    assert torch.equal(drawn(mask.of_rows([1, 1, 0]), T, S), whole[[1, 1, 0]])
    for keys in (
        slice(16, 64),
        slice(16, S),
        slice(5, 70),
        slice(3, S, 4),
        slice(None),
        slice(0, 3),
    ):
        part = mask.of_tokens(slice(2, 6), keys)
        want = whole[:, :, 2:6, keys]
        assert torch.equal(drawn(part, 4, want.shape[-1]), want), keys


def test_through_a_layer_a_probe_and_a_file(tmp_path):
    torch.manual_seed(3)
    layer, x = MultiHeadAttention(32, H, num_kv_heads=G), torch.randn(B, T, 32)
    mask = ph.Chosen(torch.randint(0, T, (B, G, T, 3)), group=H // G)
    with ph.probe(layer) as seen:
        out = layer(x, mask=mask & ph.Causal())
    explicit = layer(x, mask=pairs(mask, T) & ph.Causal())
    torch.testing.assert_close(out, explicit, atol=1e-5, rtol=1e-5)
    seen.save(tmp_path / "probe")
    (kept,) = ph.Probe.load(tmp_path / "probe")
    assert kept.call.spec.mask == seen[0].call.spec.mask
    assert not kept.rows(queries=slice(0, T))[~(pairs(mask, T).mask)].any()


def called(blocks, group):
    return ph.attention(*tensors(), mask=ph.Chosen(blocks, 4, group))


@pytest.mark.parametrize(
    ("error", "words", "make"),
    [
        (TypeError, "whole numbers: got a torch.float32", lambda: ph.Chosen(torch.ones(3))),
        (TypeError, "whole numbers: got list", lambda: ph.Chosen([1, 2])),
        (ValueError, r"got shape \[\]", lambda: ph.Chosen(torch.tensor(3))),
        (TypeError, "top scores .* got torch.int64", lambda: ph.Chosen.top(torch.arange(3), 1)),
        (ValueError, "top count", lambda: ph.Chosen.top(torch.ones(3), 0)),
        (ValueError, r"\[1, 1, 1, 1, 3\]", lambda: ph.Chosen.top(torch.ones(1, 1, 1, 1, 3), 1)),
        (ValueError, "Chosen size", lambda: ph.Chosen(torch.tensor([3]), 0)),
        (ValueError, "Chosen group", lambda: ph.Chosen(torch.tensor([3]), 4, 0)),
        (ValueError, "divide the 4 .* got 3", lambda: called(torch.tensor([3]), group=3)),
        (ValueError, r"\[2, 2, 9, m\].* \[1, 3, 1, 5\], group 2",
         lambda: called(torch.zeros(3, 1, 5).long(), group=2)),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(error, words, make):
    with pytest.raises(error, match=words):
        make()
