"""What every reader of a file format returns, before a model is built from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from polyhead.checkpoints.formats.sentence_modules import Sentences
from polyhead.checkpoints.generation_config import GenerationConfig
from polyhead.checkpoints.tokenizers.tokenizer import Tokenizer
from polyhead.config import TransformerConfig
from polyhead.native.arguments import Scales
from polyhead.quantization import BlockType

# Called with the name of the work, the units done, and the total.
Progress: TypeAlias = Callable[[str, int, int], None]


def no_progress(step: str, done: int, total: int) -> None:
    """The progress callback that does nothing."""


@dataclass(frozen=True)
class Blocks:
    """A matrix that stays as its file holds it.

    Attributes:
        octets: ``[rows, bytes of a row]`` uint8.
        kind: Type of the blocks.
        scales: Of blocks that have none of their own.
    """

    octets: Tensor
    kind: BlockType
    scales: Scales | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The matrix's shape."""
        return self.octets.shape[0], self.kind.row_numbers(self.octets.shape[1])


@dataclass(frozen=True)
class Parts:
    """A checkpoint's configuration, its tensors and its tokenizer.

    Attributes:
        config: what the tensors mean.
        state: tensors under the parameter names of ``Transformer``, in the file's own precision.
        tokenizer: None where the checkpoint has none.
        ignored: tensors of the file that no output depends on, by their names there.
        left_out: modules of a multimodal file that ids do not pass through, whose tensors those
            are.
        file_names: what the file calls each tensor of ``state``, for messages.
        family: the ``model_type`` of the family that the file is of.
        generation: what the files say about generating.
        target_tokenizer: of the texts that are written, where it is another than ``tokenizer``.
        pooling: how an encoder's files make one vector of a text's hidden states.
        sentences: what such files say beside it.
        blocks: weights of linear modules and tables that are not in ``state``, by the same names.
    """

    config: TransformerConfig
    state: Mapping[str, Tensor]
    tokenizer: Tokenizer | None
    ignored: tuple[str, ...] = ()
    file_names: Mapping[str, str] | None = None
    family: str | None = None
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    target_tokenizer: Tokenizer | None = None
    pooling: str = "mean"
    sentences: Sentences = field(default_factory=Sentences)
    blocks: Mapping[str, Blocks] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor."""
        of_blocks: dict[str, tuple[int, ...]] = {
            name: each.shape for name, each in self.blocks.items()
        }
        return {name: tuple(tensor.shape) for name, tensor in self.state.items()} | of_blocks
