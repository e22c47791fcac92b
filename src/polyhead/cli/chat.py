"""``polyhead chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyhead.cli import options
from polyhead.errors import InputError

if TYPE_CHECKING:
    from polyhead.generation import Conversation

_HELP = """\
/help          these commands
/system TEXT   another system prompt; without TEXT: none
/undo          take the last exchange back
/clear         begin anew
/save FILE     write the conversation to FILE, as JSON
/stats         sizes and speed of the last answer
/quit          end; so does Ctrl-D
A line that ends in \\ goes on in the next one. Ctrl-C stops an answer."""


def chat(
    model: options.ModelName = "smollm2",
    system: Annotated[str, typer.Option(metavar="TEXT", help="The system prompt.")] = "",
    max_new_tokens: options.MaxNewTokens = 512,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    quantize: options.Quantize = None,
    activations: options.Activations = None,
) -> None:
    """Chat with a model.

    It remembers what was said, as far as its context reaches. /help lists the commands.
    """
    from polyhead.cli.models import load_expecting
    from polyhead.generation import Conversation, LanguageModel

    loaded = load_expecting(
        model, dtype, LanguageModel, device=device, quantize=quantize, activations=activations
    )
    talk = Conversation(
        loaded,
        system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    asked = sys.stdin.isatty()
    if asked:
        _note(f"{loaded.origin or model} · /help lists the commands, Ctrl-D ends")
    elif hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8")  # which a pipe of Windows is not by itself
    while (said := _read(asked)) is not None:
        if said.startswith("/") and not said.startswith("//"):
            if not _command(talk, said):
                return
        elif said.strip():
            _answer(talk, said.removeprefix("/"))


def _read(asked: bool) -> str | None:
    """A message of one line, or of several that end in a backslash; None at the end."""
    lines: list[str] = []
    while True:
        try:
            if asked:
                with suppress(ImportError):  # Windows has none: its console has both itself
                    import readline  # noqa: F401 - arrow keys and history for input()

                line = input("  " if lines else "> ")
            else:
                line = sys.stdin.readline()
                if not line:
                    raise EOFError
        except KeyboardInterrupt:  # drop the unfinished input
            lines.clear()
            print(file=sys.stderr)
            continue
        except EOFError:
            return "\n".join(lines) if lines else None
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not UTF-8 text: {error.reason}") from error
        line = line.removesuffix("\n")
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


def _answer(talk: Conversation, text: str) -> None:
    from polyhead.cli.terminal import write_text

    before = talk.left_out
    pieces = talk.say(text)
    try:
        for piece in pieces:
            write_text(piece)
    except KeyboardInterrupt:
        pass  # ends this answer only, not the conversation
    finally:
        pieces.close()
    write_text("\n")
    if talk.left_out > before:
        _note(f"the {talk.left_out} oldest messages do not fit into the context any more")


def _command(talk: Conversation, line: str) -> bool:
    """Carries a command out; False where it ends the conversation."""
    name, _, rest = line.partition(" ")
    if name in ("/quit", "/exit"):
        return False
    commands: dict[str, Callable[[], str]] = {
        "/help": lambda: _HELP,
        "/system": lambda: _system(talk, rest.strip()),
        "/undo": lambda: "taken back" if talk.undo() else "nothing has been said yet",
        "/clear": lambda: _clear(talk),
        "/save": lambda: _save(talk, rest.strip()),
        "/stats": lambda: _stats(talk),
    }
    command = commands.get(name)
    _note(command() if command else f"there is no command {name}: /help lists them")
    return True


def _system(talk: Conversation, text: str) -> str:
    talk.system = text
    return "the system prompt is changed" if text else "there is no system prompt"


def _clear(talk: Conversation) -> str:
    talk.clear()
    return "all that was said is forgotten"


def _save(talk: Conversation, name: str) -> str:
    import json

    from polyhead._utils.atomic_write import write_file

    if not name:
        return "/save needs a FILE"
    system = [{"role": "system", "content": talk.system}] if talk.system else []
    text = json.dumps([*system, *talk.messages], ensure_ascii=False, indent=2) + "\n"
    try:
        write_file(Path(name).expanduser(), text)
    except OSError as error:
        return f"cannot write {name!r}: {(error.strerror or str(error)).lower()}"
    except ValueError as error:
        return str(error)
    return f"{len(talk.messages)} messages are in {name}"


def _stats(talk: Conversation) -> str:
    from polyhead.cli.generate import figures

    return "nothing has been said yet" if talk.stats is None else figures(talk.stats)


def _note(text: str) -> None:
    from polyhead.cli.terminal import console

    console(stderr=True).print(text, style="dim", soft_wrap=True)
