"""A decoder with its tokenizer: text in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from polyhead.errors import ConfigError, ContextLengthError, InputError
from polyhead.generation.sampling import Sampling, check_whole
from polyhead.generation.stops import StopTexts
from polyhead.generation.stream import GenerationStats, TextStream

if TYPE_CHECKING:
    from polyhead.caches import ModelCache
    from polyhead.checkpoints import Tokenizer
    from polyhead.config import TransformerConfig
    from polyhead.models import Transformer

Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    Attributes:
        text: what was written, without the prompt and the stop.
        ids: the tokens drawn, a stop token included.
        stats: sizes and speeds.
    """

    text: str
    ids: tuple[int, ...]
    stats: GenerationStats


class LanguageModel(nn.Module):
    """A model that writes text; ``polyhead.load`` makes these.

    Args:
        transformer: a decoder.
        tokenizer: its tokenizer.
        origin: where it came from, in words.

    Raises:
        ConfigError: the transformer is no decoder.
    """

    def __init__(self, transformer: Transformer, tokenizer: Tokenizer, origin: str = "") -> None:
        super().__init__()
        if transformer.config.kind != "decoder":
            raise ConfigError(
                f"a LanguageModel needs a decoder: got kind={transformer.config.kind!r}"
            )
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.origin = origin

    @property
    def config(self) -> TransformerConfig:
        return self.transformer.config

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        """Logits ``[B, T, V]`` of ``ids [B, T]``; options are those of ``Transformer``."""
        logits: Tensor = self.transformer(ids, **options)
        return logits

    def new_cache(self, capacity: int = 0) -> ModelCache:
        """An empty cache for ``model(ids, cache=cache)``, with room for ``capacity`` tokens."""
        return self.transformer.new_cache(capacity)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        chat: bool = False,
        stop: str | Sequence[str] | None = None,
    ) -> TextStream:
        """Continues a text, piece by piece.

            for piece in model.stream("The capital of France is"):
                print(piece, end="", flush=True)

        Generation ends at a stop token of the model, a stop text, ``max_new_tokens``, or the end of
        the model's context.

        Args:
            prompt: the text; or messages with ``role`` and ``content``, which imply ``chat``.
            max_new_tokens: at most so many tokens, 0 or more.
            temperature: 0 or None is greedy; see ``Sampling`` for it and the next three.
            top_k: draw from the k most likely tokens.
            top_p: draw from the likeliest tokens that together reach this probability.
            seed: draws the same text again.
            chat: put the prompt into the model's chat template as the user's message.
            stop: end before this text, or before the first of several.

        Returns:
            An iterator of text with ``stats`` and ``ids``.

        Raises:
            InputError: an empty prompt.
            ContextLengthError: the prompt is longer than the model's context.
            ValueError: a sampling value out of range, by name.
        """
        rule = Sampling(temperature, top_k, top_p, seed)
        check_whole("max_new_tokens", max_new_tokens)
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be 0 or more: got {max_new_tokens}")
        return TextStream(
            self.transformer,
            self.tokenizer,
            self.prompt_ids(prompt, chat=chat),
            rule,
            max_new_tokens,
            self.tokenizer.stop_ids | frozenset(self.config.eos_token_ids),
            StopTexts(stop),
        )

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Continues a text and returns all of it at once; takes the arguments of ``stream``."""
        stream = self.stream(prompt, **options)
        text = "".join(stream)
        return Generation(text, tuple(stream.ids), stream.stats)

    def prompt_ids(self, prompt: Prompt, *, chat: bool = False) -> list[int]:
        """The tokens that ``stream`` reads for a prompt.

        Raises:
            InputError: an empty prompt.
            ContextLengthError: more tokens than the model's context.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("the prompt is empty: give at least one character")
            if not chat:
                return self._checked(self.tokenizer.encode(prompt))
            prompt = [{"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(prompt)
        return self._checked(self.tokenizer.encode(text, add_special=False))

    def _checked(self, ids: list[int]) -> list[int]:
        most = self.config.max_positions
        if len(ids) > most:
            raise ContextLengthError(
                f"the prompt has {len(ids):,} tokens, the model's context holds {most:,}"
            )
        if not ids:
            raise InputError("the prompt holds no tokens")
        return ids

    def extra_repr(self) -> str:
        return self.origin
