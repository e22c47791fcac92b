"""SentencePiece directories and the codes of languages, beside transformers' tokenizers."""

from __future__ import annotations

import importlib
import io
import json
import random

import pytest
import sentencepiece
import transformers as hf
from pairs import EOS, LANGUAGES, letters, make_pair, their_texts, write_tokenizer

import polyhead as ph
from polyhead.checkpoints import Tokenizer, load_checkpoint, save_checkpoint
from polyhead.checkpoints.tokenizers.sentencepiece_tokenizer import from_sentencepiece

SENTENCE = "the cat sat on mat dogs and house is wonderful small frog teacher über naïve 東京"
TEXTS = ["the cat sat", "  a house  on mat", "über naïve 東京 ☃☃x", "the </s> cat", "A"]


def train(**options) -> bytes:
    drawn = random.Random(0)
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(" ".join(drawn.choices(SENTENCE.split(), k=8)) for _ in range(200)),
        model_writer=made, vocab_size=42, minloglevel=2, **options,
    )  # fmt: skip
    return made.getvalue()


@pytest.fixture(scope="module")
def models():
    """Models with fairseq's special tokens and with T5's."""
    return train(), train(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


def pieces(model: bytes) -> list[tuple[str, float]]:
    read = sentencepiece.SentencePieceProcessor.from_proto(model)
    return [(read.id_to_piece(i), read.get_score(i)) for i in range(read.get_piece_size())]


def write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


def write_marian(folder, model, **declared):
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(model)
    tokens = ["</s>", "<unk>", *(piece for piece, _ in pieces(model)[3:]), ">>fra<<", ">>deu<<"]
    vocabulary = {token: index for index, token in enumerate([*tokens, "<pad>"])}
    write_json(folder / "vocab.json", vocabulary)
    if declared:
        first, *middle, last = vocabulary  # transformers takes special tokens' ids from one file
        reordered = [first, "<unk>", *reversed(middle[1:-2]), last]  # and no languages
        write_json(folder / "target_vocab.json", {each: i for i, each in enumerate(reordered)})
    write_json(folder / "tokenizer_config.json", declared)
    return len(vocabulary)


def write_m2m_100(folder, model):
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(piece for piece, _ in pieces(model)[3:])]
    write_json(folder / "vocab.json", {token: index for index, token in enumerate(tokens)})
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "M2M100Tokenizer"})
    return len(tokens) + 100


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("apart", [False, True])
def test_marians_ids_and_texts_are_those_of_transformers(models, tmp_path, apart):
    write_marian(tmp_path, models[0], **({"separate_vocabs": True} if apart else {}))
    theirs = hf.MarianTokenizer.from_pretrained(tmp_path)
    source, target = from_sentencepiece(tmp_path)
    for text in (*TEXTS, ">>fra<< the cat", ">>xyz<< the cat"):
        assert source.encode(text) == theirs(text)["input_ids"], text
        written = theirs(text_target=text)["input_ids"]
        assert target.encode(text) == written
        assert target.decode(written) == theirs.decode(written, skip_special_tokens=True)
    assert source.spans("the cat")[:2] == [(0, 3), (3, 7)]
    assert source.spans(">>fra<< the </s>cat")[:4] == [(0, 7), (8, 11), (12, 16), (16, 19)]
    assert source.pieces(source.encode("the cat")) == [" the", " cat", "</s>"]
    assert "".join(map(target.stream().push, target.encode("the cat sat"))) == "the cat sat"


def test_m2m_100s_ids_and_texts_are_those_of_transformers(models, tmp_path):
    write_m2m_100(tmp_path, models[0])
    theirs = hf.M2M100Tokenizer.from_pretrained(tmp_path, src_lang="de")
    tokenizer, _ = from_sentencepiece(tmp_path)
    for text in TEXTS:
        wanted = theirs(text)["input_ids"]
        assert [tokenizer.vocabulary["__de__"], *tokenizer.encode(text)] == wanted
        assert tokenizer.decode(wanted[1:]) == theirs.decode(wanted[1:], skip_special_tokens=True)


@pytest.mark.parametrize("name", ["T5", "Pegasus", "MBart", "MBart50"])
def test_ids_of_models_without_a_vocabulary_are_those_of_transformers(models, tmp_path, name):
    fairseq = name.startswith("MBart")
    model = models[0] if fairseq else models[1]
    (tmp_path / ("sentencepiece.bpe.model" if fairseq else "spiece.model")).write_bytes(model)
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": f"{name}Tokenizer"})
    convert = importlib.import_module("transformers.convert_slow_tokenizer")
    converter = getattr(convert, f"{name}Converter")
    theirs = getattr(hf, f"{name}Tokenizer")(**converter.convert_from_spm(vocab=pieces(model)))
    tokenizer, _ = from_sentencepiece(tmp_path)
    for text in TEXTS[:3]:  # others differ in the spaces around special tokens
        wanted = theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, add_special=False) == wanted, text
    for token, index in tokenizer.vocabulary.items():
        assert theirs.convert_tokens_to_ids(token) == index, token


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("source.spm", b"garbage", "is not a valid SentencePiece model"),
        ("source.spm", b"", "is not a valid SentencePiece model"),
        ("vocab.json", b'{"a": -1}', "'a' must have an id of at least 0: got -1"),
        ("vocab.json", b'{"a": 1, "b": 1}', "two tokens have the same id"),
        ("vocab.json", b'{"a": 1}', "the vocabulary has no eos_token"),
        ("vocab.json", b"[]", "must hold a JSON object"),
    ],
)
def test_damaged_files_are_named(models, tmp_path, name, content, words):
    write_marian(tmp_path, models[0])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ph.CheckpointError, match=words):
        from_sentencepiece(tmp_path)


def test_a_piece_that_is_no_text_is_named(models, tmp_path):
    # U+2581, which begins words, without its last byte
    (tmp_path / "spiece.model").write_bytes(models[1].replace(b"\xe2\x96\x81", b"\xe2\x96a"))
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"})
    with pytest.raises(ph.CheckpointError, match="is not a valid SentencePiece model"):
        from_sentencepiece(tmp_path)


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_marian_is_told_the_language_in_front_of_the_source(models, tmp_path):
    size = write_marian(tmp_path, models[0])
    pad = size - 1
    theirs, _ = make_pair(
        "marian", tmp_path, vocab_size=size, decoder_vocab_size=size, pad_token_id=pad,
        eos_token_id=0, decoder_start_token_id=pad, bos_token_id=None, tokenizer=False,
    )  # fmt: skip
    tokenizer = hf.MarianTokenizer.from_pretrained(tmp_path)
    save_checkpoint(load_checkpoint(tmp_path), tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        model = ph.load(folder, expect=ph.TextToText)
        assert [*model.languages.tokens] == ["fra", "deu"]
        found = model.generate("the cat", target_language="deu", num_beams=2, max_new_tokens=6)
        source = tokenizer(">>deu<< the cat")["input_ids"]
        wanted = their_texts(theirs, source, eos=0, num_beams=2, max_new_tokens=6)[0][0]
        assert found.ids == wanted
        assert found.text == tokenizer.decode(wanted, skip_special_tokens=True)
        assert model.source_ids(">>deu<< the cat") == source
    with pytest.raises(ph.InputError, match="target_language is needed: the model has 2, such as"):
        model.generate("the cat")
    with pytest.raises(ph.InputError, match="no language 'fr'; near ones of its 2: fra"):
        model.generate("the cat", target_language="fr")
    with pytest.raises(ph.InputError, match="told the target language alone: got source_language"):
        model.generate("the cat", source_language="eng", target_language="fra")


def test_marian_has_a_vocabulary_for_each_side(models, tmp_path):
    size = write_marian(tmp_path, models[0], separate_vocabs=True)
    theirs, model = make_pair(
        "marian", tmp_path, vocab_size=size, decoder_vocab_size=size - 2, pad_token_id=1,
        eos_token_id=0, decoder_start_token_id=1, share_encoder_decoder_embeddings=False,
        tokenizer=False,
    )  # fmt: skip
    sizes = [each.vocab_size for each in (model.source_tokenizer, model.tokenizer)]
    assert sizes == [size, size - 2]
    found = model.generate("the cat", num_beams=2, max_new_tokens=6, target_language="fra")
    source = model.source_ids("the cat", target_language="fra")
    assert found.ids == their_texts(theirs, source, eos=0, num_beams=2, max_new_tokens=6)[0][0]


def test_m2m_100_reads_one_language_and_writes_another(models, tmp_path):
    size = write_m2m_100(tmp_path, models[0])
    theirs, model = make_pair("m2m_100", tmp_path, vocab_size=size, tokenizer=False)
    tokenizer = hf.M2M100Tokenizer.from_pretrained(tmp_path, src_lang="de")
    found = model.generate(
        ["the cat", "dogs"], source_language="de", target_language="fr", max_new_tokens=5
    )
    first = tokenizer.get_lang_id("fr")
    for each, text in zip(found, ["the cat", "dogs"], strict=True):
        source = tokenizer(text)["input_ids"]
        wanted = their_texts(theirs, source, max_new_tokens=5, forced_bos_token_id=first)
        assert each.ids == wanted[0][0]
        assert each.ids[0] == first
        assert "__" not in each.text
    with pytest.raises(ph.InputError, match=r"source_language: no language 'eng'; near .*\ben\b"):
        model.generate("the cat", source_language="eng", target_language="fr")
    with pytest.raises(ph.InputError, match="target_language is needed: the model has 100, such"):
        model.generate("the cat")
    assert model.generate("the cat", forced_bos_token_id=first, max_new_tokens=2).ids[0] == first


def test_madlad_is_told_the_language_in_front_of_the_source(tmp_path):
    _, loaded = make_pair("t5", tmp_path)
    backend = letters()
    backend.add_tokens(["<2de>", "<2fr>"])
    model = ph.TextToText(loaded.transformer, Tokenizer(backend))
    wanted = [backend.token_to_id("<2fr>"), *loaded.source_ids("cat")]
    assert model.source_ids("cat", target_language="fr") == wanted
    with pytest.raises(ph.InputError, match="target_language is needed: the model has 2, such as"):
        model.source_ids("cat")


@pytest.mark.parametrize(("name", "behind"), [("MBart", True), ("MBart50", False), ("Nllb", False)])
def test_the_languages_stand_where_each_family_has_them(tmp_path, name, behind):
    _, loaded = make_pair("mbart", tmp_path)
    write_tokenizer(tmp_path, bare=True, tokenizer_class=f"{name}Tokenizer", src_lang="de_DE")
    save_checkpoint(load_checkpoint(tmp_path), tmp_path / "again")
    english, french, german = (loaded.tokenizer.added_tokens[code] for code in LANGUAGES)
    text = loaded.tokenizer.encode("cat", add_special=False)
    for folder in (tmp_path, tmp_path / "again"):
        model = ph.load(folder, expect=ph.TextToText)
        for source, token in ((None, german), ("en_XX", english)):
            wanted = [*text, EOS, token] if behind else [token, *text, EOS]
            assert model.source_ids("cat", source_language=source) == wanted
        with ph.probe(model) as seen:
            found = model.generate("cat", target_language="fr_XX", max_new_tokens=3)
        assert seen.layers
        assert (found.ids[0] == french) != behind, "the first token, or the start before it"
    if behind:
        model.options = model.options.with_(decoder_start_token_id=french)
        assert model.generate("cat", max_new_tokens=3).ids == found.ids
