"""The step of the last token taken again: what a model does for every token but the first few.

While all layers of a model run natively and their caches grow by one token each, nothing of a step
is new but its token, its position and the rotation. Native code keeps what it has read of the last
step; Python counts the tokens of all layers at once (``caches/together.py``) and checks what native
code cannot see. Whatever is not as it was is for ``decode_plan`` to look at layer by layer.

Shape letters: B batch, E embed size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from polyhead.caches import SequenceCache, StoredCache
from polyhead.caches.in_use import AllInUse
from polyhead.caches.together import Together
from polyhead.config import RopeConfig
from polyhead.layers.native_attention import ROPE
from polyhead.layers.native_layer import NETWORK, NativeLayer
from polyhead.layers.positions import RoPE
from polyhead.native import Code
from polyhead.native.arguments import Guard

if TYPE_CHECKING:
    from polyhead.layers.fused_layers import PlannedLayer


class RepeatedStep:
    """The last step of one token through all layers of a plan.

    Args:
        code: Native code.

    Attributes:
        code: The same.
        run: What native code has read of that step.
    """

    def __init__(self, code: Code) -> None:
        self.code, self.run = code, code.run()
        self._together: Together | None = None
        self._known: list[NativeLayer] = []
        self._rotations: list[tuple[RoPE, RopeConfig | None, int]] = []
        self._max_position = 0.0

    def forget(self) -> None:
        """The next step is another one."""
        self._together = None

    def keep(
        self, x: Tensor, guard: Guard, known: Iterable[NativeLayer], caches: Sequence[StoredCache]
    ) -> None:
        """Remembers a step that was just computed to its end, if it can be taken again.

        Args:
            x: ``[B, 1, E]``.
            guard: What was unchanged beside the layers' own.
            known: All layers of the plan; none takes a bias or attends to a context.
            caches: Of each, locked.
        """
        self._known = [*known]
        if not Together.fits(caches) or any(each.hooked for each in self._known):
            return
        self._like, self._guard = (x.dtype, x.shape), guard
        turned = {k.rotation_key: k for k in self._known if k.rope is not None}
        self._rotations = [
            (k.rope, k.rope_config, k.heads.rotary) for k in turned.values() if k.rope is not None
        ]
        self._max_position = min(each.max_position for each in self._known)
        self._together = Together(caches, FIELDS)

    def take(
        self,
        x: Tensor,
        guard: Guard | None,
        planned: Sequence[PlannedLayer],
        caches: Sequence[SequenceCache | None],
    ) -> tuple[Tensor, int] | None:
        """``[B, 1, E]`` and the parts that were computed; None, and nothing is done, otherwise.

        Args:
            x: ``[B, T, E]``, which the code may compute on.
            guard: That of the plan.
            planned: Its layers.
            caches: Of each.
        """
        together = self._together
        if (
            together is None
            or guard is None
            or guard is not self._guard
            or (x.dtype, x.shape) != self._like
            or not together.are(caches)
        ):
            return None
        for each, known in zip(planned, self._known, strict=True):
            if each.known is not known:
                return None
        with AllInUse(caches):
            memories, start = together.memories(caches), together.length
            if memories is None or start >= self._max_position:
                return None
            rotations = []
            for rope, config, rotary in self._rotations:
                if rope.config is not config or not ROPE.is_exact(rope):
                    return None
                rotations.append(rope.tables_at(x, start, 1, rotary))
            y, done = self.code.again(x, guard, self.run, start, tuple(rotations))
            if not done:
                return None
            written = -(-done // NETWORK)
            together.count(caches, memories[:written], 1)
        return y, done


FIELDS = len(vars(StoredCache()))
"""Attributes of a cache: one more stands for a method that was replaced on it."""
