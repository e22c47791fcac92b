"""Chat templates: a model's own Jinja program that turns messages into the text it was trained on.

A template comes with the weights, so it is untrusted code: it runs in Jinja's immutable sandbox and
sees strings, lists and dicts and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from polyhead.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.ext import Extension


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Renders messages.

    Args:
        template: the Jinja source.
        messages: dicts with ``role`` and ``content``; a key whose value is None counts as absent.
        special_tokens: ``bos_token``, ``eos_token`` and so on, which templates write themselves.
        add_generation_prompt: end with the words that open the assistant's turn.

    Raises:
        InputError: there are no messages, or the template refuses them (its own words follow).
        CheckpointError: the template is not valid Jinja.
    """
    from jinja2 import TemplateError
    from jinja2.exceptions import TemplateSyntaxError

    if not messages:
        raise InputError("messages must hold at least one message: got none")
    plain = json.loads(json.dumps([_present(message) for message in messages]))
    try:
        return _compiled(template).render(
            messages=plain,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except TemplateSyntaxError as error:
        raise CheckpointError(f"the model's chat template is not valid Jinja: {error}") from error
    except TemplateError as error:
        raise InputError(f"the model's chat template refuses these messages: {error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise InputError(f"the model's chat template fails on these messages: {error}") from error


def _present(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise InputError(f"a message must be a dict with 'role' and 'content': got {message!r}")
    return {key: value for key, value in message.items() if value is not None}


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        # Jinja's own filter escapes HTML, which would change the prompt.
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), loopcontrols]
    )
    environment.filters["tojson"] = tojson
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
