"""One model on one text, kept for a page, a notebook or a file.

A look keeps q, k and lse of every layer, and no T×T matrix: pictures, rows and statistics are
computed on demand. All tokens of a look stand in one row, of a translation first the source and
then the output; the queries of a layer are a run of these tokens, and so are its keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from polyhead._utils.checks import check_int
from polyhead._utils.texts.labels import label, visible
from polyhead.errors import UnsupportedError
from polyhead.interpret.ablation import ablate
from polyhead.interpret.kept_rows import KeptRows
from polyhead.interpret.probe import Probe, probe
from polyhead.interpret.products import Product, product
from polyhead.interpret.statistics import TABLE
from polyhead.interpret.stream import Stream
from polyhead.interpret.view import AttentionView
from polyhead.layers.recurrent import RecurrentLayer
from polyhead.models.naming import attention_modules
from polyhead.models.parts import HeadsByLayer, device_of
from polyhead.viewer.next_token import TEMPERATURES, NextToken
from polyhead.viewer.notable import Findings, aligning_heads

if TYPE_CHECKING:
    from polyhead.checkpoints import Tokenizer
    from polyhead.generation import LanguageModel, TextEncoder, TextToText
    from polyhead.interpret.heads import TokenizedText
    from polyhead.interpret.source_alignment import SourceAlignment

    Reader = LanguageModel | TextEncoder
    Model = Reader | TextToText

ModelPart = Literal["layer", "encoder", "decoder", "cross"]

GUESSED = 5
"""Tokens of the guess after each layer."""


@dataclass(frozen=True)
class SeenLayer:
    """A layer of a look.

    Attributes:
        part: The part of the model: ``"layer"`` where all are alike.
        queries: (start, stop) of its queries among the look's tokens.
    """

    view: AttentionView
    part: ModelPart
    number: int
    queries: tuple[int, int]
    keys: tuple[int, int]

    @property
    def kv_heads(self) -> int:
        """The number of kv heads."""
        return max(self.view.kv_heads) + 1

    @property
    def shares(self) -> bool:
        """Whether its heads have no softmax, and shares in place of weights."""
        return isinstance(self.view.call, KeptRows)

    def statistics(self) -> dict[str, list[float | None]]:
        """Each statistic of its heads, if it applies to them; None for NaN."""
        return {
            name: [x if x == x else None for x in means.tolist()]
            for name, means in self.view.summary().means.items()
            if self.part != "cross" or not TABLE[name].one_sequence
        }


@dataclass
class Look:
    """One model on one text.

    Attributes:
        written: Output of an encoder-decoder.
        ids: All token ids, those of the source first.
        next_token: After the last token; None of an encoder.
        stream: The residual stream of the model's own layers.
        tokenizer: Tokenizer of the tokens that the model names.
        alignment: Alignment of an encoder-decoder's output.
        find: Runs the model on shuffles of the text; None of an encoder-decoder.
    """

    model: str
    kind: str
    text: str
    written: str
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    layers: list[SeenLayer]
    seconds: float
    next_token: NextToken | None
    stream: Stream
    tokenizer: Tokenizer
    seen: Probe
    alignment: SourceAlignment | None = None
    find: Callable[[], Findings] | None = None
    number: int = 0
    _said: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    _statistics: dict[int, dict[str, list[float | None]]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def heads(self) -> list[int]:
        """Query heads of each layer."""
        return [len(layer.view.heads) for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return self.seen.nbytes + self.stream.nbytes

    def thumbnails(self, layer: int, pixels: int, first: bool = True) -> npt.NDArray[np.uint8]:
        """Small maps of all heads of a layer, ``[H, P, P]``, 255 √weight.

        Every line is one query, spread evenly over the text, and exact: of the keys that share a
        pixel the largest weight is shown.

        Args:
            pixels: P, where there are as many tokens.
            first: Whether the first key is shown; without it rows are fractions of the rest.
        """
        call = self.layers[layer].view.call
        queries, keys = call.q_tokens.length, call.k_tokens.length
        lines = min(pixels, queries)
        cell = -(-keys // min(pixels, keys))
        chosen = [round(i * (queries - 1) / max(1, lines - 1)) for i in range(lines)]

        def line(query: int) -> torch.Tensor:
            row = call.row(query)[0]
            if not first:
                row[..., 0] = 0.0
                rest = row.sum(dim=-1, keepdim=True)
                row = torch.where(rest > 0, row / rest, 0.0)
            padded = torch.nn.functional.pad(row, (0, -keys % cell))
            return padded.view(len(row), -1, cell).amax(dim=-1)

        small = torch.stack([line(query) for query in chosen], dim=1)
        return (small.sqrt() * 255).round().to(torch.uint8).cpu().numpy()

    def region(
        self, layer: int, head: int, q_range: slice, k_range: slice, pixels: int
    ) -> npt.NDArray[np.float32]:
        """The largest weight of each cell of a rectangle, at most ``pixels`` cells a side."""
        view = self.layers[layer].view
        picture = view.map(head, pixels, q_range=q_range, k_range=k_range)
        return picture[0].float().cpu().numpy()

    def row(self, layer: int, head: int, query: int) -> npt.NDArray[np.float32]:
        """One query's weights on all keys of a layer, ``[S]``."""
        view = self.layers[layer].view
        check_int("query", query, least=0, most=view.call.q_tokens.length - 1)
        return view.rows([head], slice(query, query + 1))[0, 0, 0].float().cpu().numpy()

    def column(self, layer: int, head: int, key: int) -> npt.NDArray[np.float32]:
        """All queries' weights on one key of a layer, ``[T]``."""
        view = self.layers[layer].view
        check_int("key", key, least=0, most=view.call.k_tokens.length - 1)
        return view.tile(head, slice(None), slice(key, key + 1))[0, :, 0].float().cpu().numpy()

    def pair(self, query: int, key: int) -> npt.NDArray[np.float32]:
        """The weight of one token on another in every head, layer by layer.

        NaN in layers whose queries or keys are other tokens.
        """
        last = len(self.ids) - 1
        check_int("query", query, least=0, most=last)
        check_int("key", key, least=0, most=last)
        found = []
        for layer in self.layers:
            (q0, q1), (k0, k1) = layer.queries, layer.keys
            if q0 <= query < q1 and k0 <= key < k1:
                found.append(layer.view.call.row(query - q0)[0, :, key - k0].float())
            else:
                found.append(
                    torch.full((len(layer.view.heads),), torch.nan, device=layer.view.lse.device)
                )
        return torch.cat(found).cpu().numpy()

    def product(self, layer: int, head: int, query: int, key: int) -> Product:
        """How a query and a key of a layer come to their weight."""
        return product(self.layers[layer].view, head, query, key)

    def statistics(self, layer: int) -> dict[str, list[float | None]]:
        """Each statistic of a layer's heads; None where there is no number."""
        if layer not in self._statistics:
            self._statistics[layer] = self.layers[layer].statistics()
        return self._statistics[layer]

    @cached_property
    def findings(self) -> Findings | None:
        """What heads do on this text; the first time the model runs once more, on shuffles."""
        return None if self.find is None else self.find()

    def notable(self) -> dict[str, Any]:
        """What is worth seeing, for a page."""
        if self.alignment is None:
            return {} if self.findings is None else self.findings.as_json()
        first = next(i for i, layer in enumerate(self.layers) if layer.part == "cross")
        return aligning_heads(self.alignment, first)

    def way(self, token: int, guesses: bool = True) -> dict[str, Any]:
        """What each of the model's own layers adds to a token, and the guess after each.

        Args:
            token: Index of one of the look's tokens, one that the model's own layers read.

        Returns:
            ``sizes``: by part a number per layer. ``guesses``: before the first layer and after
            each the likeliest tokens with their probabilities; None where there are none.
        """
        start = len(self.ids) - len(self.own_tokens)
        place = check_int("token", token, least=start, most=len(self.ids) - 1) - start
        sizes = {
            name: [float(f"{x:.4g}") for x in values[:, place].tolist()]
            for name, values in self.stream.sizes.items()
        }
        named = None
        if guesses and self.stream.guesses_work and place >= self.stream.first:
            top = self.stream.guesses(place).softmax(-1).topk(GUESSED)
            named = [
                [[self.say(token), round(share, 4)] for token, share in zip(*both, strict=True)]
                for both in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ]
        return {"sizes": sizes, "guesses": named}

    @property
    def own_tokens(self) -> range:
        """The tokens that the model's own layers read: of a translation those of the output."""
        start = max((layer.queries[0] for layer in self.layers), default=0)
        return range(start, len(self.ids))

    def say(self, token: int) -> str:
        """A token by its id, with signs for invisible characters."""
        if token not in self._said:
            self._said[token] = visible(self.tokenizer.pieces([token])[0])
        return self._said[token]

    def next_json(self) -> dict[str, Any] | None:
        """The next token for a page."""
        return None if self.next_token is None else self.next_token.as_json(self.tokenizer.pieces)

    def header(self) -> dict[str, Any]:
        """What a page needs of a look at the start."""
        return {
            "look": self.number,
            "model": self.model,
            "kind": self.kind,
            "title": self.text,
            "continuation": f" → {self.written}" if self.written else "",
            **labelled(self.pieces),
            "layers": [
                {
                    "part": layer.part,
                    "number": layer.number,
                    "heads": len(layer.view.heads),
                    "kvHeads": layer.kv_heads,
                    "queries": layer.queries,
                    "keys": layer.keys,
                    "shares": layer.shares,
                    "triangle": self.kind != "encoder" and layer.part in ("layer", "decoder"),
                }
                for layer in self.layers
            ],
            "next": self.next_json(),
            "temperatures": TEMPERATURES,
            "own": self.own_tokens.start,
            "seconds": self.seconds,
            "bytes": self.nbytes,
        }


def labelled(pieces: tuple[str, ...] | list[str]) -> dict[str, list[str]]:
    """Tokens as pages show them: as they are, with signs for invisible characters, and for axes."""
    return {
        "tokens": list(pieces),
        "shown": [visible(piece) for piece in pieces],
        "labels": [label(piece) for piece in pieces],
    }


@contextmanager
def _watched(model: Model, heads: HeadsByLayer) -> Iterator[tuple[Probe, Stream]]:
    """A model without some heads, whose attention and residual stream are recorded."""
    stream = Stream(model.transformer)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(without(model, heads))
        seen = stack.enter_context(probe(model))
        stack.enter_context(stream.watching())
        yield seen, stream


def without(model: nn.Module, heads: HeadsByLayer) -> AbstractContextManager[None]:
    """The model runs without some heads while the block runs."""
    return ablate(model, heads) if heads else nullcontext()


def look_at(name: str, model: Reader, tokens: TokenizedText, heads: HeadsByLayer) -> Look:
    """Runs a decoder or an encoder on a text.

    Args:
        name: What the user calls the model.
        heads: Heads that are ablated, by layer.

    Raises:
        UnsupportedError: A layer whose state is no heads, such as Mamba-1's.
    """
    for path, module in attention_modules(model).items():
        if isinstance(module, RecurrentLayer) and not module.reads_by_heads:
            raise UnsupportedError(
                f"a look shows layers whose heads look at tokens: {name} has others, {path} first; "
                "ph.probe shows its other layers"
            )
    began = time.perf_counter()
    with _watched(model, heads) as (seen, stream):
        following = next_token(model, tokens.ids)
    seconds = time.perf_counter() - began
    all_tokens = (0, len(tokens.ids))

    def find() -> Findings:
        with without(model, heads):
            return Findings.of(model, tokens, seen, causal=model.config.kind == "decoder")

    return Look(
        name,
        model.config.kind,
        tokens.text,
        "",
        tuple(tokens.ids),
        tuple(tokens.pieces),
        [
            SeenLayer(view, "layer", number, all_tokens, all_tokens)
            for number, view in enumerate(seen)
        ],
        seconds,
        following,
        stream,
        model.tokenizer,
        seen,
        find=find,
    )


def next_token(model: Reader, ids: Sequence[int]) -> NextToken | None:
    """Runs a model on a text; None of an encoder, which names no next token."""
    row = torch.tensor([ids], device=device_of(model))
    with torch.inference_mode():
        if model.config.kind != "decoder":
            model(row)
            return None
        return NextToken.of(model(row, last=1)[0, -1].float())


def look_through(
    name: str, model: TextToText, text: str, arguments: Mapping[str, Any], heads: HeadsByLayer
) -> Look:
    """What ``model.generate(text, **arguments)`` writes, read once more under a probe.

    Args:
        name: What the user calls the model.
        heads: Heads of the decoder that are ablated, by layer.
    """
    from polyhead.interpret.source_alignment import align

    began = time.perf_counter()
    with without(model, heads):
        made = model.generate(text, **arguments)
        source, start = model.both_ids(text, **arguments)
        read = [*start, *made.ids][:-1]
        device = device_of(model)
        with _watched(model, {}) as (seen, stream):
            both = (torch.tensor([ids], device=device) for ids in (source, read))
            logits = model(*both)
        found = align(model, torch.tensor(source), [*start, *made.ids], prompt=len(start))
    S, T = len(source), len(source) + len(read)
    runs = {"encoder": ((0, S), (0, S)), "decoder": ((S, T), (S, T)), "cross": ((S, T), (0, S))}
    parts: tuple[ModelPart, ...] = ("encoder", "decoder", "cross")
    pieces = [*model.source_tokenizer.pieces(source), *model.tokenizer.pieces(read)]
    return Look(
        name,
        "encoder-decoder",
        text,
        made.text,
        (*source, *read),
        tuple(pieces),
        [
            SeenLayer(view, part, number, *runs[part])
            for part in parts
            for number, view in enumerate(getattr(seen, part))
        ],
        time.perf_counter() - began,
        NextToken.of(logits[0, -1].float()),
        stream,
        model.tokenizer,
        seen,
        found,
    )
