"""A decoder with its tokenizer: text in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast, overload

import torch
from torch import Tensor

from polyhead._utils.checks import check_bool, shown
from polyhead.errors import ContextLengthError, InputError
from polyhead.generation.decoding.batch import Generation, continued
from polyhead.generation.decoding.options import GenerationOptions
from polyhead.generation.decoding.stops import StopTexts
from polyhead.generation.decoding.stream import TextStream
from polyhead.generation.pipelines.generative_model import GenerativeModel

Prompt = str | Tensor | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids ``[T]``, or messages."""


class LanguageModel(GenerativeModel):
    """A decoder with its tokenizer; ``polyhead.load`` returns it. See ``GenerativeModel``."""

    kind = "decoder"
    max_new_tokens = 128

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        """Logits ``[B, T, V]`` of ``ids [B, T]``; options are those of ``Transformer``."""
        logits: Tensor = self.transformer(ids, **options)
        return logits

    def stream(
        self,
        prompt: Prompt,
        *,
        chat: bool = False,
        stop: str | Sequence[str] | None = None,
        graph: bool | None = None,
        logprobs: int | None = None,
        **options: Any,
    ) -> TextStream:
        """Continues a text, piece by piece.

            for piece in model.stream("The capital of France is"):
                print(piece, end="", flush=True)

        Generation ends at a stop token of the model, a stop text, ``max_new_tokens``, or the end of
        the model's context.

        Args:
            prompt: the text; token ids, a list or a tensor ``[T]``; or messages with ``role`` and
                ``content``, which imply ``chat``.
            chat: put the prompt into the model's chat template as the user's message.
            stop: end before this text, or before the first of several.
            graph: replay decoding steps from a CUDA graph; True: refuse where that cannot be;
                None: where it can (``stats.no_graph`` says why not).
            logprobs: also give the log-probability of each token, and those of so many likeliest
                tokens in its place; default: none.
            options: fields of ``GenerationOptions``: ``max_new_tokens`` (default 128),
                ``temperature``, ``top_k``, ``top_p``, ``seed``, ``repetition_penalty`` and others.

        Returns:
            An iterator of text with ``stats``, ``ids`` and ``logprobs``.

        Raises:
            InputError: an empty prompt.
            ContextLengthError: the prompt is longer than the model's context.
            ValueError: a value out of range, by name; or beams, whose texts all end at once.
            TypeError: an option that there is not.
            UnsupportedError: ``graph=True`` where steps cannot be replayed, or with ``logprobs``.
        """
        wanted = self._wanted(options)
        wanted.check_stream()
        return TextStream(
            self.transformer,
            self.tokenizer,
            self.prompt_ids(prompt, chat=chat),
            wanted,
            self.stop_ids(wanted),
            StopTexts(stop),
            graph=graph,
            logprobs=logprobs,
        )

    @overload
    def generate(
        self,
        prompts: Prompt,
        *,
        chat: bool = False,
        stop: str | Sequence[str] | None = None,
        cache: Mapping[str, Any] | None = None,
        graph: bool | None = None,
        logprobs: int | None = None,
        **options: Any,
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[Tensor],
        *,
        chat: bool = False,
        stop: str | Sequence[str] | None = None,
        cache: Mapping[str, Any] | None = None,
        graph: bool | None = None,
        logprobs: int | None = None,
        **options: Any,
    ) -> list[Generation]: ...
    def generate(
        self,
        prompts: Prompt | list[str] | list[Tensor],
        *,
        chat: bool = False,
        stop: str | Sequence[str] | None = None,
        cache: Mapping[str, Any] | None = None,
        graph: bool | None = None,
        logprobs: int | None = None,
        **options: Any,
    ) -> Generation | list[Generation]:
        """Continues a text, or several in one batch, and returns the finished result.

            model.generate("Once upon a time", num_beams=4, num_return_sequences=2).others

        Args:
            prompts: as in ``stream``; or a list of texts or of tensors ``[T]``, which may differ in
                length.
            chat: put each prompt into the model's chat template.
            stop: texts end before this text, or before the first of several; those of beam search
                are cut there when they are finished.
            cache: arguments of ``new_cache``, such as ``{"kind": "paged"}``.
            graph: as in ``stream``; steps of several texts are replayed where their prompts have
                as many tokens, and those of beams or with ``cache`` are not.
            logprobs: as in ``stream``.
            options: as in ``stream``, and ``num_beams``, ``num_return_sequences``,
                ``length_penalty``, ``early_stopping`` (see ``GenerationOptions``).

        Returns:
            A ``Generation``; a list of them for a list.

        Raises what ``stream`` does.
        """
        wanted = self._wanted(options)
        many = isinstance(prompts, list) and all(isinstance(x, str | Tensor) for x in prompts)
        one = None if many else cast(Prompt, prompts)
        if one is not None and wanted.num_beams == wanted.num_return_sequences == 1 and not cache:
            stream = self.stream(
                one, chat=chat, stop=stop, graph=graph, logprobs=logprobs, **options
            )
            text, told = "".join(stream), stream.logprobs
            return Generation(
                text, tuple(stream.ids), stream.stats, logprobs=None if told is None else (*told,)
            )
        if graph is not None:
            check_bool("graph", graph, error=ValueError)
        texts = cast(list[Prompt], prompts) if one is None else [one]
        if not texts:
            raise InputError("prompts must hold at least one text: got none")
        found = continued(
            self.transformer,
            self.tokenizer,
            [self.prompt_ids(each, chat=chat) for each in texts],
            wanted,
            self.stop_ids(wanted),
            StopTexts(stop).stops,
            cache or {},
            graph=graph,
            logprobs=logprobs,
        )
        return found if one is None else found[0]

    def _wanted(self, options: Mapping[str, Any]) -> GenerationOptions:
        return self.options.with_(**options)

    def stop_ids(self, options: GenerationOptions) -> frozenset[int]:
        """Tokens that end a text: those of the options, else the model's."""
        if options.eos_token_ids:
            return frozenset(options.eos_token_ids)
        return self.tokenizer.stop_ids | frozenset(self.config.eos_token_ids)

    def prompt_ids(self, prompt: Prompt, *, chat: bool = False) -> list[int]:
        """The tokens that ``stream`` reads for a prompt.

        Raises:
            InputError: an empty prompt.
            ContextLengthError: more tokens than the model's context.
            TypeError: neither text, token ids nor messages.
        """
        if isinstance(prompt, Tensor):
            if prompt.ndim != 1 or prompt.is_floating_point() or prompt.dtype == torch.bool:
                raise InputError(
                    f"token ids must be [T] and whole numbers: got {prompt.dtype} of shape "
                    f"{list(prompt.shape)}"
                )
            prompt = prompt.tolist()
        if _are_ids(prompt):
            if wrong := [i for i in prompt if not 0 <= i < self.config.vocab_size]:
                raise InputError(
                    f"token ids must be 0 to {self.config.vocab_size - 1}: got {wrong[0]}"
                )
            if chat:
                raise InputError("chat=True needs a text or messages: got token ids")
            return self._checked(prompt)
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("the prompt is empty: give at least one character")
            if not chat:
                return self._checked(self.tokenizer.encode(prompt))
            messages: Sequence[Mapping[str, Any]] = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, Sequence) and all(isinstance(m, Mapping) for m in prompt):
            messages = cast("Sequence[Mapping[str, Any]]", prompt)
        else:
            raise TypeError(
                "prompt must be text, token ids, or messages such as "
                "[{'role': 'user', 'content': 'Hello'}]: "
                f"got {shown(prompt)}"
            )
        text = self.tokenizer.apply_chat_template(messages)
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


def _are_ids(prompt: object) -> TypeGuard[list[int]]:
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
    )
