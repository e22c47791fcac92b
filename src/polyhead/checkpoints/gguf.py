"""GGUF files of decoders: metadata to a configuration, tensors to a state dict.

Two traps are invisible to every shape check. Files of the ``llama`` architecture keep the rows of q
and k in *interleaved* order, (2i, 2i + 1) being the pair that rotary embedding turns, while
polyhead turns (i, i + d/2) as Hugging Face checkpoints do. Files of ``gemma3`` keep the weights of
norms with the one added that Hugging Face checkpoints leave out. Both are put back on load; the
model that forgets it loads cleanly and talks nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from polyhead.checkpoints.gguf_file import GGUFFile
from polyhead.checkpoints.gguf_gemma import as_gemma
from polyhead.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from polyhead.checkpoints.keys import Keys
from polyhead.checkpoints.names import NameTable
from polyhead.checkpoints.parts import Parts, Progress, no_progress
from polyhead.checkpoints.rope_in import reach
from polyhead.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
    TransformerConfig,
)
from polyhead.errors import ConfigError

_ROPE_FREQUENCIES = "rope_freqs.weight"
_ROTATED = re.compile(r"layers\.(\d+)\.attention\.([qk])_proj\.")


@dataclass(frozen=True)
class _Architecture:
    """``interleaved``: q and k rows are stored in rotary pairs. ``qk_norm``: as in Qwen3.

    ``gemma``: the layers of Gemma 3.
    """

    interleaved: bool
    qk_norm: bool = False
    gemma: bool = False


ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture(interleaved=True),
    "qwen2": _Architecture(interleaved=False),
    "qwen3": _Architecture(interleaved=False, qk_norm=True),
    "gemma3": _Architecture(interleaved=False, qk_norm=True, gemma=True),
}

NAMES = NameTable(
    prefix="",
    modules={
        "token_embd": "embedding.tokens",
        "output_norm": "final_norm",
        "output": "head",
        "blk.{i}.attn_norm": "layers.{i}.attention_norm",
        "blk.{i}.attn_q": "layers.{i}.attention.q_proj",
        "blk.{i}.attn_k": "layers.{i}.attention.k_proj",
        "blk.{i}.attn_v": "layers.{i}.attention.v_proj",
        "blk.{i}.attn_output": "layers.{i}.attention.o_proj",
        "blk.{i}.attn_q_norm": "layers.{i}.attention.q_norm",
        "blk.{i}.attn_k_norm": "layers.{i}.attention.k_norm",
        "blk.{i}.post_attention_norm": "layers.{i}.attention_out_norm",
        "blk.{i}.post_ffw_norm": "layers.{i}.feed_forward_out_norm",
        "blk.{i}.ffn_norm": "layers.{i}.feed_forward_norm",
        "blk.{i}.ffn_gate": "layers.{i}.feed_forward.gate_proj",
        "blk.{i}.ffn_up": "layers.{i}.feed_forward.up_proj",
        "blk.{i}.ffn_down": "layers.{i}.feed_forward.down_proj",
    },
)

# Settings under the architecture's prefix that change no number the model computes.
_HARMLESS = frozenset(("rope.scaling.finetuned", "tensor_data_layout", "expert_used_count"))


def read_gguf(path: Path, progress: Progress = no_progress) -> Parts:
    """Reads a GGUF file.

    Args:
        path: the file.
        progress: called after every tensor; dequantising them is what takes the time.

    Raises:
        CheckpointError: the file is truncated, corrupt or not GGUF.
        ConfigError: its architecture, or a setting of it, is not supported (named).
    """
    file = GGUFFile(path)
    config = _config(file)
    tokenizer = tokenizer_from_gguf(file.metadata, path)
    renamed = NAMES.to_ours(name for name in file.tensors if name != _ROPE_FREQUENCIES)
    interleaved = ARCHITECTURES[file.metadata["general.architecture"]].interleaved
    offset = config.layers[0].norm.weight_offset
    state: dict[str, Tensor] = {}
    for done, (ours, theirs) in enumerate(renamed.items()):
        progress("reading tensors", done, len(renamed))
        tensor = file.tensor(theirs)
        if offset and ours.endswith("norm.weight"):
            tensor = tensor - offset
        state[ours] = _half_split(tensor, ours, config) if interleaved else tensor
    progress("reading tensors", len(renamed), len(renamed))
    return Parts(config, state, tokenizer, file_names=renamed)


def _config(file: GGUFFile) -> TransformerConfig:
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: general.architecture is {name!r}; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    keys = Keys(file.metadata, file.path, prefix=f"{name}.")
    layers = keys.num_layers("block_count")
    embed_dim = keys.whole("embedding_length")
    heads = _per_layer(keys, "attention.head_count", layers)
    kv_heads = _per_layer(keys, "attention.head_count_kv", layers, heads)
    hidden = _per_layer(keys, "feed_forward_length", layers)
    head_dim = keys.whole("attention.key_length", None)
    if head_dim is None:
        if embed_dim % heads[0]:
            raise keys.refused("attention.head_count", heads[0], f"a divisor of {embed_dim}")
        head_dim = embed_dim // heads[0]
    v_head_dim = keys.whole("attention.value_length", head_dim)
    norm = NormConfig("rmsnorm", eps=keys.number("attention.layer_norm_rms_epsilon"))
    max_positions = keys.whole("context_length")
    rope = _rope(keys, file, head_dim, max_positions)
    keys.expect("expert_count", 0)
    keys.expect("attention.causal", True)
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    vocab_size = keys.whole("vocab_size", len(tokens))

    def layer(i: int) -> LayerConfig:
        return LayerConfig(
            AttentionConfig(
                num_heads=heads[i],
                num_kv_heads=kv_heads[i],
                head_dim=head_dim,
                v_head_dim=None if v_head_dim == head_dim else v_head_dim,
                qkv_bias=f"blk.{i}.attn_q.bias" in file.tensors,
                out_bias=f"blk.{i}.attn_output.bias" in file.tensors,
                rope=rope,
                qk_norm=QKNormConfig(norm) if ARCHITECTURES[name].qk_norm else None,
            ),
            FeedForwardConfig(hidden[i], bias=f"blk.{i}.ffn_up.bias" in file.tensors),
            norm,
        )

    special = Keys(file.metadata, file.path, prefix="tokenizer.ggml.")
    eos = special.whole("eos_token_id", None)
    config = TransformerConfig(
        kind="decoder",
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        max_positions=reach(rope, max_positions),
        layers=tuple(layer(i) for i in range(layers)),
        final_norm=norm,
        head="untied" if "output.weight" in file.tensors else "tied",
        bos_token_id=special.whole("bos_token_id", None),
        eos_token_ids=() if eos is None else (eos,),
        pad_token_id=special.whole("padding_token_id", None),
    )
    if ARCHITECTURES[name].gemma:
        config = as_gemma(config, keys)
    keys.finish(_HARMLESS)
    return config


def _per_layer(keys: Keys, key: str, layers: int, default: list[int] | None = None) -> list[int]:
    """A setting that files give once for all layers, or as a list with one entry per layer."""
    value = keys.take(key) if default is None else keys.take(key, default)
    if not isinstance(value, list):
        value = [value] * layers
    if len(value) != layers or not all(type(entry) is int and entry > 0 for entry in value):
        raise keys.refused(key, value, f"a whole number of at least 1, or {layers} of them")
    return value


def _rope(keys: Keys, file: GGUFFile, head_dim: int, max_positions: int) -> RopeConfig:
    theta = keys.number("rope.freq_base", 10_000.0)
    rotated = keys.whole("rope.dimension_count", head_dim)
    if not 2 <= rotated <= head_dim or rotated % 2:
        raise keys.refused("rope.dimension_count", rotated, f"an even number up to {head_dim}")
    dim = None if rotated == head_dim else rotated
    kind = keys.take("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", None) or keys.number("rope.scale_linear", None)
    if kind not in ("none", "linear", "yarn"):
        raise keys.refused("rope.scaling.type", kind, "'none', 'linear' or 'yarn'")
    if _ROPE_FREQUENCIES in file.tensors:
        if kind == "yarn" or (factor or 1.0) != 1.0:
            raise ConfigError(
                f"{file.path}: {_ROPE_FREQUENCIES} together with rope scaling {kind!r} "
                f"by {factor} is not supported"
            )
        return _rope_by_pair(keys, file, theta, dim, max_positions)
    if kind == "none" or (factor or 1.0) == 1.0:
        keys.take("rope.scaling.original_context_length", None)
        return RopeConfig(theta, dim=dim)
    original = keys.whole("rope.scaling.original_context_length", max_positions)
    if kind == "linear":
        return RopeConfig(theta, "linear", dim=dim, factor=factor)
    keys.expect("rope.scaling.attn_factor", 1.0)
    keys.expect("rope.scaling.yarn_ext_factor", 1.0)
    keys.expect("rope.scaling.yarn_attn_factor", 1.0)
    return RopeConfig(
        theta,
        "yarn",
        dim=dim,
        factor=factor,
        original_max_positions=original,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", None),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", None),
    )


def _rope_by_pair(
    keys: Keys, file: GGUFFile, theta: float, dim: int | None, max_positions: int
) -> RopeConfig:
    """Llama 3's scaling arrives worked out: a divisor for the frequency of every rotated pair.

    That is what ``longrope`` computes when its short and long factors are the same.
    """
    keys.take("rope.scaling.original_context_length", None)
    divisors = tuple(file.tensor(_ROPE_FREQUENCIES).flatten().tolist())
    return RopeConfig(
        theta,
        "longrope",
        dim=dim,
        original_max_positions=max_positions,
        attention_factor=1.0,
        short_factor=divisors,
        long_factor=divisors,
    )


def _half_split(tensor: Tensor, name: str, config: TransformerConfig) -> Tensor:
    """Puts interleaved rows of q and k (and their biases) into half-split order, head by head."""
    found = _ROTATED.match(name)
    if found is None or int(found[1]) >= len(config.layers):
        return tensor
    attention = config.layers[int(found[1])].attention
    if not isinstance(attention, AttentionConfig) or attention.rope is None:
        return tensor
    heads = attention.num_heads if found[2] == "q" else attention.num_kv_heads
    if tensor.shape[0] != heads * attention.head_dim:
        return tensor  # misshapen: reported with its name when the state is checked
    rotated = attention.rope.dim or attention.head_dim
    rows = tensor.reshape(heads, attention.head_dim, -1)
    pairs = rows[:, :rotated].reshape(heads, rotated // 2, 2, -1).transpose(1, 2).flatten(1, 2)
    return torch.cat((pairs, rows[:, rotated:]), dim=1).reshape(tensor.shape)
