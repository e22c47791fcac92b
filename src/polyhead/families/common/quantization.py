"""``quantization_config`` of config.json: weights in 8-bit floats with a scale per block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyhead.errors import ConfigError
from polyhead.families.common.keys import Keys

KEY = "quantization_config"
_HARMLESS = ("activation_scheme", "modules_to_not_convert")


def read_blocks(values: Mapping[str, Any], where: object) -> tuple[int, int] | None:
    """Rows and columns of a block, as config.json's ``quantization_config`` says; None: no blocks.

    Args:
        values: The object of config.json.
        where: The file, for messages.

    Raises:
        ConfigError: Another quantisation than this one, by the field.
    """
    scheme = values.get(KEY)
    if scheme is None:
        return None
    if not isinstance(scheme, Mapping):
        raise ConfigError(f"{where}: {KEY} must be an object: got {scheme!r}")
    keys = Keys(scheme, f"{where}: {KEY}")
    if (method := keys.take("quant_method")) != "fp8":
        raise keys.refused("quant_method", method, "'fp8'")
    keys.expect("fmt", "e4m3")
    size = keys.take("weight_block_size")
    if not (isinstance(size, list) and len(size) == 2 and all(_is_count(n) for n in size)):
        raise keys.refused("weight_block_size", size, "[rows, columns], such as [128, 128]")
    keys.finish(_HARMLESS)
    return size[0], size[1]


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0
