"""The source of what a cache holds: in the order of place, or with a position beside every key.

Shape letters: B batch, G kv heads, S keys, T tokens of a chunk, D key size, V value size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.caches.arrivals import Arrivals
from polyhead.caches.codecs import Stream
from polyhead.caches.contents import Contents, Shape
from polyhead.caches.source import NOWHERE, Given, Stored, StoredSource
from polyhead.semantics.sources import DenseSource, KeyValueSource


def view(contents: Contents, *, explicit: bool) -> KeyValueSource:
    """Everything held.

    Args:
        contents: Where it lies.
        explicit: Whether positions are other than places, and stored.
    """
    if not contents.even:
        return _uneven(contents, explicit)
    runs = contents.runs()
    positions = None
    if explicit and runs:
        positions = torch.cat([run.positions() for run in runs], dim=1)
    shift = max(contents.main.firsts) * contents.main.store.tokens
    if len(runs) == 1 and runs[0].in_place:
        k, v = runs[0].read(0, runs[0].length)
        return DenseSource(k, v, positions, shift)
    return StoredSource([*runs], contents.shape, shift=shift, positions=positions)


def _uneven(contents: Contents, explicit: bool) -> StoredSource:
    device = contents.shape.device
    runs: list[Stored | Given] = []
    positions = []
    for name, run in contents.addresses():
        tokens = run.codec.tokens
        units = run.memory.units(0, run.memory.extent)
        if name == "tail":
            firsts = torch.tensor(
                [[contents.tail_first(row)] for row in range(len(units))], device="cpu"
            )
            units = units.where(units >= firsts, -1)
        where = units[..., None] * tokens + torch.arange(tokens, device="cpu") + contents.base(name)
        where = run.positions() if explicit else where.flatten(1).to(device)
        held = (units >= 0).repeat_interleave(tokens, dim=1).to(device)
        runs.append(run)
        positions.append(where.where(held, NOWHERE))
    turned = any(contents.main.firsts)
    return StoredSource(
        runs,
        contents.shape,
        positions=torch.cat(positions, dim=1),
        gaps=True,
        of_row=(lambda row: view(contents.of_row(row), explicit=explicit)) if turned else None,
    )


def with_chunk(
    past: KeyValueSource | None,
    stream: Stream,
    new: Arrivals,
    lengths: list[int],
    contents: Contents,
    held: Contents,
    *,
    explicit: bool,
) -> StoredSource:
    """What a ring held before a chunk of T tokens, and the chunk in the tensors that brought it.

    Args:
        past: A source of what was held, untouched by the writing of the chunk; None: nothing.
        stream: The chunk.
        new: Its rows and positions.
        lengths: Tokens of each row before it.
        contents: For shape and device.
        held: Where the past lies.
        explicit: Whether positions are other than places.
    """
    shape, T = contents.shape, stream.k.shape[2]
    runs: list[Stored | Given] = [Given(stream, shape.value_dim)]
    if past is not None:
        runs = [*_runs(past, shape), *runs]
    gaps = len(set(lengths)) > 1 or min(new.counts) < T or getattr(past, "gaps", False)
    if not gaps and not explicit:
        shift = lengths[0] if past is None else past.tokens.places.low
        return StoredSource(runs, shape, shift=shift)
    where = new.positions
    if where is None:
        where = torch.arange(T, device="cpu") + torch.tensor(lengths, device="cpu")[:, None]
    where = where.where(where >= 0, NOWHERE).to(shape.device)
    if past is not None:
        before: Tensor = past.tokens.position_tensor(shape.device)
        where = torch.cat((before.expand(shape.batch, -1), where), dim=1)

    def of_row(row: int) -> KeyValueSource:
        return _row_with_chunk(held, stream, new, row, lengths[row], explicit=explicit)

    return StoredSource(runs, shape, positions=where, gaps=gaps, of_row=of_row if gaps else None)


def _row_with_chunk(
    held: Contents, stream: Stream, new: Arrivals, row: int, length: int, *, explicit: bool
) -> StoredSource:
    """One batch row of ``with_chunk``."""
    past = view(held.of_row(row), explicit=explicit) if length else None
    shape = held.shape._replace(batch=1)
    rest = slice(None) if new.positions is None else new.positions[row] >= 0
    part = stream.of([x[row : row + 1][:, :, rest] for x in stream.tensors()])
    runs: list[Stored | Given] = [Given(part, shape.value_dim)]
    if past is None:
        first, where = length, []
    else:
        runs = [*_runs(past, shape), *runs]
        first, where = past.tokens.places.low, [past.tokens.position_tensor(shape.device)]
    if not explicit or new.positions is None:
        return StoredSource(runs, shape, shift=first)
    where = [x.expand(1, -1) for x in where] + [new.positions[row][None, rest].to(shape.device)]
    return StoredSource(runs, shape, shift=first, positions=torch.cat(where, dim=1))


def row_by_row(
    pushes: list[bool], pushed: StoredSource, contents: Contents, *, explicit: bool
) -> StoredSource:
    """A source that takes each batch row from ``pushed`` or from all that is held.

    Args:
        pushes: Whether a row is that of ``pushed``.
        pushed: From ``with_chunk``; its rows differ.
        contents: Where everything lies.
        explicit: Whether positions are other than places, and stored.
    """
    shape, kept = contents.shape, view(contents, explicit=explicit)
    chosen = torch.tensor(pushes, device=shape.device)[:, None]
    positions = [
        source.tokens.position_tensor(shape.device).expand(shape.batch, -1).where(rows, NOWHERE)
        for source, rows in ((pushed, chosen), (kept, ~chosen))
    ]
    runs = [*pushed.runs, *_runs(kept, shape)]

    def of_row(row: int) -> KeyValueSource:
        read = pushed.of_row if pushes[row] else None
        return view(contents.of_row(row), explicit=explicit) if read is None else read(row)

    return StoredSource(
        runs, shape, positions=torch.cat(positions, dim=1), gaps=True, of_row=of_row
    )


def _runs(source: KeyValueSource, shape: Shape) -> list[Stored | Given]:
    if isinstance(source, StoredSource):
        return source.runs
    return [Given(Stream(*source.gather()), shape.value_dim)]
