"""Keys that native code chooses, beside scores in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import polyhead as ph
from polyhead import native
from polyhead.caches.protocol import KeyValueCache
from polyhead.kernels import choosing
from polyhead.kernels.choosing import choose_keys
from polyhead.native.arguments import DTYPES, NO_SCORE_MODS, KVSegment
from polyhead.semantics import DenseSource

pytestmark = pytest.mark.skipif(native.code() is None, reason="native code is not compiled")
CODES = pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)


@pytest.fixture
def natively(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operations must not run."""
    monkeypatch.setattr(choosing, "_best", None)


def exact(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """``[B, T, S]`` in float64."""
    products = torch.einsum("bhtd,bsd->bhts", q.double(), k[:, 0].double())
    return (weights.double()[..., None] * products.relu()).sum(dim=1)


def best(scores: Tensor, count: int) -> list[int]:
    """Of one row, ascending: of equal scores the first, never NaN and -inf; filled up with -1."""
    rank = [(-float(score), j) for j, score in enumerate(scores) if score > -torch.inf]
    found = sorted(j for _, j in sorted(rank)[:count])
    return found + [-1] * (min(count, len(scores)) - len(found))


def check(chosen: Tensor, scores: Tensor, count: int) -> None:
    assert chosen.tolist() == [[[best(row, count) for row in rows]] for rows in scores]


def whole_numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers whose products and sums are exact, and often equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


@CODES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "J", "T", "S", "D"),
    [(2, 5, 7, 300, 19), (1, 16, 9, 101, 32), (2, 3, 1, 800, 2), (1, 40, 2, 7, 1)],
)
def test_the_highest_scores_are_chosen_and_of_equal_ones_the_first(
    natively: None, code: native.Code, dtype: torch.dtype, B: int, J: int, T: int, S: int, D: int
) -> None:
    q, k = (whole_numbers(*shape, D, dtype=dtype, seed=S) for shape in ((B, J, T), (B, 1, S)))
    weights, at = whole_numbers(B, T, J, dtype=torch.float32, seed=J).mT, torch.arange(S)
    k = torch.cat((k, torch.full_like(k[..., :1], torch.nan)), dim=-1)[..., :D]  # not to be read
    k[0, 0, S // 2], k[-1, 0, S // 3], k[-1, 0, 1] = torch.nan, torch.inf, -torch.inf
    scores = exact(q, weights, k)
    own = torch.arange(S - T, S)[:, None]
    keep = torch.rand(B, J, T, S, generator=torch.Generator().manual_seed(1)) < 0.2 / J
    lengths = torch.tensor([S // 3, S][:B])
    masks = {
        None: torch.ones(1, T, S, dtype=torch.bool),
        ph.Causal(): at <= own,
        ph.Causal() & ph.Window(5): (at <= own) & (at > own - 5),
        ph.Causal() & ph.KeyLengths(lengths): (at <= own) & (at < lengths[:, None, None]),
        ph.Causal() & ph.Keep(keep): keep.any(dim=1) & (at <= own),
    }
    for mask, seen in masks.items():
        for count in (1, 4, S + 9):
            with native.using(code):
                chosen = choose_keys(q, weights, DenseSource(k, k), count, mask=mask)
            check(chosen.blocks, scores.masked_fill(~seen, -torch.inf), count)


@CODES
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_of_infinite_score_comes_first_whatever_the_number_of_heads(
    natively: None, code: native.Code, dtype: torch.dtype
) -> None:
    for J in (1, 5, 16, 33):
        q, k = (whole_numbers(1, *n, 6, dtype=dtype, seed=J) for n in ((J, 3), (1, 40)))
        q, weights = q.abs() + 1, torch.ones(1, J, 3)
        k[0, 0, 31, 2] = torch.inf
        with native.using(code):
            chosen = choose_keys(q, weights, DenseSource(k, k), 2)
        check(chosen.blocks, exact(q, weights, k), 2)
        assert (chosen.blocks == 31).any(dim=-1).all()


@CODES
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_keys_within_the_bound_of_rounding_change_places(
    natively: None, code: native.Code, dtype: torch.dtype
) -> None:
    B, J, T, S, D = 1, 64, 3, 1500, 128
    q, k, w = (
        torch.randn(shape, generator=torch.Generator().manual_seed(2))
        for shape in ((B, J, T, D), (B, 1, S, D), (B, J, T))
    )
    q, k = q.to(dtype), k.to(dtype)
    with native.using(code):
        (chosen,) = choose_keys(q, w, DenseSource(k, k), 200).blocks[:, 0]
    # D products, each rounded and added, then J: to nearest, or to odd as ARM's pairs are.
    steps = 2 * (D + J) * 2.0**-23
    size = exact(q.abs(), w.abs(), k.abs())[0]
    scores, error = exact(q, w, k)[0], steps / (1 - steps) * size
    taken = torch.zeros(T, S, dtype=torch.bool).scatter(1, chosen, True)
    assert (taken.sum(dim=1) == 200).all()
    least = (scores + error).masked_fill(~taken, torch.inf).amin(dim=1)
    assert (least >= (scores - error).masked_fill(taken, -torch.inf).amax(dim=1)).all()


@CODES
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_has_the_same_bits_beside_others_and_on_any_threads(
    natively: None, code: native.Code, dtype: torch.dtype
) -> None:
    # Keys of the same features in another order: their scores differ by rounding alone.
    B, J, T, S, D, count = 2, 24, 140, 1000, 96, 300
    generator = torch.Generator().manual_seed(3)
    q = torch.rand(B, J, T, 1, generator=generator).expand(-1, -1, -1, D).to(dtype)
    k, w = torch.rand(D, generator=generator), torch.rand(B, J, T, generator=generator)
    k = torch.stack([k[torch.randperm(D, generator=generator)] for _ in range(S)])
    k, threads = k.to(dtype).expand(B, 1, S, D), torch.get_num_threads()
    try:
        with native.using(code):
            torch.set_num_threads(1)
            whole = choose_keys(q, w, DenseSource(k, k), count).blocks
            assert not torch.equal(whole[0, 0, 0], torch.arange(count))  # rounding is seen
            for t in (slice(0, 1), slice(5, 8), slice(131, 140)):
                part = choose_keys(q[:1, :, t], w[:1, :, t], DenseSource(k[:1], k[:1]), count)
                assert torch.equal(part.blocks, whole[:1, :, t])
            for number in (2, 3, 5):
                torch.set_num_threads(number)
                assert torch.equal(choose_keys(q, w, DenseSource(k, k), count).blocks, whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("J", "T", "S", "D"), [(64, 150, 150, 128), (1, 9, 140_000, 1)])
def test_calls_of_several_rounds(natively: None, J: int, T: int, S: int, D: int) -> None:
    q, k = (whole_numbers(2, *n, D, dtype=torch.float32, seed=T) for n in ((J, T), (1, S)))
    weights = whole_numbers(2, J, T, dtype=torch.float32, seed=J)
    chosen = choose_keys(q, weights, DenseSource(k, k), 3, mask=ph.Causal()).blocks
    hidden = torch.arange(S) > torch.arange(S - T, S)[:, None]
    scores = exact(q, weights, k).masked_fill(hidden, -torch.inf)
    order = scores.sort(dim=-1, descending=True, stable=True)
    first = order.indices.masked_fill(order.values == -torch.inf, S)[..., :3].sort(dim=-1).values
    assert torch.equal(chosen[:, 0], first.masked_fill(first == S, -1))


@pytest.mark.parametrize(
    "make",
    [ph.DenseCache, lambda: ph.PagedCache(16), lambda: ph.RingCache(150, spare=9),
     lambda: ph.QuantizedCache(8, 8, group=32, recent=8)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_read_where_caches_hold_them(
    natively: None, make: Callable[[], KeyValueCache], dtype: torch.dtype
) -> None:
    cache, k = make(), whole_numbers(2, 1, 200, 32, dtype=dtype, seed=4)
    for part in k.split([150, 41, 9], dim=2):
        source = cache.append(part, part)
    q, weights = whole_numbers(2, 6, 9, 32, dtype=dtype, seed=5), torch.ones(2, 6, 9)
    held = source.gather()[0]
    chosen = choose_keys(q, weights, source, 20, mask=ph.Causal())
    keys = source.tokens.position_tensor(held.device)
    hidden = keys.expand(2, -1)[:, None] > torch.arange(191, 200)[:, None]
    scores = exact(q, weights, held).masked_fill(hidden, -torch.inf)
    if isinstance(cache, ph.QuantizedCache):  # its numbers are not whole
        bound = 1e-4 * float(scores.abs()[scores > -torch.inf].max())
        least = scores.gather(2, chosen.blocks[:, 0]).amin(dim=-1)
        others = scores.scatter(2, chosen.blocks[:, 0], -torch.inf).amax(dim=-1)
        assert (least >= others - bound).all()
    else:
        check(chosen.blocks, scores, 20)


@pytest.mark.parametrize("what", ["float64", "dtypes", "mask", "copied", "watched", "switched off"])
def test_elsewhere_torch_chooses_the_same(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float64 if what == "float64" else torch.float32
    q, k = (whole_numbers(1, *n, 8, dtype=dtype, seed=6) for n in ((4, 5), (1, 60)))
    weights, mask = torch.ones(1, 4, 5), ph.Causal()
    if what == "dtypes":
        q = q.bfloat16()
    if what == "mask":
        mask = mask & ph.Chosen(torch.arange(60))
    if what == "switched off":
        monkeypatch.setattr(native, "code_for", lambda x: None)
    source = DenseSource(k, k)
    if what == "copied":
        monkeypatch.setattr(DenseSource, "in_place", False)
    called: list[Any] = []
    fill = choosing._best
    monkeypatch.setattr(choosing, "_best", lambda *given: called.append(1) or fill(*given))
    with torch.autocast("cpu", enabled=what == "watched"):
        chosen = choose_keys(q, weights, source, 7, mask=mask).blocks
    seen = torch.arange(60) <= torch.arange(55, 60)[:, None]
    check(chosen, exact(q, weights, k).masked_fill(~seen, -torch.inf), 7)
    assert called


def test_weights_are_of_any_dtype(natively: None) -> None:
    q, k = (whole_numbers(1, *n, 8, dtype=torch.float32, seed=7) for n in ((4, 5), (1, 60)))
    weights = whole_numbers(1, 4, 5, dtype=torch.bfloat16, seed=8)
    chosen = choose_keys(q, weights, DenseSource(k, k), 7).blocks
    check(chosen, exact(q, weights, k), 7)


def test_a_query_chooses_at_least_one_key() -> None:
    q, k = torch.ones(1, 4, 5, 8), torch.ones(1, 1, 60, 8)
    with pytest.raises(ValueError, match="count must be a whole number of at least 1"):
        choose_keys(q, torch.ones(1, 4, 5), DenseSource(k, k), 0)


KEYS = torch.zeros(1, 1, 3, 8)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"q": torch.zeros(1, 4, 8)}, "q must be"),
        ({"q": torch.zeros(1, 4, 0, 8), "weights": torch.zeros(1, 4, 0)}, "takes queries"),
        ({"weights": torch.zeros(1, 4, 1)}, "weights must be"),
        ({"weights": torch.zeros(1, 3, 2)}, "weights must be"),
        ({"weights": torch.zeros(4, 2)}, "weights must be"),
        ({"weights": torch.zeros(1, 4, 2).bfloat16()}, "weights must be"),
        ({"segments": [KVSegment(*[KEYS.expand(1, 2, 3, 8)] * 2)]}, "of one kv head"),
        ({"segments": [KVSegment(*[KEYS.bfloat16()] * 2)]}, "of the dtype of q"),
        ({"mods": NO_SCORE_MODS._replace(softcap=2.0)}, "no other mods"),
        ({"mods": NO_SCORE_MODS._replace(keep=torch.ones(1, 4, 2, 3) > 0)}, "same for all heads"),
        ({"mods": NO_SCORE_MODS._replace(chosen=torch.ones(1, 1, 1, 1).long())}, "no other mods"),
        ({"count": 0}, "chosen must be"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(changed: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "q": torch.zeros(1, 4, 2, 8),
        "weights": torch.zeros(1, 4, 2),
        "segments": [KVSegment(KEYS, KEYS)],
        "mods": NO_SCORE_MODS,
        "count": 2,
    }
    (code, *_) = native.all_codes()
    assert code.choose_keys(**given).tolist() == [[[0, 1], [0, 1]]]
    with pytest.raises(ValueError, match=words):
        code.choose_keys(**given | changed)
