"""A request for texts, read and checked: what the engine is asked, and how the answer is told."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyhead._utils.checks import shown
from polyhead.checkpoints import Tokenizer
from polyhead.errors import ContextLengthError, InputError
from polyhead.generation import LanguageModel
from polyhead.generation.decoding.rules import Rule
from polyhead.serving.grammars import GrammarRule, installed
from polyhead.serving.http.errors import refused
from polyhead.serving.http.options import CHAT, COMPLETIONS, read_options, required
from polyhead.serving.http.prompts import chat_ids
from polyhead.serving.http.served import Models, Served
from polyhead.serving.http.tools import Tools, tools_of
from polyhead.serving.penalties import biased, penalised

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
_COMPLETION_TOKENS = 16
"""New tokens of a completion that does not say how many, as OpenAI's."""
_MOST_TEXTS = 128
"""Most texts that one request asks for: prompts × n."""
_DRAWN = ("top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Job:
    """A request for texts.

    Attributes:
        served: The model.
        chat: Whether it is a chat; else completions.
        prompts: Tokens of each prompt.
        answers: Texts for each prompt.
        max_new_tokens: New tokens of each text at most.
        options: Options of generation of every text.
        seed: Of the first text; None: drawn.
        stop: Texts that end a text.
        rules: What changes the scores of tokens.
        grammar: The form of a text; None: any.
        logprobs: Likeliest tokens whose log-probabilities are told; None: no log-probabilities.
        tools: Functions that a text may call.
        stream, usage: Whether pieces are sent as they come, and the usage after them.
        caller: Whose prefixes may be shared.
        timeout: Seconds that it may take; None: any.
    """

    served: Served
    chat: bool
    prompts: Sequence[Sequence[int]]
    answers: int
    max_new_tokens: int
    options: Mapping[str, Any]
    seed: int | None
    stop: Sequence[str]
    rules: Sequence[Rule]
    grammar: GrammarRule | None
    logprobs: int | None
    tools: Tools | None
    stream: bool
    usage: bool
    caller: str
    timeout: float | None
    id: str
    created: int

    @property
    def tokenizer(self) -> Tokenizer:
        found: Tokenizer = self.served.model.tokenizer
        return found

    def head(self) -> dict[str, Any]:
        """What every object of the answer begins with."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": f"{kind}.chunk" if self.chat and self.stream else kind,
            "created": self.created,
            "model": self.served.name,
        }


def job_of(models: Models, path: str, body: Mapping[str, Any], caller: str = "") -> Job:
    """Reads a request for texts. Takes time for long prompts and large grammars.

    Args:
        models: The served models.
        path: ``CHAT_PATH`` or ``COMPLETIONS_PATH``.
        body: The JSON object of the request.
        caller: Name of the caller's key.

    Raises:
        ApiError: What is wrong or not supported, by name.
        InputError: A text that the tokenizer fails on.
    """
    chat = path == CHAT_PATH
    options = read_options(CHAT if chat else COMPLETIONS, body)
    served = models.find(options, LanguageModel, path)
    model: LanguageModel = served.model
    tools = tools_of(options, model.tokenizer.chat_template) if chat else None
    if chat:
        given = None if tools is None else tools.given
        prompts = [chat_ids(model.tokenizer, required(options, "messages"), given)]
    else:
        prompts = [_completed(model, each) for each in _prompts(required(options, "prompt"))]
    answers = options.get("n", 1)
    if len(prompts) * answers > _MOST_TEXTS:
        raise refused(
            "n", f"a request asks for at most {_MOST_TEXTS} texts: got {len(prompts) * answers}"
        )
    if options.get("stream_options") and not options.get("stream"):
        raise refused("stream_options", "stream_options needs stream=true")
    drawn = {name: options[name] for name in _DRAWN if name in options}
    temperature = options.get("temperature", 1.0)
    if temperature:
        drawn |= {"temperature": temperature, "top_p": options.get("top_p")}
    else:
        drawn |= {"temperature": None}
        drawn.pop("top_k", None)
        drawn.pop("min_p", None)
    frequency, presence = (
        options.get(f"{name}_penalty", 0.0) for name in ("frequency", "presence")
    )
    rules: list[Rule] = []
    if bias := options.get("logit_bias"):
        if max(bias) >= model.config.num_logits:
            raise refused(
                "logit_bias",
                f"logit_bias: token ids are below {model.config.num_logits:,}: got {max(bias)}",
            )
        rules.append(biased(bias))
    if frequency or presence:
        rules.append(penalised(frequency, presence))
    return Job(
        served,
        chat,
        prompts,
        answers,
        _new_tokens(models, served, options, chat, max(map(len, prompts))),
        drawn,
        options.get("seed"),
        options.get("stop", []),
        rules,
        _grammar(served, options, tools),
        _logprobs(options, chat),
        tools,
        options.get("stream", False),
        options.get("stream_options", {}).get("include_usage", False),
        caller,
        models.timeout,
        f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
        int(time.time()),
    )


def _prompts(given: str | list[Any]) -> list[Any]:
    """One prompt or several: texts, or lists of token ids."""
    if isinstance(given, str) or all(type(each) is int for each in given):
        return [given]
    if all(isinstance(each, str) for each in given) or all(
        isinstance(each, list) and all(type(token) is int for token in each) for each in given
    ):
        return given
    raise refused(
        "prompt", f"prompt must be a text, token ids, or a list of either: got {shown(given)}"
    )


def _completed(model: LanguageModel, prompt: str | list[int]) -> list[int]:
    try:
        if isinstance(prompt, str) and prompt:
            prompt = model.tokenizer.encode(prompt, release_gil=True)
        return model.prompt_ids(prompt)
    except ContextLengthError as error:
        raise refused("prompt", str(error), "context_length_exceeded") from error
    except (InputError, TypeError) as error:
        raise refused("prompt", str(error)) from error


def _new_tokens(
    models: Models, served: Served, options: Mapping[str, Any], chat: bool, prompt: int
) -> int:
    """New tokens of each text at most.

    Raises:
        ApiError: More than the context or the engine's cache has room for.
    """
    assert served.engine is not None  # a decoder's
    context, cache = served.model.config.max_positions, served.engine.max_tokens
    holds = f"the cache holds {cache:,}"
    if context <= cache:
        holds = f"the model's context holds {context:,}"
    name = "max_completion_tokens"
    wanted = options.get(name)
    if wanted is not None and "max_tokens" in options:
        raise refused("max_tokens", "max_tokens and max_completion_tokens are mutually exclusive")
    if wanted is None:
        name, wanted = "max_tokens", options.get("max_tokens")
    left: int = min(context, cache) - prompt
    if left < 1:
        raise refused(
            "messages" if chat else "prompt",
            f"the prompt has {prompt:,} tokens, {holds}",
            "context_length_exceeded",
        )
    if wanted is None:
        return min(models.max_new_tokens if chat else _COMPLETION_TOKENS, left)
    if wanted > left:
        raise refused(
            name,
            f"{name} is {wanted:,} and the prompt has {prompt:,} tokens: {holds}",
            "context_length_exceeded",
        )
    return int(wanted)


def _logprobs(options: Mapping[str, Any], chat: bool) -> int | None:
    if not chat:
        found: int | None = options.get("logprobs")
        return found
    if options.get("logprobs"):
        return int(options.get("top_logprobs", 0))
    if "top_logprobs" in options:
        raise refused("top_logprobs", "top_logprobs needs logprobs=true")
    return None


def _grammar(served: Served, options: Mapping[str, Any], tools: Tools | None) -> GrammarRule | None:
    """The form that ``response_format`` or ``tool_choice`` asks for."""
    name, wanted = "response_format", options.get("response_format", {"type": "text"})
    kind = wanted.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise refused(
            name, f"{name}.type must be text, json_object or json_schema: got {shown(kind)}"
        )
    schema: Any = {"type": "object"} if kind == "json_object" else None
    if kind == "json_schema":
        stated = wanted.get("json_schema")
        schema = stated.get("schema") if isinstance(stated, dict) else None
        if not isinstance(schema, dict | bool):
            raise refused(name, f"{name}.json_schema.schema must be a schema: got {shown(schema)}")
    forced = tools is not None and bool(tools.forced)
    if schema is None and not forced:
        return None
    if forced:
        if schema is not None:
            raise refused(name, f"{name} and a tool_choice that forces a call are exclusive")
        name = "tool_choice"
    if not installed():
        raise refused(
            name,
            f"{name} of this kind is not supported: the server has no llguidance (pip install "
            "'polyhead[serve]')",
            "unsupported_parameter",
        )
    assert served.grammars is not None  # a decoder's
    try:
        if forced and tools is not None:
            return served.grammars.of_lark(tools.grammar)
        return served.grammars.of_schema(schema)
    except InputError as error:
        raise refused(name, str(error), "invalid_json_schema") from error
