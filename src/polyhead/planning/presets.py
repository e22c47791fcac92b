"""Models known by name, with the sources of their numbers, and where a description comes from.

``presets.json`` holds a config.json per model, as its authors published it or as their paper says
it, and the number of parameters that is public. Models that config.json cannot describe are a
``TransformerConfig`` of equal layers, of which one is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from polyhead._utils.checks import meant
from polyhead._utils.paths import kind_of
from polyhead.checkpoints.json_file import read_json
from polyhead.config import TransformerConfig
from polyhead.errors import ConfigError, ModelNotFoundError
from polyhead.families import read_config as read_family
from polyhead.families.common.quantization import Scheme, read_scheme
from polyhead.models import Transformer
from polyhead.models.counts import held_bytes
from polyhead.planning.layouts import Saving, cache_saving, with_mha

_NESTED = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class Preset:
    """A known model.

    Attributes:
        parameters: The public count, or None where it is rounded beyond use or counts more.
        config: As a config.json, or as a ``TransformerConfig`` with ``layer`` and ``num_layers``.
        checked: Where else its shapes were found: another project's configuration or recipe; empty
            where nothing was found.
        unchecked: Which of its numbers that does not say, or says otherwise; empty if none.
        baselines: Other presets that its cache is compared with in public, and how many bits a
            number were counted with.
    """

    name: str
    title: str
    source: str
    parameters: int | None
    parameters_source: str
    config: Mapping[str, Any]
    checked: str = ""
    unchecked: str = ""
    baselines: tuple[Mapping[str, Any], ...] = ()

    @property
    def keeps_keys(self) -> bool:
        """Whether each of its layers keeps keys and values of every token."""
        layers = self.model.layers
        return all(any(m.keys_and_values for m in each.attention.memories) for each in layers)

    @property
    def model(self) -> TransformerConfig:
        """What ``config`` describes."""
        if "layer" not in self.config:
            return read_config(self.config, f"preset {self.name}")[0]
        values = dict(self.config)
        for layer in ("layer", "encoder_layer"):
            if layer in values:
                values[f"{layer}s"] = [values.pop(layer)] * values.pop(f"num_{layer}s")
        return TransformerConfig.from_dict(values)


def read_config(values: Mapping[str, Any], where: str) -> tuple[TransformerConfig, tuple[str, ...]]:
    """The configuration of a config.json, and a note if parts of the model are not in it.

    Args:
        values: Its object; a model of several kinds of input keeps the text model's in
            ``text_config``.

    Raises:
        ConfigError: The family is not supported, or a key is missing, impossible, or not
            understood; always by name.
    """
    for key in _NESTED:
        nested = values.get(key)
        if isinstance(nested, Mapping):
            outer = {k: v for k, v in values.items() if k in ("tie_word_embeddings", "vocab_size")}
            text = {"model_type": values.get("model_type")} | outer
            text |= {k: v for k, v in nested.items() if v is not None}
            return read_family(text, where), (f"only the text model ({key}) is counted",)
    return read_family(values, where), ()


@dataclass(frozen=True)
class Subject:
    """What is to be planned.

    Attributes:
        savings: Its cache beside others that it is compared with.
        scheme: How its weights became codes, if its config.json says that they did.
        held: Bits of the parameters of each part, as a loaded model holds them.
    """

    name: str
    config: TransformerConfig
    notes: tuple[str, ...] = ()
    savings: tuple[Saving, ...] = ()
    scheme: Scheme | None = None
    held: Mapping[str, float] | None = None


@cache
def presets() -> Mapping[str, Preset]:
    """All presets by name."""
    text = files("polyhead.planning").joinpath("presets.json").read_text(encoding="utf-8")
    return {
        name: Preset(name=name, **{**values, "baselines": tuple(values.get("baselines", ()))})
        for name, values in json.loads(text).items()
    }


def subject(config: Any) -> Subject:
    """Reads the ``config`` argument of ``plan``.

    Args:
        config: What ``load`` returned, or its ``Transformer``, a ``TransformerConfig``, the object
            of a config.json (or anything with ``to_dict()`` that gives one, such as transformers'
            configurations), a path to a config.json or its directory, or a preset's name.

    Raises:
        ConfigError: A field is missing or impossible.
        ModelNotFoundError: A string that is neither a preset nor a path.
        TypeError: ``config`` has another type.
    """
    if isinstance(config, TransformerConfig):
        return _subject("TransformerConfig", config)
    if isinstance(transformer := getattr(config, "transformer", config), Transformer):
        counts, sizes = vars(transformer.parameter_counts()), vars(held_bytes(transformer))
        held = {part: 8 * sizes[part] / max(1, count) for part, count in counts.items()}
        name = getattr(config, "origin", "") or type(config).__name__
        return replace(_subject(name, transformer.config), held=held)
    if isinstance(config, str) and config.lower() in presets():
        preset = presets()[config.lower()]
        made = _subject(preset.title, preset.model)
        named = tuple(
            Saving(
                cache_saving(
                    made.config,
                    presets()[each["preset"]].model,
                    bits=each["bits"],
                    baseline_bits=each["baseline_bits"],
                ),
                each["words"],
            )
            for each in preset.baselines
        )
        return replace(made, savings=named + made.savings)
    if isinstance(config, str | os.PathLike):
        path = _path(config)
        return _read(_title(path), read_json(path), str(path))
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, Mapping):
        name = str(config.get("_name_or_path") or config.get("model_type"))
        return _read(name, config, "config")
    raise TypeError(
        f"config must be a preset's name, a path to config.json, its object, a TransformerConfig "
        f"or a loaded model: got {type(config).__name__}"
    )


def _read(name: str, values: Mapping[str, Any], where: str) -> Subject:
    found = _subject(name, *read_config(values, where))
    return replace(found, scheme=read_scheme(values, where))


def _subject(name: str, model: TransformerConfig, notes: tuple[str, ...] = ()) -> Subject:
    found = Subject(name, model, notes)
    if model.kind == "encoder":
        return found
    saving = cache_saving(model, with_mha(model))
    if saving <= 0:
        return found
    return replace(found, savings=(Saving(saving, "MHA of the same heads, like for like"),))


def _path(given: str | os.PathLike[str]) -> Path:
    path = Path(given).expanduser()
    if kind_of(path) == "folder":
        path = path / "config.json"
    if kind_of(path) is None:
        raise ModelNotFoundError(
            f"no configuration {os.fspath(given)!r}{meant(os.fspath(given), presets())}: it is "
            f"neither a path nor a preset; presets are {', '.join(presets())}"
        )
    if path.suffix != ".json":
        raise ConfigError(
            f"{path} is not a config.json: a plan reads a .json file or its directory"
        )
    return path


def _title(path: Path) -> str:
    return path.parent.name if path.name == "config.json" and path.parent.name else path.stem
