"""What a server prints: what fits when it starts, and a line a second while it works."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import chain

from polyhead.planning.units import binary
from polyhead.serving.http.served import Models, Served

_SECOND = 1.0


def fits(served: Served) -> str:
    """What a model holds and takes, in one line."""
    tensors = chain(served.model.parameters(), served.model.buffers())
    said = f"{served.name}: weights {binary(sum(tensor.nbytes for tensor in tensors))}"
    if served.engine is None:
        return f"{said} · one request at a time"
    if names := served.engine.adapters.names:
        said += f" · adapters {binary(served.engine.adapters.bytes)}: {', '.join(names)}"
    stats = served.engine.stats
    pool, context = stats.used_tokens + stats.free_tokens, served.model.config.max_positions
    sizes = sorted({min(size, context) for size in (512, 2048, context)})
    many = ", ".join(
        f"{min(pool // size, served.engine.max_rows)} of {size:,}" for size in sizes if size <= pool
    )
    return (
        f"{said} · cache {binary(stats.pool_bytes)} for {pool:,} tokens · requests at a time, "
        f"by tokens: {many or f'none of {sizes[0]:,}'}"
    )


class LoadLines:
    """A line a second while an engine works.

    Args:
        models: Whose engines are watched.
        write: Takes a line.
    """

    def __init__(self, models: Models, write: Callable[[str], None]) -> None:
        self._models, self._write = models, write
        self._before: dict[str, tuple[float, int, int]] = {}

    async def run(self) -> None:
        """Writes lines until it is cancelled."""
        while True:
            for line in self.lines():
                self._write(line)
            await asyncio.sleep(_SECOND)

    def lines(self) -> Iterable[str]:
        """The lines of now: one for each engine that worked since the last call."""
        for each in self._models.loaded:
            if each.engine is None:
                continue
            name = each.name
            stats, now = each.engine.stats, time.monotonic()
            when, read, written = self._before.get(name, (now, 0, 0))
            self._before[name] = (now, stats.prompt_tokens, stats.output_tokens)
            seconds = max(now - when, 1e-9)
            more_read, more_written = stats.prompt_tokens - read, stats.output_tokens - written
            if not (stats.live or stats.queued or more_read or more_written):
                continue
            pool = stats.used_tokens + stats.free_tokens
            yield (
                f"{time.strftime('%H:%M:%S')} {name}: {stats.live} running · {stats.queued} waiting"
                f" · {more_written / seconds:,.0f} tokens/s written · {more_read / seconds:,.0f} "
                f"read · cache {stats.used_tokens / max(pool, 1):.0%} full"
            )
