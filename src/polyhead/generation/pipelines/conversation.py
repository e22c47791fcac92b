"""A conversation: each turn is read once and stays in the cache."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from polyhead.errors import ContextLengthError, InputError
from polyhead.generation.decoding.options import room
from polyhead.generation.decoding.stops import StopTexts
from polyhead.generation.decoding.stream import GenerationStats, TextStream

if TYPE_CHECKING:
    from polyhead.generation.pipelines.language_model import LanguageModel

_SHARE = 4
"""Room that is kept for an answer: a quarter of the context, or ``max_new_tokens``."""


class Conversation:
    """A conversation with a model that has a chat template.

        talk = Conversation(model, system="Answer in one sentence.")
        for piece in talk.say("What is attention?"):
            print(piece, end="", flush=True)

    A turn reads its own tokens only: the cache keeps those before it. If the conversation becomes
    longer than the context, its oldest exchanges are dropped; the system prompt stays.

    Args:
        model: a decoder with a chat template.
        system: the system prompt; empty: none.
        options: fields of ``GenerationOptions``, as for ``model.stream``.

    Attributes:
        messages: what was said, with ``role`` and ``content``; without the system prompt.
        left_out: how many of the oldest messages the last turn did not read.
        stats: figures of the last answer; None before it.

    Raises:
        CheckpointError: the model has no chat template.
        ValueError, TypeError: as ``model.stream`` does.
    """

    def __init__(self, model: LanguageModel, system: str = "", **options: Any) -> None:
        self.model, self.system = model, system
        self.messages: list[dict[str, str]] = []
        self.left_out = 0
        self.stats: GenerationStats | None = None
        self._options = model.options.with_(**options)
        self._options.check_stream()
        self._cache = model.new_cache()
        self._held: list[int] = []  # tokens in the cache, and perhaps those after them
        self._prompt([{"role": "user", "content": "?"}])  # refuses a model without a chat template

    def say(self, text: str) -> Generator[str]:
        """The answer, piece by piece. If you stop early, what was generated so far is kept.

        Raises:
            InputError: the text is empty.
            ContextLengthError: the text alone is longer than the context.
        """
        if not text.strip():
            raise InputError("the message is empty: give at least one character")
        said = [*self.messages, {"role": "user", "content": text}]
        return self._answer(said, self._fitting(said))

    def undo(self) -> bool:
        """Removes the last exchange; False if there is none."""
        there = bool(self.messages)
        del self.messages[-2:]
        return there

    def clear(self) -> None:
        """Forgets the whole conversation."""
        self.messages.clear()

    def _answer(self, said: list[dict[str, str]], ids: list[int]) -> Generator[str]:
        self._remember(ids)
        stream = TextStream(
            self.model.transformer,
            self.model.tokenizer,
            ids,
            self._options,
            self.model.stop_ids(self._options),
            StopTexts(None),
            cache=self._cache,
        )
        answer = ""
        try:
            for piece in stream:
                answer += piece
                yield piece
        finally:
            stream.close()
            self.stats = stream.stats
            self._held = [*ids, *stream.ids]
            self.messages = [*said, {"role": "assistant", "content": answer}]

    def _remember(self, ids: list[int]) -> None:
        """Crops the cache to the longest prefix of ``ids`` that leaves a token to read."""
        pairs = zip(self._held, ids[:-1], strict=False)
        same = next(
            (place for place, (held, wanted) in enumerate(pairs) if held != wanted),
            min(len(self._held), len(ids) - 1),
        )
        if self._cache.length - same > self._cache.max_rollback:
            same = 0
        if same:
            self._cache.crop(same)
        else:
            self._cache.reset()

    def _fitting(self, said: list[dict[str, str]]) -> list[int]:
        """Tokens of the conversation, without the oldest exchanges if there is no room for them."""
        context = self.model.config.max_positions
        wanted = min(room(self._options, 0, context)[0], context // _SHARE)
        for self.left_out in range(0, len(said), 2):
            ids = self._prompt(said[self.left_out :])
            if len(ids) + wanted <= context:
                return ids
        if len(ids) >= context:
            raise ContextLengthError(
                f"the message has {len(ids):,} tokens, the model's context holds {context:,}"
            )
        return ids

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        tokenizer = self.model.tokenizer
        text = tokenizer.apply_chat_template([*system, *messages])
        return tokenizer.encode(text, add_special=False)
