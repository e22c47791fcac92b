"""Encoder-decoders through ``ph.load``: texts in, texts out, with transformers' tokens."""

from __future__ import annotations

import pytest
import torch
from pairs import IDS, make_pair, their_texts

import polyhead as ph

FAMILIES = ("t5", "bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot")
TEXTS = ["the cat sat on the mat", "a", "dogs and cats"]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = make_pair(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_of_uneven_length_give_each_the_tokens_of_transformers(pair_of, name):
    theirs, model = pair_of(name)
    assert isinstance(model, ph.TextToText)
    options = {
        "max_new_tokens": 7,
        "num_beams": 3,
        "num_return_sequences": 2,
        "length_penalty": 0.6,
    }
    for found, text in zip(model.generate(TEXTS, **options), TEXTS, strict=True):
        wanted, scores = their_texts(theirs, model.source_ids(text), **options)
        assert [found.ids, *(each.ids for each in found.others)] == wanted
        assert [found.score, found.others[0].score] == pytest.approx(scores, abs=1e-4)
        assert found.stats.source_tokens == len(text) + 1


def test_logits_and_the_encoders_output_are_those_of_transformers(pair_of):
    theirs, model = pair_of("bart")
    source, target = torch.tensor([[5, 6, 7, 2]]), torch.tensor([[2, 9, 8]])
    with torch.no_grad():
        wanted = theirs(input_ids=source, decoder_input_ids=target)
        torch.testing.assert_close(model(source, target), wanted.logits)
        encoded = wanted.encoder_last_hidden_state
        torch.testing.assert_close(model.encode(source), encoded)


def test_a_stream_writes_the_text_of_generate(pair_of):
    _, model = pair_of("pegasus")
    stream = model.stream(TEXTS[0], max_new_tokens=9)
    text = "".join(stream)
    assert text == model.generate(TEXTS[0], max_new_tokens=9).text != ""
    assert (stream.stats.source_tokens, stream.stats.prompt_tokens) == (len(TEXTS[0]) + 1, 1)
    with pytest.raises(ValueError, match="a stream is one text, token by token: got num_beams=2"):
        model.stream("a", num_beams=2)


def test_load_says_which_kind_it_found_where_another_is_expected(pair_of, tmp_path):
    make_pair("llama", tmp_path)
    assert isinstance(ph.load(tmp_path, expect=ph.LanguageModel), ph.LanguageModel)
    with pytest.raises(ph.UnsupportedError, match=r"is a LanguageModel .* expected a TextToText"):
        ph.load(tmp_path, expect=ph.TextToText)


def test_generation_config_becomes_the_models_options_and_is_saved_again(tmp_path):
    from polyhead.checkpoints import load_checkpoint, save_checkpoint

    theirs, _ = make_pair("marian", tmp_path)
    theirs.generation_config.update(num_beams=3, max_length=9, length_penalty=0.5, **IDS)
    theirs.generation_config.save_pretrained(tmp_path)
    save_checkpoint(load_checkpoint(tmp_path), tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        model = ph.load(folder)
        assert (model.options.num_beams, model.options.max_length) == (3, 9)
        found = model.generate("the cat")
        assert (found.ids,) == tuple(their_texts(theirs, model.source_ids("the cat"))[0])
