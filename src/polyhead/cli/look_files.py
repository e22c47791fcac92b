"""The files that ``polyhead look`` writes: the page with all heads, or a picture of some."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyhead.cli.look_examine import Found, Model
    from polyhead.models.parts import HeadsByLayer


def check_writable(out: Path) -> None:
    """Says at once, before a model is loaded, that the file cannot be written.

    Raises:
        OSError: with the path and the reason.
    """
    import errno

    if out.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(out))
    parent = out.parent
    if not parent.exists():
        raise FileNotFoundError(errno.ENOENT, "no such directory", str(parent))
    if not parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent))
    if not os.access(parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(parent))


def write_picture(out: Path, found: Found, heads: HeadsByLayer) -> None:
    """Writes an SVG with the maps of some heads.

    Raises:
        InputError: A layer or head that is not there.
    """
    from polyhead._utils.atomic_write import write_file
    from polyhead.viewer.drawing import draw_heads

    tokens = found.tokens
    title = f"{found.name}: {tokens.text}"
    picture = draw_heads(found.seen, heads, tokens.pieces, title=title)
    write_file(out, picture)


def write_page(out: Path, found: Found, language: str | None) -> None:
    """Writes the page with all heads, where there is no ``reason_against_page``.

    Its language is that of the browser where ``language`` is None.
    """
    from polyhead.cli.terminal import progress
    from polyhead.viewer.look_page import page_data
    from polyhead.viewer.page import write

    with progress("writing the page"):
        data = page_data(
            found.look,
            continuation="" if found.written is None else found.written.text,
            facts=_facts(found),
            focus=(found.pair.query, found.pair.keys[-1]),
            language=language,
        )
        write(data, out)


def reason_against_page(model: Model, length: int) -> str | None:
    """Why there can be no page of so many tokens or of such heads; known before the model runs."""
    from polyhead.models.parts import head_count
    from polyhead.viewer.packing import FLOAT16_BYTES

    layers = len(model.config.layers)
    heads = sum(head_count(model.transformer, layer) for layer in range(layers))
    stored = length * (length + 1) // 2 if model.config.kind == "decoder" else length**2
    if heads * stored * 2 > FLOAT16_BYTES:
        return (
            f"{length:,} tokens and {heads:,} heads in {layers} layers are too many weights for "
            "one page; shorten the text"
        )
    return None


def _facts(found: Found) -> dict[str, str]:
    dtype = str(next(found.model.parameters()).dtype).removeprefix("torch.")
    facts = {"weights": dtype}
    if found.written is not None:
        stats = found.written.stats
        if stats.tokens_per_second is not None:
            facts["speed"] = f"{stats.tokens_per_second:.1f} tokens/s"
        facts["cache"] = f"{stats.cache_used_bytes:,} B / {stats.cache_tokens}"
    return facts
