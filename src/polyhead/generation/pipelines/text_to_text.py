"""An encoder-decoder with its tokenizers: a text in, another text out.

model = polyhead.load("Helsinki-NLP/opus-mt-en-de")
model.generate("The house is wonderful.", num_beams=4).text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from polyhead._utils.checks import check_int
from polyhead.errors import ContextLengthError, InputError
from polyhead.generation.decoding.batch import Generation
from polyhead.generation.decoding.options import GenerationOptions
from polyhead.generation.decoding.stream import TextStream
from polyhead.generation.pipelines.encoder_decoder import EncoderDecoder
from polyhead.generation.pipelines.languages import Languages

if TYPE_CHECKING:
    from polyhead.checkpoints import Tokenizer
    from polyhead.models import Transformer


class TextToText(EncoderDecoder):
    """A model that translates, summarises or answers; ``polyhead.load`` returns it.

    Args:
        transformer: an encoder-decoder that reads tokens.
        tokenizer: tokenizer of the texts that it reads.
        origin: where it came from, in words.
        options: what generation does where a call does not say otherwise.
        target_tokenizer: tokenizer of the texts that it writes; default ``tokenizer``.
        prefix: text in front of every source.
        tasks: names of tasks to options of ``generate``, a ``prefix`` among them.

    Attributes:
        tokenizer: tokenizer of the texts that it writes.
        source_tokenizer: tokenizer of the texts that it reads.
        languages: what the model has tokens of.
        options, prefix, tasks: as given.
    """

    def __init__(
        self,
        transformer: Transformer,
        tokenizer: Tokenizer,
        origin: str = "",
        options: GenerationOptions | None = None,
        *,
        target_tokenizer: Tokenizer | None = None,
        prefix: str = "",
        tasks: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(transformer, target_tokenizer or tokenizer, origin, options)
        self.source_tokenizer = tokenizer
        self.prefix, self.tasks = prefix, dict(tasks or {})
        self.languages = Languages.of(tokenizer)

    def stream(
        self,
        text: str,
        *,
        task: str | None = None,
        source_language: str | None = None,
        target_language: str | None = None,
        prefix: str | None = None,
        stop: str | Sequence[str] | None = None,
        logprobs: int | None = None,
        **options: Any,
    ) -> TextStream:
        """Streams the output for a text, piece by piece; takes the arguments of ``generate``.

        Returns:
            An iterator of text with ``stats``, ``ids`` and ``logprobs``.

        Raises:
            ValueError: beams, whose texts all end at once; and what ``generate`` raises.
        """
        task = self._task(task, source_language, target_language)
        wanted = self._wanted(task, target_language, options)
        source = self.source_ids(
            text,
            task=task,
            source_language=source_language,
            target_language=target_language,
            prefix=prefix,
        )
        return self._streamed([source], self.start_ids(wanted), wanted, stop, logprobs)

    @overload
    def generate(self, texts: str, **arguments: Any) -> Generation: ...
    @overload
    def generate(self, texts: Sequence[str], **arguments: Any) -> list[Generation]: ...
    def generate(
        self,
        texts: str | Sequence[str],
        *,
        task: str | None = None,
        source_language: str | None = None,
        target_language: str | None = None,
        prefix: str | None = None,
        stop: str | Sequence[str] | None = None,
        cache: Mapping[str, Any] | None = None,
        batch_size: int = 32,
        logprobs: int | None = None,
        **options: Any,
    ) -> Generation | list[Generation]:
        """Generates the output for a text, or for each of several.

            model.generate(["Hello.", "How are you?"], num_beams=4, target_language="fra_Latn")

        Args:
            texts: one, or several of any lengths.
            task: one of ``tasks``: its prefix and its options.
            source_language: the code of the texts' language, where the model has tokens for it;
                default what the tokenizer's files say.
            target_language: the code of the language to write.
            prefix: text in front of each source; default the task's, or ``model.prefix``.
            stop: texts end before this text, or before the first of several.
            cache: arguments of ``new_cache``, such as ``{"kind": "paged"}``.
            batch_size: texts that run at a time; those of similar length run together.
            logprobs: also give the log-probability of each token, and those of so many likeliest
                tokens in its place; default: none.
            options: fields of ``GenerationOptions``: ``num_beams``, ``max_new_tokens``,
                ``length_penalty`` and others; default ``model.options``.

        Returns:
            A ``Generation``; a list of them for several texts, in their order.

        Raises:
            InputError: no texts or an empty one, a language or task that the model does not have,
                or no target language where it needs one.
            ContextLengthError: a text longer than the encoder has positions for.
            ValueError: a value out of range, by name.
            TypeError: an option that there is not.
        """
        task = self._task(task, source_language, target_language)
        wanted = self._wanted(task, target_language, options).seeded()
        batch_size = check_int("batch_size", batch_size, least=1, error=ValueError)
        given = [texts] if isinstance(texts, str) else texts
        if not isinstance(given, list | tuple) or not given:
            raise InputError(f"texts must be a text or a list of at least one: got {texts!r}")
        sources = [
            self.source_ids(
                text,
                "the text" if given is not texts else f"text {number}",
                task=task,
                source_language=source_language,
                target_language=target_language,
                prefix=prefix,
            )
            for number, text in enumerate(given)
        ]
        prompt, found = self.start_ids(wanted), dict[int, Generation]()
        order = sorted(range(len(sources)), key=lambda n: len(sources[n]))
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            read = [sources[n] for n in batch]
            made = self._generated(read, [prompt] * len(batch), wanted, stop, cache, logprobs)
            found |= zip(batch, made, strict=True)
        return found[0] if isinstance(texts, str) else [found[n] for n in range(len(sources))]

    def both_ids(
        self,
        text: str,
        *,
        task: str | None = None,
        source_language: str | None = None,
        target_language: str | None = None,
        prefix: str | None = None,
        **options: Any,
    ) -> tuple[list[int], list[int]]:
        """The tokens that the encoder reads for a text, and the first tokens of the decoder.

        Takes the arguments of ``generate`` and raises what it raises. Behind the second come the
        ``ids`` of a ``Generation``:

            source, start = model.both_ids(text)
            found = polyhead.align(model, torch.tensor(source), [*start, *made.ids])
        """
        source = self.source_ids(
            text,
            task=task,
            source_language=source_language,
            target_language=target_language,
            prefix=prefix,
        )
        task = self._task(task, source_language, target_language)
        return source, self.start_ids(self._wanted(task, target_language, options))

    def source_ids(
        self,
        text: str,
        name: str = "the text",
        *,
        task: str | None = None,
        source_language: str | None = None,
        target_language: str | None = None,
        prefix: str | None = None,
    ) -> list[int]:
        """The tokens that the encoder reads for a text.

        Args:
            text: Text to translate or summarize.
            name: what messages call it.
            task, source_language, target_language, prefix: as in ``generate``.

        Raises:
            InputError: an empty text, or what ``generate`` raises about languages and tasks.
            ContextLengthError: more tokens than the encoder has positions for.
            TypeError: no text.
        """
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a str: got {type(text).__name__}")
        if not text.strip():
            raise InputError(f"{name} is empty: give at least one character that is no space")
        if prefix is None:
            task = self._task(task, source_language, target_language)
            prefix = self.prefix if task is None else str(self.tasks[task].get("prefix", ""))
        ids = self._in_language(prefix + text, task, source_language, target_language)
        if len(ids) > self.max_source:
            raise ContextLengthError(
                f"{name} has {len(ids):,} tokens, the model reads at most {self.max_source:,}"
            )
        return ids

    def _in_language(
        self, text: str, task: str | None, source: str | None, target: str | None
    ) -> list[int]:
        languages, tokenizer = self.languages, self.source_tokenizer
        if task is not None or not languages:
            return tokenizer.encode(text)
        if languages.place == "in front":
            if source is not None:
                raise InputError(
                    f"this model is told the target language alone: got source_language={source!r}"
                )
            target = target or languages.target
            if target is not None:
                return [languages.token("target_language", target), *tokenizer.encode(text)]
            ids = tokenizer.encode(text)
            if len(languages.tokens) > 1 and ids[0] not in languages.tokens.values():
                raise InputError(self._which("target_language"))
            return ids
        source = source or languages.source
        if source is None:
            raise InputError(self._which("source_language"))
        token = languages.token("source_language", source)
        ids, end = tokenizer.encode(text, add_special=False), tokenizer.eos_token_id
        ends = [] if end is None else [end]
        return [*ids, *ends, token] if languages.behind else [token, *ids, *ends]

    def _which(self, name: str) -> str:
        known = [*self.languages.tokens]
        return f"{name} is needed: the model has {len(known)}, such as {', '.join(known[:5])}"

    def _task(self, task: str | None, source: str | None, target: str | None) -> str | None:
        """The task to do: the one that is named, or T5's for a pair of languages."""
        if task is not None:
            if task not in self.tasks:
                raise InputError(
                    f"no task {task!r}; this model's are {', '.join(self.tasks) or 'none'}"
                )
            return task
        if target is None or self.languages:
            return None
        pairs = [name for name in self.tasks if name.startswith("translation_")]
        found = f"translation_{source or 'en'}_to_{target}"
        if found in pairs:
            return found
        if pairs:
            raise InputError(f"no task {found!r}; this model has {', '.join(pairs)}")
        return None

    def _wanted(
        self, task: str | None, target: str | None, options: Mapping[str, Any]
    ) -> GenerationOptions:
        """The options of a call, with what makes the decoder write the language."""
        wanted = self.options
        if task is not None:
            said = {key: value for key, value in self.tasks[task].items() if key != "prefix"}
            wanted = wanted.with_(**GenerationOptions.read(said, f"task {task!r}"))
        wanted = wanted.with_(**options)
        languages = self.languages
        if task is not None:
            return wanted
        if not languages:
            if target is not None:
                languages.token("target_language", target)
            return wanted
        if languages.place == "in front":
            return wanted
        if languages.behind and "decoder_start_token_id" not in options:
            return self._begun(wanted, "decoder_start_token_id", target)
        if not languages.behind and "forced_bos_token_id" not in options:
            return self._begun(wanted, "forced_bos_token_id", target)
        return wanted

    def _begun(
        self, wanted: GenerationOptions, place: str, target: str | None
    ) -> GenerationOptions:
        """``wanted`` with the token of the target language as the one that ``place`` names."""
        languages = self.languages
        if target is None and getattr(wanted, place) not in languages.tokens.values():
            target = languages.target
            if target is None:
                raise InputError(self._which("target_language"))
        if target is None:
            return wanted
        return wanted.with_(**{place: languages.token("target_language", target)})
