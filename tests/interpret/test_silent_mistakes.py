"""Arguments that meant something else without an error: now they work, or get a sentence."""

from __future__ import annotations

import warnings

import pytest
import torch
from tiny import write_decoder

import polyhead as ph
from polyhead.errors import InputError, ModelNotFoundError
from polyhead.kernels import dispatch
from polyhead.training.vocabulary import make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ph.LanguageModel:
    path = write_decoder(tmp_path_factory.mktemp("models") / "tiny")
    return ph.load(path, expect=ph.LanguageModel)


def test_one_text_where_several_are_meant_is_refused(model: ph.LanguageModel) -> None:
    for call in (
        lambda: ph.find_heads(model, "a text"),
        lambda: ph.compare_texts(model, "a text"),
        lambda: make_tokenizer("a text"),
    ):
        with pytest.raises(InputError, match=r"texts must be a list of texts: got one .*a text"):
            call()


@torch.no_grad()
def test_heads_are_named_in_three_ways(model: ph.LanguageModel) -> None:
    ids = torch.arange(5)[None]
    found = []
    for heads in ({1: [2], 0: [3]}, "1.2,0.3", [(1, 2), (0, 3)]):
        with ph.ablate(model, heads):
            found.append(model(ids))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], model(ids))
    for wrong, said in ({1: 2}, r"such as \{1: \[2\]\}"), ([3], "must be"), (3, "must be"):
        with pytest.raises(InputError, match=said), ph.ablate(model, wrong):
            pass


def test_rows_of_one_head_and_of_one_query(model: ph.LanguageModel) -> None:
    with ph.probe(model) as seen, torch.no_grad():
        model(torch.arange(5)[None])
    assert torch.equal(seen[0].rows(heads=1), seen[0].rows(heads=[1]))
    assert torch.equal(seen[0].rows(queries=-1), seen[0].rows(queries=slice(4, 5)))
    with pytest.raises(InputError, match="queries must be from 0 to 4: got 5"):
        seen[0].rows(queries=5)


def test_a_name_without_its_organisation_gets_the_whole_one() -> None:
    with pytest.raises(ModelNotFoundError, match="on the hub it is 'openai-community/gpt2'"):
        ph.load("gpt2")


def test_tokens_before_heads_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_WATCHED", [True])
    q = torch.randn(1, 64, 4, 8)
    right = q.transpose(1, 2)
    decoding = torch.randn(1, 8, 1, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ph.attention(right, right, right)
        ph.attention(decoding, q.transpose(1, 2)[:, :1], q.transpose(1, 2)[:, :1])
        few = torch.randn(1, 3, 8, 8).transpose(1, 2)  # a layer's own: more heads than tokens
        ph.attention(few, few, few)
    with pytest.warns(UserWarning, match=r"64 heads and 4 tokens.*\[B, T, H, D\].*transpose"):
        out = ph.attention(q, q, q)
    assert out.shape == q.shape
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ph.attention(q, q, q)
