"""Models by name and the latest looks, for the served page or a notebook.

The last few looks are kept, so that two can stand side by side.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from polyhead._utils.checks import check_int, check_number, shown
from polyhead.errors import ContextLengthError, InputError, shortened
from polyhead.interpret.heads import TokenizedText
from polyhead.models.parts import HeadsByLayer, device_of
from polyhead.viewer.looks import Look, look_at, look_through, next_token, without
from polyhead.viewer.next_token import LISTED, NextToken
from polyhead.viewer.progress import ModelRun

if TYPE_CHECKING:
    from polyhead.viewer.looks import Model

KEPT_LOOKS = 6
"""Looks that are kept; of 4,096 tokens each of SmolLM2's takes 390 MB."""

MOST_WRITTEN = 512
"""Tokens that a page may ask for at once."""

_CHARACTERS_PER_TOKEN = 16
"""Texts have 3 to 5; a beginning of this many for each token of the context is enough to tell."""


class Studio:
    """Models by name, and the latest looks.

    Args:
        load: Makes the model of a name; called once for each.
        names: The models that may be chosen, the first by default.
    """

    def __init__(self, load: Callable[[str], Model], names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._load = load
        self._models: dict[str, Model] = {}
        self._looks: OrderedDict[int, Look] = OrderedDict()
        self._count = 0
        # A probe sees every call of its model, so one text runs at a time.
        self._running = threading.Lock()
        self.run = ModelRun()
        """The latest run: how far it is."""

    def look(
        self,
        text: str,
        model: str = "",
        heads: HeadsByLayer | None = None,
        run: ModelRun | None = None,
    ) -> Look:
        """Runs a model on a text.

        Args:
            model: One of ``names``; ``""``: the first.
            run: Told how far it is; may stop it.

        Raises:
            InputError: No text, an unknown model, or a head that is not there.
            ContextLengthError: More tokens than the model's context.
        """
        if not text.strip():
            raise InputError("the text is empty: give at least one character")
        run = run or ModelRun()
        run.wait(self._running)
        try:
            self.run = run
            name, loaded = self._model(model)
            with run.watching(loaded.transformer):
                if loaded.config.kind == "encoder-decoder":
                    look = look_through(name, loaded, text, {}, heads or {})  # type: ignore[arg-type]
                else:
                    _check_length(loaded, text)
                    tokens = TokenizedText.of(loaded.tokenizer, text)
                    look = look_at(name, loaded, tokens, heads or {})  # type: ignore[arg-type]
            self._count += 1
            look.number = self._count
            self._looks[look.number] = look
            while len(self._looks) > KEPT_LOOKS:
                self._looks.popitem(last=False)
        finally:
            self._running.release()
        return look

    def notable(self, number: int) -> dict[str, Any]:
        """What is worth seeing on a look's text; the first time the model runs on shuffles."""
        look = self[number]
        with self._running:
            return look.notable()

    def next_token(self, number: int, heads: HeadsByLayer) -> NextToken | None:
        """The next token of a look's text with some heads ablated; None of an encoder."""
        look = self[number]
        with self._running:
            _, model = self._model(look.model)
            with without(model, heads):
                if look.kind != "encoder-decoder":
                    return next_token(model, look.ids)  # type: ignore[arg-type]
                start = look.own_tokens.start
                both = (torch.tensor([ids]) for ids in (look.ids[:start], look.ids[start:]))
                source, read = (ids.to(device_of(model)) for ids in both)
                with torch.inference_mode():
                    return NextToken.of(model(source, read)[0, -1].float())

    def write(
        self,
        number: int,
        heads: HeadsByLayer,
        options: Mapping[str, Any],
        run: ModelRun | None = None,
    ) -> str:
        """A decoder's continuation of a look's text.

        Args:
            number: Number of the look.
            heads: Heads to ablate, by layer.
            options: ``max_new_tokens``, ``temperature``, ``top_k`` and ``seed``.
            run: May stop it; what was written until then is returned.

        Raises:
            InputError: Not a decoder, an option that there is not, or one out of range.
        """
        look, run = self[number], run or ModelRun()
        wanted = _writing(options)
        run.wait(self._running)
        try:
            _, model = self._model(look.model)
            if look.kind != "decoder":
                raise InputError(f"{look.model} is not a decoder: it cannot continue texts")
            pieces: list[str] = []
            with without(model, heads):
                for piece in model.stream(look.text, **wanted):  # type: ignore[operator]
                    pieces.append(piece)
                    if run.stopped:
                        break
            return "".join(pieces)
        finally:
            self._running.release()

    def __getitem__(self, number: int) -> Look:
        if number not in self._looks:
            raise InputError(f"look {shown(number)} is not kept any more: look at the text again")
        return self._looks[number]

    def _model(self, name: str) -> tuple[str, Model]:
        name = name or self.names[0]
        if name not in self.names:
            raise InputError(f"model must be one of {', '.join(self.names)}: got {shortened(name)}")
        if name not in self._models:
            self._models[name] = self._load(name)
        return name, self._models[name]


def _writing(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of generation that a page may set, checked."""
    known = {"max_new_tokens", "temperature", "top_k", "seed"}
    if strange := sorted({*options} - known):
        raise InputError(f"options are {', '.join(sorted(known))}: got {shortened(strange[0])}")
    given = options.get("max_new_tokens", 24)
    count = check_int("max_new_tokens", given, least=1, most=MOST_WRITTEN, error=InputError)
    wanted: dict[str, Any] = {"max_new_tokens": count, "temperature": None}
    heat = check_number(
        "temperature", options.get("temperature", 0), least=0, most=2, error=InputError
    )
    if heat == 0:
        return wanted  # greedy, whatever the model's files say
    wanted["temperature"] = heat
    for name, least, most in (("top_k", 1, LISTED), ("seed", 0, 2**31)):
        if options.get(name) is not None:
            wanted[name] = check_int(name, options[name], least=least, most=most, error=InputError)
    return wanted


def _check_length(model: Model, text: str) -> None:
    """Refuses a text that is far too long by its beginning: splitting 10 MB takes minutes."""
    most = model.config.max_positions
    tokens = len(model.tokenizer.encode(text[: _CHARACTERS_PER_TOKEN * most]))
    if tokens > most:
        more = "at least " if len(text) > _CHARACTERS_PER_TOKEN * most else ""
        raise ContextLengthError(
            f"the text has {more}{tokens:,} tokens, the model's context holds {most:,}"
        )
