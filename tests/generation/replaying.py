"""A graph of a step without a GPU: torch's operations are recorded and run again on their tensors.

What is replayed sees no Python: an operation gets the very tensors and numbers of its recording,
and its result goes to where it went then. So a step that took a number from the host, or a tensor
that is not there any more, repeats what is wrong now, as a CUDA graph would.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyhead.generation.decoding import graphs

WAITING = {
    "aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal",
    "aten::_unique2", "aten::masked_select", "aten::lift_fresh", "aten::lift_fresh_copy",
    "aten::repeat_interleave",
}  # fmt: skip
"""What reads from a device, or copies numbers of Python to it, and waits."""


def tensors(found):
    return [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]


def storages(found):
    return {x.untyped_storage()._cdata for x in tensors(found)}


class Recording(TorchDispatchMode):
    """Every operation with its arguments and where its result went."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, out))
        return out

    @property
    def names(self):
        """Of operations; repeating by a whole number waits for nothing."""
        functions = {func for func, *_ in self.operations}
        return {each._schema.name for each in functions if each._overloadname != "self_int"}


class Replayed(graphs.Recorded):
    """In the place of ``CudaGraph``."""

    made: ClassVar[list[Replayed]] = []

    def __init__(self, step, model, generators):
        super().__init__(model)
        state = [(x, x.clone()) for x in (step.ids, step.at, step.token, step.logits)]
        drawn = [generator.get_state() for generator in generators]
        with Recording() as seen:
            step()
        for x, before in state:  # recording a CUDA graph computes nothing
            x.copy_(before)
        for generator, before in zip(generators, drawn, strict=True):
            generator.set_state(before)
        self.operations, self.names, self.replays = seen.operations, seen.names, 0
        self.held = step.held
        Replayed.made.append(self)

    def replay(self):
        self.replays += 1
        for func, args, kwargs, out in self.operations:
            if func._schema.is_mutable:
                func(*args, **kwargs)
            elif not storages(out) & storages((args, kwargs)):  # else a view, which is there
                for there, now in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                    there.copy_(now)
