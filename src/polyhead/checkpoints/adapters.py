"""LoRA adapters, as the PEFT library saves them, merged into the weights of their base.

    W' = W + scale · B A,     scale = alpha / r, or alpha / √r (rank-stabilised)

Hu et al. 2022; Kalajdzievski 2023. Names in the file are those of the base's own files, behind
``base_model.model.``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from polyhead.checkpoints.json_file import read_json
from polyhead.checkpoints.safetensors_files import read_tensor_file
from polyhead.errors import CheckpointError
from polyhead.families.common.keys import Keys

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LORA = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
# They say where an adapter came from or how it was trained; what was trained stands in the weights.
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
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
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
            f"{adapter / CONFIG}: base_model_name_or_path names no model: got {base!r}; load the "
            f"base with adapter={str(adapter)!r}"
        )
    return base


def merged(tensors: Mapping[str, Tensor], adapter: Path, prefix: str) -> dict[str, Tensor]:
    """The base's tensors with an adapter's merged into them, in the base's dtype.

    Args:
        tensors: Of the base, by its file's names.
        adapter: The adapter's directory.
        prefix: Of the base's family, which a file of a bare body lacks.

    Raises:
        CheckpointError: A tensor belongs to no weight of the base, or has another shape.
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
    alpha, patterns = keys.number("lora_alpha"), keys.take("alpha_pattern", {})
    stabilised = keys.flag("use_rslora", False)
    keys.finish(_HARMLESS)
    found = dict(tensors)
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_tensor_file(adapter / WEIGHTS).items():
        # A layer whose weight was saved whole beside its adapter.
        bare = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        match = _LORA.fullmatch(bare)
        if match is None:
            found[_known(bare, found, prefix, adapter)] = tensor
        else:
            kind = f"{match[2] or ''}{match[3]}"
            pairs.setdefault(match[1], {})[kind] = tensor
    for module, pair in pairs.items():
        target = _known(f"{module}.weight", found, prefix, adapter)
        embeds = "embedding_A" in pair
        down, up = (pair.get(f"embedding_{kind}" if embeds else kind) for kind in "AB")
        if down is None or up is None:
            raise CheckpointError(
                f"{adapter / WEIGHTS}: {module} has one of lora_A and lora_B only"
            )
        own = next((v for key, v in patterns.items() if _matches(key, module)), alpha)
        rank = down.shape[0]
        scale = own / (math.sqrt(rank) if stabilised else rank)
        weight = found[target]
        try:
            change = up.float() @ down.float()
            change = change.T if embeds or transposed else change
            sum_ = weight.float() + scale * change.view(weight.shape)
        except RuntimeError as error:
            raise CheckpointError(f"{adapter / WEIGHTS}: {module} does not fit: {error}") from error
        found[target] = sum_.to(weight.dtype)
    return found


def _known(name: str, tensors: Mapping[str, Tensor], prefix: str, adapter: Path) -> str:
    for each in (name, name.removeprefix(prefix), prefix + name):
        if each in tensors:
            return each
    raise CheckpointError(f"{adapter / WEIGHTS}: the base has no tensor {name!r}")


def _matches(pattern: str, module: str) -> bool:
    return re.fullmatch(rf"(.*\.)?{re.escape(pattern)}", module) is not None
