"""CTranslate2 directories with SentencePiece models: texts as from the models they are made of."""

from __future__ import annotations

import shutil
from pathlib import Path

import ctranslate2
import pytest
import torch
import transformers as hf
from ctranslate2.converters import transformers as converters
from pairs import make_pair
from test_languages import models, write_m2m_100, write_marian  # noqa: F401  # a fixture

import polyhead as ph
from polyhead.checkpoints import load_checkpoint, save_checkpoint
from polyhead.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")


def _converted(theirs, tokenizer, files, folder: Path, target: Path) -> Path:
    """The directory that CTranslate2's converter writes, with the files that cut texts."""
    loader = converters._MODEL_LOADERS[type(theirs.config).__name__]
    with torch.no_grad():
        spec = loader(theirs, tokenizer)
    spec.validate()
    spec.optimize(None)
    target.mkdir()
    spec.save(str(target))
    for name in files:
        shutil.copy(folder / name, target)
    return target


def test_marian_translates_as_from_its_own_directory(models, tmp_path):  # noqa: F811
    folder = tmp_path / "marian"
    folder.mkdir()
    size = write_marian(folder, models[0])
    theirs, _ = make_pair(
        "marian", folder, vocab_size=size, decoder_vocab_size=size, pad_token_id=size - 1,
        eos_token_id=0, decoder_start_token_id=size - 1, bos_token_id=None, tokenizer=False,
        bad_words_ids=[[size - 1]], tie_word_embeddings=True,
    )  # fmt: skip
    with torch.no_grad():
        theirs.model.shared.weight[size - 1] = 0.0  # as in every trained model
    theirs.save_pretrained(folder)
    original = ph.load(folder, expect=ph.TextToText)
    tokenizer = hf.MarianTokenizer.from_pretrained(folder)
    made = _converted(
        theirs, tokenizer, ("source.spm", "target.spm"), folder, tmp_path / "converted"
    )
    model = ph.load(made, expect=ph.TextToText)
    assert [*model.languages.tokens] == ["fra", "deu"]
    translator = ctranslate2.Translator(str(made), compute_type="float32")
    for text in ("the cat sat", "über naïve 東京 on mat"):
        for beams in (1, 3):
            options = {"num_beams": beams, "max_new_tokens": 7, "target_language": "deu"}
            found = model.generate(text, **options)
            wanted = original.generate(text, bad_words_ids=((size - 1,),), **options)
            assert found.ids == wanted.ids
            assert found.text == wanted.text
        pieces = tokenizer.convert_ids_to_tokens(model.source_ids(text, target_language="deu"))
        best = translator.translate_batch([pieces], beam_size=1, max_decoding_length=7)
        greedy = model.generate(text, target_language="deu", max_new_tokens=7).ids
        known = tokenizer.convert_ids_to_tokens(greedy)
        assert best[0].hypotheses[0] == [piece for piece in known if piece != "</s>"]
    save_checkpoint(load_checkpoint(made), tmp_path / "again")
    again = ph.load(tmp_path / "again", expect=ph.TextToText)
    options = {"num_beams": 3, "max_new_tokens": 7, "target_language": "deu"}
    assert again.generate("the cat", **options).ids == model.generate("the cat", **options).ids
    (made / "source.spm").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match=r"source\.spm is not a valid SentencePiece model"):
        ph.load(made)


def test_m2m_100_is_told_its_languages(models, tmp_path):  # noqa: F811
    folder = tmp_path / "m2m"
    folder.mkdir()
    size = write_m2m_100(folder, models[0])
    theirs, original = make_pair("m2m_100", folder, vocab_size=size, tokenizer=False)
    tokenizer = hf.M2M100Tokenizer.from_pretrained(folder)
    words = tokenizer.get_vocab() | tokenizer.lang_token_to_id
    words = {token: index for token, index in words.items() if index < size}
    tokenizer.get_vocab = lambda: words  # transformers 5 leaves the languages out
    tokenizer.num_madeup_words = 0
    made = _converted(
        theirs, tokenizer, ("sentencepiece.bpe.model",), folder, tmp_path / "converted"
    )
    model = ph.load(made, expect=ph.TextToText)
    assert isinstance(original, ph.TextToText)
    options = {"source_language": "de", "target_language": "fr", "max_new_tokens": 6}
    for text in ("the cat sat", "a house  on mat"):
        found, wanted = model.generate(text, **options), original.generate(text, **options)
        assert (found.ids, found.text) == (wanted.ids, wanted.text)
    with pytest.raises(ph.InputError, match="no language 'fra_Latn'"):
        model.generate("the cat", source_language="de", target_language="fra_Latn")
