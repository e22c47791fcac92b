"""The base of models that generate text: a Transformer, its tokenizer, its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from polyhead.errors import ConfigError
from polyhead.generation.decoding.options import GenerationOptions

if TYPE_CHECKING:
    from polyhead.caches import ModelCache
    from polyhead.checkpoints import Tokenizer
    from polyhead.config import TransformerConfig
    from polyhead.models import Transformer


class GenerativeModel(nn.Module):
    """A Transformer that generates text.

    Args:
        transformer: of the class's ``kind``.
        tokenizer: tokenizer of the texts that it writes.
        origin: where it came from, in words.
        options: what generation does where a call does not say otherwise; default greedy,
            ``max_new_tokens`` of the class.

    Attributes:
        options: as given.

    Raises:
        ConfigError: the transformer is of another kind.
    """

    kind: ClassVar[str]
    max_new_tokens: ClassVar[int]
    """New tokens if neither the caller nor the model's files set a limit."""

    def __init__(
        self,
        transformer: Transformer,
        tokenizer: Tokenizer,
        origin: str = "",
        options: GenerationOptions | None = None,
    ) -> None:
        super().__init__()
        if transformer.config.kind != self.kind:
            raise ConfigError(
                f"a {type(self).__name__} is made of kind={self.kind!r}: got "
                f"kind={transformer.config.kind!r}"
            )
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.origin = origin
        self.options = options or GenerationOptions(max_new_tokens=self.max_new_tokens)

    @property
    def config(self) -> TransformerConfig:
        return self.transformer.config

    def new_cache(self, capacity: int = 0, **options: Any) -> ModelCache:
        """An empty cache with room for ``capacity`` tokens, for ``cache=`` of a call.

        Takes the other arguments of ``Transformer.new_cache``, such as ``kind`` and ``quantized``.
        That of an encoder-decoder also holds what was read.
        """
        return self.transformer.new_cache(capacity, **options)

    def extra_repr(self) -> str:
        return self.origin
