"""Texts, models and what their heads do on them, kept for whoever asks: a page, a notebook.

A look is one run of one model on one text. It keeps q, k and lse of every layer and nothing of the
T×T matrices: pictures, rows and statistics are made when they are asked for. The last few looks
are kept, so that two can stand side by side.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyhead.checks import shown
from polyhead.errors import ContextLengthError, InputError, shortened
from polyhead.inspection.ablation import ablate
from polyhead.inspection.heads import TokenizedText
from polyhead.inspection.labels import label, visible
from polyhead.inspection.model import HeadsByLayer, device_of
from polyhead.inspection.notable import notable_heads
from polyhead.inspection.page import PageData, render
from polyhead.inspection.probe import Probe, probe
from polyhead.inspection.progress import Run
from polyhead.inspection.view import SUMMARY_NAMES

if TYPE_CHECKING:
    from polyhead.generation import LanguageModel, TextEncoder

    Model = LanguageModel | TextEncoder

KEPT_LOOKS = 6
"""Looks that are kept; of 4,096 tokens each of SmolLM2's takes 390 MB."""

_LIKELIEST = 12
_CHARACTERS_PER_TOKEN = 16
"""Texts have 3 to 5: so much of a long one shows that it is too long."""


@dataclass
class Look:
    """One model on one text.

    Attributes:
        number: Its name in the studio.
        model: The model's name.
        tokens: The text.
        seen: Every layer's queries, keys and lse.
        next_tokens: The likeliest next tokens, each with its probability; none of an encoder.
        seconds: How long the model ran.
    """

    number: int
    model: str
    tokens: TokenizedText
    seen: Probe
    next_tokens: list[tuple[str, float]]
    seconds: float
    summaries: dict[int, dict[str, list[float | None]]] = field(default_factory=dict)

    @property
    def heads(self) -> list[int]:
        """Query heads of each layer."""
        return [len(view.heads) for view in self.seen]

    def thumbnails(self, layer: int, pixels: int) -> npt.NDArray[np.uint8]:
        """Small maps of all heads of a layer, ``[H, P, P]``, 255 √weight.

        Every line is one query, spread evenly over the text, and exact: of the keys that share a
        pixel the largest weight is shown.
        """
        view = self.seen[layer]
        queries, keys = view.call.q_tokens.length, view.call.k_tokens.length
        lines = min(pixels, queries)
        cell = -(-keys // min(pixels, keys))
        chosen = [round(i * (queries - 1) / max(1, lines - 1)) for i in range(lines)]
        rows = torch.stack([view.call.row(query)[0] for query in chosen], dim=1)
        rows = torch.nn.functional.pad(rows, (0, -keys % cell))
        small = rows.view(*rows.shape[:2], -1, cell).amax(dim=-1)
        return (small.sqrt() * 255).round().to(torch.uint8).numpy()

    def region(
        self, layer: int, head: int, q_range: slice, k_range: slice, pixels: int
    ) -> npt.NDArray[np.float32]:
        """The largest weight of each cell of a rectangle, at most ``pixels`` cells a side."""
        picture = self.seen[layer].map(head, pixels, q_range=q_range, k_range=k_range)
        return picture[0].float().numpy()

    def row(self, layer: int, head: int, query: int) -> npt.NDArray[np.float32]:
        """One query's weights on all keys, ``[T]``."""
        if not 0 <= query < len(self.tokens.ids):
            raise InputError(f"query must be from 0 to {len(self.tokens.ids) - 1}: got {query}")
        rows = self.seen[layer].rows([head], slice(query, query + 1))
        return rows[0, 0, 0].float().numpy()

    def statistics(self, layer: int) -> dict[str, list[float | None]]:
        """Each statistic of a layer's heads; None where there is no number."""
        if layer not in self.summaries:
            summary = self.seen[layer].summary()
            numbers: dict[str, Tensor | None] = {n: getattr(summary, n) for n in SUMMARY_NAMES}
            self.summaries[layer] = {
                name: [x if x == x else None for x in values.tolist()]
                for name, values in numbers.items()
                if values is not None
            }
        return self.summaries[layer]

    def notable(self) -> dict[str, Any]:
        """The heads that do something known on this text."""
        return notable_heads(self.seen, self.tokens.ids)

    def page(self) -> str:
        """The self-contained page of this look.

        Raises:
            ValueError: The text is too long for one.
        """
        views = list(self.seen)
        count, length = self.heads, len(self.tokens.ids)
        if len(set(count)) > 1:
            raise InputError("its layers differ in their number of heads")
        weights = np.empty((len(views), count[0], length, length), dtype=np.float32)
        for layer, view in enumerate(views):
            weights[layer] = view.rows()[0].float().numpy()
        return render(
            PageData(
                title=self.tokens.text,
                model=self.model,
                tokens=self.tokens.pieces,
                weights=weights,
                num_kv_heads=[max(view.kv_heads) + 1 for view in views],
                notable=self.notable(),
            )
        )


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
        self.run = Run()
        """The latest run: how far it is."""

    def look(
        self,
        text: str,
        model: str = "",
        heads: HeadsByLayer | None = None,
        run: Run | None = None,
    ) -> Look:
        """Runs a model on a text.

        Args:
            text: At least one character.
            model: One of ``names``; ``""``: the first.
            heads: Heads to ablate, by layer.
            run: Told how far it is; may stop it.

        Raises:
            InputError: No text, an unknown model, or a head that is not there.
            Cancelled: ``run`` was stopped.
            ContextLengthError: More tokens than the model's context.
        """
        if not text.strip():
            raise InputError("the text is empty: give at least one character")
        run = run or Run()
        run.wait(self._running)
        try:
            self.run = run
            name, loaded = self._model(model)
            _check_length(loaded, text)
            tokens = TokenizedText.of(loaded.tokenizer, text)
            began = time.perf_counter()
            with probe(loaded) as seen, run.watching(loaded.transformer):
                following = run_text(loaded, tokens, heads or {})
            self._count += 1
            seconds = time.perf_counter() - began
            look = Look(self._count, name, tokens, seen, following, seconds)
            self._looks[look.number] = look
            while len(self._looks) > KEPT_LOOKS:
                self._looks.popitem(last=False)
        finally:
            self._running.release()
        return look

    def next_tokens(self, number: int, heads: HeadsByLayer) -> list[tuple[str, float]]:
        """The likeliest next tokens of a look's text with some heads ablated."""
        look = self[number]
        with self._running:
            return run_text(self._model(look.model)[1], look.tokens, heads)

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


def _check_length(model: Model, text: str) -> None:
    """Refuses a text that is far too long by its beginning: all of 10 MB takes minutes to split.

    Raises:
        ContextLengthError: More tokens than the model's context.
    """
    most = model.config.max_positions
    tokens = len(model.tokenizer.encode(text[: _CHARACTERS_PER_TOKEN * most]))
    if tokens > most:
        more = "at least " if len(text) > _CHARACTERS_PER_TOKEN * most else ""
        raise ContextLengthError(
            f"the text has {more}{tokens:,} tokens, the model's context holds {most:,}"
        )


def run_text(model: Model, tokens: TokenizedText, heads: HeadsByLayer) -> list[tuple[str, float]]:
    """Runs a model on a text and returns the likeliest next tokens."""
    ids = torch.tensor([tokens.ids], device=device_of(model))
    ablated: AbstractContextManager[None] = ablate(model, heads) if heads else nullcontext()
    with torch.inference_mode(), ablated:
        if model.config.kind != "decoder":
            model(ids)
            return []
        return likeliest(model, model(ids, last=1)[0, -1])


def likeliest(model: Model, logits: Tensor, count: int = _LIKELIEST) -> list[tuple[str, float]]:
    """The likeliest tokens of ``logits [W]``, each with its probability."""
    top = logits.float().softmax(-1).topk(min(count, len(logits)))
    pieces = [model.tokenizer.pieces([token])[0] for token in top.indices.tolist()]  # no text
    return list(zip(pieces, top.values.tolist(), strict=True))


def shown_tokens(likely: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """The same with signs for all that cannot be seen."""
    return [(visible(piece), share) for piece, share in likely]


def as_json(look: Look) -> Mapping[str, Any]:
    """What a page needs to know of a look at once."""
    return {
        "look": look.number,
        "model": look.model,
        "tokens": list(look.tokens.pieces),
        "shown": [visible(piece) for piece in look.tokens.pieces],
        "labels": [label(piece) for piece in look.tokens.pieces],
        "heads": look.heads,
        "kvHeads": [list(view.kv_heads) for view in look.seen],
        "next": shown_tokens(look.next_tokens),
        "seconds": look.seconds,
        "bytes": look.seen.nbytes,
    }
