"""``polyhead translate``, ``summarize`` and ``transcribe``: what encoder-decoders are for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhead.cli import options
from polyhead.errors import InputError

if TYPE_CHECKING:
    from polyhead.cli.alignment import Aligned
    from polyhead.generation import Generation, TextToText
    from polyhead.generation.pipelines.transcript import Segment, Word

_Model = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="An encoder-decoder's directory or hub id."
    ),
]
_Beams = Annotated[
    int | None,
    typer.Option("--num-beams", "-b", help="Number of beams; default: that of the model's files."),
]
_Longest = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        "-n",
        help="Most new tokens per text; default: that of the model's files.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print texts with tokens and scores as JSON.")]


def translate(
    text: options.Text = None,
    model: _Model = None,
    file: options.TextFile = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="CODE", help="Source language code."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--to", metavar="CODE", help="Target language code."),
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(help="Prefix of every text, such as T5's instructions.")
    ] = None,
    num_beams: _Beams = None,
    max_new_tokens: _Longest = None,
    align: Annotated[
        bool, typer.Option("--align", help="Show which source token each token reads.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="With --align: draw the alignment to this SVG file."
        ),
    ] = None,
    dtype: options.PlainDtype = "float32",
    device: options.Device = "cpu",
    json: _Json = False,
) -> None:
    """Translate TEXT, or each line of a file.

    Lines go to standard output as they are finished, in their order.
    """
    from polyhead.cli.look_files import check_writable

    texts = _lines(text, file)
    if out is not None:
        if not align or len(texts) > 1:
            raise InputError("--out draws the alignment of one text: give --align and one text")
        check_writable(out)
    loaded = _load(model, dtype, device)
    arguments: dict[str, Any] = {
        "source_language": source, "target_language": target, "prefix": prefix
    }  # fmt: skip
    arguments |= _given(num_beams, max_new_tokens)
    _write(loaded, texts, arguments, json=json, align=align, out=out)


def summarize(
    text: options.Text = None,
    model: _Model = None,
    file: options.TextFile = None,
    num_beams: _Beams = None,
    max_new_tokens: _Longest = None,
    min_new_tokens: Annotated[
        int | None, typer.Option(help="Fewest new tokens of the summary.")
    ] = None,
    dtype: options.PlainDtype = "float32",
    device: options.Device = "cpu",
    json: _Json = False,
) -> None:
    """Summarize TEXT, or a whole file.

    Uses the prefix and the options that the model's files have for summarization.
    """
    from polyhead.cli.terminal import read_text

    content = read_text(text, file)
    loaded = _load(model, dtype, device)
    arguments = _given(num_beams, max_new_tokens)
    if min_new_tokens is not None:
        arguments["min_new_tokens"] = min_new_tokens
    if "summarization" in loaded.tasks:
        arguments["task"] = "summarization"
    _write(loaded, [content], arguments, json=json)


def transcribe(
    sound: Annotated[
        Path, typer.Argument(metavar="FILE", help="An audio file: WAV, FLAC, Ogg, MP3.")
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="A known name, a Hugging Face or CTranslate2 directory, or a hub id.",
        ),
    ] = "whisper-tiny.en",
    language: Annotated[
        str | None,
        typer.Option(metavar="CODE", help="Spoken language; default: detected by the model."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="transcribe, or translate into English.")] = None,
    num_beams: _Beams = None,
    dtype: options.PlainDtype = "float32",
    device: options.Device = "cpu",
    quantize: options.Quantize = None,
    activations: options.Activations = None,
    words: Annotated[
        bool, typer.Option("--words", help="Print each word with its time in seconds.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print segments with their times as JSON.")
    ] = False,
) -> None:
    """Transcribe a recording of any length."""
    from polyhead.cli.models import load_expecting
    from polyhead.cli.terminal import print_json, progress, write_text
    from polyhead.generation import SpeechToText

    loaded = load_expecting(
        model, dtype, SpeechToText, device=device, quantize=quantize, activations=activations
    )
    said: dict[str, Any] = {"language": language, "task": task, "num_beams": num_beams}
    with progress(f"listening to {sound.name}"):
        found = loaded.transcribe(
            sound,
            word_timestamps=words,
            **{name: value for name, value in said.items() if value is not None},
        )
    times = [word for segment in found.segments for word in segment.words]
    if not json:
        lines = [f"{word.start:8.2f}  {word.text}" for word in times] if words else [found.text]
        write_text("\n".join(lines) + "\n")
        return
    data: dict[str, Any] = {
        "text": found.text,
        "segments": [_timed(part) for part in found.segments],
    }
    if words:
        data["words"] = [_timed(word) for word in times]
    print_json(data)


def _timed(part: Segment | Word) -> dict[str, Any]:
    return {"text": part.text, "start": round(part.start, 3), "end": round(part.end, 3)}


def _lines(text: str | None, file: Path | None) -> list[str]:
    """The texts: one argument, or the lines of a file or of standard input."""
    from polyhead.cli.terminal import read_text

    content = read_text(text, file)
    in_argument = file is None and text is not None and text != "-" and not _names_a_file(text)
    if in_argument:
        return [content]
    lines = content.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise InputError(f"line {number} of {file or text} is empty: every line is one text")
    return lines


def _names_a_file(text: str) -> bool:
    return text.startswith("@") and not text.startswith("@@")


def _load(name: str | None, dtype: str, device: str) -> TextToText:
    if name is None:
        raise InputError(
            "no model: give --model, such as --model google-t5/t5-small (from the Hugging Face "
            "hub); without a hub, `polyhead train translate-numbers` (pip install "
            "'polyhead[train]') makes one in minutes: --model translate-numbers"
        )
    from polyhead.cli.models import load_expecting
    from polyhead.generation import TextToText

    model: TextToText = load_expecting(name, dtype, TextToText, device=device)
    return model


def _given(num_beams: int | None, max_new_tokens: int | None) -> dict[str, Any]:
    """The options given on the command line; the model's files have the others."""
    said = {"num_beams": num_beams, "max_new_tokens": max_new_tokens}
    return {name: value for name, value in said.items() if value is not None}


def _write(
    model: TextToText,
    texts: list[str],
    arguments: dict[str, Any],
    *,
    json: bool,
    align: bool = False,
    out: Path | None = None,
) -> None:
    """Writes the output of each text; texts run in batches."""
    from polyhead.cli.alignment import Aligned
    from polyhead.cli.terminal import print_json, progress, write_text

    portion, said = 32, list[dict[str, Any]]()
    for start in range(0, len(texts), portion):
        part = texts[start : start + portion]
        with progress(f"text {start + 1:,} of {len(texts):,}") as advance:
            advance(f"text {start + 1:,} of {len(texts):,}", start, len(texts))
            found = model.generate(part, **arguments)
        for given, each in zip(part, found, strict=True):
            aligned = Aligned.of(model, given, each, arguments) if align else None
            said.append(_as_data(given, each, aligned))
            if not json:
                write_text(" ".join(each.text.splitlines()) + "\n")
                if aligned is not None:
                    aligned.show()
            if aligned is not None and out is not None:
                aligned.draw(out, f"{given} → {each.text}")
                if not json:
                    print(f"The picture: {out.resolve()}")
    if json:
        print_json(said)


def _as_data(given: str, made: Generation, aligned: Aligned | None) -> dict[str, Any]:
    data = {
        "source": given,
        "text": made.text,
        "ids": list(made.ids),
        "score": made.score,
        "ended_by": made.stats.stop_reason,
    }
    return data if aligned is None else data | {"alignment": aligned.as_data()}
