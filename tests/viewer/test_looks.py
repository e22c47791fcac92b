"""What a look knows beyond weights: products, the way of a token, the next token; the one table."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny import byte_tokenizer, decoder

import far
import polyhead as ph
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    GatedDeltaNetConfig,
    HeadLayout,
    LayerConfig,
    MambaConfig,
    TransformerConfig,
)
from polyhead.errors import UnsupportedError
from polyhead.interpret.heads import TokenizedText
from polyhead.interpret.statistics import AVERAGED, TABLE
from polyhead.interpret.stream import Stream
from polyhead.native import TileSums
from polyhead.viewer.looks import Look, look_at
from polyhead.viewer.next_token import TEMPERATURES

TEXT = "The animal slept"


@pytest.fixture(scope="module")
def model() -> ph.LanguageModel:
    return ph.LanguageModel(decoder(), byte_tokenizer(), "tiny").eval()


@pytest.fixture(scope="module")
def look(model: ph.LanguageModel) -> Look:
    return look_at("tiny", model, TokenizedText.of(model.tokenizer, TEXT), {})


def test_one_table_names_every_statistic_for_python_native_code_and_pages() -> None:
    assert {each.native for each in TABLE.values() if each.native} == {*TileSums._fields}
    for code in ("en", "zh"):
        path = Path(ph.__file__).parent / "_utils/texts" / f"{code}.json"
        texts = json.loads(path.read_text(encoding="utf-8"))["statistics"]
        said = {name.split(".")[1] for name in texts if name.startswith("stat.")} - {"pair"}
        assert said == {*AVERAGED}
        assert {f"unit.{TABLE[name].unit}" for name in AVERAGED} <= {*texts}


def test_products_add_up_to_the_score_and_scores_to_the_row(look: Look) -> None:
    found = look.product(1, 2, 12, 3)
    call = look.layers[1].view.call
    torch.testing.assert_close((found.q * found.k).sum(), found.raw[3])
    torch.testing.assert_close(found.scores[:13], found.raw[:13] * call.spec.scale)
    assert (found.scores[13:] == -math.inf).all()
    torch.testing.assert_close(found.scores.softmax(0), found.weights)
    torch.testing.assert_close(found.weights, torch.from_numpy(look.row(1, 2, 12)))
    with pytest.raises(ValueError, match="key must be a whole number"):
        look.product(1, 2, 12, 16)


def test_the_way_of_a_token_is_what_each_part_adds(model: ph.LanguageModel, look: Look) -> None:
    states = look.stream.states
    sizes = look.stream.sizes
    torch.testing.assert_close(states[1:].norm(dim=-1), sizes["stream"])
    layer = model.transformer.layers[1]
    x = states[1][None]
    h = layer.attention(layer.attention_norm(x), mask=ph.Causal())
    torch.testing.assert_close(h[0].norm(dim=-1), sizes["attention"][1])
    added = layer.feed_forward(layer.feed_forward_norm(x + h))
    torch.testing.assert_close(added[0].norm(dim=-1), sizes["feed_forward"][1])
    way = look.way(7)
    assert way["sizes"]["attention"][1] == pytest.approx(float(sizes["attention"][1, 7]), rel=1e-3)
    assert len(way["guesses"]) == len(model.transformer.layers) + 1


def test_the_last_guess_is_the_models_prediction_and_the_first_reads_no_layer(
    model: ph.LanguageModel, look: Look
) -> None:
    ids = torch.tensor([model.tokenizer.encode(TEXT)])
    with torch.no_grad():
        logits = model(ids)[0]
        first = model.transformer.logits(
            model.transformer.final_norm(model.transformer.embedding(ids, 0))
        )
    torch.testing.assert_close(look.stream.guesses(7)[-1], logits[7])
    torch.testing.assert_close(look.stream.guesses(7)[0], first[0, 7])
    token, share = look.way(15)["guesses"][-1][0]
    assert token == look.say(int(logits[15].argmax()))
    assert share == pytest.approx(float(logits[15].softmax(-1).max()), abs=1e-4)


def test_of_a_long_text_the_last_states_are_kept(model: ph.LanguageModel, look: Look) -> None:
    stream = Stream(model.transformer, most_bytes=3 * 32 * 4 * 5 + 1)
    with stream.watching(), torch.no_grad():
        model(torch.tensor([model.tokenizer.encode(TEXT)]))
    width = stream.states.shape[-1]
    assert stream.first == 16 - max(1, (3 * 32 * 4 * 5 + 1) // (width * 4 * 3))
    torch.testing.assert_close(stream.guesses(15), look.stream.guesses(15))
    with pytest.raises(ValueError, match="token must be a whole number"):
        stream.guesses(stream.first - 1)


def test_probabilities_at_any_temperature_follow_from_what_a_page_is_given(
    model: ph.LanguageModel, look: Look
) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([model.tokenizer.encode(TEXT)]), last=1)[0, -1].double()
    given = look.next_json()
    assert given is not None
    for heat, total in zip(TEMPERATURES, given["partitions"], strict=True):
        shares = [math.exp(logit / heat - total) for _, logit in given["tokens"]]
        wanted = (logits / heat).softmax(-1).sort(descending=True).values[: len(shares)]
        assert shares == pytest.approx(wanted.tolist(), rel=1e-4, abs=1e-9)


def test_a_look_without_heads_is_that_of_the_ablated_model(model: ph.LanguageModel) -> None:
    tokens = TokenizedText.of(model.tokenizer, TEXT)
    found = look_at("tiny", model, tokens, {0: [1, 2]})
    with ph.ablate(model, {0: [1, 2]}), ph.probe(model) as seen, torch.no_grad():
        logits = model(torch.tensor([tokens.ids]))[0, -1]
    torch.testing.assert_close(torch.from_numpy(found.row(1, 0, 9)), seen[1].rows([0])[0, 0, 9])
    assert found.next_token is not None
    assert found.next_token.tokens[0][0] == int(logits.argmax())


@pytest.mark.filterwarnings("ignore:at..frobenius_norm is deprecated")
def test_a_look_at_a_model_on_a_device_shows_the_same(look: Look) -> None:
    with far.Away() as away:
        model = ph.LanguageModel(decoder(), byte_tokenizer(), "tiny").eval().to(far.DEVICE)
        there = look_at("tiny", model, TokenizedText.of(model.tokenizer, TEXT), {})
        assert there.next_json() is not None
        part = slice(2, 9)
        before = away.bytes
        for ask in (
            lambda look: look.thumbnails(1, 8).astype(int),
            lambda look: look.region(0, 1, part, part, 4),
            lambda look: look.row(1, 2, 12),
            lambda look: look.column(1, 2, 3),
            lambda look: look.pair(12, 3),
        ):
            found, wanted = ask(there), ask(look)
            assert abs(found - wanted).max() <= (1 if found.dtype == int else 1e-5)
        # A byte a pixel of 4 heads, then 4 × 4 cells, a row, a column, a number of each head.
        pixels = 4 * 8 * 8
        assert away.bytes - before <= pixels + 4 * (4 * 4 + 16 + 16 + 8)
        assert there.notable().keys() == look.notable().keys()
        assert isinstance(there.way(12), dict)


def test_a_look_shows_heads_with_a_state_beside_attention_and_names_what_has_no_heads() -> None:
    def look(*attentions: HeadLayout) -> Look:
        torch.manual_seed(0)
        layers = tuple(LayerConfig(each, FeedForwardConfig(48)) for each in attentions)
        config = TransformerConfig("decoder", 300, 32, 512, layers)
        model = ph.LanguageModel(ph.Transformer(config), byte_tokenizer(), "tiny").eval()
        return look_at("tiny", model, TokenizedText.of(model.tokenizer, "A state, a head."), {})

    plain, state = AttentionConfig(4, 2, 8), GatedDeltaNetConfig(4, 2, 8, 6)
    seen = look(plain, state)
    assert [layer["shares"] for layer in seen.header()["layers"]] == [False, True]
    row = seen.row(1, 3, 10)
    assert row[:11].sum() == pytest.approx(1.0, abs=1e-5)
    assert not row[11:].any()
    assert seen.pair(10, 4)[7] == pytest.approx(row[4])
    assert seen.thumbnails(1, 8).shape == (4, 8, 8)
    assert set(seen.statistics(1)) >= set(AVERAGED) - {"document_mass"}
    with pytest.raises(UnsupportedError, match=r"transformer\.layers\.1\.attention first"):
        look(plain, MambaConfig(10, 4, 3), state)
