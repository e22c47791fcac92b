"""Laws that attention obeys, whatever the numbers: property-based, for every kernel that can."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import polyhead as ph
from polyhead import native
from polyhead.caches.source import SlotMask
from polyhead.semantics import DenseSource, KeyValueSource, Tokens
from polyhead.semantics.scores import keep_weights
from polyhead.semantics.weights import weight_rows

kernels = pytest.mark.parametrize("kernel", ["reference", "tiled", "auto"])
few = settings(max_examples=25, deadline=None)


@st.composite
def calls(draw, max_tokens=40):
    """q, k, v in float64, as drawn views, and a mask that fits."""
    B, G = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    H, D = G * draw(st.integers(1, 3)), draw(st.integers(1, 9))
    T, S = draw(st.integers(1, max_tokens)), draw(st.integers(1, max_tokens))
    torch.manual_seed(draw(st.integers(0, 2**16)))

    def view(*shape):
        kind = draw(st.sampled_from(["plain", "permuted", "sliced", "strided"]))
        x = torch.randn(*shape, dtype=torch.float64)
        if kind == "permuted":
            return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        if kind == "sliced":
            return torch.nn.functional.pad(x, (1, 2, 3, 1), value=math.nan)[:, :, 3:-1, 1:-2]
        if kind == "strided":
            return torch.stack([x, x * math.nan], dim=-1)[..., 0]
        return x

    mask = draw(masks(B, S))
    return view(B, H, T, D), view(B, G, S, D), view(B, G, S, D), mask


@st.composite
def masks(draw, B, S):
    leaf = st.one_of(
        st.just(ph.Causal()),
        st.builds(ph.Window, st.integers(1, S + 3)),
        st.builds(ph.Window, st.integers(1, S + 3), st.integers(0, S)),
        st.builds(ph.Prefix, st.integers(0, S)),
        st.builds(ph.KeyLengths, st.lists(st.integers(0, S), min_size=B, max_size=B)),
        st.integers(0, S).map(lambda n: ph.Documents([n, S - n])),
        st.integers(0, 99).map(
            lambda n: ph.Keep(torch.rand(S, generator=torch.Generator().manual_seed(n)) < 0.7)
        ),
    )
    tree = st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda p: p[0] & p[1]),
            st.tuples(inner, inner).map(lambda p: p[0] | p[1]),
            inner.map(lambda m: ~m),
        ),
        max_leaves=4,
    )
    return draw(st.one_of(st.none(), tree))


def same(a, b, atol=1e-10):
    assert a.shape == b.shape
    assert not b.isnan().any()
    assert torch.equal(a.isneginf(), b.isneginf())
    assert torch.allclose(a.nan_to_num(neginf=0.0), b.nan_to_num(neginf=0.0), atol=atol)


@pytest.fixture(autouse=True)
def _many_tiles(small_tiles):
    """Laws are tested across tile borders."""


@few
@given(calls())
def test_tiled_and_auto_equal_the_reference(call):
    q, k, v, mask = call
    want = ph.attention(q, k, v, mask=mask, return_lse=True, kernel="reference")
    for kernel in ("tiled", "auto"):
        for a, b in zip(
            want, ph.attention(q, k, v, mask=mask, return_lse=True, kernel=kernel), strict=True
        ):
            same(a, b)


@few
@given(calls())
def test_a_mask_classifies_as_it_draws(call):
    q, k, _, mask = call
    if mask is None:
        return
    T, S = q.shape[2], k.shape[2]
    queries, keys = Tokens.of(T, shift=S - T), Tokens.of(S)
    shape = (q.shape[0], q.shape[1], T, S)
    whole = mask.visible(queries, keys, q.device).expand(shape)
    simple = mask.simplify(queries, keys).visible(queries, keys, q.device).expand(shape)
    assert torch.equal(whole, simple)
    for rows in queries.split(8):
        for columns in keys.split(16):
            part = whole[:, :, rows.start :][:, :, : rows.length]
            part = part[..., columns.start :][..., : columns.length]
            drawn = mask.visible(rows, columns, q.device).expand(part.shape)
            assert torch.equal(drawn, part)
            kind = mask.classify(rows, columns)
            assert kind is not ph.semantics.Visibility.NONE or not part.any()
            assert kind is not ph.semantics.Visibility.ALL or part.all()


@kernels
@few
@given(call=calls(), dice=st.randoms(use_true_random=False))
def test_order_of_keys_does_not_matter_when_positions_travel_along(kernel, call, dice):
    q, k, v, _ = call
    T, S = q.shape[2], k.shape[2]
    order = list(range(S))
    dice.shuffle(order)
    mask = ph.Causal() & ph.Window(7) | ph.Prefix(2)
    places = {"q_positions": torch.arange(S - T, S), "return_lse": True, "kernel": kernel}
    want = ph.attention(q, k, v, mask=mask, **places)
    found = ph.attention(
        q, k[:, :, order], v[:, :, order], mask=mask, kv_positions=torch.tensor(order), **places
    )
    for a, b in zip(want, found, strict=True):
        same(a, b)


@kernels
@few
@given(call=calls(), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_states_of_split_keys_merge_into_the_whole_in_any_grouping(kernel, call, cuts):
    q, k, v, _ = call
    T, S = q.shape[2], k.shape[2]
    mask = ph.Causal() & ph.Window(9)
    ends = sorted({0, S, *(c for c in cuts if c < S)})
    common = {"mask": mask, "return_lse": True, "kernel": kernel}
    common["q_positions"] = torch.arange(S - T, S)
    want = ph.attention(q, k, v, kv_positions=torch.arange(S), **common)
    states = [
        ph.attention(q, k[:, :, a:b], v[:, :, a:b], kv_positions=torch.arange(a, b), **common)
        for a, b in itertools.pairwise(ends)
    ]
    at_once = ph.merge_states(*zip(*states, strict=True))
    left = right = None
    for state in states:
        left = state if left is None else ph.merge_states(*zip(left, state, strict=True))
    for state in reversed(states):
        right = state if right is None else ph.merge_states(*zip(state, right, strict=True))
    for merged in (at_once, left, right):
        for a, b in zip(want, merged, strict=True):
            same(a, b)


@pytest.mark.parametrize(("of_out", "of_lse"), [((1, 2, 3, 5), (1, 2, 3)), ((1, 2, 3, 4), (1, 2))])
def test_states_of_other_shapes_are_not_merged(of_out, of_lse):
    one = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    other = torch.zeros(of_out), torch.zeros(of_lse)
    with pytest.raises(ValueError, match=r"outs of one shape \[B, H, T, V\] and lses"):
        ph.merge_states(*zip(one, other, strict=True))


@few
@given(calls(max_tokens=12), st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_rows_of_a_mask_see_what_they_saw_in_the_batch(call, rows):
    q, k, v, mask = call
    rows = [row % len(q) for row in rows]
    mask = SlotMask() if mask is None else mask & SlotMask()
    whole = ph.attention(q, k, v, mask=mask, kernel="reference")[rows]
    same(
        ph.attention(q[rows], k[rows], v[rows], mask=mask.of_rows(rows), kernel="reference"), whole
    )


def test_drop_is_keep_of_the_others():
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    hidden = torch.eye(4, dtype=torch.bool)
    for kernel in ("reference", "tiled"):
        kept, dropped = (
            ph.attention(q, k, v, mask=mask, kernel=kernel)
            for mask in (ph.Keep(~hidden), ph.Drop(hidden))
        )
        assert torch.equal(kept, dropped)


def test_merging_with_a_row_that_saw_nothing_changes_nothing_and_gradients_are_finite():
    out, lse = torch.randn(1, 1, 3, 2), torch.randn(1, 1, 3)
    lse[..., 1] = -torch.inf
    out[:, :, 1] = 0
    leaves = [out.requires_grad_(), lse.requires_grad_()]
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    merged, total = ph.merge_states([out, nothing[0]], [lse, nothing[1]])
    assert torch.equal(merged, out)
    assert torch.allclose(total, lse)
    grads = torch.autograd.grad(merged.sum() + total[..., [0, 2]].sum(), leaves)
    assert all(g.isfinite().all() for g in grads)


@kernels
def test_a_sink_of_minus_infinity_is_no_sink_even_where_a_row_sees_nothing(kernel):
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, 5, 3, requires_grad=True) for _ in range(3)]
    sinks = torch.tensor([0.5, -torch.inf], requires_grad=True)
    mask = ph.Causal() & ~ph.Prefix(2)
    plain, without = ph.attention(*leaves, mask=mask, return_lse=True, kernel=kernel)
    out, lse = ph.attention(*leaves, mask=mask, sinks=sinks, return_lse=True, kernel=kernel)
    assert torch.equal(out[:, 1], plain[:, 1])
    assert torch.equal(lse[:, 1], without[:, 1])
    total = out.sum() + lse.masked_fill(lse.isneginf(), 0.0).sum()
    assert all(g.isfinite().all() for g in torch.autograd.grad(total, [*leaves, sinks]))


@kernels
@few
@given(calls())
def test_copied_kv_heads_equal_shared_ones(kernel, call):
    q, k, v, mask = call
    groups = q.shape[1] // k.shape[1]
    copies = [x.repeat_interleave(groups, dim=1) for x in (k, v)]
    same(
        ph.attention(q, *copies, mask=mask, kernel=kernel),
        ph.attention(q, k, v, mask=mask, kernel=kernel),
    )


@kernels
@few
@given(call=calls(), size=st.integers(1, 9))
def test_chunks_of_queries_equal_one_pass(kernel, call, size):
    q, k, v, _ = call
    S = k.shape[2]
    q = torch.randn(q.shape[0], q.shape[1], S, q.shape[3], dtype=q.dtype)
    mask = ph.Causal() & ph.Window(11)
    want = ph.attention(q, k, v, mask=mask, kernel=kernel)
    chunks = []
    for start in range(0, S, size):
        stop = start + size
        part = q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop]
        chunks += [ph.attention(*part, mask=mask, kernel=kernel)]
    same(want, torch.cat(chunks, dim=2))


@kernels
@few
@given(call=calls(), more=st.integers(0, 5))
def test_a_window_as_long_as_the_sequence_is_none(kernel, call, more):
    q, k, v, _ = call
    size = max(q.shape[2], k.shape[2]) + more
    same(
        ph.attention(q, k, v, mask=ph.Causal(), kernel=kernel),
        ph.attention(q, k, v, mask=ph.Causal() & ph.Window(size), kernel=kernel),
    )


@kernels
def test_rows_of_another_number_of_documents_do_not_change_each_other(kernel):
    torch.manual_seed(0)
    rows = [[5, 3, 8], [16], [0, 9, 0, 7], [2, 14]]
    q, k, v = (torch.randn(4, 2, 16, 6, dtype=torch.float64) for _ in range(3))
    together = ph.attention(q, k, v, mask=ph.Documents(rows), kernel=kernel)
    for row, lengths in enumerate(rows):
        alone = (x[row : row + 1] for x in (q, k, v))
        same(ph.attention(*alone, mask=ph.Documents(lengths), kernel=kernel)[0], together[row])


@kernels
@pytest.mark.parametrize("lengths", [[5, 3, 8], [16], [0, 9, 0, 7], [1] * 16])
def test_packed_documents_equal_separate_runs_forward_and_backward(kernel, lengths):
    torch.manual_seed(0)
    heads = ((4, 16), (2, 16), (2, 16))
    leaves = [torch.randn(1, h, n, 6, dtype=torch.float64, requires_grad=True) for h, n in heads]
    table = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    leaves.append(table)
    weight = torch.randn(1, 4, 16, 6, dtype=torch.float64)
    bias = ph.RelativeBias(table, max_distance=16)
    mask = ph.Causal() & ph.Documents(lengths)
    packed = ph.attention(*leaves[:3], mask=mask, bias=bias, kernel=kernel)
    pieces = [
        ph.attention(*part, mask=ph.Causal(), bias=bias, kernel=kernel)
        for part in zip(*(x.split(lengths, dim=2) for x in leaves[:3]), strict=True)
    ]
    separate = torch.cat(pieces, dim=2)
    same(separate, packed)
    for a, b in zip(
        torch.autograd.grad((separate * weight).sum(), leaves),
        torch.autograd.grad((packed * weight).sum(), leaves),
        strict=True,
    ):
        same(a, b)


def test_documents_count_their_own_positions():
    assert ph.Documents([3, 2]).positions().tolist() == [0, 1, 2, 0, 1]
    assert ph.Documents([[1, 2], [3, 0]]).positions().tolist() == [[0, 0, 1], [0, 1, 2]]


def test_dropout_drops_the_same_weights_in_every_kernel_and_nothing_on_average():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 30, 4)
    v = torch.eye(30).expand(1, 2, 30, 30)

    def weights(kernel, seed, p):
        generator = torch.Generator().manual_seed(seed)
        return ph.attention(q, k, v, dropout_p=p, generator=generator, kernel=kernel)

    full = weights("reference", 0, 0.0)
    for p in (0.1, 0.5):
        a = weights("reference", 1, p)
        for kernel in ["tiled"] if native.unavailable() else ["tiled", "native"]:
            b = weights(kernel, 1, p)
            assert torch.equal(a == 0, b == 0)
            assert torch.allclose(a, b, atol=1e-6)
        kept = a != 0
        assert torch.allclose(a[kept], full[kept] / (1 - p), atol=1e-6)
        many = torch.stack([weights("tiled", seed, p) for seed in range(150)])
        share = (many == 0).double().mean()
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / many.numel())
        spread = full * math.sqrt(p / (1 - p) / 150)
        assert ((many.mean(dim=0) - full).abs() < 5.5 * spread + 1e-6).all()


def test_dropped_weights_are_independent_along_every_axis():
    spec = ph.semantics.Specification(scale=1.0, dropout_p=0.5, seed=torch.tensor(7))
    kept = keep_weights(spec, torch.Size((4, 4, 64, 64)), Tokens.of(64), Tokens.of(64)).double()
    centred = kept - kept.mean()
    for dim in range(4):
        neighbours = (centred * centred.roll(1, dims=dim)).mean() / centred.var()
        assert neighbours.abs() < 0.02


class Pages(KeyValueSource):
    """A source like a ring or pages: runs out of order, scattered in memory, with positions."""

    def __init__(self, k, v, positions, page, order):
        S = k.shape[2]
        self.batch, self.num_kv_heads, _, self.key_dim = k.shape
        self.value_dim, self.dtype, self.device = v.shape[-1], k.dtype, k.device
        self.tokens = Tokens.of(S, positions=positions)
        self.pages = self.tokens.split(page)
        self.order = sorted(range(len(self.pages)), key=lambda i: order[i % len(order)])
        self.memory = {
            self.pages[i].start: (k[:, :, s], v[:, :, s])
            for i in self.order
            for s in [slice(self.pages[i].start, self.pages[i].start + self.pages[i].length)]
        }
        self.reads = 0

    def tiles(self, size):
        return [self.pages[i] for i in self.order]

    def read(self, tile):
        self.reads += 1
        return self.memory[tile.start]


@pytest.mark.parametrize("kernel", ["reference", "tiled", "sdpa"])
@pytest.mark.parametrize("explicit", [False, True])
@few
@given(call=calls(), page=st.integers(1, 9), order=st.lists(st.integers(0, 99), min_size=1))
def test_a_source_may_hand_out_its_tiles_in_any_order(kernel, explicit, call, page, order):
    q, k, v, mask = call
    S = k.shape[2]
    positions = torch.arange(S).flip(0) if explicit else None
    source = Pages(k, v, positions, page, order)
    common = {"mask": None if kernel == "sdpa" else mask, "kernel": kernel}
    if explicit:
        common["q_positions"] = torch.arange(q.shape[2])
    if kernel == "sdpa":
        q = q.contiguous()
    want = ph.attention(q, DenseSource(k.contiguous(), v.contiguous(), positions), **common)
    same(want, ph.attention(q, source, **common))
    gathered = source.gather()
    assert torch.equal(gathered[0], k)
    assert torch.equal(gathered[1], v)


@few
@given(calls())
def test_rows_of_weights_reproduce_the_output(call):
    q, k, v, mask = call
    T, S = q.shape[2], k.shape[2]
    sinks = torch.randn(q.shape[1], dtype=q.dtype)
    out, lse = ph.attention(q, k, v, mask=mask, sinks=sinks, softcap=3.0, return_lse=True)
    spec = ph.semantics.Specification(scale=q.shape[-1] ** -0.5, mask=mask, softcap=3.0)
    weights = weight_rows(q, k, lse, spec, Tokens.of(T, shift=S - T), Tokens.of(S))
    same(out, weights @ v.repeat_interleave(q.shape[1] // k.shape[1], dim=1))


GRADCHECKS = {
    "plain": {},
    "mask": {"mask": ph.Causal() & ph.Window(3) & ph.KeyLengths([0, 4])},
    "softcap": {"softcap": 2.0},
    "softcap and mask": {"softcap": 2.0, "mask": ph.Causal()},
    "dropout": {"dropout_p": 0.3},
    "alibi": {"bias": ph.ALiBi},
    "t5": {"bias": lambda x: ph.RelativeBias(x, max_distance=6)},
    "tensor": {"bias": lambda x: x},
    "sinks": {"mask": ph.Causal() & ph.KeyLengths([0, 4])},
    "documents": {"mask": ph.Documents([[2, 3], [4, 1]]) & ph.Causal(), "scale": 0.9},
    "prefix or tensor": {"mask": ph.Prefix(2) | ~ph.Drop(torch.eye(4, 5, dtype=torch.bool))},
    "positions": {
        "mask": ph.Causal() & ph.Window(4),
        "q_positions": torch.tensor([[3, 9, 0, 5], [7, 1, 2, 6]]),
        "kv_positions": torch.tensor([4, 0, 8, 2, 6]),
    },
}


# Those of the reference are autograd's, of the formula.
@pytest.mark.parametrize("kernel", [pytest.param("reference", marks=pytest.mark.slow), "tiled"])
@pytest.mark.parametrize("feature", GRADCHECKS)
def test_gradients_equal_finite_differences(kernel, feature, monkeypatch):
    from polyhead.kernels import tiled

    monkeypatch.setattr(tiled, "_tile_sizes", lambda q, keys: (2, 2))
    torch.manual_seed(0)
    inputs = [torch.randn(2, h, n, 2, dtype=torch.float64) for h, n in ((4, 4), (2, 5), (2, 5))]
    arguments = dict(GRADCHECKS[feature])
    make = arguments.pop("bias", None)
    shape = {"alibi": (4,), "t5": (8, 4), "tensor": (4, 1, 5), "sinks": (4,)}.get(feature)
    if shape:
        inputs.append(torch.randn(*shape, dtype=torch.float64))

    def f(q, k, v, *extra):
        more = {"bias": make(*extra)} if make else {"sinks": extra[0]} if extra else {}
        out, lse = ph.attention(
            q,
            k,
            v,
            return_lse=True,
            kernel=kernel,
            generator=torch.Generator().manual_seed(0),
            **arguments,
            **more,
        )
        return out, lse.masked_fill(lse.isneginf(), 0.0)

    assert torch.autograd.gradcheck(f, [x.requires_grad_() for x in inputs])
