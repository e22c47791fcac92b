"""From a name, a directory or a file to a model that is ready to run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyhead._utils.paths import kind_of
from polyhead.checkpoints import adapters
from polyhead.checkpoints.catalogue import find
from polyhead.checkpoints.formats.ctranslate2 import read_ctranslate2
from polyhead.checkpoints.formats.gguf import read_gguf
from polyhead.checkpoints.formats.hugging_face import read_directory
from polyhead.checkpoints.formats.parts import Parts, Progress, no_progress
from polyhead.checkpoints.formats.sentence_modules import Sentences
from polyhead.checkpoints.generation_config import GenerationConfig
from polyhead.checkpoints.tokenizers.no_tokenizer import NoTokenizer
from polyhead.checkpoints.tokenizers.tokenizer import Tokenizer
from polyhead.config import TransformerConfig
from polyhead.errors import CheckpointError, ConfigError, shortened
from polyhead.layers.quantized import QuantizedMatrix
from polyhead.models.quantized import put_blocks, quantizable
from polyhead.models.transformer import Transformer
from polyhead.quantization import unpack

Made = TypeVar("Made", bound=nn.Module)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Checkpoint:
    """A loaded model with what belongs to it.

    Args:
        config: what the model's arithmetic depends on.
        model: the model, in evaluation mode.
        tokenizer: None where the checkpoint has none; asking for it is then an error.
        origin: in words, where it was found.
        ignored: tensors of the file that the model's outputs do not depend on.
        family: the ``model_type`` of the family, which saving tries first.
        generation: what the files say about generating.
        target_tokenizer: of the texts that are written, where it is another than ``tokenizer``.
        pooling: how an encoder's files make one vector of a text's hidden states: "mean", "first",
            ..., several joined by "+", or as they call it.
        sentences: what such files say beside it: prompts, layers behind the pooling, lengths.
        left_out: modules of a multimodal checkpoint beside its text model, by the names of its
            files: ``("vision_tower", "multi_modal_projector")``. ``ignored`` has their tensors.
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: Transformer,
        tokenizer: Tokenizer | None,
        origin: str,
        ignored: tuple[str, ...] = (),
        family: str | None = None,
        generation: GenerationConfig | None = None,
        target_tokenizer: Tokenizer | None = None,
        pooling: str = "mean",
        left_out: tuple[str, ...] = (),
        sentences: Sentences | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.origin = origin
        self.ignored = ignored
        self.left_out = left_out
        self.family = family
        self.pooling = pooling
        self.sentences = sentences or Sentences()
        self.generation = generation or GenerationConfig()
        self._tokenizer, self._target_tokenizer = tokenizer, target_tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; where the checkpoint holds none, one that refuses text."""
        return NoTokenizer(self.origin) if self._tokenizer is None else self._tokenizer

    @property
    def target_tokenizer(self) -> Tokenizer:
        """The tokenizer of target texts; ``tokenizer`` if both sides share one."""
        return self.tokenizer if self._target_tokenizer is None else self._target_tokenizer


def load_checkpoint(
    source: str | os.PathLike[str],
    dtype: torch.dtype | Literal["auto"] | None = torch.float32,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
    adapter: str | os.PathLike[str] | None = None,
    family: str | None = None,
) -> Checkpoint:
    """Loads a trained model.

    Args:
        source: a known name (``"smollm2"``), a Hugging Face or CTranslate2 directory, a ``.gguf``
            file, or a hub id ``"org/name"``.
        dtype: dtype of the weights; ``"auto"``: that of most of the file's numbers. None: quantized
            weights of a GGUF file or a Hugging Face directory stay as it holds them, mapped into
            memory, where native code reads their type (on a CPU); all other weights are float32,
            but those of 16 bits beside quantized ones in a directory stay too.
        progress: called as ``progress(step, done, total)`` while a GGUF file or a
            CTranslate2 directory is read.
        device: where the weights go, one tensor after the other.
        adapter: the directory of a LoRA adapter (PEFT), merged into the weights. Given as
            ``source``, the base is the one that it names.
        family: a ``model_type`` that a Hugging Face directory is read as, whatever its own: for
            one that only has another name. A key or a tensor that does not fit is an error.

    Raises:
        ValueError: an unknown dtype, or a device that is unavailable.
        ModelNotFoundError: there is no such model; the message says what there is.
        CheckpointError: a file is truncated, corrupt, or its tensors do not fit its configuration.
        ConfigError: the configuration is not understood or not supported.
    """
    if dtype not in (None, "auto", *_FLOATS):
        raise ValueError(
            f"dtype must be one of {', '.join(str(choice) for choice in _FLOATS)}, 'auto' or None: "
            f"got {shortened(dtype)}"
        )
    where = _device(device)
    if adapter is not None and not isinstance(adapter, str | os.PathLike):
        raise TypeError(f"adapter must be the path of a directory: got {type(adapter).__name__}")
    if adapter is None and kind_of(Path(source) / adapters.CONFIG) == "file":
        adapter, source = source, adapters.base_of(Path(source))
    resolved = find(source)
    if adapter is not None and resolved.format != "hugging_face":
        raise ValueError(f"adapter is merged into a Hugging Face directory: got {source}")
    if family is not None and resolved.format != "hugging_face":
        raise ValueError(f"family is for a Hugging Face directory: got {source}")
    keep = dtype is None and where.type == "cpu"
    if resolved.format == "gguf":
        parts = read_gguf(resolved.path, progress or no_progress, keep=keep)
    elif resolved.format == "ctranslate2":
        parts = read_ctranslate2(resolved.path, progress or no_progress)
    else:
        parts = read_directory(
            resolved.path,
            None if adapter is None else Path(adapter),
            keep=keep,
            dtype=torch.float32 if dtype is None else None if dtype == "auto" else dtype,
            family=family,
        )
    if dtype == "auto":
        dtype = _commonest_dtype(parts)
    elif dtype is None:
        dtype = torch.float32
    model = build(parts, resolved.path, dtype, where)
    return Checkpoint(
        parts.config,
        model,
        parts.tokenizer,
        resolved.origin,
        parts.ignored,
        parts.family,
        parts.generation,
        parts.target_tokenizer,
        parts.pooling,
        parts.left_out,
        parts.sentences,
    )


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found, dtype=torch.float32)
    except (RuntimeError, AssertionError, TypeError) as error:  # a missing device
        first = str(error).partition("\n")[0]
        raise ValueError(f"device {device!r} is unavailable: {first}") from error
    if found.type == "meta":
        raise ValueError("device must be one that holds numbers: got 'meta'")
    return found


def _commonest_dtype(parts: Parts) -> torch.dtype:
    counts: Counter[torch.dtype] = Counter()
    for tensor in parts.state.values():
        if tensor.dtype in _FLOATS:
            counts[tensor.dtype] += tensor.numel()
    return counts.most_common(1)[0][0] if counts else torch.float32


def build(
    parts: Parts,
    where: object,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Transformer:
    """The model of a configuration and its tensors, in evaluation mode; see ``build_as``."""
    return build_as(Transformer, parts, where, dtype, device)


def build_as(
    make: Callable[[TransformerConfig], Made],
    parts: Parts,
    where: object,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Made:
    """The module of a configuration and its tensors, in evaluation mode.

    Args:
        make: makes it, with weights that are replaced.
        parts: what a reader handed over.
        where: the file or directory, for messages.
        dtype: dtype of the weights.
        device: where they go.

    Raises:
        CheckpointError: a tensor is missing, one too many, misshapen or quantized; or the tokenizer
            has more tokens than the model.
        ConfigError: the sizes do not go together, or are beyond all bounds.
    """
    _check_layers(parts, where)
    try:
        with torch.device("meta"), _Unfilled():
            model = make(parts.config)
    except (RuntimeError, OverflowError, TypeError) as error:
        # torch's message for a size beyond its integers, with a C++ stack trace
        words = str(error).partition("\n")[0]
        raise ConfigError(f"{where}: sizes that no tensor can have: {words}") from error
    empty = model.state_dict()
    _check(parts, {name: tuple(tensor.shape) for name, tensor in empty.items()}, where)
    _check_kinds(parts, {name for name in empty if not empty[name].is_floating_point()}, where)
    given, blocks = dict(parts.state), {}
    for name, each in parts.blocks.items():
        if quantizable(model, name):
            blocks[name] = each
        else:
            given[name] = unpack(each.octets, each.kind, scales=each.scales)
    vocab_size = parts.config.vocab_size
    source_size = parts.config.encoder.vocab_size or vocab_size
    target = parts.target_tokenizer or parts.tokenizer
    for tokenizer, size in ((parts.tokenizer, source_size), (target, vocab_size)):
        if tokenizer is not None and tokenizer.vocab_size > size:
            raise CheckpointError(
                f"{where}: the tokenizer has {tokenizer.vocab_size} tokens, "
                f"the model's vocabulary {size}"
            )
    # Buffers are numbers that decide something (which expert): they stay as precise as they are.
    buffers = {name for name, _ in model.named_buffers()}
    held: set[tuple[object, object]] = set()

    def own(name: str, tensor: Tensor) -> Tensor:
        """A copy for this parameter: a file may use the same memory under several names."""
        found = tensor.to(device, tensor.dtype if name in buffers else dtype).contiguous()
        place = found.untyped_storage()._cdata, found.storage_offset()
        if place in held:
            found = found.clone()
        held.add(place)
        return found

    state = {name: own(name, tensor) for name, tensor in given.items()}
    for name, each in blocks.items():
        octets = each.octets.to(device).contiguous()
        state |= put_blocks(model, name, octets, each.kind, each.scales)
    model.load_state_dict(state, strict=True, assign=True)
    if blocks:
        for module in model.modules():
            if isinstance(module, QuantizedMatrix):
                module.like = module.like.to(dtype)
        model.requires_grad_(False)
    return model.eval()


class _Unfilled(TorchFunctionMode):
    """Leaves new parameters uninitialised: they are about to be replaced.

    On the meta device there is nothing to fill anyway, but trying to costs a second of imports.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _check_layers(parts: Parts, where: object) -> None:
    """Every layer and every expert has a tensor, and no head is larger than all of them.

    Without this a model of ten thousand layers is built for a minute, and rotary frequencies of
    a hundred million features are computed, before a shape tells that the file has none for them.
    """
    shapes = parts.shapes
    stored = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    config = parts.config
    for layer in dict.fromkeys(config.weights_of) or range(len(config.layers)):
        if str(layer) not in stored:
            raise CheckpointError(
                f"{where}: the tensors of layer {layer} are missing: the configuration has "
                f"{len(config.layers)} layers"
            )
    layers = (*config.layers, *config.encoder_layers)
    networks = [network for layer in layers for network in layer.networks]
    experts = [getattr(network, "num_experts", 0) for network in networks]
    if max(experts, default=0) > len(shapes):
        raise CheckpointError(
            f"{where}: the configuration has {max(experts):,} experts, more than there are tensors"
        )
    head = max((getattr(layer.attention, "rope_head_dim", 0) for layer in layers), default=0)
    longest = max((max(shape, default=0) for shape in shapes.values()), default=0)
    if head > longest:
        raise CheckpointError(
            f"{where}: the configuration has heads of {head:,} features, more than any tensor: the "
            f"longest has {longest:,}"
        )


def _check(parts: Parts, expected: Mapping[str, tuple[int, ...]], where: object) -> None:
    """No tensor missing, none too many, every one of the right shape."""
    shapes = parts.shapes
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise CheckpointError(
            f"{where}: tensor {shortened(missing[0])} is missing{_others(missing)}"
        )
    extra = [name for name in shapes if name not in expected]
    if extra:
        raise CheckpointError(
            f"{where}: tensor {_named(parts, extra[0])} is one that the configuration has no place "
            f"for{_others(extra)}"
        )
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise CheckpointError(
                f"{where}: tensor {_named(parts, name)} must have shape {list(expected[name])}: "
                f"got {list(shape)}"
            )


def _check_kinds(parts: Parts, whole: set[str], where: object) -> None:
    """Every tensor holds floats, or int64 where it is one of ``whole`` numbers."""
    for name, tensor in parts.state.items():
        kinds = (torch.int64,) if name in whole else _FLOATS
        if tensor.dtype not in kinds:
            raise CheckpointError(
                f"{where}: tensor {_named(parts, name)} has dtype {_short(tensor)}; only "
                f"{', '.join(str(choice).removeprefix('torch.') for choice in kinds)} can be read"
            )


def _named(parts: Parts, name: str) -> str:
    """A tensor as messages name it: the file's name first."""
    theirs = (parts.file_names or {}).get(name, name)
    return shortened(theirs) if theirs == name else f"{shortened(theirs)} ({name})"


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
