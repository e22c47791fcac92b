"""A Whisper of several languages is told which it hears and what to write."""

from __future__ import annotations

import pytest
import tokenizers
import torch

from polyhead.checkpoints import Tokenizer
from polyhead.config import (
    AttentionConfig,
    AudioConfig,
    EmbeddingConfig,
    EncoderConfig,
    FeedForwardConfig,
    LayerConfig,
    TransformerConfig,
)
from polyhead.errors import InputError
from polyhead.generation import GenerationOptions, SpeechToText
from polyhead.models import Transformer

WORDS = {
    "<|endoftext|>": 50_257,
    "<|startoftranscript|>": 50_258,
    "<|en|>": 50_259,
    "<|de|>": 50_261,
    "<|haw|>": 50_352,
    "<|translate|>": 50_358,
    "<|transcribe|>": 50_359,
    "<|notimestamps|>": 50_363,
}


def _model(vocab_size: int) -> SpeechToText:
    vocabulary = {f"t{i}": i for i in range(51_000)}
    vocabulary = {name: i for name, i in vocabulary.items() if i not in WORDS.values()} | WORDS
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    backend.add_special_tokens(list(WORDS))
    torch.manual_seed(0)
    attention = AttentionConfig(1, 1, 4)
    layer = LayerConfig(attention, FeedForwardConfig(8))
    decoder = LayerConfig(attention, FeedForwardConfig(8), cross_attention=attention)
    sound = EmbeddingConfig("learned", frontend=AudioConfig(3))
    config = TransformerConfig(
        "encoder-decoder",
        vocab_size,
        4,
        16,
        (decoder,),
        (layer,),
        eos_token_ids=(50_257,),
        encoder=EncoderConfig(sound, max_positions=5),
    )
    model = Transformer(config).eval()
    options = GenerationOptions(max_new_tokens=3, decoder_start_token_id=50_258)
    return SpeechToText(model, Tokenizer(backend), "tiny", options)


def test_language_and_task_are_tokens_of_the_prompt() -> None:
    model = _model(51_865)
    features = torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(3))
    start = torch.tensor([[50_258]] * 2)
    known = [WORDS[f"<|{code}|>"] for code in ("en", "de", "haw")]
    with torch.no_grad():
        likeliest = model(features, start)[:, -1, known].argmax(-1).tolist()
    codes = [("en", "de", "haw")[number] for number in likeliest]
    assert model.detect_language(features) == codes
    heard = model.generate(features, language=codes[0], task="translate", max_new_tokens=2)
    given = model.generate(
        features,
        prompt_ids=[50_258, WORDS[f"<|{codes[0]}|>"], 50_358, 50_363],
        max_new_tokens=2,
    )
    assert isinstance(heard, list)
    assert isinstance(given, list)
    assert [each.ids for each in heard] == [each.ids for each in given]
    assert model.prompt_ids("haw", "translate") == [50_258, 50_352, 50_358, 50_363]
    found = model.generate(features, max_new_tokens=2)
    wanted = [
        model.generate(features[i], language=codes[i], max_new_tokens=2).ids for i in range(2)
    ]
    assert [each.ids for each in found] == wanted
    assert found[0].stats.prompt_tokens == 4
    with pytest.raises(InputError, match=r"\(en, de, haw\): got 'fr'"):
        model.generate(features, language="fr")
    with pytest.raises(InputError, match=r"\(transcribe, translate\): got 'sing'"):
        model.generate(features, task="sing")


def test_a_model_of_english_is_told_neither() -> None:
    model = _model(51_864)
    features = torch.randn(3, 10, generator=torch.Generator().manual_seed(3))
    assert model.generate(features, language="en").stats.prompt_tokens == 2
    assert model.detect_language(features) == ["en"]
    assert model.prompt_ids() == [50_258, 50_363]
    with pytest.raises(InputError, match=r"en alone\): got 'de'"):
        model.generate(features, language="de")
