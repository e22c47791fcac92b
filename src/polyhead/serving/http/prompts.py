"""Messages of a chat as the text that the model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyhead._utils.checks import shown
from polyhead.checkpoints import Tokenizer
from polyhead.checkpoints.json_file import parse_json
from polyhead.errors import CheckpointError, InputError
from polyhead.serving.http.errors import refused

ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "audio"))


def chat_ids(
    tokenizer: Tokenizer, messages: Sequence[Any], tools: Sequence[Mapping[str, Any]] | None
) -> list[int]:
    """The tokens that a model reads for a chat.

    Raises:
        ApiError: messages of another form, by the number of the message; or the template refuses
            them, or there is none.
    """
    plain = [message_of(number, each) for number, each in enumerate(messages)]
    try:
        text = tokenizer.apply_chat_template(plain, tools=tools)
    except (CheckpointError, InputError) as error:
        raise refused("messages", str(error)) from error
    return tokenizer.encode(text, add_special=False, release_gil=True)


def message_of(number: int, message: Any) -> dict[str, Any]:
    """A message as templates read it: its content a text, arguments of calls objects.

    Raises:
        ApiError: another form, or a content that is no text.
    """
    where = f"messages[{number}]"
    if not isinstance(message, dict):
        raise refused("messages", f"{where} must be an object: got {shown(message)}")
    if unknown := [key for key in message if key not in _KEYS]:
        raise refused("messages", f"{where} has an unknown key {shown(unknown[0])}")
    role = message.get("role")
    if role not in ROLES:
        raise refused(
            "messages", f"{where}.role must be one of {', '.join(ROLES)}: got {shown(role)}"
        )
    if message.get("audio") is not None:
        raise refused("messages", f"{where}.audio is not supported: messages are text")
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = message.get("tool_calls")
    if message.get("content") is not None or not calls:
        made["content"] = _content(f"{where}.content", message.get("content"))
    for key in ("name", "tool_call_id"):
        if (value := message.get(key)) is not None:
            if not isinstance(value, str):
                raise refused("messages", f"{where}.{key} must be a string: got {shown(value)}")
            made[key] = value
    if calls:
        made.setdefault("content", "")
        made["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    return made


def _content(where: str, content: Any) -> str:
    """A text, or the texts of a list of parts behind each other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise refused("messages", f"{where} must be a text: got {shown(content)}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise refused(
                "messages", f"{where}: parts must be of type 'text': got {shown(kind or part)}"
            )
        texts.append(text)
    return "".join(texts)


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise refused("messages", f"{where} must be a list: got {shown(calls)}")
    made = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise refused(
                "messages",
                f"{where} must hold functions with a name and arguments as text: got {shown(call)}",
            )
        try:
            read = parse_json(arguments or "{}")
        except ValueError:
            read = arguments  # what a model wrote may be no JSON
        made.append(
            {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": name, "arguments": read},
            }
        )
    return made
