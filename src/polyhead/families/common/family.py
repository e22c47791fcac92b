"""What a file in ``families/`` states about its family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from polyhead.config import InitialConfig, TransformerConfig
from polyhead.families.common.gguf import Gguf
from polyhead.families.common.keys import Keys
from polyhead.families.common.predictors import PredictorFormat
from polyhead.families.common.tensors import Tensors


def nothing_more(config: TransformerConfig) -> Mapping[str, Any]:
    """For families without keys of their own."""
    return {}


def as_stated(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """For families whose config.json is complete."""
    return {}


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    Attributes:
        model_type: As config.json says it.
        class_name: transformers' classes begin with it: ``"Llama"``.
        read: The configuration that the keys mean; every key is taken.
        tensors: The table of names, or a function from config.json's object to it where the table
            depends on what the file says.
        defaults: What an absent key means, as in transformers' config class. A key without a
            default must be there.
        write: What ``writing.write_common`` does not write, or writes differently.
        aliases: The family's own spelling of shared keys: ``{"hidden_size": "n_embd"}``.
        not_supported: Keys that change the result in a way that is not built, and why. They may be
            absent, null, false, or have the family's default.
        harmless: Keys beyond ``config_json.HARMLESS`` that change no number in evaluation.
        with_head, bare: What follows ``class_name`` in the classes with a head and without.
        gguf: How GGUF files of the family are read; None: they are not.
        more_gguf: Further architectures of such files.
        initial: How transformers' classes draw new weights.
        initial_key: The key of its scale.
        observed: From config.json's object and the file's tensors, keys that the tensors decide.
        written_as: The ``model_type`` that files are saved with; None: its own.
        predictor: How its files hold the module of multi-token prediction; None: it is not read.
    """

    model_type: str
    class_name: str
    read: Callable[[Keys], TransformerConfig]
    tensors: Tensors | Callable[[Mapping[str, Any]], Tensors]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[[TransformerConfig], Mapping[str, Any]] = nothing_more
    aliases: Mapping[str, str] = field(default_factory=dict)
    not_supported: Mapping[str, str] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    with_head: str = "ForCausalLM"
    bare: str = "Model"
    gguf: Gguf | None = None
    more_gguf: tuple[Gguf, ...] = ()
    initial: InitialConfig = field(default_factory=InitialConfig)
    initial_key: str = "initializer_range"
    observed: Callable[[Mapping[str, Any], Mapping[str, Tensor]], Mapping[str, Any]] = as_stated
    written_as: str | None = None
    predictor: PredictorFormat | None = None

    def tensors_of(self, values: Mapping[str, Any]) -> Tensors:
        """The table of names for a config.json."""
        return self.tensors if isinstance(self.tensors, Tensors) else self.tensors(values)

    def for_each_gguf(self) -> tuple[Family, ...]:
        """The family with each architecture of its GGUF files as ``gguf``."""
        if self.gguf is None:
            return ()
        return (self, *(replace(self, gguf=each, more_gguf=()) for each in self.more_gguf))
