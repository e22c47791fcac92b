"""The source of what a cache holds: in the order of place, or with a position beside every key.

Shape letters: B batch, G kv heads, S keys, T tokens of a chunk, D key size, V value size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead.caches.append_plan import AppendPlan
from polyhead.caches.codecs import KVChunk
from polyhead.caches.layer_kv import LayerKV, Shape
from polyhead.caches.source import NO_POSITION, InMemorySegment, StoredSegment, StoredSource
from polyhead.semantics.sources import DenseSource, KeyValueSource


def selected(
    contents: LayerKV,
    stream: KVChunk,
    new: AppendPlan,
    before: list[int],
    rows: list[int] | None,
    columns: list[int] | None,
) -> KVChunk:
    """The tokens of some rows and columns, with positions where those are stored.

    Args:
        contents: Where they are going to be written.
        stream: Keys and values ``[B, G, T, D]`` that arrive.
        new: Their positions.
        before: Tokens of each row before them.
        rows: Batch rows; None: all.
        columns: Tokens of each; None: all.
    """
    if contents.has_positions:
        where = new.positions
        if where is None:
            where = (
                torch.arange(stream.k.shape[2], device="cpu")
                + torch.tensor(before, device="cpu")[:, None]
            )
        stream = stream._replace(positions=where[:, None, :, None].to(stream.k.device))
    if rows is not None:
        stream = stream.of([x[rows] for x in stream.tensors()])
    if columns is None:
        return stream
    first = columns[0] if columns else 0
    if columns == list(range(first, first + len(columns))):
        return stream.part(first, first + len(columns))
    return stream.of([x[:, :, columns] for x in stream.tensors()])


def view(contents: LayerKV, *, explicit: bool) -> KeyValueSource:
    """Everything held.

    Args:
        contents: Where it lies.
        explicit: Whether positions are other than places, and stored.
    """
    if not contents.even:
        return _uneven(contents, explicit)
    spans = contents.spans()
    positions = None
    if explicit and spans:
        positions = torch.cat([span.positions() for span in spans], dim=1)
    shift = max(contents.main.firsts) * contents.main.store.tokens
    if len(spans) == 1 and spans[0].in_place:
        k, v = spans[0].read(0, spans[0].length)
        return DenseSource(k, v, positions, shift)
    return StoredSource([*spans], contents.shape, shift=shift, positions=positions)


def _uneven(contents: LayerKV, explicit: bool) -> StoredSource:
    spans: list[StoredSegment | InMemorySegment] = []
    positions = []
    for name, span in contents.addresses():
        spans.append(span)
        positions.append(positions_at(contents, name, span.positions() if explicit else None))
    turned = any(contents.main.firsts)
    return StoredSource(
        spans,
        contents.shape,
        positions=torch.cat(positions, dim=1),
        gaps=True,
        of_row=(lambda row: view(contents.of_row(row), explicit=explicit)) if turned else None,
    )


def positions_at(contents: LayerKV, name: str, given: Tensor | None = None) -> Tensor:
    """``[B, S]`` what each row has at every address of a store; ``NO_POSITION``: no token.

    Args:
        contents: Where it lies.
        name: Of the store.
        given: The positions that are stored; None: they are places.
    """
    memory, tokens = contents.memories[name], contents.codecs[name].tokens
    units = memory.units(0, memory.extent)
    if name == "tail":
        firsts = torch.tensor(
            [[contents.tail_first(row)] for row in range(len(units))], device="cpu"
        )
        units = units.where(units >= firsts, -1)
    where = units[..., None] * tokens + torch.arange(tokens, device="cpu") + contents.base(name)
    device = contents.shape.device
    held = (units >= 0).repeat_interleave(tokens, dim=1).to(device)
    return (where.flatten(1).to(device) if given is None else given).where(held, NO_POSITION)


def with_chunk(
    past: KeyValueSource | None,
    stream: KVChunk,
    new: AppendPlan,
    lengths: list[int],
    contents: LayerKV,
    held: LayerKV,
    *,
    explicit: bool,
) -> StoredSource:
    """What a ring held before a chunk of T tokens, and the chunk in the tensors that brought it.

    Args:
        past: A source of what was held, untouched by the writing of the chunk; None: nothing.
        stream: Keys and values of the chunk.
        new: Its rows and positions.
        lengths: Tokens of each row before it.
        contents: For shape and device.
        held: Where the past lies.
        explicit: Whether positions are other than places.
    """
    shape, T = contents.shape, stream.k.shape[2]
    spans: list[StoredSegment | InMemorySegment] = [InMemorySegment(stream, shape.value_dim)]
    if past is not None:
        spans = [*_runs(past, shape), *spans]
    gaps = len(set(lengths)) > 1 or min(new.counts) < T or getattr(past, "gaps", False)
    if not gaps and not explicit:
        shift = lengths[0] if past is None else past.tokens.places.low
        return StoredSource(spans, shape, shift=shift)
    where = new.positions
    if where is None:
        where = torch.arange(T, device="cpu") + torch.tensor(lengths, device="cpu")[:, None]
    where = where.where(where >= 0, NO_POSITION).to(shape.device)
    if past is not None:
        before: Tensor = past.tokens.position_tensor(shape.device)
        where = torch.cat((before.expand(shape.batch, -1), where), dim=1)

    def of_row(row: int) -> KeyValueSource:
        return _row_with_chunk(held, stream, new, row, lengths[row], explicit=explicit)

    return StoredSource(spans, shape, positions=where, gaps=gaps, of_row=of_row if gaps else None)


def _row_with_chunk(
    held: LayerKV, stream: KVChunk, new: AppendPlan, row: int, length: int, *, explicit: bool
) -> StoredSource:
    """One batch row of ``with_chunk``."""
    past = view(held.of_row(row), explicit=explicit) if length else None
    shape = held.shape._replace(batch=1)
    rest = slice(None) if new.positions is None else new.positions[row] >= 0
    part = stream.of([x[row : row + 1][:, :, rest] for x in stream.tensors()])
    spans: list[StoredSegment | InMemorySegment] = [InMemorySegment(part, shape.value_dim)]
    if past is None:
        first, where = length, []
    else:
        spans = [*_runs(past, shape), *spans]
        first, where = past.tokens.places.low, [past.tokens.position_tensor(shape.device)]
    if not explicit or new.positions is None:
        return StoredSource(spans, shape, shift=first)
    where = [x.expand(1, -1) for x in where] + [new.positions[row][None, rest].to(shape.device)]
    return StoredSource(spans, shape, shift=first, positions=torch.cat(where, dim=1))


def row_by_row(
    pushes: list[bool], pushed: StoredSource, contents: LayerKV, *, explicit: bool
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
        source.tokens.position_tensor(shape.device).expand(shape.batch, -1).where(rows, NO_POSITION)
        for source, rows in ((pushed, chosen), (kept, ~chosen))
    ]
    spans = [*pushed.spans, *_runs(kept, shape)]

    def of_row(row: int) -> KeyValueSource:
        read = pushed.of_row if pushes[row] else None
        return view(contents.of_row(row), explicit=explicit) if read is None else read(row)

    return StoredSource(
        spans, shape, positions=torch.cat(positions, dim=1), gaps=True, of_row=of_row
    )


def without_places(
    contents: LayerKV,
    lengths: Sequence[int],
    chunk: KVChunk | None = None,
    where: Tensor | None = None,
    before: Tensor | None = None,
    *,
    even: bool,
) -> KeyValueSource:
    """What a cache that evicts holds, and a chunk that is not in it.

    All later queries see what is held, of whatever positions: they get places just before those of
    the chunk, in the order in which they lie unless ``before`` gives another one.

    Args:
        contents: Where the held tokens lie, from address 0 on.
        lengths: Tokens of each row before the chunk, those included that are forgotten.
        chunk: The new tokens.
        where: Their positions ``[B, T]``, below 0 for padding.
        before: Places ``[B, S]`` of the held tokens, below 0 where there is none.
        even: Whether rows have, and hold, equally many tokens each, and there is no padding.
    """
    rows, shape = contents.main, contents.shape
    k, v = rows.read(0, rows.extent)[:2]
    shift = max(lengths) - rows.extent
    if even and chunk is None:
        return DenseSource(k, v, None, shift)
    runs = [KVChunk(k, v)] if chunk is None else [KVChunk(k, v), chunk]
    spans: list[StoredSegment | InMemorySegment]
    spans = [InMemorySegment(run, shape.value_dim) for run in runs]
    if even:
        return StoredSource(spans, shape, shift=shift)
    if before is None:
        ends, stops = torch.tensor([[*lengths], rows.stops], device=shape.device)[..., None]
        slots = torch.arange(rows.extent, device=shape.device)
        before = (slots + ends - stops).where(slots < stops, -1)
    places = before.where(before >= 0, NO_POSITION)
    if where is not None:
        places = torch.cat((places, where.where(where >= 0, NO_POSITION)), dim=1)
    return StoredSource(spans, shape, positions=places, gaps=True)


def _runs(source: KeyValueSource, shape: Shape) -> list[StoredSegment | InMemorySegment]:
    if isinstance(source, StoredSource):
        return source.spans
    return [InMemorySegment(KVChunk(*source.gather()), shape.value_dim)]
