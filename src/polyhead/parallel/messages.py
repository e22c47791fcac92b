"""Messages from the first rank of a mesh dimension to the others: JSON and tensors.

    8 bytes   length of the JSON
    8 bytes   length of the tensors
    JSON      in which ``{"tensor": [dtype, shape]}`` stands for a tensor
    tensors   their bytes, one after the other

Nothing is pickled. Most messages are one packet of ``_PACKET`` bytes; what is left of a longer one
follows in a second.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyhead.parallel.ranks import Ranks, unsupported

_PACKET = 1024
_HEAD = struct.Struct("=qq")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64,
                  torch.int32, torch.uint8, torch.bool)
}  # fmt: skip

Named = Callable[[object], int | None]
"""The number of an object that both sides have; None: it is none."""


def send(ranks: Ranks, message: bytes) -> None:
    """Sends what ``written`` wrote from the first rank, which calls this, to the others.

    Raises:
        RankError: A rank is gone.
    """
    whole = torch.frombuffer(bytearray(message.ljust(_PACKET, b"\0")), dtype=torch.uint8)
    _broadcast(ranks, whole[:_PACKET])
    if len(whole) > _PACKET:
        _broadcast(ranks, whole[_PACKET:])


def receive(ranks: Ranks) -> bytes:
    """The next message; waits for it.

    Raises:
        RankError: A rank is gone, or the timeout of the process group is over.
    """
    message = _broadcast(ranks, torch.empty(_PACKET, dtype=torch.uint8, device="cpu"))
    left = _HEAD.size + sum(_HEAD.unpack_from(message)) - _PACKET
    if left > 0:
        message += _broadcast(ranks, torch.empty(left, dtype=torch.uint8, device="cpu"))
    return message


def _broadcast(ranks: Ranks, packet: Tensor) -> bytes:
    packet = packet.to(ranks.device)
    with ranks.watched(f"a message of rank {ranks.global_rank(0)}"):
        dist.broadcast(packet, ranks.global_rank(0), group=ranks.group)
    return packet.cpu().numpy().tobytes()


def written(message: Mapping[str, Any], number: Named) -> bytes:
    """A message as bytes.

    Args:
        message: Of None, numbers, texts, lists, tensors, and objects that have a number.
        number: Their numbers.

    Raises:
        UnsupportedError: Anything else, by the name of its place.
    """
    tensors: list[bytes] = []

    def plain(name: str, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            x = value.detach().cpu().contiguous()
            kind = str(x.dtype).removeprefix("torch.")
            if kind in _DTYPES:
                tensors.append(x.flatten().view(torch.uint8).numpy().tobytes())
                return {"tensor": [kind, [*x.shape]]}
        if isinstance(value, Mapping):
            return {"mapping": {key: plain(key, each) for key, each in value.items()}}
        if isinstance(value, Sequence):
            return [plain(name, each) for each in value]
        if (found := number(value)) is not None:
            return {"object": found}
        raise unsupported(f"{name}={type(value).__name__} in a call that other ranks are told")

    said = json.dumps({name: plain(name, value) for name, value in message.items()}).encode()
    return b"".join((_HEAD.pack(len(said), sum(map(len, tensors))), said, *tensors))


def read(message: bytes, objects: Mapping[int, Any], device: torch.device) -> dict[str, Any]:
    """What ``written`` wrote.

    Args:
        message: Its bytes.
        objects: By their numbers.
        device: Where tensors of numbers with a fraction go; others stay on the CPU, as ids do.
    """
    length, _ = _HEAD.unpack_from(message)
    place = _HEAD.size + length

    def found(value: Any) -> Any:
        nonlocal place
        if isinstance(value, list):
            return [found(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "object" in value:
            return objects[value["object"]]
        if "mapping" in value:
            return {key: found(each) for key, each in value["mapping"].items()}
        kind, shape = value["tensor"]
        dtype, count = _DTYPES[kind], math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        start, place = place, place + count * dtype.itemsize
        x = torch.frombuffer(bytearray(message[start:place]), dtype=dtype).view(shape)
        return x.to(device) if dtype.is_floating_point else x

    said = json.loads(message[_HEAD.size : _HEAD.size + length])
    return {name: found(value) for name, value in said.items()}
