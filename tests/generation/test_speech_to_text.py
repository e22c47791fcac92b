"""Whisper tiny.en, as CTranslate2 stores it, on half a minute of synthetic speech."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import speech_recording as speech
import torch
from torch import Tensor

import polyhead as ph
from polyhead.checkpoints import find
from polyhead.checkpoints.formats.ctranslate2_file import CTranslate2File
from polyhead.errors import InputError, ModelNotFoundError
from polyhead.generation import SpeechToText
from polyhead.generation.pipelines import sound

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def whisper_directory() -> Path:
    try:
        return find("whisper-tiny.en").path
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def whisper(whisper_directory: Path) -> SpeechToText:
    return ph.load(whisper_directory, expect=SpeechToText)


@pytest.fixture(scope="module")
def heard(whisper: SpeechToText) -> Any:
    """The transcript, and the ids that the decoder read."""
    transcript = whisper.transcribe(speech.samples())
    ids = transcript.segments[0].generation.ids
    return transcript, torch.tensor([[*whisper.prompt_ids(), *ids]])


def _oracle(directory: Path) -> Any:
    """transformers' model with the file's weights, cut and named by hand."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    file = CTranslate2File(directory / "model.bin")
    names = {"linear_1": "out_proj", "linear_2": "out_proj", "gamma": "weight", "beta": "bias"}
    state: dict[str, Tensor] = {}
    for name, variable in file.variables.items():
        if not variable.shape:
            continue
        values = file.tensor(name).float()
        side, *rest, leaf = name.split("/")
        leaf = names.get(leaf, leaf)
        if rest[0].startswith("layer_") and rest[0] != "layer_norm":
            place = f"model.{side}.layers.{rest[0][6:]}"
            part, *module = rest[1:]
            if part == "ffn":
                to = {"linear_0": "fc1", "linear_1": "fc2", "layer_norm": "final_layer_norm"}
                state[f"{place}.{to[module[0]]}.{leaf}"] = values
                continue
            attention = "self_attn" if part == "self_attention" else "encoder_attn"
            if module[0] == "layer_norm":
                state[f"{place}.{attention}_layer_norm.{leaf}"] = values
                continue
            last = "linear_1" if part == "self_attention" else "linear_2"
            to_names = {"linear_0": "q" if part == "attention" else "qkv", "linear_1": "kv"}
            if module[0] == last:
                state[f"{place}.{attention}.out_proj.{leaf}"] = values
                continue
            letters = to_names[module[0]]
            for letter, piece in zip(letters, values.chunk(len(letters)), strict=True):
                if leaf == "weight" or letter != "k":
                    state[f"{place}.{attention}.{letter}_proj.{leaf}"] = piece
        elif rest[0] == "position_encodings":
            state[f"model.{side}.embed_positions.weight"] = values
        elif rest[0] == "projection":
            state["proj_out.weight"] = values
        elif rest[0] == "embeddings":
            state["model.decoder.embed_tokens.weight"] = values
        else:
            state[f"model.{side}.{rest[0]}.{leaf}"] = values
    config = WhisperConfig(
        vocab_size=51_864,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        attn_implementation="eager",
    )
    model = WhisperForConditionalGeneration(config)
    model.load_state_dict(state, strict=True)
    return model.eval()


@torch.inference_mode()
def test_logits_are_those_of_transformers(
    whisper: SpeechToText, whisper_directory: Path, heard: Any
) -> None:
    from transformers import WhisperFeatureExtractor

    _, ids = heard
    features = whisper.features(speech.samples())
    extractor = WhisperFeatureExtractor()
    theirs = extractor(speech.samples().numpy(), sampling_rate=16_000, return_tensors="pt")
    assert torch.equal(theirs["input_features"][0], features)
    wanted = _oracle(whisper_directory)(features[None], decoder_input_ids=ids).logits
    torch.testing.assert_close(whisper(features[None], ids), wanted, atol=1e-3, rtol=0)


def test_the_words_come_out(heard: Any) -> None:
    transcript, _ = heard
    wrong = _edits(_words(speech.TEXT), _words(transcript.text))
    assert wrong <= 4, transcript.text  # of 90
    (segment,) = transcript.segments
    assert (segment.start, segment.end) == (0.0, pytest.approx(29.943, abs=1e-3))
    assert segment.generation.stats.stop_reason == "stop token"


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _edits(wanted: list[str], got: list[str]) -> int:
    """Words to be changed, added or left out (Levenshtein)."""
    row = list(range(len(got) + 1))
    for i, word in enumerate(wanted):
        before, row[0] = row[0], i + 1
        for j, other in enumerate(got):
            before, row[j + 1] = (
                row[j + 1],
                min(before + (word != other), row[j] + 1, row[j + 1] + 1),
            )
    return row[-1]


def test_heads_that_follow_the_words_are_found_without_being_told(
    whisper: SpeechToText, whisper_directory: Path, heard: Any
) -> None:
    """What is right is when the synthesiser began each word; a token of sound is 0.02 s."""
    _, ids = heard
    features = whisper.features(speech.samples())
    found = ph.align(whisper, features, ids, prompt=2)
    pieces = whisper.tokenizer.pieces(ids[0, 2:].tolist())
    begins = torch.tensor([n for n, piece in enumerate(pieces) if piece.startswith(" ")])
    assert len(begins) == len(speech.TEXT.split())  # so that the words have numbers
    onset = torch.tensor([time for time, _ in speech.ONSETS]) / 1000
    words = begins[[number for _, number in speech.ONSETS]]

    def right(alignment: ph.SourceAlignment) -> float:
        """Words that are read within 0.1 s of the time in which they are spoken."""
        heard_at = 0.02 * alignment.monotone()[words]
        end = torch.cat((onset[1:], torch.tensor([29.5])))
        return float(((heard_at >= onset - 0.1) & (heard_at <= end + 0.1)).float().mean())

    listed = json.loads((whisper_directory / "config.json").read_text())["alignment_heads"]
    published = [(layer, head) for layer, head in listed]
    assert right(found) > 0.9
    assert right(ph.align(whisper, features, ids, prompt=2, heads=published)) > 0.75
    order = found.scores.flatten().argsort().tolist()
    worst = [divmod(number, 6) for number in order[: len(found.heads)]]
    assert right(ph.align(whisper, features, ids, prompt=2, heads=worst)) < 0.5
    rest = {divmod(number, 6) for number in order} - {*found.heads, *published}

    def mean(heads: Iterable[tuple[int, int]]) -> float:
        return float(torch.stack([found.scores[each] for each in heads]).mean())

    assert mean(published) > 2 * mean(rest)
    assert len({*found.heads} & {*published}) >= 3


def test_words_have_the_times_in_which_they_are_spoken(whisper: SpeechToText, heard: Any) -> None:
    transcript, _ = heard
    found = whisper.transcribe(speech.samples(), word_timestamps=True)
    words = [word for segment in found.segments for word in segment.words]
    assert found.text == transcript.text
    with pytest.warns(DeprecationWarning, match="word_timestamps=True"):
        old = ph.word_times  # type: ignore[attr-defined]
    assert old(whisper, speech.samples(), transcript) == words
    assert " ".join(word.text for word in words) == transcript.text
    assert all(word.end == after.start for word, after in pairwise(words))
    starts = torch.tensor([words[number].start for _, number in speech.ONSETS])
    late = (starts - torch.tensor([time for time, _ in speech.ONSETS]) / 1000).abs()
    assert late.median() < 0.1
    assert (late < 0.25).float().mean() > 0.9


@pytest.mark.slow
def test_greedy_tokens_are_those_of_ctranslate2(
    whisper: SpeechToText, whisper_directory: Path, heard: Any
) -> None:
    import ctranslate2

    features = whisper.features(speech.samples())
    theirs = ctranslate2.models.Whisper(str(whisper_directory), compute_type="float32").generate(
        ctranslate2.StorageView.from_array(features[None].contiguous().numpy()),
        [whisper.prompt_ids()],
        beam_size=1,
    )
    assert theirs[0].sequences_ids[0] == heard[1][0, 2:-1].tolist()


def test_what_does_not_belong_to_the_model_is_refused(whisper: SpeechToText) -> None:
    silence = torch.zeros(80, 3000)
    for arguments, words in (
        ({"features": torch.zeros(128, 3000)}, "80 mels × 3,000 frames: got shape .*128"),
        ({"features": torch.zeros(1, 80, 2999)}, "80 mels × 3,000 frames"),
        ({"features": silence, "language": "de"}, r"\(en alone\): got 'de'"),
        ({"features": silence, "task": "translate"}, r"\(transcribe\): got 'translate'"),
    ):
        with pytest.raises(InputError, match=words):
            whisper.generate(**arguments)
    assert whisper.detect_language(silence) == ["en"]
    assert whisper.prompt_ids() == [50_257, 50_362]
    assert whisper.options.suppress_tokens[:3] == (1, 2, 7)
    assert whisper.options.begin_suppress_tokens == (220, 50_256)
    with pytest.raises(ValueError, match="batch_size"):
        whisper.transcribe(speech.samples(), batch_size=0)


def test_long_recordings_are_cut_where_they_are_soft() -> None:
    loud = torch.ones(100 * sound.RATE)
    loud[27 * sound.RATE : 28 * sound.RATE] = 0.0
    most = 30 * sound.RATE
    places = sound.cuts(loud, most)
    assert places[0] == 0
    assert places[-1] == len(loud)
    assert 27 * sound.RATE <= places[1] <= 28 * sound.RATE
    assert all(0 < end - start <= most for start, end in pairwise(places))
    assert sound.cuts(loud[:most], most) == [0, most]
