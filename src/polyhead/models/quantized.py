"""A model's linear modules and tables replaced by ones whose weights stay in blocks."""

from __future__ import annotations

from torch import Tensor, nn

from polyhead.errors import UnsupportedError
from polyhead.layers.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedMatrix
from polyhead.models.embedding import Embedding
from polyhead.models.heads import Head
from polyhead.models.transformer import Transformer
from polyhead.native.arguments import Scales
from polyhead.quantization import BlockType, pack

_READ_AS_NUMBERS = ("kv_b_proj", "router")
"""Linear modules that are never called, because only their weights are read."""


def quantizable(model: nn.Module, name: str) -> bool:
    """Whether a parameter may be in blocks, so that ``put_blocks`` takes it.

    Args:
        model: Model that holds the parameter.
        name: In its state dict.
    """
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf != "weight" or path.endswith(_READ_AS_NUMBERS):
        return False
    tokens = type(owner) is nn.Embedding and path.endswith(".tokens")
    return tokens or type(owner) in (nn.Linear, Head)


def unpacked_state(model: nn.Module) -> dict[str, Tensor]:
    """A state dict in which blocks are numbers, under the names that they would have."""
    quantized = {
        name: part for name, part in model.named_modules() if isinstance(part, QuantizedMatrix)
    }
    state = {}
    for name, tensor in model.state_dict().items():
        path, _, leaf = name.rpartition(".")
        if path not in quantized or leaf == "bias":
            state[name] = tensor
        elif leaf == "blocks":
            state[path if path == "head.weight" else f"{path}.weight"] = quantized[path].weight
    return state


def put_blocks(
    model: nn.Module, name: str, blocks: Tensor, kind: BlockType, scales: Scales | None
) -> dict[str, Tensor]:
    """Puts a matrix in blocks in the place of a parameter that is ``quantizable``.

    Args:
        model: On the meta device, about to be filled.
        name: In its state dict.
        blocks: ``[rows, bytes of a row]`` uint8, dense.
        kind: Block type of the codes.
        scales: Of blocks that have none of their own, dense.

    Returns:
        Its tensors, as the state dict names them.
    """
    path = name.removesuffix(".weight")
    owner = model.get_submodule(path)
    if isinstance(owner, Head):
        del owner.weight  # a module cannot replace a parameter of the same name
        owner.weight = made = QuantizedMatrix(blocks, kind, scales)
        path = name
    else:
        made = (
            QuantizedEmbedding(blocks, kind, scales)
            if isinstance(owner, nn.Embedding)
            else QuantizedLinear(blocks, kind, owner._parameters["bias"], scales)
        )
        above, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(above), leaf, made)
        second = getattr(model, "encoder_embedding", None)
        if path == "embedding.tokens" and isinstance(second, Embedding):
            second.share(owner, made)
    return {
        f"{path}.{leaf}": tensor
        for leaf in ("blocks", "scales", "zeros")
        if (tensor := made._buffers[leaf]) is not None
    }


def pack_weights(model: Transformer, kind: BlockType) -> None:
    """Packs every matrix that may be in blocks as the nearest blocks of a type.

    Matrices that are in blocks stay as they are, and so do those whose rows are no whole blocks.

    Args:
        model: Changed in place, and after an error no longer of use. Blocks have no gradients.
        kind: Type that ``pack`` knows.

    Raises:
        UnsupportedError: No matrix can be packed.
        ValueError: A type that is only read, or numbers that are not finite; the message names the
            matrix.
    """
    found = [
        (name, numbers)
        for name, numbers in model.named_parameters()
        if quantizable(model, name) and numbers.shape[1] % kind.numbers == 0
    ]
    if not found:
        raise UnsupportedError(
            f"quantize={kind.name!r} needs matrices whose rows are whole blocks of {kind.numbers} "
            "numbers: this model has none that is not in blocks"
        )
    for name, numbers in found:
        try:
            blocks = pack(numbers.detach(), kind)
        except ValueError as error:
            raise ValueError(f"quantize={kind.name!r}: {name}: {error}") from None
        put_blocks(model, name, blocks, kind, None)
        made = model.get_submodule(name if name == "head.weight" else name[: -len(".weight")])
        made.to(numbers.dtype)
