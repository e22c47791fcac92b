"""``polyhead convert``: a model with another head layout, healed if asked, and what that cost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from polyhead.cli import options

_Out = Annotated[
    Path, typer.Option(metavar="DIR", help="Folder for the new model; must not exist.")
]
_KvHeads = Annotated[
    int | None,
    typer.Option("--num-kv-heads", "--kv-heads", help="Key/value heads of each layer; 1 is MQA."),
]
_Latent = Annotated[
    str | None,
    typer.Option(metavar="P,R", help="Latent attention: P rotated features, a latent of R."),
]
_Cache = Annotated[
    float | None,
    typer.Option(metavar="FRACTION", help="Latent attention within this fraction of the cache."),
]
_Calibration = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Text to calibrate on; may be given more than once."),
]
_Evaluation = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Other text of a domain that was calibrated on."),
]
_Unseen = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Text of a domain that was not calibrated on."),
]
_Heal = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Time for healing, such as 10m or 90s; Ctrl-C ends it."),
]
_Healing = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Text to heal on; default: the text of --calibration."),
]
_Tokens = Annotated[int, typer.Option(help="Largest number of calibration tokens.")]
_Form = Annotated[
    str, typer.Option(help="hugging-face, polyhead, or auto: the first that can represent it.")
]
_Json = Annotated[bool, typer.Option("--json", help="The report as JSON.")]


def convert(
    model: options.ModelArgument,
    out: _Out,
    num_kv_heads: _KvHeads = None,
    latent: _Latent = None,
    cache: _Cache = None,
    calibration: _Calibration = None,
    evaluation: _Evaluation = None,
    unseen: _Unseen = None,
    heal: _Heal = None,
    healing: _Healing = None,
    tokens: _Tokens = 8192,
    form: _Form = "auto",
    json: _Json = False,
) -> None:
    """Convert a model to another head layout, and report what is lost.

    Example: polyhead convert smollm2 --latent 64,128 --calibration a.txt --unseen b.txt --out new
    """
    from dataclasses import asdict

    from polyhead._utils.checks import check_one_of, needed
    from polyhead.cli.models import load_expecting
    from polyhead.cli.terminal import console, print_json, progress
    from polyhead.conversion import convert as convert_model
    from polyhead.conversion import heal as heal_model
    from polyhead.conversion.saving import save
    from polyhead.errors import InputError
    from polyhead.generation import LanguageModel

    minutes = None if heal is None else options.duration("--heal", heal) / 60
    if minutes is not None:
        needed("accelerate", "polyhead[train]")  # before anything is converted
    size = None if latent is None else _pair(latent)
    check_one_of("--form", form, ("auto", "hugging-face", "polyhead"), error=InputError)
    if out.exists():
        raise InputError(f"--out {str(out)!r} exists already: name a new folder")
    texts = _texts(calibration)
    to_heal_on = _texts(healing) or texts
    if minutes is not None and not to_heal_on:
        raise InputError("--heal needs text: give --healing or --calibration")
    judged = {path.name: text for path, text in _named(evaluation)}
    others = {path.name: text for path, text in _named(unseen)}
    loaded = load_expecting(model, "float32", LanguageModel)
    with progress("converting") as advance:
        new, report = convert_model(
            loaded,
            num_kv_heads=num_kv_heads,
            latent=size,
            cache=cache,
            calibration=texts or None,
            evaluation=judged,
            unseen=others,
            calibration_tokens=tokens,
            progress=advance,
        )
    screen = console()
    shown = report.to_dict()
    if not json:
        screen.print(str(report), soft_wrap=True)
    if minutes is not None:
        with progress("healing") as advance:
            new, healed = heal_model(
                new,
                teacher=loaded,
                texts=to_heal_on,
                minutes=minutes,
                evaluation=judged,
                unseen=others,
                progress=advance,
            )
        shown["healing"] = asdict(healed)
        if not json:
            screen.print(str(healed), soft_wrap=True)
    written = save(new, out, form=form)  # type: ignore[arg-type]
    if json:
        print_json(shown | {"out": str(out), "form": written})
    else:
        screen.print(f"saved in {out} ({written} form)", soft_wrap=True)


def _named(paths: list[Path] | None) -> list[tuple[Path, str]]:
    from polyhead.cli.terminal import read_text
    from polyhead.errors import InputError

    found = [(path, read_text(None, path)) for path in paths or []]
    if len({path.name for path, _ in found}) < len(found):
        raise InputError("files of one option must have different names: they name the domains")
    return found


def _texts(paths: list[Path] | None) -> list[str]:
    from polyhead.cli.terminal import read_text

    return [read_text(None, path) for path in paths or []]


def _pair(text: str) -> tuple[int, int]:
    from polyhead.errors import InputError, shortened

    found = re.fullmatch(r"(\d{1,6}),(\d{1,6})", text.replace(" ", ""))
    if found is None:
        raise InputError(f"--latent must be two numbers such as 64,128: got {shortened(text)}")
    return int(found[1]), int(found[2])
