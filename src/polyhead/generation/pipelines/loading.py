"""``polyhead.load``: a model by its name, ready to use."""

from __future__ import annotations

import os
import warnings
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, overload

import torch

from polyhead.checkpoints import Checkpoint, Progress, load_checkpoint
from polyhead.errors import UnsupportedError
from polyhead.generation.decoding.options import GenerationOptions
from polyhead.generation.pipelines.encoder_decoder import EncoderDecoder
from polyhead.generation.pipelines.language_model import LanguageModel
from polyhead.generation.pipelines.multi_vector_encoder import MultiVectorEncoder
from polyhead.generation.pipelines.speech_to_text import SpeechToText
from polyhead.generation.pipelines.text_encoder import TextEncoder
from polyhead.generation.pipelines.text_to_text import TextToText
from polyhead.models.int8_activations import round_activations
from polyhead.models.quantized import pack_weights
from polyhead.quantization import block_type, packable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Model: TypeAlias = LanguageModel | TextEncoder | TextToText | SpeechToText
"""What ``load`` makes."""

Expected = TypeVar("Expected", LanguageModel, TextEncoder, TextToText, SpeechToText)


_Dtype: TypeAlias = str | torch.dtype | None
_Path: TypeAlias = str | os.PathLike[str]


class _Options(TypedDict, total=False):
    device: str | torch.device
    adapter: _Path | None
    progress: Progress | None
    quantize: str | None
    activations: str | None
    family: str | None


@overload
def load(
    source: Literal["smollm2", "gemma3-270m"],
    dtype: _Dtype = None,
    **options: Unpack[_Options],
) -> LanguageModel: ...
@overload
def load(
    source: Literal["minilm"],
    dtype: _Dtype = None,
    **options: Unpack[_Options],
) -> TextEncoder: ...
@overload
def load(
    source: Literal["whisper-tiny.en"],
    dtype: _Dtype = None,
    **options: Unpack[_Options],
) -> SpeechToText: ...
@overload
def load(
    source: _Path,
    dtype: _Dtype = None,
    **options: Unpack[_Options],
) -> Any: ...
@overload
def load(
    source: _Path,
    dtype: _Dtype = None,
    *,
    expect: type[Expected],
    **options: Unpack[_Options],
) -> Expected: ...
def load(
    source: _Path,
    dtype: _Dtype = None,
    *,
    device: str | torch.device = "cpu",
    adapter: _Path | None = None,
    progress: Progress | None = None,
    quantize: str | None = None,
    activations: str | None = None,
    family: str | None = None,
    expect: type[Any] | None = None,
) -> Model:
    """Loads a model with its tokenizer.

    Args:
        source: a known name (``"smollm2"``), a Hugging Face or CTranslate2 directory, a ``.gguf``
            file, or a hub id ``"org/name"``.
        dtype: of the weights: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"auto"`` (that of
            most of the file's numbers) or a ``torch.dtype``. None: float32, but on a CPU quantized
            weights of a GGUF file or a Hugging Face directory stay as the file holds them, mapped
            into memory (docs/quantized.md). Such a model computes the same numbers in a quarter of
            the memory; ``to(torch.bfloat16)`` makes its
            activations bfloat16. What changes weights (training, conversion) needs a dtype.
        device: where the model runs: ``"cpu"``, ``"cuda"``, ...
        adapter: the directory of a LoRA adapter (PEFT), merged into the weights
            (``attach_adapter`` keeps one apart). Given as ``source``, the base is the one that it
            names.
        progress: called with what is being done, how much is done, and how much there is.
        quantize: a type of GGUF blocks that numbers are packed as, such as ``"Q8_0"`` (8.5 bits a
            weight) or ``"Q4_K"`` (4.5 bits): linear modules, the table of embeddings and the head,
            on a CPU. Weights that the file holds in blocks stay so where ``dtype`` is None. None:
            nothing is packed.
        activations: ``"int8"``: what multiplies quantized weights is rounded to 8 bits, 32 numbers
            at a time with a scale of their own, and products are sums of whole numbers, as
            llama.cpp computes. Prompts, decoding and batches are faster, and logits are no longer
            those of the unpacked weights (docs/performance.md says by how much). None: they stay as
            they are.
        family: a ``model_type`` that a Hugging Face directory is read as, whatever its own says,
            such as ``"llama"`` for a model that is one under another name (the error for an
            unknown type names the nearest). A key or a tensor that does not fit is an error.
            Code of its own may still compute otherwise, which no file shows.
        expect: the class that the caller needs; a model of another kind is then an error, and type
            checkers know what comes. Without it they know the classes of known names, and of
            others nothing.

    Returns:
        A ``LanguageModel`` for a decoder, a ``TextEncoder`` for an encoder, a ``TextToText`` for
        an encoder-decoder (``SpeechToText`` where it reads sound), in evaluation mode. What
        generation_config.json says is in ``options``; ``do_sample: true`` in it means that texts
        are drawn, as in transformers: give ``temperature=0`` for greedy ones.

    Raises:
        ModelNotFoundError: nothing of that name is here; says what is and how to get one.
        CheckpointError: a file is truncated, corrupt, or does not fit its configuration.
        ConfigError: the configuration says something impossible or not understood.
        UnsupportedError: an encoder of images, a way of generating that is not built, or another
            kind than ``expect``; ``activations`` for weights that are not in blocks, or in blocks
            of a type that does not take them (the message names it); ``quantize`` on another device
            than a CPU, or for a model without a matrix that can be packed.
        ValueError: an unknown dtype or type of blocks, or a device that is unavailable.
        TypeError: an argument of another kind.
    """
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"source must be a model's name or a path, as text: got {type(source).__name__}"
        )
    if activations not in (None, "int8"):
        raise ValueError(f"activations must be 'int8' or None: got {activations!r}")
    if quantize is not None and quantize not in packable():
        raise ValueError(f"quantize must be one of {', '.join(packable())}: got {quantize!r}")
    if quantize is not None and torch.device(device).type != "cpu":
        raise UnsupportedError(f"quantize={quantize!r} needs device='cpu': got {str(device)!r}")
    checkpoint = load_checkpoint(
        source, _dtype(dtype), progress, device=device, adapter=adapter, family=family
    )
    if quantize is not None:
        pack_weights(checkpoint.model, block_type(quantize))
    if activations is not None:
        round_activations(checkpoint.model)
    model = _wrapped(checkpoint, source)
    if expect is not None and not isinstance(model, expect):
        raise UnsupportedError(
            f"{source} is a {type(model).__name__} (kind {checkpoint.config.kind!r}): expected a "
            f"{expect.__name__}"
        )
    return model.eval()


def _dtype(dtype: object) -> torch.dtype | Literal["auto"] | None:
    if dtype is None:
        return None
    if dtype == "auto":
        return "auto"
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, auto: got {dtype!r}")
    found = DTYPES[dtype] if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype must be text or a torch.dtype: got {type(dtype).__name__}")
    if not found.is_floating_point:
        raise TypeError(f"dtype must be floating-point: got {dtype!r}")
    return found


def _wrapped(checkpoint: Checkpoint, source: object) -> Model:
    config, origin = checkpoint.config, checkpoint.origin
    if config.embedding.frontend is not None:
        raise UnsupportedError(f"{source} is a vision encoder: use load_checkpoint")
    if config.kind == "encoder":
        return _encoder(checkpoint)
    if config.kind == "decoder" and checkpoint.sentences.modules:
        return _encoder(checkpoint)
    options = generation_options(checkpoint)
    if config.kind == "decoder":
        return LanguageModel(checkpoint.model, checkpoint.tokenizer, origin, options)
    if config.encoder.embedding is not None and config.encoder.embedding.frontend is not None:
        return SpeechToText(checkpoint.model, checkpoint.tokenizer, origin, options)
    return TextToText(
        checkpoint.model,
        checkpoint.tokenizer,
        origin,
        options,
        target_tokenizer=checkpoint.target_tokenizer,
        prefix=checkpoint.generation.prefix,
        tasks=checkpoint.generation.tasks,
    )


def _encoder(checkpoint: Checkpoint) -> TextEncoder:
    late = checkpoint.sentences.late is not None
    return (MultiVectorEncoder if late else TextEncoder)(
        checkpoint.model,
        checkpoint.tokenizer,
        checkpoint.origin,
        checkpoint.pooling,
        checkpoint.sentences,
    )


def generation_options(checkpoint: Checkpoint) -> GenerationOptions:
    """The defaults for options of a call that a checkpoint's files set.

    Raises:
        ConfigError: a value that is impossible.
        UnsupportedError: a way of generating that is not built.
    """
    said = checkpoint.generation
    unknown = GenerationOptions.not_understood(said.values)
    if unknown:
        warnings.warn(
            f"{said.where}: unknown options {', '.join(sorted(unknown))}; left out", stacklevel=4
        )
    values = {key: value for key, value in said.values.items() if key not in unknown}
    decoder = checkpoint.config.kind == "decoder"
    if decoder:
        values.pop("eos_token_id", None)  # the tokenizer has it among its stops
    else:
        starts = (
            said.values.get("decoder_start_token_id"),
            said.start,
            checkpoint.config.bos_token_id,
            said.values.get("bos_token_id"),
        )
        values["decoder_start_token_id"] = next((each for each in starts if each is not None), None)
    options = GenerationOptions.from_dict(values, said.where)
    if options.max_new_tokens is None and options.max_length is None:
        most = (LanguageModel if decoder else EncoderDecoder).max_new_tokens
        options = options.with_(max_new_tokens=most)
    return options
