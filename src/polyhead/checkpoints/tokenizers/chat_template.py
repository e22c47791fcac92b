"""Chat templates: a model's own Jinja program that turns messages into the text it was trained on.

A template comes with the weights, so it is untrusted code: it runs in Jinja's immutable sandbox,
sees strings, lists and dicts and nothing else, and can do only so much work (``template_limits``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from polyhead.errors import CheckpointError, InputError, shortened

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.ext import Extension

_LONGEST = 200_000
_MOST_WORDS = 500


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Renders messages.

    Args:
        template: the Jinja source.
        messages: dicts with ``role`` and ``content``; a key whose value is None counts as absent.
        special_tokens: ``bos_token``, ``eos_token`` and so on, which templates write themselves.
        add_generation_prompt: end with the words that open the assistant's turn.
        tools: functions that the model may call, as OpenAI's API describes them.

    Raises:
        InputError: there are no messages, or the template refuses them (its own words follow).
        CheckpointError: the template is not valid Jinja.
    """
    if not messages:
        raise InputError("messages must hold at least one message: got none")
    given = {
        "messages": _plain("messages", [_present(message) for message in messages]),
        "tools": None if tools is None else _plain("tools", tools),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **special_tokens,
    }
    compiled = _checked(template)
    from jinja2 import TemplateError

    from polyhead.checkpoints.tokenizers.template_limits import TooMuchWork, spending

    try:
        with spending(given):
            return compiled.render(given)
    except TooMuchWork as error:
        raise InputError(
            "the model's chat template does too much work on these messages and was stopped"
        ) from error
    except TemplateError as error:
        raise InputError(
            f"the model's chat template refuses these messages: {_words(error)}"
        ) from error
    except Exception as error:  # untrusted code: it may raise anything
        raise InputError(
            f"the model's chat template fails on these messages: {_words(error)}"
        ) from error


def _checked(template: str) -> Template:
    """The compiled template."""
    if len(template) > _LONGEST:
        raise CheckpointError(
            f"the model's chat template has {len(template):,} characters, more than {_LONGEST:,}"
        )
    try:
        return _compiled(template)
    except Exception as error:  # errors of Jinja, and of Python while it compiles Jinja's output
        raise CheckpointError(
            f"the model's chat template is not valid Jinja: {_words(error)}"
        ) from error


def _words(error: Exception) -> str:
    """An error's message, shortened: a template may choose its words."""
    text = " ".join(str(error)[:_MOST_WORDS].split()) or "no reason given"
    name = type(error).__name__
    return f"{name}: {text}" if isinstance(error, RecursionError | MemoryError) else text


def _plain(name: str, value: Sequence[Mapping[str, Any]]) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name} must hold what JSON can: {error}") from error


def _present(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise InputError(
            f"a message must be a dict with 'role' and 'content': got {shortened(message)}"
        )
    return {key: value for key, value in message.items() if value is not None}


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols

    from polyhead.checkpoints.tokenizers.template_limits import LimitedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        # Jinja's own filter escapes HTML, which would change the prompt.
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), loopcontrols]
    )
    environment.add_filter("tojson", tojson)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _generation_tag() -> type[Extension]:
    """``{% generation %}`` marks the assistant's words for training; here it renders its body."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag
