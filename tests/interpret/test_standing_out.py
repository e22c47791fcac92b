"""Pairs whose weight is not predicted, and habits of heads, on attention that is made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead.interpret.habits import habits, is_punctuation
from polyhead.interpret.heads import TokenizedText, WordPair
from polyhead.interpret.kept import KeptCall, TokenIds
from polyhead.interpret.shuffles import Shuffles
from polyhead.interpret.standing_out import (
    _bin,
    _Texts,
    heads_of_pair,
    pair_controls,
    standing_out,
)
from polyhead.interpret.view import AttentionView
from polyhead.semantics import Causal, Specification, Tokens

WORDS = ["The", " cat", " sat", ",", " and", " the", " cat", " ran", " and", " cat", " hid", " it"]
"""Each word a token: *cat* is 1, 6 and 9, *and* is 4 and 8."""

LENGTH = len(WORDS)
SINK, PREVIOUS, INDUCTION, COMMA, EVEN, FAR = range(6)


def _tokens() -> TokenizedText:
    text, spans, names = "".join(WORDS), [], list(dict.fromkeys(WORDS))
    for word in WORDS:
        start = spans[-1][1] if spans else 0
        spans.append((start, start + len(word)))
    return TokenizedText(text, tuple(names.index(w) for w in WORDS), tuple(WORDS), tuple(spans))


def _view(weights: Tensor, ids: Tensor) -> AttentionView:
    """A layer with the weights ``[B, H, T, T]``: one-hot keys, the logarithms as queries."""
    batch, heads, length, _ = weights.shape
    tokens = Tokens.of(length)
    before = torch.cat([torch.full((batch, 1), -1), ids[:, :-1]], dim=1)
    q = weights.clamp(min=1e-6).log()
    keys = torch.eye(length).expand(batch, heads, -1, -1)
    lse = q.masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf).logsumexp(-1)
    spec = Specification(scale=1.0, mask=Causal())
    call = KeptCall(
        q, keys, lse, spec, tokens, tokens, tuple(range(heads)), TokenIds(ids, ids, before)
    )
    return AttentionView(0, call)


def _weights(ids: Tensor, meaning: bool) -> Tensor:
    """``[H, T, T]`` what the heads do on tokens; ``FAR`` alone cares about what the text says."""
    length = len(ids)
    found = torch.full((6, length, length), 0.01)
    for i in range(length):
        found[SINK, i, 0] = found[FAR, i, 0] = 5.0
        found[PREVIOUS, i, max(i - 1, 0)] = 5.0
        copies = [j + 1 for j in range(1, i) if ids[j] == ids[i]]
        found[INDUCTION, i, copies[-1] if copies else 0] = 5.0
        found[EVEN, i] = 1.0
        found[COMMA, i, [j for j in range(i + 1) if ids[j] == 3] or [0]] = 5.0
    if meaning:
        found[FAR, 11, 1] = 40.0
    found = found.tril()
    return found / found.sum(-1, keepdim=True)


@pytest.fixture(scope="module")
def seen() -> tuple[Any, TokenizedText, Shuffles]:
    tokens = _tokens()
    ids = torch.tensor(tokens.ids)
    generator = torch.Generator().manual_seed(3)
    order = torch.stack([torch.randperm(LENGTH, generator=generator) for _ in range(8)])
    places = order.argsort(1)
    there = torch.stack([_weights(ids[row], meaning=False) for row in order])
    probe = _Probe(_view(_weights(ids, meaning=True)[None], ids[None]))
    return probe, tokens, Shuffles(order, places, _Probe(_view(there, ids[order])), True)  # type: ignore[arg-type]


class _Probe(list[AttentionView]):
    """A probe of one layer."""

    layers = (0,)

    def __init__(self, view: AttentionView) -> None:
        super().__init__([view])


def test_the_pair_that_only_the_text_explains_stands_out(seen: Any) -> None:
    probe, tokens, shuffles = seen
    found = standing_out(probe, tokens, shuffles)
    (best,) = (pair for pair in found.found() if pair.head == FAR)
    assert (best.query, best.key) == (11, 1)
    assert best.weight == pytest.approx(40 / 45.1, abs=1e-2)
    assert best.shuffled is not None
    assert best.shuffled < 0.01
    assert best.others < 0.01
    assert best.times == pytest.approx(best.weight / 0.01, rel=0.1)
    ranked = heads_of_pair(probe, tokens, shuffles, 11, 1)
    assert ranked[0] == best
    beyond = [pair.weight - max(pair.by_distance, pair.shuffled or 0.0) for pair in ranked]
    assert beyond == sorted(beyond, reverse=True)
    # The head that always looks one token back, and those that rest on the first, do not.
    assert all(pair.head not in (SINK, PREVIOUS, EVEN) for pair in found.found())
    assert all(pair.key not in (0, pair.query) for pair in found.pairs)


def test_nothing_stands_out_where_a_shuffle_does_the_same(seen: Any) -> None:
    _, tokens, shuffles = seen
    plain = _Probe(_view(shuffles.seen[0].rows()[:1], torch.tensor(tokens.ids)[shuffles.order[:1]]))
    shuffled = TokenizedText(
        tokens.text, *(tuple(each[i] for i in shuffles.order[0]) for each in
                       (tokens.ids, tokens.pieces, tokens.spans))
    )  # fmt: skip
    order = shuffles.places[0][shuffles.order]  # as places of that text
    again = Shuffles(order, order.argsort(1), shuffles.seen, True)
    assert standing_out(plain, shuffled, again).rate <= 0.02  # type: ignore[arg-type]


def test_controls_of_a_named_pair(seen: Any) -> None:
    probe, _, shuffles = seen
    found = pair_controls(probe, WordPair(11, (1,), "it", "cat"), shuffles)
    rows, places = shuffles.seen[0].rows(), shuffles.places
    for head in range(6):
        same = [
            float(row[head, at[11], at[1]])
            for row, at in zip(rows, places, strict=True)
            if 0 < at[1] < at[11]  # as the first token it would get the sink's weight
        ]
        shuffled, others = found[0, head]
        assert shuffled == pytest.approx(sum(same) / len(same), abs=1e-6)
        column = probe[0].rows()[0, head, 2:11, 1]
        assert others == pytest.approx(float(column.mean()), abs=1e-6)


def test_every_head_has_the_habit_that_it_was_given(seen: Any) -> None:
    found = habits(*seen)
    kinds = {each.head: each.kind for each in found}
    assert kinds == {
        SINK: "first", PREVIOUS: "previous", INDUCTION: "induction", COMMA: "punctuation",
        EVEN: "even", FAR: "first",
    }  # fmt: skip
    sink = found[SINK]
    first = seen[0][0].rows()[0, SINK, 1:, 0]
    assert sink.share == pytest.approx(float(first.mean()), abs=1e-6)
    assert sink.even == pytest.approx(sum(1 / n for n in range(2, 13)) / 11, abs=1e-6)
    assert sink.shuffled == pytest.approx(sink.share, abs=0.01)
    assert found[EVEN].share == pytest.approx(1.0, abs=1e-3)


def test_pairs_are_counted_by_distance() -> None:
    special = torch.tensor([[True, False, False, False, False, True]])
    for causal, wanted in (
        (True, {1: 3, 2: 2, 3: 1}),
        (False, {1: 3, 2: 2, 3: 1, -1: 3, -2: 2, -3: 1}),
    ):
        counts = _Texts.of(special, causal).counts[0]
        for apart in range(-5, 6):
            place = int(_bin(torch.tensor(apart)))
            assert counts[place] == wanted.get(apart, 0), apart
        assert counts.sum() == sum(wanted.values())


@pytest.mark.parametrize(
    ("text", "is_it"),
    [(",", True), ("。", True), ("\n", True), (" ", False), ("a.", False), ("", False)],
)
def test_punctuation_in_any_script(text: str, is_it: bool) -> None:
    assert is_punctuation(text) is is_it


def test_shuffles_keep_special_tokens_and_draw_from_long_texts(monkeypatch: Any) -> None:
    from polyhead.interpret import shuffles as module

    monkeypatch.setattr(module, "run_ids", lambda model, ids: SimpleNamespace(ids=ids))
    spans = ((0, 0), *((i, i + 1) for i in range(400)), (0, 0))
    text = TokenizedText("x" * 400, tuple(range(402)), ("x",) * 402, spans)
    made = Shuffles.of(SimpleNamespace(), text, causal=False)  # type: ignore[arg-type]
    assert made.order.shape == (8, 256)
    assert (made.order[:, 0] == 0).all()
    assert (made.order[:, -1] == 401).all()
    assert all(len(set(row.tolist())) == 256 for row in made.order)
    assert torch.equal(made.places.gather(1, made.order), torch.arange(256).expand(8, -1))
    assert int((made.places >= 0).sum()) == 8 * 256


@pytest.mark.model
def test_words_named_at_random_are_the_habit_of_few_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import polyhead as ph
    from polyhead.interpret import habits as module
    from polyhead.viewer.looks import look_at

    try:
        model = ph.load("smollm2")
    except ph.PolyheadError as error:
        pytest.skip(str(error))
    text = (
        "The old clock in the hall had stopped at noon. Nobody knew who had wound it last, and "
        "nobody dared to touch it; the children only looked at its hands when they ran past."
    )
    look = look_at("smollm2", model, TokenizedText.of(model.tokenizer, text), {})
    assert look.findings is not None
    tokens, shuffles = TokenizedText.of(model.tokenizer, text), look.findings.shuffles
    kinds = []
    for seed in range(8):
        chosen = torch.rand(len(tokens.ids), generator=torch.Generator().manual_seed(seed)) < 0.15
        named = {
            text[slice(*span)]
            for span, is_it in zip(tokens.spans, chosen, strict=True)
            if is_it and not is_punctuation(text[slice(*span)])
        }
        monkeypatch.setattr(module, "is_punctuation", named.__contains__)
        kinds += [habit.kind for habit in habits(look.seen, tokens, shuffles)]
    assert kinds.count("punctuation") <= len(kinds) // 25  # measured: 64 of 2,160
    assert kinds.count("first") > len(kinds) // 2
