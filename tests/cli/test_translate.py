"""``polyhead translate`` and ``summarize``, as the real command with tiny encoder-decoders."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from process import Run

import polyhead as ph
from polyhead.cli.alignment import Aligned

Command = tuple[Run, str, ph.TextToText]


@pytest.fixture(scope="session")
def mbart(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ph.TextToText]:
    """The path of a tiny random mBART with three languages, and the model."""
    from pairs import make_pair, write_tokenizer

    folder = tmp_path_factory.mktemp("models") / "tiny-mbart"
    make_pair("mbart", folder)
    write_tokenizer(folder, tokenizer_class="MBartTokenizer")
    return str(folder), ph.load(folder, expect=ph.TextToText)


@pytest.fixture
def command(run: Run, mbart: tuple[str, ph.TextToText]) -> Command:
    return run, *mbart


def _texts(model: ph.TextToText, sources: list[str], **options: object) -> list[str]:
    return [made.text for made in model.generate(sources, **options)]


def test_a_text_is_translated_into_the_language_that_is_named(command: Command) -> None:
    run, path, model = command
    options = ["--from", "en_XX", "--to", "fr_XX", "-n", "8", "-b", "3"]
    (wanted,) = _texts(
        model, ["good day"], source_language="en_XX", target_language="fr_XX",
        max_new_tokens=8, num_beams=3,
    )  # fmt: skip
    result = run("translate", "good day", "--model", path, *options)
    assert (result.code, result.out) == (0, wanted + "\n")
    found = json.loads(run("translate", "good day", "-m", path, *options, "--json").out)
    assert [(each["source"], each["text"]) for each in found] == [("good day", wanted)]
    assert found[0]["score"] < 0
    assert found[0]["ids"]


def test_every_line_of_a_file_is_a_text(command: Command, tmp_path: Path) -> None:
    run, path, model = command
    sources = ["a short one", "a line that is rather longer than the others", "end"]
    (tmp_path / "lines.txt").write_text("\n".join(sources) + "\n", encoding="utf-8")
    wanted = _texts(
        model, sources, source_language="en_XX", target_language="de_DE", max_new_tokens=6
    )
    options = ["--from", "en_XX", "--to", "de_DE", "-n", "6", "-m", path]
    for given in (["@lines.txt"], ["--file", "lines.txt"]):
        result = run("translate", *given, *options)
        assert (result.code, result.out.splitlines()) == (0, wanted)
    whole = "\n".join(sources).encode()
    assert run("translate", "-", *options, stdin=whole).out.splitlines() == wanted


def test_a_file_is_one_text_to_summarise(
    run: Run, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from pairs import make_pair

    folder = tmp_path_factory.mktemp("models") / "tiny-t5"
    task = {"summarization": {"prefix": "sum ", "num_beams": 2, "max_length": 7}}
    _, model = make_pair("t5", folder, task_specific_params=task)
    (tmp_path / "long.txt").write_text("one line\nand another\n", encoding="utf-8")
    wanted = model.generate("one line\nand another", task="summarization")
    assert wanted.score is not None
    result = run("summarize", "@long.txt", "-m", str(folder))
    assert (result.code, result.out) == (0, wanted.text + "\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["good day", "--to", "xx_XX"], "xx_XX"),
        (["good day", "--to", "fr_FR"], "fr_XX"),
        (["good day", "--to", "fr_XX", "-b", "0"], "num_beams must be a whole number from 1"),
        (["good day", "--to", "fr_XX", "-b", "99"], "num_beams"),
        (["a" * 90, "--to", "fr_XX"], "the model reads at most 64"),
        (["@gap.txt", "--to", "fr_XX"], "line 2 of @gap.txt is empty"),
        (["@latin.txt", "--to", "fr_XX"], "latin.txt is not UTF-8 text: byte 3 is 0xe9"),
        (["--to", "fr_XX"], "no text"),
    ],
)
def test_what_cannot_be_translated_is_said(
    command: Command, tmp_path: Path, words: list[str], said: str
) -> None:
    run, path, _ = command
    (tmp_path / "gap.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    result = run("translate", *words, "-m", path, "--from", "en_XX")
    assert result.code == 2
    assert said in result.err
    assert result.err.count("\n") == 1


def test_an_alignment_is_shown_drawn_and_given_as_json(command: Command, tmp_path: Path) -> None:
    run, path, model = command
    options = ["-m", path, "--from", "en_XX", "--to", "fr_XX", "-n", "5"]
    said = run("translate", "good day", *options, "--align", "--json", "-o", "a.svg")
    (found,) = json.loads(said.out)
    source, start = model.both_ids("good day", source_language="en_XX", target_language="fr_XX")
    wanted = ph.align(
        model, torch.tensor(source), [*start, *found["ids"]], prompt=len(start), above=0.8
    )
    languages = {"source_language": "en_XX", "target_language": "fr_XX"}
    assert model.both_ids("good day", **languages, decoder_start_token_id=7) == (source, [7])
    alignment = found["alignment"]
    assert alignment["sources"] == wanted.sources.tolist()
    assert alignment["source_tokens"] == [*"good day", "</s>", "en_XX"]
    assert len(alignment["target_tokens"]) == len(alignment["weights"]) == len(found["ids"])
    assert [(head["layer"], head["head"]) for head in alignment["heads"]] == [*wanted.heads]
    picture = ElementTree.parse(tmp_path / "a.svg").getroot()
    labels = [label.text for label in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert labels[-len(source) :] == [*"good", "␣", *"day", "</s>", "en_XX"]
    shown = run("translate", "good day", *options, "--align").out
    assert "align best on this text" in shown
    run("translate", "good day", *options, "-o", "b.svg").refused(2, "--align")


def test_heads_far_below_the_best_take_no_part_in_an_alignment(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, model = command

    def scores(weights: torch.Tensor) -> torch.Tensor:
        return torch.linspace(1.0, 0.6, weights.shape[0])

    monkeypatch.setattr("polyhead.interpret.source_alignment.alignment_scores", scores)
    languages = {"source_language": "en_XX", "target_language": "fr_XX"}
    made = model.generate("good day", max_new_tokens=5, **languages)
    found = Aligned.of(model, "good day", made, languages).found
    kept = [float(found.scores[head]) for head in found.heads]
    assert kept
    assert len(kept) < found.scores.numel()
    assert min(kept) >= 0.8


def test_an_alignment_names_the_six_heads_that_align_best(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, model = command

    def scores(weights: torch.Tensor) -> torch.Tensor:
        return torch.linspace(0.9, 1.0, weights.shape[0])

    monkeypatch.setattr("polyhead.interpret.source_alignment.alignment_scores", scores)
    languages = {"source_language": "en_XX", "target_language": "fr_XX"}
    made = model.generate("good day", max_new_tokens=5, **languages)
    aligned = Aligned.of(model, "good day", made, languages)
    aligned.show()
    shown = " ".join(capsys.readouterr().out.split())
    assert len(aligned.found.heads) == 8
    best = [
        f"{layer}.{head} {float(aligned.found.scores[layer, head]):.2f}"
        for layer, head in aligned.found.heads[:6]
    ]
    assert shown.endswith(f"{', '.join(best)} and 2 more")


def test_a_look_shows_encoder_decoder_and_cross_attention(command: Command, tmp_path: Path) -> None:
    run, path, model = command
    options = ["-m", path, "--from", "en_XX", "--to", "fr_XX", "-n", "5"]
    found = json.loads(run("look", "good day", *options, "--json").out)
    assert Path(found["page"]) == tmp_path / "polyhead-look.html"
    source, _ = model.both_ids("good day", source_language="en_XX", target_language="fr_XX")
    assert len(found["source_tokens"]) == len(source)
    made = model.generate(
        "good day", source_language="en_XX", target_language="fr_XX", max_new_tokens=5
    )
    assert (found["written"], len(found["target_tokens"])) == (made.text, len(made.ids))
    parts = [(head["part"], head["layer"], head["head"]) for head in found["heads"]]
    assert sorted(parts) == sorted(
        (part, layer, head)
        for part in ("encoder", "decoder", "cross")
        for layer in range(2)
        for head in range(4)
    )
    assert "heads of cross-attention" in run("look", "good day", *options).out
    run("look", "good day", *options, "--find").refused(2, "--find")
    run("look", "good day", "-m", path, "--from", "en_XX", "--to", "xx").refused(2, "xx")


def test_the_page_holds_the_weights_of_all_three_parts(
    mbart: tuple[str, ph.TextToText], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyhead.cli.look_translation import Translation
    from polyhead.viewer import page

    said = {"source_language": "en_XX", "target_language": "fr_XX", "max_new_tokens": 5}
    found = Translation.of("tiny", mbart[1], "good day", said)
    pages: list[page.PageData] = []
    monkeypatch.setattr(page, "write", lambda data, path: pages.append(data))
    found.write_page(tmp_path / "page.html")
    (data,) = pages
    S, T = len(found.source), len(found.target)
    assert list(data.tokens) == [*found.source, *found.target]
    source, written = (0, S), (S, S + T)
    runs = {"encoder": (source, source), "decoder": (written, written), "cross": (written, source)}
    seen = found.look.seen
    assert data.parts is not None
    assert data.runs is not None
    assert data.vectors is not None
    assert len(data.parts) == 6
    for i, (part, number) in enumerate(data.parts):
        view = getattr(seen, part)[number]
        assert data.runs[i] == runs[part]
        assert (data.weights[i] == view.rows()[0].numpy()).all()
        assert (data.vectors[i].k == view.k[0].numpy()).all()
    numbers = data.statistics["previous_token"]
    assert [row[0] is None for row in numbers] == [part == "cross" for part, _ in data.parts]
    assert data.way is not None
    assert len(data.way) == T
    assert {"attention", "cross_attention", "feed_forward", "stream"} == {*data.way[0]["sizes"]}
    assert data.notable is not None
    assert data.notable["alignment"][0][0] in (4, 5)


def test_models_of_another_kind_name_the_verb_for_them(command: Command, tiny: str) -> None:
    run, path, _ = command
    result = run("translate", "good day", "-m", tiny)
    assert (result.code, "polyhead generate" in result.err) == (2, True)
    result = run("generate", "good day", "-m", path)
    assert (result.code, "polyhead translate" in result.err) == (2, True)


@pytest.fixture(scope="session")
def whisper() -> str:
    """The name of the trained model, where its package is installed."""
    from polyhead.checkpoints import available

    state = next(state for state in available() if state.model.name == "whisper-tiny.en")
    if not state.found:
        pytest.skip(f"whisper-tiny.en is not installed: {state.model.install}")
    return "whisper-tiny.en"


def test_words_of_a_recording_are_written_down(run: Run, whisper: str, tmp_path: Path) -> None:
    from speech_recording import samples

    sound = (samples()[: 5 * 16_000] * 32767).to(torch.int16)
    with wave.open(str(tmp_path / "speech.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(sound.numpy().tobytes())
    found = json.loads(run("transcribe", "speech.wav", "--json", "--words").out)
    assert "is the history of a few men who" in found["text"]
    (part,) = found["segments"]
    assert (part["start"], part["end"], part["text"]) == (0.0, 5.0, found["text"])
    assert " ".join(word["text"] for word in found["words"]) == found["text"]
    spoken = [word["start"] for word in found["words"]]
    assert spoken == sorted(spoken)
    assert abs(spoken[4] - 0.9) < 0.2  # "world"
    (tmp_path / "noise.wav").write_bytes(b"no sound at all")
    run("transcribe", "noise.wav").refused(2, "noise.wav")
    run("transcribe", "absent.wav").refused(2, "absent.wav")
    run("transcribe", "speech.wav", "--language", "xx").refused(2, "xx")
