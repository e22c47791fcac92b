"""Decoding without waiting for the device: the last token, its position and the cache stay there.

    ids, at → model → logits → drawn token → ids, at + 1

Nothing in this step depends on a number that Python knows: keys are written where ``at`` says, the
causal mask ends at it, and the token is drawn on the device. So the operations of one step are
those of all steps until the cache moves, and a graph of them can be replayed (``graphs.py``).
Tokens are copied to the host a few steps behind, so that neither waits for the other.

Several texts are rows of one step, which a row that has ended goes on with until all have: nobody
waits to hear of it.

Shape letters: N rows, W vocabulary size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead.errors import UnsupportedError
from polyhead.generation.decoding import graphs
from polyhead.generation.decoding.graphs import Graph, Maker
from polyhead.generation.decoding.sampling import NO_TOKEN, Sampler
from polyhead.kernels import SwitchedOffError
from polyhead.semantics.tokens import capturing

if TYPE_CHECKING:
    from polyhead.caches import ModelCache
    from polyhead.generation.decoding.steps import DecoderSteps
    from polyhead.models import Transformer

AHEAD = 4
"""Steps that the device may be ahead of the reader; as many may be computed in vain at the end."""


class CapturedStep:
    """One step of decoding, a function of tensors alone.

    Args:
        model: The decoder, in evaluation mode.
        cache: Rows of equal length, dense, and not empty.
        samplers: How the tokens of each row are drawn.
        kernel: The one kernel of attention.

    Attributes:
        ids: ``[N, 1]`` the last tokens.
        at: ``[1]`` their position.
        token: ``[N]`` the same tokens, or −1 where none could be drawn.
        logits: ``[N, W]`` of the last step.
        held: What the last step read beside weights, cache and these tensors.
    """

    def __init__(
        self, model: Transformer, cache: ModelCache, samplers: Sequence[Sampler], kernel: str
    ) -> None:
        self.model, self.cache, self.samplers, self.kernel = model, cache, samplers, kernel
        like, rows = model.embedding.like, len(samplers)
        self.ids = torch.zeros(rows, 1, dtype=torch.int64, device=like.device)
        self.at = torch.full((1,), cache.length, device=like.device)
        self.token = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self.held: list[Any] = []
        size = rows, model.config.num_logits
        self.logits = torch.zeros(size, dtype=like.dtype, device=like.device)

    @property
    def generators(self) -> list[torch.Generator]:
        """What the step draws from."""
        found = (sampler.generator for sampler in self.samplers)
        return [generator for generator in found if generator is not None]

    def __call__(self) -> None:
        """Reads the last token and draws the next; the caller counts it in the cache."""
        self._drawn_from(self.read(self.ids, self.at))

    @torch.inference_mode()
    def begin(self, logits: Tensor) -> None:
        """Draws the first tokens from the logits ``[N, W]`` after the prompts."""
        self.logits.copy_(logits)
        self.draw()

    def append(self) -> None:
        """The same by an ordinary call, which waits; it counts the token and makes room."""
        self._drawn_from(self.model(self.ids, cache=self.cache, last=1)[:, -1])

    def read(self, ids: Tensor, at: Tensor) -> Tensor:
        """Logits ``[N, W]`` after tokens; keys and values are written at their position."""
        with capturing(self.cache.capacity) as step:
            self.held = step.held
            logits = self.model(ids, positions=at, cache=self.cache, last=1, kernel=self.kernel)
        last: Tensor = logits[:, -1]
        return last

    def draw(self) -> None:
        """Draws the next tokens from ``logits``."""
        rows = zip(self.samplers, self.logits, strict=True)
        self.token.copy_(torch.cat([sampler.drawn(row) for sampler, row in rows]))
        self.ids[:, 0].copy_(self.token.clamp(min=0))

    def _drawn_from(self, logits: Tensor) -> None:
        self.logits.copy_(logits)
        self.at.add_(1)
        self.draw()


class StepReplayer:
    """Runs the step again and again, from a graph where one can be made.

    Args:
        step: Its tensors stay where they are.
        make: Records a graph.
        unsupported_reason: Why no graph may be recorded now, or None.

    Attributes:
        graph: What runs now; None: the step itself.
        why: Why there will be no graph, or None.
    """

    def __init__(
        self, step: CapturedStep, make: Maker, unsupported_reason: Callable[[], str | None]
    ) -> None:
        self.step = step
        self.graph: Graph | None = None
        self.why: str | None = None
        self._make, self._unsupported_reason = make, unsupported_reason
        self._warm = 0
        self._ordinary = False

    @torch.inference_mode()
    def advance(self) -> None:
        """One more step; it waits for nothing unless the cache moves or a graph is recorded."""
        step, cache = self.step, self.step.cache
        with cache.in_use:
            if self._ordinary or not cache.reserve_slots():
                self.graph, self._warm = None, 0
                step.append()
            elif self.graph is not None and self.graph.is_valid():
                self.graph.replay()
            elif self.why is not None or self._unsupported_reason() is not None:
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
        step, generators = self.step, self.step.generators
        ids, at = step.ids.clone(), step.at.clone()
        drawn = [generator.get_state() for generator in generators]
        try:
            graph = self._make(step, step.model, generators)
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
        for generator, state in zip(generators, drawn, strict=True):
            generator.set_state(state)
        step.logits.copy_(expected)
        step.draw()


def replayer(steps: DecoderSteps, samplers: Sequence[Sampler]) -> StepReplayer:
    """Runs the steps of a decoder whose prompts have been read.

    Args:
        steps: Its rows are of equal length.
        samplers: One for each row.
    """
    model, cache = steps.model, steps.cache
    step = CapturedStep(model, cache, samplers, graphs.KERNEL)
    make = graphs.MAKERS[step.ids.device.type]
    return StepReplayer(step, make, lambda: graphs.unsupported_reason(model, cache))


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether logits are equal but for rounding: other orders of the same sums."""
    scale = expected.float().abs().max()
    most = max(8 * torch.finfo(expected.dtype).eps, 1e-4) * scale
    return bool(((found.float() - expected.float()).abs() <= most).all())


def tokens_of(
    running: StepReplayer, first: Tensor, stop_ids: Collection[int], most: int
) -> Iterator[tuple[int, int]]:
    """``(row, token)`` as they arrive, as ``search.draw`` gives them; a row ends by a stop token.

    The cache then ends before the last tokens.

    Args:
        running: The captured step that runs.
        first: Logits ``[N, W]`` after the prompts.
        stop_ids: Tokens that end a text.
        most: Tokens of a row at most, at least 1.

    Raises:
        ValueError: Logits that nothing can be drawn from.
    """
    step, asked, read = running.step, 0, 0
    before, left = step.cache.length, [*range(len(first))]
    free = [_Slot(step.token) for _ in range(AHEAD)]
    waiting: deque[_Slot] = deque()
    try:
        while left and read < most:
            while free and asked < most and (read or not asked):  # the first is read at once
                if asked:
                    running.advance()
                else:
                    step.begin(first)
                waiting.append(free.pop())
                waiting[-1].send(step.token)
                asked += 1
            tokens = waiting[0].read()
            free.append(waiting.popleft())
            if any(tokens[row] < 0 for row in left):
                raise ValueError(NO_TOKEN)
            read += 1
            for row in left:
                yield row, tokens[row]
            left = [row for row in left if tokens[row] not in stop_ids]
    finally:
        step.cache.crop(before + max(0, read - 1))


class _Slot:
    """Where the tokens of a step go on the host.

    Args:
        like: Those on the device.
    """

    def __init__(self, like: Tensor) -> None:
        device, cuda = like.device, like.is_cuda
        self._host = torch.zeros(like.shape, dtype=torch.int64, device="cpu", pin_memory=cuda)
        self._stream = torch.cuda.current_stream(device) if cuda else None
        self._sent = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def send(self, tokens: Tensor) -> None:
        """Copies tokens when the device has them."""
        self._host.copy_(tokens, non_blocking=True)
        if self._sent is not None:
            self._sent.record(self._stream)

    def read(self) -> list[int]:
        """The tokens, waited for if need be."""
        if self._sent is not None:
            self._sent.synchronize()
        found: list[int] = self._host.tolist()
        return found
