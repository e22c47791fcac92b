"""The text model in a multimodal checkpoint: its keys in config.json, and its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from polyhead.config import TransformerConfig
from polyhead.errors import CheckpointError, ConfigError, shortened
from polyhead.families.common import quantization
from polyhead.families.common.config_json import HARMLESS
from polyhead.families.common.keys import Keys
from polyhead.families.common.wrappers import OF_OTHERS, REPEATED, WRAPPERS, Wrapper, sizes_of

_BY_LENGTH = ("dynamic", "longrope")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Text:
    """The text model of a config.json.

    Attributes:
        values: Its object, under its own ``model_type``.
        where: The file and the key, for messages.
        wrapper: What it stands in; None: the file is the text model's own.
        may_tie: Whether a head that the file lacks is the embedding, whatever ``values`` say.
    """

    values: Mapping[str, Any]
    where: object
    wrapper: Wrapper | None = None
    may_tie: bool = False

    def read(self, config: TransformerConfig) -> TransformerConfig:
        """The configuration as the wrapper computes it.

        Raises:
            ConfigError: The wrapper does it otherwise than the text model alone.
        """
        if self.wrapper is None:
            return config
        ropes = (getattr(layer.attention, "rope", None) for layer in config.layers)
        moving = next((r.type for r in ropes if r is not None and r.type in _BY_LENGTH), None)
        if self.wrapper.first and moving is not None:
            raise ConfigError(
                f"{self.where}: rope_type is {moving!r}, which is not supported: its frequencies "
                f"depend on positions, which begin at {self.wrapper.first} here"
            )
        if self.wrapper.own_head:
            return config
        return replace(config, logit_scale=1.0, logit_softcap=None)

    def found(self, tensors: Mapping[str, Tensor], where: object) -> TextTensors:
        """The text model's tensors among a file's.

        Raises:
            CheckpointError: There are none, or one is there under two names.
        """
        wrapper = self.wrapper
        if wrapper is None:
            return TextTensors(tensors, self.values)
        kept: dict[str, Tensor] = {}
        names: dict[str, str] = {}
        left_out: list[str] = []
        for name, tensor in tensors.items():
            if wrapper.omitted.match(name):
                left_out.append(name)
                continue
            bare = self.bare(name)
            if bare in kept:
                raise CheckpointError(
                    f"{where}: tensors {shortened(names[bare])} and {shortened(name)} are the same "
                    "one of the text model"
                )
            kept[bare], names[bare] = tensor, name
        if not any(name != wrapper.head for name in kept):
            raise CheckpointError(
                f"{where}: the text model's tensors ({wrapper.module}...) are missing: the files "
                f"hold only {', '.join(self.left_out(left_out)) or 'a head'}"
            )
        return TextTensors(kept, self._tied(kept, wrapper), tuple(left_out), names)

    def bare(self, name: str) -> str:
        """A tensor's name in files of the text model alone."""
        if self.wrapper is None:
            return name
        match = self.wrapper.inside.match(name) or self.wrapper.around.match(name)
        bare = name if match is None else name[match.end() :]
        for theirs, usual in self.wrapper.respelt.items():
            if bare.startswith(theirs):
                return usual + bare.removeprefix(theirs)
        return bare

    def left_out(self, names: Iterable[str]) -> tuple[str, ...]:
        """The modules of tensors that ids do not pass through."""
        if self.wrapper is None:
            return ()
        found = (self.wrapper.omitted.match(name) for name in names)
        return tuple(dict.fromkeys(match[1] for match in found if match))

    def _tied(self, tensors: Mapping[str, Tensor], wrapper: Wrapper) -> Mapping[str, Any]:
        """The object, with what the file shows of the head: keys about it have moved.

        As transformers has it, a head that is there and differs is a head of its own.
        """
        head = tensors.get(wrapper.head)
        if head is None:
            tied = self.values["tie_word_embeddings"] or self.may_tie
        else:
            embeddings = [
                each for name, each in tensors.items() if name.endswith(wrapper.embedding)
            ]
            tied = self.values["tie_word_embeddings"] and any(
                each.shape == head.shape and torch.equal(each, head) for each in embeddings
            )
        return {**self.values, "tie_word_embeddings": bool(tied)}


@dataclass(frozen=True)
class TextTensors:
    """The text model's tensors.

    Attributes:
        tensors: By their names in files of the text model alone.
        values: config.json's object of the text model.
        left_out: Names of the file's other tensors.
        names: What the file calls each of ``tensors``.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    left_out: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)


def text_of(values: Mapping[str, Any], where: object) -> Text:
    """The text model of a config.json; itself, unless it is a wrapper's.

    Raises:
        ConfigError: The text model's keys are missing, or a wrapper's key is not understood.
    """
    kind = values.get("model_type")
    wrapper = WRAPPERS.get(kind) if isinstance(kind, str) else None
    if wrapper is None:
        return Text(values, where)
    above, inner, at = _parts(values, wrapper, where)
    inner = {key: value for key, value in inner.items() if key not in wrapper.of_top}
    inner |= {key: above[key] for key in wrapper.of_top if key in above}
    text = dict(inner)
    named = text.get("model_type") or wrapper.text_type
    if named == kind:
        named = wrapper.text_type  # so in files of transformers 4
    text["model_type"] = wrapper.renamed.get(named, named) if isinstance(named, str) else named
    said = [
        Keys(part, at).flag("tie_word_embeddings")
        for part in (above, inner)
        if part.get("tie_word_embeddings") is not None
    ]
    text["tie_word_embeddings"] = any(said) if said else wrapper.tied
    text["architectures"] = values.get("architectures")
    for key in (*_IDS, quantization.KEY):
        if text.get(key) is None and above.get(key) is not None:
            text[key] = above[key]
    for key in (*OF_OTHERS, *wrapper.unused):
        text.pop(key, None)
    for key, default in {**sizes_of(text["model_type"]), **wrapper.defaults}.items():
        text.setdefault(key, default)
    may_tie = wrapper.tied and above.get("tie_word_embeddings") is None
    return Text(text, at, wrapper, may_tie)


def _parts(
    values: Mapping[str, Any], wrapper: Wrapper, where: object
) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """The object that has the text model's, the text model's, and its name."""
    above, at = values, str(where)
    for key in wrapper.keys:
        inner = above.get(key)
        if inner is None and wrapper.flat:
            return values, _without(values), at
        if not isinstance(inner, Mapping):
            raise ConfigError(
                f"{at}: {key} must be the object of the text model's keys: got {shortened(inner)}"
                if key in above
                else f"{at}: {key} is missing: it holds the text model's keys in files of type "
                f"{values['model_type']!r}"
            )
        keys = Keys(above, at)
        for known in (
            key,
            "model_type",
            "tie_word_embeddings",
            *_IDS,
            *wrapper.of_top,
            quantization.KEY,
        ):
            keys.take(known, None)
        keys.expect("is_encoder_decoder", False, None)
        keys.finish({*HARMLESS, *OF_OTHERS, *REPEATED})
        outer, above, at = above, inner, f"{at}: {key}"
    return outer, above, at


def _without(values: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's keys among a wrapper's own."""
    return {key: value for key, value in values.items() if key not in OF_OTHERS}
