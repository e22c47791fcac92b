"""A recipe: the model, its vocabulary, the texts and the schedule, as a TOML file.

    [model]                       # config.json's keys of a family; sizes of the vocabulary follow
    model_type = "marian"
    d_model = 128

    [vocabulary]
    kind = "bytes"
    size = 8000

    [data]
    pairs = "pairs.tsv"           # a path is taken from where the recipe lies

    [schedule]
    minutes = 5

An unknown key is an error that names a near one.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from polyhead._utils.checks import check_int, check_one_of, meant
from polyhead.config.data import Data
from polyhead.errors import ConfigError, InputError
from polyhead.training.corpora import CORPORA
from polyhead.training.schedule import Schedule
from polyhead.training.texts import DOCUMENTS, read_lines
from polyhead.training.vocabulary import KINDS

_FOLDER = Path(__file__).parent / "recipes"
METRICS = ("loss", "exact", "bleu")


@dataclass(frozen=True)
class VocabularyRecipe(Data):
    """How texts become tokens: ``kind`` and ``size`` of ``make_tokenizer``."""

    kind: str = "bytes"
    size: int = 8_000

    def __post_init__(self) -> None:
        check_one_of("kind", self.kind, KINDS, error=ConfigError)
        check_int("size", self.size, least=4, error=ConfigError)


@dataclass(frozen=True)
class DataRecipe(Data):
    """Where texts come from: exactly one of ``corpus``, ``pairs``, ``source`` and ``text``.

    Attributes:
        corpus: A name of ``CORPORA``.
        pairs: A file of two columns, a tab between.
        source, target: Two files, line by line.
        text: Files to learn to write, for a decoder.
        documents: What one is: ``"files"``, ``"paragraphs"`` or ``"lines"``.
        length: Tokens of a packed row.
        held_out: Pairs, or packed rows, that are only tested on; a corpus says so itself.
        batch_tokens: Tokens of a batch at most.
    """

    corpus: str = ""
    pairs: str = ""
    source: str = ""
    target: str = ""
    text: tuple[str, ...] = ()
    documents: str = "files"
    length: int = 256
    held_out: int = 100
    batch_tokens: int = 4_096

    def __post_init__(self) -> None:
        given = [name for name in ("corpus", "pairs", "source", "text") if getattr(self, name)]
        if len(given) != 1:
            raise ConfigError(
                "[data] needs one of corpus, pairs, source (with target) and text, such as --set "
                f"'data.text=[\"book.txt\"]': got {' and '.join(given) or 'none'}"
            )
        if bool(self.source) != bool(self.target):
            raise ConfigError("[data] source and target must be given together: got only one")
        if self.corpus:
            check_one_of("corpus", self.corpus, CORPORA, error=ConfigError)
        check_one_of("documents", self.documents, DOCUMENTS, error=ConfigError)
        for name, least in (("length", 2), ("held_out", 1), ("batch_tokens", 1)):
            check_int(name, getattr(self, name), least=least, error=ConfigError)


@dataclass(frozen=True)
class ReportRecipe(Data):
    """What is printed during the run and at the end.

    Attributes:
        metric: ``"exact"`` texts, ``"bleu"`` (sacrebleu), or the ``"loss"`` alone.
        samples: Texts to translate or to go on with at each validation.
        align: A source whose alignment is shown at the end.
        probes: Held-out pairs that the metric is taken on before the end.
    """

    metric: str = "loss"
    samples: tuple[str, ...] = ()
    align: str = ""
    probes: int = 100

    def __post_init__(self) -> None:
        check_one_of("metric", self.metric, METRICS, error=ConfigError)
        check_int("probes", self.probes, least=1, error=ConfigError)


@dataclass(frozen=True)
class Recipe:
    """All that a run depends on.

    Attributes:
        name: Name of the file, without its ending.
        model: Keys of config.json, and ``begin``: ``"copying"`` for weights that copy.
        vocabulary, data, schedule, report: The other tables.
        folder: Where the paths in ``data`` begin: where the file lies; of a recipe of the package
            the working directory.
    """

    name: str
    model: Mapping[str, Any]
    vocabulary: VocabularyRecipe
    data: DataRecipe
    schedule: Schedule
    report: ReportRecipe = field(default_factory=ReportRecipe)
    folder: Path = Path()

    @classmethod
    def read(cls, name: str, changes: Iterable[str] = ()) -> Self:
        """A recipe of the package by its name, or a file.

        Args:
            name: ``"translate-numbers"``, or a path that ends in ``.toml``.
            changes: ``"schedule.steps=100"`` and the like; values as in TOML, or plain words.

        Raises:
            InputError: No such recipe, or no TOML.
            ConfigError: An unknown key, or a value that cannot be.
        """
        path = Path(name) if name.endswith(".toml") else _FOLDER / f"{name}.toml"
        if not path.is_file():
            raise InputError(
                f"unknown recipe {name!r}{meant(name, built_in())}: give "
                f"{', '.join(built_in())}, or a .toml file"
            )
        try:
            tables = tomllib.loads("\n".join(read_lines(path)))
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path} is not TOML: {error}") from error
        for change in changes:
            _set(tables, change)
        return cls.from_tables(tables, path)

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], path: Path) -> Self:
        """A recipe of tables, as ``tomllib`` reads them from ``path``."""
        parts: dict[str, type[Data]] = {
            "vocabulary": VocabularyRecipe,
            "data": DataRecipe,
            "schedule": Schedule,
            "report": ReportRecipe,
        }
        _check_known(str(path), tables, ["model", *parts])
        made: dict[str, Any] = {}
        for name, kind in parts.items():
            values = tables.get(name, {})
            if not isinstance(values, dict):
                raise ConfigError(f"{path}: {name} must be a table: got {type(values).__name__}")
            _check_known(f"{path}, [{name}]", values, [f.name for f in dataclasses.fields(kind)])
            try:
                made[name] = kind.from_dict(values)
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{path}, [{name}]: {error}") from error
        model = tables.get("model")
        if not isinstance(model, dict) or "model_type" not in model:
            raise ConfigError(f"{path}: [model] needs model_type, such as 'llama' or 'marian'")
        begin = model.get("begin", "family")
        check_one_of("begin", begin, ("family", "copying"), error=ConfigError)
        folder = Path() if path.parent == _FOLDER else path.parent
        return cls(path.stem, model, folder=folder, **made)

    def to_dict(self) -> dict[str, Any]:
        """What the run's state stores of it: everything but the budget and what is printed."""
        schedule = self.schedule.to_dict()
        for name in ("steps", "tokens", "minutes", "validate_every", "save_every"):
            del schedule[name]
        said = {
            "model": dict(self.model),
            "vocabulary": self.vocabulary.to_dict(),
            "data": self.data.to_dict(),
            "schedule": schedule,
        }
        plain: dict[str, Any] = json.loads(json.dumps(said))
        return plain


def built_in() -> list[str]:
    """Names of the recipes in the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Keys whose values differ in two of ``Recipe.to_dict``, in words."""
    found: list[str] = []
    for table in here:
        ours, theirs = here[table], there.get(table, {})
        found += [
            f"{table}.{key} was {theirs.get(key)!r} and is {ours.get(key)!r}"
            for key in sorted({*ours, *theirs})
            if ours.get(key) != theirs.get(key)
        ]
    return found


def _set(tables: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    table, dot, name = key.strip().partition(".")
    if not (equals and dot and table and name):
        raise InputError(f"--set takes table.key=value, such as schedule.steps=100: got {change!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    inner = tables.setdefault(table, {})
    if not isinstance(inner, dict):
        raise InputError(f"--set {change}: {table} is not a table of the recipe")
    inner[name] = value


def _check_known(where: str, values: Mapping[str, Any], known: list[str]) -> None:
    for key in values:
        if key not in known:
            hint = meant(key, known) or f"; known are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")
