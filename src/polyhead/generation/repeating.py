"""Decoding without waiting for the device: the last token, its position and the cache stay there.

    ids, at → model → logits → drawn token → ids, at + 1

Nothing in this step depends on a number that Python knows: keys are written where ``at`` says, the
causal mask ends at it, and the token is drawn on the device. So the operations of one step are
those of all steps until the cache moves, and a graph of them can be replayed (``graphs.py``).
Tokens are copied to the host a few steps behind, so that neither waits for the other.

Shape letters: W vocabulary size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead.errors import UnsupportedError
from polyhead.generation.graphs import Graph, Maker
from polyhead.generation.sampling import NO_TOKEN, Sampler
from polyhead.kernels import SwitchedOffError
from polyhead.semantics.tokens import repeated

if TYPE_CHECKING:
    from polyhead.caches import ModelCache
    from polyhead.models import Transformer

AHEAD = 4
"""Steps that the device may be ahead of the reader; as many may be computed in vain at the end."""


class RepeatedStep:
    """One step of decoding, a function of tensors alone.

    Args:
        model: The decoder, in evaluation mode.
        cache: One row, dense, and not empty.
        sampler: How tokens are drawn.
        kernel: The one kernel of attention.

    Attributes:
        ids: ``[1, 1]`` the last token.
        at: ``[1]`` its position.
        token: ``[1]`` the same token, or −1 where none could be drawn.
        logits: ``[W]`` of the last step.
        held: What the last step read beside weights, cache and these tensors.
    """

    def __init__(
        self, model: Transformer, cache: ModelCache, sampler: Sampler, kernel: str
    ) -> None:
        self.model, self.cache, self.sampler, self.kernel = model, cache, sampler, kernel
        like = model.embedding.like
        self.ids = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
        self.at = torch.full((1,), cache.length, device=like.device)
        self.token = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.held: list[Any] = []
        self.logits = torch.zeros(model.config.vocab_size, dtype=like.dtype, device=like.device)

    def __call__(self) -> None:
        """Reads the last token and draws the next; the caller counts it in the cache."""
        self._drawn_from(self.read(self.ids, self.at))

    @torch.inference_mode()
    def begin(self, logits: Tensor) -> None:
        """Draws the first token from the logits ``[W]`` after the prompt."""
        self.logits.copy_(logits)
        self.draw()

    def append(self) -> None:
        """The same by an ordinary call, which waits; it counts the token and makes room."""
        self._drawn_from(self.model(self.ids, cache=self.cache, last=1)[0, -1])

    def read(self, ids: Tensor, at: Tensor) -> Tensor:
        """Logits ``[W]`` after a token; its keys and values are written at its position."""
        with repeated(self.cache.capacity) as step:
            self.held = step.held
            logits = self.model(ids, positions=at, cache=self.cache, last=1, kernel=self.kernel)
        last: Tensor = logits[0, -1]
        return last

    def draw(self) -> None:
        """Draws the next token from ``logits``."""
        self.token.copy_(self.sampler.drawn(self.logits))
        self.ids[0].copy_(self.token.clamp(min=0))

    def _drawn_from(self, logits: Tensor) -> None:
        self.logits.copy_(logits)
        self.at.add_(1)
        self.draw()


class Repeating:
    """Runs the step again and again, from a graph where one can be made.

    Args:
        step: Its tensors stay where they are.
        make: Records a graph.
        objection: Why no graph may be recorded now, or None.

    Attributes:
        graph: What runs now; None: the step itself.
        why: Why there will be no graph, or None.
    """

    def __init__(
        self, step: RepeatedStep, make: Maker, objection: Callable[[], str | None]
    ) -> None:
        self.step = step
        self.graph: Graph | None = None
        self.why: str | None = None
        self._make, self._objection = make, objection
        self._warm = 0
        self._ordinary = False

    @torch.inference_mode()
    def advance(self) -> None:
        """One more step; it waits for nothing unless the cache moves or a graph is recorded."""
        step, cache = self.step, self.step.cache
        with cache.in_use:
            if self._ordinary or not cache.grow():
                self.graph, self._warm = None, 0
                step.append()
            elif self.graph is not None and self.graph.is_valid():
                self.graph.replay()
            elif self.why is not None or self._objection() is not None:
                self.graph, self._warm = None, 0
                self._run()
            elif self._warm != cache.capacity:
                # Compiles, fills tables and finds memory, which a graph cannot.
                self.graph, self._warm = None, cache.capacity
                self._run()
            else:
                self._record()

    def _run(self) -> None:
        try:
            self.step()
        except (SwitchedOffError, UnsupportedError) as error:
            self.why, self._ordinary = str(error), True
            self.step.cache.rollback(1)
            self.step.append()

    def _record(self) -> None:
        """Records a graph, runs it once, and compares its logits with those of the step itself."""
        step, generator = self.step, self.step.sampler.generator
        ids, at = step.ids.clone(), step.at.clone()
        drawn = None if generator is None else generator.get_state()
        try:
            graph = self._make(step, step.model, generator)
        except Exception as error:  # whatever a driver raises: the step itself runs
            self.why = f"a graph cannot be recorded: {error}"
            self._run()
            return
        graph.replay()
        # The step writes the same keys and values to the same place again, and draws nothing.
        expected = step.read(ids, at)
        if agree(step.logits, expected):
            self.graph = graph
            return
        self.why = "a graph of the step computes other logits than the step"
        if generator is not None and drawn is not None:
            generator.set_state(drawn)
        step.logits.copy_(expected)
        step.draw()


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether logits are equal but for rounding: other orders of the same sums."""
    scale = expected.float().abs().max()
    most = max(8 * torch.finfo(expected.dtype).eps, 1e-4) * scale
    return bool(((found.float() - expected.float()).abs() <= most).all())


def tokens_of(
    running: Repeating, first: Tensor, stop_ids: Collection[int], most: int
) -> Iterator[int]:
    """The tokens of a text as they arrive, a stop token included; the cache then ends before it.

    Args:
        running: The step.
        first: Logits ``[W]`` after the prompt.
        stop_ids: Tokens that end the text.
        most: Tokens at most, at least 1.

    Raises:
        ValueError: Logits that nothing can be drawn from.
    """
    step, asked, read = running.step, 0, 0
    before = step.cache.length
    free = [_Slot(first.device) for _ in range(AHEAD)]
    waiting: deque[_Slot] = deque()
    try:
        while read < most:
            while free and asked < most and (read or not asked):  # the first is read at once
                if asked:
                    running.advance()
                else:
                    step.begin(first)
                waiting.append(free.pop())
                waiting[-1].send(step.token)
                asked += 1
            token = waiting[0].read()
            free.append(waiting.popleft())
            if token < 0:
                raise ValueError(NO_TOKEN)
            read += 1
            yield token
            if token in stop_ids:
                return
    finally:
        step.cache.crop(before + max(0, read - 1))


class _Slot:
    """Where one token goes on the host."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._host = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=cuda)
        self._stream = torch.cuda.current_stream(device) if cuda else None
        self._sent = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def send(self, token: Tensor) -> None:
        """Copies a token when the device has it."""
        self._host.copy_(token, non_blocking=True)
        if self._sent is not None:
            self._sent.record(self._stream)

    def read(self) -> int:
        """The token, waited for if need be."""
        if self._sent is not None:
            self._sent.synchronize()
        return int(self._host)
