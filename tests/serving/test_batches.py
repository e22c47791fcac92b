"""Rows that are decoded together: bits, joining and leaving, caches that cannot be joined."""

from __future__ import annotations

import pytest
import torch
from tiny import byte_tokenizer, decoder

import polyhead as ph
from polyhead import native
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    GatedDeltaNetConfig,
    LayerConfig,
    TransformerConfig,
)
from polyhead.errors import UnsupportedError
from polyhead.serving import batches
from polyhead.serving.engine import Engine


@pytest.fixture(scope="module")
def model() -> ph.LanguageModel:
    return ph.LanguageModel(decoder(context=256), byte_tokenizer(), "tiny").eval()


def test_rows_are_decoded_in_few_calls_with_the_log_probabilities_of_one_row(
    model: ph.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"text {n} " * (1 + n % 5) for n in range(20)]
    with Engine(model, max_rows=1) as engine:
        alone = [engine.submit(each, max_new_tokens=9, logprobs=2).result() for each in texts]
    sizes: list[int] = []
    step = batches.Batches.step

    def counted(self: batches.Batches) -> None:
        step(self)
        sizes.extend(len(batch.rows) for batch in self._batches)

    monkeypatch.setattr(batches.Batches, "step", counted)
    engine = Engine(model, max_rows=20)
    asked = [engine.submit(each, max_new_tokens=9, logprobs=2) for each in texts]
    while engine.step():
        pass
    assert max(sizes) == batches.TOGETHER
    for request, single in zip(asked, alone, strict=True):
        made = request.result()
        assert (made.ids, made.text) == (single.ids, single.text)
        if native.code() is not None:
            assert made.logprobs == single.logprobs  # to the bit


def test_all_pages_come_back(model: ph.LanguageModel) -> None:
    engine = Engine(model, max_rows=12)
    (empty,) = (engine._batches._empty,)
    assert empty is not None
    pools = [layer._contents.main.pool for layer in empty.layers]
    for _ in range(3):
        asked = [engine.submit("abc " * n, max_new_tokens=3 + n) for n in range(1, 14)]
        for _ in range(4):
            engine.step()
        asked[2].cancel()
        asked[12].cancel()
        while engine.step():
            pass
        for pool in pools:
            pool.collect()
            assert not any(pool.references)
            assert len(pool.free) == len(pool.references)


def test_a_model_whose_rows_cannot_be_joined_is_decoded_row_by_row() -> None:
    config = TransformerConfig(
        "decoder", 256, 16, 64,
        tuple(
            LayerConfig(each, FeedForwardConfig(16))
            for each in (GatedDeltaNetConfig(2, 2, 8, 8), AttentionConfig(2, 1, 8))
        ),
    )  # fmt: skip
    torch.manual_seed(0)
    model = ph.LanguageModel(ph.Transformer(config), byte_tokenizer(), "tiny").eval()
    with Engine(model) as engine:
        assert not engine._batches.join
        asked = [engine.submit(f"text {n}", max_new_tokens=5) for n in range(4)]
        for n, request in enumerate(asked):
            assert request.result().ids == model.generate(f"text {n}", max_new_tokens=5).ids


def test_what_is_joined_is_as_if_it_had_been_read_together() -> None:
    torch.manual_seed(1)
    layer = ph.MultiHeadAttention(16, 4, 2).eval()
    first = ph.PagedCache(page_size=4)
    x = [torch.randn(1, n, 16) for n in (6, 3, 9)]
    with torch.no_grad():
        layer(x[0][:, :1], cache=first, mask=ph.Causal())
        first.reset()
        parts = [first.fork() for _ in x]
        for part, each in zip(parts, x, strict=True):
            layer(each, cache=part, mask=ph.Causal())
        whole = parts[0]
        for part in parts[1:]:
            whole.join_rows(part)
            assert part.lengths == [0]
        assert whole.lengths == [6, 3, 9]
        more = torch.randn(3, 1, 16)
        found = layer(more, cache=whole, mask=ph.Causal())
        for row, each in enumerate(x):
            alone = ph.DenseCache()
            layer(each, cache=alone, mask=ph.Causal())
            want = layer(more[row : row + 1], cache=alone, mask=ph.Causal())
            torch.testing.assert_close(found[row : row + 1], want)
        layer(x[1], cache=parts[1], mask=ph.Causal())  # the fork goes on by itself
        assert (whole.lengths, parts[1].lengths) == ([7, 4, 10], [3])


@pytest.mark.parametrize("other", [ph.PagedCache, ph.DenseCache, None], ids=str)
def test_caches_of_other_pools_are_not_joined(other: type | None) -> None:
    layer, x = ph.MultiHeadAttention(16, 4, 2).eval(), torch.randn(1, 5, 16)
    one = ph.PagedCache(4)
    with torch.no_grad():
        layer(x, cache=one, mask=ph.Causal())
        two = one if other is None else other(4) if other is ph.PagedCache else other()
        layer(x, cache=two, mask=ph.Causal())
    before = one.lengths
    with pytest.raises(UnsupportedError, match="forks of one paged cache"):
        one.join_rows(two)
    assert one.lengths == before
