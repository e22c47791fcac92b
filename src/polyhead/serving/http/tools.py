"""Functions that a model may call: what its template is told, and calls read from its text.

The template writes the functions into the prompt, and the model answers with calls as it was
trained to write them. Two forms are known: an object between ``<tool_call>`` and ``</tool_call>``
(Hermes, Qwen), and an answer that is nothing but an object (Llama 3).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyhead._utils.checks import shown
from polyhead.checkpoints.json_file import parse_json
from polyhead.generation.decoding.stops import StopTexts
from polyhead.serving.grammars import JSON_FORM, check_patterns
from polyhead.serving.http.errors import refused

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_MOST_TOOLS = 128


@dataclass(frozen=True)
class Call:
    """A call of a function that a model wrote."""

    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        return {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True)
class Tools:
    """The functions of a request.

    Attributes:
        given: As the template gets them.
        marked: Whether calls stand between marks; False: an answer is a call or none.
        forced: Names of functions of which the answer must call one; empty: as the model likes.
    """

    given: Sequence[Mapping[str, Any]]
    marked: bool
    forced: Sequence[str] = ()

    @property
    def grammar(self) -> str:
        """A forced call in llguidance's form of Lark.

        Raises:
            InputError: Regular expressions that are long.
        """
        schemas = [
            self._schema(tool["function"])
            for tool in self.given
            if tool["function"]["name"] in self.forced
        ]
        rules = [f"call{n}: %json {json.dumps(schema)}" for n, schema in enumerate(schemas)]
        call = " | ".join(f"call{n}" for n in range(len(schemas)))
        around = (f'"{OPEN}\\n" ', f' "\\n{CLOSE}"') if self.marked else ("", "")
        return "\n".join([f"start: {around[0]}call{around[1]}", f"call: {call}", *rules])

    def _schema(self, function: Mapping[str, Any]) -> dict[str, Any]:
        """A call of a function."""
        key = "arguments" if self.marked else "parameters"
        arguments = function.get("parameters") or {"type": "object"}
        check_patterns(arguments)
        shared = {name: arguments[name] for name in ("$defs", "definitions") if name in arguments}
        return {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, key: arguments},
            "required": ["name", key],
            "additionalProperties": False,
            **shared,  # references begin at the root
            "x-guidance": JSON_FORM,
        }


def tools_of(options: Mapping[str, Any], template: str | None) -> Tools | None:
    """The functions that a request lets the model call; None where it lets it call none.

    Raises:
        ApiError: Functions of another form, or a template that knows none.
    """
    choice = options.get("tool_choice")
    if "tools" not in options:
        if choice not in (None, "none", "auto"):
            raise refused("tool_choice", "tool_choice needs tools")
        return None
    given = [_tool(number, each) for number, each in enumerate(options["tools"])]
    if len(given) > _MOST_TOOLS:
        raise refused("tools", f"tools must be at most {_MOST_TOOLS}: got {len(given)}")
    names: list[str] = [tool["function"]["name"] for tool in given]
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or name not in names:
            raise refused(
                "tool_choice", f"tool_choice must name one of the tools: got {shown(choice)}"
            )
        forced = [str(name)]
    elif choice in (None, "none", "auto", "required"):
        forced = names if choice == "required" else []
    else:
        raise refused(
            "tool_choice",
            f"tool_choice must be none, auto, required or a function: got {shown(choice)}",
        )
    if choice == "none":
        return None
    if template is None or not re.search(r"\btools\b", template):
        raise refused(
            "tools", "tools are not supported: this model's chat template knows none",
            "unsupported_parameter",
        )  # fmt: skip
    if OPEN in template and "<function=" not in template:
        return Tools(given, True, forced)
    if re.search(r'"name": function name, "parameters"', template):
        return Tools(given, False, forced)
    raise refused(
        "tools",
        "tools are not supported for this model: the form of its calls is not known",
        "unsupported_parameter",
    )


def _tool(number: int, tool: Any) -> dict[str, Any]:
    where = f"tools[{number}]"
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise refused("tools", f"{where} must be of type 'function': got {shown(tool)}")
    function: Any = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refused(
            "tools", f"{where}.function.name must be letters, digits, _ . -: got {shown(name)}"
        )
    if not isinstance(function.get("parameters", {}), dict | None):
        raise refused("tools", f"{where}.function.parameters must be a JSON schema")
    return tool


class CallReader:
    """Separates the calls in a text that comes in pieces from the words around them.

    Args:
        tools: The functions.
    """

    def __init__(self, tools: Tools) -> None:
        self._names = {tool["function"]["name"] for tool in tools.given}
        self._marked, self._plain, self._held = tools.marked, False, ""
        self._until = StopTexts(OPEN)
        self._inside: str | None = None
        self._blank = ""
        self.calls = 0

    def feed(self, piece: str) -> Iterator[str | Call]:
        """What is certain now: words and whole calls."""
        if not self._marked:
            self._held += piece
            # An object may be a call, which all of it says.
            self._plain = self._plain or self._held.lstrip()[:1] not in ("", "{")
            if self._plain:
                yield self._held
                self._held = ""
            return
        while piece:
            if self._inside is None:
                words, piece = self._split(piece)
                yield from self._words(words)
            else:
                self._inside += piece
                written, closed, piece = self._inside.partition(CLOSE)
                if not closed:
                    return
                self._inside = None
                yield self._call(written, f"{OPEN}{written}{CLOSE}")

    def flush(self) -> Iterator[str | Call]:
        """What is left, now that no more text comes."""
        if not self._marked:
            if self._held:
                yield self._call(self._held, self._held)
        elif self._inside is not None:
            yield self._call(self._inside, OPEN + self._inside)
        else:
            yield from self._words(self._until.flush())

    def _split(self, piece: str) -> tuple[str, str]:
        """Words before a mark, and what is behind it."""
        before = self._until.flush() + piece
        self._until = StopTexts(OPEN)
        words = self._until.feed(before)
        if not self._until.found:
            return words, ""
        self._until = StopTexts(OPEN)
        self._inside = ""
        return words, before[len(words) + len(OPEN) :]

    def _words(self, words: str) -> Iterator[str]:
        """The words, without the white space between calls."""
        self._blank += words
        if self._blank.strip() or not self.calls:
            if self._blank:
                yield self._blank
            self._blank = ""

    def _call(self, written: str, otherwise: str) -> str | Call:
        """A call, or the words themselves where they are none of these functions."""
        try:
            found = parse_json(written.strip())
        except ValueError:
            return otherwise
        if not isinstance(found, dict) or found.get("name") not in self._names:
            return otherwise
        arguments = found.get("arguments", found.get("parameters", {}))
        if not isinstance(arguments, dict):
            return otherwise
        self.calls += 1
        self._blank = ""
        return Call(found["name"], json.dumps(arguments, ensure_ascii=False))
