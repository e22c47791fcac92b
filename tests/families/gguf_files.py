"""GGUF files of tiny models, written with the gguf package as llama.cpp's converter writes them.

What the converter changes is written down here again and not taken from polyhead. Settings, names
and layouts were compared with the converter's and the loader's own code for bert, nomic-bert, t5,
smollm3, llama (with and without experts), llama4, gemma, gemma2, seed_oss, ernie4_5, ernie4_5-moe,
dots1, hunyuan-dense, hunyuan_vl, bailingmoe2, exaone4, olmo, olmo2 (OLMo 2 and 3), qwen2moe,
qwen3moe, phi2, phi3 and phimoe; for t5encoder, jina-bert-v3, llama-embed, hunyuan-moe, minimax-m2,
lfm2 and lfm2moe with the converter's alone.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

Change = Callable[[str, Tensor, Any], Iterable[tuple[str, Tensor]]]
_QKV = re.compile(r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(weight|bias)")
_EXPERT = re.compile(r"(.*(?:\.experts|altup_\w*projections))\.\d+\.(.*)")

# Settings under the architecture's prefix and the attributes of transformers' config.
_SETTINGS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_used_count": "num_experts_per_tok",
    "vocab_size": "vocab_size",
}


def unchanged(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """What the converter makes of a tensor, where it changes nothing."""
    return [(name, tensor)]


def no_more(config: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class GgufCase:
    """How a family's GGUF files are written.

    Attributes:
        arch: ``general.architecture``.
        settings: From transformers' config, settings beyond ``_SETTINGS``; None takes one out.
        change: What the converter does to a tensor, by Hugging Face's name: the names and tensors
            that it becomes (none: it is left out). Experts are stacked beforehand.
        options: Added to the case's tiny config.
        stated: From the tensors by Hugging Face's name, settings without a prefix.
        kind: Of the tokenizer: ``tokenizer.ggml.model``.
        written: Whether polyhead writes such files of Hugging Face directories.
    """

    arch: str
    settings: Callable[[Any], Mapping[str, Any]] = no_more
    change: Callable[[str, Tensor, Any], Iterable[tuple[str, Tensor]]] = unchanged
    options: Mapping[str, Any] | None = None
    stated: Callable[[Mapping[str, Tensor]], Mapping[str, Any]] = no_more
    kind: str = "gpt2"
    written: bool = True


def interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Half-split rows to rotary pairs, as llama.cpp's converter writes q and k of Llama."""
    rows = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return rows.swapaxes(1, 2).reshape(tensor.shape)


def paired(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """The converter's change of Llama and of what it treats like it."""
    for part, heads in (
        ("q_proj", config.num_attention_heads),
        ("k_proj", config.num_key_value_heads),
    ):
        if part in name:
            tensor = interleaved(tensor, heads)
    yield name, tensor


def plus_one(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """Norms near 1 are stored whole."""
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def choice_bias(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
    """The bias of the choice of experts becomes a leaf."""
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def fused_qkv(change: Change) -> Change:
    """The change of files that have queries, keys and values in one tensor."""
    waiting: dict[str, dict[str, Tensor]] = {"weight": {}, "bias": {}}

    def fused(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
        found = _QKV.fullmatch(name)
        if found is None:
            yield from change(name, tensor, config)
            return
        parts = waiting[found[3]]
        parts[found[2]] = tensor
        if parts.keys() == {*"qkv"}:
            rows = [parts.pop(each) for each in "qkv"]
            yield f"blk.{found[1]}.attn_qkv.{found[3]}", torch.cat(rows)

    return fused


def routed(config: Any) -> Mapping[str, Any]:
    """What the converter says of DeepSeek's mixture and of those like it."""
    return {
        "expert_count": config.n_routed_experts,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob or None,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "leading_dense_block_count": config.first_k_dense_replace,
    }


def separated(
    part: str, drop: str = ""
) -> Callable[[str, Tensor, Any], Iterable[tuple[str, Tensor]]]:
    """The change of a fused tensor ``[G, H/G + 2, D]`` to all queries, all keys, all values.

    Args:
        part: In the tensor's name.
        drop: Taken out of every name.
    """

    def change(name: str, tensor: Tensor, config: Any) -> Iterable[tuple[str, Tensor]]:
        if part in name:
            heads = config.num_attention_heads
            groups = getattr(config, "num_kv_heads", None) or heads
            size = config.hidden_size // heads
            rows = tensor.reshape(groups, heads // groups + 2, size, *tensor.shape[1:])
            tensor = torch.cat(
                [rows[:, :-2].flatten(0, 2), rows[:, -2].flatten(0, 1), rows[:, -1].flatten(0, 1)]
            )
        yield name.replace(drop, ""), tensor

    return change


def write(path: Path, case: GgufCase, model: Any) -> Path:
    """Writes a model's weights, as transformers saves them, to ``path``."""
    config = copy.deepcopy(model.config)
    # Of layers that differ in a size, the one that config.json states.
    config.allow_global_per_layer_attribute_access = True
    writer = gguf.GGUFWriter(path, case.arch)
    settings = {key: getattr(config, name, None) for key, name in _SETTINGS.items()}
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    head_dim = getattr(config, "head_dim", None)
    settings |= {"rope.freq_base": theta}
    settings |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    for key, value in {**settings, **case.settings(config)}.items():
        _add(writer, f"{case.arch}.{key}", value)
    _TOKENIZERS[case.kind](writer, config.vocab_size)
    if case.kind != "gpt2" and hasattr(config, "type_vocab_size"):
        writer.add_token_type_count(config.type_vocab_size)
    model.save_pretrained(path.parent / "for-gguf")
    tensors = _stacked(load_file(path.parent / "for-gguf" / "model.safetensors"))
    for key, value in case.stated(tensors).items():
        _add(writer, key, value)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == case.arch)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for theirs, tensor in tensors.items():
        for name, made in case.change(theirs, tensor, config):
            called = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
            writer.add_tensor(called, made.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A tensor per expert as one for all of them, under the name without the number."""
    found: dict[str, list[Tensor]] = {}
    for name in sorted(tensors, key=lambda each: [int(n) for n in re.findall(r"\d+", each)]):
        match = _EXPERT.fullmatch(name)
        found.setdefault(f"{match[1]}.{match[2]}" if match else name, []).append(tensors[name])
    return {name: torch.stack(each) if len(each) > 1 else each[0] for name, each in found.items()}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        add = {bool: "bool", int: "uint32", float: "float32", str: "string"}[type(value)]
        getattr(writer, f"add_{add}")(key, value)


def _byte_level(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokens = ["<|endoftext|>", *map(chr, range(33, 33 + min(vocab_size - 2, 80))), '!"']
    tokens += [f"[PAD{i}]" for i in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (vocab_size - 1))
    writer.add_token_merges(['! "'])
    writer.add_eos_token_id(0)


def _word_pieces(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    control = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [mark + chr(97 + i) for mark in ("▁", "") for i in range(26)]
    tokens = (control + letters + [f"▁[unused{i}]" for i in range(vocab_size)])[:vocab_size]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(control) + [1] * (vocab_size - len(control)))


def _unigrams(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *map(chr, range(97, 123))]
    unused = vocab_size - len(pieces)
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces + [f"[PAD{i}]" for i in range(unused)])
    writer.add_token_scores([0.0] * 3 + [-2.0] * (len(pieces) - 3) + [-10000.0] * unused)
    writer.add_token_types([3, 3, 2] + [1] * (len(pieces) - 3) + [5] * unused)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(2)


_TOKENIZERS = {"gpt2": _byte_level, "bert": _word_pieces, "t5": _unigrams}
