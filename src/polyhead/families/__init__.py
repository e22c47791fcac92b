"""Model families: one file each, the only place that knows a family.

    family = find_family(values["model_type"], "config.json")
    config = read_config(family, values, "config.json")

A module of this package that has ``FAMILIES`` is found by itself; ``common/`` holds what the files
are written with.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

from polyhead._utils.extensions import extensions
from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError, shortened
from polyhead.families.common import config_json
from polyhead.families.common.family import Family
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.gguf_settings import Settings, read_settings
from polyhead.families.common.tensors import Tensors
from polyhead.families.common.texts import Text, text_of
from polyhead.families.refused import GGUF_REFUSED, REFUSED

__all__ = [
    "REFUSED",
    "Family",
    "Gguf",
    "Settings",
    "Tensors",
    "Text",
    "families",
    "find_family",
    "find_gguf",
    "is_known",
    "read_config",
    "read_settings",
    "text_of",
    "texts",
    "write_config",
]

# If several families can write a configuration, these are tried first.
_FIRST = ("llama", "bert")


@cache
def families() -> Mapping[str, Family]:
    """All families by ``model_type``."""
    found = _named("FAMILIES")
    return {name: found.pop(name) for name in _FIRST} | found


@cache
def texts() -> Mapping[str, Family]:
    """Text models of multimodal files that are saved as another family, by ``model_type``."""
    return _named("TEXTS")


def _named(table: str) -> dict[str, Family]:
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.ispkg:
            made = importlib.import_module(f"{__name__}.{module.name}")
            found |= {family.model_type: family for family in getattr(made, table, ())}
    for made in extensions():
        for family in getattr(made, table, ()):
            if family.model_type in found:
                warnings.warn(
                    f"polyhead keeps its family {family.model_type!r} and leaves out that of "
                    f"{made.__name__}",
                    stacklevel=2,
                )
            found.setdefault(family.model_type, family)
    return found


def is_known(model_type: object) -> bool:
    """Whether there is a family of that name, or a reason why there is none."""
    names = (families(), texts(), REFUSED)
    return isinstance(model_type, str) and any(model_type in each for each in names)


def find_family(model_type: object, where: object) -> Family:
    """The family that a config.json names.

    Raises:
        ConfigError: It is not supported; the message says why, or what is.
    """
    known = families()
    if isinstance(model_type, str) and model_type in known:
        return known[model_type]
    if isinstance(model_type, str) and model_type in texts():
        return texts()[model_type]
    if isinstance(model_type, str) and model_type in REFUSED:
        raise ConfigError(
            f"{where}: model_type is {model_type!r}, which is not supported: {REFUSED[model_type]}"
        )
    raise ConfigError(
        f"{where}: model_type is {shortened(model_type)}; supported are {', '.join(known)}"
    )


def find_gguf(metadata: Mapping[str, Any], where: object) -> Family:
    """The family of a GGUF file.

    Raises:
        ConfigError: Its architecture is not supported.
    """
    every = (*families().values(), *texts().values())
    known = [(one.gguf, one) for each in every for one in each.for_each_gguf() if one.gguf]
    arch: object = metadata.get("general.architecture")
    for gguf, family in known:
        if gguf.arch == arch and gguf.fits(metadata):
            return family
    if isinstance(arch, str) and arch in GGUF_REFUSED:
        raise ConfigError(
            f"{where}: general.architecture is {arch!r}, which is not supported: "
            f"{GGUF_REFUSED[arch]}"
        )
    raise ConfigError(
        f"{where}: general.architecture is {shortened(arch)}; "
        f"supported are {', '.join(sorted({gguf.arch for gguf, _ in known}))}"
    )


def read_config(values: Mapping[str, Any], where: object) -> TransformerConfig:
    """The configuration that a config.json means.

    Args:
        values: The file's object; of a multimodal one the text model is read.
        where: The file, for messages.

    Raises:
        ConfigError: The family is not supported, a key is missing or not understood, or a value is
            impossible; always by name.
    """
    text = text_of(values, where)
    family = find_family(text.values.get("model_type"), text.where)
    return text.read(config_json.read_config(family, text.values, text.where))


def write_config(config: TransformerConfig, prefer: str | None = None) -> dict[str, Any]:
    """config.json's object for a configuration; ``prefer`` is the ``model_type`` tried first.

    Raises:
        ConfigError: No family can say it; the message names what is lost.
    """
    return config_json.write_config(config, families().values(), prefer)
