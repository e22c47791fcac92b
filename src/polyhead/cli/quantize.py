"""``polyhead quantize``: a GGUF file with weights of fewer bits, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from polyhead.cli import options

_TOKENS = 4096  # the default text is cut to so many


def quantize(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A .gguf file, a Hugging Face directory, or a known name."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")],
    type: Annotated[
        str, typer.Option(help="Quantization type: Q4_K, Q6_K, Q8_0, Q4_0, ...")
    ] = "Q4_K",
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Text files for the perplexity; default: 4,096 tokens of Python's documentation.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Write a GGUF file with quantized weights, and measure its perplexity.

    Perplexity is measured before and after, with the weights as the files hold them. A directory
    is written in the GGUF architecture of its family; if there is none, that is an error.

    Example: polyhead quantize smollm2 --type Q4_K --out smollm2-q4_k.gguf
    """
    from polyhead.checkpoints import find
    from polyhead.checkpoints.formats.gguf_writing import quantize_gguf
    from polyhead.cli.terminal import console, print_json, progress, read_text
    from polyhead.errors import InputError, UnsupportedError
    from polyhead.quantization import block_type

    texts = [read_text(None, file) for file in text or ()]
    found = find(model)
    if found.format == "ctranslate2":
        raise UnsupportedError(
            f"quantize reads GGUF files and Hugging Face directories: {model} is a CTranslate2 "
            "directory"
        )
    try:
        kind = block_type(type)
        with progress(f"quantizing {model}") as advance:
            types = quantize_gguf(found.path, out, kind, advance)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(str(error)) from error
    rows = {
        "before": _measured(found.path, texts),
        "after": _measured(out, texts),
    }
    if json:
        print_json({"types": types, **rows})
        return
    said = ", ".join(f"{count} {name}" for name, count in types.items())
    console().print(f"{out}: {said}")
    for name, row in rows.items():
        line = f"{name:<7}{row['bytes'] / 1e6:>9,.1f} MB"
        if row["perplexity"] is not None:
            line += (
                f"   perplexity {row['perplexity']:.3f}   {row['bits_per_byte']:.4f} bits per byte"
            )
        console().print(line)


def _measured(path: Path, texts: list[str]) -> dict[str, Any]:
    """Bytes of a file, and the perplexity if it is a decoder."""
    from pydoc_data.topics import topics

    from polyhead.cli.terminal import progress
    from polyhead.generation import LanguageModel, load
    from polyhead.training.evaluation import perplexity

    with progress(f"loading {path}") as advance:
        model: Any = load(path, progress=advance)
    files = [*path.glob("*.safetensors")] if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files)
    row: dict[str, Any] = {"bytes": size, "perplexity": None, "bits_per_byte": None}
    if not isinstance(model, LanguageModel):
        return row
    window = min(512, model.config.max_positions)
    read: Any = texts
    if not texts:
        ids = model.tokenizer.encode("\n".join(topics[name] for name in sorted(topics)))
        read = [model.tokenizer.decode(ids[:_TOKENS])]
    with progress("perplexity") as advance:
        measured = perplexity(model, read, window=window, progress=advance)
    return row | {"perplexity": measured.perplexity, "bits_per_byte": measured.bits_per_byte}
