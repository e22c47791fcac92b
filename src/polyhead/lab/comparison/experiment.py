"""A comparison in a folder: what it compares, and a whole file for every run that has finished.

    experiment.json             sizes, schedule, the text and its sha256
    text.safetensors            the text as tokens
    runs/gqa-4.seed-0.json      one run
    speeds.json                 what was measured of each variant
    report.json, report.html, plot.svg

A run is written when it is done. If the process ends early, at most the run in progress is lost,
and ``--resume`` does the missing runs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from polyhead._utils.atomic_write import write_file, write_tensors
from polyhead.errors import CheckpointError, InputError
from polyhead.lab.comparison import runs
from polyhead.lab.comparison.corpus import Corpus
from polyhead.lab.comparison.runs import Schedule
from polyhead.lab.comparison.variants import Sizes, Variant, decoder
from polyhead.models import Transformer

_FORMAT = 1
Finish = Callable[[Transformer, Tensor], dict[str, Any]]


@dataclass(frozen=True)
class Experiment:
    """What is compared.

    Attributes:
        sizes: Sizes of the decoder; ``vocab_size`` is the text's.
    """

    folder: Path
    sizes: Sizes
    schedule: Schedule
    corpus: Corpus

    @classmethod
    def create(cls, folder: Path, sizes: Sizes, schedule: Schedule, corpus: Corpus) -> Experiment:
        """A new comparison.

        Raises:
            InputError: The folder holds one already, or the text is too short.
        """
        check_new(folder)
        runs.check_length(corpus, schedule)
        sizes = dataclasses.replace(sizes, vocab_size=corpus.vocab_size)
        made = cls(folder, sizes, schedule, corpus)
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        tensors = {"train": corpus.train, "validation": corpus.validation}
        write_tensors(folder / "text.safetensors", tensors, {})
        write_json(folder / "experiment.json", made.to_dict())
        return made

    @classmethod
    def load(cls, folder: Path) -> Experiment:
        """The comparison that a folder holds.

        Raises:
            CheckpointError: Its files are damaged, or of another version.
        """
        if not (folder / "experiment.json").exists():
            raise InputError(f"{folder} holds no comparison: leave --resume out to start one")
        said = read_json(folder / "experiment.json")
        try:
            if said["format"] != _FORMAT:
                raise CheckpointError(
                    f"{folder} is of format {said['format']!r}: this version reads {_FORMAT}"
                )
            text = load_file(folder / "text.safetensors")
            corpus = Corpus(train=text["train"], validation=text["validation"], **said["text"])
            return cls(folder, Sizes(**said["sizes"]), Schedule(**said["schedule"]), corpus)
        except (KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{folder} holds a damaged comparison: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The content of ``experiment.json``."""
        text = {
            name: getattr(self.corpus, name)
            for name in ("said", "sha256", "validation_bytes", "vocab_size")
        }
        return {
            "format": _FORMAT,
            "sizes": dataclasses.asdict(self.sizes),
            "schedule": dataclasses.asdict(self.schedule),
            "text": text,
        }

    def path(self, variant: Variant, seed: int) -> Path:
        """Where a run is kept."""
        return self.folder / "runs" / f"{variant.slug}.seed-{seed}.json"

    def missing(self, variants: Sequence[Variant], seeds: int) -> list[tuple[Variant, int]]:
        """Runs to do: all variants of a seed before the next seed, so that pairs are whole."""
        pairs = [(each, seed) for seed in range(seeds) for each in variants]
        return [pair for pair in pairs if not self.path(*pair).exists()]

    def train(
        self,
        variants: Sequence[Variant],
        seeds: int,
        *,
        finish: Finish | None = None,
        advance: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> Iterator[dict[str, Any]]:
        """Does the missing runs, and yields each when its file is written."""
        waiting = self.missing(variants, seeds)
        steps = self.schedule.steps
        for index, (variant, seed) in enumerate(waiting):
            what = f"run {index + 1} of {len(waiting)}: {variant.name}, seed {seed}"

            def moved(done: int, _: int, before: int = index * steps, what: str = what) -> None:
                advance(what, before + done, len(waiting) * steps)

            made = runs.run(
                decoder(variant, self.sizes),
                self.corpus,
                self.schedule,
                seed,
                name=variant.name,
                advance=moved,
                finish=finish,
            )
            write_json(self.path(variant, seed), made)
            yield made

    def results(self, variants: Sequence[Variant], seeds: int) -> dict[str, dict[int, Any]]:
        """The finished runs, by variant and seed."""
        return {
            each.name: {
                seed: read_json(self.path(each, seed))
                for seed in range(seeds)
                if self.path(each, seed).exists()
            }
            for each in variants
        }

    def speeds(self) -> dict[str, Any]:
        """The measurements of each variant; empty if there are none."""
        path = self.folder / "speeds.json"
        found: dict[str, Any] = read_json(path) if path.exists() else {}
        return found

    def keep_speeds(self, measured: Mapping[str, Any]) -> None:
        """Writes what was measured of each variant."""
        write_json(self.folder / "speeds.json", dict(measured))

    def keep_report(self, document: Mapping[str, Any], files: Mapping[str, str]) -> None:
        """Writes ``report.json``, and other files by their names."""
        write_json(self.folder / "report.json", dict(document))
        for name, content in files.items():
            write_file(self.folder / name, content)


def check_new(folder: Path) -> None:
    """Raises InputError where the folder holds a comparison."""
    if (folder / "experiment.json").exists():
        raise InputError(
            f"{folder} holds a comparison already: --resume continues it, --out takes another "
            "folder"
        )


def write_json(path: Path, data: Any) -> None:
    """A JSON file, whole or not at all."""
    write_file(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """What a JSON file holds."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged, remove it: {error}") from error


def tokens_for(seconds: float, runs_to_do: int, rate: float, schedule: Schedule) -> int:
    """Tokens for each run so that all of them take about so long, at ``rate`` tokens a second."""
    step = schedule.context * schedule.batch
    return max(1, int(seconds * rate / runs_to_do / step)) * step


def measured_rate(sizes: Sizes, schedule: Schedule, config_of: Variant) -> float:
    """Tokens a second of four training steps on random tokens, after four others."""
    done = runs.repeated(runs.begin(decoder(config_of, sizes), 0), schedule)
    seconds = [next(done).seconds for _ in range(8)][4:]
    return len(seconds) * schedule.batch * schedule.context / sum(seconds)
