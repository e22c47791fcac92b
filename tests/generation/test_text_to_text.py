"""Encoder-decoders through ``ph.load``: texts in, texts out, with transformers' tokens."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pairs import (
    DECODERS,
    DRAWS,
    EOS,
    IDS,
    OPTIONS,
    PAD,
    SPECIAL,
    VALUES,
    VOCABULARY,
    letters,
    make_pair,
    their_texts,
)

import polyhead as ph
from polyhead.caches import Quantized
from polyhead.checkpoints import Checkpoint, Tokenizer, load_checkpoint, save_checkpoint

FAMILIES = ("t5", "bart", "mbart", "pegasus", "marian", "m2m_100", "blenderbot", "t5gemma2")
TEXTS = ["the cat sat on the mat", "a", "dogs and cats"]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = make_pair(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def assert_same(found, theirs, source, options):
    wanted, scores = their_texts(theirs, source, **options)
    assert [found.ids, *(each.ids for each in found.others)] == wanted, options
    if scores is not None:
        ours = [found.score, *(each.score for each in found.others)]
        assert ours == pytest.approx(scores, rel=1e-4, abs=1e-4)


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize(
    "name", ["t5", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])]
)
def test_each_option_alone_gives_the_tokens_and_scores_of_transformers(pair_of, name):
    theirs, model = pair_of(name)
    text, plain = TEXTS[0], {"max_new_tokens": 10, "num_beams": 3, "num_return_sequences": 2}
    for option, value in VALUES.items():
        options = {**plain, option: value}
        assert_same(model.generate(text, **options), theirs, model.source_ids(text), options)


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.6},
        {"num_beams": 8, "early_stopping": "never"},
        {"temperature": 1.5, "seed": 3, "top_p": 0.9},
        {"temperature": 0.7, "seed": 4, "top_k": 12, "num_beams": 3},
    ],
    ids=["greedy", "2 beams", "8 beams", "drawn", "drawn beams"],
)
def test_texts_of_uneven_length_give_each_the_tokens_of_transformers(pair_of, name, options):
    theirs, model = pair_of(name)
    options = {"max_new_tokens": 7, **options}
    for found, text in zip(model.generate(TEXTS, **options), TEXTS, strict=True):
        assert_same(found, theirs, model.source_ids(text), options)
        assert found.stats.source_tokens == len(text) + 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unfeasible length")
@settings(
    max_examples=300, deadline=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.reuse, Phase.generate],  # shrinking takes minutes
)  # fmt: skip
@given(
    name=st.sampled_from(FAMILIES),
    texts=st.lists(st.text("abcdefgh xyz", min_size=1, max_size=12), min_size=1, max_size=3),
    beams=st.integers(1, 8),
    new=st.integers(1, 12),
    options=st.fixed_dictionaries({}, optional=OPTIONS),
    drawn=st.none() | st.fixed_dictionaries({"seed": st.integers(0, 99)}, optional=DRAWS),
    kind=st.sampled_from(["auto", "dense", "paged"]),
)
def test_options_together_give_the_tokens_of_transformers(
    pair_of, name, texts, beams, new, options, drawn, kind
):
    theirs, model = pair_of(name)
    options = {"max_new_tokens": new, "num_beams": beams, "suppress_tokens": (PAD,), **options}
    if drawn is not None:
        options |= {"temperature": 1.3, **drawn}
    texts = [f"x{text}" for text in texts]
    made = model.generate(texts, cache={"kind": kind}, **options)
    for found, text in zip(made, texts, strict=True):
        wanted, _ = their_texts(theirs, model.source_ids(text), **options)
        assert found.ids == wanted[0]


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_of_every_head_layout_search_on_every_cache(pair_of, name):
    """Heads of their own, shared, latent; a window shorter than the text (a ring)."""
    theirs, model = pair_of(name)
    options = {"max_new_tokens": 8, "num_beams": 4, "num_return_sequences": 2}
    kinds = ("auto", "dense", "paged") if name != "mistral" else ("auto", "dense")
    for kind in kinds:
        found = model.generate(TEXTS, cache={"kind": kind}, **options)
        for each, text in zip(found, TEXTS, strict=True):
            assert_same(each, theirs, model.prompt_ids(text), options)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_every_cache_gives_the_same_texts(pair_of, name):
    _, model = pair_of(name)
    options = {"max_new_tokens": 12, "num_beams": 4}
    wanted = [each.ids for each in model.generate(TEXTS, **options)]
    for cache in ({"kind": "dense"}, {"kind": "paged", "page_size": 4}):
        assert [each.ids for each in model.generate(TEXTS, cache=cache, **options)] == wanted
    codes = {"quantized": Quantized(8, 8, group=2, sink_tokens=0, recent=2)}
    found = model.generate(TEXTS[0], cache=codes, max_new_tokens=12)
    assert found.ids == tuple(greedy(model, TEXTS[0], 12, codes))
    alone = [model.generate(text, cache=codes, **options).ids for text in TEXTS]
    assert [each.ids for each in model.generate(TEXTS, cache=codes, **options)] == alone


def greedy(model, text, most, codes):
    """The likeliest tokens one by one, by the model alone."""
    cache = model.new_cache(**codes)
    source, ids = torch.tensor([model.source_ids(text)]), [*model.start_ids(model.options)]
    found: list[int] = []
    with torch.inference_mode():
        logits = model(source, torch.tensor([ids]), cache=cache)
        while len(found) < most and EOS not in found:
            found.append(int(logits[0, -1].argmax()))
            logits = model.transformer(torch.tensor([found[-1:]]), cache=cache)
    return found


def test_beams_of_a_long_source_share_its_memory(pair_of):
    """One cross-attention cache for all beams; a decoder's beams share the pages of the prompt."""
    _, model = pair_of("t5")
    _, decoder = pair_of("llama")
    for each, text in ((model, "cat " * 100), (decoder, "cat " * 12)):
        options = {"cache": {"kind": "paged", "page_size": 4}, "max_new_tokens": 3}
        one = each.generate(text, **options).stats.cache_bytes
        assert each.generate(text, num_beams=8, **options).stats.cache_bytes <= 1.5 * one


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


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 3}, {"num_beams": 3}])
def test_log_probabilities_are_those_of_the_logits(pair_of, options):
    _, model = pair_of("bart")
    for text, found in zip(
        TEXTS, model.generate(TEXTS, max_new_tokens=7, logprobs=2, **options), strict=True
    ):
        source, start = model.both_ids(text)
        with torch.no_grad():
            logits = model(torch.tensor([source]), torch.tensor([[*start, *found.ids]]))
        wanted = logits[0, len(start) - 1 : -1].double().log_softmax(dim=-1)
        for token, told, row in zip(found.ids, found.logprobs, wanted, strict=True):
            assert (told.token, told.logprob) == (token, pytest.approx(float(row[token]), abs=1e-4))
            assert [each for each, _ in told.top] == row.topk(2).indices.tolist()
    stream = model.stream(TEXTS[0], max_new_tokens=7, logprobs=0)
    assert [each.token for each in stream.logprobs] == [*stream.ids] == []
    assert "".join(stream) == model.generate(TEXTS[0], max_new_tokens=7).text
    assert [each.token for each in stream.logprobs] == stream.ids


def test_load_says_which_kind_it_found_where_another_is_expected(pair_of, tmp_path):
    make_pair("llama", tmp_path)
    assert isinstance(ph.load(tmp_path, expect=ph.LanguageModel), ph.LanguageModel)
    with pytest.raises(ph.UnsupportedError, match=r"is a LanguageModel .* expected a TextToText"):
        ph.load(tmp_path, expect=ph.TextToText)


def test_generation_config_becomes_the_models_options_and_is_saved_again(tmp_path):
    theirs, _ = make_pair("marian", tmp_path)
    theirs.generation_config.update(num_beams=3, max_length=9, length_penalty=0.5, **IDS)
    theirs.generation_config.save_pretrained(tmp_path)
    save_checkpoint(load_checkpoint(tmp_path), tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        model = ph.load(folder)
        assert (model.options.num_beams, model.options.max_length) == (3, 9)
        found = model.generate("the cat")
        assert (found.ids,) == tuple(their_texts(theirs, model.source_ids("the cat"))[0])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (("",), {}, ph.InputError, "the text is empty"),
        ((["the cat", " "],), {}, ph.InputError, "text 1 is empty: give at least one character"),
        (([],), {}, ph.InputError, "texts must be a text or a list of at least one"),
        ((["a", 3],), {}, TypeError, "text 1 must be a str: got int"),
        (("a" * 64,), {}, ph.ContextLengthError, "65 tokens, the model reads at most 64"),
        (("a\ud800",), {}, ph.InputError, "character 1 is half a surrogate pair"),
        (("a",), {"num_beams": 0}, ValueError, "num_beams must be a whole number from 1 to 65,536"),
        (("a",), {"num_beams": 35}, ValueError, "num_beams must be at most 34, the tokens"),
        (("a",), {"num_beems": 2}, TypeError, "no option of generation is called 'num_beems'"),
        (("a",), {"task": "sing"}, ph.InputError, "no task 'sing'; this model's are none"),
        (("a",), {"target_language": "fr"}, ph.InputError, "this model has no tokens of languages"),
        (("a",), {"batch_size": 0}, ValueError, "batch_size must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_done_is_said(pair_of, arguments, options, error, words):
    _, model = pair_of("bart")
    with pytest.raises(error, match=words):
        model.generate(*arguments, **{"max_new_tokens": 2, **options})


def test_tasks_bring_their_prefix_and_options(pair_of):
    theirs, loaded = pair_of("t5")
    tasks = {
        "summarization": {"prefix": "say ", "num_beams": 2, "max_length": 6, "do_sample": False},
        "translation_en_to_de": {"prefix": "in de ", "early_stopping": True, "max_length": 5},
    }
    model = ph.TextToText(loaded.transformer, loaded.tokenizer, tasks=tasks, prefix="do ")
    model.options = loaded.options
    for asked, prefix, options in (
        ({}, "do ", {"max_new_tokens": 5}),
        ({"prefix": "b "}, "b ", {"max_new_tokens": 5}),
        ({"task": "summarization"}, "say ", {"num_beams": 2, "max_length": 6}),
        ({"target_language": "de"}, "in de ", {"early_stopping": True, "max_length": 5}),
    ):
        mine = {} if asked.get("task") or asked.get("target_language") else options
        source = loaded.source_ids(prefix + "the cat")
        assert_same(model.generate("the cat", **asked, **mine), theirs, source, options)
    with pytest.raises(ph.InputError, match="no task 'translation_en_to_fr'; this model has trans"):
        model.generate("the cat", target_language="fr")


def test_a_file_that_asks_for_draws_gets_draws_as_in_transformers(pair_of, tmp_path):
    theirs, model = make_pair("gpt2", tmp_path)
    assert model.options.temperature is None, "greedy where no file says anything"
    theirs.generation_config.update(do_sample=True, temperature=0.7, top_p=0.9)
    theirs.generation_config.save_pretrained(tmp_path)
    model = ph.load(tmp_path)
    source = model.prompt_ids("cat")
    torch.manual_seed(5)
    wanted = theirs.generate(torch.tensor([source]), max_new_tokens=6)[0, len(source) :].tolist()
    assert list(model.generate("cat", max_new_tokens=6, seed=5).ids) == wanted
    greedy = their_texts(theirs, source, max_new_tokens=6)[0][0]
    assert model.generate("cat", max_new_tokens=6, temperature=0).ids == greedy


def test_older_config_json_says_how_to_generate_where_no_other_file_does(tmp_path):
    make_pair("bart", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {"num_beams": 3, "max_length": 7, "prefix": "x "}
    path.write_text(json.dumps(values | {"decoder_start_token_id": EOS}))
    model = ph.load(tmp_path)
    assert (model.options.num_beams, model.options.max_length, model.prefix) == (3, 7, "x ")
    theirs = hf.BartForConditionalGeneration.from_pretrained(tmp_path)
    assert_same(model.generate("cat", prefix=""), theirs, model.source_ids("cat", prefix=""), {})
    (tmp_path / "generation_config.json").write_text('{"num_beams": 2, "chat_format": "x"}')
    with pytest.warns(UserWarning, match="unknown options chat_format; left out"):
        model = ph.load(tmp_path)
    options = model.options
    assert (options.num_beams, options.max_length, options.max_new_tokens) == (2, None, 512)
    assert options.decoder_start_token_id == EOS, "config.json's, which the other file lacks"


def test_a_probe_sees_cross_attention(pair_of):
    _, model = pair_of("marian")
    found = model.generate(TEXTS[0], max_new_tokens=4)
    source = torch.tensor([model.source_ids(TEXTS[0])])
    target = torch.tensor([[*model.start_ids(model.options), *found.ids[:-1]]])
    with ph.probe(model) as seen, torch.no_grad():
        model(source, target)
    crossing = [name for name in seen.modules if name.endswith("cross_attention")]
    assert len(crossing) == 2
    rows = seen[crossing[0]].rows()
    assert rows.shape == (1, 4, target.shape[1], source.shape[1])
    torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows[..., 0]))


def test_the_transformer_of_2017_is_one_line_and_is_saved_in_either_form(tmp_path):
    config = ph.TransformerConfig.vanilla(VOCABULARY, 24, 2, 4, 40, max_positions=32)
    torch.manual_seed(1)
    model = ph.Transformer(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    tokenizer = Tokenizer(letters(), special_tokens=SPECIAL)
    made = ph.TextToText(model, tokenizer)
    options = {"num_beams": 3, "max_new_tokens": 6, "eos_token_ids": (0,)}
    wanted = made.generate(TEXTS[0], **options)
    checkpoint = Checkpoint(config, model, tokenizer, "made here")
    for form in ("polyhead", "hugging-face"):
        save_checkpoint(checkpoint, tmp_path / form, form=form)
        again = ph.load(tmp_path / form, expect=ph.TextToText)
        assert again.config == config
        assert again.start_ids(again.options) == [config.pad_token_id]
        assert again.generate(TEXTS[0], **options).ids == wanted.ids
    theirs = hf.MarianMTModel.from_pretrained(tmp_path / "hugging-face")
    source, target = torch.tensor([made.source_ids(TEXTS[0])]), torch.tensor([[33, *wanted.ids]])
    with torch.no_grad():
        logits = theirs(input_ids=source, decoder_input_ids=target).logits
        torch.testing.assert_close(logits, made(source, target), atol=1e-4, rtol=1e-4)
    found = theirs.generate(source, num_beams=3, max_new_tokens=6, eos_token_id=0)
    assert found[0, 1:].tolist() == list(wanted.ids)

    paper = ph.TransformerConfig.vanilla(VOCABULARY, 24, 2, 4, 40, sinusoids="interleaved")
    with pytest.raises(ph.ConfigError, match=r"cannot say embedding\.sinusoid\.layout"):
        save_checkpoint(Checkpoint(paper, ph.Transformer(paper), None, ""), tmp_path / "paper")
    for sizes in ({"embed_dim": 25}, {"num_heads": 5}, {"pad_token_id": 40}, {"num_layers": 0}):
        with pytest.raises(ph.ConfigError, match=f"{next(iter(sizes))}.*(must be|got 5)"):
            ph.TransformerConfig.vanilla(VOCABULARY, **sizes)
