"""RelativeContentBias: DeBERTa's own columns, heads, tokens, files and wrong tables."""

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

import polyhead as ph
from polyhead.semantics import Tokens

H, T, S, N = 4, 9, 21, 12


def bias(**changed):
    torch.manual_seed(0)
    tables = {"of_query": torch.randn(2, H, T, N), "of_key": torch.randn(1, 1, S, N)}
    return ph.RelativeContentBias(**tables | changed)


def drawn(bias, q=None, k=None):
    return bias.tile(q or Tokens.of(T, shift=S - T), k or Tokens.of(S), torch.empty(0))


@pytest.mark.parametrize(("buckets", "far"), [(256, 512), (32, 128), (8, 20), (6, 9), (2, 3)])
def test_shared_columns_are_those_of_deberta(buckets, far):
    tokens = torch.zeros(1, 2 * far + 9, 1)
    wanted = build_relative_position(tokens, tokens, buckets, far)[0] + buckets
    length = tokens.shape[1]
    numbers = torch.arange(2.0 * buckets).expand(1, 1, length, -1)
    found = drawn(
        ph.RelativeContentBias(numbers, max_distance=far), Tokens.of(length), Tokens.of(length)
    )
    assert torch.equal(found[0, 0], wanted.clamp(0, 2 * buckets - 1).float())
    shared = ph.RelativeContentBias(numbers, max_distance=far)
    columns = shared.by_distance(numbers.device)
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert torch.equal(shared.by_distance(numbers.device), columns)
    finally:
        torch.set_default_dtype(torch.float32)


def test_some_heads_some_tokens_and_each_term_alone():
    both = bias(max_distance=8)
    whole = drawn(both)
    assert whole.shape == (2, H, T, S)
    assert torch.equal(drawn(both.of_heads([3, 1])), whole[:, [3, 1]])
    queries, keys = slice(1, T, 2), slice(5, 17)
    part = both.of_tokens(queries, keys)
    at = torch.arange(S)
    where = (Tokens.of(len(at[x]), positions=at[x]) for x in (slice(S - T + 1, S, 2), keys))
    assert torch.equal(drawn(part, *where), whole[:, :, queries, keys])
    terms = [drawn(bias(**{name: None}, max_distance=8)) for name in ("of_key", "of_query")]
    torch.testing.assert_close(sum(terms), whole)


@pytest.mark.parametrize("nearest", [0, 3, N - 1])
def test_any_column_can_be_distance_0(nearest):
    given = bias(nearest=nearest)
    apart = torch.arange(S - T, S)[:, None] - torch.arange(S)
    columns = (apart + nearest).clamp(0, N - 1).expand(2, H, T, S)
    wanted = (
        given.of_query.gather(-1, columns)
        + given.of_key.expand(2, H, S, N).gather(-1, columns.mT).mT
    )
    torch.testing.assert_close(drawn(given), wanted)
    assert torch.equal(drawn(given.of_heads([3, 1])), drawn(given)[:, [3, 1]])
    assert given != bias(nearest=(nearest + 1) % N)
    assert repr(given).endswith(f"of_key=[1, 1, 21, 12], nearest={nearest})")


def test_a_file_keeps_it_and_equal_tables_are_equal(tmp_path):
    given = bias(of_query=None, max_distance=8)
    assert given == bias(of_query=None, max_distance=8) != bias(max_distance=8)
    layer = ph.MultiHeadAttention(32, H)
    with ph.probe(layer) as seen:
        layer(torch.randn(2, S, 32), mask=ph.KeyLengths([S, 5]), bias=given)
    seen.save(tmp_path / "probe")
    (kept,), (view,) = ph.Probe.load(tmp_path / "probe"), seen
    assert kept.call.spec.bias == given
    torch.testing.assert_close(kept.rows(queries=slice(3, 6)), view.rows(queries=slice(3, 6)))
    assert repr(given) == "RelativeContentBias(of_key=[1, 1, 21, 12], max_distance=8)"


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("of_query, of_key or both: got neither", {"of_query": None, "of_key": None}),
        (r"of_key must be floating point of shape \[B, H, tokens, n\]: .*\[3\]",
            {"of_key": torch.ones(3)}),
        ("of_query must be floating .* got torch.int64",
            {"of_query": torch.ones(1, 1, 1, 1).long()}),
        ("same number of columns", {"of_key": torch.ones(1, 1, S, N + 1)}),
        ("max_distance from n / 4 .* got n=12, max_distance=4", {"max_distance": 4}),
        ("max_distance=65536", {"max_distance": 1 << 16}),
        ("nearest must be a column, 0 to 11.*got nearest=12", {"nearest": 12}),
        ("nearest must be .* got nearest=-1", {"nearest": -1}),
        ("without max_distance: got nearest=3, max_distance=8", {"nearest": 3, "max_distance": 8}),
        ("n a multiple of 4",
            {"of_key": None, "of_query": torch.ones(1, 1, T, 10), "max_distance": 9}),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit_are_named(words, changed):
    with pytest.raises(ValueError, match=words):
        bias(**changed)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("of_query", (3, H, T, N)), ("of_query", (2, H, S, N)), ("of_key", (2, 3, S, N))],
)
def test_tables_of_another_call_are_named(name, shape):
    with pytest.raises(ValueError, match=f"{name} must be .* B = 2, H = 4 .*: got"):
        bias(**{name: torch.ones(shape)}).check(2, H, T, S)
