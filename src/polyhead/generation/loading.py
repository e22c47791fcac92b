"""``polyhead.load``: a model by its name, ready to use."""

from __future__ import annotations

import os
from typing import Literal

import torch

from polyhead.checkpoints import Progress, load_checkpoint
from polyhead.errors import UnsupportedError
from polyhead.generation.encoder import TextEncoder
from polyhead.generation.language_model import LanguageModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    source: str | os.PathLike[str],
    dtype: str | torch.dtype = "float32",
    *,
    device: str | torch.device = "cpu",
    adapter: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> LanguageModel | TextEncoder:
    """Loads a model with its tokenizer.

    Args:
        source: a known name (``"smollm2"``), a Hugging Face directory, a ``.gguf`` file, or a hub
            id ``"org/name"``.
        dtype: of the weights: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"auto"`` (that of
            most of the file's numbers) or a ``torch.dtype``.
        device: where the model runs: ``"cpu"``, ``"cuda"``, ...
        adapter: the directory of a LoRA adapter (PEFT), merged into the weights. Given as
            ``source``, the base is the one that it names.
        progress: called with what is being done, how much is done, and how much there is.

    Returns:
        A ``LanguageModel`` for a decoder, a ``TextEncoder`` for an encoder, in evaluation mode.

    Raises:
        ModelNotFoundError: nothing of that name is here; says what is and how to get one.
        CheckpointError: a file is truncated, corrupt, or does not fit its configuration.
        ConfigError: the configuration says something impossible or not understood.
        UnsupportedError: an encoder-decoder, or an encoder of images.
        ValueError: an unknown dtype, or a device that is not here.
        TypeError: an argument of another kind.
    """
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"source must be a model's name or a path, as text: got {type(source).__name__}"
        )
    chosen: torch.dtype | Literal["auto"] = "auto"
    if dtype != "auto":
        if isinstance(dtype, str) and dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, auto: got {dtype!r}")
        chosen = DTYPES[dtype] if isinstance(dtype, str) else dtype
    if isinstance(chosen, torch.dtype) and not chosen.is_floating_point:
        raise TypeError(f"dtype must be floating-point: got {dtype!r}")
    if not isinstance(chosen, str | torch.dtype):
        raise TypeError(f"dtype must be text or a torch.dtype: got {type(dtype).__name__}")
    checkpoint = load_checkpoint(source, chosen, progress, device=device, adapter=adapter)
    kind = checkpoint.config.kind
    if kind == "encoder-decoder":
        raise UnsupportedError(
            f"{source} is an encoder-decoder: load_checkpoint loads it, text to text is not "
            "supported"
        )
    if checkpoint.config.embedding.frontend is not None:
        raise UnsupportedError(f"{source} reads no text: load_checkpoint loads it")
    wrapper = LanguageModel if kind == "decoder" else TextEncoder
    return wrapper(checkpoint.model, checkpoint.tokenizer, checkpoint.origin).eval()
