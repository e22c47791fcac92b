"""``polyhead compare``: head layouts trained side by side; ``compare heads``: how many heads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhead.cli.options import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyhead.lab.comparison.experiment import Experiment, Finish
    from polyhead.lab.comparison.variants import Variant

compare_app = typer.Typer()

Seeds = Annotated[int, typer.Option(help="Runs of each variant; at least 2.")]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Total training time of all runs, such as 30m or 2h; sets --tokens.",
    ),
]
Tokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens that each run reads; default: by --budget.")
]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        help="A text file; may be given more than once. Default: documentation strings of what "
        "is installed.",
        show_default=False,
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for runs and report.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the comparison in --out.")]
Json = Annotated[bool, typer.Option("--json", help="The report as JSON.")]
Width = Annotated[int, typer.Option(help="Embedding size of the decoder.")]
Layers = Annotated[int, typer.Option(help="Layers of the decoder.")]
Hidden = Annotated[int, typer.Option(help="Hidden size of the feed-forward networks.")]
Vocabulary = Annotated[int, typer.Option(help="Largest size of the BPE vocabulary.")]
Context = Annotated[int, typer.Option(help="Tokens per sequence.")]
Batch = Annotated[int, typer.Option(help="Sequences per step.")]
Rate = Annotated[float, typer.Option(help="Learning rate of all variants.")]
Dtype = Annotated[str, typer.Option(help="float32, or bfloat16 by autocast.")]


@compare_app.callback(invoke_without_command=True)
def compare(
    context: typer.Context,
    variants: Annotated[
        str,
        typer.Option(
            help="Comma-separated: mha, mqa, gqa:G, mla:R+D (latent + rotated), window:W, heads:H, "
            "gated, diff, nsa:N (blocks), dsa:K (keys), gdn, kda, mamba2, hybrid:N+M (layers of "
            "gdn + of mha)."
        ),
    ] = "mha,gqa:2,mqa,mla:32+8",
    seeds: Seeds = 5,
    budget: Budget = None,
    tokens: Tokens = None,
    data: Data = None,
    out: Out = Path("comparison"),
    resume: Resume = False,
    stage: Annotated[
        str, typer.Option(help="all, train, measure (speeds again) or report.")
    ] = "all",
    width: Width = 128,
    layers: Layers = 3,
    heads: Annotated[int, typer.Option(help="Query heads of the decoder.")] = 8,
    hidden: Hidden = 352,
    vocabulary: Vocabulary = 1024,
    block: Annotated[int, typer.Option("--context", help="Tokens per sequence.")] = 256,
    batch: Batch = 8,
    rate: Rate = 2e-3,
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Train the same decoder with different head layouts, and report which of them differ.

    Parameters and tokens are equal, seeds are paired. The runs, report.json, plot.svg and
    report.html are written to --out. Ctrl-C loses at most the run in progress; --resume continues.

    Example: polyhead compare --variants gqa:2,mqa,mla:32+8 --seeds 8 --budget 30m
    """
    if context.invoked_subcommand is not None:
        return
    from polyhead._utils.checks import check_one_of
    from polyhead.errors import InputError
    from polyhead.lab.comparison.runs import Schedule
    from polyhead.lab.comparison.variants import Sizes

    check_one_of("--stage", stage, ("all", "train", "measure", "report"), error=InputError)
    _check_seeds(seeds)
    sizes = Sizes(width, layers, heads, hidden, vocabulary)
    schedule = Schedule(tokens or 1, block, batch, rate, dtype)
    resumed = resume or stage in ("measure", "report")
    experiment, chosen = _experiment(
        out, variants, sizes, schedule, seeds, resumed, data, tokens, budget
    )
    if stage in ("all", "train"):
        _train(experiment, chosen, seeds, show=not json)
    _report(experiment, chosen, seeds, stage, json=json)


@compare_app.command("heads")
def heads(
    text: Annotated[
        bool, typer.Option("--text", help="Train decoders on text instead of the task.")
    ] = False,
    heads: Annotated[str, typer.Option(help="Numbers of heads, comma-separated.")] = (
        "1,2,4,8,16,32"
    ),
    seeds: Seeds = 5,
    steps: Annotated[int, typer.Option(min=1, help="Training steps on the task.")] = 400,
    budget: Budget = None,
    tokens: Tokens = None,
    data: Data = None,
    out: Out = Path("comparison-heads"),
    resume: Resume = False,
    width: Width = 64,
    layers: Layers = 3,
    hidden: Hidden = 192,
    vocabulary: Vocabulary = 512,
    context: Context = 256,
    batch: Batch = 4,
    rate: Rate = 2e-3,
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """How many heads? Train models on a task that needs several, or with --text measure each head.

    The task: name the tokens 1, 2, 3 and 4 places back; one layer, equal parameters. It takes no
    data and leaves no files.

    Example: polyhead compare heads
    """
    _check_seeds(seeds)
    counts = _counts(heads)
    if not text:
        _task(counts, seeds, steps, json=json)
        return
    from polyhead.lab.comparison.heads import redundancy
    from polyhead.lab.comparison.runs import Schedule
    from polyhead.lab.comparison.variants import Sizes

    usual = 8  # the number of heads of the reference, mha
    names = [f"heads:{count}" for count in counts if count != usual]
    sizes = Sizes(width, layers, usual, hidden, vocabulary)
    schedule = Schedule(tokens or 1, context, batch, rate, dtype)
    experiment, chosen = _experiment(
        out, names, sizes, schedule, seeds, resume, data, tokens, budget
    )
    _train(experiment, chosen, seeds, show=not json, finish=redundancy)
    _report(experiment, chosen, seeds, "train", json=json)


def _check_seeds(seeds: int) -> None:
    from polyhead.errors import InputError

    if seeds < 2:
        raise InputError(f"--seeds must be at least 2, an interval needs pairs: got {seeds}")


def _counts(text: str) -> list[int]:
    from polyhead.errors import InputError

    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise InputError(f"--heads must be whole numbers, such as 1,4,16: got {text!r}")
    return list(dict.fromkeys(int(number) for number in text.split(",")))


def _experiment(
    out: Path,
    names: str | list[str],
    sizes: Any,
    schedule: Any,
    seeds: int,
    resumed: bool,
    data: list[Path] | None,
    tokens: int | None,
    budget: str | None,
) -> tuple[Experiment, Sequence[Variant]]:
    """The comparison in ``out``, loaded or new, and its variants."""
    from dataclasses import replace

    from polyhead.cli.terminal import progress
    from polyhead.errors import InputError
    from polyhead.lab.comparison import corpus, experiment
    from polyhead.lab.comparison.variants import REFERENCE, variant, variants

    if resumed:
        for name, value in (("--tokens", tokens), ("--budget", budget), ("--data", data)):
            if value:
                raise InputError(f"{name} is fixed by the comparison in {out}: leave it out")
        loaded = experiment.Experiment.load(out)
        return loaded, variants(names, loaded.sizes)
    chosen = variants(names, sizes)
    if (tokens is None) == (budget is None):
        raise InputError("give either --tokens or --budget: they are mutually exclusive")
    seconds = None if budget is None else duration("--budget", budget)
    experiment.check_new(out)
    with progress("reading and tokenizing the text"):
        text = corpus.corpus(corpus.read(data or []), sizes.vocab_size)
    if seconds is not None:
        speed = experiment.measured_rate(sizes, schedule, variant(REFERENCE))
        count = experiment.tokens_for(seconds, len(chosen) * seeds, speed, schedule)
        schedule = replace(schedule, tokens=count)
    return experiment.Experiment.create(out, sizes, schedule, text), chosen


def _train(
    experiment: Experiment,
    chosen: Sequence[Variant],
    seeds: int,
    *,
    show: bool,
    finish: Finish | None = None,
) -> None:
    from polyhead.cli.terminal import console, progress

    screen = console()
    try:
        with progress("training") as advance:
            for made in experiment.train(chosen, seeds, finish=finish, advance=advance):
                if show:
                    screen.print(f"{made['variant']}, seed {made['seed']}: {made['loss']:.4f} nats")
    except KeyboardInterrupt:
        kept = f"stopped: {experiment.folder} keeps the finished runs; --resume continues"
        console(stderr=True).print(kept, soft_wrap=True)
        raise


def _report(
    experiment: Experiment, chosen: Sequence[Variant], seeds: int, stage: str, *, json: bool
) -> None:
    """Measures what is wanted, writes the files of the report and prints it."""
    import warnings

    from polyhead.cli.terminal import console, print_json, progress
    from polyhead.lab.comparison import document as report
    from polyhead.lab.comparison.measure import speeds
    from polyhead.lab.comparison.page import page, plot

    known = experiment.speeds()
    wanted = chosen if stage == "measure" else [each for each in chosen if each.name not in known]
    if wanted and stage in ("all", "measure"):
        with progress("measuring") as advance:  # all variants, measured in turns
            known |= speeds(chosen, experiment.sizes, experiment.schedule, advance=advance)
        experiment.keep_speeds(known)
    made = report.document(experiment, chosen, experiment.results(chosen, seeds), known)
    experiment.keep_report(made, {"plot.svg": plot(made), "report.html": page(made)})
    for said in made["warnings"]:
        warnings.warn(said, stacklevel=2)
    if json:
        print_json(made)
        return
    screen = console()
    for table in report.tables(made):
        screen.print(table)
        screen.print()
    for sentence in report.sentences(made):
        screen.print(sentence, soft_wrap=True)
    screen.print(f"{experiment.folder / 'report.html'} and report.json, plot.svg beside it")


def _task(counts: Sequence[int], seeds: int, steps: int, *, json: bool) -> None:
    """``compare heads`` on the task."""
    from rich.table import Table

    from polyhead.cli.terminal import console, print_json, progress
    from polyhead.lab.comparison.heads import Namer, summary, sweep

    for count in counts:
        Namer(count)  # refuses sizes that do not divide, before training
    with progress("training") as advance:
        rows = summary(sweep(counts, seeds, steps=steps, advance=advance))
    if json:
        print_json({"task": "name the tokens 1, 2, 3 and 4 places back", "heads": rows})
        return
    table = Table(box=None, pad_edge=False)
    for heading in (
        "heads",
        "parameters",
        "seeds",
        "token accuracy",
        "all four right",
        "from – to",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["heads"]), f"{row['parameters']:,}", str(row["seeds"]), f"{row['each']:.1%}",
            f"{row['all']:.1%}", f"{row['all_least']:.1%} – {row['all_most']:.1%}",
        )  # fmt: skip
    console().print(table)
