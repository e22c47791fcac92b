"""A device that is not the CPU and computes all the same: what is copied to the host is counted.

    with far.Away() as away:
        x = torch.ones(3, device=far.DEVICE)
        x.sum().item()
    away.bytes == 4

Its tensors hold a tensor of the CPU and say that they lie on torch's device ``lazy``, of which
nothing else is used. As on a GPU, an operation that has tensors of both is an error unless that of
the CPU is a single number, and whoever wants the number or the place of something waits for it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy")
WAITING = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal",
    "aten::masked_select", "aten::_unique2", "aten::unique_dim",
}  # fmt: skip
"""Operations that a device answers to the host."""


class Far(torch.Tensor):
    """A tensor of the device; ``here`` is what it holds."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> Far:
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls, here.shape, strides=here.stride(), dtype=here.dtype, device=DEVICE
            )
        made.here = here
        return made

    def __getitem__(self, index: Any) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        lists = tuple(_tensor(x, device=DEVICE) if isinstance(x, list) else x for x in parts)
        return super().__getitem__(lists)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **options: Any) -> Any:
        raise TypeError("a tensor of a device must be copied to the host first")

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, None)


class Away(TorchDispatchMode):
    """While it lasts there is the device.

    Attributes:
        bytes: Copied from it to the host.
        waits: How often the host waited for it, by what for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> Away:
        self._own = torch.is_autocast_enabled, torch.tensor
        torch.is_autocast_enabled, torch.tensor = _is_autocast_enabled, _tensor
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.is_autocast_enabled, torch.tensor = self._own
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        TorchDispatchMode.__enter__(self)  # inference mode shows operations made of others whole
        try:
            made = func.decompose(*args, **(kwargs or {}))
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)
        return _run(func, args, kwargs or {}, self) if made is NotImplemented else made


def _is_autocast_enabled(kind: str | None = None, own: Any = torch.is_autocast_enabled) -> bool:
    """Torch knows no autocast of this device, and says so by an error."""
    return kind != DEVICE.type and (own() if kind is None else own(kind))


def _tensor(data: Any, *, device: Any = None, own: Any = torch.tensor, **options: Any) -> Any:
    """Torch copies numbers to a device where no mode sees it."""
    if device is None or torch.device(device).type != DEVICE.type:
        return own(data, device=device, **options)
    return own(data, **options).to(device)


def _run(func: Any, args: Any, kwargs: dict[str, Any], seen: Away | None) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    far = [x for x in tensors if isinstance(x, Far)]
    asked, name = kwargs.get("device"), func._schema.name
    goes = bool(far) if asked is None else torch.device(asked).type == DEVICE.type
    if asked is not None and goes:
        kwargs = kwargs | {"device": torch.device("cpu")}
    copies = name in ("aten::_to_copy", "aten::copy_")
    if name == "aten::copy_":
        goes = isinstance(args[0], Far)
    near = [x for x in tensors if not isinstance(x, Far)]
    if far and not copies:
        index = name.startswith(("aten::index", "aten::_index"))
        if any(x.ndim and not (index and x is not args[0]) for x in near):
            raise RuntimeError(f"{name}: tensors on two devices")
    if seen is not None and far:
        if copies and not goes:
            seen.waits[name] += 1
            seen.bytes += max(x.numel() * x.element_size() for x in far)
        elif name in WAITING or (name.startswith("aten::index") and _chooses(args)):
            seen.waits[name] += 1
            seen.bytes += 8
    args, kwargs = tree_map(_here, (args, kwargs))
    out = func(*args, **kwargs)
    if name == "aten::copy_" or (func._schema.is_mutable and isinstance(out, torch.Tensor)):
        return _same(out, tensors) if out is not None else None
    return tree_map(lambda x: Far(x) if goes and isinstance(x, torch.Tensor) else x, out)


def _chooses(args: Any) -> bool:
    """Whether an index is one of truth values, which are counted first."""
    return any(
        x.dtype in (torch.bool, torch.uint8)
        for x in tree_leaves(args[1:])
        if isinstance(x, torch.Tensor)
    )


def _same(out: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
    """The tensor that an operation wrote to, as it was given."""
    for x in tensors:
        if _here(x) is out:
            return x
    raise RuntimeError("an operation that writes returned another tensor")


def _here(x: Any) -> Any:
    return x.here if isinstance(x, Far) else x
