"""Every head of a model on one text, as one HTML file that needs nothing but a browser.

`render` packs the attention weights of all layers and heads into a self-contained page and `write`
puts that page on disk in one step. The page's own parts (markup, style, scripts) lie in the folder
`page/` beside this file; nothing is built and nothing is fetched.

How the weights travel, per layer (L layers, H heads, T tokens)::

    [H, T, T] float32  ->  lower triangle if all layers are causal, else everything
                       ->  float16 if all layers together pass FLOAT32_BYTES (the page says so)
                       ->  little-endian bytes, row by row  ->  gzip  ->  base64  ->  <script>

Text never becomes markup: it travels as JSON and enters the page through `textContent` only, and
the page's content security policy forbids the network and every script but its own.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from polyhead.inspection.labels import label, visible
from polyhead.texts import LANGUAGES, every
from polyhead.writing import replacing

__all__ = ["HeadStatistics", "PageData", "render", "write"]

FloatArray: TypeAlias = npt.NDArray[np.float32]

FLOAT32_BYTES = 24_000_000
"""Weights that take more bytes than this as float32 are stored as float16."""

FLOAT16_BYTES = 64_000_000
"""Weights that take more bytes than this as float16 are refused: browsers choke on them."""

SCRIPTS = (
    "dom",
    "texts",
    "ramp",
    "data",
    "state",
    "colour",
    "maps",
    "large",
    "text",
    "tables",
    "lines",
    "looks",
    "page",
)
"""The page's scripts in the order in which they are joined into one."""


@dataclass(frozen=True)
class HeadStatistics:
    """What each head does on a text, one number per head, each a float32 array [L, H].

    Every number is a mean over the queries after the first that see anything: the first query of a
    causal model can only look at itself, which says nothing about the head. Where no such query
    exists the number is NaN.

    Attributes:
        entropy: Entropy of a row in nats, 0 (one key) to ln T (all keys alike).
        first_token: Weight on key 0.
        previous_token: Weight on the key just before the query.
        self_token: Weight on the query's own position.
        mean_distance: Weighted distance |query - key| in tokens.
        max_weight: Largest weight of the row.
    """

    entropy: FloatArray
    first_token: FloatArray
    previous_token: FloatArray
    self_token: FloatArray
    mean_distance: FloatArray
    max_weight: FloatArray

    @classmethod
    def from_weights(cls, weights: npt.NDArray[np.floating]) -> HeadStatistics:
        """Summarises weights [L, H, T, T] layer by layer, in float64 inside."""
        layers, heads, tokens, _ = weights.shape
        found = np.full((6, layers, heads), np.nan, dtype=np.float32)
        queries = np.arange(1, tokens)
        distance = np.abs(np.arange(tokens)[:, None] - np.arange(tokens)).astype(np.float64)[1:]
        for layer in range(layers if tokens > 1 else 0):
            rows = weights[layer, :, 1:, :].astype(np.float64)
            logs = np.log(rows, out=np.zeros_like(rows), where=rows > 0)
            per_query = np.stack(
                [
                    -(rows * logs).sum(-1),
                    rows[:, :, 0],
                    rows[:, queries - 1, queries - 1],
                    rows[:, queries - 1, queries],
                    (rows * distance).sum(-1),
                    rows.max(-1),
                ]
            )
            seeing = rows.sum(-1) > 0
            count = seeing.sum(-1)
            total = (per_query * seeing).sum(-1)
            np.divide(total, count, out=found[:, layer], where=count > 0, casting="same_kind")
        return cls(*found)

    def named(self) -> dict[str, FloatArray]:
        """The numbers under the names that the page shows, in its order."""
        return {
            "entropy": self.entropy,
            "first_token": self.first_token,
            "previous_token": self.previous_token,
            "self_token": self.self_token,
            "mean_distance": self.mean_distance,
            "max_weight": self.max_weight,
        }


@dataclass(frozen=True)
class PageData:
    """What the page shows.

    Attributes:
        title: The text that was looked at; the page shortens it as needed.
        model: The model's name.
        tokens: The text's T tokens as pieces of text, any characters.
        weights: float32 (or float16) [L, H, T, T], row = query, column = key; each row sums to 1,
            or to 0 where a query may see nothing.
        num_kv_heads: kv heads G, one number or one per layer; query head h uses kv head
            h // (H // G).
        continuation: What the model wrote after the text.
        statistics: Name to numbers [L, H], shown as sortable columns in this order; names of
            summaries are said in the page's language. Empty: the
            numbers of `HeadStatistics.from_weights`.
        facts: Small facts to show, name to text: speed, cache bytes, kernel, dtype.
        focus: (query token, key token) to begin with, as indexes.
        layer_names: (short, long) of each layer, where they are not all of one kind: ("C0", "Cross-
            attention 0"); default 0 and Layer 0. Head 3 of the first is C0.3.
        notable: What `notable_heads` found, which the page says in a sentence; None: nothing.
        language: Of the page's texts, "en" or "zh"; None: the browser's.
    """

    title: str
    model: str
    tokens: Sequence[str]
    weights: npt.NDArray[np.floating]
    num_kv_heads: int | Sequence[int]
    continuation: str = ""
    statistics: Mapping[str, npt.NDArray[np.floating]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    focus: tuple[int, int] | None = None
    layer_names: Sequence[tuple[str, str]] | None = None
    notable: Mapping[str, Any] | None = None
    language: str | None = None


def render(data: PageData) -> str:
    """Returns the whole page as one HTML string, to be stored as UTF-8.

    Raises:
        TypeError: The weights are not float32 or float16.
        ValueError: Shapes, kv heads, statistics or focus do not fit the weights and tokens; a
            weight is negative, NaN or infinite; or the text is too long for a page.
    """
    weights = _checked_weights(data)
    layout = _Layout.of(weights)
    style = asset("page.css")
    theme = asset("theme.js")
    script = '(() => {\n"use strict";\n' + "\n".join(asset(f"{s}.js") for s in SCRIPTS) + "})();\n"
    parts = {
        "policy": policy(style, theme, script),
        "style": style,
        "theme": theme,
        "texts": texts_json(data.language, "page"),
        "data": script_json(_header(data, weights, layout)),
        "script": script,
        "weights": "\n".join(
            f'<script type="application/octet-stream" id="weights-{layer}">{text}</script>'
            for layer, text in enumerate(_packed(weights, layout))
        ),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def write(data: PageData, path: str | os.PathLike[str]) -> Path:
    """Writes the page to `path`, whole or not at all, and returns the path.

    The page is written beside its goal under another name and then renamed, so a reader never sees
    half a page and a failure leaves whatever was there before.

    Raises:
        OSError: The folder is missing, may not be written or is full.
        TypeError: As `render`.
        ValueError: As `render`.
    """
    text = render(data)
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8", newline="\n")
    return Path(path)


@dataclass(frozen=True)
class _Layout:
    """How weights are stored: the lower triangle or everything, as float16 or float32."""

    triangle: bool
    half: bool

    @classmethod
    def of(cls, weights: npt.NDArray[np.floating]) -> _Layout:
        layers, heads, tokens, _ = weights.shape
        triangle = not any(np.triu(layer, 1).any() for layer in weights)
        per_head = tokens * (tokens + 1) // 2 if triangle else tokens * tokens
        values = layers * heads * per_head
        if values * 2 > FLOAT16_BYTES:
            room = FLOAT16_BYTES // (2 * layers * heads)
            most = (math.isqrt(8 * room + 1) - 1) // 2 if triangle else math.isqrt(room)
            raise ValueError(
                f"too many tokens for a page: got {tokens}; {layers} layers x {heads} heads leave "
                f"room for at most {most}; shorten the text, or pass fewer layers or heads"
            )
        return cls(triangle, half=values * 4 > FLOAT32_BYTES or weights.dtype == np.float16)


def _checked_weights(data: PageData) -> npt.NDArray[np.floating]:
    """The weights as an array, once everything in `data` is known to fit them."""
    weights = np.asarray(data.weights)
    if weights.dtype not in (np.float32, np.float16):
        raise TypeError(f"weights must be float32 or float16: got {weights.dtype}")
    tokens = len(data.tokens)
    if weights.ndim != 4 or weights.shape[2:] != (tokens, tokens) or 0 in weights.shape[:2]:
        raise ValueError(
            f"weights must have shape [layers, heads, tokens, tokens], at least one layer and one "
            f"head, and tokens={tokens} as in `tokens`: got {list(weights.shape)}"
        )
    for layer, values in enumerate(weights):
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ValueError(f"weights must be finite and not negative: layer {layer} holds others")
    for name, numbers in data.statistics.items():
        if np.shape(numbers) != weights.shape[:2]:
            raise ValueError(
                f"statistics[{name!r}] must have shape [layers, heads] = "
                f"{list(weights.shape[:2])}: got {list(np.shape(numbers))}"
            )
    if data.layer_names is not None and len(data.layer_names) != len(weights):
        raise ValueError(
            f"layer_names must be one pair for each of the {len(weights)} layers: got "
            f"{len(data.layer_names)}"
        )
    if data.focus is not None and not all(0 <= index < tokens for index in data.focus):
        raise ValueError(
            f"focus must be (query, key) with 0 <= index < {tokens} tokens: got {data.focus}"
        )
    return weights


def _kv_heads(data: PageData, layers: int, heads: int) -> list[int]:
    given = data.num_kv_heads
    per_layer = [given] * layers if isinstance(given, int) else list(given)
    if len(per_layer) != layers or any(count < 1 or heads % count for count in per_layer):
        raise ValueError(
            f"num_kv_heads must divide the {heads} heads, one number or one for each of the "
            f"{layers} layers: got {given}"
        )
    return per_layer


def _header(
    data: PageData, weights: npt.NDArray[np.floating], layout: _Layout
) -> dict[str, object]:
    layers, heads = weights.shape[:2]
    statistics = data.statistics or HeadStatistics.from_weights(weights).named()
    return {
        "title": data.title,
        "model": data.model,
        "continuation": data.continuation,
        "tokens": list(data.tokens),
        "shown": [visible(token) for token in data.tokens],
        "labels": [label(token) for token in data.tokens],
        "layers": layers,
        "heads": heads,
        "kvHeads": _kv_heads(data, layers, heads),
        "layerNames": None if data.layer_names is None else [*map(list, data.layer_names)],
        "triangle": layout.triangle,
        "half": layout.half,
        "rounded": layout.half and weights.dtype == np.float32,
        "facts": [[name, str(value)] for name, value in data.facts.items()],
        "focus": None if data.focus is None else [int(index) for index in data.focus],
        "statistics": [
            {"name": name, "values": _plain(numbers)} for name, numbers in statistics.items()
        ],
        "notable": data.notable,
    }


def _plain(numbers: npt.NDArray[np.floating]) -> list[list[float | None]]:
    """Numbers that JSON can carry: NaN and infinities become None, which the page shows as "–"."""
    return [[float(x) if math.isfinite(x) else None for x in row] for row in np.asarray(numbers)]


def _packed(weights: npt.NDArray[np.floating], layout: _Layout) -> Iterator[str]:
    """Each layer's weights as base64 of gzip of little-endian numbers, head by head, row by row."""
    rows, columns = np.tril_indices(weights.shape[-1])
    for layer in weights:
        values = layer[:, rows, columns] if layout.triangle else layer
        stored = values.astype("<f2" if layout.half else "<f4").tobytes()
        yield base64.b64encode(gzip.compress(stored, 6, mtime=0)).decode("ascii")


def policy(style: str, *scripts: str) -> str:
    """A content security policy: no network, no markup from text, only these scripts and styles."""

    def source(text: str) -> str:
        digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest())
        return f"'sha256-{digest.decode('ascii')}'"

    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {source(style)}",
            f"script-src {' '.join(source(script) for script in scripts)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
        )
    )


def texts_json(language: str | None, part: str) -> str:
    """The texts of a page in all languages, for its scripts.

    Args:
        language: The one to begin with; None: the browser's.
        part: Of the texts, beside those that all pages have.
    """
    texts = every("common", "statistics", part)
    return script_json({"chosen": language, "names": dict(LANGUAGES), "texts": texts})


def script_json(value: object) -> str:
    """JSON in ASCII that no HTML parser mistakes for markup, whatever the text holds."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def asset(name: str) -> str:
    """A file of the page."""
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")
