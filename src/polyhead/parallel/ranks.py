"""The processes of one mesh dimension: whether they agree on a call, and which one has ended.

If one rank refuses a call, all refuse it: before any other exchange, ranks exchange a short note of
what each is about to do, and each reads all notes. So a wrong shape on one rank is an error on all,
within one exchange, and no rank waits for a message that never comes.
"""

from __future__ import annotations

import os
import re
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyhead.checks import shown
from polyhead.errors import PolyheadError, UnsupportedError

DIMENSIONS = ("data", "shard", "context", "tensor", "expert")
"""Known names of mesh dimensions, and the use of each."""

AVERAGED = ("data", "shard", "context", "expert")
"""Dimensions over which gradients are averaged."""

_WORDS = 256
"""Most bytes of a refusal that are sent to other ranks."""


_PROCESSES: dict[int, tuple[int, int]] = {}
"""Machine and process number of each rank that has agreed with this one."""

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

    def agree(self, facts: Sequence[int], refused: Exception | None = None) -> list[list[int]]:
        """Every rank's facts; what one rank refuses, all refuse.

        Args:
            facts: Whole numbers, as many on every rank.
            refused: What this rank will not do.

        Raises:
            RankError: Another rank refused; says which and why.
            Exception: ``refused`` itself, on the rank that gave it.
        """
        who = [zlib.crc32(socket.gethostname().encode()), os.getpid()]
        words = str(refused)
        if refused is not None and not isinstance(refused, RankError):  # which names a rank already
            words = f"rank {self.global_rank(self.rank)} refused: {words}"
        said = words.encode()[:_WORDS] if refused is not None else b""
        numbers = [len(said) if refused is not None else -1, *who, *facts]
        note = torch.zeros(8 * len(numbers) + _WORDS, dtype=torch.uint8)
        note[: 8 * len(numbers)] = torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)
        if said:
            note[8 * len(numbers) :][: len(said)] = torch.frombuffer(
                bytearray(said), dtype=torch.uint8
            )
        notes = [torch.empty_like(note, device=self.device) for _ in range(self.size)]
        with self.watched("an agreement"):
            dist.all_gather(notes, note.to(self.device), group=self.group)
        read = [x.cpu() for x in notes]
        found = [x[: 8 * len(numbers)].view(torch.int64).tolist() for x in read]
        for number, (_, host, process, *_) in zip(self.numbers, found, strict=True):
            _PROCESSES[number] = host, process
        if refused is not None:
            raise refused
        for rank, (length, *_) in enumerate(found):
            if length >= 0:
                said = bytes(read[rank][8 * len(numbers) :][:length].tolist())
                raise RankError(said.decode(errors="replace"))
        return [rest for _, _, _, *rest in found]

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """If an exchange fails, names the process that has ended."""
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
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return not os.path.isdir("/proc/self")
    except OSError:
        return True


Check = Callable[[Sequence[Sequence[int]]], None]
"""Raises where the facts of the ranks of a dimension do not go together."""


def agreed(
    checks: Sequence[tuple[Ranks, Check]], facts: Sequence[int], refused: Exception | None = None
) -> None:
    """Tells facts over several dimensions; what one rank of the mesh refuses, all refuse.

    One dimension after the other: what a rank hears over one it refuses over the next, so that no
    rank goes on alone.

    Args:
        checks: Dimensions and what is asked of the facts of each one's ranks. Facts that may differ
            over a dimension come after those that must be alike over the others.
        facts: As of ``Ranks.agree``.
        refused: What this rank will not do.

    Raises:
        RankError: Another rank refused, or facts do not go together; names the rank.
        Exception: ``refused`` itself, on the rank that gave it.
    """
    for ranks, check in checks:
        try:
            check(ranks.agree(facts, refused))
        except Exception as error:
            refused = error
    if refused is not None:
        raise refused


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
    """A number that differs where values differ, as their ``repr`` says; addresses do not count."""
    return zlib.crc32(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(values)).encode())


def content(x: Tensor | None) -> int:
    """A number that differs where whole numbers differ; of other tensors, where shapes do."""
    if x is None or x.is_floating_point():
        return fingerprint(None if x is None else (list(x.shape), x.dtype))
    return zlib.crc32(x.detach().cpu().contiguous().numpy().tobytes())


def unsupported(feature: str) -> UnsupportedError:
    """The error for something that parallel computation does not support."""
    return UnsupportedError(f"polyhead.parallel cannot do {feature}")
