"""``polyhead train``: a model from a recipe, with its losses, samples and a picture of both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from polyhead.training.job import Job
    from polyhead.training.recipe import Recipe
    from polyhead.training.run import Step

_SMOOTH = 0.95
"""Smoothing of loss and speed in the progress line: the weight of earlier ones."""

_LINE_SECONDS = 30
"""Between two lines of progress, where no terminal shows a bar; the first comes sooner."""
_FIRST_SECONDS = 5


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="translate-numbers, translate-bible, text, or a .toml file."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the model; default: the recipe's name."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the state in DIR, with the same losses.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop after this many minutes, if the recipe's own limit comes later."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of weights, order of data and dropout.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value of the recipe, such as schedule.steps=100.",
        ),
    ] = None,
) -> None:
    """Train a model from a recipe: a decoder on text files, or an encoder-decoder on pairs.

    A recipe runs for a number of steps, or of minutes; while it runs, a line says how far it is and
    how long it will still take. Ctrl-C saves the state; --resume continues with exactly the same
    losses. The best model on held-out texts is saved in DIR, where the other commands find it.

    Example: polyhead train translate-numbers
    """
    from polyhead._utils.checks import needed
    from polyhead.cli.terminal import console

    needed("accelerate", "polyhead[train]")  # refuse before anything is read
    from polyhead.training.job import Job
    from polyhead.training.recipe import Recipe

    given = [*(changes or [])]
    given += [f"schedule.minutes={minutes}"] if minutes is not None else []
    given += [f"schedule.seed={seed}"] if seed is not None else []
    wanted = Recipe.read(recipe, given)
    folder = out or Path(wanted.name)
    job = Job(wanted, folder, resume=resume)
    screen = console(stderr=True)
    screen.print(_described(job), soft_wrap=True)
    try:
        _train(job, screen)
    except KeyboardInterrupt:
        if job.run.is_main:
            screen.print(
                f"stopped after step {job.run.steps:,}; the state is in {folder}: go on with "
                f"polyhead train {recipe} --out {folder} --resume",
                soft_wrap=True,
            )
        raise
    job.finish()
    if job.run.is_main:
        _report(job, recipe)


def _described(job: Job) -> str:
    count = sum(parameter.numel() for parameter in job.model.parameters())
    what = (
        f"{len(job.batches.rows):,} packed rows"
        if job.corpus is None
        else f"{len(job.corpus.training):,} pairs, {len(job.corpus.held_out):,} held out"
    )
    place = f", going on after step {job.run.steps:,}" if job.run.steps else ""
    return f"{job.recipe.name}: {count:,} parameters, {what}, {_budget(job.recipe)}{place}"


def _budget(recipe: Recipe) -> str:
    """What ends a run, the first of several."""
    schedule = recipe.schedule
    limits = {
        "steps": schedule.steps,
        "tokens": schedule.tokens,
        "minutes": schedule.minutes,
    }
    said = [f"{value:,} {name}" for name, value in limits.items() if value is not None]
    return " or ".join(said)


def _train(job: Job, screen: Console) -> None:
    with _bar(screen, shown=job.run.is_main) as show:
        for step in job.steps():
            show(job, step)
            if step.validation is None or not job.run.is_main:
                continue
            line = f"step {step.number:,}  loss {step.loss:.3f}  held out {step.validation:.3f}"
            metric = job.recipe.report.metric
            if metric != "loss" and job.corpus is not None and step.progress < 1:
                found = _measured(job, job.recipe.report.probes)
                job.history.note(step.number, **{metric: found})
                line += f"  {_said(metric, found)} of {job.recipe.report.probes}"
            screen.print(f"{line}  {job.run.seconds / 60:.1f} min", soft_wrap=True)
            for text in job.recipe.report.samples:
                screen.print(f"    {job.sample(text)}", style="dim", soft_wrap=True)


@contextmanager
def _bar(screen: Console, *, shown: bool) -> Iterator[Any]:
    """A bar with the loss, tokens a second and the time that is left; without a terminal, lines."""
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(), TextColumn("{task.description}"))
    hidden = not (shown and screen.is_terminal)
    smooth: dict[str, float] = {}
    due = time.monotonic() + _FIRST_SECONDS
    with Progress(*columns, console=screen, transient=True, disable=hidden) as bar:
        task = bar.add_task("training", total=1.0)

        def show(job: Job, step: Step) -> None:
            nonlocal due
            speed = step.tokens / max(step.seconds, 1e-9)
            for name, value in (("loss", step.loss), ("speed", speed)):
                before = smooth.get(name, value)
                smooth[name] = _SMOOTH * before + (1 - _SMOOTH) * value
            line = _progress_line(job, step, smooth["loss"], smooth["speed"])
            bar.update(task, completed=min(step.progress, 1.0), description=line)
            if shown and hidden and time.monotonic() >= due and step.progress < 1:
                due = time.monotonic() + _LINE_SECONDS
                screen.print(line, soft_wrap=True)

        yield show


def _progress_line(job: Job, step: Step, loss: float, speed: float) -> str:
    steps = job.recipe.schedule.steps
    of = "" if steps is None else f" of {steps:,}"
    left = job.run.seconds * (1 - step.progress) / step.progress
    return (
        f"step {step.number:,}{of}  loss {loss:.3f}  {speed:,.0f} tokens/s  "
        f"about {_said_time(left)} left"
    )


def _said_time(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _measured(job: Job, probes: int | None = None) -> float:
    from polyhead.training.job import scored

    assert job.corpus is not None
    pairs = job.corpus.held_out[:probes]
    written = job.translated([pair.source for pair in pairs])
    return scored(job.recipe.report.metric, written, [pair.target for pair in pairs])


def _said(metric: str, value: float) -> str:
    return f"exact {value:.1%}" if metric == "exact" else f"BLEU {value:.1f}"


def _report(job: Job, recipe: str) -> None:
    """Results of the best weights on all held-out pairs, beside a baseline without training."""
    from polyhead.cli.terminal import console
    from polyhead.training.job import scored

    screen, metric = console(), job.recipe.report.metric
    run = job.run
    spent = f"{run.steps:,} steps, {run.tokens:,} tokens, {run.seconds / 60:.1f} minutes"
    screen.print(f"{spent}, CPU {time.process_time() / 60:.1f} minutes", soft_wrap=True)
    if job.corpus is not None and metric != "loss":
        pairs = job.corpus.held_out
        wanted = [pair.target for pair in pairs]
        for name, baseline in job.corpus.baselines.items():
            found = scored(metric, [baseline(pair.source) for pair in pairs], wanted)
            screen.print(f"{name}: {_said(metric, found)}", soft_wrap=True)
        screen.print(f"this model: {_said(metric, _measured(job))} of {len(pairs):,} held out")
    if job.recipe.report.align and job.corpus is not None:
        _align(job, job.recipe.report.align)
    screen.print(f"saved in {job.out}, with curves.svg", soft_wrap=True)
    screen.print(
        f"to train it further: polyhead train {recipe} --out {job.out} --resume {_more(job)}",
        soft_wrap=True,
    )


def _more(job: Job) -> str:
    """Options for twice the budget."""
    schedule = job.recipe.schedule
    limits = {
        name: 2 * value
        for name in ("steps", "tokens", "minutes")
        if (value := getattr(schedule, name)) is not None
    }
    return " ".join(
        f"--minutes {value:g}" if name == "minutes" else f"--set schedule.{name}={value}"
        for name, value in limits.items()
    )


def _align(job: Job, text: str) -> None:
    """The alignment of one source, and the command that draws it."""
    from polyhead.cli.alignment import Aligned
    from polyhead.cli.terminal import console
    from polyhead.generation import TextToText

    model = job.model.eval()
    assert isinstance(model, TextToText)
    made = model.generate(text)
    screen = console()
    screen.print(f"\n{text} → {made.text}", soft_wrap=True)
    Aligned.of(model, text, made, {}).show()
    screen.print(
        f"its picture: polyhead translate {text!r} --model {job.out} --align --out {text}.svg",
        soft_wrap=True,
    )
