"""The processes of one mesh dimension: whether they agree on a call, and which one has ended.

If one rank refuses a call, all refuse it: before any other exchange, ranks exchange a short note of
what each is about to do, and each reads all notes. So a wrong shape on one rank is an error on all,
within one exchange, and no rank waits for a message that never comes. All notes have one size,
whatever the call, so that another kind of call on one rank is an error on all too.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyhead._utils.checks import shown
from polyhead.errors import PolyheadError, UnsupportedError
from polyhead.semantics import Bias, Mask
from polyhead.semantics.masks.counts import PerRow

DIMENSIONS = ("data", "shard", "context", "tensor", "expert")
"""Known names of mesh dimensions, and the use of each."""

AVERAGED = ("data", "shard", "context", "expert")
"""Dimensions over which gradients are averaged."""

_WORDS = 256
"""Most bytes of a refusal, or of the name of a call, that are sent to other ranks."""

_MOST_FACTS = 16
"""Numbers of a note; a call has fewer, the others are 0."""

_SAMPLE = 1 << 20
"""About how many numbers of a tensor are compared."""

_PROCESSES: dict[int, tuple[int, int]] = {}
"""Machine and process number of each rank that has agreed with this one."""

_CLOSED: dict[dist.ProcessGroup, str] = {}
"""Groups in which this process may exchange nothing now, as the others would not; and why."""

_PATIENCE = 10
"""Tenths of a second until a process that ended its connection counts as ended."""


class RankError(PolyheadError, RuntimeError):
    """Another process does something else, or has ended; the message names its rank."""


@dataclass(eq=False)
class Ranks:
    """The processes along one dimension of a mesh.

    Attributes:
        name: Name of the dimension.
        group: torch's process group.
        size: N, how many they are.
        rank: This process's number among them.
        numbers: Their ranks in the whole job, as messages name them.
        device: Where collectives take their tensors.
    """

    name: str
    group: dist.ProcessGroup
    size: int
    rank: int
    numbers: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, mesh: DeviceMesh, name: str) -> Ranks:
        """The processes along a dimension.

        Raises:
            ValueError: A mesh that has no such dimension.
        """
        check_mesh(mesh)
        names = mesh.mesh_dim_names or ()
        if name not in names:
            raise ValueError(
                f"mesh must have a dimension named {name!r}: got {list(names) or 'no names'}"
            )
        return cls.of_group(mesh.get_group(name), name, mesh.device_type)

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, name: str, kind: str) -> Ranks:
        """The processes of a group on devices of a kind, by a name for messages."""
        numbers = tuple(dist.get_process_group_ranks(group))
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else kind
        return cls(name, group, len(numbers), dist.get_rank(group), numbers, torch.device(device))

    def global_rank(self, rank: int) -> int:
        """The rank in the whole job of a rank of this dimension."""
        return self.numbers[rank % self.size]

    @property
    def closed(self) -> str:
        """Why this process may exchange nothing with the others now; "": it may."""
        return _CLOSED.get(self.group, "")

    def close(self, why: str) -> None:
        """From now on exchanges raise RankError on this process; with "" no more."""
        if why:
            _CLOSED[self.group] = why
        else:
            _CLOSED.pop(self.group, None)

    def agree(
        self, what: str, facts: Sequence[int] = (), refused: Exception | None = None
    ) -> list[list[int]]:
        """Every rank's facts; what one rank refuses, all refuse.

        Args:
            what: The kind of call, in words.
            facts: Whole numbers, as many on every rank for this kind of call.
            refused: What this rank will not do.

        Raises:
            RankError: Another rank refused, says which and why; or makes another kind of call.
            Exception: ``refused`` itself, on the rank that gave it.
        """
        if refused is not None and self.closed:
            raise refused
        who = [zlib.crc32(socket.gethostname().encode()), os.getpid()]
        words = what if refused is None else str(refused)
        if refused is not None and not isinstance(refused, RankError):  # which names a rank already
            words = f"rank {self.global_rank(self.rank)} refused: {words}"
        said = words.encode()[:_WORDS]
        rest = [*facts, *[0] * (_MOST_FACTS - len(facts))]
        numbers = [refused is not None, len(said), *who, *rest]
        note = torch.zeros(8 * len(numbers) + _WORDS, dtype=torch.uint8, device="cpu")
        note[: 8 * len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device="cpu").view(
            torch.uint8
        )
        note[8 * len(numbers) :][: len(said)] = torch.tensor(
            [*said], dtype=torch.uint8, device="cpu"
        )
        notes = [torch.empty_like(note, device=self.device) for _ in range(self.size)]
        with self.watched("an agreement"):
            dist.all_gather(notes, note.to(self.device), group=self.group)
        read = [bytes(x.cpu().tolist()) for x in notes]
        found = [[*struct.unpack_from(f"={len(numbers)}q", x)] for x in read]
        for number, (_, _, host, process, *_) in zip(self.numbers, found, strict=True):
            _PROCESSES[number] = host, process
        if refused is not None:
            raise refused
        texts = [
            x[8 * len(numbers) :][:length].decode(errors="replace")
            for x, (_, length, *_) in zip(read, found, strict=True)
        ]
        for (refuses, *_), text in zip(found, texts, strict=True):
            if refuses:
                raise RankError(text)
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise RankError(
                    f"all ranks of {self.name!r} must make the same call: got {texts[0]} on rank "
                    f"{self.global_rank(0)} and {text} on rank {self.global_rank(rank)}"
                )
        return [rest[: len(facts)] for _, _, _, _, *rest in found]

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """If an exchange fails, names the process that has ended."""
        if self.closed:
            raise RankError(self.closed)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PolyheadError):
                raise
            raise RankError(
                f"{what} over {self.name!r} failed on rank {self.global_rank(self.rank)}: "
                f"{self._gone() or 'a process is gone or does something else'} "
                f"({str(error).splitlines()[0][:120]})"
            ) from error

    def _gone(self) -> str:
        """Processes of this machine that have ended."""
        here = zlib.crc32(socket.gethostname().encode())
        known = [(rank, *_PROCESSES[rank]) for rank in self.numbers if rank in _PROCESSES]
        for _ in range(_PATIENCE):  # a connection ends before its process has
            gone = [
                str(rank) for rank, host, process in known if host == here and not _runs(process)
            ]
            if gone:
                return f"rank {', '.join(gone)} is gone"
            time.sleep(0.1)
        return ""


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return not os.path.isdir("/proc/self")
    except OSError:
        return True


Check = Callable[[Sequence[Sequence[int]]], None]
"""Raises where the facts of the ranks of a dimension do not go together."""


def agreed(
    checks: Sequence[tuple[Ranks, Check]],
    what: str,
    facts: Sequence[int],
    refused: Exception | None = None,
) -> None:
    """Tells facts over several dimensions; what one rank of the mesh refuses, all refuse.

    One dimension after the other: what a rank hears over one it refuses over the next, so that no
    rank goes on alone.

    Args:
        checks: Dimensions and what is asked of the facts of each one's ranks. A dimension over
            which facts may differ comes after those over which they must be alike.
        what: As of ``Ranks.agree``.
        facts: As of ``Ranks.agree``.
        refused: What this rank will not do.

    Raises:
        RankError: Another rank refused, or facts do not go together; names the rank.
        Exception: ``refused`` itself, on the rank that gave it.
    """
    for ranks, check in checks:
        try:
            check(ranks.agree(what, facts, refused))
        except Exception as error:
            refused = error
    if refused is not None:
        raise refused


def refuse(dimensions: Sequence[Ranks], error: Exception) -> NoReturn:
    """Raises the error, after all ranks of these dimensions were told.

    Raises:
        Exception: ``error`` itself.
    """
    agreed([(ranks, lambda _: None) for ranks in dimensions], "a call", (), error)
    raise error


def tell_backward(dimensions: Sequence[Ranks], out: Tensor) -> Tensor:
    """``out``, whose backward pass begins with an agreement of these ranks."""
    if out.requires_grad and torch.is_grad_enabled():

        def agree(_: Tensor) -> None:
            agreed([(ranks, lambda _: None) for ranks in dimensions], "a backward pass", ())

        out.register_hook(agree)  # type: ignore[no-untyped-call]
    return out


def check_mesh(mesh: object) -> None:
    """Raises unless ``mesh`` is a mesh of dimensions whose names are known.

    Raises:
        TypeError: Not a DeviceMesh.
        ValueError: Names that mean nothing here, or none.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            "mesh must be a torch.distributed.device_mesh.DeviceMesh: got "
            f"{type(mesh).__name__}; init_device_mesh makes one"
        )
    names = mesh.mesh_dim_names
    strange = [name for name in names or () if name not in DIMENSIONS]
    if not names or strange:
        raise ValueError(
            f"mesh dimensions are named, and may be {', '.join(DIMENSIONS)}: got "
            f"{', '.join(strange) if names else 'none named'}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} of the job is not on the mesh, which holds {mesh.size()} of "
            f"{dist.get_world_size()} processes: make a mesh of all"
        )


def check_same(ranks: Ranks, name: str, values: Sequence[int], hint: str = "") -> None:
    """Raises on every rank where one has another value.

    Raises:
        RankError: Names the first rank that differs from rank 0, and both values.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            raise RankError(
                f"{name} must be the same on all ranks of {ranks.name!r}: got {values[0]} on rank "
                f"{ranks.global_rank(0)} and {value} on rank {ranks.global_rank(rank)}{hint}"
            )


def check_spread(ranks: Ranks, name: str, lengths: Sequence[int], wanted: Sequence[int]) -> None:
    """Raises on every rank where one holds another number of tokens than its order gives it.

    Raises:
        RankError: Names the rank, and what it holds and should hold.
    """
    for rank, (has, should) in enumerate(zip(lengths, wanted, strict=True)):
        if has != should:
            raise RankError(
                f"rank {ranks.global_rank(rank)} holds {has} tokens of {name} and should hold "
                f"{should} of {sum(lengths)}: the ranks of {ranks.name!r} hold {shown(lengths)}; "
                "parallel.shard gives every rank its tokens"
            )


def fingerprint(*values: object) -> int:
    """A number that differs where values differ: as ``repr`` says, and tensors as ``content``."""
    said = repr([_described(value) for value in values])
    return zlib.crc32(re.sub(r" at 0x[0-9a-fA-F]+", "", said).encode())


def _described(value: object) -> object:
    """A value whose ``repr`` tells it from others, with tensors as numbers."""
    if isinstance(value, Tensor):
        return content(value)
    if isinstance(value, list | tuple):
        return [_described(each) for each in value]
    if isinstance(value, PerRow):
        return _described(value.values)
    if isinstance(value, Mask):
        parts = [(part, name) for part in value.walk() for name in part.arguments or ()]
        return repr(value), [_described(getattr(part, name, None)) for part, name in parts]
    if isinstance(value, Bias):
        return repr(value), [content(x) for x in value.tensors]
    return value


def content(x: Tensor | None) -> int:
    """A number that differs where shapes, dtypes or whole numbers differ, of some of very many."""
    if x is None:
        return 0
    facts = [*x.shape, str(x.dtype), torch.is_grad_enabled() and x.requires_grad]
    said = zlib.crc32(repr(facts).encode())
    if x.is_floating_point() or x.is_meta:
        return said
    x = x.detach().flatten()[:: max(1, x.numel() // _SAMPLE)]
    return zlib.crc32(x.cpu().contiguous().numpy().tobytes(), said)


def unsupported(feature: str) -> UnsupportedError:
    """The error for something that parallel computation does not support."""
    return UnsupportedError(f"polyhead.parallel cannot do {feature}")
