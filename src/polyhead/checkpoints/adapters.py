"""LoRA adapters, as the PEFT library saves them, merged into the weights of their base.

    W' = W + scale · B A,     scale = alpha / r, or alpha / √r (rank-stabilised)

Hu et al. 2022; Kalajdzievski 2023. Names in the file are those of the base's own files, behind
``base_model.model.``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from polyhead.checkpoints.formats.safetensors_files import read_tensor_file
from polyhead.checkpoints.json_file import read_json
from polyhead.errors import CheckpointError, shortened
from polyhead.families.common.keys import Keys

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_NAME = re.compile(r"[\w.]+")
_T = TypeVar("_T")
_LORA = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
# Keys about an adapter's origin or training, which do not change results.
_HARMLESS = frozenset(
    (
        "arrow_config",
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    )
)


def base_of(adapter: Path) -> str:
    """The model that an adapter was trained on, as its configuration names it.

    Raises:
        CheckpointError: The configuration names none.
    """
    base = read_json(adapter / CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"{adapter / CONFIG}: base_model_name_or_path names no model: got {shortened(base)}; "
            f"load the base with adapter={str(adapter)!r}"
        )
    return base


@dataclass(frozen=True)
class Pair:
    """The change of one module.

    Attributes:
        down: A ``[R, in]``.
        up: B ``[out, R]``.
        scale: What B A is multiplied by.
        embeds: Whether the module is an embedding, whose weight is the other way round.
    """

    down: Tensor
    up: Tensor
    scale: float
    embeds: bool


@dataclass(frozen=True)
class Lora:
    """The contents of an adapter's files.

    Attributes:
        values: Values of its configuration.
        pairs: By the base's name of the module.
        whole: Tensors in place of the base's, by its name.
        transposed: Whether the base's weights are ``[in, out]``.
        dropout: Dropout probability in training.
    """

    values: Mapping[str, Any]
    pairs: Mapping[str, Pair]
    whole: Mapping[str, Tensor]
    transposed: bool
    dropout: float


def read_adapter(adapter: Path) -> Lora:
    """Reads an adapter's directory.

    Raises:
        CheckpointError: A file is missing or corrupt.
        ConfigError: A form of adapter that is not supported, by its key.
    """
    values = read_json(adapter / CONFIG)
    # The library writes every option of every version, most of them null.
    keys = Keys({k: v for k, v in values.items() if v is not None}, adapter / CONFIG)
    keys.expect("peft_type", "LORA")
    keys.expect("bias", "none")
    for key in ("use_dora", "lora_bias", "use_qalora", "use_bdlora"):
        keys.expect(key, False, None)
    for key in (
        "alora_invocation_tokens",
        "layer_replication",
        "target_parameters",
        "trainable_token_indices",
    ):
        keys.expect(key, None, [])
    transposed = keys.flag("fan_in_fan_out", False)
    # Other initialisations also change the base's weights.
    keys.expect("init_lora_weights", True, False, "gaussian", "orthogonal", "eva")
    alpha, alphas = keys.number("lora_alpha"), _by_module(keys, "alpha_pattern")
    rank, ranks = keys.whole("r", None), _by_module(keys, "rank_pattern")
    stabilised, dropout = keys.flag("use_rslora", False), keys.number("lora_dropout", 0.0)
    if not 0.0 <= dropout < 1.0:
        raise keys.refused("lora_dropout", dropout, "a probability of at least 0 and below 1")
    keys.finish(_HARMLESS)
    whole: dict[str, Tensor] = {}
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_tensor_file(adapter / WEIGHTS).items():
        # Layers whose weights were saved in full, beside the adapter.
        bare = name.removeprefix(PREFIX).replace(".base_layer.", ".")
        match = _LORA.fullmatch(bare)
        if match is None:
            whole[bare] = tensor
        else:
            halves.setdefault(match[1], {})[f"{match[2] or ''}{match[3]}"] = tensor
    pairs = {}
    for module, pair in halves.items():
        embeds = "embedding_A" in pair
        down, up = (pair.get(f"embedding_{kind}" if embeds else kind) for kind in "AB")
        if down is None or up is None:
            raise CheckpointError(
                f"{adapter / WEIGHTS}: {module} has one of lora_A and lora_B only"
            )
        fits = down.ndim == up.ndim == 2 and len(down) == up.shape[1] > 0
        if not (fits and down.is_floating_point() and up.is_floating_point()):
            raise CheckpointError(
                f"{adapter / WEIGHTS}: {module} does not fit: lora_A {down.dtype} "
                f"{list(down.shape)}, lora_B {up.dtype} {list(up.shape)}"
            )
        own = len(down)
        if (said := _of_module(ranks, module, rank)) not in (None, own):
            raise CheckpointError(
                f"{adapter / WEIGHTS}: {module} has rank {own}, and {CONFIG} says {said:g}"
            )
        of_module = _of_module(alphas, module, alpha)
        scale = of_module / (math.sqrt(own) if stabilised else own)
        pairs[module] = Pair(down, up, scale, embeds)
    return Lora(values, pairs, whole, transposed, dropout)


def merged(
    tensors: Mapping[str, Tensor],
    adapter: Path,
    prefix: str,
    bare: Callable[[str], str] = str,
) -> dict[str, Tensor]:
    """The base's tensors with an adapter's merged into them, in the base's dtype.

    Args:
        tensors: Tensors of the base, by its file's names.
        adapter: The adapter's directory.
        prefix: Prefix of the base's family, which a file of a bare body lacks.
        bare: What ``tensors`` call one of the base's.

    Raises:
        CheckpointError: A tensor belongs to no weight of the base, or has another shape.
        ConfigError: A form of adapter that is not supported, by its key.
    """
    lora, found = read_adapter(adapter), dict(tensors)
    for name, tensor in lora.whole.items():
        found[_known(bare(name), found, prefix, adapter)] = tensor
    for module, pair in lora.pairs.items():
        target = _known(bare(f"{module}.weight"), found, prefix, adapter)
        weight = found[target]
        change = pair.up.float() @ pair.down.float()
        change = change.T if pair.embeds or lora.transposed else change
        if change.shape != weight.shape:
            raise CheckpointError(
                f"{adapter / WEIGHTS}: {module} does not fit: the base's weight is "
                f"{list(weight.shape)}, the change {list(change.shape)}"
            )
        found[target] = (weight.float() + pair.scale * change).to(weight.dtype)
    return found


def _known(name: str, tensors: Mapping[str, Tensor], prefix: str, adapter: Path) -> str:
    for each in (name, name.removeprefix(prefix), prefix + name):
        if each in tensors:
            return each
    raise CheckpointError(f"{adapter / WEIGHTS}: the base has no tensor {shortened(name)}")


def _by_module(keys: Keys, key: str) -> dict[str, float]:
    """Numbers by the end of a module's name.

    Raises:
        ConfigError: The library also takes regular expressions, which are not read.
    """
    values = keys.take(key, {})
    if not isinstance(values, dict) or not all(map(_NAME.fullmatch, values)):
        raise keys.refused(key, values, "an object of modules' names and numbers")
    numbers = Keys(values, f"{keys.where}: {key}")
    return {name: numbers.number(name) for name in values}


def _of_module(values: Mapping[str, float], module: str, default: _T) -> float | _T:
    """The first value whose name is that of ``module``, or the end of it."""
    return next((v for k, v in values.items() if f".{module}".endswith(f".{k}")), default)
