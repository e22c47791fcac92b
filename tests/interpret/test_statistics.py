"""Every statistic equals its definition on the full float64 matrix, whatever the attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import polyhead as ph
from oracle import Problem, attend
from polyhead import native
from polyhead.interpret import measuring
from polyhead.interpret.kept import KeptCall, token_ids
from polyhead.interpret.measuring import measure
from polyhead.interpret.statistics import TABLE
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.record import AttentionRecord
from polyhead.semantics import DenseSource, TensorBias
from polyhead.semantics.arguments import query_tokens

TOP = 3


@st.composite
def calls(draw: st.DrawFn) -> tuple[KeptCall, Tensor]:
    """A kept call of a random attention, and its weights ``[B, H, T, S]`` in float64."""
    batch, group, kv_heads = draw(st.sampled_from([(1, 1, 2), (2, 3, 1), (1, 2, 2), (2, 3, 3)]))
    keys = draw(st.integers(1, 23))
    queries = draw(st.one_of(st.just(keys), st.integers(1, keys)))
    heads, size = group * kv_heads, 4
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    q = torch.randn(batch, heads, queries, size, generator=generator) * 2
    k = torch.randn(batch, kv_heads, keys, size, generator=generator)
    mask: ph.Mask | None = draw(
        st.sampled_from([None, ph.Causal(), ph.Causal() & ph.Window(4), ph.Window(3, ahead=2)])
    )
    documents = [keys // 2, keys - keys // 2]
    if draw(st.booleans()):
        mask = ph.Documents(documents) if mask is None else mask & ph.Documents(documents)
    if draw(st.booleans()):
        lengths = [draw(st.integers(0, keys)) for _ in range(batch)]
        mask = ph.KeyLengths(lengths) if mask is None else mask & ph.KeyLengths(lengths)
    if draw(st.booleans()):
        per_head = torch.rand(batch, heads, queries, keys, generator=generator) < 0.8
        mask = ph.Keep(per_head) if mask is None else mask & ph.Keep(per_head)
    bias = draw(
        st.sampled_from([None, ph.ALiBi(heads), TensorBias(torch.randn(heads, queries, keys))])
    )
    softcap = draw(st.sampled_from([None, 1.5]))
    sinks = draw(st.sampled_from([None, torch.linspace(-2.0, 2.0, heads)]))
    positions = None
    if draw(st.booleans()):  # padding on the left: every row begins elsewhere
        begins = torch.tensor([draw(st.integers(0, 3)) for _ in range(batch)])
        positions = torch.arange(keys) - begins[:, None]
    source = DenseSource(k, k, positions)
    options = {"mask": mask, "bias": bias, "softcap": softcap, "sinks": sinks}
    out, lse = ph.attention(q, source, return_lse=True, kernel="reference", **options)
    record = AttentionRecord(
        layer=MultiHeadAttention(4, 1), q=q, k=k, v=k, scale=size**-0.5,
        q_tokens=query_tokens(q, source, None), kv_tokens=source.tokens, out=out, lse=lse,
        **options,
    )  # fmt: skip
    call = KeptCall.of(record)
    ids = torch.randint(0, 4, (batch, keys), generator=generator)
    call = replace(call, ids=token_ids(ids, call), documents=ph.Documents(documents))
    tokens = call.q_tokens, call.k_tokens, q.device
    visible = torch.ones(1, dtype=torch.bool) if mask is None else mask.visible(*tokens)
    drawn = None if bias is None else bias.tile(*tokens[:2], q.double())
    shape = batch, heads, queries, keys
    problem = Problem(
        q=q.double().numpy(),
        k=k.double().numpy(),
        v=k.double().numpy(),
        visible=visible.expand(shape).numpy(),
        bias=None if drawn is None else drawn.expand(shape).numpy(),
        softcap=softcap,
        sinks=None if sinks is None else sinks.double().numpy(),
    )
    return call, torch.from_numpy(attend(problem)["weights"])


def _defined(call: KeptCall, weights: Tensor) -> dict[str, Tensor]:
    """Every statistic by its definition, pair by pair."""
    batch, _, queries, keys = weights.shape
    q_at = torch.atleast_2d(call.q_tokens.position_tensor(torch.device("cpu")))
    k_at = torch.atleast_2d(call.k_tokens.position_tensor(torch.device("cpu")))
    apart = (q_at[:, :, None] - k_at[:, None, :]).expand(batch, -1, -1)[:, None]
    assert call.ids is not None
    key_ids = call.ids.keys
    # What the query's own token is, and what stands before each key, read off by position.
    query_ids = torch.stack([
        torch.tensor([int(key_ids[b][(k_at.expand(batch, -1)[b] == p).nonzero()[0, 0]])
                      for p in q_at.expand(batch, -1)[b]])
        for b in range(batch)
    ])  # fmt: skip
    before = torch.cat([torch.full((batch, 1), -5), key_ids[:, :-1]], dim=1)
    real = torch.ones_like(before, dtype=torch.bool)
    if keys != queries:  # told by position, and a position below 0 holds padding
        real = k_at.expand(batch, -1) - 1 >= 0
        query_ids = query_ids.masked_fill(q_at.expand(batch, -1) < 0, -7)
    same = (query_ids[:, :, None] == key_ids[:, None, :]) & (apart[:, 0] > 0)
    follows = (query_ids[:, :, None] == before.masked_fill(~real, -5)[:, None]) & (apart[:, 0] >= 0)
    sink = (1.0 - weights.sum(-1)).clamp_min(0.0)
    sink = torch.where(call.lse.isneginf(), 0.0, sink) * (call.spec.sinks is not None)
    squares = (weights**2).sum(-1) + sink**2
    first = call.documents.lengths[0][0]
    return {
        "entropy": torch.special.entr(weights).sum(-1) + torch.special.entr(sink),
        "effective_keys": torch.where(squares > 0, 1.0 / squares, 0.0),
        "max_weight": weights.amax(-1),
        "first_token": (weights * (k_at == 0)[:, None, None]).sum(-1),
        "previous_token": (weights * (apart == 1)).sum(-1),
        "self": (weights * (apart == 0)).sum(-1),
        "duplicate": (weights * same[:, None]).sum(-1),
        "induction": (weights * follows[:, None]).sum(-1),
        "mean_distance": (weights * apart.abs()).sum(-1),
        "top_weights": weights.sort(-1, descending=True).values[..., :TOP],
        "document_mass": torch.stack(
            [weights[..., :first].sum(-1), weights[..., first:].sum(-1)], dim=-1
        ),
        "received": weights.sum(-2),
    }


@pytest.fixture(
    params=("torch", "as on a device", *native.all_codes()), ids=lambda x: getattr(x, "name", x)
)
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What computes the sums of a tile: native code of some instruction set, or torch."""
    if isinstance(request.param, str):
        if request.param == "as on a device":
            monkeypatch.setattr(measuring, "_is_near", lambda call: False)
        monkeypatch.setattr(measuring, "code_for", lambda x: None)
        yield
    else:
        with native.using(request.param):
            yield


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("tile", [(5, 7), (256, 2048)])
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=calls())
def test_every_statistic_equals_its_definition(
    monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int], drawn: tuple[KeptCall, Tensor]
) -> None:
    monkeypatch.setattr(measuring, "tile_size", lambda call: tile)
    call, weights = drawn
    found = measure(call, tuple(TABLE), top_k=TOP)
    for name, wanted in _defined(call, weights).items():
        torch.testing.assert_close(
            found[name].double(), wanted, atol=2e-5, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    # Equal weights may change places, so keys are judged by the weights that they have.
    for keys, values in (("max_key", "max_weight"), ("top_keys", "top_weights")):
        key = found[keys] if keys == "top_keys" else found[keys][..., None]
        value = found[values] if keys == "top_keys" else found[values][..., None]
        named = weights.gather(-1, key.clamp_min(0)).masked_fill(key < 0, 0.0)
        torch.testing.assert_close(named, value.double(), atol=2e-5, rtol=2e-5)
        assert ((key < 0) == (value == 0)).all()
    assert set(found) == set(TABLE)


@pytest.mark.usefixtures("passes")
def test_a_key_with_nan_spoils_the_statistics_of_the_rows_that_see_it_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "tile_size", lambda call: (4, 3))
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 8, 4, generator=generator) for heads in (4, 2))
    clean, spoiled = DenseSource(k, k), DenseSource(k.clone(), k)
    spoiled.gather()[0][:, 1, 4] = torch.nan
    found = []
    for source in (clean, spoiled):
        out, lse = ph.attention(q, source, mask=ph.Causal(), return_lse=True, kernel="reference")
        record = AttentionRecord(
            layer=MultiHeadAttention(4, 1), q=q, k=source.gather()[0], v=k, mask=ph.Causal(),
            bias=None, scale=0.5, softcap=None, sinks=None, q_tokens=query_tokens(q, source, None),
            kv_tokens=source.tokens, out=out, lse=lse,
        )  # fmt: skip
        found.append(measure(KeptCall.of(record), ("entropy", "max_weight", "mean_distance")))
    for name, values in found[1].items():
        assert torch.equal(values[:, :2], found[0][name][:, :2]), name
        assert torch.equal(values[:, 2:, :4], found[0][name][:, 2:, :4]), name
        assert values[:, 2:, 4:].isnan().all(), name


def _sums(batch: int, rows: int, columns: int, most: int) -> native.TileSums:
    """Sums that have seen something already."""
    shape = batch, rows
    return native.TileSums(
        entropy=torch.full(shape, 2.0),
        squares=torch.full(shape, 0.5),
        largest=(torch.full(shape, 0.125), torch.full(shape, 3)),
        top=(torch.full((*shape, most), 0.0625), torch.full((*shape, most), 5)),
        received=torch.full((batch, columns), 1.0),
    )


def _tile(*shape: int) -> Tensor:
    """Logarithms of weights, a fifth of them hidden, one row wholly so, one with a NaN."""
    generator = torch.Generator().manual_seed(sum(shape))
    logs = torch.randn(*shape, generator=generator).mul_(2).log_softmax(-1)
    logs.masked_fill_(torch.rand(*shape, generator=generator) < 0.2, -torch.inf)
    logs[0, 0] = -torch.inf
    logs[-1, -1, shape[-1] // 2] = torch.nan
    return logs


@pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
@pytest.mark.parametrize("columns", [1, 15, 16, 63, 64, 65, 700])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (2, 3), (1, 64), (2, 131)])
def test_the_pass_over_a_tile_adds_what_it_says(
    code: native.Code, batch: int, rows: int, columns: int
) -> None:
    logs = _tile(batch, rows, columns)
    sums, before = _sums(batch, rows, columns, 4), _sums(batch, rows, columns, 4)
    weights = logs.clone()
    code.weigh(weights, 100, sums)
    exact = logs.double().exp()
    close = {"atol": 1e-5, "rtol": 1e-5, "equal_nan": True, "check_dtype": False}
    torch.testing.assert_close(weights, exact, **close)
    entropy = (exact * logs.double().clamp_min(-1e4)).sum(-1)
    torch.testing.assert_close(sums.entropy, before.entropy - entropy, **close)
    torch.testing.assert_close(sums.squares, before.squares + (exact**2).sum(-1), **close)
    torch.testing.assert_close(sums.received, before.received + exact.sum(1), **close)
    assert sums.largest
    assert before.largest
    assert sums.top
    assert before.top
    spoiled = exact.isnan().any(-1)
    largest, keys = sums.largest
    torch.testing.assert_close(largest, exact.amax(-1).clamp_min(0.125), **close)
    torch.testing.assert_close(
        weights.gather(-1, (keys - 100).clamp_min(0)[..., None])[..., 0][keys >= 100],
        largest[keys >= 100],
    )
    assert (keys[(exact.amax(-1) <= 0.124) | spoiled] == 3).all()
    top, top_keys = sums.top
    wanted = torch.cat([before.top[0].double(), exact], -1).sort(-1, descending=True).values
    torch.testing.assert_close(top, wanted[..., :4], **close)
    new = top_keys >= 100
    at = (top_keys - 100).clamp_min(0)
    torch.testing.assert_close(weights.gather(-1, at)[new], top[new], equal_nan=True)
    assert (top[~new] == 0.0625).all()
    assert all(
        len(set(row[row >= 100].tolist())) == (row >= 100).sum() for row in top_keys.flatten(0, 1)
    )


@pytest.mark.parametrize("code", native.all_codes(), ids=lambda code: code.name)
def test_the_pass_over_a_tile_gives_the_same_bits_on_any_number_of_threads(
    code: native.Code,
) -> None:
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            sums, weights = _sums(2, 300, 900, 8), _tile(2, 300, 900)
            code.weigh(weights, 0, sums)
        finally:
            torch.set_num_threads(before)
        assert sums.received is not None
        assert sums.entropy is not None
        found.append(
            torch.cat([weights.flatten(), sums.received.flatten(), sums.entropy.flatten()])
        )
    for other in found[1:]:
        assert torch.equal(other.view(torch.int32), found[0].view(torch.int32))


def test_sums_that_do_not_lie_alike_are_refused() -> None:
    code = native.code()
    if code is None:
        pytest.skip("no native code was compiled here")
    sums = _sums(2, 3, 5, 4)._replace(entropy=torch.zeros(2, 7)[:, :3])
    with pytest.raises(ValueError, match="one batch stride"):
        code.weigh(_tile(2, 3, 5), 0, sums)
