"""The page that ``polyhead look`` writes: whether it can be written, and the writing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyhead.generation import Generation, LanguageModel, TextEncoder
    from polyhead.inspection.heads import Pair, TokenizedText
    from polyhead.inspection.probe import Probe


def check_writable(out: Path) -> None:
    """Says at once, before a model is loaded, that the page cannot be written.

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


def write_page(
    out: Path,
    name: str,
    model: LanguageModel | TextEncoder,
    seen: Probe,
    tokens: TokenizedText,
    pair: Pair,
    written: Generation | None,
) -> str | None:
    """Writes the page; returns why not where the text is too long for one."""
    import torch

    from polyhead.cli.terminal import progress
    from polyhead.inspection.page import FLOAT16_BYTES, PageData, write

    views = list(seen)
    length = len(tokens.ids)
    heads = views[0].q.shape[1]
    stored = length * (length + 1) // 2 if model.config.kind == "decoder" else length**2
    if any(view.q.shape[1] != heads for view in views):
        return "its layers differ in their number of heads"
    if len(views) * heads * stored * 2 > FLOAT16_BYTES:
        return (
            f"{length:,} tokens × {len(views)} layers × {heads} heads are too many weights for one "
            "page; shorten the text"
        )
    with progress("writing the page") as advance:
        weights = torch.empty(len(views), heads, length, length)
        for layer, view in enumerate(views):
            advance("writing the page", layer, len(views))
            weights[layer] = view.rows()[0]
        data = PageData(
            title=tokens.text,
            model=name,
            tokens=tokens.pieces,
            weights=weights.numpy(),
            num_kv_heads=[view.k.shape[1] for view in views],
            continuation="" if written is None else written.text,
            facts=_facts(model, written),
            focus=(pair.query, pair.keys[-1]),
        )
        try:
            write(data, out)
        except OSError as error:
            # The name in the error is that of a draft beside the page.
            raise OSError(error.errno, error.strerror or str(error), str(out)) from error
    return None


def _facts(model: LanguageModel | TextEncoder, written: Generation | None) -> dict[str, str]:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    facts = {"weights": dtype}
    if written is not None:
        stats = written.stats
        if stats.tokens_per_second is not None:
            facts["speed"] = f"{stats.tokens_per_second:.1f} tokens/s"
        facts["KV cache"] = f"{stats.cache_used_bytes:,} bytes for {stats.cache_tokens} tokens"
    return facts
