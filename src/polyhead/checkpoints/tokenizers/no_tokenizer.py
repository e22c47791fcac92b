"""What stands for the tokenizer of a checkpoint that holds none: ids pass, text is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyhead.checkpoints.tokenizers.tokenizer import Tokenizer
from polyhead.errors import CheckpointError


class NoTokenizer(Tokenizer):
    """Shows token ids as ``[id]``, decodes them to an empty text, and refuses to encode.

    Args:
        origin: of the checkpoint, for the error.
    """

    def __init__(self, origin: str) -> None:
        self.backend = self.chat_template = None
        self.special_tokens, self.declared, self._added = {}, {}, {}
        self._special_ids = self.stop_ids = self._decoder_kinds = frozenset()
        self._refusal = (
            f"{origin} holds no tokenizer.json (nor a SentencePiece model of a family that has no "
            "such file), so text cannot be turned into tokens: give token ids"
        )

    vocab_size = 0
    vocabulary: dict[str, int] = {}  # noqa: RUF012 - a property of the base

    def _encoding(
        self, text: str, add_special: bool, other: str | None = None, *, release_gil: bool = False
    ) -> Any:
        raise CheckpointError(self._refusal)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        raise CheckpointError(self._refusal)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def save(self, directory: Path) -> None:
        """Writes nothing."""
