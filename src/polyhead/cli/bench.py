"""``polyhead bench``: how fast, against peers and the machine's limit, in one run."""

from __future__ import annotations

import datetime
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from polyhead.lab.benchmarks import Result, Settings

_DTYPES = "float32,bfloat16"


def bench(
    routines: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ROUTINE",
            help="prefill, decode, chunk, window, features, mla, backward, growth, overhead, "
            "model, serving, sentences, speech, beams, memory, train, statistics; default: all.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and smaller cases, in 5 minutes.")
    ] = False,
    dtypes: Annotated[
        str, typer.Option(help="Comma-separated: float32, bfloat16, float16.")
    ] = _DTYPES,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Repetitions of each case; default: as many as fit the time."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="cpu or cuda; on cuda attention and whole models, with a GPU's limits."),
    ] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write a plot of rate against length to this SVG file.")
    ] = None,
    section: Annotated[
        Path | None,
        typer.Option(help="Write a section about this processor or GPU to this Markdown file."),
    ] = None,
) -> None:
    """Compare the speed of polyhead with other libraries and with the machine's limit.

    Results are compared before anything is timed. Without --json, the last line is one JSON
    document.

    Example: polyhead bench prefill decode --quick
    """
    import torch

    from polyhead.cli.terminal import print_json
    from polyhead.lab.benchmarks import Settings, chosen
    from polyhead.lab.benchmarks.plot import plot as drawn
    from polyhead.lab.benchmarks.section import section as written

    settings = Settings(quick, _dtypes(dtypes), rounds, _device(device))
    picked = chosen(routines or [], settings.device)
    _check_folder("--plot", plot)
    _check_folder("--section", section)
    torch.manual_seed(0)
    with torch.no_grad():
        report, found = _run(picked, settings, show=not json)
    if plot is not None:
        plot.write_text(drawn(found), encoding="utf-8")
    if section is not None:
        command = _command(routines or [], dtypes, settings)
        text = written(found, report, command=command, day=datetime.date.today().isoformat())
        section.write_text(text, encoding="utf-8")
    print_json(report, indent=None)


def _command(routines: list[str], dtypes: str, settings: Settings) -> str:
    """What measures the same again."""
    words = ["polyhead", "bench", *routines]
    if settings.quick:
        words += ["--quick"]
    if dtypes != _DTYPES:
        words += ["--dtypes", dtypes]
    if settings.rounds is not None:
        words += ["--rounds", str(settings.rounds)]
    if settings.device != "cpu":
        words += ["--device", settings.device]
    return shlex.join(words)


def _run(
    picked: dict[str, Any], settings: Settings, *, show: bool
) -> tuple[dict[str, Any], dict[str, list[Result]]]:
    """Every routine in turn; tables as they come, if wanted."""
    from polyhead.cli.doctor import machine, versions
    from polyhead.cli.terminal import console, progress
    from polyhead.lab.benchmarks import limits, measure
    from polyhead.lab.benchmarks import peers as others
    from polyhead.lab.benchmarks.results import document, means_table, table

    screen = console()
    peers = dict.fromkeys(peer for routine in picked.values() for peer in routine.meets(settings))
    facts = machine()
    absent = [{"peer": name, "install": how} for name, how in others.missing(peers).items()]
    if settings.quick and "FlexAttention" in peers:
        absent.append({"peer": "FlexAttention", "install": "run without --quick: it compiles"})
    if show:
        screen.print(
            f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads, native "
            f"code {facts['native_code'] or 'none'}, torch {versions()['torch']}\n"
        )
        if settings.device != "cpu":
            screen.print(f"on {', '.join(facts['accelerators'])}\n")
    found: dict[str, list[Result]] = {}
    for name, routine in picked.items():
        found[name] = []
        with progress(name) as advance:
            for case in routine.drawn(settings):
                found[name].append(measure(case, settings))
                advance(f"{name}, {case.group} {case.length}", len(found[name]), 0)
        if show:
            screen.print(table(name, routine.summary, found[name]))
            screen.print()
    if show:
        screen.print(means_table(found))
        for peer in absent:
            screen.print(f"missing: {peer['peer']}: {peer['install']}", soft_wrap=True)
    about = {
        "machine": facts,
        "versions": versions() | others.versions(),
        "quick": settings.quick,
        "device": settings.device,
        "rates": limits.hardware() if settings.device == "cpu" else {},
        "missing": absent,
    }
    return about | document(found), found


def _dtypes(text: str) -> tuple[torch.dtype, ...]:
    import torch

    from polyhead.errors import InputError

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"--dtypes takes {', '.join(known)}: got {unknown[0]!r}")
    return tuple(known[name] for name in names)


def _check_folder(option: str, file: Path | None) -> None:
    """Says before anything is measured that the file could not be written afterwards."""
    from polyhead.errors import InputError

    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise InputError(f"{option} takes a file in a folder that exists: got {str(file)!r}")


def _device(name: str) -> str:
    import torch

    from polyhead.errors import InputError

    if name != "cpu" and name.partition(":")[0] != "cuda":
        raise InputError(f"--device takes cpu or cuda: got {name!r}")
    if name != "cpu" and not torch.cuda.is_available():
        raise InputError(f"--device {name} needs a CUDA device: torch finds none here")
    return name
