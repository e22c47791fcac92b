"""Masks that are one range of key positions per query, which compiled code reads as two numbers."""

import pytest
import torch

import polyhead as ph
from polyhead.semantics import Tokens
from polyhead.semantics.masks.algebra import Or, Visibility

RANGES = [
    ph.Causal(),
    ph.Window(3),
    ph.Window(4, ahead=1),
    ph.Prefix(4),
    ph.KeyLengths([2, 7]),
    ph.Documents([[3, 6], [5, 4]]),
]


@pytest.mark.parametrize("mask", RANGES, ids=repr)
def test_masks_that_are_a_range_of_positions_draw_that_range_and_so_do_pairs(mask):
    queries, keys, cpu = Tokens.of(9), Tokens.of(9), torch.device("cpu")
    for pair in [mask, *(mask & other for other in RANGES), *(mask | other for other in RANGES)]:
        found = pair.range(queries, keys, cpu)
        if found is None:
            assert isinstance(pair, Or)  # there may be a hole between the two
            continue
        inside = torch.ones(1, 9, 9, dtype=torch.bool)
        if found.low is not None:
            inside = inside & (found.low[..., None] <= torch.arange(9))
        if found.high is not None:
            inside = inside & (torch.arange(9) < found.high[..., None])
        drawn = pair.visible(queries, keys, cpu)
        assert torch.equal(inside[:, None].expand(2, 1, 9, 9), drawn.expand(2, 1, 9, 9)), pair


@pytest.mark.parametrize(
    "mask",
    [
        ph.Prefix(2) | ph.Causal() & ph.Window(3),
        ph.Causal() & ph.Window(3) | ph.Prefix(2),
        ph.Documents([2, 7]) | ph.Prefix(1),
    ],
)
def test_a_mask_with_a_hole_is_no_range_of_positions(mask):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    assert mask.range(Tokens.of(9), Tokens.of(9), q.device) is None
    want = ph.attention(q, k, v, mask=mask, kernel="reference")
    torch.testing.assert_close(ph.attention(q, k, v, mask=mask), want)


@pytest.mark.parametrize(
    "mask",
    [ph.Causal(), ph.Window(8), ph.Window(4, ahead=4), ph.Chunk(8), ph.Chunk(4, 2), ph.Prefix(16)],
    ids=repr,
)
def test_tiles_that_a_mask_of_positions_leaves_empty_or_full_are_known_without_drawing(mask):
    starts = range(0, 64, 4)
    for q, k in ((Tokens.of(4, shift=a), Tokens.of(4, shift=b)) for a in starts for b in starts):
        drawn = mask.visible(q, k, torch.device("cpu"))
        what = Visibility.ALL if drawn.all() else Visibility.SOME
        assert mask.classify(q, k) is (what if drawn.any() else Visibility.NONE), (q, k)


@pytest.mark.parametrize("kind", [ph.Keep, ph.Drop])
def test_an_explicit_mask_beside_a_range_is_read_as_the_tensor_that_it_is(kind):
    tensor = torch.rand(2, 1, 5, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    queries, keys, cpu = Tokens.of(5, shift=4), Tokens.of(9), torch.device("cpu")
    found = (ph.Causal() & kind(tensor)).range(queries, keys, cpu)
    assert torch.equal(found.keep, tensor if kind is ph.Keep else ~tensor)
    assert torch.equal(found.high, ph.Causal().range(queries, keys, cpu).high)
