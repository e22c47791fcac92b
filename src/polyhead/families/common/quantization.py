"""``quantization_config`` of config.json: how a directory's weights became codes of few bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyhead.errors import ConfigError, shortened
from polyhead.families.common.keys import Keys

KEY = "quantization_config"
_WAY = "else load the model with the library that made it and save its weights unpacked"
_HARMLESS = {
    "fp8": ("activation_scheme", "modules_to_not_convert"),
    "gptq": (
        "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "dataset",
        "model_name_or_path", "model_file_base_name", "is_marlin_format", "lm_head", "meta",
        "quantizer", "format", "backend", "block_name_to_quantize",
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize", "batch_size", "pad_token_id", "disable_exllama",
        "use_exllama", "exllama_config", "max_input_length", "use_cuda_fp16", "model_seqlen",
        "cache_block_outputs", "tokenizer",
    ),
    "awq": (
        "modules_to_not_convert", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse",
        "exllama_config",
    ),
    "hqq": ("skip_modules",),
    "torchao": ("modules_to_not_convert", "untie_embedding_weights"),
    "mxfp4": ("modules_to_not_convert", "dequantize"),
    "modelopt": (
        "ignore", "config_groups", "producer", "kv_cache_scheme", "group_size",
        "kv_cache_quant_algo", "exclude_modules",
    ),
    "bitsandbytes": (
        "llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload",
        "llm_int8_has_fp16_weight", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
        "bnb_4bit_compute_dtype",
    ),
    "compressed-tensors": (
        "ignore", "quantization_status", "global_compression_ratio", "kv_cache_scheme", "version",
        "sparsity_config", "transform_config",
    ),
}  # fmt: skip
"""What changes no number of a weight, or is seen in the tensors themselves."""
_HARMLESS_OF_WEIGHTS = (
    "observer",
    "observer_kwargs",
    "actorder",
    "dynamic",
    "scale_dtype",
    "zp_dtype",
)


@dataclass(frozen=True)
class Scheme:
    """How weights became codes.

    Attributes:
        layout: How tensors hold them: "fp8", "gptq", "awq", "pack-quantized", "int-quantized",
            "float-quantized" or "nvfp4-pack-quantized" (compressed-tensors), "modelopt", "mxfp4",
            "bitsandbytes-4" or "bitsandbytes-8", "hqq", "torchao-int8" or "torchao-float8".
        bits: Of a code.
        rows: Of a weight that share a scale; None: all of them.
        numbers: Of a row that share a scale; None: all of them.
        plus: What is added to the zeros of a file.
        scale_bits: Of a scale, as files usually have them.
        zeros: Whether codes may have zeros other than the middle one.
        shuffled: Whether groups may not lie next to each other.
        unpacked: Whether such codes always become numbers.
    """

    layout: str
    bits: int
    rows: int | None
    numbers: int | None
    plus: int = 0
    scale_bits: int = 16
    zeros: bool = False
    shuffled: bool = False
    unpacked: bool = False

    @property
    def held_bits(self) -> float:
        """Bits that a number takes in memory, with its part of scales; 32: it is unpacked."""
        numbers, rows = self.numbers, self.rows
        if self.unpacked or self.shuffled or (numbers is not None and numbers % 32):
            return 32.0
        if numbers is None or rows is None:
            return float(self.bits)  # a scale for thousands
        return self.bits + (self.scale_bits + 8 * self.zeros) / (numbers * rows)


def read_scheme(values: Mapping[str, Any], where: object) -> Scheme | None:
    """What config.json's ``quantization_config`` says; None: weights are numbers.

    Args:
        values: The object of config.json.
        where: The file, for messages.

    Raises:
        ConfigError: A quantization that is not read, by the field.
    """
    scheme = values.get(KEY)
    if scheme is None:
        return None
    keys = _keys(scheme, f"{where}: {KEY}")
    method = keys.take("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        names = ", ".join(repr(name) for name in _READERS)
        raise keys.refused("quant_method", method, f"{names} ({_WAY})")
    found = _READERS[method](keys)
    keys.finish(_HARMLESS[method])
    return found


def _keys(values: Any, named: str) -> Keys:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{named} must be an object: got {shortened(values)}")
    return Keys(values, named)


def _fp8(keys: Keys) -> Scheme:
    keys.expect("fmt", "e4m3")
    return Scheme("fp8", 8, *_block(keys, "weight_block_size"), scale_bits=32)


def _block(keys: Keys, key: str) -> tuple[int, int]:
    size = keys.take(key)
    if not (isinstance(size, list) and len(size) == 2 and all(_is_count(n) for n in size)):
        raise keys.refused(key, size, "[rows, columns], such as [128, 128]")
    return size[0], size[1]


def _gptq(keys: Keys) -> Scheme:
    form = keys.choice("checkpoint_format", {"gptq": 1, "gptq_v2": 0}, "gptq")
    keys.expect("pack_dtype", "int32")
    zeros, shuffled = not keys.flag("sym", True), keys.flag("desc_act", False)
    bits, numbers = _bits(keys, "bits", 4, 8), _numbers(keys)
    return Scheme("gptq", bits, 1, numbers, form, zeros=zeros, shuffled=shuffled)


def _awq(keys: Keys) -> Scheme:
    keys.expect("version", "gemm", "GEMM")
    zeros = keys.flag("zero_point", True)
    return Scheme("awq", _bits(keys, "bits", 4), 1, _numbers(keys), zeros=zeros)


def _mxfp4(keys: Keys) -> Scheme:
    return Scheme("mxfp4", 4, 1, 32, scale_bits=8)


def _modelopt(keys: Keys) -> Scheme:
    keys.expect("quant_algo", "NVFP4")
    return Scheme("modelopt", 4, 1, 16, scale_bits=8, unpacked=True)


def _bitsandbytes(keys: Keys) -> Scheme:
    four, eight = (
        any([keys.flag(f"load_in_{bits}bit", False), keys.flag(f"_load_in_{bits}bit", False)])
        for bits in (4, 8)
    )
    if four == eight:
        raise keys.refused("load_in_4bit", four, "true, or load_in_8bit, but not both")
    keys.expect("bnb_4bit_quant_storage", "uint8")
    if eight:
        return Scheme("bitsandbytes-8", 8, 1, None)
    return Scheme("bitsandbytes-4", 4, 1, 64, scale_bits=32, unpacked=True)


def _torchao(keys: Keys) -> Scheme:
    keys.expect("include_input_output_embeddings", False)
    stated = keys.take("quant_type")
    if not isinstance(stated, Mapping) or [*stated] != ["default"]:
        wanted = f"an object with one config for all layers, 'default' ({_WAY})"
        raise keys.refused("quant_type", stated, wanted)
    part = _keys(stated["default"], f"{keys.where}: quant_type: default")
    name = part.take("_type")
    if not isinstance(name, str) or name not in _OF_TORCHAO:
        raise part.refused("_type", name, f"{', '.join(_OF_TORCHAO)} ({_WAY})")
    data = _keys(part.take("_data"), f"{part.where}: {name}")
    part.finish(("_version",))
    data.expect("group_size", None)  # of an older form, which is pickled
    dtype = data.take("weight_dtype", None)
    if dtype is not None and _OF_TORCHAO[name] == "torchao-float8":
        _keys(dtype, f"{data.where}: weight_dtype").expect("_data", "float8_e4m3fn")
    shared = _keys(data.take("granularity"), f"{data.where}: granularity")
    kind, sizes = shared.take("_type"), _keys(shared.take("_data", {}), str(shared.where))
    of_kind: dict[str, tuple[int | None, int | None]]
    of_kind = {"PerTensor": (None, None), "PerRow": (1, None)}
    if kind == "PerGroup":
        of_kind["PerGroup"] = 1, sizes.size("group_size")
    if not isinstance(kind, str) or kind not in of_kind:
        raise shared.refused("_type", kind, "PerTensor, PerRow or PerGroup")
    data.finish(("set_inductor_config", "act_mapping_type", "reduce_range", "weight_only_decode"))
    return Scheme(_OF_TORCHAO[name], 8, *of_kind[kind], scale_bits=32)


_OF_TORCHAO = {
    "Int8WeightOnlyConfig": "torchao-int8",
    "Int8DynamicActivationInt8WeightConfig": "torchao-int8",
    "Float8WeightOnlyConfig": "torchao-float8",
}


def _hqq(keys: Keys) -> Scheme:
    stated = _keys(keys.take("quant_config"), f"{keys.where}: quant_config")
    weights = _keys(stated.take("weight_quant_params"), f"{stated.where}: weight_quant_params")
    for key in ("scale_quant_params", "zero_quant_params"):
        stated.expect(key, None)
    stated.finish(("offload_meta",))
    weights.expect("view_as_float", False)
    bits, numbers = _bits(weights, "nbits", 8, 4, 2, 1), weights.size("group_size", None)
    weights.finish(("axis", "channel_wise", "optimize", "round_zero"))
    return Scheme("hqq", bits, 1, numbers, zeros=True, unpacked=True)


def _compressed(keys: Keys) -> Scheme:
    layout = keys.take("format")
    groups = keys.take("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise keys.refused("config_groups", groups, "an object of one group")
    (name, group), *_ = groups.items()
    part = _keys(group, f"{keys.where}: config_groups: {name}")
    part.take("targets", None)
    own = part.take("format", None)
    own_weights = _keys(part.take("weights"), f"{part.where}: weights")
    part.finish(("input_activations", "output_activations"))
    found = _weights(own_weights, layout if own is None else own, keys)
    own_weights.finish(_HARMLESS_OF_WEIGHTS)
    return found


def _weights(keys: Keys, layout: Any, above: Keys) -> Scheme:
    kinds = {
        "pack-quantized": "int", "int-quantized": "int", "float-quantized": "float",
        "nvfp4-pack-quantized": "float",
    }  # fmt: skip
    if not isinstance(layout, str) or layout not in kinds:
        raise above.refused("format", layout, ", ".join(repr(name) for name in kinds))
    keys.expect("type", kinds[layout])
    if layout == "nvfp4-pack-quantized":
        keys.expect("strategy", "tensor_group")
        keys.expect("group_size", 16)
        keys.expect("symmetric", True)
        _bits(keys, "num_bits", 4)
        return Scheme(layout, 4, 1, 16, scale_bits=8, unpacked=True)
    bits = _bits(keys, "num_bits", *((4, 8) if layout == "pack-quantized" else (8,)))
    zeros = not keys.flag("symmetric", True)
    strategy = keys.text("strategy", None)
    numbers, size = keys.take("group_size", None), keys.take("block_structure", None)
    if strategy is None:
        strategy = "group" if numbers not in (None, -1) else "channel"
    shared: dict[str, tuple[int | None, int | None]] = {
        "tensor": (None, None),
        "channel": (1, None),
    }
    if strategy == "group" and _is_count(numbers):
        shared["group"] = 1, numbers
    if strategy == "block" and size is not None:
        shared["block"] = _block(keys, "block_structure")
    if strategy not in shared:
        wanted = "'tensor', 'channel', 'group' or 'block', with its size"
        raise keys.refused("strategy", strategy, wanted)
    return Scheme(layout, bits, *shared[strategy], zeros=zeros)


def _bits(keys: Keys, key: str, *allowed: int) -> int:
    bits = keys.take(key)
    if bits not in allowed or not _is_count(bits):
        raise keys.refused(key, bits, " or ".join(str(each) for each in allowed))
    return int(bits)


def _numbers(keys: Keys) -> int | None:
    """The size of a group; None where a row is one."""
    size = keys.take("group_size")
    if size == -1:
        return None
    if not _is_count(size):
        raise keys.refused("group_size", size, "a whole number from 1, or -1 for whole rows")
    return int(size)


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


_READERS = {
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "hqq": _hqq,
    "torchao": _torchao,
}
