"""The page that shows what heads do: one program, with its data inside or from a server.

`render` packs what a run found into one HTML file that needs nothing but a browser; `served` is the
same page without data, which asks the server that sent it (`server.py`) and so can also run models.
The page's own parts (markup, style, scripts) lie in the folder `page/` beside this file; nothing is
built and nothing is fetched. How numbers travel is in `packing.py`.

Text never becomes markup: it travels as JSON and enters the page through `textContent` only, and
the page's content security policy forbids every script but its own, and every address but that of
its server.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from polyhead._utils.atomic_write import write_file
from polyhead._utils.texts import LANGUAGES, every
from polyhead._utils.texts.labels import label, visible
from polyhead.interpret.statistics import AVERAGED, TABLE
from polyhead.viewer.next_token import TEMPERATURES
from polyhead.viewer.packing import Layout, Vectors, Weights

__all__ = ["PageData", "render", "served", "write"]

SCRIPTS = (
    "dom",
    "texts",
    "ramp",
    "state",
    "packed",
    "file",
    "server",
    "look",
    "measures",
    "colour",
    "maps",
    "thumbs",
    "map_keys",
    "large",
    "large_draw",
    "text",
    "tables",
    "row",
    "lines",
    "links",
    "pair",
    "way",
    "next",
    "save",
    "notable",
    "asking",
    "page",
)
"""The page's scripts in the order in which they are joined into one."""

TokenRange = tuple[int, int]
"""(start, stop) among the page's tokens."""

Numbers = Sequence[Any]
"""A number for each head: of each layer a sequence or an array."""


@dataclass(frozen=True)
class PageData:
    """What a page shows.

    Attributes:
        title: The text that was looked at; the page shortens it as needed.
        model: The model's name.
        tokens: The T tokens as pieces of text, any characters.
        weights: For each layer float32 (or float16) ``[H, queries, keys]``, row = query, column =
            key; each row sums to 1, or to 0 where a query may see nothing. An array
            ``[L, H, T, T]`` is such a sequence.
        num_kv_heads: kv heads G, one number or one per layer; query head h uses kv head
            h // (H // G).
        continuation: Text that the model generated after it.
        statistics: Name to a number for each head, sortable columns in this order; names of
            ``statistics.AVERAGED`` are said in the page's language.
        facts: Small facts to show, name to text: speed, cache bytes, kernel, dtype.
        focus: (query token, key token) to begin with, as indexes.
        parts: (part, number) of each layer where they are not all of one kind: ``("cross", 0)``,
            whose head 3 is C0.3. Parts are ``"layer"``, ``"encoder"``, ``"decoder"``, ``"cross"``.
        shares: Whether each layer has no softmax, so that weights are shares; None: all have one.
        runs: (queries, keys) of each layer, both runs of the tokens; None: all tokens.
        vectors: Queries, keys and lse of each layer; None: the page does without.
        next_token: Next-token data of ``NextToken.as_json``.
        way: ``Look.way`` of each token from ``own`` on; None: the page does without.
        own: The first token that the model's own layers read.
        kind: Kind of the model.
        notable: Result of ``Look.notable``; None: nothing to say.
        language: Language of the page's texts, "en" or "zh"; None: the browser's.
    """

    title: str
    model: str
    tokens: Sequence[str]
    weights: Sequence[Weights] | Weights
    num_kv_heads: int | Sequence[int]
    continuation: str = ""
    statistics: Mapping[str, Numbers] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    focus: tuple[int, int] | None = None
    parts: Sequence[tuple[str, int]] | None = None
    shares: Sequence[bool] | None = None
    runs: Sequence[tuple[TokenRange, TokenRange]] | None = None
    vectors: Sequence[Vectors] | None = None
    next_token: Mapping[str, Any] | None = None
    way: Sequence[Mapping[str, Any]] | None = None
    own: int = 0
    kind: str = "decoder"
    notable: Mapping[str, Any] | None = None
    language: str | None = None


def render(data: PageData, beside: PageData | None = None) -> str:
    """Returns the whole page as one HTML string, to be stored as UTF-8.

    Args:
        data: Content of the page.
        beside: A second text or model shown beside the first; its language is ignored.

    Raises:
        ValueError: A weight is negative, NaN or infinite; or the text is too long for a page.
    """
    looks: list[dict[str, object]] = []
    blocks: list[str] = []
    for each in (data,) if beside is None else (data, beside):
        weights = _checked_weights(each)
        layout = Layout.of(weights)
        looks.append(_header(each, weights, layout, first=len(blocks)))
        for layer, values in enumerate(weights):
            kept = layout.packed(layer, values)
            vectors = None if each.vectors is None else each.vectors[layer].packed()
            number = len(blocks)
            blocks.append(
                _block(f"weights-{number}", kept)
                + ("" if vectors is None else "\n" + _block(f"vectors-{number}", vectors))
            )
    return _shell({"served": False, "looks": looks}, data.language, "\n".join(blocks))


def served(begin: Mapping[str, Any], language: str | None) -> str:
    """The page without data, for a server.

    Args:
        begin: The ``text`` to look at first and the ``models`` that may be chosen.
        language: Language of the page's texts, "en" or "zh"; None: the browser's.
    """
    return _shell({"served": True, "looks": [], **begin}, language, "")


def write(data: PageData, path: str | os.PathLike[str], beside: PageData | None = None) -> Path:
    """Writes the page to ``path``, whole or not at all, and returns the path.

    Raises:
        OSError: The folder is missing, may not be written or is full.
        ValueError: As ``render``.
    """
    write_file(path, render(data, beside))
    return Path(path)


def content_policy(*, connect: bool) -> str:
    """The policy of the page, which holds in the file and in the answer of its server."""
    return policy(asset("page.css"), asset("theme.js"), _script(), connect=connect)


def _script() -> str:
    return '(() => {\n"use strict";\n' + "\n".join(asset(f"{s}.js") for s in SCRIPTS) + "})();\n"


def _shell(content: Mapping[str, Any], language: str | None, blocks: str) -> str:
    """The page around what it shows."""
    units = {name: TABLE[name].unit for name in AVERAGED}
    parts = {
        "policy": content_policy(connect=bool(content["served"])),
        "style": asset("page.css"),
        "theme": asset("theme.js"),
        "texts": texts_json(language, "page"),
        "data": script_json({**content, "units": units}),
        "script": _script(),
        "weights": blocks,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def _block(name: str, text: str) -> str:
    return f'<script type="application/octet-stream" id="{name}">{text}</script>'


def _checked_weights(data: PageData) -> list[Weights]:
    """The weights of each layer, which a page can only show if they are finite."""
    weights = [np.asarray(layer) for layer in data.weights]
    for layer, values in enumerate(weights):
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ValueError(f"weights must be finite and not negative: layer {layer} holds others")
    return weights


def _header(
    data: PageData, weights: Sequence[Weights], layout: Layout, first: int
) -> dict[str, object]:
    """What the page's script reads before any weight; its blocks are numbered from ``first``."""
    count = len(weights)
    given = data.num_kv_heads
    kv_heads = [given] * count if isinstance(given, int) else given
    parts = data.parts or [("layer", number) for number in range(count)]
    everything = (0, len(data.tokens))
    layers = []
    for i, (queries, keys) in enumerate(data.runs or [(everything, everything)] * count):
        part, number = parts[i]
        layer: dict[str, Any] = {
            "part": part,
            "number": number,
            "heads": len(weights[i]),
            "kvHeads": kv_heads[i],
            "queries": queries,
            "keys": keys,
            "shares": bool(data.shares and data.shares[i]),
            "triangle": layout.triangles[i],
        }
        if data.vectors is not None:
            vectors = data.vectors[i]
            size = vectors.q.shape[-1]
            layer |= {"size": size, "scale": vectors.scale, "softcap": vectors.softcap}
        layers.append(layer)
    return {
        "block": first,
        "title": data.title,
        "model": data.model,
        "kind": data.kind,
        "continuation": data.continuation,
        "tokens": list(data.tokens),
        "shown": [visible(token) for token in data.tokens],
        "labels": [label(token) for token in data.tokens],
        "layers": layers,
        "vectors": data.vectors is not None,
        "half": layout.half,
        "rounded": layout.half and any(layer.dtype == np.float32 for layer in weights),
        "facts": [[name, str(value)] for name, value in data.facts.items()],
        "focus": None if data.focus is None else [int(index) for index in data.focus],
        "statistics": {name: _plain(numbers) for name, numbers in data.statistics.items()},
        "next": data.next_token,
        "temperatures": TEMPERATURES,
        "way": data.way,
        "own": data.own,
        "notable": data.notable,
    }


def _plain(numbers: Numbers) -> list[list[float | None]]:
    """Numbers that JSON can carry: NaN and infinities become None, which the page shows as "–"."""
    return [
        [None if x is None or not math.isfinite(x) else float(x) for x in row] for row in numbers
    ]


def policy(style: str, *scripts: str, connect: bool = False) -> str:
    """A content security policy: no markup from text, only these scripts and styles.

    Args:
        connect: Whether the page may ask the server that sent it; nothing else is ever reached.
    """

    def source(text: str) -> str:
        digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest())
        return f"'sha256-{digest.decode('ascii')}'"

    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {source(style)}",
            f"script-src {' '.join(source(script) for script in scripts)}",
            *(("connect-src 'self'",) if connect else ()),
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
        part: Part of the texts that this page needs beside those of all pages.
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
