"""One text, drawn token by token from logits that others compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from polyhead.generation.decoding.logprobs import TokenLogprobs, logprobs_of
from polyhead.generation.decoding.options import room
from polyhead.generation.decoding.rules import Rows, Rule, rules_of
from polyhead.generation.decoding.sampling import Sampler
from polyhead.generation.decoding.steps import check_search
from polyhead.generation.decoding.stops import StopTexts
from polyhead.generation.pipelines.language_model import LanguageModel


@dataclass(frozen=True)
class TextChunk:
    """What was written since the last chunk; the text never ends inside a character.

    Attributes:
        text: May be empty.
        ids: The tokens.
        logprobs: One for each token, if they were asked for.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


class TextSampler:
    """Logits in, tokens out: rules, sampler, seed, stops and limit of one text.

    Whoever computes the logits decides how: texts of any lengths, alone or in batches, whose rows
    come and go. The serving engine draws so.

        sampler, cache = ph.TextSampler(model, "Once upon a time", seed=1), model.new_cache()
        ids = sampler.prompt
        while sampler.finish_reason is None:
            logits = model.transformer(torch.tensor([ids]), cache=cache, last=1)[0]
            print(sampler.take(logits).text, end="")
            ids = sampler.ids[-1:]

    Args:
        model: Whose tokenizer, stop tokens and default options hold. It is not called.
        prompt: The text, or its tokens.
        stop: The text ends before this text, or before the first of several; default: only at the
            model's stop tokens.
        rules: Functions that change the scores ``[1, V]`` of the next token, called after those of
            the options; default none.
        logprobs: Also give the log-probability of each token, and those of so many likeliest
            tokens in its place; default: none.
        options: Fields of ``GenerationOptions``, such as ``max_new_tokens`` and ``seed``; no beams.
            Default: the model's own.

    Attributes:
        prompt: Its tokens.
        ids: Tokens that were drawn, a stop token included.
        text: What they say, up to a stop.
        logprobs: One for each token, if they were asked for.
        limit: Tokens at most.
        finish_reason: ``"stop"`` (a stop token or text) or ``"length"``; None while it goes on.

    Raises:
        InputError: An empty prompt.
        ContextLengthError: The prompt is longer than the model's context.
        TypeError: An unknown option.
        ValueError: An option out of range, by name.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: str | Sequence[int],
        *,
        stop: str | Sequence[str] | None = None,
        rules: Sequence[Rule] = (),
        logprobs: int | None = None,
        **options: Any,
    ) -> None:
        wanted = model.options.with_(**options)
        wanted.check_stream()
        check_search(wanted, model.config.num_logits, None, logprobs)
        self._stops = StopTexts(stop)
        self.prompt, self.ids, self.text = model.prompt_ids(prompt), list[int](), ""
        self.limit, _ = room(wanted, len(self.prompt), model.config.max_positions)
        self.finish_reason: Literal["stop", "length"] | None = None if self.limit > 0 else "length"
        self.logprobs: list[TokenLogprobs] | None = None if logprobs is None else []
        self._likeliest, self._stop_ids = logprobs or 0, model.stop_ids(wanted)
        self._rules = [*rules_of(wanted, sorted(self._stop_ids), self.limit), *rules]
        self._sampler = Sampler(wanted.sampling, model.transformer.embedding.like.device)
        self._decoder = model.tokenizer.stream()

    @property
    def is_greedy(self) -> bool:
        """Whether its tokens are those of the largest logits, and nothing else is computed."""
        return self._sampler.rule.greedy and not self._rules and self.logprobs is None

    @torch.inference_mode()
    def take(self, logits: Tensor) -> TextChunk:
        """Draws a token.

        Args:
            logits: ``[1, V]``, after the prompt and all tokens drawn so far.

        Returns:
            What there is to show: nothing that may be the beginning of a stop text.

        Raises:
            ValueError: The text has ended.
        """
        if self.finish_reason is not None:
            raise ValueError(f"the text has ended ({self.finish_reason}): it takes no token more")
        scores = logits
        if self._rules:
            scores = scores.float()
            ids = [[*self.prompt, *self.ids]]
            rows = Rows(ids, len(self.ids), [len(self.prompt)], [self.prompt])
            for rule in self._rules:
                scores = rule(rows, scores)
        token = self._sampler(scores)
        self.ids.append(token)
        told = None
        if self.logprobs is not None:
            told = (*logprobs_of(logits, [token], self._likeliest),)
            self.logprobs += told
        if token in self._stop_ids:
            self.finish_reason, text = "stop", self._rest()
        else:
            text = self._stops.feed(self._decoder.push(token))
            if not self._stops.found and len(self.ids) >= self.limit:
                self.finish_reason, text = "length", text + self._rest()
            if self._stops.found:
                self.finish_reason = "stop"
        self.text += text
        return TextChunk(text, (token,), told)

    def _rest(self) -> str:
        """What was held back."""
        return self._stops.feed(self._decoder.flush()) + self._stops.flush()
