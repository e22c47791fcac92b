"""OpenAI's options, one table for each address: an option works, or is refused by name.

An option that is in no table is refused too. ``null`` is the same as leaving an option out.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polyhead._utils.checks import check_bool, check_int, check_number, check_one_of, shown
from polyhead.serving.http.errors import refused

MOST_ANSWERS = 32
"""Most answers to one prompt (``n``)."""
MOST_STOPS = 16
"""Most stop texts; OpenAI takes 4."""
MOST_BIASES = 1024
"""Most tokens of a ``logit_bias``."""

Read = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Option:
    """An option of a request.

    Attributes:
        note: What it does here, or why it is refused; docs/server.md has the same words.
        read: Checks a value and returns it; None where the option is refused.
        neutral: Values of a refused option that ask for nothing, and are accepted.
        effect: False: it is accepted and changes nothing.
    """

    note: str
    read: Read | None = None
    neutral: tuple[Any, ...] = ()
    effect: bool = True

    def value(self, name: str, given: Any) -> Any:
        """The checked value; ApiError names what is wrong or refused."""
        if self.read is None:
            if any(given is each or given == each for each in self.neutral):
                return None
            but = f" (only {' or '.join(map(json.dumps, self.neutral))})" if self.neutral else ""
            raise refused(
                name, f"{name} is not supported{but}: {self.note}", "unsupported_parameter"
            )
        try:
            return self.read(name, given)
        except (ValueError, TypeError) as error:
            raise refused(name, str(error), "invalid_value") from error


def read_options(table: Mapping[str, Option], body: Mapping[str, Any]) -> dict[str, Any]:
    """The checked options of a request; those that are null or without effect are left out.

    Raises:
        ApiError: 400 for an unknown, refused or wrong option, by name.
    """
    found = {}
    for name, given in body.items():
        option = table.get(name)
        if option is None:
            near = difflib.get_close_matches(name[:100], table, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise refused(name[:100], f"unknown option {shown(name)}{hint}", "unknown_parameter")
        if given is not None and (value := option.value(name, given)) is not None:
            found[name] = value
    return found


def required(options: Mapping[str, Any], name: str) -> Any:
    """An option that every request has."""
    if name not in options:
        raise refused(name, f"{name} is missing", "missing_required_parameter")
    return options[name]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string: got {shown(value)}")
    return value


def _truth(name: str, value: Any) -> bool:
    return check_bool(name, value)


def _whole(least: int, most: int | None = None) -> Read:
    return lambda name, value: check_int(name, value, least=least, most=most)


def _number(least: float, most: float) -> Read:
    return lambda name, value: check_number(name, value, least=least, most=most)


def _share(name: str, value: Any) -> float:
    return check_number(name, value, above=0, most=1)


def _one_of(*choices: str) -> Read:
    return lambda name, value: check_one_of(name, value, choices)


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise TypeError(f"{name} must be a list of at least one entry: got {shown(value)}")
    return value


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be an object: got {shown(value)}")
    return value


def _stops(name: str, value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(stop, str) and stop for stop in stops)
    ):
        raise ValueError(
            f"{name} must be a text, or a list of at most {MOST_STOPS} texts, none of them empty: "
            f"got {shown(value)}"
        )
    return stops


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise TypeError(
            f"{name} must be an object of at most {MOST_BIASES} token ids: got {shown(value)}"
        )
    found = {}
    for token, bias in value.items():
        if not (isinstance(token, str) and token.isdecimal() and len(token) < 10):
            raise ValueError(f"{name}: a key must be a token id: got {shown(token)}")
        found[int(token)] = float(check_number(f"{name}[{token}]", bias, least=-100, most=100))
    return found


def _stream_options(name: str, value: Any) -> dict[str, bool]:
    for key, entry in _object(name, value).items():
        if key not in ("include_usage", "include_obfuscation"):
            raise ValueError(f"{name} has no key {shown(key)}: include_usage")
        check_bool(f"{name}.{key}", entry)
        if key == "include_obfuscation" and entry:
            raise ValueError(f"{name}.include_obfuscation is not supported: pieces are sent as is")
    return value  # type: ignore[no-any-return]


_UNUSED = "nothing is stored or passed on"
_ANSWERS = _whole(1, MOST_ANSWERS)

_DRAWN: Mapping[str, Option] = {
    "model": Option("which of the served models answers", _text),
    "frequency_penalty": Option(
        "subtracted from a token's logit for each time that it was written", _number(-2, 2)
    ),
    "presence_penalty": Option(
        "subtracted once from the logits of tokens that were written", _number(-2, 2)
    ),
    "logit_bias": Option("added to the logits of tokens, by id", _biases),
    "max_tokens": Option("new tokens at most", _whole(1)),
    "n": Option(
        f"answers to a prompt, up to {MOST_ANSWERS}; answer i has the seed + i, from 0", _ANSWERS
    ),
    "seed": Option("the same seed gives the same text, whoever else is served", _whole(0)),
    "stop": Option(f"ends before this text; up to {MOST_STOPS} texts", _stops),
    "stream": Option("server-sent events", _truth),
    "stream_options": Option("`include_usage`: a last event with the usage", _stream_options),
    "temperature": Option("default 1; 0 is greedy", _number(0, 2)),
    "top_p": Option("default 1", _share),
    "user": Option(_UNUSED, _text, effect=False),
    "top_k": Option("draws from the k likeliest tokens", _whole(1)),
    "min_p": Option(
        "draws from tokens at least this share as likely as the likeliest",
        _number(0, 1),
    ),
    "repetition_penalty": Option(
        "logits of tokens that are there already are divided by it",
        _number(0.01, 100),
    ),
}  # fmt: skip

CHAT: Mapping[str, Option] = {
    "messages": Option("texts of system, developer, user, assistant and tool", _list),
    **_DRAWN,
    "max_completion_tokens": Option("new tokens at most", _whole(1)),
    "logprobs": Option("log-probabilities of the tokens, of the logits as they are", _truth),
    "top_logprobs": Option("and of so many likeliest tokens, up to 20", _whole(0, 20)),
    "response_format": Option(
        "`text`; `json_object` and `json_schema` with llguidance", _object
    ),
    "tools": Option("functions, where the model's chat template takes them", _list),
    "tool_choice": Option(
        "`none`, `auto`; `required` and a function's name with llguidance",
        lambda name, value: value if isinstance(value, str) else _object(name, value),
    ),
    "metadata": Option(_UNUSED, _object, effect=False),
    "safety_identifier": Option(_UNUSED, _text, effect=False),
    "prompt_cache_key": Option("a hint that is not needed", _text, effect=False),
    "audio": Option("answers are text"),
    "function_call": Option("use `tool_choice`"),
    "functions": Option("use `tools`"),
    "modalities": Option("answers are text", neutral=(["text"],)),
    "moderation": Option("nothing is moderated"),
    "parallel_tool_calls": Option(
        "a model writes as many calls as it likes", neutral=(True,)
    ),
    "prediction": Option("predicted texts are not used"),
    "prompt_cache_options": Option("the cache has no settings for a request"),
    "prompt_cache_retention": Option(
        "the cache has no settings for a request", neutral=("in_memory", "in-memory")
    ),
    "reasoning_effort": Option("say it in the prompt, if the model knows it", neutral=("none",)),
    "service_tier": Option("there is one tier", neutral=("auto", "default")),
    "store": Option("nothing is stored", neutral=(False,)),
    "verbosity": Option("say it in the prompt", neutral=("medium",)),
    "web_search_options": Option("nothing is searched"),
}  # fmt: skip
"""Options of ``/v1/chat/completions``."""

COMPLETIONS: Mapping[str, Option] = {
    "prompt": Option(
        "a text, token ids, or a list of texts or of lists of ids",
        lambda name, value: value if isinstance(value, str) else _list(name, value),
    ),
    **_DRAWN,
    "logprobs": Option(
        "log-probabilities of the tokens and of so many likeliest, up to 5", _whole(0, 5)
    ),
    "best_of": Option("all texts are sent: use `n`", neutral=(1,)),
    "echo": Option("the prompt is not sent back", neutral=(False,)),
    "suffix": Option("texts are continued, not filled", neutral=("",)),
}
"""Options of ``/v1/completions``."""

EMBEDDINGS: Mapping[str, Option] = {
    "model": Option("which of the served models answers", _text),
    "input": Option(
        "a text or a list of texts; no token ids",
        lambda name, value: value if isinstance(value, str) else _list(name, value),
    ),
    "encoding_format": Option("`float` or `base64`", _one_of("float", "base64")),
    "user": Option(_UNUSED, _text, effect=False),
    "dimensions": Option("a model's vectors have one length"),
}
"""Options of ``/v1/embeddings``."""

TRANSCRIPTIONS: Mapping[str, Option] = {
    "model": Option("which of the served models answers", _text),
    "file": Option("an audio file of at most 25 MiB", lambda name, value: value),
    "language": Option(
        "the language that is spoken, as a code; default: found by the model", _text
    ),
    "response_format": Option(
        "`json`, `text` or `verbose_json`", _one_of("json", "text", "verbose_json")
    ),
    "temperature": Option("default 0: greedy", _number(0, 1)),
    "timestamp_granularities": Option(
        "`segment`, with `verbose_json`",
        lambda name, value: check_one_of(name, value, [["segment"]]),
    ),
    "stream": Option("a transcript comes at once", neutral=(False,)),
    "prompt": Option("Whisper gets the sound alone", neutral=("",)),
    "chunking_strategy": Option("long recordings are cut at quiet places", neutral=("auto",)),
    "include": Option("no log-probabilities of transcripts"),
    "keywords": Option("Whisper gets the sound alone"),
    "known_speaker_names": Option("speakers are not told apart"),
    "known_speaker_references": Option("speakers are not told apart"),
    "languages": Option("one language a recording: use `language`"),
}
"""Options of ``/v1/audio/transcriptions``."""

TABLES: Mapping[str, Mapping[str, Option]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/audio/transcriptions": TRANSCRIPTIONS,
}
"""The options of each address."""
