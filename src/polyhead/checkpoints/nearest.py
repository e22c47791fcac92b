"""The family that files of an unknown ``model_type`` are nearest to.

Keys of config.json are read as each family would read them, and names of tensors are looked up in
its table and among the parameters of the model that its configuration describes. What differs is
counted: the fewest differences win, and are named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError, shortened
from polyhead.families import Family, families
from polyhead.families.common.config_json import HARMLESS, read_keys
from polyhead.families.common.keys import MISSING, Keys
from polyhead.models.transformer import Transformer

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_TRIED = 8
"""Families whose models are compared."""
_MOST_LAYERS = 256
_MOST = 4
"""Names that a message lists."""


@dataclass(frozen=True)
class Differences:
    """How files differ from a family's.

    Attributes:
        family: That they were compared with.
        missing_keys: Keys without a default that the file lacks.
        unknown_keys: Keys that the family does not read.
        refused: What it said of a value.
        unknown_tensors: The file's names that it has no place for, one of each kind.
        missing_tensors: Parameters that no tensor of the file becomes.
        config: What the keys mean, where they are complete.
    """

    family: Family
    missing_keys: list[str]
    unknown_keys: list[str]
    refused: str
    unknown_tensors: list[str]
    missing_tensors: list[str]
    config: TransformerConfig | None = None

    @property
    def count(self) -> int:
        """Their number."""
        lists = (
            self.missing_keys, self.unknown_keys, self.unknown_tensors, self.missing_tensors,
        )  # fmt: skip
        return sum(map(len, lists)) + bool(self.refused)

    def words(self) -> str:
        """Them, in words."""
        found = [
            f"{what} {_listed(names)}"
            for what, names in (
                ("it has no key", self.unknown_keys),
                ("it needs the key", self.missing_keys),
                ("it has no tensor", self.unknown_tensors),
                ("it needs the tensor", self.missing_tensors),
            )
            if names
        ]
        return "; ".join([*found, *([self.refused] if self.refused else [])])


def unknown_type(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], where: object
) -> ConfigError:
    """The error for a ``model_type`` that no family has, with the nearest family."""
    kind = shortened(values.get("model_type"))
    found = nearest(values, {name: tuple(each.shape) for name, each in tensors.items()})
    if not found:
        return ConfigError(
            f"{where}: model_type is {kind}, and no family is near to its keys and tensors; "
            f"supported are {', '.join(families())}"
        )
    name, *others = (each.family.model_type for each in found)
    differs = found[0].words() or "its keys and tensors are those of the file"
    more = f" ({_listed(others)} as near)" if others else ""
    own = "auto_map" in values
    warning = ", but code of its own (auto_map) may compute otherwise" if own else ""
    return ConfigError(
        f"{where}: model_type is {kind}, which is not known; the nearest is {name!r}{more}: "
        f"{differs}. load(..., family={name!r}) reads the files as that or says what does not fit"
        f"{warning}"
    )


def nearest(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[Differences]:
    """The families with the fewest differences; none where all differ in most things.

    Args:
        values: config.json's object.
        shapes: Of the files' tensors.
    """
    bare = _with_few_layers({key: values[key] for key in values if key != "model_type"})
    kinds = {_NUMBER.sub("#", name): name for name in reversed([*shapes])}
    told = [key for key in bare if key not in HARMLESS]
    most = (len(told) + len(kinds)) / 3
    rough = [_by_keys(family, bare, [*kinds.values()]) for family in families().values()]
    rough = sorted((each for each in rough if each.count <= most), key=lambda each: each.count)
    exact = [_by_tensors(each, bare, shapes, [*kinds.values()]) for each in rough[:_TRIED]]
    fewest = min((each.count for each in exact), default=0)
    return [each for each in exact if each.count == fewest and fewest <= most]


def _with_few_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Not so many that reading them as every family, and naming their tensors, takes long."""

    def few(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _with_few_layers(value)
        counts = isinstance(value, int) and key.endswith(("layer", "layers"))
        return min(value, _MOST_LAYERS) if counts else value

    return {key: few(key, value) for key, value in values.items()}


class _Lenient(Keys):
    """Reads on past a missing key, with a number that stands for any.

    Attributes:
        missing: Keys without a default.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.missing: list[str] = []

    def take(self, key: str, default: Any = MISSING) -> Any:
        if default is not MISSING or self.has(key) or key in self._defaults:
            return super().take(key, default)
        super().take(key, None)
        self.missing.append(self.named(key))
        return 1


def _by_keys(family: Family, values: Mapping[str, Any], names: list[str]) -> Differences:
    """Differences that keys and the table of names show."""
    keys = _Lenient(values, "", defaults=family.defaults, aliases=family.aliases)
    config, refused = None, ""
    try:
        config = read_keys(keys, family)
    except Exception as error:  # a family's reader may meet anything
        refused = str(error).removeprefix(": ")
    harmless = {*HARMLESS, *family.harmless, family.initial_key}
    if config is None:  # not all of its keys were reached
        harmless |= {*family.defaults, *family.aliases.values()}
    unknown = [key for key in keys.untaken() if key not in harmless]
    if keys.missing:
        config = None
    try:
        table = family.tensors_of(values)
    except Exception:  # it needs a key that is missing
        without = names
    else:
        without = [n for n in names if not table.is_dropped(n) and not table.our_names(n)]
    missing = [*dict.fromkeys(keys.missing)]
    return Differences(family, missing, unknown, refused, without, [], config)


def _by_tensors(
    rough: Differences,
    values: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    names: list[str],
) -> Differences:
    """With those that show beside a model of the configuration, if keys make one."""
    config = rough.config
    if config is None:
        return rough
    table = rough.family.tensors_of(values)
    try:
        with torch.device("meta"):
            model = Transformer(replace(config, layers=_one_of_each(config)))
    except Exception as error:  # sizes that do not go together
        return replace(rough, refused=rough.refused or str(error))
    wanted = {_NUMBER.sub("#", name): tensor for name, tensor in model.state_dict().items()}
    tied = {"head.weight"} if config.head == "tied" else set[str]()
    made: set[str] = set()
    without: list[str] = []
    for name in names:
        if table.is_dropped(name):
            continue
        ours = {_NUMBER.sub("#", each) for each in table.our_names(name)}
        made |= ours
        places = [tuple(wanted[each].shape) for each in ours & wanted.keys()]
        fits = not table.only_renames(name) or shapes[name] in places
        if not (ours <= tied and ours) and not (places and fits):
            without.append(name)
    missing = [name for name in model.state_dict() if _NUMBER.sub("#", name) not in made]
    missing = [*{_NUMBER.sub("#", name): name for name in reversed(missing)}.values()]
    return replace(rough, unknown_tensors=without, missing_tensors=missing)


def _one_of_each(config: TransformerConfig) -> tuple[Any, ...]:
    """Layers that differ; numbers of layers do not matter here."""
    return tuple(dict.fromkeys(config.layers))


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST
    return ", ".join(map(shortened, names[:_MOST])) + (f" (and {more} more)" if more > 0 else "")
